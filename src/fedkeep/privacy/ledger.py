"""What a device has told about its samples and about itself, added up before anything is sent.

Two accounts are kept side by side. A device's account is plain: everything composes. In a sample's account
model updates and profiles compose, since a stored sample trains many times; but a sample of a real stream
enters one estimator, so estimators count by the worst of them, resends included, and not by their sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedkeep.core.errors import FedkeepError, RefusedError
from fedkeep.core.types import State
from fedkeep.privacy.gaussian import budget_cost, epsilon_spent
from fedkeep.privacy.options import Stream, Unit

_ROUNDING = 1e-9
STREAMS: tuple[Stream, ...] = ("estimator", "model", "profile")
_SHAPES = {"composed": (2,), "estimator": (2,), "releases": (3,), "last_round": (1,)}
_NO_ROUND = -1.0


class BudgetSpentError(FedkeepError):
    """The next release would exceed the device's privacy budget: nothing is sent."""


@dataclass(frozen=True)
class Charge:
    """The costs, (sensitivity / deviation)^2, of one release about one sample and about the whole device."""

    stream: Stream
    sample: float
    device: float
    round: int = 0
    resends: bool = False
    """Whether it may hold samples of an earlier estimator, of whose acceptance the device has not heard."""


class Ledger:
    """The costs charged so far; its snapshot is committed before the release it was charged for is sent."""

    def __init__(self) -> None:
        self._composed = np.zeros(2)
        self._estimator = np.zeros(2)
        self._releases = np.zeros(3)
        self._last_round = np.array([_NO_ROUND])

    def charge(self, *charges: Charge) -> None:
        """Adds the costs of releases that are about to be sent together."""
        for charge in charges:
            self._composed, self._estimator = _after(self._composed, self._estimator, charge)
            self._releases[STREAMS.index(charge.stream)] += 1
            if charge.stream == "estimator":
                self._last_round[:] = charge.round

    def awaits_acceptance(self, accepted_round: int | None) -> bool:
        """Whether the last estimator sent is newer than the last report the server says it accepted."""
        return bool(self._last_round[0] > (_NO_ROUND if accepted_round is None else accepted_round))

    def affords(self, *charges: Charge, unit: Unit, epsilon: float, delta: float) -> bool:
        """Whether these releases together would stay within the budget."""
        composed, estimator = self._composed, self._estimator
        for charge in charges:
            composed, estimator = _after(composed, estimator, charge)
        return _total(unit, composed, estimator) <= budget_cost(epsilon, delta) * (1 + _ROUNDING)

    def epsilon(self, unit: Unit, delta: float) -> float:
        """The epsilon spent about one sample, or about the device."""
        return epsilon_spent(_total(unit, self._composed, self._estimator), delta)

    def releases(self, stream: Stream) -> int:
        """How many releases of this stream were charged."""
        return int(self._releases[STREAMS.index(stream)])

    def snapshot(self) -> State:
        """Plain arrays, to be committed in the same transaction as the rest of the device's state."""
        return {
            "composed": self._composed.copy(),
            "estimator": self._estimator.copy(),
            "releases": self._releases.copy(),
            "last_round": self._last_round.copy(),
        }

    def restore(self, state: State) -> None:
        """Takes up a snapshot; a damaged one is refused, for a ledger that starts anew would under-count."""
        if {name: np.shape(array) for name, array in state.items()} != _SHAPES:
            raise RefusedError("damaged privacy ledger", f"expected arrays {_SHAPES}")
        arrays = {name: np.array(array, dtype=np.float64) for name, array in state.items()}
        if not all((array >= (_NO_ROUND if name == "last_round" else 0)).all() for name, array in arrays.items()):
            raise RefusedError("damaged privacy ledger", "a cost is negative or not a number")
        self._composed, self._estimator = arrays["composed"], arrays["estimator"]
        self._releases, self._last_round = arrays["releases"], arrays["last_round"]


def _after(composed: np.ndarray, estimator: np.ndarray, charge: Charge) -> tuple[np.ndarray, np.ndarray]:
    """Both accounts after a charge; `estimator` is (cost of samples not yet accepted, the worst ever)."""
    if charge.stream != "estimator":
        return composed + np.array([charge.sample, charge.device]), estimator
    pending = charge.sample + (estimator[0] if charge.resends else 0.0)
    return composed + np.array([0.0, charge.device]), np.array([pending, max(estimator[1], pending)])


def _total(unit: Unit, composed: np.ndarray, estimator: np.ndarray) -> float:
    return float(composed[0] + estimator[1]) if unit == "sample" else float(composed[1])
