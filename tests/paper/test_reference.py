"""`preset = "paper"` is the paper: the same plan, samples, estimates and models as plain numpy."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkeep.config.experiment import resolve
from fedkeep.core.planning.greedy import PaperGreedy
from fedkeep.core.planning.profiles import FleetProfiles
from fedkeep.core.seeds import child_seed, uniform_keys
from fedkeep.core.types import AnyArray, IntArray
from fedkeep.data import Federation, ModelSpec, Ownership
from fedkeep.sim.engine import Simulator
from fedkeep.sim.fleet import SimulatedFleet
from tests.paper.reference import Ode, algorithm_1, equation_11

LABELS, FEATURES, ROUNDS, PASS, SEED = 5, 6, 300, 40, 3
CLOSE = 2e-5
"""Of the length of a vector: ours are float32, the reference is float64."""


def federation(sizes: list[int], labels_of: Callable[[int], list[int]]) -> Federation:
    """Devices of these sizes with these labels, noise around a mean for each label."""
    rng = np.random.default_rng(11)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    y: IntArray = np.array([rng.choice(labels_of(int(device))) for device in owner])
    means = 1.5 * rng.standard_normal((LABELS, FEATURES))
    x = (means[y] + rng.standard_normal((len(y), FEATURES))).astype(np.float32)
    members = Ownership.from_assignment(owner, len(sizes))
    held_out = np.zeros(len(y), dtype=bool)
    held_out[members.offsets[:-1]] = True
    names = tuple(map(str, range(LABELS)))
    train, test = members.where(~held_out), members.where(held_out)
    return Federation("small", x, y, train, test, names, ModelSpec("softmax"), rounds_per_pass=PASS)


def some(device: int) -> list[int]:
    return sorted({device % LABELS, (device + 1) % LABELS, (2 * device + 3) % LABELS})


FLEETS: dict[str, tuple[list[int], Callable[[int], list[int]], Any, dict[str, int]]] = {
    "one fast device": (
        [40] * 9 + [2400], some, 6, {"clients_per_label": 3, "labels_per_client": 3},
    ),
    "very unequal rates": (
        [20, 25, 30, 40, 60, 90, 150, 400, 900, 2000], some, 5,
        {"clients_per_label": 2, "labels_per_client": 2},
    ),
    "skewed capacities": (
        [60] * 10, some, (2, 3, 4, 5, 6, 7, 8, 9, 60, 120),
        {"clients_per_label": 4, "labels_per_client": 2},
    ),
    "one label a device": (
        [50 + 5 * d for d in range(10)], lambda d: [d % LABELS], 4,
        {"clients_per_label": 5, "labels_per_client": 5},
    ),
    "a label left to nobody": (
        [50] * 4, some, 4,
        {"clients_per_label": 1, "labels_per_client": 1},
    ),
}  # fmt: skip


class Dice:
    """The keys of fedkeep for what the paper leaves open: values before there is a first g_hat."""

    def fresh(self, device: int) -> Callable[[int], float]:
        seed = child_seed(SEED, "device", device)
        return lambda arrival: float(uniform_keys(seed, np.array([arrival]))[0])

    def again(self, device: int, round_: int) -> Callable[[int], float]:
        seed = child_seed(child_seed(SEED, "device", device), "revalue", round_)
        return lambda id_: float(uniform_keys(seed, np.array([id_]))[0])


def assert_close(found: AnyArray, expected: AnyArray) -> None:
    gap = np.linalg.norm(found.astype(np.float64) - expected)
    assert gap <= CLOSE * max(1e-6, float(np.linalg.norm(expected)))


@pytest.mark.parametrize("name", FLEETS)
def test_300_rounds_are_those_of_the_equations(name: str) -> None:
    sizes, labels_of, capacity, limits = FLEETS[name]
    data = federation(sizes, labels_of)
    table = {
        "preset": "paper",
        "policy": {"name": "ode"},
        "storage": {"capacity": capacity},
        "coordinator": limits,
        "train": {"rounds": ROUNDS, "participation": 0.4, "learning_rate": 0.03, "epochs": 3},
        "task": {"name": "demo"},
        "seed": SEED,
    }
    simulator = Simulator(resolve(table), data)
    velocity = data.label_counts / PASS
    ode = Ode(
        velocity, [capacity] * len(sizes) if isinstance(capacity, int) else capacity,
        simulator.server.model.astype(np.float64), limits["clients_per_label"],
        limits["labels_per_client"], rate=0.03, epochs=3,
    )  # fmt: skip
    plan, fleet, stream = simulator.server.plan, simulator.parts.fleet, simulator.parts.stream
    assert plan is not None
    assert isinstance(fleet, SimulatedFleet)
    np.testing.assert_array_equal(plan.quotas, ode.quotas)
    np.testing.assert_allclose(plan.label_weights, ode.gamma, rtol=1e-12)
    assert ode.gamma.all() or name == "a label left to nobody"

    seen, dice, compared = dict.fromkeys(range(len(sizes)), 0), Dice(), 0

    def arrivals(device: int) -> Any:
        batch = stream.arrivals(device, seen[device], simulator.server.round)
        seen[device] = simulator.server.round
        return zip(batch.ids.tolist(), batch.x.astype(np.float64), batch.y.tolist(), strict=True)

    for record in simulator.run():
        assert record.summary.rejections == ()
        ode.play(record.summary.participants, arrivals, dice.fresh, dice.again)
        for device in record.summary.participants:
            ids = fleet.devices[device].store.stored().batch.ids.tolist()
            assert sorted(ids) == sorted(slot.id for slot in ode.clients[device].stored)
            compared += len(ids)
        assert_close(simulator.server.model, ode.model)
        direction = simulator.server.estimator.global_gradient()
        assert (direction is None) == (ode.direction is None)
        if direction is not None and ode.direction is not None:
            assert_close(direction, ode.direction)
    assert ode.round == ROUNDS
    assert compared > 1000


def functions_called(preset: str) -> set[str]:
    """The functions of the core that a run of this preset goes through."""
    sizes, labels_of, capacity, limits = FLEETS["one fast device"]
    data = federation(sizes, labels_of)
    table = {
        "preset": preset,
        "policy": {"name": "ode"},
        "storage": {"capacity": capacity},
        "coordinator": limits,
        "train": {"rounds": 20, "participation": 0.4, "learning_rate": 0.03, "epochs": 1},
        "task": {"name": "demo"},
    }
    called: set[str] = set()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and "fedkeep/core" in frame.f_code.co_filename:
            called.add(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        for _ in Simulator(resolve(table), data).run():
            pass
    finally:
        sys.setprofile(None)
    return called


OURS = {
    "rates, capacities and claims": {
        "Server._capped_fleet", "cap_profiles", "robust_cap", "mad_upper_bound",
        "ClaimAudit.observe", "ClaimAudit.review", "ClaimAudit.discount",
    },
    "updates": {
        "_require_plausible", "ClippedReports.__init__", "clip_to_usual", "clip_weights",
        "RobustMean.merge", "filter_updates", "reputation_weights",
        "UpdateStatistics.learn_lengths", "UpdateStatistics.max_length",
    },
    "local gradients": {"GradientClip.clip", "inconsistent_gradients", "weight_cap"},
    "plan": {"LabelLimits.stages", "LabelHolders.repair", "LabelHolders.fill", "improve"},
    "store": {"MemoryStore._most_above"},
}  # fmt: skip
"""What the default does to a fleet of ODE, and the paper does not."""


@pytest.mark.parametrize("part", OURS)
def test_the_paper_runs_no_code_of_the_cuts(
    part: str, default_calls: set[str], paper_calls: set[str]
) -> None:
    assert OURS[part] <= default_calls, "or the names are stale, and the next line says nothing"
    assert not OURS[part] & paper_calls


@pytest.fixture(scope="module")
def default_calls() -> set[str]:
    return functions_called("default")


@pytest.fixture(scope="module")
def paper_calls() -> set[str]:
    return functions_called("paper")


@settings(deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 12),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_the_plan_is_algorithm_1(
    seed: int, devices: int, labels: int, n_label: int, n_client: int
) -> None:
    rng = np.random.default_rng(seed)
    velocity = rng.choice([0.0, 0.0, 1.0, 2.0, 2.5, 7.0, 100.0], size=(devices, labels))
    capacity = rng.integers(1, 20, devices)
    plan = PaperGreedy(n_label, n_client).plan(FleetProfiles.numbered(capacity, velocity))
    expected = algorithm_1(velocity, capacity.tolist(), n_label, n_client)
    np.testing.assert_array_equal(plan.quotas, expected)
    if expected.any():
        np.testing.assert_allclose(plan.label_weights, equation_11(velocity, expected), rtol=1e-12)
    filled = PaperGreedy(n_label, n_client, "fill").plan(FleetProfiles.numbered(capacity, velocity))
    assert ((filled.quotas > 0) >= (expected > 0)).all()
    useful = velocity.any(axis=1)
    np.testing.assert_array_equal(filled.quotas.sum(axis=1), np.where(useful, capacity, 0))
