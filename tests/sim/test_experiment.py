"""Experiment files: every mistake is named, and a sweep is what it says."""

from pathlib import Path

import pytest

from fedkeep.config.experiment import expand, override, read_experiment, resolve
from fedkeep.core.errors import ConfigError
from fedkeep.core.planning.greedy import Greedy, Uncoordinated
from fedkeep.core.policies.ode import Ode
from fedkeep.core.policies.sld import Sld
from fedkeep.sim.engine import Simulator
from fedkeep.sim.sweep import run_sweep
from fedkeep.tables import Table

TASK: Table = {"task": {"name": "demo"}}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "'task.name' is missing"),
        (TASK | {"polcy": {"name": "ode"}}, "unknown key 'polcy': did you mean 'policy'?"),
        (TASK | {"policy": {"name": "odd"}}, "unknown policy 'odd': did you mean 'ode'?"),
        (
            TASK | {"policy": {"name": "ode", "valu": "x"}},
            "unknown key 'policy.valu': did you mean 'value'?",
        ),
        (
            TASK | {"policy": {"name": "ode", "value": "cosin"}},
            "'policy.value' cannot be 'cosin': did you mean 'cosine'?",
        ),
        (
            TASK | {"train": {"rounds": "many"}},
            "'train.rounds' cannot be 'many': expected a whole number, got text",
        ),
        (TASK | {"train": {"rounds": 0}}, "in [train]: rounds must be 1 or more, got 0"),
        (TASK | {"storage": {"capacity": -1}}, "in [storage]: capacity must be 1 or more, got -1"),
        (TASK | {"storage": 5}, "'storage' must be a table, got 5"),
        (TASK | {"seed": -1}, "'seed' must be a whole number of at least 0, got -1"),
        (TASK | {"preset": "papr"}, "unknown preset 'papr': did you mean 'paper'?"),
        ({"task": {"name": "dem"}}, "unknown task 'dem': did you mean 'demo'?"),
        (
            TASK | {"coordinator": {"name": "greedy", "applies_to": "some"}},
            "'coordinator.applies_to' cannot be 'some'",
        ),
        (TASK | {"sweep": {"seed": 3}}, "'sweep.seed' must be a list of one or more values, got 3"),
        (TASK | {"methods": {"a": 3}}, "'methods.a' must be a table of what differs, got 3"),
        (TASK | {"policy": {"name": "nowhere:Policy"}}, "cannot import 'nowhere'"),
        (
            TASK | {"policy": {"name": "fedkeep.core.types:Batch"}},
            "is no policy: it must be a subclass of SelectionPolicy",
        ),
    ],
)
def test_a_mistake_is_named_with_what_is_allowed(table: Table, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        expand(table)
    assert message in str(error.value)


def test_the_digest_tells_settings_apart_and_does_not_mind_a_default_written_out() -> None:
    plain = resolve(TASK).digest()
    assert resolve(TASK | {"train": {"rounds": 100}, "stream": {"burst": 0.0}}).digest() == plain
    for other in (
        {"train": {"rounds": 99}},
        {"stream": {"burst": 1.0}},
        {"policy": {"name": "fifo"}},
        {"seed": 1},
    ):
        assert resolve(TASK | other).digest() != plain


def test_a_baseline_runs_uncoordinated_by_default() -> None:
    tables = TASK | {"coordinator": {"name": "greedy", "labels_per_client": 2}}
    assert isinstance(resolve(tables | {"policy": {"name": "ode"}}).coordinator, Greedy)
    fifo = resolve(tables | {"policy": {"name": "fifo"}})
    assert isinstance(fifo.coordinator, Uncoordinated)
    assert fifo.weights.client_label == 1.0
    everyone = TASK | {
        "coordinator": {"name": "greedy", "applies_to": "all"},
        "policy": {"name": "fifo"},
    }
    assert isinstance(resolve(everyone).coordinator, Greedy)


def test_presets_are_defaults_that_a_file_may_override() -> None:
    authors = resolve(TASK | {"preset": "authors", "policy": {"name": "sld"}})
    assert authors.policy == Sld(variant="authors")
    assert authors.estimator.name == "round-mean"
    assert not authors.stream.shuffle
    mixed = resolve(TASK | {"preset": "authors", "stream": {"shuffle": True}})
    assert mixed.stream.shuffle
    assert mixed.estimator.cold_start == "exact"


def test_a_sweep_is_the_product_of_methods_and_lists() -> None:
    table = TASK | {
        "methods": {
            "ode": {"policy": {"name": "ode"}},
            "cosine": {"policy": {"name": "ode", "value": "cosine"}},
        },
        "sweep": {"storage": {"capacity": [5, 10]}, "seed": [0, 1, 2]},
    }
    cells = expand(table)
    assert len(cells) == 12
    assert len({cell.name for cell in cells}) == 12
    assert {cell.setting for cell in cells} == {"storage.capacity=5", "storage.capacity=10"}
    assert cells[-1].experiment.policy == Ode(value="cosine", choice="drawn"), (
        "the default preset draws"
    )
    assert cells[-1].experiment.label == "cosine"


def test_set_reaches_a_swept_key_by_its_quotes() -> None:
    swept = {**TASK, "sweep": {"storage.capacity": [5, 10], "seed": [0]}}
    assert override(swept, ['sweep."storage.capacity"=[3]'])["sweep"] == {
        "storage.capacity": [3],
        "seed": [0],
    }


def test_set_overrides_any_key() -> None:
    table = override(
        TASK, ["train.rounds=7", "policy.name=fifo", "storage.capacity=3", "task.devices=5"]
    )
    experiment = resolve(table)
    assert (experiment.train.rounds, experiment.label, experiment.storage.capacity) == (
        7,
        "fifo",
        3,
    )
    with pytest.raises(ConfigError, match="--set takes key=value"):
        override(TASK, ["rounds"])
    with pytest.raises(ConfigError, match="is no key"):
        override(TASK, [".=3"])


def test_the_digest_follows_every_option() -> None:
    one, two = resolve(TASK), resolve(TASK | {"storage": {"capacity": 11}})
    assert one.digest() == resolve(TASK).digest() != two.digest()


def test_a_policy_in_a_file_of_ones_own_runs_in_worker_processes_too(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from fedkeep.core.policy import SelectionPolicy, policy\n"
        "@policy('mine')\n"
        "class Mine(SelectionPolicy):\n"
        "    sign: float = 1.0\n"
        "    def score(self, batch, view):\n"
        "        return self.sign * view.measurements.losses()\n"
    )
    table = TASK | {
        "policy": {"name": f"{tmp_path / 'mine.py'}:Mine", "sign": -1.0},
        "label": "mine",
        "train": {"rounds": 4},
        "sweep": {"seed": [0, 1]},
    }
    run_sweep(expand(table), tmp_path / "out", jobs=2, resume=False, listen=lambda *_: None)
    assert len(list((tmp_path / "out").glob("mine-seed?.jsonl"))) == 2


def test_a_sweep_over_a_nested_key_gives_every_run_its_own_value() -> None:
    own: Table = {"name": "custom", "path": "x.csv", "partition": {"name": "dirichlet"}}
    table: Table = {
        "task": own,
        "policy": {"name": "fifo"},
        "sweep": {"task.partition.alpha": [0.1, 1.0]},
    }
    resolved = [cell.experiment.resolved()["task"] for cell in expand(table)]
    assert [task["partition"]["alpha"] for task in resolved] == [0.1, 1.0]
    assert own == {"name": "custom", "path": "x.csv", "partition": {"name": "dirichlet"}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "class Mine(SelectionPolicy):\n    def score(self, batch, view): ...\n",
            "put @dataclass(frozen=True) above the class",
        ),
        ("class Mine(SelectionPolicy):\n    k: int = 3\n", "lacks a method: score"),
    ],
)
def test_a_custom_policy_that_cannot_run_is_rejected_before_it_does(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "mine.py").write_text(
        "from fedkeep.core.policy import SelectionPolicy, policy\n" + text
    )
    with pytest.raises(ConfigError) as error:
        expand(TASK | {"policy": {"name": f"{tmp_path}/mine.py:Mine"}})
    assert message in str(error.value)


OWN = """
from dataclasses import dataclass

import numpy as np

from fedkeep.core.aggregation import Aggregator
from fedkeep.core.planning.greedy import Greedy
from fedkeep.data import TASKS


@dataclass(frozen=True)
class FleetProfiles:
    devices: int = 6

    def load(self, seed, progress=None):
        return TASKS["demo"](devices=self.devices).load(seed)


@dataclass(frozen=True)
class Halves:
    count: int = 2

    def assign(self, batch, measurements):
        return (batch.x[:, 0] > 0).astype(np.int64)


@dataclass(frozen=True)
class Frozen(Aggregator):
    speed: float = 0.0

    def aggregate(self, model, reports):
        return model


@dataclass(frozen=True)
class Mine(Greedy):
    pass
"""


def test_every_part_may_be_a_custom_class(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    name = f"{tmp_path}/own.py:{{}}".format
    table: Table = {
        "task": {"name": name("FleetProfiles"), "devices": 8},
        "policy": {"name": "ode"},
        "coordinator": {"name": name("Mine"), "clients_per_label": 2},
        "regions": {"name": name("Halves")},
        "aggregation": {"name": name("Frozen"), "speed": 0.5},
        "train": {"rounds": 3},
    }
    simulator = Simulator(resolve(table))
    before = simulator.server.model.copy()
    list(simulator.run())
    assert simulator.parts.data.devices == 8
    assert simulator.parts.regions.count == 2
    assert (simulator.server.model == before).all()
    resolved = simulator.experiment.resolved()
    assert (resolved["aggregation"]["name"], resolved["aggregation"]["speed"]) == (
        name("Frozen"),
        0.5,
    )
    assert simulator.experiment.digest() != resolve(table | {"aggregation": {}}).digest()


@pytest.mark.parametrize(
    ("key", "named", "message"),
    [
        ("task", "Halves", "is no task, it lacks a method: load"),
        ("regions", "FleetProfiles", "is no division into regions, it lacks a method: assign"),
        ("aggregation", "Halves", "is no aggregation: it must be a subclass of Aggregator"),
        ("coordinator", "np", "is no coordinator"),
    ],
)
def test_a_class_that_is_something_else_is_rejected(
    tmp_path: Path, key: str, named: str, message: str
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(ConfigError) as error:
        resolve(TASK | {key: {"name": f"{tmp_path}/own.py:{named}"}})
    assert message in str(error.value)


def test_runs_that_would_overwrite_each_other_are_refused() -> None:
    table = TASK | {"label": "mine", "sweep": {"policy.name": ["fifo", "ode"]}}
    with pytest.raises(ConfigError, match="two runs would both be called 'mine-seed0'"):
        expand(table)


def test_a_file_that_is_its_own_base_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('base = "b.toml"\n')
    (tmp_path / "b.toml").write_text('base = "a.toml"\n')
    with pytest.raises(ConfigError, match="is its own base"):
        read_experiment(tmp_path / "a.toml")
