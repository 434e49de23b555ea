"""What the server knows of all devices at once: the vector B and the matrix V of the paper (step 1)."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedkeep.core.errors import RefusedError
from fedkeep.core.types import DeviceId, FloatArray, IntArray, Profile

Velocities: TypeAlias = NDArray[np.floating[Any]]
"""V: (C, Y), float32 or float64; a million devices and a hundred labels take 0.4 GB as float32."""
FASTEST = 1e30
"""A velocity beyond this is no measurement, and sums of such might overflow."""


@dataclass(frozen=True, eq=False)
class Fleet:
    """The profiles of C devices side by side, in ascending order of their ids."""

    devices: IntArray
    capacities: IntArray
    velocities: Velocities

    def __post_init__(self) -> None:
        _check_shapes(self)
        if len(self.devices) and np.any(np.diff(self.devices) <= 0):
            raise ValueError("devices must be unique and in ascending order")
        _refuse(self.capacities < 0, self.devices, "its capacity must be at least 0")
        slowest = self.velocities.min(axis=1, initial=0.0)
        fastest = self.velocities.max(axis=1, initial=0.0)
        usable = (slowest >= 0) & (fastest <= FASTEST)
        _refuse(~usable, self.devices, "its velocities must be finite numbers of at least 0")

    @staticmethod
    def of(profiles: Mapping[DeviceId, Profile]) -> "Fleet":
        """The fleet of these profiles, in the order of the devices' ids whatever the order they came in."""
        devices = sorted(profiles)
        return Fleet(
            np.array(devices, dtype=np.int64),
            np.array([profiles[device].capacity for device in devices], dtype=np.int64),
            np.array([profiles[device].velocity for device in devices]) if devices else np.zeros((0, 0)),
        )

    @staticmethod
    def numbered(capacities: ArrayLike, velocities: ArrayLike) -> "Fleet":
        """A fleet whose devices are called 0, 1, 2 and so on.

        >>> fleet = Fleet.numbered(capacities=[4, 2], velocities=[[1, 0, 2], [0, 0, 5]])
        >>> len(fleet), fleet.labels, fleet.owners.tolist(), fleet.label_mass.tolist()
        (2, 3, [1, 0, 2], [1.0, 0.0, 7.0])
        """
        capacity = np.asarray(capacities, dtype=np.int64)
        velocity = np.asarray(velocities)
        if velocity.dtype != np.float32:
            velocity = velocity.astype(np.float64)
        return Fleet(np.arange(len(capacity)), capacity, velocity)

    def __len__(self) -> int:
        return len(self.devices)

    @property
    def labels(self) -> int:
        """Y, the number of regions."""
        return int(self.velocities.shape[1])

    @cached_property
    def owners(self) -> IntArray:
        """How many devices see each label, (Y,)."""
        return _positive(self.velocities, axis=0)

    @cached_property
    def seen(self) -> IntArray:
        """How many labels each device sees, (C,)."""
        return _positive(self.velocities, axis=1)

    @cached_property
    def label_mass(self) -> FloatArray:
        """||V_y||_1 per label: the arrivals of each label over the whole fleet."""
        mass: FloatArray = self.velocities.sum(axis=0, dtype=np.float64)
        return mass


def _check_shapes(fleet: Fleet) -> None:
    count = len(fleet.devices)
    if fleet.capacities.shape != (count,) or fleet.velocities.ndim != 2 or len(fleet.velocities) != count:
        raise ValueError(
            f"a fleet of {count} devices needs capacities of shape ({count},) and velocities of shape "
            f"({count}, labels), got {fleet.capacities.shape} and {fleet.velocities.shape}"
        )


def _positive(velocities: Velocities, axis: int) -> IntArray:
    return np.asarray((velocities > 0).sum(axis=axis, dtype=np.int32), dtype=np.int64)


def _refuse(bad: NDArray[np.bool_], devices: IntArray, rule: str) -> None:
    if bad.any():
        raise RefusedError("profile", f"device {devices[int(bad.argmax())]}: {rule}")
