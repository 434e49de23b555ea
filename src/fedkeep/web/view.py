"""What the page knows of a run: small, complete and sent whole whenever it changes.

Sending it whole makes the page forgetful in a good way: after a lost connection, a restarted server or a
resumed run there is nothing to catch up with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeAlias

import msgspec

from fedkeep.records import Comparison, DeviceLine, HoldingsLine, Member, PlanLine, Run, compare
from fedkeep.records.metrics import BASES

MOST_BASES = 12
"""Methods that others are compared with on a page."""
Columns: TypeAlias = dict[str, list[float | None]]
"""A table by columns, all of one length; `round` is always among them."""


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
    plan: PlanLine | None
    holdings: HoldingsLine | None
    members: tuple[Member, ...]
    """The devices of a real fleet; empty of a simulated one."""
    snapshots: tuple[tuple[int, int], ...]
    """Devices whose store can be looked at, each with the round of its snapshot."""


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """What a page needs to be up to date: the views that changed, and the names of all there are."""

    title: str
    version: int
    keys: tuple[str, ...]
    views: tuple[RunView, ...]
    comparison: Comparison
    """Each method against every other, as far as there are few enough."""
    words: tuple[str, ...] = ()
    """An advice, to be shown above all."""


def compared(runs: Iterable[Run], first: Sequence[str] = ()) -> Comparison:
    """The methods against each other, beginning with those that are measured against first."""
    found = list(runs)
    methods = {run.header.method for run in found if run.evaluations}
    bases = dict.fromkeys(name for name in (*first, *BASES, *sorted(methods)) if name in methods)
    return compare(found, list(bases)[:MOST_BASES])


class Feed(Protocol):
    """Where a page's updates come from."""

    def since(self, version: int) -> Update | None:
        """What changed after `version` (0: everything), or None."""

    def device(self, key: str, device: int) -> DeviceLine | None:
        """The latest snapshot of one device of one run."""

    def close(self) -> None:
        """Stops following."""
