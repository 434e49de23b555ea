"""Numbers as integers modulo 2^64, which masks can hide perfectly and which add up without any rounding."""

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.bounds import within
from fedkeep.core.errors import RefusedError
from fedkeep.core.types import AnyArray, FloatArray, State

Words: TypeAlias = NDArray[np.uint64]
"""Integers modulo 2^64."""
WORD = np.dtype("<u8")
WIDEST = 1e30
"""No limit is that wide, and no grid: the sum over a fleet must stay a number."""


@dataclass(frozen=True)
class FixedPoint:
    """The finest grid on which the sum over `summands` devices, each within `bound`, cannot overflow."""

    bound: float
    """The largest magnitude of any number of one device."""
    summands: int

    def __post_init__(self) -> None:
        within(self, "bound", above=0, below=WIDEST)
        within(self, "summands", least=1)

    @property
    def step(self) -> float:
        """The distance between two neighbouring numbers of the grid, a power of two."""
        return float(2.0 ** (math.ceil(math.log2(self.bound * self.summands)) - 62))

    def encode(self, values: AnyArray) -> Words:
        """The values on the grid; what is not finite or out of bounds is refused, for a sum would hide it."""
        if not np.isfinite(values).all():
            raise RefusedError("value that is not finite", "it may not be masked: nothing was sent")
        largest = float(np.abs(values).max(initial=0.0))
        if largest > self.bound:
            raise RefusedError("value out of bounds", f"{largest:g} exceeds {self.bound:g}: nothing was sent")
        return np.rint(np.asarray(values, dtype=np.float64) / self.step).astype(np.int64).astype(WORD)

    def decode(self, total: Words) -> FloatArray:
        """The numbers that integers stand for, taken as the signed ones nearest to 0."""
        return total.astype(WORD).view(np.int64).astype(np.float64) * self.step


def weighted(values: AnyArray, weight: float) -> FloatArray:
    """The values times their weight, then the weight: sums of these tell the weighted mean."""
    return np.append(np.asarray(values, dtype=np.float64) * weight, weight)


def weighted_mean(total: FloatArray) -> FloatArray | None:
    """The mean behind a sum of `weighted` vectors; None without weight."""
    return total[:-1] / total[-1] if total[-1] > 0 else None


class Differences:
    """A device's side of a running sum (Eq. 8): it sends what changed since the sum last counted it."""

    def __init__(self, size: int) -> None:
        self._counted: Words = np.zeros(size, WORD)
        self._sent: Words = np.zeros(size, WORD)
        self._counted_in = self._sent_in = b""

    def knows(self, counted: bytes) -> bool:
        """Whether this device remembers what it sent in the session in which the sum last counted it."""
        return counted in (b"", self._counted_in, self._sent_in)

    def send(self, words: Words | None, session: bytes, counted: bytes) -> Words:
        """What to add to the running sum so that this device counts with `words`, or as before if there are none.

        `counted` names the session in which the sum last counted this device; empty: it does not count yet.
        """
        if not self.knows(counted):
            raise RefusedError("lost estimator", "what the sum counts of this device is not known here any more")
        if not counted:
            self._counted, self._counted_in = np.zeros_like(self._counted), b""
        elif counted == self._sent_in:
            self._counted, self._counted_in = self._sent, self._sent_in
        self._sent, self._sent_in = (self._counted if words is None else words).copy(), session
        return self._sent - self._counted

    def snapshot(self) -> State:
        sessions = {"counted_in": self._counted_in, "sent_in": self._sent_in}
        return {"counted": self._counted.copy(), "sent": self._sent.copy()} | {
            name: np.frombuffer(session, dtype=np.uint8) for name, session in sessions.items()
        }

    def restore(self, state: State) -> None:
        """Takes up a snapshot; one of another model's estimators is of no use, and is as good as lost."""
        if state["counted"].shape != self._counted.shape:
            return
        self._counted, self._sent = state["counted"].copy(), state["sent"].copy()
        self._counted_in, self._sent_in = state["counted_in"].tobytes(), state["sent_in"].tobytes()
