"""Gradient estimators: what each device tells of its stream (Eq. 7), and what the server makes of it (Eq. 8)."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from fedkeep.core.bounds import within
from fedkeep.core.ports import Measurements
from fedkeep.core.types import DeviceId, FloatArray, IntArray, Scores, State, Vector


def clip_weights(norms: Scores, clip: float) -> Scores:
    """min(1, clip / norm) per sample: multiplied by it, no gradient is longer than `clip`.

    >>> clip_weights(np.array([0.5, 2.0]), clip=1.0).tolist()
    [1.0, 0.5]
    """
    return clip / np.maximum(norms, clip)


def mean_gradient(measurements: Measurements, clip: float | None) -> Vector:
    """The mean of the samples' gradients, each first shortened to `clip`, so that their mean is never longer."""
    if clip is None:
        return measurements.mean_gradient()
    return measurements.weighted_gradient(clip_weights(measurements.norms(), clip))


class Window:
    """The gradients of all arrivals since the model last changed, summed in float64, and their counts by region.

    With `clip` each sample's gradient is first shortened to that length: the bound that privacy's noise is made for.
    """

    def __init__(self, size: int, regions: int, clip: float | None = None) -> None:
        self._sum = np.zeros(size, dtype=np.float64)
        self._clip = clip
        self.counts = np.zeros(regions)

    @property
    def size(self) -> int:
        return len(self._sum)

    @property
    def count(self) -> int:
        """N, the arrivals counted."""
        return int(self.counts.sum())

    @property
    def nbytes(self) -> int:
        return self._sum.nbytes + self.counts.nbytes

    def add(self, measurements: Measurements, regions: IntArray) -> None:
        """Counts arrivals, measured under the present model."""
        if len(regions):
            self._sum += mean_gradient(measurements, self._clip).astype(np.float64) * len(regions)
            self.counts += np.bincount(regions, minlength=len(self.counts))

    def mean(self, share: float = 1.0) -> Vector:
        """The mean gradient over all arrivals (Eq. 7), or a share of it."""
        mean = np.empty(self.size, dtype=np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            return np.multiply(self._sum, share / max(1, self.count), out=mean, casting="same_kind")

    def clear(self) -> None:
        self._sum[:] = 0.0
        self.counts[:] = 0.0

    def snapshot(self) -> State:
        return {"sum": self._sum.copy(), "counts": self.counts.copy()}

    def restore(self, state: State) -> None:
        self._sum, self.counts = (np.array(state[name], dtype=np.float64) for name in ("sum", "counts"))


class LocalGradientEstimator:
    """g_hat_c: the mean gradient over all arrivals since the model last changed (Eq. 7, step 4).

    When a new model arrives the estimate is frozen as pending and a fresh one begins, so that gradients of two
    models never mix. A pending estimate is sent with every report until an order names its round as accepted: a
    lost reply loses no statistics. Where a newer estimate exists beside an unaccepted one, the one over more
    arrivals is sent. An estimate that a huge sample made infinite or NaN is dropped: no server would accept it, and
    with it every later report of this device would be refused.
    """

    def __init__(self) -> None:
        self._pending: Vector | None = None
        self._pending_count = 0
        self._pending_round = -1

    def settle(self, accepted_round: int | None) -> None:
        """Forgets a pending estimate that the server has accepted."""
        if accepted_round is not None and accepted_round >= self._pending_round:
            self.drop()

    def drop(self) -> None:
        """Forgets a pending estimate, whatever the server has of it."""
        self._pending, self._pending_count = None, 0

    def freeze(self, window: Window, round_: int) -> tuple[Vector | None, int]:
        """The estimate to send in `round_` and the arrivals behind it: the window's, or one not yet accepted."""
        if window.count and window.count >= self._pending_count:
            estimate = window.mean()
            if np.isfinite(estimate).all():
                self._pending, self._pending_count = estimate, window.count
        self._pending_round = round_
        return self._pending, self._pending_count

    def snapshot(self) -> State:
        pending = np.empty(0, dtype=np.float32) if self._pending is None else self._pending
        return {"pending": pending.copy(), "counts": np.array([self._pending_count, self._pending_round])}

    def restore(self, state: State) -> None:
        self._pending = np.array(state["pending"], dtype=np.float32) if len(state["pending"]) else None
        self._pending_count, self._pending_round = state["counts"].tolist()


@dataclass(frozen=True, eq=False)
class Estimate:
    """A device's g_hat_c as the server keeps it: with the weight and the round it counts for."""

    gradient: Vector
    weight: float
    round: int


class GlobalEstimator(ABC):
    """g_hat, from the estimates of those that took part (Eq. 8, step 8)."""

    @abstractmethod
    def update(self, estimates: Mapping[DeviceId, Estimate]) -> None:
        """Takes in one round's accepted estimates."""

    @abstractmethod
    def direction(self) -> Vector | None:
        """The present g_hat; None until there is one."""

    def staleness(self, round_: int) -> float | None:  # noqa: ARG002 - most estimators keep no rounds
        """The mean age, in rounds, of the estimates that g_hat is made of; None where that has no meaning."""
        return None

    def forget(self, device: DeviceId) -> None:  # noqa: B027 - most estimators keep nothing of a device
        """A device has left the fleet: nothing of it may count any more."""

    @abstractmethod
    def snapshot(self) -> State: ...

    @abstractmethod
    def restore(self, state: State) -> None: ...


class GivenEstimator(GlobalEstimator):
    """A direction that comes from elsewhere: an oracle's exact gradient, or none at all."""

    def __init__(self, direction: Vector | None = None) -> None:
        self._direction = direction

    def give(self, direction: Vector) -> None:
        self._direction = direction

    def update(self, estimates: Mapping[DeviceId, Estimate]) -> None:
        """What devices say makes no difference."""

    def direction(self) -> Vector | None:
        return self._direction

    def snapshot(self) -> State:
        return {} if self._direction is None else {"direction": self._direction}

    def restore(self, state: State) -> None:
        self._direction = np.array(state["direction"], dtype=np.float32) if "direction" in state else None


class ParticipantsEstimator(GivenEstimator):
    """The weighted mean of this round's estimates only; rounds that bring none leave it as it was.

    >>> estimator = ParticipantsEstimator()
    >>> estimator.update({1: Estimate(np.array([4.0], dtype=np.float32), weight=1.0, round=0)})
    >>> estimator.update({2: Estimate(np.array([1.0], dtype=np.float32), weight=3.0, round=1)})
    >>> estimator.direction().tolist()
    [1.0]
    """

    def update(self, estimates: Mapping[DeviceId, Estimate]) -> None:
        total = sum(e.weight for e in estimates.values())
        if total > 0:
            weighted = [e.gradient.astype(np.float64) * e.weight for _, e in sorted(estimates.items())]
            self.give((sum(weighted[1:], weighted[0]) / total).astype(np.float32))


class IncrementalEstimator(GlobalEstimator):
    """The latest g_hat_c of every device that ever took part, weighted and summed (Eq. 8).

    Equal to the paper's running sum, but no running sum: each g_hat_c is kept, the devices stand in blocks, blocks
    in larger blocks, and only those that changed are summed again, in float64. So nothing stays behind for ever,
    neither rounding nor a value that should not have counted. The sum is divided by the weight it covers, which
    makes it a mean from the first round on; once every device has reported, that is the paper's estimate.

    >>> estimator = IncrementalEstimator()
    >>> estimator.update({1: Estimate(np.array([4.0], dtype=np.float32), weight=1.0, round=0)})
    >>> estimator.update({2: Estimate(np.array([0.0], dtype=np.float32), weight=3.0, round=1)})
    >>> estimator.direction().tolist()  # (1 * 4 + 3 * 0) / 4
    [1.0]
    >>> estimator.update({1: Estimate(np.array([8.0], dtype=np.float32), weight=1.0, round=2)})  # the newest counts
    >>> estimator.direction().tolist(), estimator.staleness(2)
    ([2.0], 0.5)
    """

    def __init__(self, max_age: int | None = None) -> None:
        self.max_age = max_age
        within(self, "max_age", least=1)
        self._kept: dict[DeviceId, Estimate] = {}
        self._slots: dict[DeviceId, int] = {}
        self._free: list[int] = []
        self._sums = _BlockSums()
        self._round = -1

    def update(self, estimates: Mapping[DeviceId, Estimate]) -> None:
        for device, estimate in sorted(estimates.items()):
            if device not in self._slots:
                self._slots[device] = self._free.pop() if self._free else len(self._slots)
            self._put(device, estimate)
            self._round = max(self._round, estimate.round)
        if self.max_age is not None:
            for device in [d for d, e in self._kept.items() if e.round < self._round - self.max_age]:
                self.forget(device)

    def forget(self, device: DeviceId) -> None:
        if self._kept.pop(device, None) is not None:
            slot = self._slots.pop(device)
            self._free.append(slot)
            self._sums.clear(slot)

    def direction(self) -> Vector | None:
        return self._sums.mean()

    def staleness(self, round_: int) -> float | None:
        if not self._kept:
            return None
        return round_ - sum(e.round for e in self._kept.values()) / len(self._kept)

    def snapshot(self) -> State:
        devices = sorted(self._kept)
        kept = [self._kept[d] for d in devices]
        return {
            "devices": np.array(devices, dtype=np.int64),
            "slots": np.array([self._slots[d] for d in devices], dtype=np.int64),
            "free": np.array(self._free, dtype=np.int64),
            "gradients": np.stack([e.gradient for e in kept]) if kept else np.empty((0, 0), dtype=np.float32),
            "weights": np.array([e.weight for e in kept], dtype=np.float64),
            "rounds": np.array([e.round for e in kept], dtype=np.int64),
        }

    def restore(self, state: State) -> None:
        devices = state["devices"].tolist()
        self._kept, self._sums = {}, _BlockSums()
        self._slots = dict(zip(devices, state["slots"].tolist(), strict=True))
        self._free = state["free"].tolist()
        self._round = int(state["rounds"].max(initial=-1))
        for i, device in enumerate(devices):
            gradient = np.array(state["gradients"][i], dtype=np.float32)
            self._put(device, Estimate(gradient, float(state["weights"][i]), int(state["rounds"][i])))

    def _put(self, device: DeviceId, estimate: Estimate) -> None:
        self._kept[device] = estimate
        self._sums.put(self._slots[device], estimate)


class _BlockSums:
    """Weighted vectors in numbered slots and their sum, kept as a tree of partial sums; a change costs one path."""

    _FAN = 8

    def __init__(self) -> None:
        self._leaves: dict[int, Estimate] = {}
        self._levels: list[dict[int, tuple[FloatArray, float]]] = []
        self._changed: set[int] = set()
        self._mean: Vector | None = None

    def put(self, slot: int, estimate: Estimate) -> None:
        self._leaves[slot] = estimate
        self._changed.add(slot)

    def clear(self, slot: int) -> None:
        del self._leaves[slot]
        self._changed.add(slot)

    def mean(self) -> Vector | None:
        """The weighted mean over all slots; None without weight."""
        if self._changed:
            self._sum_again()
            total, weight = self._levels[-1].get(0, (np.zeros(0), 0.0))
            self._mean = (total / weight).astype(np.float32) if weight > 0 else None
        return self._mean

    def _sum_again(self) -> None:
        changed, height, width = self._changed, 0, max(self._leaves, default=0) + 1
        while width > 1 or height == 0:
            if height == len(self._levels):
                self._levels.append({})
                changed = set(self._leaves if height == 0 else self._levels[height - 1])
            changed = {child // self._FAN for child in changed}
            for block in changed:
                self._sum_block(height, block)
            height, width = height + 1, -(-width // self._FAN)
        del self._levels[height:]
        self._changed = set()

    def _sum_block(self, height: int, block: int) -> None:
        children = range(block * self._FAN, (block + 1) * self._FAN)
        below = self._levels[height - 1] if height else {}
        parts = [below[c] for c in children if c in below]
        leaves = [] if height else [self._leaves[c] for c in children if c in self._leaves]
        weight = sum(weight for _, weight in parts) + sum(leaf.weight for leaf in leaves)
        if leaves:
            self._levels[height][block] = (_weighted_sum(leaves), weight)
        elif parts:
            self._levels[height][block] = (reduce(np.add, (vector for vector, _ in parts)), weight)
        else:
            self._levels[height].pop(block, None)


def _weighted_sum(estimates: Sequence[Estimate]) -> FloatArray:
    """In float64, to which each is brought before it is multiplied: numpy is slow at both in one."""
    total = np.zeros(len(estimates[0].gradient))
    term = np.empty_like(total)
    for estimate in estimates:
        term[:] = estimate.gradient
        term *= estimate.weight
        total += term
    return total


def global_estimator(name: str, max_age: int | None = None) -> GlobalEstimator:
    """The server's estimator of that name: Eq. 8 if it is `incremental`, else the mean over the participants."""
    return IncrementalEstimator(max_age) if name == "incremental" else ParticipantsEstimator()
