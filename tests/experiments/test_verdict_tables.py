"""Words about results follow from the results."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from lab.names import STREAMS
from lab.readme import median_in_words, results_table, short_results_table
from lab.results import Paper, Results
from lab.verdict_tables import bytes_sentence, came_back, counts_table, status_table

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
PAPER = Paper(EXPERIMENTS / "paper.toml")
RESULTS = Results(EXPERIMENTS / "results", PAPER)
TITLES = {"HL": "high-loss", "FB": "fedbalancer", "ODE-Exact": "ode-exact", "ODE-Est": "ode-est"}


@pytest.mark.parametrize("task", ["ic", "har", "tc"])
@pytest.mark.parametrize("title", TITLES)
def test_a_sign_came_back_where_the_interval_is_on_the_papers_side(task: str, title: str) -> None:
    found = came_back(RESULTS, PAPER, task)
    margin = RESULTS.margin(f"table2/{task}", TITLES[title], "fifo")
    printed = [PAPER.of("table2", "accuracy", task, name) for name in (TITLES[title], "fifo")]
    assert margin is not None
    assert printed[0] is not None
    assert printed[1] is not None
    low, high = margin.mean - (margin.half_width or 1e9), margin.mean + (margin.half_width or 1e9)
    expected = "undecided"
    if low > 0 or high < 0:
        expected = "came back" if (low > 0) == (printed[0] > printed[1]) else "did not"
    assert [verdict for verdict, titles in found.items() if title in titles] == [expected]


def test_streams_are_counted_by_the_sign_of_their_interval() -> None:
    arena = {
        task: {"gist-shared": {"over_fifo": lead}}
        for task, lead in {
            "a": [2.0, 1.0],
            "b": [0.5, 1.0],
            "c": [-3.0, 1.0],
            "d": [4.0, 0.1],
        }.items()
    }
    streams = {"in time order": {"a": "", "b": "", "d": "", "gone": ""}, "shuffled": {"c": ""}}
    first, second = counts_table(arena, streams).splitlines()[-2:]
    assert first.endswith("| better 2, undecided 1, worse 0 | not run | not run | not run |")
    assert "| better 0, undecided 0, worse 1 |" in second


def test_a_kind_of_stream_is_its_median_and_its_signs() -> None:
    leads = [[2.0, 1.0], [0.5, 1.0], [-3.0, 1.0], [9.0, None]]
    assert median_in_words(leads, 4) == "+1.2; better 1, worse 1"
    assert median_in_words(leads[:3], 4) == "+0.5; better 1, worse 1 of 3"
    assert median_in_words([], 4) == "not run"


def test_the_short_table_has_rows_of_the_whole_one_and_a_row_for_each_other_kind() -> None:
    results = EXPERIMENTS / "results"
    rows = short_results_table(EXPERIMENTS, results).splitlines()[2:]
    whole = results_table(EXPERIMENTS, results).splitlines()
    first, *others = STREAMS
    assert rows[: -len(others)] == whole[3 : 3 + len(rows) - len(others)]
    assert whole[2].startswith(f"| *{first}* |")
    assert [row.split("*")[1] for row in rows[-len(others) :]] == others


def test_bytes_are_ahead_only_beyond_both_intervals() -> None:
    rows: list[tuple[str, Sequence[Any], Sequence[Any]]] = [
        ("t", [90.0, 1.0], [80.0, 1.0]),
        ("t", [90.0, 1.0], [89.0, 1.0]),
    ]
    rows += [("u", [70.0, None], [80.0, 1.0])]
    words = bytes_sentence(rows)
    assert words.startswith("3 comparisons on 2 tasks,")
    assert "the best store with a gist is ahead in 1, the best without one in 1, and in 1" in words


def test_old_rows_are_called_preliminary() -> None:
    words = status_table(EXPERIMENTS, EXPERIMENTS / "results")
    assert ("of earlier settings" in words) == ("are preliminary" in words)
