"""A directory of runs as one small file: the curves of every run, and where they come from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from fedkeep.core.errors import DataError
from fedkeep.records.lines import End, Evaluation, Header
from fedkeep.records.measures import LAST
from fedkeep.records.reader import Run

_DIGITS = 5


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
    prequential: float | None = None
    """Over the whole run."""
    samples_valued: int = 0
    samples_trained: int = 0
    bytes_at_rest: int = 0
    """What a device keeps besides the model; 0 where it was not counted."""

    @property
    def final(self) -> float:
        """The mean accuracy of the last five evaluations after the start, in percent; 0 where it diverged."""
        trained = [a or 0.0 for r, a in zip(self.rounds, self.accuracy, strict=True) if r > 0][-LAST:]
        return 100 * math.fsum(trained) / max(1, len(trained))


class ExperimentSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All runs of one experiment."""

    experiment: str
    """The file's path below `experiments/`, without its ending."""
    about: str
    task: str
    command: str
    versions: dict[str, str]
    changed: tuple[str, ...] = ()
    """What was set otherwise than in the file."""
    curves: tuple[Curve, ...] = ()


def summarise(
    runs: Sequence[Run], *, experiment: str, about: str, command: str, changed: Sequence[str]
) -> ExperimentSummary:
    """The runs of one experiment, without all that only one of them would be looked at for."""
    header = runs[0].header
    return ExperimentSummary(
        experiment=experiment,
        about=about,
        task=header.task,
        command=command,
        versions=header.versions,
        changed=tuple(changed),
        curves=tuple(map(curve_of, runs)),
    )


def as_runs(summary: ExperimentSummary) -> list[Run]:
    """The runs again, as far as comparing methods needs them."""
    return [_run(summary, curve) for curve in summary.curves]


def write_summary(path: Path, summary: ExperimentSummary) -> None:
    """Writes one line a run, so that a change shows as a change."""
    head = msgspec.to_builtins(msgspec.structs.replace(summary, curves=()))
    del head["curves"]
    lines = ",\n".join(msgspec.json.encode(curve).decode() for curve in summary.curves)
    body = msgspec.json.format(msgspec.json.encode(head), indent=1).decode().rstrip("}\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{body},\n "curves": [\n{lines}\n]}}\n', encoding="utf-8")


def read_summary(path: Path) -> ExperimentSummary:
    """What `write_summary` wrote."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ExperimentSummary)
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(f"cannot read the summary {path}: {error}") from error


def curve_of(run: Run) -> Curve:
    """A run as one line of a summary."""
    header, evaluations = run.header, run.evaluations
    return Curve(
        method=header.method,
        setting=header.setting,
        seed=header.seed,
        planned=header.rounds,
        config_hash=header.config_hash,
        rounds=tuple(e.round for e in evaluations),
        accuracy=tuple(None if e.accuracy is None else round(e.accuracy, _DIGITS) for e in evaluations),
        seconds=round(run.timings[-1].seconds, 1) if run.timings else None,
        finished=run.end is not None,
        worst_tenth=_mean(e.worst_tenth for e in evaluations[-LAST:]),
        rare_recall=_mean(e.rare_recall for e in evaluations[-LAST:]),
        prequential=_mean(e.prequential for e in evaluations),
        samples_valued=evaluations[-1].samples_valued if evaluations else 0,
        samples_trained=evaluations[-1].samples_trained if evaluations else 0,
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(math.fsum(known) / len(known), _DIGITS) if known else None


def _run(summary: ExperimentSummary, curve: Curve) -> Run:
    header = Header(
        run=f"{curve.method} {curve.setting} {curve.seed}".replace("  ", " "),
        method=curve.method,
        task=summary.task,
        seed=curve.seed,
        config={},
        config_hash=curve.config_hash,
        versions=summary.versions,
        labels=(),
        devices=0,
        rounds=curve.planned,
        setting=curve.setting,
    )
    points = zip(curve.rounds, curve.accuracy, strict=True)
    evaluations = (Evaluation(round=r, accuracy=a, loss=None) for r, a in points)
    end = (End(round=curve.rounds[-1], digest=""),) if curve.finished else ()
    return Run(Path(), header, (header, *evaluations, *end))
