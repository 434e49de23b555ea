"""Labels that come later: one stream through the simulator, an agent with a file, and a Keeper."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fedkeep.agent.agent import Agent
from fedkeep.agent.arrivals import Arrival
from fedkeep.agent.assembly import AgentConfig, assemble, budget_for, parse_config
from fedkeep.config.device import build_device
from fedkeep.config.options import learner_of
from fedkeep.core.device import Device
from fedkeep.core.regions import regions_for
from fedkeep.core.seeds import child_seed
from fedkeep.core.types import LocalTraining, Report, TrainOrder
from fedkeep.core.velocity import VelocityMeter
from fedkeep.data import Stream, StreamOptions
from fedkeep.data.synthetic import Demo
from fedkeep.sim.fleet import SimulatedFleet

SHAPE, LABELS, ROUNDS, SLOTS = (4,), 3, 12, 10
EVERY = 4
"""Rounds between two participations."""
LEARNER: Any = learner_of({"name": "softmax", "last_layers": 0}, SHAPE, LABELS)
DATA = Demo(devices=1, labels=3, features=4, smallest=150, largest=150).load(seed=0)


def late_stream(delay: Any, labelled: float) -> Stream:
    """Some hundred samples in one pass, so that none comes twice."""
    options = StreamOptions(rounds_per_pass=ROUNDS, label_delay=delay, labelled=labelled)
    return Stream(DATA, options, seed=0)


def order(round_: int) -> TrainOrder:
    gradient = np.random.default_rng(round_).standard_normal(LEARNER.gradient_size)
    local = LocalTraining(0.05, 2)
    model = LEARNER.initial(round_)
    return TrainOrder(round_, model, gradient.astype(np.float32), local, round_ - 1)


class Simulated:
    """A device that catches up with the stream when it takes part."""

    def __init__(self, config: AgentConfig, capacity: int, stream: Stream) -> None:
        seed = config.agent.seed
        self.device: Device = build_device(
            config.method,
            LEARNER,
            capacity=capacity,
            sample_shape=SHAPE,
            labels=LABELS,
            meter=VelocityMeter(regions_for(config.method.policy, LABELS).count),
            seed=seed,
            draw_seed=child_seed(seed, "keys"),
        )
        self.fleet = SimulatedFleet(LEARNER, stream, lambda _: self.device)

    def participate(self, round_: int) -> Report:
        self.fleet.catch_up([0], until=round_)
        return self.fleet.take_part({0: order(round_)}, {})[0]


class OnDisk:
    """An agent that gets samples and labels as records, and may begin anew from its file."""

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

    def see(self, stream: Stream, round_: int, cut: int) -> None:
        came, due = stream.arrivals(0, round_, round_ + 1), stream.labels_due(0, round_)
        known = stream.labelled(came.ids) & (not stream.delayed)
        records = [
            Arrival(x, y if has else None, id_, "test")
            for x, y, id_, has in zip(
                came.x, came.y.tolist(), came.ids.tolist(), known.tolist(), strict=True
            )
        ]
        if stream.delayed:
            records += [
                Arrival(None, y, id_, "test", label_only=True)
                for y, id_ in zip(due.y.tolist(), due.ids.tolist(), strict=True)
            ]
        for part in (records[:cut], records[cut:]):
            if part:
                self.agent.judge(part)

    def participate(self, round_: int) -> Report:
        return self.agent.participate(order(round_))


def check_same(one: Device, other: Device) -> None:
    first, second = one.store.stored(), other.store.stored()
    assert first.batch.ids.tolist() == second.batch.ids.tolist()
    assert first.batch.y.tolist() == second.batch.y.tolist()
    assert first.uses.tolist() == second.uses.tolist()
    np.testing.assert_allclose(first.scores, second.scores, rtol=1e-4, atol=1e-6)
    assert one.waiting is not None
    assert other.waiting is not None
    assert one.waiting.ids.tolist() == other.waiting.ids.tolist()
    assert one.waiting.counts == other.waiting.counts
    assert one.waiting.early == other.waiting.early
    if one.gist is None or other.gist is None:
        return
    assert one.gist.ess == pytest.approx(other.gist.ess, rel=1e-4)
    mine, theirs = one.gist.vector(), other.gist.vector()
    assert (mine is None) == (theirs is None)
    if mine is not None and theirs is not None:
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


@settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(
    policy=st.sampled_from(["balanced-reservoir", "fifo", "ode", "high-loss"]),
    rule=st.sampled_from(["random", "balanced", "uncertain", "newest", "oldest"]),
    delay=st.sampled_from([0, 1, 3, "pass"]),
    labelled=st.sampled_from([0.4, 1.0]),
    options=st.sampled_from(
        [{}, {"max_age": 20}, {"early_labels": 0}, {"early_labels": 3}, {"pseudo_labels": 0.8}]
    ),
    restarts=st.sets(st.integers(0, ROUNDS), max_size=3),
    cut=st.integers(0, 12),
)
def test_simulator_and_agent_do_the_same_with_late_labels(
    policy: str,
    rule: str,
    delay: Any,
    labelled: float,
    options: dict[str, Any],
    restarts: set[int],
    cut: int,
) -> None:
    stream = late_stream(delay, labelled)
    assume(stream.late)
    with TemporaryDirectory() as folder:
        tables: dict[str, Any] = {
            "samples": {"shape": list(SHAPE), "labels": LABELS},
            "model": {"name": "softmax", "last_layers": 0},
            "store": {"path": str(Path(folder) / "a.store"), "log_length": 0},
            "agent": {"socket": str(Path(folder) / "a.sock"), "nice": 0, "seed": 9},
            "policy": {"name": policy},
            "waiting": {"share": 0.4, "rule": rule, **options},
        }
        tables["store"]["budget"] = budget_for(parse_config(tables), SLOTS)
        config = parse_config(tables)
        agent = OnDisk(config)
        room = agent.device.waiting
        assert room is not None
        simulated = Simulated(config, agent.device.capacity + room.slots, stream)
        for round_ in range(ROUNDS):
            agent.see(stream, round_, cut)
            if round_ in restarts:
                agent.restart()
            if (round_ + 1) % EVERY == 0:
                mine, theirs = (
                    simulated.participate(round_ + 1),
                    agent.participate(round_ + 1),
                )
                assert (mine.samples, mine.gradient_samples) == (
                    theirs.samples,
                    theirs.gradient_samples,
                )
                np.testing.assert_allclose(mine.model, theirs.model, rtol=1e-4, atol=1e-5)
                check_same(simulated.device, agent.device)
        size = agent.agent.store.file.disk.size
        assert size <= config.store.budget
        agent.agent.store.file.disk.close()
