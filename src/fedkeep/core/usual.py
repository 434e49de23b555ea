"""What is usual in the fleet, learnt from reports that counted: lengths, weights, and the way the model goes.

Medians and upper quartiles are what liars cannot move as long as they are few. All of it is the server's durable
state. It begins empty: until `FEW` lengths are known, a round is judged by `Limits.update_norm` alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from fedkeep.core.types import DeviceId, FloatArray, Report, State, Vector

FEW = 5
"""Fewer values than these say nothing of what is usual."""
_RECENT = 50
"""How many values tell what is usual: those of the present round, and of earlier ones as far as they are fewer."""
_HEADING_DECAY = 0.8
_AGREEMENT_DECAY = 0.8
_SLACK, _FAR = 2.5, 3.5
"""Spreads below the fleet's median agreement at which an update is turned, and at which it does not count."""
_LEAST_SPREAD = 0.05
_KNOWN = 1 - _AGREEMENT_DECAY**FEW
"""The weight of evidence after which a device is known."""


class Usual:
    """Recent lengths and weights of updates, where the model is heading, and how far each device agrees with it."""

    def __init__(self) -> None:
        self._lengths: list[float] = []
        self._weights: list[float] = []
        self._heading: FloatArray | None = None
        self._agreement: dict[DeviceId, tuple[float, float]] = {}
        """Per device the running sum of cosines and of their weights: their quotient is the mean, from the first on."""

    def longest(self, lengths: Sequence[float], ratio: float) -> float:
        """The length beyond which an update is no honest one: `ratio` times what is usual; unbounded at the start."""
        known = _with_recent(self._lengths, lengths)
        return ratio * float(np.median(known)) if len(known) >= FEW else np.inf

    def tame(self, model: Vector, reports: Mapping[DeviceId, Report]) -> tuple[dict[DeviceId, Report], list[DeviceId]]:
        """The reports as a robust mean takes them, and whose updates do not count at all.

        Each update is cut to the usual length, and its weight to the upper quartile of the weights. An update of a
        device that keeps pointing against where the others take the model loses what goes against it; one far out
        counts for nothing; a newcomer counts less at first. Together they are as long as they would be uncut, so that
        honest fleets lose no speed.
        """
        counted = {d: r for d, r in reports.items() if r.weight > 0}
        if not counted:
            return dict(reports), []
        devices = list(counted)
        updates = np.array([r.model.astype(np.float64) - model for r in counted.values()])
        full = self._cut_lengths(updates)
        weights = self._cut_weights(np.array([r.weight for r in counted.values()]))
        dropped = self._turn(devices, updates, weights)
        weights[dropped] = 0.0
        weights *= self._standing(devices)
        lost = float(weights @ np.linalg.norm(updates, axis=1))
        scale = float(weights @ full) / lost if lost > 0 else 1.0
        self._move(updates, weights, scale)
        tamed = {
            d: replace(counted[d], model=(model + scale * updates[i]).astype(np.float32), weight=float(weights[i]))
            for i, d in enumerate(devices)
        }
        return {**reports, **tamed}, [d for i, d in enumerate(devices) if dropped[i]]

    def learn_lengths(self, lengths: Sequence[float]) -> None:
        """Takes in the lengths of a round's accepted updates, none longer than twice the usual."""
        known = _with_recent(self._lengths, lengths)
        most = 2 * float(np.median(known)) if len(known) >= FEW else np.inf
        self._lengths = [*self._lengths, *(min(length, most) for length in lengths)][-_RECENT:]

    def replan(self) -> None:
        """Weights are in units of the plan: under a new one nothing is known of them."""
        self._weights = []

    def forget(self, device: DeviceId) -> None:
        self._agreement.pop(device, None)

    def snapshot(self) -> State:
        devices = sorted(self._agreement)
        agreement = np.array([self._agreement[d] for d in devices], dtype=np.float64).reshape(-1, 2)
        return {
            "lengths": np.array(self._lengths),
            "weights": np.array(self._weights),
            "heading": np.empty(0) if self._heading is None else self._heading,
            "devices": np.array(devices, dtype=np.int64),
            "agreement": agreement,
        }

    def restore(self, state: State) -> None:
        self._lengths, self._weights = state["lengths"].tolist(), state["weights"].tolist()
        self._heading = np.array(state["heading"]) if len(state["heading"]) else None
        pairs = [(float(total), float(mass)) for total, mass in state["agreement"]]
        self._agreement = dict(zip(state["devices"].tolist(), pairs, strict=True))

    def _cut_lengths(self, updates: FloatArray) -> FloatArray:
        """Cuts updates to the usual length, in place; returns the lengths they had, as far as they are plausible."""
        lengths: FloatArray = np.linalg.norm(updates, axis=1)
        usual = float(np.median(_with_recent(self._lengths, lengths.tolist())))
        updates *= np.minimum(1.0, usual / np.maximum(lengths, 1e-30))[:, None]
        return np.minimum(lengths, 2 * usual)

    def _cut_weights(self, weights: FloatArray) -> FloatArray:
        known = _with_recent(self._weights, weights.tolist())
        self._weights = known[-_RECENT:]
        return np.minimum(weights, np.quantile(known, 0.75))

    def _turn(self, devices: list[DeviceId], updates: FloatArray, weights: FloatArray) -> np.ndarray:
        """Turns updates that go against the others, in place; says which do not count at all.

        A second look leaves out of "the others" whoever stood out in the first.
        """
        trusted = np.ones(len(devices), dtype=bool)
        for _ in range(2):
            headings = self._headings(updates, trusted)
            cosines = _cosines(updates, headings)
            seen = self._agreement | {d: self._agreeing(d, c) for d, c in zip(devices, cosines.tolist(), strict=True)}
            slack, far = _bounds([total / mass for total, mass in seen.values()])
            means = np.array([seen[d][0] / seen[d][1] for d in devices])
            trusted = means >= slack
        self._agreement = seen
        against = np.flatnonzero(~trusted & (cosines < 0))
        updates[against] -= (updates[against] * headings[against]).sum(axis=1, keepdims=True) * headings[against]
        dropped = means < far
        return np.zeros_like(dropped) if dropped[weights > 0].all() else dropped

    def _standing(self, devices: list[DeviceId]) -> FloatArray:
        """How much newcomers count in a fleet that knows its devices: in full from the fifth report on."""
        masses = np.array([self._agreement[d][1] for d in devices])
        known = np.median([mass for _, mass in self._agreement.values()]) >= _KNOWN
        return np.minimum(1.0, masses / _KNOWN) if known else np.ones(len(devices))

    def _headings(self, updates: FloatArray, trusted: np.ndarray) -> FloatArray:
        """Where the others take the model, as each device sees it: this round's, all alike, and earlier rounds'."""
        total = trusted @ updates
        others = np.maximum(trusted.sum() - trusted, 1)[:, None]
        alone: FloatArray = (total - trusted[:, None] * updates) / others
        if self._heading is not None:
            alone = _HEADING_DECAY * self._heading + (1 - _HEADING_DECAY) * alone
        unit: FloatArray = alone / np.maximum(np.linalg.norm(alone, axis=1, keepdims=True), 1e-30)
        return unit

    def _agreeing(self, device: DeviceId, cosine: float) -> tuple[float, float]:
        total, mass = self._agreement.get(device, (0.0, 0.0))
        fresh = 1 - _AGREEMENT_DECAY
        return _AGREEMENT_DECAY * total + fresh * cosine, _AGREEMENT_DECAY * mass + fresh

    def _move(self, updates: FloatArray, weights: FloatArray, scale: float) -> None:
        if weights.sum() > 0:
            step = scale * (weights @ updates) / weights.sum()
            fresh = 1 - _HEADING_DECAY
            self._heading = step if self._heading is None else _HEADING_DECAY * self._heading + fresh * step


def _with_recent(earlier: list[float], now: Sequence[float]) -> list[float]:
    """The values of this round, and as many of earlier ones as it takes to know what is usual."""
    missing = max(_RECENT - len(now), 0)
    return [*(earlier[-missing:] if missing else ()), *now]


def _cosines(updates: FloatArray, headings: FloatArray) -> FloatArray:
    lengths = np.maximum(np.linalg.norm(updates, axis=1), 1e-30)
    found: FloatArray = (updates * headings).sum(axis=1) / lengths
    return found


def _bounds(agreements: list[float]) -> tuple[float, float]:
    """Below which agreement an update is turned, and below which it is dropped; nobody at odds with nothing is."""
    centre = float(np.median(agreements))
    spread = max(1.4826 * float(np.median(np.abs(np.array(agreements) - centre))), _LEAST_SPREAD)
    return min(centre - _SLACK * spread, 0.0), min(centre - _FAR * spread, -0.1)
