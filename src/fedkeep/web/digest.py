"""Folds the lines of one run, as they come, into what the page shows of it: small, and sent whole when it changes.

Sending it whole makes the page forgetful in a good way: after a lost connection, a restarted server or a
resumed run there is nothing to catch up with.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec
from msgspec import structs

from fedkeep.config import flat
from fedkeep.records import lines
from fedkeep.records.measures import GIST, pooled
from fedkeep.records.runs import Run
from fedkeep.records.tables import EVALUATED

POINTS = 300
"""Evaluations a curve shows at most, about."""
BINS = 120
"""Points of a chart of what happens every round: fewer, so that it shows more than noise."""
ROWS = 1000
"""Devices the coordination matrix lists at most."""
_OF_HEADER = ("run", "method", "task", "setting", "seed", "labels", "rounds", "image")
_OF_DIGEST = ("round", "seconds", "damaged", "plan", "holdings", "members")
_DEVICES = ("worst_device", "lower_device", "median_device", "upper_device", "best_device")
_PRIVACY = {"round": "round", "spent": "epsilon_spent", "left": "epsilon_left"}
_COUNTS = {"participants": "participations"} | {n: n for n in ("arrivals", "kept", "replaced", "refused", "dropouts")}
"""What is counted of rounds, and the field that has it."""
Columns: TypeAlias = dict[str, list[float | None]]
"""A table by columns, all of one length; `round` is always among them."""
Item = TypeVar("Item")


class Thinned(Generic[Item]):
    """Merges neighbours, twice as many whenever `limit` is reached; `limit` is even."""

    def __init__(self, limit: int, merge: Callable[[Item, Item], Item]) -> None:
        self._limit, self._merge = limit, merge
        self._bins: list[Item] = []
        self._width, self._in_last = 1, 0

    def add(self, item: Item) -> None:
        if self._bins and self._in_last < self._width:
            self._bins[-1] = self._merge(self._bins[-1], item)
            self._in_last += 1
            return
        if len(self._bins) == self._limit:
            pairs = zip(self._bins[::2], self._bins[1::2], strict=True)
            self._bins = [self._merge(early, late) for early, late in pairs]
            self._width *= 2
        self._bins.append(item)
        self._in_last = 1

    def items(self) -> Sequence[Item]:
        return self._bins


def evenly(items: Sequence[Item], limit: int) -> Sequence[Item]:
    """At most about `limit` of the items, evenly spaced, the last always among them."""
    step = -(-len(items) // limit) or 1
    return items[::-1][::step][::-1]


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    """One run, thinned out to what a chart can show."""

    key: str
    """The run's file below the watched directory, without its suffix."""
    run: str
    method: str
    task: str
    setting: str
    seed: int
    labels: tuple[str, ...]
    devices: int
    rounds: int
    """Planned; 0 where there is no end."""
    round: int
    """The latest."""
    finished: bool
    modified: float
    """When the file last changed, in seconds since 1970."""
    image: tuple[int, int] | None
    seconds: float | None
    config: dict[str, str]
    """Every setting by its dotted key, its value as JSON."""
    damaged: int
    """Lines that could not be read."""
    evaluations: Columns
    activity: Columns
    """Means per round."""
    totals: dict[str, int]
    refused_reports: dict[str, int]
    gist: Columns
    """What the devices' gists did; empty of a run without them."""
    privacy: Columns
    delta: float | None
    plan: lines.PlanLine | None
    holdings: lines.HoldingsLine | None
    members: tuple[lines.Member, ...]
    """The devices of a real fleet; empty of a simulated one."""
    snapshots: tuple[tuple[int, int], ...]
    """Devices whose store can be looked at, each with the round of its snapshot."""


def _summed(early: lines.Round, late: lines.Round) -> lines.Round:
    """What happened in both together."""
    counts = {name: getattr(early, name) + getattr(late, name) for name in _COUNTS.values()}
    return structs.replace(late, **counts, staleness=early.staleness if late.staleness is None else late.staleness)


@dataclass
class Digest:
    header: lines.Header
    evaluations: list[lines.Evaluation] = field(default_factory=list)
    activity: Thinned[lines.Round] = field(default_factory=lambda: Thinned(BINS, _summed))
    gist: Thinned[lines.GistLine] = field(default_factory=lambda: Thinned(BINS, lambda *both: pooled(both)))
    privacy: Thinned[lines.PrivacyLine] = field(default_factory=lambda: Thinned(BINS, lambda _, late: late))
    totals: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(_COUNTS, 0)))
    refused_reports: Counter[str] = field(default_factory=Counter)
    plan: lines.PlanLine | None = None
    holdings: lines.HoldingsLine | None = None
    devices: dict[int, lines.DeviceLine] = field(default_factory=dict)
    members: tuple[lines.Member, ...] = ()
    end: lines.End | None = None
    seconds: float | None = None
    round: int = 0
    damaged: int = 0

    def add(self, line: lines.Line) -> None:
        match line:
            case lines.Header():
                return
            case lines.Evaluation():
                self.evaluations.append(structs.replace(line, device_accuracy=()))
            case lines.Round():
                took_part = line.participations or len(line.participants)
                counted = structs.replace(line, participations=took_part, participants=())
                self.activity.add(counted)
                self.totals.update({name: getattr(counted, of) for name, of in _COUNTS.items()})
                self.refused_reports.update(line.refused_reports)
            case lines.GistLine():
                self.gist.add(line)
            case lines.PlanLine():
                self.plan = structs.replace(line, devices=line.devices[:ROWS], quotas=line.quotas[:ROWS])
            case lines.HoldingsLine():
                self.holdings = structs.replace(line, devices=line.devices[:ROWS], filled=line.filled[:ROWS])
            case lines.DeviceLine():
                self.devices[line.device] = line
            case lines.Members():
                self.members = line.members
            case lines.PrivacyLine():
                self.privacy.add(line)
            case lines.End():
                self.end = line
            case lines.Timing():
                self.seconds = line.seconds
        self.round = max(self.round, line.round)

    def as_run(self, path: Path) -> Run:
        """The run as far as comparing methods needs it."""
        ends = () if self.end is None else (self.end,)
        return Run(path, self.header, (self.header, *self.evaluations, *self.gist.items(), *ends))

    def view(self, key: str, modified: float) -> RunView:
        spent, shown = self.privacy.items(), evenly(self.evaluations, POINTS)
        curves: Columns = {name: [getattr(evaluation, name) for evaluation in shown] for name in EVALUATED}
        quantiles = [(*e.device_accuracy_quantiles, *[None] * len(_DEVICES)) for e in shown]
        curves |= {name: [each[place] for each in quantiles] for place, name in enumerate(_DEVICES)}
        as_they_are: dict[str, Any] = {name: getattr(self.header, name) for name in _OF_HEADER}
        as_they_are |= {name: getattr(self, name) for name in _OF_DIGEST}
        return RunView(
            **as_they_are,
            key=key,
            devices=self.header.devices or len(self.members),
            finished=self.end is not None,
            modified=modified,
            config={key: msgspec.json.encode(value).decode() for key, value in flat(self.header.config)},
            evaluations=curves,
            activity=self._rates(),
            totals=dict(self.totals),
            refused_reports=dict(sorted(self.refused_reports.items())),
            gist={name: [getattr(line, name) for line in self.gist.items()] for name in ("round", *GIST)},
            privacy={name: [getattr(p, of) for p in spent] for name, of in _PRIVACY.items()},
            delta=spent[-1].delta if spent else None,
            snapshots=tuple(sorted((device, line.round) for device, line in self.devices.items())),
        )

    def _rates(self) -> Columns:
        """The counts by the rounds they are of, so that merging neighbours does not change the scale."""
        items = self.activity.items()
        starts = [0, *(item.round for item in items)]
        spans = [max(1, item.round - start) for item, start in zip(items, starts, strict=False)]
        columns: Columns = {"round": [item.round for item in items]}
        for name, of in _COUNTS.items():
            columns[name] = [getattr(item, of) / span for item, span in zip(items, spans, strict=True)]
        columns["staleness"] = [item.staleness for item in items]
        return columns
