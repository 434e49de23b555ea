"""What devices claim of themselves: how much of a profile counts, and whether reports bear it out.

A claim that cannot be checked counts up to what the fleet's other claims allow (`cap_profiles`).
One that can is audited: a device must store what it was given to store, and see as much as it
declared (`ClaimAudit`).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fedkeep.core.errors import RejectionReason
from fedkeep.core.outliers import median, robust_cap
from fedkeep.core.planning.profiles import FleetProfiles
from fedkeep.core.rounds import Rejection, report_cuts
from fedkeep.core.types import DeviceId, FloatArray, Profile, Report, State

_MIN_REPORTS, _MANY_REPORTS = 5, 20
"""Reports after which peers judge a device; and after which the fleet does if peers are few."""
_FILL_RATE = 0.3
"""What the latest report counts in the running mean of a store's fill."""
_EMPTY, _FULL = 0.25, 0.75
"""A fill below the first is empty if the median of the device's peers is above the second."""
_PEER_RATIO = 4.0
"""Peers declare at most so many times the device's rate: slow streams fill stores slowly."""
_MIN_SHARE = 1 / 8
"""A device must count so much of its declared arrivals, relative to the fleet's median."""
_ARRIVALS_DECAY = 0.8
"""What earlier arrivals count after one more report."""
_ONE_PER_REPORT = 1 / (1 - _ARRIVALS_DECAY)
"""The limit of counts of 1 a report, as hidden gradients give them: they say nothing of rates."""
_MIN_EXPECTED = 20.0
"""Arrivals to be expected before too few count: by chance a fifth as many come once in 10^5."""
PROBATION_ROUNDS = 50
"""Rounds after which a penalised device's claims count in full again."""


def cap_profiles(
    claimed: FleetProfiles, before: FloatArray, growth: float
) -> tuple[FleetProfiles, FloatArray, list[Rejection]]:
    """Cap rates and capacities by what the fleet's other claims allow.

    Parameters
    ----------
    claimed : FleetProfiles
        As declared.
    before : FloatArray
        The rates that counted last, (C,), NaN where there are none.
    growth : float
        How many times its earlier rate a device's rate counts at most.

    Returns
    -------
    tuple[FleetProfiles, FloatArray, list[Rejection]]
        The fleet as it counts, its rates, and whose claims were cut.
    """
    devices = claimed.devices.tolist()
    rates = claimed.velocities.sum(axis=1, dtype=np.float64)
    grown = np.where(before > 0, growth * before, np.inf)
    capped = np.minimum(np.minimum(rates, robust_cap(rates)), grown)
    scale = np.divide(capped, rates, out=np.ones_like(rates), where=rates > 0)
    capacity_cap = robust_cap(claimed.capacities.astype(np.float64))
    capacities = np.minimum(claimed.capacities, capacity_cap)
    cuts = report_cuts("rate", RejectionReason.RATE_CUT, devices, rates, capped)
    cuts += report_cuts(
        "capacity", RejectionReason.CAPACITY_CUT, devices, claimed.capacities, capacities
    )
    velocities = claimed.velocities * scale[:, None]
    fleet = FleetProfiles(claimed.devices, capacities.astype(np.int64), velocities)
    return fleet, capped, cuts


class _Record(NamedTuple):
    """What a device's reports showed of its claims."""

    reports: int = 0
    fill: float = 0.0
    """The share of its slots that is filled, a running mean."""
    rate: float = 0.0
    arrivals: float = 0.0
    """Arrivals counted, earlier ones less and less."""
    declared: float = 0.0
    """Declared rates times rounds passed, likewise, in the fleet's own unit of time."""
    last: int = -1


class ClaimAudit:
    """Compares devices' claims with their reports; those not borne out count less."""

    def __init__(self) -> None:
        self._records: dict[DeviceId, _Record] = {}
        self._penalised: dict[DeviceId, tuple[float, int]] = {}
        """The share of its claims that counts, and since which round."""

    def observe(self, device: DeviceId, report: Report, slots: int, rate: float) -> None:
        """Take in one accepted report.

        Parameters
        ----------
        device : DeviceId
            Its sender.
        report : Report
            As accepted.
        slots : int
            How many slots the plan gives the device.
        rate : float
            The arrivals per unit of time that it declared.
        """
        old = self._records.get(device, _Record())
        fresh = 1.0 if old.reports == 0 else _FILL_RATE
        fill = min(report.samples / slots, 1.0) if slots else 1.0
        arrivals, declared = old.arrivals, old.declared
        if report.local_gradient is not None and old.last >= 0:
            arrivals = _ARRIVALS_DECAY * arrivals + report.gradient_samples
            declared = _ARRIVALS_DECAY * declared + rate * max(report.round - old.last, 1)
        self._records[device] = _Record(
            reports=old.reports + 1,
            fill=(1 - fresh) * old.fill + fresh * fill,
            rate=rate,
            arrivals=arrivals,
            declared=declared,
            last=max(old.last, report.round),
        )

    def review(self, round_: int) -> dict[DeviceId, float]:
        """Penalise devices whose claims their reports do not bear out, and end probations.

        Returns
        -------
        dict[DeviceId, float]
            The share of its claims that counts from now on, by device: below 1 for those penalised,
            1 for those whose probation is over.
        """
        restored = {
            device: 1.0
            for device, (_, since) in self._penalised.items()
            if round_ - since >= PROBATION_ROUNDS
        }
        for device in restored:
            self.forget(device)
        known = {
            device: record
            for device, record in self._records.items()
            if record.reports >= _MIN_REPORTS and device not in self._penalised
        }
        if len(known) < _MIN_REPORTS:
            return restored
        found = {
            device: 0.0
            for device, record in known.items()
            if record.fill < _EMPTY and _peer_fill(record, known) > _FULL
        }
        found |= {d: share for d, share in _shares_of_arrivals(known).items() if d not in found}
        self._penalised |= {device: (share, round_) for device, share in found.items()}
        return restored | found

    def discount(self, device: DeviceId, profile: Profile) -> Profile:
        """Return the profile as far as the device's reports have borne it out."""
        share, _ = self._penalised.get(device, (1.0, 0))
        if share == 1:
            return profile
        capacity = profile.capacity if share else 0
        return replace(profile, velocity=share * profile.velocity, capacity=capacity)

    def forget(self, device: DeviceId) -> None:
        """Forget a device: one that left, or whose probation is over."""
        self._records.pop(device, None)
        self._penalised.pop(device, None)

    def snapshot(self) -> State:
        """Return the audit as plain arrays."""
        rows = [(d, *record) for d, record in sorted(self._records.items())]
        penalised = [(d, share, since) for d, (share, since) in sorted(self._penalised.items())]
        return {
            "records": np.array(rows, float).reshape(-1, 7),
            "struck": np.array(penalised, float).reshape(-1, 3),
        }

    def restore(self, state: State) -> None:
        """Take over what `snapshot` returned."""
        rows = state["records"].tolist()
        self._records = {
            int(d): _Record._make((int(n), *rest, int(last))) for d, n, *rest, last in rows
        }
        self._penalised = {
            int(d): (share, int(since)) for d, share, since in state["struck"].tolist()
        }


def _shares_of_arrivals(known: Mapping[DeviceId, _Record]) -> dict[DeviceId, float]:
    """Find who counts far fewer arrivals than declared, with the share of the usual."""
    borne_out = {d: r.arrivals / r.declared for d, r in known.items() if r.declared > 0}
    counted = median([r.arrivals for r in known.values()])
    if not borne_out or counted <= _ONE_PER_REPORT:
        return {}
    usual = median(list(borne_out.values()))
    return {
        device: share / usual
        for device, share in borne_out.items()
        if share < _MIN_SHARE * usual and usual * known[device].declared >= _MIN_EXPECTED
    }


def _peer_fill(record: _Record, known: Mapping[DeviceId, _Record]) -> float:
    """Return the median fill of comparable devices' stores; 0 where nothing is known yet."""
    fills = [r.fill for r in known.values() if r.rate <= _PEER_RATIO * record.rate]
    if len(fills) <= _MIN_REPORTS and record.reports >= _MANY_REPORTS:
        fills = [r.fill for r in known.values()]
    return median(fills) if len(fills) > _MIN_REPORTS else 0.0
