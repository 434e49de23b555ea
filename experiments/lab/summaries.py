"""A directory of runs as one small file: the curves of every run, and where they come from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from fedkeep.core.errors import DataError
from fedkeep.records.lines import End, Evaluation, Header
from fedkeep.records.reader import Run

_DIGITS = 5


class Curve(msgspec.Struct, frozen=True, kw_only=True):
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


class Summary(msgspec.Struct, frozen=True, kw_only=True):
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


def summarise(runs: Sequence[Run], *, experiment: str, about: str, command: str, changed: Sequence[str]) -> Summary:
    """The runs of one experiment, without all that only one of them would be looked at for."""
    header = runs[0].header
    return Summary(
        experiment=experiment,
        about=about,
        task=header.task,
        command=command,
        versions=header.versions,
        changed=tuple(changed),
        curves=tuple(map(_curve, runs)),
    )


def as_runs(summary: Summary) -> list[Run]:
    """The runs again, as far as comparing methods needs them."""
    return [_run(summary, curve) for curve in summary.curves]


def write_summary(path: Path, summary: Summary) -> None:
    """Writes one line a run, so that a change shows as a change."""
    head = msgspec.to_builtins(msgspec.structs.replace(summary, curves=()))
    del head["curves"]
    lines = ",\n".join(msgspec.json.encode(curve).decode() for curve in summary.curves)
    body = msgspec.json.format(msgspec.json.encode(head), indent=1).decode().rstrip("}\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{body},\n "curves": [\n{lines}\n]}}\n', encoding="utf-8")


def read_summary(path: Path) -> Summary:
    """What `write_summary` wrote."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Summary)
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(f"cannot read the summary {path}: {error}") from error


def _curve(run: Run) -> Curve:
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
    )


def _run(summary: Summary, curve: Curve) -> Run:
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
