"""The experiment files are what they claim, and the document shows what ran and the paper's."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from lab.blocks import line_chart
from lab.curves import (
    Curve,
    ExperimentSummary,
    curve_of,
    evaluation_labels,
    pooled_accuracy,
    read_summary,
    write_summary,
)
from lab.document import write_results
from lab.findings import Interval, pooled_finals
from lab.results import CLAIMS, Paper, Results, verdicts
from msgspec.structs import replace

from fedkeep.config.experiment import expand, read_experiment, resolve
from fedkeep.records import Run, read_run
from fedkeep.sim.runner import play

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
PAPER = Paper(EXPERIMENTS / "paper.toml")
FILES = sorted(
    p for p in EXPERIMENTS.glob("*/*.toml") if p.parent.name not in {"tasks", "methods", "suites"}
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_experiment_is_sound(path: Path) -> None:
    cells = expand(read_experiment(path))
    assert len({cell.experiment.digest() for cell in cells}) == len(cells), (
        "what a sweep varies must reach the run"
    )
    methods = {cell.experiment.label for cell in cells}
    assert "fifo" in methods, "without FIFO there is no speedup"
    assert all(cell.experiment.seed < 100 for cell in cells), "seeds 100 and up are for choosing"


def test_paper_and_authors_differ_where_they_should() -> None:
    paper = _ode(EXPERIMENTS / "table2" / "har.toml")
    authors = _ode(EXPERIMENTS / "authors" / "har.toml")
    assert (paper["estimator"]["name"], authors["estimator"]["name"]) == (
        "incremental",
        "round-mean",
    )
    assert (paper["storage"]["after_use"], paper["weights"]["client_label"]) == ("keep", 0.0)
    assert (paper["train"]["decay"], authors["train"]["decay"]) == (0.95, 1.0)


def _ode(path: Path) -> dict[str, dict[str, object]]:
    cell = next(c for c in expand(read_experiment(path)) if c.experiment.label == "ode-est")
    return cell.experiment.resolved()


def _summary(fifo: tuple[float, ...], ode: tuple[float, ...]) -> ExperimentSummary:
    def curve(method: str, seed: int, final: float) -> Curve:
        return Curve(
            method=method,
            setting="",
            seed=seed,
            planned=30,
            config_hash="0",
            rounds=(0, 10, 20, 30),
            accuracy=(0.1, final, final, final),
            seconds=1.0,
            finished=True,
        )

    curves = [curve("fifo", s, a) for s, a in enumerate(fifo)] + [
        curve("ode-est", s, a) for s, a in enumerate(ode)
    ]
    return ExperimentSummary(
        experiment="table2/har",
        about="A row.",
        task="har",
        command="fedkeep run experiments/table2/har.toml",
        versions={"python": "3"},
        curves=tuple(curves),
    )


def test_a_summary_reads_back_as_written(tmp_path: Path) -> None:
    summary = _summary((0.5, 0.51), (0.6, 0.61))
    write_summary(tmp_path / "a.json", summary)
    assert read_summary(tmp_path / "a.json") == summary


@pytest.mark.parametrize(
    ("ode", "word"), [((0.70, 0.71, 0.70), "reproduced"), ((0.40, 0.41, 0.40), "not reproduced")]
)
def test_verdicts_follow_the_numbers(tmp_path: Path, ode: tuple[float, ...], word: str) -> None:
    write_summary(tmp_path / "table2" / "har.json", _summary((0.60, 0.61, 0.60), ode))
    found = verdicts(Results(tmp_path, PAPER))
    assert found["ODE-Est ends more accurate than FIFO (Table 2)"][0] == word
    assert found["Values are stable between rounds"][0] == "not run yet"


def test_a_larger_store_stands_in_where_unlimited_storage_did_not_run(tmp_path: Path) -> None:
    def word(*, larger: str) -> str:
        curves = tuple(
            replace(c, method=larger) if c.method == "ode-est" else c
            for c in _summary(fifo, ode).curves
        )
        summary = replace(_summary((), ()), experiment="motivation/storage-tc", curves=curves)
        write_summary(tmp_path / "motivation" / "storage-tc.json", summary)
        found = verdicts(Results(tmp_path, PAPER))
        return found["Limited storage costs up to 4 times the training time and 7 % accuracy"][0]

    fifo, ode = (0.60, 0.61, 0.60), (0.70, 0.71, 0.70)
    assert word(larger="full-data") == "partly", "ten points, but no sooner"
    assert word(larger="fifo-20") == "partly"
    assert word(larger="fifo-10") == "not run yet"
    ode = (0.62, 0.63, 0.62)
    assert word(larger="fifo-20") == "not reproduced"


def test_causes_are_given_for_claims_that_exist() -> None:
    assert PAPER.causes.keys() <= CLAIMS.keys()


def test_methods_are_compared_seed_by_seed(tmp_path: Path) -> None:
    """Seeds differ by twenty points, the methods by two: intervals overlap, the lead shows."""
    write_summary(
        tmp_path / "table2" / "har.json", _summary((0.50, 0.60, 0.70), (0.52, 0.62, 0.73))
    )
    results = Results(tmp_path, PAPER)
    margin = results.margin("table2/har", "ode-est", "fifo")
    assert margin is not None
    assert margin.mean == pytest.approx((2 + 2 + 3) / 3)
    assert margin.half_width == pytest.approx(4.3027 * 0.57735 / 3**0.5, rel=1e-4)
    assert margin.ahead
    assert results.margin("table2/har", "ode-est", "unknown") is None
    assert Interval(1.0, 1.1).ahead is None
    assert Interval(-2.0, 1.1).ahead is False


def test_a_claim_that_more_seeds_must_decide_somewhere_is_not_called_reproduced(
    tmp_path: Path,
) -> None:
    for task, ode in (("har", (0.70, 0.71, 0.70)), ("ic", (0.50, 0.90, 0.70))):
        summary = replace(_summary((0.60, 0.61, 0.60), ode), experiment=f"table2/{task}")
        write_summary(tmp_path / "table2" / f"{task}.json", summary)
    found = verdicts(Results(tmp_path, PAPER))
    assert found["ODE-Est ends more accurate than FIFO (Table 2)"][0] == "partly"


def test_the_document_has_our_number_beside_the_papers_and_says_what_did_not_run(
    tmp_path: Path,
) -> None:
    results = tmp_path / "results"
    write_summary(results / "table2" / "har.json", _summary((0.60, 0.61, 0.60), (0.70, 0.71, 0.70)))
    write_results(EXPERIMENTS, results, tmp_path)
    words, page = (tmp_path / "RESULTS.md").read_text(), (tmp_path / "RESULTS.html").read_text()

    assert re.search(
        r"\| ode-est \| 70\.\d ± \d\.\d \(70\.39\) \| \+10\.0 ± 0\.0 \| 1\.00x \(1\.55x\) \|", words
    )
    assert "`experiments/table2/ic.toml`" in words.partition("Not run yet")[2]
    assert "fedkeep run experiments/table2/har.toml" in words
    assert "not run: reservoir, high-loss" in words, "a row that is missing is named"
    assert (results / "plots" / "table2-har.svg").exists()
    assert "<svg" in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")


def test_a_method_that_ran_with_fewer_seeds_is_named_with_them(tmp_path: Path) -> None:
    write_summary(
        tmp_path / "results" / "table2" / "har.json", _summary((0.60, 0.61, 0.60), (0.70, 0.71))
    )
    write_results(EXPERIMENTS, tmp_path / "results", tmp_path)
    assert (
        "seeds 0, 1, 2; ode-est only with 0, 1; 30 rounds" in (tmp_path / "RESULTS.md").read_text()
    )


def test_a_swept_value_heads_its_column_in_full(tmp_path: Path) -> None:
    summary = _summary((0.60, 0.61), (0.70, 0.71))
    swept = [
        replace(c, setting=f"train.participation={v}") for v in (0.05, 0.1) for c in summary.curves
    ]
    swept_summary = replace(summary, experiment="motivation/labels-tc", curves=tuple(swept))
    write_summary(tmp_path / "results" / "motivation" / "labels-tc.json", swept_summary)
    write_results(EXPERIMENTS, tmp_path / "results", tmp_path)
    assert (
        "| method | participation 0.05 | participation 0.1 |"
        in (tmp_path / "RESULTS.md").read_text()
    )


def test_a_sweep_has_the_papers_number_at_each_value_and_decides_its_claim(tmp_path: Path) -> None:
    summary = _summary((0.60, 0.61, 0.60), (0.70, 0.71, 0.70))
    swept = [replace(c, setting=f"train.epochs={v}") for v in (2, 5) for c in summary.curves]
    swept_summary = replace(summary, experiment="robustness/ic-epochs", curves=tuple(swept))
    write_summary(tmp_path / "results" / "robustness" / "ic-epochs.json", swept_summary)
    write_results(EXPERIMENTS, tmp_path / "results", tmp_path)
    words = (tmp_path / "RESULTS.md").read_text()
    assert "| ode-est | 70.3 ± 1.4 (72.7) | 70.3 ± 1.4 (71.5) |" in words
    found = verdicts(Results(tmp_path / "results", PAPER))
    word, because = found["Gains hold at low participation, more epochs, smaller storage"]
    assert word == "reproduced"
    assert because == "ic-epochs 2: +10.0 ± 0.0; ic-epochs 5: +10.0 ± 0.0"


def test_the_pooled_accuracy_of_a_run_whose_accuracy_is_the_mean_over_devices(
    tmp_path: Path,
) -> None:
    def played(kind: str) -> Run:
        table = {"task": {"name": "demo", "devices": 5}, "policy": {"name": "fifo"}}
        table |= {"train": {"rounds": 20}, "record": {"every": 2, "accuracy": kind}}
        (cell,) = expand(table)
        return read_run(play(cell, tmp_path / kind))

    devices, pooled = played("devices"), played("pooled")
    tested = evaluation_labels(resolve({"task": {"name": "demo", "devices": 5}}))
    assert [e.accuracy for e in devices.evaluations] != [e.accuracy for e in pooled.evaluations]
    for one, other in zip(devices.evaluations, pooled.evaluations, strict=True):
        assert pooled_accuracy(one, tested) == pytest.approx(other.accuracy)
    curve = curve_of(devices, tested)
    assert curve.pooled == pytest.approx(curve_of(pooled).final / 100, abs=1e-5)
    assert curve_of(devices).pooled is None


def test_pooled_leads_are_paired_over_the_seeds_that_kept_them() -> None:
    curves = _summary((0.60, 0.61, 0.60), (0.70, 0.71, 0.70)).curves
    fifo, ode = (
        {c.seed: replace(c, pooled=pooled - 0.01 * c.seed) for c in curves if c.method == method}
        for method, pooled in (("fifo", 0.5), ("ode-est", 0.52))
    )
    ode[2] = replace(ode[2], pooled=None)
    found = pooled_finals(ode, fifo)
    assert found is not None
    assert found.mean == pytest.approx(2.0)
    own = pooled_finals(fifo)
    assert own is not None
    assert own.mean == pytest.approx(49.0)
    assert pooled_finals(ode, {}) is None


def test_a_claim_looks_at_both_accuracies_where_devices_are_of_unequal_sizes(
    tmp_path: Path,
) -> None:
    summary = _summary((0.60, 0.61, 0.60), (0.60, 0.61, 0.60))
    leads = {"fifo": 0.50, "ode-est": 0.53}
    curves = tuple(replace(c, pooled=leads[c.method]) for c in summary.curves)
    kept = replace(summary, experiment="table2/ic", curves=curves)
    write_summary(tmp_path / "table2" / "ic.json", kept)
    found = verdicts(Results(tmp_path, PAPER))
    word, because = found["ODE-Est ends more accurate than FIFO (Table 2)"]
    assert because == (
        "ic +0.0 ± 0.0 points (paper +1.4); ic, pooled +3.0 ± 0.0 points (paper +1.4)"
    )
    assert word == "partly"


def test_a_table_has_the_pooled_accuracy_where_runs_kept_it(tmp_path: Path) -> None:
    summary = _summary((0.60, 0.61, 0.60), (0.70, 0.71, 0.70))
    curves = [replace(c, pooled=0.5) if c.method == "fifo" else c for c in summary.curves]
    kept = replace(summary, curves=tuple(curves))
    write_summary(tmp_path / "results" / "table2" / "har.json", kept)
    write_results(EXPERIMENTS, tmp_path / "results", tmp_path)
    words = (tmp_path / "RESULTS.md").read_text()
    assert "| method | accuracy | over FIFO | speedup | pooled |" in words
    assert re.search(r"\| fifo \|.*\| 50\.0 ± 0\.0 \|\n", words)
    assert re.search(r"\| ode-est \|.*\| not kept \|\n", words)


def test_a_chart_of_one_flat_line_is_drawn() -> None:
    assert "M" in line_chart("flat", {"a": [(0, 1.0), (1, 1.0)]}, "x", "y")


@pytest.mark.skipif(
    "FEDKEEP_DATA" not in os.environ, reason="set FEDKEEP_DATA to the folder with the data sets"
)
def test_the_quick_reproduction_runs(tmp_path: Path) -> None:
    """`make reproduce-quick`, as far as data is there."""
    call = [sys.executable, str(EXPERIMENTS / "reproduce.py"), "--quick", "--out", str(tmp_path)]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "quick" / "RESULTS.md").read_text()
    assert "Not run yet" not in text
    assert "theory-distance.svg" in text


def test_rows_are_added_to_committed_results_at_their_scale_and_the_rest_stands(
    tmp_path: Path,
) -> None:
    shutil.copytree(EXPERIMENTS, tmp_path / "experiments", ignore=shutil.ignore_patterns("results"))
    summary = tmp_path / "experiments" / "results" / "table2" / "st.json"

    def rows(*options: str) -> dict[str, Curve]:
        call = [sys.executable, "experiments/reproduce.py", "a", "--only", "table2/st", *options]
        done = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return {curve.method: curve for curve in read_summary(summary).curves}

    small = (
        "task.devices=10",
        "task.smallest=60",
        "task.largest=80",
        "train.rounds=2",
        "sweep.seed=[0]",
    )
    tiny = [part for setting in small for part in ("--set", setting)]
    assert list(rows(*tiny, "--out", "first", "--methods", "fifo", "ode-est")) == [
        "fifo",
        "ode-est",
    ]
    added = rows("--out", "second", "--methods", "fifo", "reservoir", "--add")
    assert list(added) == ["fifo", "reservoir", "ode-est"]
    assert added["reservoir"].planned == 2, "the scale of what is committed"
    second = tmp_path / "second" / "table2" / "st"
    assert [path.stem for path in second.glob("*[0-9].jsonl")] == ["reservoir-seed0"]
    other = (*tiny, "--set", "train.epochs=1")
    assert list(rows(*other, "--out", "third", "--methods", "fifo", "--add")) == ["fifo"], (
        "settings have changed"
    )


def test_committed_results_are_small_and_current(tmp_path: Path) -> None:
    results = EXPERIMENTS / "results"
    assert sum(p.stat().st_size for p in results.rglob("*") if p.is_file()) < 5_000_000
    for path in set(results.glob("*/*.json")) - set(results.glob("gist/*.json")):
        assert path.relative_to(results).with_suffix("").as_posix() == read_summary(path).experiment


@pytest.mark.parametrize(
    ("margin", "holds"),
    [
        (Interval(0.5, 0.3), True),
        (Interval(-0.2, 0.5), True),
        (Interval(-5.6, 58.0), None),
        (Interval(2.0, 40.0), None),
        (Interval(1.0, None), None),
        (Interval(-3.0, 1.0), False),
    ],
    ids=str,
)
def test_a_wide_interval_is_no_proof_that_nothing_is_lost(
    margin: Interval, holds: bool | None
) -> None:
    assert margin.keeps_up is holds
