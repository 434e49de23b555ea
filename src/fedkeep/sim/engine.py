"""The round loop of a simulation, as an iterator: nobody copies it to add logging."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fedkeep.core.estimators import GivenEstimator
from fedkeep.core.ports import Kept
from fedkeep.core.rounds import RoundSummary
from fedkeep.core.seeds import child_seed, generator
from fedkeep.core.server import Server
from fedkeep.core.state import restore_parts, snapshot_parts
from fedkeep.core.types import DeviceId, Report, State
from fedkeep.data import Federation
from fedkeep.sim.assembly import Assembly, assemble
from fedkeep.sim.evaluation import ModelScores, Prequential, evaluate
from fedkeep.sim.experiment import Experiment
from fedkeep.sim.fleet import SimulatedFleet
from fedkeep.sim.guards import refuse_alone

TALLIED = ("samples_valued", "bytes_up", "bytes_down", "samples_trained")
"""What a run costs; a sample is trained on once an epoch."""


@dataclass(frozen=True, eq=False)
class RoundRecord:
    """One round: what it brought, and the model's quality where it was measured."""

    round: int
    """Rounds done, this one included."""
    summary: RoundSummary
    arrivals: int
    evaluation: ModelScores | None


class Simulator:
    """A whole experiment in one process: the same `Device` and `Server` as everywhere, caught up lazily.

    >>> from fedkeep.sim.experiment import resolve
    >>> table = {"task": {"name": "embedded"}, "policy": {"name": "fifo"}, "train": {"rounds": 3}}
    >>> [record.round for record in Simulator(resolve(table)).run()]
    [1, 2, 3]
    """

    def __init__(self, experiment: Experiment, data: Federation | None = None) -> None:
        refuse_alone(experiment)
        self.experiment = experiment
        self.parts: Assembly = assemble(experiment, data)
        self.server: Server = self.parts.server
        self.tally: Counter[str] = Counter()
        """What the run has cost so far, by the names in `TALLIED`."""
        tested = Prequential(self.parts.learner, self.parts.stream, self.parts.data.devices)
        self.prequential = tested if experiment.record.prequential else None
        self._population: Sequence[DeviceId] = range(self.parts.data.devices)
        self._k = max(1, round(experiment.train.participation * len(self._population)))

    def run(self, rounds: int | None = None) -> Iterator[RoundRecord]:
        """Plays rounds from where the simulation stands, up to `rounds` in all."""
        last = self.experiment.train.rounds if rounds is None else rounds
        while self.server.round < last:
            done = self.server.round + 1
            yield self.play_round(evaluated=done % self.experiment.record.every == 0 or done == last)

    def play_round(self, *, evaluated: bool) -> RoundRecord:
        """One round: arrivals, selection, orders, training, merging (steps 3 to 8)."""
        round_ = self.server.round
        participants = self.server.select(round_, self._population, self._k)
        if self.prequential is not None:
            self.prequential.test(self.server.model, round_)
        arrivals = self._bring_up_to_date(participants, round_ + 1)
        self._declare(round_)
        orders = self.server.open_round(participants)
        reports = self.parts.fleet.take_part(orders, self.parts.rival.corrections(participants))
        reports = self.parts.guards.release(orders, reports)
        self._deliver(reports, round_)
        summary = self._merge(reports)
        return RoundRecord(self.server.round, summary, arrivals, self.evaluate() if evaluated else None)

    def _merge(self, reports: dict[DeviceId, Report]) -> RoundSummary:
        before, local = self.server.model, self.server.schedule.local(self.server.round)
        summary = self.server.close_round()
        counted = {device: reports[device] for device in summary.accepted}
        self.server.model = self.parts.rival.step(before, self.server.model, counted, local.learning_rate)
        return summary

    def first_participants(self) -> tuple[DeviceId, ...]:
        """The devices of the first round, the same for every method under one seed."""
        return self.server.select(0, self._population, self._k)

    def evaluate(self) -> ModelScores:
        """The global model on every device's test samples."""
        return evaluate(self.parts.learner, self.server.model, self.parts.data)

    def snapshot(self) -> State:
        """All that the rest of the run depends on."""
        return snapshot_parts(self._kept()) | {"tally": np.array([self.tally[name] for name in TALLIED])}

    def restore(self, state: State) -> None:
        """Becomes the simulation that `snapshot` described."""
        restore_parts(self._kept(), state)
        self.tally = Counter(dict(zip(TALLIED, state["tally"].tolist(), strict=True)))

    def _kept(self) -> dict[str, Kept]:
        parts = self.parts
        kept: dict[str, Kept] = {"server": self.server, "rival": parts.rival, "guards": parts.guards}
        return kept | ({"fleet": parts.fleet} if isinstance(parts.fleet, SimulatedFleet) else {})

    def _is_declared(self, round_: int) -> bool:
        profile = self.experiment.profile
        return profile.measured and round_ % profile.every == 0

    def _declare(self, round_: int) -> None:
        """Lets all devices say what they have counted, and plans anew (steps 1, 2)."""
        fleet = self.parts.fleet
        if self._is_declared(round_) and isinstance(fleet, SimulatedFleet):
            plan, _ = self.server.coordinate(self.parts.guards.release_profiles(fleet.declare()))
            fleet.assign(plan)

    def _bring_up_to_date(self, participants: Sequence[DeviceId], until: int) -> int:
        """Lets participants, or under an oracle all devices, see what has arrived; returns how much that was."""
        fleet = self.parts.fleet
        if not isinstance(fleet, SimulatedFleet):
            return 0
        if self.parts.oracle is not None and isinstance(self.server.estimator, GivenEstimator):
            direction = self.parts.oracle.gradient(self.server.model)
            self.server.estimator.given = direction
            fleet.adopt(self._population, self.server.model, direction)
        everyone = self.parts.oracle is not None or self._is_declared(until - 1)
        arrivals = fleet.catch_up(self._population if everyone else participants, until)
        self.tally["samples_valued"] += arrivals
        return arrivals

    def _deliver(self, reports: dict[DeviceId, Report], round_: int) -> None:
        """Hands the reports to the server, save those that are lost on the way."""
        direction = self.server.estimator.direction()
        down = 4 * (len(self.server.model) + (0 if direction is None else len(direction)))
        lost = generator(child_seed(self.experiment.seed, "dropout"), round_).random(len(reports))
        for (device, report), luck in zip(reports.items(), lost.tolist(), strict=True):
            self.tally["bytes_down"] += down
            self.tally["samples_trained"] += report.samples * self.experiment.train.epochs
            if luck >= self.experiment.train.dropout:
                gradient = 0 if report.local_gradient is None else len(report.local_gradient)
                self.tally["bytes_up"] += 4 * (len(report.model) + gradient)
                self.server.receive(device, report)
