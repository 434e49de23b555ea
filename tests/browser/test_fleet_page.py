"""The page of a fleet with a run that is played beside it, as `fedkeep fleet` starts them."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("uvicorn", reason="the live page needs the 'web' extra")

from playwright.sync_api import expect

from fedkeep.records import Evaluation, Header, Member, Members, Recorder

if TYPE_CHECKING:
    from playwright.sync_api import Page

    Show = Callable[[Path], Page]


def write_run(path: Path, method: str, accuracies: list[float], measure: str = "accuracy") -> None:
    with Recorder(path) as recorder:
        recorder.start(
            Header(
                run=path.stem, method=method, task="fleet", seed=0, config={}, config_hash="",
                versions={}, labels=("a", "b"), devices=0, rounds=1000, measure=measure,
            )
        )  # fmt: skip
        for round_, accuracy in enumerate(accuracies, start=1):
            recorder.write(Evaluation(round=round_, accuracy=accuracy, loss=1.0))


def write_members(path: Path, round_: int) -> None:
    member = Member(device=0, name="hall", online=True, seen=time.time(), stored=4, capacity=4)
    with Recorder(path) as recorder:
        recorder.write(Members(round=round_, members=(member,)))


def test_the_gain_over_the_run_beside_it_is_on_the_page(
    show: "Show", page: "Page", tmp_path: Path
) -> None:
    write_run(tmp_path / "fleet.jsonl", "balanced-reservoir", [0.5] * 5 + [0.7] * 10)
    write_run(tmp_path / "fifo.jsonl", "fifo, simulated", [0.9] * 5 + [0.65] * 9)  # a round behind
    write_members(tmp_path / "fleet.jsonl", 15)
    show(tmp_path)
    tile = page.locator("#members-tiles .tile").filter(has_text="Against fifo, simulated")
    # Nine rounds of five points ahead, and the tenth last that both have: forty behind.
    expect(tile).to_contain_text("+0.5")
    expect(tile).to_contain_text("mean of 10 evaluations")


def test_the_fleet_stays_on_the_page_while_another_run_is_looked_at(
    show: "Show", page: "Page", tmp_path: Path
) -> None:
    write_run(tmp_path / "fleet.jsonl", "balanced-reservoir", [0.5])
    write_run(tmp_path / "fifo.jsonl", "fifo, simulated", [0.4])
    write_members(tmp_path / "fleet.jsonl", 1)
    show(tmp_path)
    page.get_by_role("combobox", name="Method", exact=True).select_option("fifo, simulated")
    expect(page.locator("#members-table tbody th")).to_have_text("hall")
    expect(page.locator("#members-tiles")).to_contain_text("50.0 %")


def test_a_fleet_of_numbers_has_their_words_on_a_phone(
    show: "Show", page: "Page", tmp_path: Path
) -> None:
    write_run(tmp_path / "fleet.jsonl", "balanced-reservoir", [0.5], measure="r2")
    write_members(tmp_path / "fleet.jsonl", 1)
    page.set_viewport_size({"width": 360, "height": 740})
    show(tmp_path)
    heads = page.locator("#members-table td").evaluate_all(
        "cells => cells.map(cell => cell.dataset.head)"
    )
    assert heads == ["Now", "Last seen", "Stored", "Intervals", "R2", "Stream", "Trouble"]


def test_of_a_server_that_has_ended_nobody_is_said_to_be_online(
    show: "Show", page: "Page", tmp_path: Path
) -> None:
    path = tmp_path / "fleet.jsonl"
    write_run(path, "balanced-reservoir", [0.5])
    write_members(path, 1)
    long_ago = time.time() - 600
    os.utime(path, (long_ago, long_ago))
    show(tmp_path)
    expect(page.locator("#members-count")).to_have_text("1 of 1 online when the server last looked")
    expect(page.locator("#members-tiles")).to_contain_text("stopped")
