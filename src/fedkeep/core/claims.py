"""Whether devices do what they declared: store what they were given to store, see as much as they said they see."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fedkeep.core.types import DeviceId, Profile, Report, State

_REPORTS = 5
"""Reports after which a device can be judged."""
_FRESH = 0.3
_EMPTY, _FULL = 0.25, 0.75
"""A store is taken for empty below the first share of its slots, if the fleet's median is above the second."""
_EARNED = 1 / 8
"""Of the arrivals it declared a device must have counted so much, by the measure of the fleet's median."""
_PENANCE = 50
"""Rounds after which a device is given the benefit of the doubt again."""


@dataclass(frozen=True)
class _Record:
    reports: int = 0
    fill: float = 0.0
    """The share of its slots that is filled, a running mean."""
    arrivals: float = 0.0
    """Arrivals counted a round over the rate declared, a running mean; 0 before any was told."""
    last: int = -1


class Claims:
    """What each device's reports say of what it claimed, and by how much the claims of some count less."""

    def __init__(self) -> None:
        self._records: dict[DeviceId, _Record] = {}
        self._struck: dict[DeviceId, tuple[float, int]] = {}

    def observe(self, device: DeviceId, report: Report, slots: int, rate: float) -> None:
        """Takes in one accepted report of a device that was given so many slots and declared that rate."""
        old = self._records.get(device, _Record())
        fresh = 1.0 if old.reports == 0 else _FRESH
        fill = min(report.samples / slots, 1.0) if slots else 1.0
        arrivals = old.arrivals
        if report.local_gradient is not None and rate > 0 and old.last >= 0:
            now = report.gradient_samples / (rate * max(report.round - old.last, 1))
            arrivals = now if arrivals == 0 else (1 - _FRESH) * arrivals + _FRESH * now
        self._records[device] = _Record(
            old.reports + 1, (1 - fresh) * old.fill + fresh * fill, arrivals, max(old.last, report.round)
        )

    def judge(self, round_: int) -> dict[DeviceId, float]:
        """Devices whose claims turn out to count less, with the share that counts; and those forgiven, with 1."""
        forgiven = {d: 1.0 for d, (_, since) in self._struck.items() if round_ - since >= _PENANCE}
        for device in forgiven:
            self.forget(device)
        known = {d: r for d, r in self._records.items() if r.reports >= _REPORTS and d not in self._struck}
        if len(known) < _REPORTS:
            return forgiven
        fills = float(np.median([r.fill for r in known.values()]))
        counted = [r.arrivals for r in known.values() if r.arrivals > 0]
        usual = float(np.median(counted)) if counted else 0.0
        found = {d: 0.0 for d, r in known.items() if r.fill < _EMPTY and fills > _FULL}
        found |= {
            d: r.arrivals / usual for d, r in known.items() if d not in found and 0 < r.arrivals < _EARNED * usual
        }
        self._struck |= {d: (share, round_) for d, share in found.items()}
        return forgiven | found

    def founded(self, device: DeviceId, profile: Profile) -> Profile:
        """The profile as far as the device has borne it out."""
        share, _ = self._struck.get(device, (1.0, 0))
        if share == 1:
            return profile
        return replace(profile, velocity=share * profile.velocity, capacity=profile.capacity if share else 0)

    def forget(self, device: DeviceId) -> None:
        self._records.pop(device, None)
        self._struck.pop(device, None)

    def snapshot(self) -> State:
        rows = [(d, r.reports, r.fill, r.arrivals, r.last) for d, r in sorted(self._records.items())]
        struck = [(d, share, since) for d, (share, since) in sorted(self._struck.items())]
        return {"records": np.array(rows, float).reshape(-1, 5), "struck": np.array(struck, float).reshape(-1, 3)}

    def restore(self, state: State) -> None:
        rows = state["records"].tolist()
        self._records = {int(d): _Record(int(n), fill, arrivals, int(last)) for d, n, fill, arrivals, last in rows}
        self._struck = {int(d): (share, int(since)) for d, share, since in state["struck"].tolist()}
