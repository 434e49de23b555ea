"""Words about results follow from the results."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from lab.curves import Curve, ExperimentSummary, write_summary
from lab.findings import Interval
from lab.names import STREAMS
from lab.readme import (
    median_in_words,
    paper_speedups,
    paper_table,
    results_table,
    short_results_table,
)
from lab.results import Paper, Results
from lab.verdict_tables import (
    _verdict,
    bytes_sentence,
    came_back,
    counts_table,
    har_signs_table,
    status_table,
)

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
PAPER = Paper(EXPERIMENTS / "paper.toml")
RESULTS = Results(EXPERIMENTS / "results", PAPER)
TITLES = {
    "HL": "high-loss",
    "FB": "fedbalancer",
    "ODE-Exact": "ode-exact",
    "ODE-Est (Eq. 8)": "ode-est",
}


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


@pytest.mark.parametrize(
    ("margin", "printed", "verdict"),
    [
        (Interval(2.0, 1.0), 3.0, "came back"),
        (Interval(2.0, 1.0), -3.0, "did not"),
        (Interval(2.0, 3.0), 3.0, "undecided"),
        (Interval(-0.4, 0.3), 0.1, "came back"),
        (Interval(-2.4, 0.3), 0.1, "did not"),
        (Interval(-2.4, 3.3), 0.1, "undecided"),
    ],
)
def test_a_lead_of_the_paper_below_half_a_point_is_level(
    margin: Interval, printed: float, verdict: str
) -> None:
    assert _verdict(margin, printed) == verdict


def test_another_form_of_the_data_has_the_papers_row_and_both_estimates_its_column() -> None:
    assert PAPER.of("table2", "accuracy", "har-balanced", "ode-exact") == 73.63
    assert PAPER.of("table2", "speedup", "ic", "ode-est-participants") == 1.20
    assert PAPER.of("table2", "accuracy", "st-converging", "ode-exact") is None


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


def test_speedups_stand_beside_the_papers() -> None:
    table = paper_speedups(EXPERIMENTS, EXPERIMENTS / "results")
    (row,) = (line for line in table.splitlines() if line.startswith("| HL "))
    assert row.count("(never)") == 5, "the paper's HL never reaches FIFO, on no task"
    assert "FIFO" not in table.replace("FIFO (", "")


def test_a_table_says_how_many_seeds_stand_behind_it(tmp_path: Path) -> None:
    def curve(method: str, seed: int, setting: str = "") -> Curve:
        return Curve(
            method=method,
            setting=setting,
            seed=seed,
            planned=20,
            config_hash=f"{method}{seed}{setting}",
            rounds=(10, 20),
            accuracy=(0.5, 0.6),
            seconds=1.0,
            finished=True,
        )

    def written(name: str, *curves: Curve) -> None:
        about = {"about": "", "task": "har", "command": "", "versions": {"python": "3"}}
        write_summary(
            tmp_path / f"{name}.json",
            ExperimentSummary(experiment=name, curves=curves, **about),
        )

    table2 = (curve("fifo", 0), curve("fifo", 1), curve("high-loss", 0))
    written("table2/har-balanced", *table2)
    rates = [curve(m, 0, "train.learning_rate=0.01") for m in ("fifo", "high-loss")]
    written("robustness/har-rate", *rates)
    header, _, *rows = har_signs_table(EXPERIMENTS, tmp_path).splitlines()
    assert header == "| method | as in Table 2, 2 seeds | learning rate 0.01, 1 seed |"
    assert rows == ["| FIFO | 55.0 ± 0.0 | 55.0 |", "| HL | +0.0 | +0.0 |"]
    assert "HAR, balanced: 2 seeds, 20 rounds; HL with 1 seed" in paper_table(EXPERIMENTS, tmp_path)
