"""Summarises the lines of one run, as they arrive, to what the page shows of it.

The summary is small and sent whole whenever it changes, so that after a lost connection, a
restarted server or a resumed run there is nothing to catch up with.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec
from msgspec import structs

from fedkeep.records import lines
from fedkeep.records.measures import ERRORS, GIST, pooled
from fedkeep.records.runs import Run
from fedkeep.records.tables import EVALUATED
from fedkeep.tables import flat

POINTS = 300
"""Approximate limit of the evaluations in a curve."""
BINS = 120
"""Points of a chart of per-round counts: fewer, which averages out noise."""
ROWS = 1000
"""Limit of the devices in the coordination matrix."""
_OF_HEADER = ("run", "method", "task", "setting", "seed", "labels", "rounds", "image", "measure")
_DEVICES = ("worst_device", "lower_device", "median_device", "upper_device", "best_device")
_COUNTS = {"participants": "participations"} | {
    n: n for n in ("arrivals", "kept", "replaced", "refused", "dropouts")
}
"""The counts of a round, and the field each is read from."""
Columns: TypeAlias = dict[str, list[Any]]
"""A table by columns, all of one length; `round` is always among them."""
RunView: TypeAlias = dict[str, Any]
Item = TypeVar("Item")


class Subsampled(list[Item]):
    """A list of at most `limit` (even) items: neighbours are merged when it is full."""

    def __init__(self, limit: int, merge: Callable[[Item, Item], Item]) -> None:
        super().__init__()
        self._limit, self._merge = limit, merge
        self._width = self._in_last = 1

    def add(self, item: Item) -> None:
        """Append an item, or merge it into the last one."""
        if self and self._in_last < self._width:
            self[-1] = self._merge(self[-1], item)
            self._in_last += 1
            return
        if len(self) == self._limit:
            self[:] = map(self._merge, self[::2], self[1::2])
            self._width *= 2
        self.append(item)
        self._in_last = 1


def evenly(items: Sequence[Item], limit: int) -> Sequence[Item]:
    """Return about `limit` evenly spaced items, the last always among them."""
    step = -(-len(items) // limit) or 1
    return items[::-1][::step][::-1]


def _summed(early: lines.Round, late: lines.Round) -> lines.Round:
    counts = {name: getattr(early, name) + getattr(late, name) for name in _COUNTS.values()}
    return structs.replace(
        late, **counts, staleness=early.staleness if late.staleness is None else late.staleness
    )


def _columns(found: Sequence[lines.Line], fields: Mapping[str, str]) -> Columns:
    return {name: [getattr(line, of) for line in found] for name, of in fields.items()}


class Digest:
    """The state of one run: subsampled curves, and the latest line of every other kind."""

    def __init__(self, header: lines.Header) -> None:
        self.header, self.round, self.damaged = header, 0, 0
        self.devices: dict[int, lines.DeviceLine] = {}
        self._evaluations: list[lines.Evaluation] = []
        self._activity = Subsampled(BINS, _summed)
        self._gist: Subsampled[lines.GistLine] = Subsampled(BINS, lambda *both: pooled(both))
        self._privacy: Subsampled[lines.PrivacyLine] = Subsampled(BINS, lambda _, late: late)
        self._totals = Counter(dict.fromkeys(_COUNTS, 0))
        self._refused_reports: Counter[str] = Counter()
        self._latest: dict[type[lines.Line], Any] = {}

    def add(self, line: lines.Line) -> None:
        """Take in the next line of the record."""
        match line:
            case lines.Header():
                return
            case lines.Evaluation():
                self._evaluations.append(structs.replace(line, device_accuracy=()))
            case lines.Round():
                took_part = line.participations or len(line.participants)
                counted = structs.replace(line, participations=took_part, participants=())
                self._activity.add(counted)
                self._totals.update({name: getattr(counted, of) for name, of in _COUNTS.items()})
                self._refused_reports.update(line.refused_reports)
            case lines.GistLine():
                self._gist.add(line)
            case lines.PrivacyLine():
                self._privacy.add(line)
            case lines.DeviceLine():
                self.devices[line.device] = line
            case _:
                self._latest[type(line)] = line
        self.round = max(self.round, line.round)

    def as_run(self, path: Path) -> Run:
        """Return the run with the lines that a comparison of methods reads."""
        ends = [self._latest[lines.End]] if lines.End in self._latest else []
        return Run(path, self.header, (self.header, *self._evaluations, *self._gist, *ends))

    def view(self, key: str, modified: float) -> RunView:
        """Return the run as the page shows it.

        Parameters
        ----------
        key : str
            Unique name of the run on the page.
        modified : float
            When its file last changed, in seconds since 1970.

        Returns
        -------
        dict
            `rounds` is 0 for a run without an end, `members` empty for a simulated fleet,
            `config` has the value of every setting as JSON by its dotted key, and `snapshots`
            lists the devices whose store is recorded, with the round.
        """
        kinds = (lines.PlanLine, lines.HoldingsLine, lines.Members, lines.Timing)
        plan, holdings, members, timing = (self._latest.get(kind) for kind in kinds)
        if plan is not None:
            plan = structs.replace(plan, devices=plan.devices[:ROWS], quotas=plan.quotas[:ROWS])
        if holdings is not None:
            holdings = structs.replace(
                holdings, devices=holdings.devices[:ROWS], filled=holdings.filled[:ROWS]
            )
        return {name: getattr(self.header, name) for name in _OF_HEADER} | {
            "key": key,
            "modified": modified,
            "devices": self.header.devices or (len(members.members) if members else 0),
            "round": self.round,
            "damaged": self.damaged,
            "finished": lines.End in self._latest,
            "seconds": timing and timing.seconds,
            "config": {
                key: msgspec.json.encode(value).decode() for key, value in flat(self.header.config)
            },
            "evaluations": self._curves(),
            "activity": self._rates(),
            "totals": dict(self._totals),
            "refused_reports": dict(sorted(self._refused_reports.items())),
            "gist": _columns(self._gist, {name: name for name in ("round", *GIST)}),
            "privacy": _columns(
                self._privacy, {"round": "round", "spent": "epsilon_spent", "left": "epsilon_left"}
            ),
            "delta": self._privacy[-1].delta if self._privacy else None,
            "plan": plan,
            "holdings": holdings,
            "members": members.members if members else (),
            "snapshots": sorted((device, line.round) for device, line in self.devices.items()),
        }

    def _curves(self) -> Columns:
        shown = evenly(self._evaluations, POINTS)
        quantiles = [(*e.device_accuracy_quantiles, *[None] * len(_DEVICES)) for e in shown]
        devices = {name: [each[place] for each in quantiles] for place, name in enumerate(_DEVICES)}
        return _columns(shown, {name: name for name in (*EVALUATED, *ERRORS)}) | devices

    def _rates(self) -> Columns:
        """Return the counts per round, so that merging neighbours does not change the scale."""
        columns = _columns(self._activity, {"round": "round", "staleness": "staleness"} | _COUNTS)
        starts = [0, *(line.round for line in self._activity)]
        spans = [
            max(1, line.round - start) for line, start in zip(self._activity, starts, strict=False)
        ]
        return columns | {
            name: [count / span for count, span in zip(columns[name], spans, strict=True)]
            for name in _COUNTS
        }
