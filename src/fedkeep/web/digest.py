"""Folds the lines of one run, as they come, into what the page shows of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from fedkeep.records import (
    DeviceLine,
    End,
    Evaluation,
    GistLine,
    Header,
    HoldingsLine,
    Line,
    Member,
    Members,
    PlanLine,
    PrivacyLine,
    Round,
    Run,
    Timing,
)
from fedkeep.records.measures import GIST, pooled
from fedkeep.web.thinning import Thinned, evenly
from fedkeep.web.view import Columns, RunView

POINTS = 300
"""Evaluations a curve shows at most, about."""
BINS = 120
"""Points of a chart of what happens every round: fewer, so that it shows more than noise."""
ROWS = 1000
"""Devices the coordination matrix lists at most."""
_CURVES = (
    "round",
    "accuracy",
    "loss",
    "samples_valued",
    "bytes_stored",
    "bytes_up",
    "bytes_down",
    "label_coverage",
    "store_turnover",
)
_DEVICES = ("worst_device", "lower_device", "median_device", "upper_device", "best_device")
_COUNTS = ("participants", "arrivals", "kept", "replaced", "refused", "dropouts")


@dataclass(frozen=True)
class Activity:
    """What happened from one round to another."""

    round: int
    counts: tuple[int, ...]
    staleness: float | None

    @staticmethod
    def of(line: Round) -> Activity:
        counts = (line.participations or len(line.participants), *(getattr(line, name) for name in _COUNTS[1:]))
        return Activity(line.round, counts, line.staleness)

    def then(self, later: Activity) -> Activity:
        counts = tuple(a + b for a, b in zip(self.counts, later.counts, strict=True))
        staleness = self.staleness if later.staleness is None else later.staleness
        return Activity(later.round, counts, staleness)


@dataclass
class Digest:
    """One run so far."""

    header: Header
    evaluations: list[Evaluation] = field(default_factory=list)
    activity: Thinned[Activity] = field(default_factory=lambda: Thinned(BINS, Activity.then))
    gist: Thinned[GistLine] = field(default_factory=lambda: Thinned(BINS, lambda *both: pooled(both)))
    privacy: Thinned[PrivacyLine] = field(default_factory=lambda: Thinned(BINS, lambda _, late: late))
    totals: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTS, 0))
    refused_reports: dict[str, int] = field(default_factory=dict)
    plan: PlanLine | None = None
    holdings: HoldingsLine | None = None
    devices: dict[int, DeviceLine] = field(default_factory=dict)
    members: tuple[Member, ...] = ()
    end: End | None = None
    seconds: float | None = None
    round: int = 0
    damaged: int = 0

    def add(self, line: Line) -> None:
        """Takes in the next line."""
        match line:
            case Header():
                return
            case Evaluation():
                self.evaluations.append(msgspec.structs.replace(line, device_accuracy=()))
            case Round():
                self._count(line)
            case GistLine():
                self.gist.add(line)
            case PlanLine():
                self.plan = _shortened(line)
            case HoldingsLine():
                self.holdings = HoldingsLine(round=line.round, devices=line.devices[:ROWS], filled=line.filled[:ROWS])
            case DeviceLine():
                self.devices[line.device] = line
            case Members():
                self.members = line.members
            case PrivacyLine():
                self.privacy.add(line)
            case End():
                self.end = line
            case Timing():
                self.seconds = line.seconds
        self.round = max(self.round, line.round)

    def _count(self, line: Round) -> None:
        activity = Activity.of(line)
        self.activity.add(activity)
        for name, count in zip(_COUNTS, activity.counts, strict=True):
            self.totals[name] += count
        for reason, count in line.refused_reports.items():
            self.refused_reports[reason] = self.refused_reports.get(reason, 0) + count

    def as_run(self, path: Path) -> Run:
        """The run as far as comparing methods needs it."""
        ends = () if self.end is None else (self.end,)
        return Run(path, self.header, (self.header, *self.evaluations, *self.gist.items(), *ends))

    def view(self, key: str, modified: float) -> RunView:
        header = self.header
        spent = self.privacy.items()
        return RunView(
            key=key,
            run=header.run,
            method=header.method,
            task=header.task,
            setting=header.setting,
            seed=header.seed,
            labels=header.labels,
            devices=header.devices or len(self.members),
            rounds=header.rounds,
            round=self.round,
            finished=self.end is not None,
            modified=modified,
            image=header.image,
            seconds=self.seconds,
            config=dict(_flat(header.config)),
            damaged=self.damaged,
            evaluations=self._curves(),
            activity=self._rates(),
            totals=dict(self.totals),
            refused_reports=dict(sorted(self.refused_reports.items())),
            gist={name: [getattr(line, name) for line in self.gist.items()] for name in ("round", *GIST)},
            privacy={
                "round": [p.round for p in spent],
                "spent": [p.epsilon_spent for p in spent],
                "left": [p.epsilon_left for p in spent],
            },
            delta=spent[-1].delta if spent else None,
            plan=self.plan,
            holdings=self.holdings,
            members=self.members,
            snapshots=tuple(sorted((device, line.round) for device, line in self.devices.items())),
        )

    def _curves(self) -> Columns:
        shown = evenly(self.evaluations, POINTS)
        columns: Columns = {name: [getattr(evaluation, name) for evaluation in shown] for name in _CURVES}
        for place, name in enumerate(_DEVICES):
            columns[name] = [_at(evaluation.device_accuracy_quantiles, place) for evaluation in shown]
        return columns

    def _rates(self) -> Columns:
        """The counts by the rounds they are of, so that merging neighbours does not change the scale."""
        items = self.activity.items()
        starts = [0, *(item.round for item in items)]
        spans = [max(1, item.round - start) for item, start in zip(items, starts, strict=False)]
        columns: Columns = {"round": [item.round for item in items]}
        for place, name in enumerate(_COUNTS):
            columns[name] = [item.counts[place] / span for item, span in zip(items, spans, strict=True)]
        columns["staleness"] = [item.staleness for item in items]
        return columns


def _flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and their values as JSON, whatever a record's configuration nests."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", msgspec.json.encode(value).decode()


def _at(values: tuple[float | None, ...], place: int) -> float | None:
    return values[place] if place < len(values) else None


def _shortened(plan: PlanLine) -> PlanLine:
    return msgspec.structs.replace(plan, devices=plan.devices[:ROWS], quotas=plan.quotas[:ROWS])
