"""From arrays to a verdict: `fedkeep.compare` on every kind of input, as its users call it."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse

import fedkeep
from fedkeep.api import MethodComparison
from fedkeep.core.errors import ConfigError, DataError
from fedkeep.core.policy import ScoringContext
from fedkeep.core.types import Batch, Scores
from fedkeep.records.tables import sentences

RNG = np.random.default_rng(0)
Y = RNG.integers(0, 3, 600)
X = RNG.normal(size=(600, 4)) + 3 * np.eye(3, 4)[Y]
DEVICE = RNG.integers(0, 6, 600)
SMALL: dict[str, Any] = {"rounds": 8, "seeds": 2, "jobs": 1, "progress": False}


class Newest(fedkeep.SelectionPolicy):
    """FIFO, written by a user."""

    unbiased = True

    def score(self, batch: Batch, view: ScoringContext) -> Scores:
        return view.arrival.astype(np.float64)


@dataclass(frozen=True)
class Scaled(fedkeep.SelectionPolicy):
    """FIFO with an option that does not matter."""

    factor: float = 1.0

    def score(self, batch: Batch, view: ScoringContext) -> Scores:
        return self.factor * view.arrival.astype(np.float64)


def finals(found: MethodComparison) -> dict[str, list[float]]:
    table: dict[str, list[float]] = {}
    for run in found.runs:
        table.setdefault(run.header.method, []).append(run.evaluations[-1].accuracy or 0.0)
    return table


def test_five_lines_lead_from_arrays_to_a_verdict() -> None:
    found = fedkeep.compare(X, Y, DEVICE, methods=["fifo", "reservoir", "default"], **SMALL)
    assert set(found.verdicts) == {"reservoir", "default"}
    text = repr(found)
    assert "final accuracy" in text
    assert "custom: against fifo" in text
    assert all(method in text for method in ("fifo", "reservoir", "default"))
    assert "<table>" in found._repr_html_()
    assert r"\begin{tabular}" in found.latex()


def test_a_policy_of_ones_own_may_be_a_class_an_instance_or_local() -> None:
    class Local(Newest):
        """Exists in this function only."""

    methods = {"fifo": "fifo", "class": Newest, "instance": Scaled(factor=2.0), "local": Local}
    found = fedkeep.compare(X, Y, DEVICE, methods=methods, **{**SMALL, "jobs": 2})
    reached = finals(found)
    assert reached["class"] == reached["instance"] == reached["local"] == reached["fifo"]
    assert any("to run its seeds in parallel" in note for note in found.notes)
    options = {run.header.method: run.header.config["policy"] for run in found.runs}
    assert options["instance"]["factor"] == 2.0


def test_a_frame_gives_the_same_as_its_arrays() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X, columns=list("abcd")).assign(kind=Y, pump=DEVICE)
    arrays = fedkeep.compare(X, Y, DEVICE, methods=["fifo"], **SMALL)
    named = fedkeep.compare(frame, "kind", "pump", methods=["fifo"], **SMALL)
    assert finals(arrays) == finals(named)
    table = named.frame()
    assert len(table) == sum(len(run.evaluations) for run in named.runs)
    assert {"worst_tenth", "rare_recall", "recall:0"} <= set(table.columns)


def test_a_torch_data_set_and_a_module_as_model() -> None:
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(
        torch.tensor(X, dtype=torch.float32), torch.tensor(Y, dtype=torch.int64)
    )
    linear = torch.nn.Linear(4, 3)
    found = fedkeep.compare(data, device=DEVICE, methods=["fifo"], model=linear, **SMALL)
    first = {run.header.seed: run.evaluations[0].accuracy for run in found.runs}
    assert len(set(first.values())) == 2, "each seed begins with its own layers"
    assert min(run.evaluations[-1].accuracy or 0 for run in found.runs) > 0.5


def test_labels_and_devices_stay_as_they_are_written() -> None:
    labels = np.array(["001", "1", "01"])[Y]
    ids = [2**60 + int(number) for number in DEVICE]
    found = fedkeep.compare(X, labels, ids, methods=["fifo"], **SMALL)
    assert found.runs[0].header.labels == ("001", "01", "1")
    assert found.runs[0].header.devices == 6


def test_finished_runs_are_not_run_again_and_can_be_loaded(tmp_path: Path) -> None:
    call: dict[str, Any] = {"methods": ["fifo"], **SMALL, "out": tmp_path}
    fedkeep.compare(X, Y, DEVICE, **call)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.jsonl")}
    again = fedkeep.compare(X, Y, DEVICE, **call)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.jsonl")} == before
    assert repr(fedkeep.load_records(tmp_path)) == repr(again)
    assert "fifo" in again.to_html(tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_folder_does_not_pass_off_runs_on_other_samples(tmp_path: Path) -> None:
    call: dict[str, Any] = {"methods": ["fifo"], **SMALL, "out": tmp_path}
    fedkeep.compare(X, Y, DEVICE, **call)
    for other in ((X + 1, Y), (X, Y[::-1])):
        with pytest.raises(DataError, match="has runs on other samples: choose another folder"):
            fedkeep.compare(*other, DEVICE, **call)
    (tmp_path / "samples.npz").write_bytes(b"PK")
    with pytest.raises(DataError, match=r"samples\.npz is damaged"):
        fedkeep.compare(X, Y, DEVICE, **call)


def test_a_policy_of_this_process_is_run_again_as_its_code_may_have_changed(
    tmp_path: Path,
) -> None:
    sign = 1.0

    class Changed(Newest):
        def score(self, batch: Batch, view: ScoringContext) -> Scores:
            return sign * view.arrival.astype(np.float64)

    call: dict[str, Any] = {"methods": {"mine": Changed}, **SMALL, "out": tmp_path}
    newest = finals(fedkeep.compare(X, Y, DEVICE, **call))
    sign = -1.0
    assert finals(fedkeep.compare(X, Y, DEVICE, **call)) != newest


def test_labels_may_be_a_column_vector() -> None:
    flat = fedkeep.compare(X, Y, DEVICE, methods=["fifo"], **SMALL)
    column = fedkeep.compare(X, Y[:, None], DEVICE, methods=["fifo"], **SMALL)
    assert finals(flat) == finals(column)


def test_a_figure_has_a_title_and_named_axes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = fedkeep.compare(X, Y, DEVICE, methods=["fifo", "default"], **SMALL).figure("Pumps")
    (axes,) = figure.axes
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == (
        "Pumps",
        "round",
        "test accuracy (%)",
    )
    assert [line.get_label() for line in axes.get_lines()] == ["default", "fifo"]
    figure.savefig(tmp_path / "accuracy.svg")
    assert "<svg" in (tmp_path / "accuracy.svg").read_text(encoding="utf-8")


SCRIPT = """
import numpy as np
import fedkeep

rng = np.random.default_rng(0)
y = rng.integers(0, 3, 400)
x = rng.normal(size=(400, 4)) + 3 * np.eye(3, 4)[y]


class Mine(fedkeep.SelectionPolicy):
    def score(self, batch, view):
        return view.arrival.astype(float)


found = fedkeep.compare(x, y, devices=5, methods=["fifo", Mine], seeds=2, rounds=6, jobs=2)
print(found.verdicts, len(found.runs))
"""


def test_parallel_seeds_work_in_a_script_without_a_main_check_and_with_a_policy_of_main() -> None:
    around = {**os.environ, "PYTHONPATH": str(Path(fedkeep.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        env=around,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "{'Mine': 'equivalent'} 4"
    assert done.stderr == ""


class OwnInit(fedkeep.SelectionPolicy):
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def score(self, batch: Batch, view: ScoringContext) -> Scores:
        return view.uniform


@pytest.mark.parametrize(
    ("change", "kind", "sentence"),
    [
        ({"methods": ["fifi"]}, ConfigError, "unknown method 'fifi': did you mean 'fifo'"),
        ({"methods": []}, ConfigError, "methods must be one or more different ones"),
        ({"methods": ["fifo", "fifo"]}, ConfigError, "methods must be one or more different ones"),
        ({"methods": [{"policy": {"name": "fifo"}}]}, ConfigError, "the tables of a method need"),
        ({"methods": [int]}, ConfigError, "int is no method: pass a name, a subclass of"),
        ({"methods": [OwnInit]}, ConfigError, "declare its options as dataclass fields"),
        ({"model": 7}, ConfigError, "model must be a name, a torch.nn.Module or a factory"),
        ({"model": "softmaxx"}, ConfigError, "unknown model 'softmaxx': did you mean 'softmax'"),
        ({"device": None}, DataError, "compare needs the device of each sample: pass device="),
        ({"y": None}, DataError, "x must be a data set of pairs"),
        ({"y": Y[:9]}, DataError, "y must have one value for each of the 600 samples"),
        ({"y": np.arange(600)}, DataError, "600 different whole numbers, .* say what they are"),
        ({"x": {"data": X}, "y": None}, DataError, "got a dict: pass its arrays, such as"),
        ({"x": scipy.sparse.csr_matrix(X)}, DataError, r"got csr_matrix: pass x.toarray\(\)"),
        ({"devices": 5}, DataError, "the samples have a device each"),
        ({"learning_rate": "best"}, ConfigError, 'learning_rate must be a number or "own"'),
        ({"x": X * np.nan}, DataError, "sample 0: a feature is missing, NaN or infinite"),
        ({"capacity": 0}, ConfigError, "capacity must be 1 or more, got 0"),
        ({"participation": 2.0}, ConfigError, "participation must be above 0 and at most 1"),
    ],
)
def test_a_wrong_argument_is_named_in_a_sentence(
    change: dict[str, Any], kind: type[Exception], sentence: str
) -> None:
    call: dict[str, Any] = {
        "x": X,
        "y": Y,
        "device": DEVICE,
        "methods": ["fifo"],
        **SMALL,
        **change,
    }
    with pytest.raises(kind, match=sentence):
        fedkeep.compare(**call)


def test_a_simulation_describes_itself() -> None:
    table = {"task": {"name": "demo", "devices": 4}, "policy": {"name": "fifo"}}
    simulator = fedkeep.Simulator(fedkeep.Experiment.from_table(table))
    assert repr(simulator) == "<Simulator: fifo on demo, seed 0, round 0 of 100>"
    assert simulator.experiment.train.learning_rate == 0.02, "the task's own"


def test_a_run_that_diverges_is_reported() -> None:
    found = fedkeep.compare(X, Y, DEVICE, methods=["fifo"], learning_rate=1e300, **SMALL)
    assert any("diverged" in note and "lower train.learning_rate" in note for note in found.notes)


def test_two_methods_that_both_diverge_are_not_called_equivalent() -> None:
    call: dict[str, Any] = {"methods": ["fifo", "reservoir"], **SMALL}
    found = fedkeep.compare(X, Y, DEVICE, learning_rate=1e300, **call)
    assert found.verdicts == {}
    assert "equivalent" not in "".join(sentences(found.comparison))
    assert set(fedkeep.compare(X, Y, DEVICE, **call).verdicts) == {"reservoir"}


def test_each_method_at_its_own_rate(tmp_path: Path) -> None:
    found = fedkeep.compare(
        X, Y, DEVICE, methods=["fifo", Newest], learning_rate="own", out=tmp_path / "runs", **SMALL
    )
    tried = fedkeep.load_records(tmp_path / "runs-rates").runs
    assert {run.header.seed for run in tried} == {1001, 1002}
    assert {run.header.seed for run in found.runs} == {0, 1}
    rates = {run.header.config["train"]["learning_rate"] for run in tried}
    assert rates == {0.0166667, 0.05, 0.15, 0.5}
    for method in ("fifo", "Newest"):
        reached: dict[float, list[float]] = {}
        for run in tried:
            if run.header.method == method:
                last = [e.accuracy or 0.0 for e in run.evaluations if e.round][-5:]
                rate = run.header.config["train"]["learning_rate"]
                reached.setdefault(rate, []).append(sum(last) / len(last))
        best = max(sum(values) for values in reached.values())
        chosen = min(rate for rate, values in reached.items() if sum(values) == best)
        used = {
            r.header.config["train"]["learning_rate"]
            for r in found.runs
            if r.header.method == method
        }
        assert used == {chosen}
        assert any(f"{method} {chosen:g}" in note for note in found.notes)
