"""What is usual in the fleet, learnt from reports that counted: lengths, weights, and the way the model goes.

Medians and upper quartiles are what liars cannot move as long as they are few. All of it is the server's durable
state. It begins empty: until `MIN_OBSERVATIONS` lengths are known, a round is judged by `Limits.update_norm` alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from fedkeep.core.screening import mad_upper_bound
from fedkeep.core.types import BoolArray, DeviceId, FloatArray, Report, State, Vector

MIN_OBSERVATIONS = 5
"""Fewer values than these say nothing of what is usual."""
_RECENT = 50
"""How many values tell what is usual: those of the present round, and of earlier ones as far as they are fewer."""
_PEAK_DECAY = 0.99
"""What the longest usual length is remembered by after one more round."""
_HEADING_DECAY = 0.8
_AGREEMENT_DECAY = 0.8
_SLACK, _FAR = 2.5, 3.5
"""Spreads below the fleet's median agreement at which an update is turned, and at which it does not count."""
_LEAST_SPREAD = 0.05
_KNOWN = 1 - _AGREEMENT_DECAY**MIN_OBSERVATIONS
"""The weight of evidence after which a device is known."""


class UpdateStatistics:
    """Recent lengths and weights of updates, where the model is heading, and how far each device agrees with it."""

    def __init__(self) -> None:
        self._lengths: list[float] = []
        self._weights: list[float] = []
        self._peak = 0.0
        self._heading: FloatArray | None = None
        self._seen: dict[DeviceId, tuple[float, float]] = {}
        """Per device the running sum of cosines and of their weights: their quotient is the mean, from the first on."""

    def longest(self, lengths: Sequence[float], ratio: float) -> float:
        """The length beyond which an update is no honest one: `ratio` times what has been usual at its longest.

        A fleet's updates get shorter as it learns, but not those of a device with news, which are the ones to keep.
        """
        return ratio * max(self._peak, self.length(lengths))

    def length(self, lengths: Sequence[float] = ()) -> float:
        """The usual length, of the round's own and recent ones; unbounded at the start."""
        known = _with_recent(self._lengths, lengths)
        return float(np.median(known)) if len(known) >= MIN_OBSERVATIONS else np.inf

    def learn_lengths(self, lengths: Sequence[float]) -> None:
        """Takes in the lengths of a round's updates, of refused ones too: where the world changes, all get longer."""
        self._lengths = _with_recent(self._lengths, lengths)[-_RECENT:]
        if len(self._lengths) >= MIN_OBSERVATIONS:
            self._peak = max(_PEAK_DECAY * self._peak, self.length())

    def tame(
        self, model: Vector, reports: Mapping[DeviceId, Report]
    ) -> tuple[dict[DeviceId, Report], list[DeviceId]]:
        """The reports as a robust mean takes them, and whose updates do not count at all.

        Each update is cut to the usual length, and its weight to what is usual. An update of a device that keeps
        pointing against where the others take the model loses what goes against it; one far out counts for nothing; one
        that hardly goes with them counts little, a newcomer less at first. Together they are as long as they would be
        uncut, so that honest fleets lose no speed. A gist counts where its device goes with the others, and by its own
        word: it is no gist of a stream that its own update climbs.
        """
        counted = {d: r for d, r in reports.items() if r.weight > 0}
        if not counted:
            return dict(reports), []
        devices = list(counted)
        updates = np.array([r.model.astype(np.float64) - model for r in counted.values()])
        unfounded = _contradicted(counted, updates)
        lengths: FloatArray = np.linalg.norm(updates, axis=1)
        usual = float(np.median(_with_recent(self._lengths, lengths.tolist()) or [0.0]))
        updates *= np.minimum(1.0, usual / np.maximum(lengths, 1e-30))[:, None]
        said = [r.weight for r in counted.values()]
        known = _with_recent(self._weights, said)
        self._weights = known[-_RECENT:]
        weights = np.minimum(said, weight_cap(np.array(known)))
        against, dropped = self._turn(devices, updates)
        unfounded |= {d for i, d in enumerate(devices) if against[i] or dropped[i]}
        if dropped.all():
            dropped[:] = False
        weights[dropped] = 0.0
        weights *= self._standing(devices)
        lost = float(weights @ np.linalg.norm(updates, axis=1))
        scale = float(weights @ np.minimum(lengths, 2 * usual)) / lost if lost > 0 else 1.0
        if (
            weights.any()
        ):  # 0 where only devices took part that go against all others: they say nothing of the way
            step = scale * (weights @ updates) / weights.sum()
            old = self._heading
            self._heading = (
                step if old is None else _HEADING_DECAY * old + (1 - _HEADING_DECAY) * step
            )
        tamed = {
            d: replace(
                counted[d],
                model=(model + scale * updates[i]).astype(np.float32),
                weight=float(weights[i]),
            )
            for i, d in enumerate(devices)
        }
        tamed |= {d: replace(tamed[d], local_gradient=None) for d in unfounded}
        return {**reports, **tamed}, [d for i, d in enumerate(devices) if dropped[i]]

    def replan(self) -> None:
        """Weights are in units of the plan: under a new one nothing is known of them."""
        self._weights = []

    def forget(self, device: DeviceId) -> None:
        self._seen.pop(device, None)

    def snapshot(self) -> State:
        devices = sorted(self._seen)
        return {
            "lengths": np.array(self._lengths),
            "weights": np.array(self._weights),
            "peak": np.array(self._peak),
            "heading": np.empty(0) if self._heading is None else self._heading,
            "devices": np.array(devices, dtype=np.int64),
            "agreement": np.array([self._seen[d] for d in devices], dtype=np.float64).reshape(
                -1, 2
            ),
        }

    def restore(self, state: State) -> None:
        self._lengths, self._weights = state["lengths"].tolist(), state["weights"].tolist()
        self._peak = float(state["peak"])
        self._heading = np.array(state["heading"]) if len(state["heading"]) else None
        pairs = [(float(total), float(mass)) for total, mass in state["agreement"]]
        self._seen = dict(zip(state["devices"].tolist(), pairs, strict=True))

    def _turn(self, devices: list[DeviceId], updates: FloatArray) -> tuple[BoolArray, BoolArray]:
        """Turns updates that go against the others, in place; says which, and which do not count at all.

        A second look leaves out of "the others" whoever stood out in the first.
        """
        trusted = np.ones(len(devices), dtype=bool)
        lengths = np.maximum(np.linalg.norm(updates, axis=1), 1e-30)
        for _ in range(2):
            headings = self._headings(updates, trusted)
            cosines: FloatArray = (updates * headings).sum(axis=1) / lengths
            seen = dict(self._seen)
            for device, cosine in zip(devices, cosines.tolist(), strict=True):
                total, mass = self._seen.get(device, (0.0, 0.0))
                fresh = 1 - _AGREEMENT_DECAY
                seen[device] = (
                    _AGREEMENT_DECAY * total + fresh * cosine,
                    _AGREEMENT_DECAY * mass + fresh,
                )
            agreed = {d: total / mass for d, (total, mass) in seen.items()}
            means = np.array([agreed[d] for d in devices])
            trusted = means >= min(
                _far_below(agreed.values(), _SLACK), 0.0
            )  # nobody at odds with nothing is turned
            if trusted.all():
                break  # a second look would see the same
        self._seen = seen
        against = ~trusted & (cosines < 0)
        updates[against] -= (updates[against] * headings[against]).sum(
            axis=1, keepdims=True
        ) * headings[against]
        return against, means < min(_far_below(agreed.values(), _FAR), -0.1)

    def _headings(self, updates: FloatArray, trusted: BoolArray) -> FloatArray:
        """Where the others go, as each device sees it: this round's, all alike, and earlier rounds'."""
        total = trusted @ updates
        alone: FloatArray = trusted[:, None] * updates
        np.subtract(total, alone, out=alone)
        alone /= np.maximum(trusted.sum() - trusted, 1)[:, None]
        if self._heading is not None:
            alone *= 1 - _HEADING_DECAY
            alone += _HEADING_DECAY * self._heading
        alone /= np.maximum(np.linalg.norm(alone, axis=1, keepdims=True), 1e-30)
        return alone

    def _standing(self, devices: list[DeviceId]) -> FloatArray:
        """How much devices count: newcomers to a fleet that knows its devices in full from the fifth report on.

        One that goes with the others, but stands out by how little, counts by the square of what it lacks.
        """
        known = np.median([mass for _, mass in self._seen.values()]) >= _KNOWN
        counts = np.array([min(1.0, self._seen[d][1] / _KNOWN) if known else 1.0 for d in devices])
        agreed = {d: total / mass for d, (total, mass) in self._seen.items()}
        least = _far_below(agreed.values(), _SLACK) if len(agreed) >= MIN_OBSERVATIONS else 0.0
        if least > 0:
            counts *= np.clip([agreed[d] / least for d in devices], 0.0, 1.0) ** 2
        return counts


def weight_cap(weights: FloatArray) -> float:
    """The most that a weight counts for: the upper quartile, or three spreads above the median if that is more.

    >>> weight_cap(np.array([1.0, 1.0, 1.0, 1.0, 1e9]))
    1.0
    >>> round(weight_cap(np.array([1.0, 2.0, 4.0, 8.0, 16.0])), 1)
    87.3
    """
    return max(float(np.quantile(weights, 0.75)), mad_upper_bound(weights))


def _with_recent(earlier: list[float], now: Sequence[float]) -> list[float]:
    """The values of this round above 0, and as many of earlier ones as it takes to know what is usual."""
    moved = [value for value in now if value > 0]
    missing = max(_RECENT - len(moved), 0)
    return [*(earlier[-missing:] if missing else ()), *moved]


def _contradicted(reports: Mapping[DeviceId, Report], updates: FloatArray) -> set[DeviceId]:
    """Whose gist its own update contradicts: training goes down the stream's gradient, a turned gist says up.

    Where noise makes all gists say nothing, none stands out.
    """
    found = {}
    for (device, report), update in zip(reports.items(), updates, strict=True):
        gist = report.local_gradient
        if gist is not None:
            valued = update[len(update) - len(gist) :]
            lengths = float(np.linalg.norm(valued)) * float(np.linalg.norm(gist))
            found[device] = -float(valued @ gist) / max(lengths, 1e-30)
    slack = min(_far_below(found.values(), _SLACK), 0.0) if found else 0.0
    return {device for device, cosine in found.items() if cosine < slack}


def _far_below(agreements: Iterable[float], spreads: float) -> float:
    """So many robust spreads below the median."""
    values = np.array([*agreements])
    centre = float(np.median(values))
    spread = max(1.4826 * float(np.median(np.abs(values - centre))), _LEAST_SPREAD)
    return centre - spreads * spread
