"""One stream, three ways to run a device: the simulator's fleet, an agent with a file, a Keeper.

However the stream is cut, wherever a process ends and begins again, all three keep the same samples
and the same gist, and report the same.
"""

from collections.abc import Sequence
from dataclasses import astuple
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedkeep.agent.agent import Agent
from fedkeep.agent.arrivals import Arrival
from fedkeep.agent.assembly import AgentConfig, assemble, budget_for, parse_config
from fedkeep.config.device import build_device
from fedkeep.config.options import learner_of
from fedkeep.core.device import Device
from fedkeep.core.participation import Participation
from fedkeep.core.protocols import FleetLearner
from fedkeep.core.regions import regions_for
from fedkeep.core.seeds import child_seed
from fedkeep.core.types import Assignment, Batch, LocalTraining, Report, TrainOrder, Vector
from fedkeep.core.velocity import VelocityMeter
from fedkeep.sim.fleet import SimulatedFleet

SHAPE, LABELS, ROUNDS, EACH, SLOTS = (4,), 3, 3, 40, 9
MODEL = {"name": "softmax", "last_layers": 0}
LEARNER = learner_of(MODEL, SHAPE, LABELS)
_HOUR = 3600.0


def stream(seed: int) -> Batch:
    """Samples whose labels are not alike in number.

    None comes twice: to an agent a stored sample that comes again is one that was resent, and
    changes nothing, where a simulated stream passes by again.
    """
    rng = np.random.default_rng(seed)
    ids = rng.permutation(3 * ROUNDS * EACH)[: ROUNDS * EACH]
    labels = (ids**2 % 7) % LABELS
    x = np.random.default_rng(5).standard_normal((ROUNDS * EACH, *SHAPE)) + labels[:, None]
    return Batch(x.astype(np.float32), labels.astype(np.int64), ids.astype(np.int64))


def order(round_: int, *, plan: int | None, gradient_from: int) -> TrainOrder:
    """An order with a plan for so many slots a label, and with g_hat from some round on."""
    rng = np.random.default_rng(100 + round_)
    gradient = rng.standard_normal(LEARNER.gradient_size).astype(np.float32)
    known = gradient if round_ >= gradient_from else None
    assignment = None
    if plan is not None:
        assignment = Assignment(np.full(LABELS, plan), np.array([1.0, 2.0, 0.5]), 1.0)
    model = LEARNER.initial(round_ // 2)  # the same model twice: a gist treats that otherwise
    return TrainOrder(round_, model, known, LocalTraining(0.05, 2), round_ - 1, assignment)


def table(folder: Path, method: dict[str, Any]) -> dict[str, Any]:
    return {
        "samples": {"shape": list(SHAPE), "labels": LABELS, "outlier": 0.0},
        "model": MODEL,
        "store": {"path": str(folder / "a.store"), "log_length": 0},
        "agent": {"socket": str(folder / "a.sock"), "nice": 0, "seed": 9},
        **method,
    }


class InMemory:
    """A device in memory, as a Keeper has it: offered batches, synced with a model."""

    def __init__(self, config: AgentConfig, capacity: int) -> None:
        self._config, self._capacity = config, capacity
        self.device = self._made()

    def _made(self) -> Device:
        config = self._config
        regions = regions_for(config.method.policy, LABELS)
        return build_device(
            config.method,
            LEARNER,
            capacity=self._capacity,
            sample_shape=SHAPE,
            labels=LABELS,
            regions=regions,
            meter=VelocityMeter(regions.count, _HOUR, 12, least=10.0),
            seed=config.agent.seed,
            # An agent draws keys by ids, so that a sample that comes again draws the same.
            draw_seed=child_seed(config.agent.seed, "keys"),
        )

    def restart(self) -> None:
        state = self.device.snapshot()
        self.device = self._made()
        self.device.restore(state)

    def offer(self, batch: Batch) -> None:
        # To an agent, a sample that is stored and comes again changes nothing.
        first = np.isin(np.arange(len(batch)), np.unique(batch.ids, return_index=True)[1])
        new = first & ~np.isin(batch.ids, self.device.store.stored().batch.ids)
        self.device.observe(batch.take(new), 0.0)

    def participate(self, asked: TrainOrder) -> Report:
        participation = Participation(self.device, asked)
        participation.prepare()
        return participation.finish(participation.train())


class Simulated(InMemory):
    """The same device, driven by the simulator's fleet, which measures and trains in batches."""

    def participate(self, asked: TrainOrder) -> Report:
        fleet = SimulatedFleet(_fleet_learner(), None, lambda _: self.device)  # type: ignore[arg-type]
        return fleet.take_part({0: asked}, {})[0]


class OnDisk:
    """An agent with a store in a file, started anew where it is said."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self.agent: Agent = assemble(config)

    @property
    def device(self) -> Device:
        return self.agent.device

    def restart(self) -> None:
        assert self.agent.commit()
        self.agent.store.file.disk.close()
        self.agent = assemble(self._config)

    def offer(self, batch: Batch) -> None:
        columns = zip(batch.x, batch.y.tolist(), batch.ids.tolist(), strict=True)
        self.agent.judge([Arrival(x, y, id_, "test") for x, y, id_ in columns])

    def participate(self, asked: TrainOrder) -> Report:
        return self.agent.participate(asked)


def _fleet_learner() -> FleetLearner:
    assert hasattr(LEARNER, "train_many")
    return LEARNER  # type: ignore[return-value]


def lived(
    runner: InMemory | OnDisk,
    samples: Batch,
    cuts: Sequence[int],
    restarts: Sequence[int],
    orders: Sequence[TrainOrder],
) -> list[Report]:
    """Feed the stream in pieces, starting anew after some, with a participation every `EACH`."""
    reports = []
    edges = sorted({0, len(samples), *cuts, *(EACH * (r + 1) for r in range(ROUNDS))})
    for start, stop in pairwise(edges):
        runner.offer(samples.take(slice(start, stop)))
        if stop in restarts:
            runner.restart()
        if stop % EACH == 0:
            reports.append(runner.participate(orders[stop // EACH - 1]))
    return reports


def check_same(one: InMemory | OnDisk, other: InMemory | OnDisk) -> None:
    first, second = one.device.store.stored(), other.device.store.stored()
    assert first.batch.ids.tolist() == second.batch.ids.tolist()
    assert first.uses.tolist() == second.uses.tolist()
    np.testing.assert_allclose(first.scores, second.scores, rtol=1e-4, atol=1e-6)
    assert (one.device.gist is None) == (other.device.gist is None)
    if one.device.gist is None or other.device.gist is None:
        return
    mine, theirs = one.device.gist.vector(), other.device.gist.vector()
    assert (mine is None) == (theirs is None)
    if mine is not None and theirs is not None:
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    assert one.device.gist.ess == pytest.approx(other.device.gist.ess, rel=1e-4)


def check_reports(one: Sequence[Report], other: Sequence[Report]) -> None:
    for first, second in zip(one, other, strict=True):
        assert (first.round, first.steps, first.samples, first.gradient_samples) == (
            second.round,
            second.steps,
            second.samples,
            second.gradient_samples,
        )
        assert first.weight == pytest.approx(second.weight, rel=1e-6)
        _check_vectors(first.model, second.model)
        _check_vectors(first.local_gradient, second.local_gradient)


def _check_vectors(one: Vector | None, other: Vector | None) -> None:
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


PRESETS: list[dict[str, Any]] = [
    {"preset": preset, "policy": {"name": name}}
    for preset in ("default", "paper", "authors")
    for name in ("balanced-reservoir", "ode", "fifo", "reservoir", "fedbalancer", "sld")
]
STORES: list[dict[str, Any]] = [
    {"policy": {"name": name}, "storage": {**storage, **after_use}, "gist": gist}
    for name, gist in (
        ("ode", {"mode": "none"}),
        ("balanced-reservoir", {"mode": "shared"}),
        ("balanced-reservoir", {"mode": "local", "encoding": "float16"}),
        ("fifo", {"mode": "local", "label_matching": False}),
        ("high-loss", {"mode": "none"}),
    )
    for storage in (
        {"rescore": True},
        {"rescore": False},
        {"max_age": 15},
        {"quotas": "hard", "rescore": False},
    )
    for after_use in (
        {"after_use": "keep"},
        {"after_use": "discount", "discount": 2},
        {"after_use": "evict_trained_first"},
    )
]


@settings(
    deadline=None, max_examples=120, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(
    method=st.sampled_from([*PRESETS, *STORES]),
    seed=st.integers(0, 3),
    cuts=st.lists(st.integers(1, ROUNDS * EACH - 1), max_size=6),
    restarts=st.sets(st.integers(0, 6), max_size=3),
    plan=st.sampled_from([None, 2]),
    gradient_from=st.integers(0, ROUNDS),
)
def test_simulator_agent_and_keeper_do_the_same(
    method: dict[str, Any],
    seed: int,
    cuts: list[int],
    restarts: set[int],
    plan: int | None,
    gradient_from: int,
) -> None:
    samples = stream(seed)
    orders = [order(r, plan=plan, gradient_from=gradient_from) for r in range(ROUNDS)]
    with TemporaryDirectory() as folder:
        tables = table(Path(folder), method)
        tables["store"]["budget"] = budget_for(parse_config(tables), SLOTS)
        config = parse_config(tables)
        if regions_for(config.method.policy, LABELS).count == 1 and plan is not None:
            whole = Assignment(np.array([LABELS * plan]), np.ones(1), 1.0)
            orders = [TrainOrder(**{**vars(o), "assignment": whole}) for o in orders]
        agent = OnDisk(config)
        capacity = agent.device.capacity
        simulated, keeper = Simulated(config, capacity), InMemory(config, capacity)
        edges = sorted({*cuts, *(EACH * (r + 1) for r in range(ROUNDS))})
        stops = [edges[i] for i in restarts if i < len(edges)]
        reports = lived(simulated, samples, (), (), orders)
        check_reports(reports, lived(keeper, samples, cuts, stops, orders))
        check_same(simulated, keeper)
        check_reports(reports, lived(agent, samples, cuts, stops, orders))
        check_same(simulated, agent)
        figures = [runner.device.gist for runner in (simulated, agent)]
        if all(gist is not None and gist.figures is not None for gist in figures):
            mine, theirs = (astuple(gist.figures) for gist in figures)  # type: ignore[union-attr,arg-type]
            assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-5)
        agent.agent.store.file.disk.close()
