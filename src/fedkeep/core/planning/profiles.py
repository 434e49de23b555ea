"""What the server knows of all devices at once.

The vector B and the matrix V of the paper (step 1).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from fedkeep.core.errors import RejectedError
from fedkeep.core.types import AnyArray, BoolArray, DeviceId, FloatArray, IntArray, Profile

FASTEST = 1e30
"""A velocity beyond this is no measurement, and sums of such might overflow."""
_ROWS = 1 << 12
"""Devices handled at once: what stays in a processor's cache, and fits 16 bits."""


@dataclass(frozen=True, eq=False)
class FleetProfiles:
    """The profiles of C devices side by side, in ascending order of their ids."""

    devices: IntArray
    capacities: IntArray
    velocities: AnyArray
    """V: (C, Y); as float32 a million devices and a hundred labels take 0.4 GB."""

    def __post_init__(self) -> None:
        count = len(self.devices)
        if (
            self.capacities.shape != (count,)
            or self.velocities.ndim != 2
            or len(self.velocities) != count
        ):
            raise ValueError(
                f"a fleet of {count} devices needs capacities of shape ({count},) and velocities "
                f"of shape ({count}, labels), got {self.capacities.shape} and "
                f"{self.velocities.shape}"
            )
        if np.any(np.diff(self.devices) <= 0):
            raise ValueError("devices must be unique and in ascending order")
        _require_each(self.devices, self.capacities >= 0, "its capacity must be at least 0")
        rule = "its velocities must be finite numbers of at least 0"
        table = self.velocities
        # All at once is much faster than by rows, which tell whose they are.
        if not (table.min(initial=0.0) >= 0 and table.max(initial=0.0) <= FASTEST):
            slowest, fastest = table.min(axis=1, initial=0.0), table.max(axis=1, initial=0.0)
            _require_each(self.devices, (slowest >= 0) & (fastest <= FASTEST), rule)

    @staticmethod
    def of(profiles: Mapping[DeviceId, Profile]) -> "FleetProfiles":
        """Put profiles side by side.

        They stand in the order of the devices' ids whatever the order they came in.
        """
        devices = sorted(profiles)
        return FleetProfiles(
            np.array(devices, dtype=np.int64),
            np.array([profiles[device].capacity for device in devices], dtype=np.int64),
            np.array([profiles[device].velocity for device in devices])
            if devices
            else np.zeros((0, 0)),
        )

    @staticmethod
    def numbered(capacities: ArrayLike, velocities: ArrayLike) -> "FleetProfiles":
        """Make a fleet whose devices are called 0, 1, 2 and so on.

        >>> fleet = FleetProfiles.numbered(capacities=[4, 2], velocities=[[1, 0, 2], [0, 0, 5]])
        >>> len(fleet), fleet.labels, fleet.owners.tolist(), fleet.label_mass.tolist()
        (2, 3, [1, 0, 2], [1.0, 0.0, 7.0])
        """
        capacity, velocity = np.asarray(capacities, dtype=np.int64), np.asarray(velocities)
        if velocity.dtype != np.float32:
            velocity = velocity.astype(np.float64)
        return FleetProfiles(np.arange(len(capacity)), capacity, velocity)

    def __len__(self) -> int:
        return len(self.devices)

    @property
    def labels(self) -> int:
        """Y, the number of regions."""
        return int(self.velocities.shape[1])

    @cached_property
    def owners(self) -> IntArray:
        """How many devices see each label, (Y,)."""
        counts = np.zeros(self.labels, dtype=np.int64)
        for start in range(0, len(self), _ROWS):
            counts += count_columns(self.velocities[start : start + _ROWS] > 0)
        return counts

    @cached_property
    def seen(self) -> IntArray:
        """How many labels each device sees, (C,)."""
        counts = np.empty(len(self), dtype=np.int64)
        for start in range(0, len(self), _ROWS):
            rows = slice(start, start + _ROWS)
            np.sum(self.velocities[rows] > 0, axis=1, dtype=np.int32, out=counts[rows])
        return counts

    @cached_property
    def label_mass(self) -> FloatArray:
        """||V_y||_1 per label: the arrivals of each label over the whole fleet."""
        return np.asarray(self.velocities.sum(axis=0, dtype=np.float64))


def count_columns(marked: BoolArray) -> IntArray:
    """Count the marks of each column of a few rows, (Y,).

    >>> count_columns(np.array([[True, False], [True, True]])).tolist()
    [2, 1]
    """
    counts = marked.view(np.uint8).sum(axis=0, dtype=np.uint16)
    return np.asarray(counts, dtype=np.int64)


def _require_each(devices: IntArray, valid: BoolArray, rule: str) -> None:
    """Reject the first device's profile that breaks a rule.

    Raises
    ------
    RejectedError
        If there is one.
    """
    if not valid.all():
        raise RejectedError("profile", f"device {devices[int(valid.argmin())]}: {rule}")
