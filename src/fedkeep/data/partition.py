"""Ways to divide samples among devices.

Every sample goes to one device at most, and no device stays empty.

In an experiment's TOML it is a table of its name and options: `partition = { name = "dirichlet",
alpha = 0.3 }`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, dataclass_transform

import numpy as np

from fedkeep.core.bounds import check_range
from fedkeep.core.errors import DataError
from fedkeep.core.planning.assignment import apportion
from fedkeep.core.registry import Registry
from fedkeep.core.seeds import generator
from fedkeep.core.types import IntArray
from fedkeep.data.federation import Ownership
from fedkeep.loading import find_component
from fedkeep.tables import build


class Partition(ABC):
    """Dataclass fields are keys of the `partition` table."""

    @abstractmethod
    def divide(self, y: IntArray, natural: IntArray | None, seed: int) -> Ownership:
        """Which samples each device owns, from their labels and, where known.

        Their true devices.
        """


Kind = TypeVar("Kind", bound=type[Partition])

PARTITIONS: Registry[type[Partition]] = Registry("partition", base=Partition)


@dataclass_transform(frozen_default=True)
def partition(name: str) -> Callable[[Kind], Kind]:
    """Register a partition under its name in TOML files and make it a frozen dataclass.

    >>> @partition("halves")
    ... class Halves(Partition):
    ...     def divide(self, y, natural, seed):
    ...         return Ownership.from_assignment(np.arange(len(y)) * 2 // len(y), devices=2)
    >>> partition_from({"name": "halves"}).divide(np.zeros(6, dtype=int), None, seed=0).sizes
    array([3, 3])
    >>> del PARTITIONS["halves"]
    """
    return PARTITIONS.register(name)


def partition_from(table: Mapping[str, Any]) -> Partition:
    """Build the partition that a TOML table names, with its options.

    >>> y = np.array([0, 0, 0, 0, 1, 1, 1, 1])
    >>> partition_from({"name": "shards", "devices": 2, "shards": 1}).divide(y, None, seed=0).sizes
    array([4, 4])
    """
    options = dict(table)
    return build(find_component(PARTITIONS, str(options.pop("name", ""))), options, "partition")


@dataclass(frozen=True)
class _MadeUp(Partition):
    """Into devices that the data knows nothing of."""

    devices: int = 50
    """How many devices to make."""

    def __post_init__(self) -> None:
        check_range(self, "devices", least=1)


def _by_label(y: IntArray, rng: np.random.Generator) -> list[IntArray]:
    return [rng.permutation(np.flatnonzero(y == label)) for label in range(int(y.max()) + 1)]


@partition("labels")
class LabelsPerDevice(_MadeUp):
    """A few labels a device and long-tailed sizes.

    Device u owns labels u, u+1, ...; sizes are log-normal.
    """

    labels: int = 5
    """How many labels a device has."""
    tail: float = 1.0
    """Standard deviation of the logarithm of a device's size. 0: all alike; 1: four of five devices
    hold at most about a quarter of what the largest holds, as in the journal version of the paper.
    """
    minimum: int = 10
    """Samples that a device has of each of its labels at least."""

    def __post_init__(self) -> None:
        check_range(self, "devices", "labels", "minimum", least=1)
        check_range(self, "tail", least=0)

    def divide(self, y: IntArray, natural: IntArray | None, seed: int) -> Ownership:  # noqa: ARG002
        """Give every device its number of labels and a size."""
        rng = generator(seed, "partition")
        groups = _by_label(y, rng)
        owned = min(self.labels, len(groups))
        owners = (np.arange(self.devices)[:, None] + np.arange(owned)) % len(groups)
        weights = np.exp(self.tail * rng.normal(size=self.devices))
        assignment = np.full(len(y), -1, dtype=np.int64)
        for label, group in enumerate(groups):
            holders = np.flatnonzero((owners == label).any(axis=1))
            if len(group) < self.minimum * len(holders):
                raise DataError(
                    f"label {label} has {len(group)} samples for {len(holders)} devices, "
                    f"{self.minimum} each; "
                    "lower partition.minimum or partition.devices"
                )
            if len(holders):
                assignment[group] = np.repeat(
                    holders, apportion(len(group), weights[holders], self.minimum)
                )
        return Ownership.from_assignment(assignment, self.devices)


@partition("shards")
class Shards(_MadeUp):
    """Samples sorted by label and cut into equal shards.

    `shards` of them a device (McMahan et al. 2017).
    """

    shards: int = 2

    def __post_init__(self) -> None:
        check_range(self, "devices", "shards", least=1)

    def divide(self, y: IntArray, natural: IntArray | None, seed: int) -> Ownership:  # noqa: ARG002
        """Deal equal shards of the sorted samples to the devices."""
        pieces = self.devices * self.shards
        if len(y) < pieces:
            why = f"{len(y)} samples cannot make {pieces} shards"
            raise DataError(f"{why}; lower partition.devices or partition.shards")
        rng = generator(seed, "partition")
        shuffled = rng.permutation(len(y))
        sorted_ = shuffled[np.argsort(y[shuffled], kind="stable")]
        owner = rng.permutation(np.repeat(np.arange(self.devices), self.shards))
        assignment = np.empty(len(y), dtype=np.int64)
        assignment[sorted_] = owner[np.arange(len(y)) * pieces // len(y)]
        return Ownership.from_assignment(assignment, self.devices)


@partition("dirichlet")
class Dirichlet(_MadeUp):
    """Each label divided among the devices by a draw from Dirichlet(alpha).

    A small alpha is very uneven.
    """

    alpha: float = 0.3
    """How even the shares are; a small one is very uneven."""
    minimum: int = 2
    """Samples that a device has at least; a device short of them takes some from the largest."""

    def __post_init__(self) -> None:
        check_range(self, "devices", "minimum", least=1)
        check_range(self, "alpha", above=0)

    def divide(self, y: IntArray, natural: IntArray | None, seed: int) -> Ownership:  # noqa: ARG002
        """Draw every label's shares of the devices."""
        if len(y) < self.devices * self.minimum:
            raise DataError(
                f"{len(y)} samples cannot give {self.devices} devices {self.minimum} each; "
                "lower devices"
            )
        rng = generator(seed, "partition")
        assignment = np.full(len(y), -1, dtype=np.int64)
        for group in _by_label(y, rng):
            weights = rng.dirichlet(np.full(self.devices, self.alpha))
            assignment[group] = np.repeat(np.arange(self.devices), apportion(len(group), weights))
        sizes = np.bincount(assignment, minlength=self.devices)
        for short in np.flatnonzero(sizes < self.minimum):
            while sizes[short] < self.minimum:
                largest = int(np.argmax(sizes))
                assignment[rng.choice(np.flatnonzero(assignment == largest))] = short
                sizes[largest] -= 1
                sizes[short] += 1
        return Ownership.from_assignment(assignment, self.devices)


@partition("iid")
class Iid(_MadeUp):
    """Equal shares at random."""

    def divide(self, y: IntArray, natural: IntArray | None, seed: int) -> Ownership:  # noqa: ARG002
        """Divide the samples evenly at random."""
        if len(y) < self.devices:
            raise DataError(
                f"{len(y)} samples are too few for {self.devices} devices; lower partition.devices"
            )
        owners = np.arange(len(y), dtype=np.int64) % self.devices
        return Ownership.from_assignment(
            generator(seed, "partition").permutation(owners), self.devices
        )


@partition("natural")
class Natural(Partition):
    """The devices that the samples really came from."""

    def divide(self, y: IntArray, natural: IntArray | None, seed: int) -> Ownership:  # noqa: ARG002
        """Return the devices that the data names."""
        if natural is None:
            raise DataError(
                "this data does not say which device a sample came from; choose another partition"
            )
        return Ownership.from_assignment(natural, int(natural.max()) + 1)
