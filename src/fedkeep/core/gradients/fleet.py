"""g_hat, the global gradient that the server makes of the devices' estimates (Eq. 8, step 8)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from fedkeep.core.types import DeviceId, FloatArray, State, Vector

_FAN, _TALLEST = 8, 12
"""How many estimates or blocks make a block, and the greatest height of blocks of blocks."""


@dataclass(frozen=True, eq=False)
class Estimate:
    """A device's g_hat_c as the server keeps it: with the weight and the round it counts for."""

    gradient: Vector
    weight: float
    round: int


@dataclass(eq=False)
class GivenEstimator:
    """A global gradient that comes from elsewhere: an oracle's exact gradient, or none at all."""

    given: Vector | None = None
    fleet_weight: float = 0.0
    """Not used: nothing is summed over the fleet."""

    def update(self, estimates: Mapping[DeviceId, Estimate]) -> None:
        """Ignore what devices send."""

    def global_gradient(self) -> Vector | None:
        """Give the present g_hat; None until there is one."""
        return self.given

    def staleness(self, round_: int) -> float | None:  # noqa: ARG002 - it keeps no rounds
        """Average the age of the estimates behind g_hat, in rounds."""
        return None

    def forget(self, device: DeviceId) -> None:
        """Forget nothing, as nothing is kept of a device."""

    def snapshot(self) -> State:
        """Take the state as plain arrays."""
        return {} if self.given is None else {"direction": self.given}

    def restore(self, state: State) -> None:
        """Become what `snapshot` described."""
        self.given = (
            np.array(state["direction"], dtype=np.float32) if "direction" in state else None
        )


class RoundMeanEstimator(GivenEstimator):
    """The weighted mean of this round's estimates only; rounds that bring none leave it as it was.

    >>> estimator = RoundMeanEstimator()
    >>> estimator.update({1: Estimate(np.array([4.0], dtype=np.float32), weight=1.0, round=0)})
    >>> estimator.update({2: Estimate(np.array([1.0], dtype=np.float32), weight=3.0, round=1)})
    >>> estimator.global_gradient().tolist()
    [1.0]
    """

    def update(self, estimates: Mapping[DeviceId, Estimate]) -> None:
        """Take in one round's accepted estimates."""
        weight = sum(e.weight for e in estimates.values())
        if weight > 0:
            first, *others = (estimate for _, estimate in sorted(estimates.items()))
            total = first.gradient.astype(np.float64) * first.weight
            for estimate in others:
                total += estimate.gradient.astype(np.float64) * estimate.weight
            self.given = (total / weight).astype(np.float32)


class IncrementalEstimator:
    """The latest g_hat_c of every device that ever took part, weighted and summed (Eq. 8).

    Equal to the paper's running sum, but no running sum: each g_hat_c is kept, the devices stand in
    blocks, blocks in larger blocks, and only those that changed are summed again, in float64. So
    nothing stays behind for ever, neither rounding nor a value that should not have counted. With
    `normalise` the sum is divided by the weight it covers, which makes it a mean from the first
    round on; without it, as Eq. 8 is printed, by the weight of the whole fleet: devices that have
    not reported count as zeros. Once every device has reported, both are the same.

    >>> estimator = IncrementalEstimator()
    >>> estimator.update({1: Estimate(np.array([4.0], dtype=np.float32), weight=1.0, round=0)})
    >>> estimator.update({2: Estimate(np.array([0.0], dtype=np.float32), weight=3.0, round=1)})
    >>> estimator.global_gradient().tolist()  # (1 * 4 + 3 * 0) / 4
    [1.0]
    >>> estimator.update({1: Estimate(np.array([8.0], dtype=np.float32), weight=1.0, round=2)})
    >>> estimator.global_gradient().tolist(), estimator.staleness(2)
    ([2.0], 0.5)
    >>> printed = IncrementalEstimator(normalise=False)
    >>> printed.fleet_weight = 4.0
    >>> printed.update({1: Estimate(np.array([4.0], dtype=np.float32), weight=1.0, round=0)})
    >>> printed.global_gradient().tolist()  # 1 / 4 of 4: three quarters have not reported
    [1.0]
    """

    def __init__(self, max_age: int | None = None, *, normalise: bool = True) -> None:
        self.max_age, self.normalise = max_age, normalise
        self.fleet_weight = 0.0
        """What all devices of the plan weigh together, whether they have reported or not."""
        self._slots: dict[DeviceId, int] = {}
        self._free: list[int] = []
        self._kept: dict[int, Estimate] = {}
        """By slot."""
        self._sums: dict[tuple[int, int], tuple[FloatArray, float] | None] = {}
        """Of each block of slots, by its height and number, until one of them changes."""
        self._global_gradient: Vector | None = None
        self._round = -1

    def update(self, estimates: Mapping[DeviceId, Estimate]) -> None:
        """Take in one round's accepted estimates."""
        for device, estimate in sorted(estimates.items()):
            if device not in self._slots:
                self._slots[device] = self._free.pop() if self._free else len(self._slots)
            self._kept[self._slots[device]] = estimate
            self._changed(self._slots[device])
            self._round = max(self._round, estimate.round)
        if self.max_age is not None:
            oldest = self._round - self.max_age
            for device in [d for d, slot in self._slots.items() if self._kept[slot].round < oldest]:
                self.forget(device)

    def forget(self, device: DeviceId) -> None:
        """Drop what a device that has left the fleet sent."""
        if (slot := self._slots.pop(device, None)) is not None:
            del self._kept[slot]
            self._free.append(slot)
            self._changed(slot)

    def global_gradient(self) -> Vector | None:
        """Give the present g_hat; None until there is one."""
        if self._global_gradient is None and self._kept:
            slots = len(self._kept) + len(self._free)
            height = next(h for h in range(_TALLEST) if _FAN ** (h + 1) >= slots)
            total, weight = self._sum(height, 0) or (np.zeros(0), 0.0)
            if weight > 0 and not self.normalise:
                weight = max(weight, self.fleet_weight)
            self._global_gradient = (total / weight).astype(np.float32) if weight > 0 else None
        return self._global_gradient

    def staleness(self, round_: int) -> float | None:
        """Average the age of the estimates behind g_hat, in rounds; None where there are none."""
        if not self._kept:
            return None
        return round_ - sum(e.round for e in self._kept.values()) / len(self._kept)

    def snapshot(self) -> State:
        """Take the state as plain arrays."""
        devices = sorted(self._slots)
        kept = [self._kept[self._slots[d]] for d in devices]
        return {
            "devices": np.array(devices, dtype=np.int64),
            "slots": np.array([self._slots[d] for d in devices], dtype=np.int64),
            "free": np.array(self._free, dtype=np.int64),
            "gradients": np.stack([e.gradient for e in kept])
            if kept
            else np.empty((0, 0), dtype=np.float32),
            "weights": np.array([e.weight for e in kept], dtype=np.float64),
            "rounds": np.array([e.round for e in kept], dtype=np.int64),
        }

    def restore(self, state: State) -> None:
        """Become what `snapshot` described; of another estimator's state nothing is taken."""
        if "devices" not in state:
            self._slots, self._kept, self._free = {}, {}, []
            self._sums, self._direction, self._round = {}, None, -1
            return
        devices, slots, weights, rounds = (
            state[name].tolist() for name in ("devices", "slots", "weights", "rounds")
        )
        gradients = [np.array(row, dtype=np.float32) for row in state["gradients"]]
        self._slots = dict(zip(devices, slots, strict=True))
        self._kept = dict(zip(slots, map(Estimate, gradients, weights, rounds), strict=True))
        self._free = state["free"].tolist()
        self._sums, self._global_gradient = {}, None
        self._round = int(state["rounds"].max(initial=-1))

    def _changed(self, slot: int) -> None:
        """Forgets the sums that this slot is in."""
        self._global_gradient = None
        for height in range(_TALLEST):
            self._sums.pop((height, slot // _FAN ** (height + 1)), None)

    def _sum(self, height: int, block: int) -> tuple[FloatArray, float] | None:
        """Add up a block's estimates or smaller blocks, and their weights; None if it is empty."""
        if (height, block) in self._sums:
            return self._sums[height, block]
        found = None
        slots = len(self._kept) + len(self._free)
        for child in range(block * _FAN, (block + 1) * _FAN):
            part = self._sum(height - 1, child) if height and child * _FAN**height < slots else None
            if not height and (leaf := self._kept.get(child)) is not None:
                # Brought to float64 before it is multiplied: numpy is slow at both in one.
                part = (leaf.gradient.astype(np.float64) * leaf.weight, leaf.weight)
            if part is not None:
                total, weight = found or (0.0, 0.0)
                found = (total + part[0], weight + part[1])
        self._sums[height, block] = found
        return found


GlobalEstimator: TypeAlias = GivenEstimator | IncrementalEstimator
"""g_hat, from the estimates of those that took part (Eq. 8, step 8)."""


def global_estimator(
    name: str, max_age: int | None = None, *, normalise: bool = True
) -> GlobalEstimator:
    """Make the estimator of that name: Eq. 8 if `incremental`, else the mean of the round."""
    if name == "incremental":
        return IncrementalEstimator(max_age, normalise=normalise)
    return RoundMeanEstimator()
