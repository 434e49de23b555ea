"""The live page as a person meets it, in headless Chromium."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("fastapi", reason="the live page needs the 'web' extra")

from playwright.sync_api import expect

from fedkeep.records import (
    DeviceLine,
    Evaluation,
    HoldingsLine,
    Members,
    PlanLine,
    PrivacyLine,
    Recorder,
    Round,
    Slot,
)
from fedkeep.records.lines import Member
from fedkeep.web.server import LiveServer
from tests.browser.conftest import Complaints

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

Show = Callable[[Path], "Page"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, fleet: dict[str, Any]) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    fleet["write_fleet"](directory, seeds=2, rounds=60)
    return directory


def test_it_shows_the_methods_side_by_side(show: Show, runs: Path) -> None:
    page = show(runs)
    expect(page.locator("#legend button")).to_have_text(
        ["ode", "fifo", "reservoir", "full-data", "high-loss"]
    )
    expect(page.locator("#comparison-table tbody tr")).to_have_count(5)
    assert page.locator("#curves .line").count() == 10
    expect(page.locator("#comparison-table tbody tr").first).to_contain_text("±")
    expect(page.locator("#status")).to_have_text("Finished, 10 runs")


def test_it_updates_while_a_run_is_written(
    show: Show, tmp_path: Path, fleet: dict[str, Any]
) -> None:
    run = fleet["FakeRun"](tmp_path / "ode-0.jsonl")
    run.advance(20)
    page = show(tmp_path)
    expect(page.locator("#tiles .tile").first).to_contain_text("20")
    run.advance(20)
    expect(page.locator("#tiles .tile").first).to_contain_text("40")
    expect(page.locator("#status")).to_have_text("Live, 1 running, 0 of 1 run finished")
    fleet["FakeRun"](tmp_path / "fifo-0.jsonl", "fifo").advance(10)
    expect(page.locator("#legend button")).to_have_text(["ode", "fifo"])


def test_it_waits_for_the_first_run(
    hall: Any, page: "Page", tmp_path: Path, fleet: dict[str, Any]
) -> None:
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


def test_the_axis_may_be_bytes_and_tasks_stay_apart(
    show: Show, tmp_path: Path, fleet: dict[str, Any]
) -> None:
    for task in ("har", "synthetic"):
        fleet["FakeRun"](tmp_path / f"{task}.jsonl", task=task, images=False).advance(30)
    page = show(tmp_path)
    page.get_by_role("button", name="by bytes sent").click()
    expect(page.locator("#curves .axes").first).to_contain_text("MB")
    page.get_by_role("combobox", name="Task", exact=True).select_option("synthetic")
    expect(page.get_by_role("combobox", name="Seed", exact=True)).to_have_value("synthetic")
    expect(page.locator("#gallery-section")).to_be_hidden()


def test_it_survives_a_restart_of_the_server(
    hall: Any, page: "Page", complaints: list[str], tmp_path: Path, fleet: dict[str, Any]
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


def test_a_token_is_asked_for_once(
    hall: Any, page: "Page", complaints: list[str], runs: Path
) -> None:
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
        fleet["FakeRun"](
            tmp_path / f"{number}.jsonl", method, number // 12, images=False, devices=5
        ).advance(10)
    page = show(tmp_path)
    expect(page.locator("#legend button")).to_have_count(12)
    expect(page.get_by_role("combobox", name="Seed", exact=True).locator("option")).to_have_count(5)
    expect(page.locator("#status")).to_contain_text("60 running")


def test_nothing_in_a_record_becomes_html(
    show: Show, tmp_path: Path, fleet: dict[str, Any]
) -> None:
    evil = '<img src=x onerror="window.broken=1"><script>window.broken=1</script>'
    run = fleet["FakeRun"](
        tmp_path / "a.jsonl",
        method=evil,
        name=evil,
        task=evil,
        setting=evil,
        labels=(evil, "__proto__"),
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
        recorder.write(
            PlanLine(round=1, devices=(0, 1, 2), quotas=((1,), ()), holders=(9,), wanted=())
        )
        recorder.write(HoldingsLine(round=1, devices=(7, 1), filled=((1, 1, 1),)))
        recorder.write(Evaluation(round=1, accuracy=None, loss=None))
        recorder.write(
            DeviceLine(
                round=1, device=1, capacity=0, slots=(Slot(id=1, label=9, score=None, age=0),)
            )
        )
        recorder.write(DeviceLine(round=1, device=2, capacity=1, slots=(), changes=()))
        recorder.write(PrivacyLine(round=1, epsilon_spent=None, epsilon_left=None, delta=0.0))
        recorder.write(Round(round=1, participants=(), refused_reports={"constructor": 1}))
    page = show(tmp_path)
    for method in ("bare", "none", "odd"):
        page.get_by_role("combobox", name="Method", exact=True).select_option(method)
        expect(page.get_by_role("combobox", name="Seed", exact=True)).to_have_value(method)
    page.get_by_role("combobox", name="Device", exact=True).select_option("1")
    expect(page.locator("#device table")).to_contain_text("label 9")
    expect(page.locator("#panels")).to_contain_text("rejected: constructor")


def test_a_phone_needs_no_sideways_scrolling_and_cuts_no_table(
    show: Show, page: "Page", runs: Path
) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    show(runs)
    expect(page.locator("#gallery td canvas").first).to_be_visible()
    page.locator(".settings summary").click()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    cut = (
        "found => found.filter(box => box.scrollWidth > box.clientWidth + 1)"
        ".map(box => box.ariaLabel)"
    )
    assert page.locator(".scroll").evaluate_all(cut) == []


def test_a_fleet_on_a_phone_shows_accuracy_and_trouble_first(
    browser: "Browser", complaints: Complaints, tmp_path: Path, fleet: dict[str, Any]
) -> None:
    fleet["FakeRun"](tmp_path / "fleet.jsonl", task="fleet", images=False).advance(120)
    members = [
        Member(device=0, name="hall", online=True, seen=time.time(), stored=40, capacity=48),
        Member(device=1, name="gate", online=False, refused="method-differs: " + "words " * 20),
    ]
    with Recorder(tmp_path / "fleet.jsonl") as recorder:
        recorder.write(Members(round=120, members=tuple(members)))
    trouble = "agent-1 was started again 3 times: it was killed by signal 9"
    server = LiveServer(tmp_path, port=0, troubles=lambda: (trouble,))
    thread = threading.Thread(target=server.run)
    thread.start()
    context = browser.new_context(viewport={"width": 390, "height": 844})
    try:
        page = context.new_page()
        complaints.listen(page)
        page.goto(server.url)
        expect(page.locator("#members-tiles")).to_contain_text("Accuracy")
        expect(page.locator("#troubles")).to_contain_text(trouble)
        expect(page.locator("#troubles")).to_contain_text("gate: method-differs")
        expect(page.locator("#members-table tbody th").first).to_have_text("hall")
        for what in ("#members-tiles", "#troubles"):
            box = page.locator(what).bounding_box()
            assert box is not None
            assert box["y"] + box["height"] < 844, f"{what} is on the first screen"
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert page.locator("#members-table").evaluate("box => box.scrollWidth <= box.clientWidth")
    finally:
        context.close()
        server.stop()
        thread.join(timeout=10)
    assert complaints == []


def test_a_long_status_leaves_the_name_alone_on_a_phone(
    show: Show, page: "Page", runs: Path
) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    show(runs)
    page.locator("#status").evaluate(
        "node => { node.textContent = 'Stopped, 210 of 230 runs finished' }"
    )
    name, status, theme = (
        page.locator(f".top {part}").bounding_box() for part in ("h1", "#status", "#theme")
    )
    assert name is not None
    assert status is not None
    assert theme is not None
    assert name["x"] + name["width"] <= status["x"]
    assert status["x"] + status["width"] <= theme["x"]


def test_methods_stand_against_a_chosen_one(show: Show, runs: Path) -> None:
    page = show(runs)
    table = page.locator("#comparison-table")
    expect(page.get_by_role("combobox", name="Against", exact=True)).to_have_value("fifo")
    expect(table.locator("thead")).to_contain_text("Final against fifo")
    page.get_by_role("button", name="differences").click()
    expect(page.locator("#curves figcaption").first).to_contain_text("Accuracy against fifo")
    accuracy = page.locator("#curves figure").first
    expect(accuracy.locator(".line")).to_have_count(4)
    expect(accuracy.locator(".band")).to_have_count(4)
    expect(accuracy.locator(".zero")).to_have_count(1)
    page.get_by_role("combobox", name="Against", exact=True).select_option("ode")
    expect(table.locator("tr", has_text="high-loss").locator(".verdict")).to_have_text(["▼ worse"])
    expect(page.locator("#curves figcaption").first).to_contain_text("Accuracy against ode")


def test_differences_of_seeds_that_stopped_early_stay_in_a_sensible_frame(
    show: Show, tmp_path: Path, fleet: dict[str, Any]
) -> None:
    for method, seed, rounds in (("ode", 0, 60), ("ode", 1, 30), ("fifo", 0, 60), ("fifo", 1, 60)):
        run = fleet["FakeRun"](
            tmp_path / f"{method}-{seed}.jsonl", method, seed, images=False, devices=5
        )
        run.advance(rounds)
    page = show(tmp_path)  # a path with NaN in it would be a complaint
    page.get_by_role("button", name="differences").click()
    accuracy = page.locator("#curves figure").first
    expect(accuracy.locator(".band")).to_have_count(1)
    marks = accuracy.locator(".axes text[text-anchor=end]").all_text_contents()
    points = [float(mark.replace("\u2212", "-")) for mark in marks if mark != "round"]
    assert min(points) <= 0 <= max(points)
    assert max(points) - min(points) < 100


def test_a_span_of_rounds_can_be_looked_at_closely(show: Show, runs: Path) -> None:
    page = show(runs)
    plot = page.locator("#curves .plot").first
    rounds = plot.locator(".axes text[text-anchor=middle]")
    expect(rounds).to_have_text(["20", "40", "60"])
    box = plot.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 90)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.95, box["y"] + 90, steps=5)
    page.mouse.up()
    expect(rounds).to_have_text(["40", "45", "50", "55", "60"])
    page.get_by_role("button", name="Show all").first.click()
    expect(rounds).to_have_text(["20", "40", "60"])
    plot.focus()
    page.keyboard.press("+")
    expect(rounds).to_have_text(["30", "40", "50", "60"])
    page.keyboard.press("-")
    expect(rounds).to_have_text(["20", "40", "60"])


def test_the_frame_does_not_start_at_the_untrained_model(
    show: Show, tmp_path: Path, fleet: dict[str, Any]
) -> None:
    fleet["FakeRun"](tmp_path / "ode.jsonl", images=False, devices=5).advance(300)
    page = show(tmp_path)
    marks = (
        page.locator("#curves figure")
        .first.locator(".axes text[text-anchor=end]")
        .all_text_contents()
    )
    assert "20 %" not in marks


def test_every_figure_can_be_kept(show: Show, runs: Path) -> None:
    page = show(runs)
    figures = page.locator("figure.chart")
    expect(figures.locator(".downloads")).to_have_count(figures.count())
    for place in (0, 3, 6):  # all of them would be more in a row than Chromium lets pass
        with page.expect_download() as svg:
            figures.nth(place).get_by_role("button", name="as SVG").click()
        drawn = Path(svg.value.path()).read_text()
        assert 'xmlns="http://www.w3.org/2000/svg"' in drawn
        assert 'stroke="rgb(' in drawn
        with page.expect_download() as table:
            figures.nth(place).get_by_role("button", name="as CSV").click()
        assert Path(table.value.path()).read_text().startswith("series,round,value,low,high\n")
    with page.expect_download() as comparison:
        page.get_by_role("button", name='Save "Comparison" as CSV').click()
    assert "Final against fifo" in Path(comparison.value.path()).read_text()
    with page.expect_download() as matrix:
        page.get_by_role("button", name='Save "Coordination" as CSV').click()
    assert len(Path(matrix.value.path()).read_text().splitlines()) == 21


def test_settings_are_listed_and_two_runs_differ_in_some(show: Show, runs: Path) -> None:
    page = show(runs)
    page.get_by_text("Settings of this run").click()
    expect(page.locator(".settings tbody tr")).to_have_count(3)
    page.get_by_role("combobox", name="Compare with", exact=True).select_option("fifo-0")
    expect(page.locator(".settings")).to_contain_text(
        "1 setting differs between ode, seed 0 and fifo, seed 0"
    )
    expect(page.locator(".settings tbody tr")).to_have_text(['policy.name"ode""fifo"'])


def test_keys_that_mean_nothing_alone_are_shown_as_ranks(show: Show, runs: Path) -> None:
    page = show(runs)
    expect(page.locator("#device thead")).to_contain_text("Value")
    page.get_by_role("combobox", name="Method", exact=True).select_option("fifo")
    expect(page.locator("#device thead")).to_contain_text("Rank")
    ranks = [text.strip() for text in page.locator("#device .value").all_inner_texts()]
    assert sorted(ranks) == sorted(f"{rank}." for rank in range(1, len(ranks) + 1))


def test_every_device_of_a_large_fleet_can_be_reached(
    show: Show, tmp_path: Path, fleet: dict[str, Any]
) -> None:
    fleet["FakeRun"](tmp_path / "ode.jsonl", images=False, devices=700).advance(10)
    page = show(tmp_path)
    field = page.get_by_role("spinbutton", name="Go to device")
    field.fill("699")
    field.press("Enter")
    expect(page.get_by_role("combobox", name="Device", exact=True)).to_have_value("699")
    page.locator("#matrix").scroll_into_view_if_needed()
    expect(page.locator(".matrix .chosen")).to_be_in_viewport()


def test_the_colours_can_be_chosen_and_stay(show: Show, runs: Path) -> None:
    page = show(runs)
    page.get_by_role("button", name="Colours: auto").click()
    page.get_by_role("button", name="Colours: light").click()
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")


def test_what_a_gist_does_is_shown_of_runs_that_have_one(
    show: Show, tmp_path: Path, fleet: dict[str, Any]
) -> None:
    for method in ("ode", "gist-local"):
        fleet["FakeRun"](tmp_path / f"{method}.jsonl", method, images=False, devices=5).advance(30)
    page = show(tmp_path)
    panel = page.locator("#panels .card", has_text="What the gist does")
    method = page.get_by_role("combobox", name="Method", exact=True)
    method.select_option("ode")
    expect(panel).to_be_hidden()
    method.select_option("gist-local")
    expect(panel.locator("b")).to_have_text(["60 %", "75 %", "40 samples", "35 %"])
    figure = page.locator("#panels figure", has_text="mean over participations")
    expect(figure.locator(".line")).to_have_count(3)
