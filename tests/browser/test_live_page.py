"""The live page as a person meets it, in headless Chromium."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("fastapi", reason="the live page needs the 'web' extra")

from playwright.sync_api import expect

from fedkeep.records import Device, Evaluation, Holdings, Plan, Privacy, Recorder, Round, Slot

if TYPE_CHECKING:
    from playwright.sync_api import Page

Show = Callable[[Path], "Page"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, fleet: dict[str, Any]) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    fleet["write_fleet"](directory, seeds=2, rounds=60)
    return directory


def test_it_shows_the_methods_side_by_side(show: Show, runs: Path) -> None:
    page = show(runs)
    expect(page.locator("#legend button")).to_have_text(["ode", "fifo", "reservoir", "full-data", "high-loss"])
    expect(page.locator("#comparison-table tbody tr")).to_have_count(5)
    assert page.locator("#curves .line").count() == 10
    expect(page.locator("#comparison-table tbody tr").first).to_contain_text("±")
    expect(page.locator("#status")).to_contain_text("Live")


def test_it_updates_while_a_run_is_written(show: Show, tmp_path: Path, fleet: dict[str, Any]) -> None:
    run = fleet["FakeRun"](tmp_path / "ode-0.jsonl")
    run.advance(20)
    page = show(tmp_path)
    expect(page.locator("#tiles .tile").first).to_contain_text("20")
    run.advance(20)
    expect(page.locator("#tiles .tile").first).to_contain_text("40")
    expect(page.locator("#status")).to_have_text("Live, 1 of 1 run going")
    fleet["FakeRun"](tmp_path / "fifo-0.jsonl", "fifo").advance(10)
    expect(page.locator("#legend button")).to_have_text(["ode", "fifo"])


def test_it_waits_for_the_first_run(hall: Any, page: Page, tmp_path: Path, fleet: dict[str, Any]) -> None:
    page.goto(hall.serve(tmp_path).url)
    expect(page.get_by_role("heading", name="Nothing to show yet")).to_be_visible()
    expect(page.locator("#content")).to_be_hidden()
    fleet["FakeRun"](tmp_path / "ode-0.jsonl").advance(10)
    expect(page.locator("#content")).to_be_visible()


def test_method_seed_and_device_can_be_switched(show: Show, runs: Path) -> None:
    page = show(runs)
    expect(page.get_by_role("combobox", name="Method", exact=True)).to_have_value("ode")
    before = page.locator("#device table").inner_text()
    page.get_by_role("combobox", name="Method", exact=True).select_option("fifo")
    expect(page.get_by_role("combobox", name="Seed", exact=True)).to_have_value("fifo-0")
    expect(page.locator("#device table")).not_to_have_text(before)
    page.get_by_role("combobox", name="Seed", exact=True).select_option("fifo-1")
    page.get_by_role("combobox", name="Device", exact=True).select_option("3")
    expect(page.locator("#device")).to_contain_text("as of round 60")
    assert page.locator("#device canvas").count() > 0


def test_kept_images_stand_beside_each_other(show: Show, runs: Path) -> None:
    page = show(runs)
    heads = page.locator("#gallery thead th")
    expect(heads.nth(1)).to_contain_text("ode")
    expect(heads.nth(2)).to_contain_text("reservoir")
    expect(page.locator("#gallery td canvas").first).to_be_visible()
    page.get_by_role("combobox", name="with", exact=True).select_option("fifo")
    expect(heads.nth(2)).to_contain_text("fifo")


def test_a_chart_can_be_read_with_the_keyboard(show: Show, runs: Path) -> None:
    page = show(runs)
    plot = page.locator("#curves .plot").first
    assert (plot.get_attribute("aria-label") or "").startswith("Accuracy: at round 60: ode ")
    plot.focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#live")).to_contain_text("round 50")
    expect(page.locator("#live")).to_contain_text("reservoir")
    page.keyboard.press("Escape")
    expect(plot.locator(".tip")).to_be_hidden()


def test_the_matrix_can_be_walked_and_opens_a_device(show: Show, runs: Path) -> None:
    page = show(runs)
    page.locator(".matrix").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    expect(page.locator("#live")).to_contain_text("device 2, trouser:")
    page.keyboard.press("Enter")
    expect(page.get_by_role("combobox", name="Device", exact=True)).to_have_value("2")
    expect(page.locator("#matrix .warning")).to_contain_text("Missing holders")


def test_the_pointer_explains_a_cell_and_a_curve(show: Show, runs: Path) -> None:
    page = show(runs)
    page.locator("#curves .plot").first.hover(position={"x": 200, "y": 80})
    expect(page.locator("#curves .tip").first).to_contain_text("(2 seeds)")
    page.locator(".matrix-rows").hover(position={"x": 60, "y": 30})
    expect(page.locator("#matrix .tip")).to_contain_text("device 1, shirt")


def test_the_legend_hides_and_shows_a_method(show: Show, runs: Path) -> None:
    page = show(runs)
    ode = page.locator("#legend").get_by_role("button", name="ode")
    expect(ode).to_have_attribute("aria-pressed", "true")
    ode.click()
    expect(ode).to_have_attribute("aria-pressed", "false")
    expect(page.locator("#curves figure").first.locator(".line")).to_have_count(4)
    ode.press("Enter")
    expect(page.locator("#curves figure").first.locator(".line")).to_have_count(5)


def test_the_axis_may_be_bytes_and_tasks_stay_apart(show: Show, tmp_path: Path, fleet: dict[str, Any]) -> None:
    for task in ("har", "synthetic"):
        fleet["FakeRun"](tmp_path / f"{task}.jsonl", task=task, images=False).advance(30)
    page = show(tmp_path)
    page.get_by_role("button", name="by bytes sent").click()
    expect(page.locator("#curves .axes").first).to_contain_text("MB")
    page.get_by_role("combobox", name="Task", exact=True).select_option("synthetic")
    expect(page.get_by_role("combobox", name="Seed", exact=True)).to_have_value("synthetic")
    expect(page.locator("#gallery-section")).to_be_hidden()


def test_it_survives_a_restart_of_the_server(
    hall: Any, page: Page, complaints: list[str], tmp_path: Path, fleet: dict[str, Any]
) -> None:
    run = fleet["FakeRun"](tmp_path / "ode-0.jsonl")
    run.advance(20)
    url = hall.serve(tmp_path).url
    page.goto(url)
    page.get_by_role("combobox", name="Device", exact=True).select_option("3")
    hall.stop()
    expect(page.locator("#status")).to_have_text("Reconnecting…")
    run.advance(20)
    hall.serve(tmp_path, port=int(url.rsplit(":", 1)[1]))
    expect(page.locator("#status")).to_contain_text("Live")
    expect(page.locator("#tiles .tile").first).to_contain_text("40")
    expect(page.get_by_role("combobox", name="Device", exact=True)).to_have_value("3")
    complaints[:] = [text for text in complaints if "Failed to load resource: net::ERR" not in text]


def test_a_token_is_asked_for_once(hall: Any, page: Page, complaints: list[str], runs: Path) -> None:
    server = hall.serve(runs, token="a-secret-of-some-length")
    refused = page.goto(server.url.split("?")[0])
    assert refused is not None
    assert refused.status == 401
    page.goto(server.url)
    expect(page.locator("#content")).to_be_visible()
    assert "token" not in page.url
    page.reload()
    expect(page.locator("#content")).to_be_visible()
    complaints[:] = [text for text in complaints if "401" not in text]


def test_sixty_runs_are_no_trouble(show: Show, tmp_path: Path, fleet: dict[str, Any]) -> None:
    for number in range(60):
        method = f"method-{number % 12}"
        fleet["FakeRun"](tmp_path / f"{number}.jsonl", method, number // 12, images=False, devices=5).advance(10)
    page = show(tmp_path)
    expect(page.locator("#legend button")).to_have_count(12)
    expect(page.get_by_role("combobox", name="Seed", exact=True).locator("option")).to_have_count(5)
    expect(page.locator("#status")).to_contain_text("60 runs")


def test_nothing_in_a_record_becomes_html(show: Show, tmp_path: Path, fleet: dict[str, Any]) -> None:
    evil = '<img src=x onerror="window.broken=1"><script>window.broken=1</script>'
    run = fleet["FakeRun"](
        tmp_path / "a.jsonl", method=evil, name=evil, task=evil, setting=evil, labels=(evil, "__proto__")
    )
    run.advance(40)
    page = show(tmp_path)
    expect(page.locator("#legend button")).to_have_text([evil])
    page.get_by_role("combobox", name="Device", exact=True).select_option("1")
    expect(page.locator("#device table")).to_be_visible()
    page.locator(".matrix").focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator("#live")).to_contain_text("<img src=x")
    assert page.locator("img").count() == 0
    assert page.evaluate("window.broken") is None


def test_odd_records_do_not_break_it(show: Show, tmp_path: Path, fleet: dict[str, Any]) -> None:
    fleet["FakeRun"](tmp_path / "bare.jsonl", "bare", labels=("a",), devices=5)
    fleet["FakeRun"](tmp_path / "none.jsonl", "none", labels=(), devices=5)
    path = tmp_path / "odd.jsonl"
    fleet["FakeRun"](path, "odd", labels=("a", "b"), devices=5, images=False)
    with Recorder(path) as recorder:
        recorder.write(Plan(round=1, devices=(0, 1, 2), quotas=((1,), ()), holders=(9,), wanted=()))
        recorder.write(Holdings(round=1, devices=(7, 1), filled=((1, 1, 1),)))
        recorder.write(Evaluation(round=1, accuracy=None, loss=None))
        recorder.write(Device(round=1, device=1, capacity=0, slots=(Slot(id=1, label=9, score=None, age=0),)))
        recorder.write(Device(round=1, device=2, capacity=1, slots=(), changes=()))
        recorder.write(Privacy(round=1, epsilon_spent=None, epsilon_left=None, delta=0.0))
        recorder.write(Round(round=1, participants=(), refused_reports={"constructor": 1}))
    page = show(tmp_path)
    for method in ("bare", "none", "odd"):
        page.get_by_role("combobox", name="Method", exact=True).select_option(method)
        expect(page.get_by_role("combobox", name="Seed", exact=True)).to_have_value(method)
    page.get_by_role("combobox", name="Device", exact=True).select_option("1")
    expect(page.locator("#device table")).to_contain_text("label 9")
    expect(page.locator("#panels")).to_contain_text("refused: constructor")


def test_a_phone_needs_no_sideways_scrolling(show: Show, page: Page, runs: Path) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    show(runs)
    expect(page.locator("#gallery td canvas").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_the_colours_can_be_chosen_and_stay(show: Show, runs: Path) -> None:
    page = show(runs)
    page.get_by_role("button", name="Colours: auto").click()
    page.get_by_role("button", name="Colours: light").click()
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
