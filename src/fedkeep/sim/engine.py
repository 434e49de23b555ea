"""The round loop of a simulation, as an iterator: nobody copies it to add logging."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedkeep.config.experiment import Experiment
from fedkeep.core.errors import ConfigError
from fedkeep.core.protocols import Learner, Stateful
from fedkeep.core.rounds import RoundSummary
from fedkeep.core.seeds import child_seed, generator
from fedkeep.core.state import restore_parts, snapshot_parts
from fedkeep.core.targets import residuals
from fedkeep.core.types import (
    AnyArray,
    Batch,
    DeviceId,
    FloatArray,
    Report,
    State,
    Vector,
)
from fedkeep.data import Federation
from fedkeep.learn.evaluation import (
    NumberScores,
    judge,
    number_scores,
    predict,
    r_squared,
)
from fedkeep.privacy.options import refuse_conflicts
from fedkeep.sim.assembly import assemble, coordinate
from fedkeep.sim.fleet import SimulatedFleet
from fedkeep.sim.threads import ThreadLimit

TALLIED = ("samples_valued", "bytes_up", "bytes_down", "samples_trained")
"""What a run costs; a sample is trained on once an epoch."""


@dataclass(frozen=True, eq=False)
class ModelScores:
    """Accuracy and loss over all devices' test samples, and accuracy on each device's own.

    Where targets are numbers, R2 takes the place of accuracy: of all test samples, and for each
    device and interval 1 - its MSE / the variance of all test targets, at least -1.
    """

    accuracy: float
    loss: float
    device_accuracy: FloatArray
    """(C,), NaN for a device without test samples."""
    label_recall: FloatArray
    """(Y,), NaN for a label without test samples."""
    worst_tenth: float
    """The mean accuracy of the worst tenth of the devices, one at least."""
    rare_recall: float
    """The mean recall of the rarest quarter of the labels in training, one at least."""
    numbers: NumberScores | None = None
    """RMSE, MAE and R2, where targets are numbers."""


@dataclass(frozen=True, eq=False)
class RoundRecord:
    """One round: what it brought, and the model's quality where it was measured."""

    round: int
    """Rounds done, this one included."""
    summary: RoundSummary
    arrivals: int
    evaluation: ModelScores | None
    tested: tuple[int, int] = (0, 0)
    """Arrivals that the model had right before it trained on them, and all: if asked for."""


class Simulator:
    """A whole experiment in one process, with the same `Device` and `Server` as everywhere.

    Devices catch up with their streams when they are needed.

    Examples
    --------
    >>> from fedkeep.config.experiment import resolve
    >>> table = {"task": {"name": "demo"}, "policy": {"name": "fifo"}, "train": {"rounds": 3}}
    >>> [record.round for record in Simulator(resolve(table)).run()]
    [1, 2, 3]
    """

    def __init__(self, experiment: Experiment, data: Federation | None = None) -> None:
        if not isinstance(experiment, Experiment):
            raise ConfigError(
                "a Simulator takes an Experiment: fedkeep.Experiment.from_table(TABLES), or use "
                f"fedkeep.simulate; got {type(experiment).__name__}"
            )
        privacy = experiment.privacy
        refuse_conflicts(privacy, experiment.aggregation)
        if privacy.secure_aggregation or privacy.profile_protection == "sealed":
            both = "privacy.secure_aggregation and sealed profiles (privacy.encrypted_profiles)"
            raise ConfigError(f"{both} hide nothing in one process: deploy them")
        self.experiment = experiment
        self.parts = assemble(experiment, data)
        self.server = self.parts.server
        _reject_for_numbers(experiment, self.parts.data)
        self._threads = ThreadLimit(self.parts.learner.size)
        self.tally: Counter[str] = Counter()
        """What the run has cost so far, by the names in `TALLIED`."""
        self._population = range(self.parts.data.devices)
        self._k = max(1, round(experiment.train.participation * len(self._population)))
        self._kept: dict[str, Stateful] = {
            "server": self.server,
            "rival": self.parts.baseline,
            "guards": self.parts.mechanisms,
        }
        if isinstance(self.parts.fleet, SimulatedFleet):
            self._kept["fleet"] = self.parts.fleet

    def __repr__(self) -> str:
        experiment = self.experiment
        where = f"round {self.server.round} of {experiment.train.rounds}"
        task, seed = experiment.names["task"], experiment.seed
        return f"<Simulator: {experiment.label} on {task}, seed {seed}, {where}>"

    def run(self, rounds: int | None = None) -> Iterator[RoundRecord]:
        """Play rounds from where the simulation stands, up to `rounds` in all."""
        last = self.experiment.train.rounds if rounds is None else rounds
        while self.server.round < last:
            done = self.server.round + 1
            yield self.play_round(
                evaluated=done % self.experiment.record.every == 0 or done == last
            )

    def play_round(self, *, evaluated: bool) -> RoundRecord:
        """Play one round: arrivals, selection, orders, training, merging (steps 3 to 8)."""
        with self._threads:
            record = self._play_round()
        return replace(record, evaluation=self.evaluate()) if evaluated else record

    def _play_round(self) -> RoundRecord:
        parts, server, round_ = self.parts, self.server, self.server.round
        before, participants = server.model, self.participants(round_)
        tested = self._test_first(round_) if self.experiment.record.prequential else (0, 0)
        arrivals = self._bring_up_to_date(participants, round_)
        orders = server.open_round(participants)
        reports = parts.fleet.take_part(orders, parts.baseline.corrections(participants))
        reports = parts.mechanisms.release(orders, reports)
        self._deliver(reports, round_)
        summary = server.close_round()
        counted = {device: reports[device] for device in summary.accepted}
        rate = server.schedule.local(round_).learning_rate
        server.apply_step(parts.baseline.step(before, server.model, counted, rate))
        return RoundRecord(server.round, summary, arrivals, None, tested)

    def participants(self, round_: int) -> tuple[DeviceId, ...]:
        """Return the devices of a round, which depend on the seed alone and not on the method."""
        return self.server.select(round_, self._population, self._k)

    def evaluate(self) -> ModelScores:
        """Evaluate the global model on every device's test samples."""
        with self._threads:
            scores = evaluate(self.parts.learner, self.server.model, self.parts.data)
        if self.experiment.record.accuracy == "devices":
            return replace(scores, accuracy=float(np.nanmean(scores.device_accuracy)))
        return scores

    def snapshot(self) -> State:
        """Return all that the rest of the run depends on."""
        return snapshot_parts(self._kept) | {
            "tally": np.array([self.tally[name] for name in TALLIED])
        }

    def restore(self, state: State) -> None:
        """Take over what `snapshot` returned."""
        restore_parts(self._kept, state)
        self.tally = Counter(dict(zip(TALLIED, state["tally"].tolist(), strict=True)))

    def _test_first(self, round_: int) -> tuple[int, int]:
        """Count arrivals of a round that the model has right before it trains on them, and all."""
        batch = Batch.concatenate(
            [self.parts.stream.arrivals(d, round_, round_ + 1) for d in self._population]
        )
        if not len(batch):
            return 0, 0
        _, right = judge(self.parts.learner, self.server.model, batch.x, batch.y)
        return int(right.sum()), len(batch)

    def _bring_up_to_date(self, participants: Sequence[DeviceId], round_: int) -> int:
        """Lets participants see what has arrived; returns how much that was.

        Under an oracle, and where devices are to say what they have counted for a new plan (steps
        1, 2), all see it.
        """
        fleet, oracle, profile = self.parts.fleet, self.parts.oracle, self.experiment.profile
        if not isinstance(fleet, SimulatedFleet):
            return 0
        if oracle is not None:
            direction = oracle.gradient(self.server.model)
            self.server.set_global_gradient(direction)
            fleet.update_model(self._population, self.server.model, direction)
        declared = profile.measured and round_ % profile.every == 0
        seen = round_ + (1 if self.experiment.stream.current else 0)
        arrivals = fleet.catch_up(self._population if declared or oracle else participants, seen)
        self.tally["samples_valued"] += arrivals
        if declared:
            counted = {d: device.profile() for d, device in sorted(fleet.devices.items())}
            plan = coordinate(
                self.experiment, self.server, self.parts.mechanisms.release_profiles(counted)
            )
            for d, device in fleet.devices.items():
                device.apply_plan(plan.assignment(d))
        return arrivals

    def _deliver(self, reports: dict[DeviceId, Report], round_: int) -> None:
        """Hands the reports to the server, save those that are lost on the way."""
        direction = self.server.estimator.global_gradient()
        down = 4 * (len(self.server.model) + (0 if direction is None else len(direction)))
        lost = generator(child_seed(self.experiment.seed, "dropout"), round_).random(len(reports))
        for (device, report), luck in zip(reports.items(), lost.tolist(), strict=True):
            self.tally["bytes_down"] += down
            self.tally["samples_trained"] += report.samples * self.experiment.train.epochs
            if luck >= self.experiment.train.dropout:
                gradient = 0 if report.local_gradient is None else len(report.local_gradient)
                self.tally["bytes_up"] += 4 * (len(report.model) + gradient)
                self.server.receive(device, report)


def _reject_for_numbers(experiment: Experiment, data: Federation) -> None:
    """Reject options that are about labels, where targets are numbers.

    Raises
    ------
    ConfigError
        If one of them is set.
    """
    if data.targets is None:
        return
    set_ = {
        "record.prequential": experiment.record.prequential,
        "stream.label_noise": experiment.stream.label_noise,
        "waiting.pseudo_labels": experiment.waiting.pseudo_labels,
    }
    for key in (key for key, value in set_.items() if value):
        raise ConfigError(f"'{key}' is about labels, and the targets are numbers: leave it out")
    late = {
        "stream.label_delay": experiment.stream.label_delay,
        "stream.labelled": experiment.stream.labelled < 1,
        "waiting.share": experiment.waiting.share,
    }
    for key in (key for key, value in late.items() if value and data.targets.width > 1):
        raise ConfigError(f"'{key}' is for one number a sample: leave it out")


def evaluate(learner: Learner, model: Vector, data: Federation) -> ModelScores:
    """Evaluate a model on the test samples; one that has diverged is simply bad."""
    test = data.pooled_test
    numbers = None
    if data.targets is None:
        losses, right = judge(learner, model, test.x, test.y)
        per_device = _shares(right, data.test.owners, data.devices)
        per_label = _shares(right, test.y, data.labels)
    else:
        losses, predicted = predict(learner, model, test.x, test.y)
        numbers = number_scores(predicted, test.y)
        squared = (residuals(predicted, test.y) ** 2).reshape(len(test), -1).mean(axis=1)
        of_groups = ((data.test.owners, data.devices), (data.targets.assign(test.y), data.labels))
        per_device, per_label = (
            np.array([r_squared(own, test.y) for own in _shares(squared, groups, count).tolist()])
            for groups, count in of_groups
        )
    return ModelScores(
        float(right.mean()) if numbers is None else numbers.r2,
        float(losses.mean()),
        per_device,
        per_label,
        _mean_of_first(np.sort(per_device), 1 / 10),
        _mean_of_first(per_label[np.argsort(data.label_counts.sum(axis=0), kind="stable")], 1 / 4),
        numbers,
    )


def _shares(right: AnyArray, groups: AnyArray, count: int) -> FloatArray:
    """Return the share of right answers, or any mean, in each group, NaN for an empty one."""
    counts = np.bincount(groups, minlength=count)
    sums = np.bincount(groups, weights=right, minlength=count)
    return np.asarray(np.divide(sums, counts, out=np.full(count, np.nan), where=counts > 0))


def _mean_of_first(values: FloatArray, share: float) -> float:
    """Return the mean of the first values, a share of those that are known."""
    known = values[~np.isnan(values)]
    return float(known[: max(1, round(share * len(known)))].mean())
