"""The memory of the robust stages: what the fleet's updates have been like.

Medians and upper quartiles are what a minority of Byzantine devices cannot move. The statistics
begin empty: until `MIN_OBSERVATIONS` lengths are known, `Limits.update_norm` alone bounds an
update.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedkeep.core.gradients.layout import GradientLayout
from fedkeep.core.outliers import MIN_OBSERVATIONS, median
from fedkeep.core.types import DeviceId, FloatArray, State

_WINDOW = 50
"""How many values are remembered: the round's own, and earlier ones as far as those are fewer."""
_PEAK_DECAY = 0.99
"""What is left of the longest usual length after one more round."""
REFERENCE_DECAY = 0.8
"""What is left of the reference direction after one more round."""
_PART = 1 << 14
"""Numbers of a part of a model."""


class Agreement(NamedTuple):
    """A device's running mean of cosines with the reference direction, as a sum and its weight."""

    total: float = 0.0
    mass: float = 0.0

    @property
    def mean(self) -> float:
        """The mean cosine, from the first report on."""
        return self.total / self.mass


class UpdateStatistics:
    """Recent lengths and weights of updates, their direction, and devices' agreement with it.

    Parameters
    ----------
    gradient_layout : GradientLayout, optional
        How local gradients are represented beside the updates; None: number by number.
    """

    def __init__(self, gradient_layout: GradientLayout | None = None) -> None:
        self.gradient_layout = gradient_layout
        self._lengths: list[float] = []
        self._weights: list[float] = []
        self._peak = 0.0
        self.reference: FloatArray | None = None
        """The running mean of the model's robust steps; None before the first."""
        self.agreement: dict[DeviceId, Agreement] = {}

    def usual_length(self, lengths: Sequence[float] = ()) -> float:
        """Return the median of these and recent lengths; infinity while too few are known."""
        known = with_recent(self._lengths, lengths)
        return median(known) if len(known) >= MIN_OBSERVATIONS else np.inf

    def median_length(self, lengths: Sequence[float]) -> float:
        """Return the median of these and recent lengths, however few; 0 where all are 0."""
        return median(with_recent(self._lengths, lengths) or [0.0])

    def max_length(self, lengths: Sequence[float], ratio: float) -> float:
        """Return `ratio` times the usual length at its longest: longer updates are outliers.

        The updates of a fleet get shorter as it learns, but not those of a device with news, and
        those are needed most.
        """
        return ratio * max(self._peak, self.usual_length(lengths))

    def learn_lengths(self, lengths: Sequence[float]) -> None:
        """Take in the lengths of a round's updates, of rejected ones too.

        Where the data change, all updates get longer: the limit has to follow.
        """
        self._lengths = with_recent(self._lengths, lengths)[-_WINDOW:]
        if len(self._lengths) >= MIN_OBSERVATIONS:
            self._peak = max(_PEAK_DECAY * self._peak, self.usual_length())

    def learn_weights(self, weights: Sequence[float]) -> FloatArray:
        """Take in the weights of a round's reports; return them with the recent ones."""
        known = with_recent(self._weights, weights)
        self._weights = known[-_WINDOW:]
        return np.array(known)

    def learn_reference(self, step: FloatArray) -> None:
        """Take in a robust step of the model; the array is changed, and kept."""
        if self.reference is not None:
            step *= 1 - REFERENCE_DECAY
            # In parts: a copy of a large model costs more than the arithmetic.
            for start in range(0, len(step), _PART):
                part = slice(start, start + _PART)
                step[part] += REFERENCE_DECAY * self.reference[part]
        self.reference = step

    def forget_weights(self) -> None:
        """Forget the weights: they are in units of a plan that is no longer in force."""
        self._weights = []

    def forget(self, device: DeviceId) -> None:
        """Forget a device that has left."""
        self.agreement.pop(device, None)

    def snapshot(self) -> State:
        """Return the statistics as plain arrays."""
        devices = sorted(self.agreement)
        pairs = [self.agreement[device] for device in devices]
        return {
            "lengths": np.array(self._lengths),
            "weights": np.array(self._weights),
            "peak": np.array(self._peak),
            "heading": np.empty(0) if self.reference is None else self.reference,
            "devices": np.array(devices, dtype=np.int64),
            "agreement": np.array(pairs, dtype=np.float64).reshape(-1, 2),
        }

    def restore(self, state: State) -> None:
        """Take over what `snapshot` returned."""
        self._lengths, self._weights = state["lengths"].tolist(), state["weights"].tolist()
        self._peak = float(state["peak"])
        self.reference = np.array(state["heading"]) if len(state["heading"]) else None
        pairs = [Agreement(float(total), float(mass)) for total, mass in state["agreement"]]
        self.agreement = dict(zip(state["devices"].tolist(), pairs, strict=True))


def with_recent(earlier: Sequence[float], now: Sequence[float]) -> list[float]:
    """Return the values above 0 of this round behind as many earlier ones as fill the window."""
    moved = [value for value in now if value > 0]
    missing = max(_WINDOW - len(moved), 0)
    return [*(earlier[-missing:] if missing else ()), *moved]
