"""Finished runs as curves, a line each in one file a task; suites find them by settings' hash.

What a method asks of a device is counted in forward passes of one sample (a backward pass counts
as two) and bytes at rest.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from fedkeep.advice.budget import kept_bytes
from fedkeep.config.experiment import Experiment
from fedkeep.core.errors import DataError
from fedkeep.files import alone_in
from fedkeep.records import Evaluation, Run
from fedkeep.records.measures import LAST, late_accuracy
from fedkeep.records.runs import versions
from fedkeep.sim.assembly import build_learner, load_data

_DIGITS = 5
_FORWARD, _GRADIENT = 1, 3
_LOSSES, _GRADIENTS = {"high-loss", "fedbalancer"}, {"ode", "gradient-norm", "sld"}


class Curve(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One run: its accuracy at every evaluation."""

    method: str
    setting: str
    seed: int
    planned: int
    """The rounds that it was to have."""
    config_hash: str
    rounds: tuple[int, ...]
    accuracy: tuple[float | None, ...]
    seconds: float | None
    finished: bool
    worst_tenth: float | None = None
    """Over the last five evaluations, as are those that follow."""
    rare_recall: float | None = None
    pooled: float | None = None
    """Accuracy over all devices' test samples, where `accuracy` is the mean over devices."""
    prequential: float | None = None
    """Over the whole run."""
    samples_valued: int = 0
    samples_trained: int = 0
    bytes_at_rest: int = 0
    """What a device keeps besides the model; 0 where it was not counted.

    `reproduce.py bytes` counts all of its runs anew: those that other suites made were counted by
    the code of their day.
    """

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """As far as measures look at them."""
        pairs = zip(self.rounds, self.accuracy, strict=True)
        return tuple(
            Evaluation(round=round_, accuracy=accuracy, loss=None) for round_, accuracy in pairs
        )

    @property
    def final(self) -> float:
        """The mean accuracy of the last five evaluations, in percent."""
        return late_accuracy(self.evaluations, of=100)


def evaluation_labels(experiment: Experiment) -> tuple[int, ...]:
    """How many test samples of each label the fleet has."""
    data = load_data(experiment.task, experiment.seed)
    return tuple(np.bincount(data.pooled_test.y, minlength=data.labels).tolist())


def pooled_accuracy(evaluation: Evaluation, tested: Sequence[int]) -> float | None:
    """The share of right answers over all test samples, from the recall of each label."""
    known = [
        (recall, count)
        for recall, count in zip(evaluation.label_recall, tested, strict=True)
        if recall is not None
    ]
    total = sum(count for _, count in known)
    return math.fsum(recall * count for recall, count in known) / total if total else None


def curve_of(run: Run, tested: Sequence[int] = ()) -> Curve:
    """A finished run; with the test samples of each label, its pooled accuracy too."""
    header, evaluations = run.header, run.evaluations
    return Curve(
        method=header.method,
        setting=header.setting,
        seed=header.seed,
        planned=header.rounds,
        config_hash=header.config_hash,
        rounds=tuple(e.round for e in evaluations),
        accuracy=tuple(
            None if e.accuracy is None else round(e.accuracy, _DIGITS) for e in evaluations
        ),
        seconds=round(run.timings[-1].seconds, 1) if run.timings else None,
        finished=run.end is not None,
        worst_tenth=mean_of((e.worst_tenth for e in evaluations[-LAST:]), _DIGITS),
        rare_recall=mean_of((e.rare_recall for e in evaluations[-LAST:]), _DIGITS),
        pooled=mean_of((pooled_accuracy(e, tested) for e in evaluations[-LAST:]), _DIGITS)
        if tested
        else None,
        prequential=mean_of((e.prequential for e in evaluations), _DIGITS),
        samples_valued=evaluations[-1].samples_valued if evaluations else 0,
        samples_trained=evaluations[-1].samples_trained if evaluations else 0,
    )


def mean_of(values: Iterable[float | None], digits: int, scale: float = 1.0) -> float | None:
    """Of what is known; None of nothing."""
    known = [value for value in values if value is not None]
    return round(scale * math.fsum(known) / len(known), digits) if known else None


class ExperimentSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All runs of one experiment, without all that only one of them would be looked at for."""

    experiment: str
    """The file's path below `experiments/`, without its ending."""
    about: str
    task: str
    command: str
    versions: dict[str, str]
    changed: tuple[str, ...] = ()
    """What was set otherwise than in the file."""
    curves: tuple[Curve, ...] = ()


def write_summary(path: Path, summary: ExperimentSummary) -> None:
    """Writes one line a run, so that a change shows as a change."""
    head = msgspec.structs.asdict(summary)
    lines = ",\n".join(msgspec.json.encode(curve).decode() for curve in head.pop("curves"))
    body = msgspec.json.format(msgspec.json.encode(head), indent=1).decode().rstrip("}\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{body},\n "curves": [\n{lines}\n]}}\n', encoding="utf-8")


def read_summary(path: Path) -> ExperimentSummary:
    try:
        return msgspec.json.decode(path.read_bytes(), type=ExperimentSummary)
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(f"cannot read the summary {path}: {error}") from error


class Curves:
    """Runs that need not be made again; several processes may add to them at once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tasks = {path.stem: _read(path) for path in sorted(directory.glob("*.json"))}

    def find(self, digest: str) -> Curve | None:
        """The run with these settings, if it was made."""
        return next((curves[digest] for curves in self._tasks.values() if digest in curves), None)

    def add(self, task: str, curve: Curve) -> None:
        """Adds a run and writes its task's file at once, so that a kill loses only one run."""
        with alone_in(self._directory):
            self._write(task, _read(self._directory / f"{task}.json") | {curve.config_hash: curve})

    def recount(self, counts: Mapping[str, int]) -> int:
        """Corrects the bytes at rest of runs, by hash, in whichever files; gives how many."""
        changed = 0
        with alone_in(self._directory):
            for task in self._tasks:
                found = _read(self._directory / f"{task}.json")
                new = {
                    digest: msgspec.structs.replace(found[digest], bytes_at_rest=count)
                    for digest, count in counts.items()
                    if digest in found and found[digest].bytes_at_rest != count
                }
                if new:
                    self._write(task, found | new)
                changed += len(new)
        return changed

    def keep(self, wanted: Callable[[Curve], bool]) -> None:
        """Drops all other runs: no longer wanted, or changed in a way that no setting shows."""
        with alone_in(self._directory):
            for task in self._tasks:
                before = _read(self._directory / f"{task}.json")
                kept = {digest: curve for digest, curve in before.items() if wanted(curve)}
                if len(kept) < len(before):
                    self._write(task, kept)

    def _write(self, task: str, curves: dict[str, Curve]) -> None:
        self._tasks[task] = curves
        ordered = sorted(curves.values(), key=lambda c: (c.method, c.setting, c.planned, c.seed))
        summary = ExperimentSummary(
            experiment=f"curves/{task}",
            about="Runs of the suites, each with the hash of its settings.",
            task=task,
            command="python experiments/reproduce.py arena",
            versions=versions(),
            curves=tuple(ordered),
        )
        write_summary(self._directory / f"{task}.json", summary)


def _read(path: Path) -> dict[str, Curve]:
    return (
        {curve.config_hash: curve for curve in read_summary(path).curves} if path.exists() else {}
    )


def forward_passes(experiment: Experiment, curve: Curve) -> float:
    """Over a whole run: training, measuring arrivals, and measuring the store under new models.

    A gist measures what is stored under the old model, the new one, and one step ahead.
    """
    policy, gist = experiment.names["policy"], experiment.gist.mode != "none"
    arrival = (
        _GRADIENT if gist or policy in _GRADIENTS else 0
    )  # to take it into a gist, or to score it
    if not gist and (
        policy in _LOSSES or (policy in _GRADIENTS and "last_layers" in experiment.model)
    ):
        arrival = _FORWARD
    measured_again = (
        (3 * _GRADIENT if gist else arrival) * curve.samples_trained / experiment.train.epochs
    )
    return _GRADIENT * curve.samples_trained + arrival * curve.samples_valued + measured_again


def bytes_at_rest(experiment: Experiment) -> int:
    """All that a device keeps between participations; the model is on every device anyway."""
    if experiment.policy.unbounded:
        return 0
    data = load_data(experiment.task, experiment.seed)
    capacities = experiment.storage.capacities(data.devices, experiment.seed)
    kept = kept_bytes(
        experiment,
        build_learner(experiment, data),
        slots=int(capacities.mean()),
        sample_shape=data.sample_shape,
        labels=data.labels,
        encoding=experiment.stream.encoding,
    )
    return kept.total
