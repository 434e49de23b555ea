"""Every key of every table does something: set to another value, what is built or run differs."""

import ast
import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import fedkeep
from fedkeep.agent.assembly import AgentOptions, SampleOptions
from fedkeep.agent.sources import KINDS
from fedkeep.agent.store_file import StoreOptions
from fedkeep.config.components import COMPONENTS
from fedkeep.config.experiment import TABLES, RunSpec
from fedkeep.config.method import Samples
from fedkeep.config.options import MetricsOptions
from fedkeep.core.planning.greedy import COORDINATORS
from fedkeep.core.policy import POLICIES
from fedkeep.flower.recording import FleetRecordOptions
from fedkeep.flower.rounds import RoundOptions
from fedkeep.flower.server_app import StateOptions
from fedkeep.keyholder.service import KeyHolderOptions
from fedkeep.sim.runner import play
from fedkeep.tables import Table, merged, put

SOURCE = Path(fedkeep.__file__).parent
BASE: Table = {
    "task": {"name": "demo", "devices": 6, "smallest": 60, "largest": 90},
    "policy": {"name": "ode"},
    "storage": {"capacity": 4},
    "train": {"rounds": 8, "participation": 0.5, "learning_rate": 0.1, "epochs": 2},
    "stream": {"rounds_per_pass": 3},
    "weights": {"client_label": 1.0},
    "record": {"every": 2},
}
GIST: Table = {"policy": {"name": "balanced-reservoir"}, "gist": {"mode": "shared"}}
LATE: Table = {
    "stream": {"label_delay": 1},
    "waiting": {"share": 0.5},
    "storage": {"capacity": 8},
    "train": {"participation": 1.0},
}
ALL: Table = {"train": {"participation": 1.0}}
GREATEST: Table = {
    "policy": {"name": "ode", "choice": "greatest"},
    "storage": {"after_use": "keep"},
    "train": {"participation": 1.0},
}
NOISE: Table = {"privacy": {"epsilon": 20.0, "protect": ["estimator", "model", "profile"]}}
DEVICE_NOISE: Table = merged(
    NOISE, {"privacy": {"unit": "device", "planned_participations": 2, "profile_bound": 100.0}}
)

CASES: list[tuple[str, Any, Table]] = [
    ("storage.capacity", 7, {}),
    ("storage.rescore", False, {}),
    ("storage.max_age", 3, GREATEST),
    ("storage.quotas", "hard", {"stream": {"drift": 1.0}}),
    ("storage.after_use", "keep", {}),
    ("storage.discount", 0, merged(GREATEST, {"storage": {"after_use": "discount"}})),
    ("weights.client_label", 0.3, {}),
    ("estimator.name", "incremental", {}),
    ("estimator.cold_start", "exact", {}),
    ("estimator.max_age", 1, {"estimator": {"name": "incremental"}}),
    ("estimator.exact_samples", 20, {"estimator": {"name": "exact"}}),
    ("gist.mode", "local", GIST),
    ("gist.drift_weight", 0.1, GIST),
    ("gist.label_matching", False, GIST),
    ("gist.max_ess", 5.0, GIST),
    ("gist.encoding", "int8", GIST),
    ("gist.rank", 2, merged(GIST, {"model": {"name": "mlp"}})),
    ("gist.last_layers", 1, merged(GIST, {"model": {"name": "mlp"}})),
    ("train.learning_rate", 0.05, {}),
    ("train.epochs", 3, {}),
    ("train.batch_size", 2, {}),
    ("train.proximal", 0.5, {}),
    ("train.decay", 0.5, {"train": {"decay_every": 2}}),
    ("train.decay_every", 2, {"train": {"decay": 0.5}}),
    ("train.rounds", 6, {}),
    ("train.participation", 0.8, {}),
    ("train.dropout", 0.5, {}),
    ("aggregation.name", "fedavg", {}),
    (
        "aggregation.trim",
        0.4,
        {"aggregation": {"name": "trimmed"}, "train": {"participation": 1.0}},
    ),
    ("aggregation.strict_gradients", True, merged(GIST, {"aggregation": {"name": "robust"}})),
    ("aggregation.gradient_ratio", 1.0, merged(GIST, {"aggregation": {"name": "robust"}})),
    ("limits.update_norm", 0.01, {}),
    ("limits.update_ratio", 0.01, {}),
    ("limits.gradient_norm", 0.01, {}),
    ("limits.growth", 0.01, {"profile": {"measured": True, "every": 2}}),
    ("privacy.epsilon", 5.0, NOISE),
    ("privacy.delta", 1e-3, NOISE),
    ("privacy.unit", "device", NOISE),
    ("privacy.protect", ["model"], NOISE),
    ("privacy.clip", 0.2, NOISE),
    ("privacy.model_clip", 0.2, NOISE),
    ("privacy.profile_bound", 1.0, DEVICE_NOISE),
    ("privacy.planned_participations", 5, NOISE),
    ("privacy.retransmissions", 2, NOISE),
    (
        "privacy.on_exhausted",
        "absent",
        merged(DEVICE_NOISE, {"privacy": {"protect": ["estimator"]}}),
    ),
    ("stream.rounds_per_pass", 6, {}),
    ("stream.shuffle", False, {}),
    ("stream.burst", 2.0, {}),
    ("stream.drift", 1.0, {}),
    ("stream.drift_passes", 2, {"stream": {"drift": 1.0}}),
    ("stream.label_noise", 0.5, {}),
    ("stream.labelled", 0.5, {}),
    ("stream.label_delay", 2, LATE),
    ("waiting.share", 0.25, LATE),
    ("waiting.rule", "uncertain", LATE),
    ("waiting.max_age", 5, LATE),
    ("waiting.early_labels", 0, LATE),
    ("waiting.pseudo_labels", 0.5, LATE),
    ("stream.outliers", 0.5, {}),
    ("stream.outlier_scale", 50.0, {"stream": {"outliers": 0.5}}),
    ("stream.encoding", "int8", {}),
    ("stream.deflate_to", 45, {"task": {"features": 60}, "stream": {"encoding": "int8"}}),
    ("correction.name", "momentum", {}),
    ("profile.measured", True, {}),
    ("profile.velocity_error", 0.5, {}),
    ("profile.every", 3, {"profile": {"measured": True}, "record": {"devices": 1}}),
    (
        "profile.window",
        0.5,
        {"profile": {"measured": True, "every": 2}, "stream": {"drift": 1.0}},
    ),
    ("record.every", 4, {}),
    ("record.devices", 3, {}),
    ("record.prequential", True, {}),
    ("policy.value", "cosine", {}),
    ("policy.clip", 0.1, {"policy": {"value": "clipped"}}),
    ("policy.choice", "greatest", {}),
    ("policy.sharpness", 3.0, {}),
    ("policy.restart", True, {"policy": {"name": "reservoir"}}),
    ("policy.so_far", True, {"policy": {"name": "full-data"}}),
    ("policy.variant", "authors", {"policy": {"name": "fedbalancer"}}),
    ("storage.capacity_spread", 0.7, {}),
    ("estimator.normalise", False, merged(GIST, {"estimator": {"name": "incremental"}})),
    ("stream.current", False, {}),
    ("record.accuracy", "devices", {}),
    (
        "coordinator.unassigned",
        "fill",
        {"coordinator": {"name": "paper-greedy", "clients_per_label": 1, "labels_per_client": 2}},
    ),
    ("coordinator.clients_per_label", 1, {}),
    ("coordinator.labels_per_client", 1, {}),
    (
        "coordinator.quantities",
        "frequent",
        {"storage": {"capacity": 12}, "coordinator": {"labels_per_client": 3}},
    ),
    ("coordinator.applies_to", "all", {"policy": {"name": "fifo"}}),
    ("preset", "paper", {"weights": {}}),
    ("seed", 1, {}),
    ("label", "mine", {}),
    ("model.name", "mlp", {}),
]
"""A key, another value than it has, and tables in which it has something to do."""

ELSEWHERE = {
    "coordinator.seconds": "tests/core/test_coordination.py: how long the solver may take",
    "coordinator.unbiased": "tests/core/test_coordination.py: the exact plan under (9d)",
    "privacy.profiles": "tests/privacy/test_simulated_privacy.py: sealed ones are rejected",
    "limits.enabled": "tests/core/test_server.py: no cut runs without limits",
    "record.checkpoint_every": "tests/sim/test_engine.py: a killed run goes on from its checkpoint",
    "regions.name": "tests/experiments/test_clusters.py: custom regions",
    "policy.window": "tests/contract: the windows of the authors' variants are 50 samples long",
    "privacy.secure_aggregation": "tests/privacy/test_simulated_privacy.py: rejected",
    "privacy.encrypted_profiles": "tests/privacy/test_simulated_privacy.py: rejected",
    "coordinator.improve_up_to": "tests/core/test_coordination.py: larger fleets stay greedy",
}
"""Keys of an experiment that no run of a second shows, and where they are shown."""
DEPLOYED = {"sum_threshold", "min_cohort", "members", "member_key", "public_key"}
"""Of `privacy`: an experiment rejects them."""


@cache
def _plain(tables: str, folder: Path) -> bytes:
    return _played(ast.literal_eval(tables), folder)


def _played(tables: Table, folder: Path) -> bytes:
    """The record of a run without its header, which has the configuration itself."""
    spec = RunSpec(tables, "")
    return play(spec, folder).read_bytes().partition(b"\n")[2] + spec.name.encode()


@pytest.mark.parametrize(("key", "value", "tables"), CASES, ids=[key for key, _, _ in CASES])
def test_a_key_of_an_experiment_changes_its_run(
    key: str, value: Any, tables: Table, tmp_path: Path
) -> None:
    before = merged(BASE, tables)
    after = merged(before, {})
    put(after, key, value)
    plain = _plain(repr(before), tmp_path / "plain")
    assert _played(after, tmp_path / "changed") != plain


def test_every_key_of_an_experiment_is_walked() -> None:
    walked = {key for key, _, _ in CASES} | set(ELSEWHERE)
    keys = {
        f"{table}.{field.name}"
        for table, options in TABLES.items()
        for field in dataclasses.fields(options)
        if not (table == "privacy" and field.name in DEPLOYED)
    }
    for kind, registry in (("policy", POLICIES), ("coordinator", COORDINATORS)):
        ours = (one for one in registry.values() if one.__module__.startswith("fedkeep."))
        for component in ours:  # another test of this process may have registered its own
            keys |= {f"{kind}.{field.name}" for field in dataclasses.fields(component)}
    assert keys <= walked, keys - walked


DEPLOYMENT: dict[str, type[Any]] = {
    "samples": SampleOptions,
    "samples of a fleet": Samples,
    "store": StoreOptions,
    "agent": AgentOptions,
    "metrics": MetricsOptions,
    "rounds": RoundOptions,
    "state": StateOptions,
    "records": FleetRecordOptions,
    "keyholder": KeyHolderOptions,
    **{f"source {kind}": options for kind, options in KINDS.items()},
    **{f"task {name}": task for name, task in COMPONENTS["task"].items()},
    **{"privacy": TABLES["privacy"]},
}


@pytest.mark.parametrize("table", DEPLOYMENT)
def test_a_key_of_a_deployment_is_read_somewhere(table: str) -> None:
    """Outside of `__post_init__`, which only checks it."""
    read = _read_names()
    unread = [
        field.name
        for field in dataclasses.fields(DEPLOYMENT[table])
        if field.init and field.name not in read
    ]
    assert not unread


@cache
def _read_names() -> frozenset[str]:
    """The attributes that the package reads, those in checks of options apart."""
    found: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        checks = {
            inner
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.name == "__post_init__"
            for inner in ast.walk(node)
        }
        found |= {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Load)
            and node not in checks
        }
    return frozenset(found)
