"""g_hat_c, the mean gradient that a device reports of its stream (Eq. 7, step 4)."""

import numpy as np

from fedkeep.core.gradients.accumulator import GradientAccumulator
from fedkeep.core.types import ArraySpec, State, StateSpec, Vector


class LocalGradientEstimator:
    """Mean gradient over all arrivals since the model last changed, sent until it is accepted.

    When a new model arrives, the estimate is frozen as pending and a fresh one begins, so that
    gradients of two models never mix. A pending estimate is sent with every report until an order
    names its round as accepted: a lost reply loses no statistics. Where a newer estimate exists
    beside a pending one, the one over more arrivals is sent. An estimate that a huge sample made
    infinite or NaN is dropped: no server would accept it.

    Parameters
    ----------
    size : int
        The length of an estimate, at most.

    References
    ----------
    Gong et al., ODE, WWW 2023, Eq. 7.
    """

    def __init__(self, size: int = 0) -> None:
        self._size = size
        self._pending: Vector | None = None
        self._pending_count = 0
        self._pending_round = -1

    @property
    def pending(self) -> tuple[Vector | None, int]:
        """The estimate that no order has named as accepted, and the arrivals behind it."""
        return self._pending, self._pending_count

    def settle(self, accepted_round: int | None) -> None:
        """Drop the pending estimate if the server has accepted it."""
        if accepted_round is not None and accepted_round >= self._pending_round:
            self.drop()

    def drop(self) -> None:
        """Drop the pending estimate, whatever the server has of it."""
        self._pending, self._pending_count = None, 0

    def freeze(self, arrivals: GradientAccumulator, round_: int) -> tuple[Vector | None, int]:
        """Make the estimate to send in `round_` from the arrivals, or keep the pending one.

        Returns
        -------
        tuple of Vector or None and int
            The estimate and the number of arrivals behind it.
        """
        if arrivals.count and arrivals.count >= self._pending_count:
            estimate = arrivals.mean()
            if np.isfinite(estimate).all():
                self._pending, self._pending_count = estimate, arrivals.count
        self._pending_round = round_
        return self.pending

    def state_spec(self) -> StateSpec:
        """Describe the arrays of `snapshot`."""
        return {
            "pending": ArraySpec((self._size,), np.float32, bounded=True, learned=True),
            "counts": ArraySpec((2,), np.int64, learned=True, initial=(0, -1)),
        }

    def snapshot(self) -> State:
        """Take the pending estimate and what is known of it."""
        pending = np.empty(0, dtype=np.float32) if self._pending is None else self._pending
        return {
            "pending": pending.copy(),
            "counts": np.array([self._pending_count, self._pending_round]),
        }

    def restore(self, state: State) -> None:
        """Become the estimator that `snapshot` described."""
        self._pending = (
            np.array(state["pending"], dtype=np.float32) if len(state["pending"]) else None
        )
        self._pending_count, self._pending_round = state["counts"].tolist()
