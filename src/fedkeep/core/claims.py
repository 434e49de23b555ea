"""Whether devices do what they declared: store what they were given to store, see as much as they said they see."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fedkeep.core.types import DeviceId, Profile, Report, State

_REPORTS, _MANY = 5, 20
"""Reports after which a device can be judged by its peers; and by the whole fleet, where it has too few of them."""
_FRESH = 0.3
_EMPTY, _FULL = 0.25, 0.75
"""A store is taken for empty below the first share of its slots, if the median of its peers is above the second."""
_PEERS = 4.0
"""Peers of a device declare at most so many times its rate: a slow stream takes longer to fill a store."""
_EARNED = 1 / 8
"""Of the arrivals it declared a device must have counted so much, by the measure of the fleet's median."""
_MEMORY = 0.8
"""What arrivals counted earlier count after one more report."""
_ONE_A_REPORT = 1 / (1 - _MEMORY)
"""What counts add up to where each is 1, as with gists that are to be hidden: they say nothing of rates."""
_TELLING = 20.0
"""Arrivals to be expected before too few of them say anything: chance alone brings a fifth as many once in 10^5."""
_PENANCE = 50
"""Rounds after which a device is given the benefit of the doubt again."""


class _Record(NamedTuple):
    reports: int = 0
    fill: float = 0.0
    """The share of its slots that is filled, a running mean."""
    rate: float = 0.0
    arrivals: float = 0.0
    """Arrivals counted, earlier ones less and less."""
    declared: float = 0.0
    """Rates declared times rounds passed, likewise: in whatever unit of time a fleet declares its rates."""
    last: int = -1


class ClaimAudit:
    """What each device's reports say of what it claimed, and by how much the claims of some count less."""

    def __init__(self) -> None:
        self._records: dict[DeviceId, _Record] = {}
        self._struck: dict[DeviceId, tuple[float, int]] = {}

    def observe(self, device: DeviceId, report: Report, slots: int, rate: float) -> None:
        """Takes in one accepted report of a device that was given so many slots and declared that rate."""
        old = self._records.get(device, _Record())
        fresh = 1.0 if old.reports == 0 else _FRESH
        fill = min(report.samples / slots, 1.0) if slots else 1.0
        arrivals, declared = old.arrivals, old.declared
        if report.local_gradient is not None and old.last >= 0:
            arrivals = _MEMORY * arrivals + report.gradient_samples
            declared = _MEMORY * declared + rate * max(report.round - old.last, 1)
        fill = (1 - fresh) * old.fill + fresh * fill
        last = max(old.last, report.round)
        self._records[device] = _Record(old.reports + 1, fill, rate, arrivals, declared, last)

    def judge(self, round_: int) -> dict[DeviceId, float]:
        """Devices whose claims turn out to count less, with the share that counts; and those forgiven, with 1."""
        forgiven = {d: 1.0 for d, (_, since) in self._struck.items() if round_ - since >= _PENANCE}
        for device in forgiven:
            self.forget(device)
        known = {
            d: r
            for d, r in self._records.items()
            if r.reports >= _REPORTS and d not in self._struck
        }
        if len(known) < _REPORTS:
            return forgiven
        found = {
            d: 0.0 for d, r in known.items() if r.fill < _EMPTY and _fill_of_peers(r, known) > _FULL
        }
        borne_out = {d: r.arrivals / r.declared for d, r in known.items() if r.declared > 0}
        counted = float(np.median([r.arrivals for r in known.values()]))
        usual = float(np.median(list(borne_out.values()))) if counted > _ONE_A_REPORT else 0.0
        found |= {
            d: share / usual
            for d, share in borne_out.items()
            if d not in found and share < _EARNED * usual and usual * known[d].declared >= _TELLING
        }
        self._struck |= {d: (share, round_) for d, share in found.items()}
        return forgiven | found

    def founded(self, device: DeviceId, profile: Profile) -> Profile:
        """The profile as far as the device has borne it out."""
        share, _ = self._struck.get(device, (1.0, 0))
        if share == 1:
            return profile
        return replace(
            profile, velocity=share * profile.velocity, capacity=profile.capacity if share else 0
        )

    def forget(self, device: DeviceId) -> None:
        self._records.pop(device, None)
        self._struck.pop(device, None)

    def snapshot(self) -> State:
        rows = [(d, *r) for d, r in sorted(self._records.items())]
        struck = [(d, share, since) for d, (share, since) in sorted(self._struck.items())]
        return {
            "records": np.array(rows, float).reshape(-1, 7),
            "struck": np.array(struck, float).reshape(-1, 3),
        }

    def restore(self, state: State) -> None:
        rows = state["records"].tolist()
        self._records = {
            int(d): _Record._make((int(n), *rest, int(last))) for d, n, *rest, last in rows
        }
        self._struck = {int(d): (share, int(since)) for d, share, since in state["struck"].tolist()}


def _fill_of_peers(record: _Record, known: Mapping[DeviceId, _Record]) -> float:
    """How full the stores of comparable devices are, the median; 0 where nothing can be said yet."""
    fills = [r.fill for r in known.values() if r.rate <= _PEERS * record.rate]
    if len(fills) <= _REPORTS and record.reports >= _MANY:
        fills = [r.fill for r in known.values()]
    return float(np.median(fills)) if len(fills) > _REPORTS else 0.0
