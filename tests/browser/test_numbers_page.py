"""The page of runs whose targets are numbers: R2, RMSE and MAE where accuracy is for classes."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("fastapi", reason="the live page needs the 'web' extra")

from playwright.sync_api import expect

from fedkeep.config.experiment import expand
from fedkeep.records import read_runs
from fedkeep.sim.runner import play

if TYPE_CHECKING:
    from playwright.sync_api import Page

Show = Callable[[Path], "Page"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("numbers")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 4)).astype(np.float32)
    y = 40 + 8 * x[:, 0] - 3 * x[:, 1] + rng.normal(size=400)
    np.savez(folder / "meters.npz", x=x, y=y, device=np.arange(400) % 8)
    table = {
        "task": {"name": "custom", "path": str(folder / "meters.npz"), "rounds_per_pass": 30},
        "train": {"rounds": 30, "participation": 0.5, "learning_rate": 0.1},
        "record": {"every": 10},
        "methods": ["fifo", "balanced-reservoir"],
        "sweep": {"seed": [0, 1]},
    }
    records = folder / "runs"
    records.mkdir()
    for cell in expand(table):
        play(cell, records)
    return records


def test_r2_rmse_and_mae_stand_where_accuracy_does(show: Show, runs: Path) -> None:
    page = show(runs)
    titles = page.locator("#curves figcaption strong")
    expect(titles).to_have_text(["R2", "RMSE"])
    head = page.locator("#comparison-table thead th")
    expect(head.nth(1)).to_have_text("Final R2")
    expect(head.nth(4)).to_have_text("RMSE")
    expect(head.nth(5)).to_have_text("MAE")
    found = [run for run in read_runs(runs) if run.header.method == "fifo"]
    rmse = np.mean([run.evaluations[-1].rmse for run in found])
    row = page.locator("#comparison-table tbody tr", has_text="fifo").first
    expect(row).to_contain_text(f"{rmse:.3g} ±")
    tiles = page.locator("#tiles .tile")
    expect(tiles.nth(1)).to_contain_text("R2")
    expect(tiles.nth(2)).to_contain_text("RMSE")
    expect(tiles.nth(2)).to_contain_text("MAE")
    expect(page.locator("#tiles")).not_to_contain_text("Accuracy")


def test_a_stored_sample_shows_its_number_and_interval(show: Show, runs: Path) -> None:
    page = show(runs)
    run = next(iter(read_runs(runs)))
    slot = page.locator(".slots tbody tr td").nth(1)
    assert any(name in slot.inner_text() for name in run.header.labels)
    assert slot.inner_text().split(" ")[0].replace(".", "").isdigit()
