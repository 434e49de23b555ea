"""Numbers as integers modulo 2^64, which masks hide perfectly and sums do not round."""

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import RejectedError, RejectionReason
from fedkeep.core.types import AnyArray, FloatArray, State

Words: TypeAlias = NDArray[np.uint64]
WORD = np.dtype("<u8")
WIDEST = 1e30
"""No limit is that wide, and no grid: the sum over a fleet must stay a number."""


@dataclass(frozen=True)
class FixedPoint:
    """The finest grid on which a sum of `summands` values within `bound` cannot overflow."""

    bound: float
    """The largest magnitude of any number of one device."""
    summands: int

    @property
    def step(self) -> float:
        """The distance between two neighbouring numbers of the grid, a power of two."""
        return float(2.0 ** (math.ceil(math.log2(self.bound * self.summands)) - 62))

    def encode(self, values: AnyArray) -> Words:
        """Return the values on the grid; raise where one is not finite or out of bounds."""
        if not np.isfinite(values).all():
            raise RejectedError(
                RejectionReason.VALUE_NOT_FINITE, "it may not be masked: nothing was sent"
            )
        largest = float(np.abs(values).max(initial=0.0))
        if largest > self.bound:
            raise RejectedError(
                RejectionReason.VALUE_OUT_OF_BOUNDS,
                f"{largest:g} exceeds {self.bound:g}: nothing was sent",
            )
        return (
            np.rint(np.asarray(values, dtype=np.float64) / self.step).astype(np.int64).astype(WORD)
        )

    def decode(self, total: Words) -> FloatArray:
        """Return the numbers that integers stand for, taken as the signed ones nearest to 0."""
        return total.astype(WORD).view(np.int64).astype(np.float64) * self.step


class Differences:
    """A device's side of a running sum (Eq. 8): it sends what changed since it last counted."""

    def __init__(self, size: int) -> None:
        self._counted = self._sent = b"", np.zeros(size, WORD)

    def knows(self, counted: bytes) -> bool:
        """Say whether this device remembers what it sent when the sum last counted it."""
        return counted in (b"", self._counted[0], self._sent[0])

    def send(self, words: Words | None, session: bytes, counted: bytes) -> Words:
        """Return what makes this device count with `words` in the running sum, or as before.

        `counted` names the session in which the sum last counted this device; empty: it does not
        count yet.
        """
        if not self.knows(counted):
            raise RejectedError(
                RejectionReason.LOST_ESTIMATOR,
                "what the sum counts of this device is not known here any more",
            )
        if not counted:
            self._counted = b"", np.zeros_like(self._counted[1])
        elif counted == self._sent[0]:
            self._counted = self._sent
        self._sent = session, (self._counted[1] if words is None else words).copy()
        return self._sent[1] - self._counted[1]

    def snapshot(self) -> State:
        """Return what was sent, as plain arrays."""
        pairs = {"counted": self._counted, "sent": self._sent}
        sessions = {
            f"{name}_in": np.frombuffer(session, dtype=np.uint8)
            for name, (session, _) in pairs.items()
        }
        return {name: words.copy() for name, (_, words) in pairs.items()} | sessions

    def restore(self, state: State) -> None:
        """Take over a snapshot; one of another model's estimators is as good as lost."""
        if state["counted"].shape == self._counted[1].shape:
            pairs = [
                (state[f"{name}_in"].tobytes(), state[name].copy()) for name in ("counted", "sent")
            ]
            self._counted, self._sent = pairs
