"""What assistive technology finds on the page, by axe-core, and the report opened from a file."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("fastapi", reason="the live page needs the 'web' extra")

from playwright.sync_api import expect

from fedkeep.records import compare, read_runs
from fedkeep.web.report import html

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.fixture(scope="session")
def axe() -> str:
    """axe-core's script, from the package that carries it."""
    package = find_spec("axe_playwright_python")
    if package is None or package.origin is None:
        pytest.skip("axe-core is not installed: pip install axe-playwright-python")
    return (Path(package.origin).parent / "axe.min.js").read_text()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, fleet: dict[str, Any]) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    for method in ("ode", "fifo", "gist-local"):
        fleet["FakeRun"](directory / f"{method}.jsonl", method, devices=6).advance(20)
    return directory


def violations(page: "Page", axe: str) -> list[str]:
    page.evaluate(axe)
    found = page.evaluate("axe.run({ resultTypes: ['violations'] })")["violations"]
    return [
        f"{v['id']}: {v['nodes'][0]['html']} ({v['nodes'][0]['failureSummary']})" for v in found
    ]


@pytest.mark.parametrize(
    ("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 360), ("dark", 360)]
)
def test_axe_finds_nothing_wrong(
    show: "Callable[[Path], Page]",
    page: "Page",
    runs: Path,
    axe: str,
    scheme: Literal["light", "dark"],
    width: int,
) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 800})
    show(runs)
    expect(page.locator("#gallery td canvas").first).to_be_visible()
    page.get_by_role("combobox", name="Method", exact=True).select_option("gist-local")
    expect(page.get_by_role("heading", name="What the gist does")).to_be_visible()
    page.get_by_role("button", name="differences").click()
    page.get_by_text("Settings of this run").click()
    page.locator("#legend button").first.click()
    page.locator("#curves .plot").first.hover(position={"x": 200, "y": 80})
    assert violations(page, axe) == []


def test_axe_finds_nothing_wrong_where_there_is_nothing(
    hall: Any, page: "Page", tmp_path: Path, axe: str
) -> None:
    page.goto(hall.serve(tmp_path).url)
    expect(page.locator("#status")).to_contain_text("Waiting for a run")
    assert violations(page, axe) == []


def test_every_control_has_a_name(show: "Callable[[Path], Page]", runs: Path) -> None:
    page = show(runs)
    controls = page.locator("button:visible, select:visible, [tabindex='0']:visible")
    for control in controls.all():
        named = control.evaluate(
            "node => (node.ariaLabel || node.labels?.[0]?.textContent || node.textContent).trim()"
        )
        assert named, control.evaluate("node => node.outerHTML")


def test_a_report_opens_from_a_file_and_works_alone(
    page: "Page", runs: Path, tmp_path: Path, axe: str
) -> None:
    found = read_runs(runs)
    file = tmp_path / "report.html"
    file.write_text(
        html(found, compare(found), "my runs", ["Use ode.", "- few seeds"]), encoding="utf-8"
    )
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    expect(page.locator("#status")).to_have_text("Report of 3 runs")
    expect(page.locator("#advice p")).to_have_text(["Use ode.", "few seeds"])
    expect(page.locator("#curves figure").first.locator(".line")).to_have_count(3)
    page.get_by_role("combobox", name="Method", exact=True).select_option("fifo")
    page.get_by_role("combobox", name="Device", exact=True).select_option("4")
    expect(page.locator("#device table")).to_be_visible()
    expect(page.locator("#gallery td canvas").first).to_be_visible()
    assert asked == [file.as_uri()]
    assert violations(page, axe) == []
