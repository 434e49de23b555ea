"""Suites: what is run and in which order, whose rate is whose, and what the tables show."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from lab.blocks import bar_chart
from lab.curves import Curve, Curves, bytes_at_rest, forward_passes, read_summary
from lab.findings import (
    Findings,
    arena,
    bytes_table,
    gist_summary,
    share_closed,
    tails,
    write_table,
)
from lab.opening import candidates, opening
from lab.overview import better_buys_table, leads_table
from lab.suite import Contest, PlannedRun, Suite, next_runs, read_suite, recount, run_suite
from msgspec.structs import replace

import fedkeep
from fedkeep.agent.record import META_BYTES
from fedkeep.config.experiment import resolve
from fedkeep.core.errors import ConfigError

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
TASK = """
task = { name = "demo", devices = 4 }
train = { rounds = 4, learning_rate = 0.01, participation = 0.5 }
"""
METHODS = """
[methods.fifo]
policy = { name = "fifo" }
[methods.gist-local]
policy = { name = "reservoir" }
[methods.full-data]
policy = { name = "full-data" }
"""
SUITE = """
about = "A small one."
methods = "methods.toml"
[tasks]
small = { base = "task.toml" }
absent = { base = "absent.toml" }
[[stages]]
tasks = ["small"]
methods = ["fifo", "gist-local", "full-data"]
seeds = [0, 1]
[[stages]]
tasks = ["small"]
methods = ["fifo", "gist-local"]
rates = "own"
seeds = [0, 1]
"""


def shares(regions: int) -> int:
    """Bytes of what every device keeps by region: six numbers each, and four others."""
    return (6 * regions + 4) * 8


def suite(folder: Path, text: str = SUITE) -> Suite:
    absent = TASK.replace('"demo", devices = 4', '"westermo"')
    for name, content in (
        ("task", TASK),
        ("absent", absent),
        ("methods", METHODS),
        ("small", text),
    ):
        (folder / f"{name}.toml").write_text(content)
    return read_suite(folder / "small.toml")


def made_up(run: PlannedRun, *accuracy: float) -> Curve:
    """A run that went like this."""
    experiment = run.cell.experiment
    return Curve(
        method=experiment.label,
        setting=run.cell.setting,
        seed=experiment.seed,
        planned=experiment.train.rounds,
        config_hash=run.digest,
        rounds=tuple(range(len(accuracy) + 1)),
        accuracy=(0.1, *accuracy),
        seconds=1.0,
        finished=True,
        samples_trained=50,
        samples_valued=20,
        bytes_at_rest=bytes_at_rest(experiment),
    )


def tell(curves: Curves, runs: Sequence[PlannedRun], *accuracy: float) -> None:
    for run in runs:
        curves.add(run.task, made_up(run, *accuracy))


@pytest.mark.parametrize(
    "path", sorted((EXPERIMENTS / "suites").glob("*.toml")), ids=lambda path: path.stem
)
def test_every_suite_is_valid_and_keeps_the_seeds_apart(path: Path, tmp_path: Path) -> None:
    found = read_suite(path)
    assert all(seed >= 100 for seed in found.trial_seeds)
    for stage in found.stages:
        choosing = path.stem in {"choice", "sketch"}
        assert all((seed >= 100) == choosing for seed in stage.seeds)
        runs = list(found.wanted(stage, Curves(tmp_path)))
        assert len({run.digest for run in runs}) == len(runs), (
            "what a stage varies must reach the run"
        )


def test_every_committed_run_is_asked_for_by_some_suite() -> None:
    """A change of runs' hashes orphans hours of work: rename the curves, or run again."""
    folder = EXPERIMENTS / "results" / "curves"
    curves = Curves(folder)
    suites = map(read_suite, (EXPERIMENTS / "suites").glob("*.toml"))
    asked = {run.digest for p in suites for stage in p.stages for run in p.wanted(stage, curves)}
    committed = [curve for path in folder.glob("*.json") for curve in read_summary(path).curves]
    assert [curve for curve in committed if curve.config_hash not in asked] == []


def test_the_own_rate_is_the_one_with_the_largest_area_and_ten_is_tried_where_three_wins(
    tmp_path: Path,
) -> None:
    found, curves, row = suite(tmp_path), Curves(tmp_path / "curves"), Contest("small", "fifo")
    tried = found.choosing(row, curves)
    rates = [run.cell.experiment.train.learning_rate for run in tried]
    assert rates == pytest.approx([0.01 / 3, 0.01 / 3, 0.01, 0.01, 0.03, 0.03])
    assert {run.cell.experiment.seed for run in tried} == {100, 101}
    assert found.own_rate(row, curves) is None
    tell(curves, tried[:2], 0.2, 0.3)
    tell(curves, tried[2:4], 0.6, 0.6)
    tell(curves, tried[4:], 0.1, 0.9)
    assert found.own_rate(row, curves) == 1.0, "a high end does not make up for the way there"
    tell(curves, tried[4:], 0.6, 0.9)
    assert found.own_rate(row, curves) is None, "10 has to be tried"
    farther = found.choosing(row, curves)[6:]
    assert [run.cell.experiment.train.learning_rate for run in farther] == pytest.approx([0.1, 0.1])
    tell(curves, farther, 0.1, 0.1)
    assert found.own_rate(row, curves) == 3.0


def test_a_suite_runs_what_is_lacking_and_nothing_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, curves = suite(tmp_path), Curves(tmp_path / "curves")
    assert len(next_runs(found, curves, set())) == 6
    run_suite(found, curves, tmp_path / "runs", jobs=1, minutes=0.0)
    assert "the time is up" in capsys.readouterr().out
    assert len(next_runs(found, curves, set())) == 5
    run_suite(found, curves, tmp_path / "runs", jobs=1, minutes=None)
    printed = capsys.readouterr().out
    assert "[1 of 5, " in printed
    assert "[5 of 5, 0 s left]" in printed
    assert next_runs(found, Curves(tmp_path / "curves"), set()) == []
    capsys.readouterr()
    run_suite(found, Curves(tmp_path / "curves"), tmp_path / "runs", jobs=1, minutes=None)
    assert capsys.readouterr().out == ""
    curves.keep(lambda curve: curve.method != "full-data")
    assert {run.cell.experiment.label for run in next_runs(found, curves, set())} == {"full-data"}


def test_two_that_run_at_once_lose_nothing_of_each_other(tmp_path: Path) -> None:
    found = suite(tmp_path)
    one, other = Curves(tmp_path / "curves"), Curves(tmp_path / "curves")
    runs = found.reported(Contest("small", "fifo"), 1.0, (0, 1))
    tell(one, runs[:1], 0.5)
    tell(other, runs[1:], 0.6)
    curves = Curves(tmp_path / "curves")
    assert all(curves.find(run.digest) for run in runs)


def test_processes_make_the_same_curves(tmp_path: Path) -> None:
    found = suite(tmp_path).only(["small"], ["fifo"])
    one, two = Curves(tmp_path / "one"), Curves(tmp_path / "two")
    run_suite(found, one, tmp_path / "runs1", jobs=1, minutes=None)
    run_suite(found, two, tmp_path / "runs2", jobs=2, minutes=None)
    runs = [run for stage in found.stages for run in found.wanted(stage, one)]
    for run in runs:
        first, second = one.find(run.digest), two.find(run.digest)
        assert first is not None
        assert second is not None
        assert first.accuracy == second.accuracy


RAY = """
import os, sys
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

sys.path.insert(0, sys.argv[1])
from lab.curves import Curves
from lab.suite import read_suite, run_suite

folder = Path(sys.argv[2])
cluster = Cluster(
    initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80_000_000}
)
try:
    os.environ["RAY_ADDRESS"] = cluster.address
    found = read_suite(folder / "small.toml").only(["small"], ["fifo"])
    curves = Curves(folder / "ray")
    run_suite(found, curves, folder / "runs", jobs=1, minutes=None, backend="ray")
finally:
    ray.shutdown()
    cluster.shutdown()
"""


@pytest.mark.real
def test_a_cluster_makes_the_same_curves(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    found = suite(tmp_path).only(["small"], ["fifo"])
    around = {
        **os.environ,
        "PYTHONPATH": str(Path(fedkeep.__file__).parents[1]),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", RAY, str(EXPERIMENTS), str(tmp_path)],
        capture_output=True,
        text=True,
        env=around,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    here, there = Curves(tmp_path / "here"), Curves(tmp_path / "ray")
    run_suite(found, here, tmp_path / "local", jobs=1, minutes=None)
    runs = [run for stage in found.stages for run in found.wanted(stage, here)]
    assert runs
    for run in runs:
        first, second = here.find(run.digest), there.find(run.digest)
        assert first is not None
        assert second is not None
        assert first.accuracy == second.accuracy


def test_a_task_whose_data_is_not_here_is_named_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDKEEP_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = SUITE.replace('tasks = ["small"]', 'tasks = ["absent", "small"]')
    found = suite(tmp_path, text).only([], ["full-data"])
    run_suite(found, Curves(tmp_path / "curves"), tmp_path / "runs", jobs=1, minutes=None)
    printed = capsys.readouterr().out
    assert "without absent: westermo.npz is not here" in printed
    assert "small: full-data rate=1 seed 1" in printed


def test_a_stage_that_names_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names the method 'fifi'"):
        suite(tmp_path, SUITE.replace('"fifo", "gist-local", "full-data"', '"fifi"'))


def with_finals(tmp_path: Path) -> Findings:
    """FIFO ends at 60 and 62, the gist at 66 and 70, unlimited storage at 70 and 72."""
    found, curves = suite(tmp_path), Curves(tmp_path / "curves")
    finals = {"fifo": (0.60, 0.62), "gist-local": (0.66, 0.70), "full-data": (0.70, 0.72)}
    for method, pair in finals.items():
        for run, final in zip(
            found.reported(Contest("small", method), 1.0, (0, 1)), pair, strict=True
        ):
            tell(curves, [run], final)
    return Findings(found, curves)


def test_the_arena_has_means_intervals_and_paired_leads(tmp_path: Path) -> None:
    found = with_finals(tmp_path)
    row = arena(found)["small"]["gist-local"]
    assert row["shared_rate"] == pytest.approx([68.0, 12.706 * 2.0], abs=0.01)
    assert row["over_fifo_shared"] == pytest.approx([7.0, 12.706], abs=0.01)
    assert (row["own_rate"], row["over_fifo"], row["rate"]) == (None, None, None), (
        "own rates are not found yet"
    )
    assert (row["seeds"], row["rounds"]) == (2, 4)
    for method in ("fifo", "gist-local"):
        best = Contest("small", method)
        tell(found.curves, found.suite.choosing(best, found.curves), 0.5)
    again = arena(found)["small"]["gist-local"]
    assert again["rate"] == pytest.approx(0.01 / 3), "the least of equals"


def test_the_gist_closes_a_share_of_the_gap(tmp_path: Path) -> None:
    summary = gist_summary(with_finals(tmp_path))
    expected = {
        "fifo": 61.0,
        "gist_local": 68.0,
        "gist_shared": None,
        "unlimited": 71.0,
        "gap_closed": 0.7,
    }
    assert summary == {"small": expected}
    assert share_closed(80.0, 82.0, 79.0) is None, "no gap to close"


def test_a_table_has_a_line_a_row_and_reads_back(tmp_path: Path) -> None:
    table = {
        "a": {"fifo": {"own_rate": [1.0, None]}, "ode": {"own_rate": None}},
        "b": {"fifo": {"seeds": 5}},
    }
    write_table(tmp_path / "t.json", table)
    text = (tmp_path / "t.json").read_text()
    assert json.loads(text) == table
    assert ' "fifo": {"own_rate": [1.0, null]},\n' in text


def test_the_opening_decides_by_intervals(tmp_path: Path) -> None:
    found = with_finals(tmp_path)
    words = "\n".join(str(block) for block in opening({"arena": arena(found)}, found))
    assert "| gist-local | the task's | 0 | 1 | 0 | +7.0 | +7.0 | +7.0 | none |" in words, (
        "the interval holds 0"
    )
    assert "| small | 61.0 | (+7.0) | +10.0 |" in words, "undecided leads are in brackets"
    assert "| small | 70 % |" in words, "of the way to unlimited storage"


def test_tables_name_the_streams_on_which_a_method_is_worse() -> None:
    def lead(points: float) -> dict[str, object]:
        row = dict.fromkeys(("own_rate", "shared_rate", "over_fifo_shared"))
        return {**row, "over_fifo": [points, 0.5], "rounds": 9, "seeds": 3}

    few = {"embedded": {"draw": lead(-2.0)}, "har-ordered": {"draw": lead(4.0)}}
    row = "| balanced-reservoir | own | 1 | 0 | 1 | -2.0 | +1.0 | +4.0 | demo, shuffled |"
    assert row in leads_table(few)
    many = {task: {"draw": lead(-1.0)} for task in ("embedded", "ic", "tc")}
    assert "| 0 | 0 | 3 | -1.0 | -1.0 | -1.0 | 3 streams |" in leads_table(many)


def test_a_larger_fifo_that_is_the_better_buy_is_named(tmp_path: Path) -> None:
    bytes_ = {
        "small": {
            "fifo": [[400, 10, 80.0, 1.0], [4000, 100, 90.0, 1.0]],
            "gist-local": [[4400, 10, 85.0, 1.0]],
            "worth": {},
        }
    }
    found = with_finals(tmp_path)
    words = "\n".join(
        str(block) for block in opening({"arena": arena(found), "bytes": bytes_}, found)
    )
    assert "| small | fifo, 100 slots: 90.0 | gist-local, 10 slots: 85.0 | +5.0 |" in words
    bytes_["small"]["gist-local"] = [[3000, 10, 85.0, 1.0]]
    assert "| small | nowhere |  |  |" in better_buys_table(bytes_)


def test_bytes_at_rest_and_the_equivalent_fifo_size(tmp_path: Path) -> None:
    text = SUITE.split("[[stages]]", maxsplit=1)[0] + (
        '[[stages]]\ntasks = ["small"]\nmethods = ["fifo", "gist-local"]\nseeds = [0]\n'
        'settings = { "storage.capacity" = [5, 50] }\n'
    )
    found, curves = suite(tmp_path, text), Curves(tmp_path / "curves")
    for method, capacity, final in (
        ("fifo", 5, 0.6),
        ("fifo", 50, 0.8),
        ("gist-local", 5, 0.7),
        ("gist-local", 50, 0.9),
    ):
        tell(
            curves,
            found.reported(Contest("small", method, (("storage.capacity", capacity),)), 1.0, (0,)),
            final,
        )
    table = bytes_table(Findings(found, curves))["small"]
    # Features, 58 bytes beside each sample, and the shares by label.
    sizes = [slots * (30 * 4 + META_BYTES) + shares(1) for slots in (5, 50)]
    assert table["fifo"] == [[sizes[0], 5, 60.0, None], [sizes[1], 50, 80.0, None]]
    assert table["worth"] == {"gist-local": {"5": 50, "50": None}}


def test_runs_that_another_suite_counted_are_counted_anew(tmp_path: Path) -> None:
    text = SUITE.split("[[stages]]", maxsplit=1)[0] + (
        '[[stages]]\ntasks = ["small"]\nmethods = ["gist-local"]\nseeds = [0, 1]\n'
        'settings = { "storage.capacity" = [5] }\n'
    )
    found, curves = suite(tmp_path, text), Curves(tmp_path / "curves")
    row = Contest("small", "gist-local", (("storage.capacity", 5),))
    runs = found.reported(row, 1.0, (0, 1))
    tell(curves, runs[1:], 0.7)
    early = replace(made_up(runs[0], 0.6), bytes_at_rest=1840)
    curves.add("a-task-of-another-suite", early)
    assert recount(found, curves) == 1
    reread = Curves(tmp_path / "curves")
    counts = [curve.bytes_at_rest for run in runs if (curve := reread.find(run.digest))]
    assert counts == [bytes_at_rest(runs[0].cell.experiment)] * 2
    assert recount(found, reread) == 0


def test_a_gist_is_counted_with_its_vector() -> None:
    table = {
        "task": {"name": "demo"},
        "storage": {"capacity": 10},
        "policy": {"name": "balanced-reservoir"},
    }
    parameters = (30 + 1) * 10
    packed = {"name": "local", "encoding": "int8"}
    notes = 3 * 8 * 10 + 2 * 8  # the noise model by label, the rest, and a counter
    for gist, vector in (
        ({"name": "none"}, 0),
        ({"name": "local"}, (4 + 8) * parameters + notes),
        (packed, parameters + 5 * 4 + 2 * parameters + 2 * 4 + notes),
    ):
        samples = 10 * (30 * 4 + META_BYTES) + shares(10)
        assert bytes_at_rest(resolve(table | {"gist": gist})) == samples + vector


def test_fifo_only_trains_and_ode_looks_at_every_arrival(tmp_path: Path) -> None:
    run = suite(tmp_path).reported(Contest("small", "fifo"), 1.0, (0,))[0]
    curve = made_up(run, 0.5)
    fifo = run.cell.experiment
    assert forward_passes(fifo, curve) == 3 * 50
    ode = resolve({"task": {"name": "demo"}, "policy": {"name": "ode"}})
    assert forward_passes(ode, curve) == 3 * 50 + 3 * 20 + 3 * 50 / 5
    gist = resolve({"task": {"name": "demo"}, "policy": {"name": "balanced-reservoir"}})
    assert forward_passes(gist, curve) == 3 * 50 + 3 * 20 + 3 * 3 * 50 / 5


def test_the_default_is_the_candidate_that_falls_behind_least_then_leads_most() -> None:
    means = {
        "a": {
            "fifo": 60,
            "class-balanced-fifo": 65,
            "gist-local": 66,
            "gist-local-bold": 90,
            "gist-local-dull": 65.2,
        },
        "b": {
            "fifo": 60,
            "class-balanced-fifo": 50,
            "gist-local": 59.6,
            "gist-local-bold": 55,
            "gist-local-dull": 60,
        },
    }
    ranked = candidates(means, "gist-local")
    assert [method for method, _, _ in ranked] == [
        "gist-local",
        "gist-local-dull",
        "gist-local-bold",
    ]
    assert ranked[2][2] == ["b"]
    assert ranked[0][1] == pytest.approx({"a": 1.0, "b": -0.4})


def test_bars_go_both_ways() -> None:
    drawn = bar_chart("t", {"good": 80.0, "bad": -20.0}, " %")
    assert ">80 %</text>" in drawn
    assert ">-20 %</text>" in drawn


def test_what_means_hide_is_told_of_ordered_streams_alone(tmp_path: Path) -> None:
    text = SUITE.replace("small = {", 'small-ordered = { base = "task.toml" }\nsmall = {').replace(
        'tasks = ["small"]', 'tasks = ["small", "small-ordered"]'
    )
    found, curves = suite(tmp_path, text), Curves(tmp_path / "curves")
    for task in ("small", "small-ordered"):
        runs = found.reported(Contest(task, "fifo"), 1.0, (0, 1))
        for run in runs:
            fallen = made_up(run, 0.8, 0.5, 0.5, 0.8)
            curves.add(task, replace(fallen, worst_tenth=0.25, rare_recall=0.5))
    table = tails(Findings(found, curves))
    assert list(table) == ["small-ordered"]
    row = table["small-ordered"]["fifo"]
    assert row["worst_tenth"] == (25.0, 0.0)
    assert (row["below"], row["recovery"], row["never"], row["deepest"]) == (75.0, 3.0, 0.0, 30.0)
