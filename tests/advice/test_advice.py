"""`fedkeep advise`: what it finds in data, how it reads results, and advice on a small fleet."""

import os
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import fedkeep
from fedkeep.advice.profile import DatasetProfile, warnings
from fedkeep.advice.trial import CANDIDATES, FIFO, LOCAL, UNLIMITED, Trial, TrialSettings, as_toml
from fedkeep.advice.verdict import sentences
from fedkeep.agent.assembly import budget_for, read_config
from fedkeep.cli.app import app
from fedkeep.cli.demo import EXPERIMENT
from fedkeep.config.experiment import expand, read_experiment
from fedkeep.config.method import parse_fleet
from fedkeep.config.methods import METHODS, method_table
from fedkeep.core.errors import ConfigError, DataError
from fedkeep.data import Federation, ModelSpec, Ownership
from fedkeep.tables import read_toml


def fleet(y: np.ndarray, devices: int = 4, x: np.ndarray | None = None) -> Federation:
    """Samples dealt to the devices in their order, all for training and for testing."""
    labels = int(y.max()) + 1
    points = np.eye(labels, 8, dtype=np.float32)[y] * 9 if x is None else x
    spread = points + np.random.default_rng(0).normal(0, 0.1, points.shape).astype(np.float32)
    members = Ownership.from_assignment(np.arange(len(y)) % devices, devices)
    names = tuple(f"label {n}" for n in range(labels))
    return Federation("own", spread, y, members, members, names, ModelSpec("softmax"))


def trial(finals: dict[str, list[float]], tmp_path: Path) -> Trial:
    rates = dict.fromkeys((*CANDIDATES, UNLIMITED), 0.03)
    settings = TrialSettings({"name": "custom", "path": "x.npz"}, 10, 0.1, 200, rates=rates)
    judged = {method: dict(enumerate(values)) for method, values in finals.items()}
    others = {
        method: {s: v - 0.2 for s, v in judged[FIFO].items()}
        for method in CANDIDATES
        if method not in judged
    }
    return Trial(settings, tmp_path, 60, 1, lambda *_: None, finals=judged | others)


def test_sorted_rows_give_a_warning_and_shuffled_ones_none() -> None:
    rng = np.random.default_rng(1)
    y = rng.integers(0, 4, 4000)
    even, ordered = DatasetProfile(fleet(y)), DatasetProfile(fleet(np.sort(y)))
    assert even.drift == pytest.approx(even.drift_by_chance, abs=0.1)
    assert [warning.split(":")[0] for warning in warnings(even, 10, shuffled=False)] == [
        "4 devices are few for federated learning"
    ]
    assert ordered.drift > 0.99
    assert ordered.runs > 0.99
    assert [warning.split(":")[0] for warning in warnings(ordered, 10, shuffled=False)][:2] == [
        "The order of the rows matters",
        "Labels come in runs",
    ]
    assert len(list(warnings(ordered, 10, shuffled=True))) == 1


def test_a_store_that_holds_everything_leaves_nothing_to_choose() -> None:
    seen = DatasetProfile(fleet(np.arange(40) % 4))  # ten a device
    assert "there is nothing to choose" in next(warnings(seen, 10, shuffled=True))
    assert "there is nothing to choose" not in next(warnings(seen, 9, shuffled=True))


def test_wrong_labels_are_named_with_their_interval() -> None:
    rng = np.random.default_rng(2)
    y = rng.integers(0, 4, 3000)
    x = np.eye(4, 8, dtype=np.float32)[y] * 9
    wrong = rng.random(3000) < 0.225
    y[wrong] = (y[wrong] + 1) % 4
    advised = "".join(warnings(DatasetProfile(fleet(y, x=x)), 10, shuffled=True))
    assert "About 23% of the labels (21% to 25%) are wrong, or their classes overlap" in advised
    assert "are wrong" not in "".join(
        warnings(DatasetProfile(fleet(np.arange(3000) % 4)), 10, shuffled=True)
    )


@cache
def plain_profile() -> DatasetProfile:
    return DatasetProfile(fleet(np.arange(4000) % 4))


def advice(tried: Trial, *, complete: bool = True) -> list[str]:
    return sentences(tried, plain_profile(), 800, shuffled=True, complete=complete)


def test_a_better_method_is_advised_with_its_interval(tmp_path: Path) -> None:
    tried = trial(
        {FIFO: [0.70, 0.71, 0.72], "ode": [0.80, 0.811, 0.82], UNLIMITED: [0.85, 0.861, 0.87]},
        tmp_path,
    )
    advised = advice(tried)
    assert advised[1] == (
        "Use ode: it is better than FIFO by 10.0 points (9.5 to 10.6, 3 seeds). It reached 81.0% "
        "with 10 samples a device (3 seeds)."
    )
    assert "Unlimited storage against ode: better by 5.0 points (5.0 to 5.0, 3 seeds)." in advised


def test_fifo_is_advised_where_nothing_is_shown_to_be_better(tmp_path: Path) -> None:
    worse = advice(trial({FIFO: [0.75, 0.77, 0.76], "ode": [0.70, 0.72, 0.71]}, tmp_path))
    assert worse[1].startswith("Use FIFO: no method is better by more than a point. It reached")
    open_ = advice(
        trial({FIFO: [0.70, 0.71, 0.72], "ode": [0.78, 0.70, 0.71]}, tmp_path), complete=False
    )
    assert open_[1].startswith("Use FIFO, the simplest, until more is known")
    assert "is open for ode." in open_[1]
    assert "ode against FIFO: open (+2.0 points, between -45.3 and +49.3, 3 seeds)." in open_
    assert any("give it more with --minutes" in line for line in open_)


def test_no_sentence_contradicts_the_advice(tmp_path: Path) -> None:
    """Whatever is called better than FIFO is not passed over for FIFO, and nothing open is sure."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        seeds = int(rng.integers(2, 9))
        curves = {
            method: rng.normal(0.7 + rng.uniform(-0.1, 0.2), rng.uniform(0.001, 0.06), seeds)
            for method in (*CANDIDATES, UNLIMITED)
        }
        tried = trial({method: curve.tolist() for method, curve in curves.items()}, tmp_path)
        advised = advice(tried)
        if advised[1].startswith("Use FIFO"):
            assert not any(
                "against FIFO: better" in line for line in advised if "Unlimited" not in line
            )
        for line in advised:
            assert not ("open (" in line and ("mislead" in line or "gain little" in line))
            assert "hardly" not in line


def test_a_gist_that_leaves_no_slots_is_not_tried(tmp_path: Path) -> None:
    capacities = dict.fromkeys(CANDIDATES, 10) | {LOCAL: 0, "gist-shared": 0}
    task = {"name": "custom", "path": "x.npz"}
    settings = TrialSettings(task, 10, 0.1, 200, capacities=capacities)
    assert LOCAL not in settings.methods
    finals = {m: {0: 0.5} for m in settings.methods}
    advised = advice(Trial(settings, tmp_path, 60, 1, lambda *_: None, finals=finals))
    assert "A gist takes 800 bytes, which leaves no slot for samples." in advised


def test_every_candidate_is_a_registered_method() -> None:
    assert set(CANDIDATES) <= set(METHODS)
    methods = EXPERIMENT["methods"]
    assert isinstance(methods, dict)
    for name, table in methods.items():
        assert table == method_table(name)


def test_a_table_reads_back_from_toml(tmp_path: Path) -> None:
    table = {
        "seed": 1,
        "task": {
            "name": "custom",
            "shape": [1, 2],
            "path": 'C:\\new\\5" disks.csv',
            "two words": ["ä\t", "\x7f"],
        },
        "methods": {"balanced fifo": {"policy": {"name": "fifo"}}},
    }
    (tmp_path / "a.toml").write_text(as_toml(table))
    assert read_experiment(tmp_path / "a.toml") == table


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 1200)
    x = np.eye(3, 6)[y] * 2 + rng.normal(size=(1200, 6))
    names = np.array(["ok", "worn", "broken"])[y]
    device = rng.integers(0, 8, 1200)
    np.savez(tmp_path / "mine.npz", x=x.astype(np.float32), y=names, device=device)
    return tmp_path


def test_a_whole_advice_leaves_files_that_can_be_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, small in {"_FEWEST_ROUNDS": 20, "_MOST_ROUNDS": 20, "LOOKS": (3,)}.items():
        monkeypatch.setattr(f"fedkeep.advice.trial.{name}", small)
    arguments = [
        "advise",
        "mine.npz",
        "--minutes",
        "9",
        "--jobs",
        "1",
        "--bytes",
        "90001B",
        "--participation",
        "0.5",
    ]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.exception
    assert "\nUse " in done.output
    assert "\nBy the rule for bytes, 90,001 bytes hold " in done.output
    advice = folder / "advice" / "mine"
    cells = expand(read_experiment(advice / "experiment.toml"))
    slots = {}
    for cell in cells:
        assert isinstance(cell.experiment.storage.capacity, int)
        slots[cell.experiment.label] = cell.experiment.storage.capacity
    assert f"Trying the methods with {slots[FIFO]} of them a device" in done.stderr
    assert slots[LOCAL] <= slots[FIFO]
    assert set(slots) == {*CANDIDATES, UNLIMITED}
    config = read_config(advice / "agent.toml")
    assert config.store.budget == 90001
    assert config.samples.names == ("broken", "ok", "worn")
    assert budget_for(config, slots[FIFO]) <= 90001 < budget_for(config, slots[FIFO] + 1)
    assert parse_fleet(read_toml(advice / "fleet.toml")).label_names == ("broken", "ok", "worn")
    assert "What to do" in (advice / "advice.html").read_text()
    before = {path: path.stat().st_mtime_ns for path in (advice / "rates").glob("*.jsonl")}
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in (advice / "rates").glob("*.jsonl")} == before
    with np.load("mine.npz") as data:
        arrays = {name: array[1:] for name, array in data.items()}
    np.savez("mine.npz", **arrays)
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, DataError), "advice on other data was given again"
    assert "the data has changed since advice/mine was made: delete that folder" in str(error)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("mine.npz", "--bytes", "50 sheep"), "--bytes takes a size such as 500kB"),
        (
            ("mine.npz", "--bytes", "2kB"),
            "2,000 bytes are too few: a device that stores one sample of this data, with the model "
            "and its metadata, needs 57,344",
        ),
        (("mine.npz", "--backend", "mars"), "--backend takes local or ray"),
        (
            ("mine.npz", "--participation", "1.5"),
            "participation must be above 0 and at most 1, got 1.5",
        ),
    ],
)
def test_a_wrong_argument_is_reported(
    folder: Path, arguments: tuple[str, ...], expected: str
) -> None:
    error = CliRunner().invoke(app, ["advise", *arguments]).exception
    assert isinstance(error, ConfigError)
    assert expected in str(error)


def test_ctrl_c_keeps_what_is_done(folder: Path) -> None:
    around = {**os.environ, "PYTHONPATH": str(Path(fedkeep.__file__).parents[1])}
    # Short runs and much time: what is under way does not depend on how fast the machine is.
    script = (
        "import fedkeep.advice.trial as t; t._MOST_ROUNDS = 40; import fedkeep.cli as c; c.main()"
    )
    command = [sys.executable, "-c", script, "advise", "mine.npz", "--minutes", "60", "--jobs", "1"]
    going = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=around,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - background jobs ignore Ctrl-C
    )
    deadline = time.monotonic() + 600
    while not list((folder / "advice" / "mine" / "runs").glob("fifo-seed1.jsonl")):
        assert going.poll() is None, going.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    going.send_signal(signal.SIGINT)
    advised, _ = going.communicate(timeout=240)
    assert going.returncode == 0
    assert "Use " in advised
    assert "The time was over before everything was settled" in advised
    assert (folder / "advice" / "mine" / "fleet.toml").exists()
