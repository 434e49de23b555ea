"""A fleet's data as one value: all samples in two arrays, and which of them belong to which device.

Shape letters: N samples of the whole fleet, C devices.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, Self

import numpy as np

from fedkeep.core.errors import DataError
from fedkeep.core.seeds import child_seed, uniform_keys
from fedkeep.core.targets import NumberTargets
from fedkeep.core.types import AnyArray, Batch, IntArray
from fedkeep.data.cache import Progress


@dataclass(frozen=True, eq=False)
class Ownership:
    """Which samples each device owns, as one index array and C sizes: cheap for 100,000 devices.

    >>> owned = Ownership.from_assignment(np.array([1, 0, 1, -1]), devices=2)
    >>> owned.of(1), owned.sizes
    (array([0, 2]), array([1, 2]))
    """

    indices: IntArray
    """The samples of one device after the other."""
    sizes: IntArray
    """The number of samples of every device, (C,)."""

    @classmethod
    def from_assignment(cls, assignment: IntArray, devices: int) -> Self:
        """Group samples by device, in their order.

        Parameters
        ----------
        assignment : ndarray of int, shape (N,)
            One device number a sample; -1 is nobody's.
        devices : int
            How many devices there are.

        Returns
        -------
        Ownership
            The samples of each.
        """
        order = np.argsort(assignment, kind="stable").astype(np.int64)
        counts = np.bincount(assignment[assignment >= 0], minlength=devices)
        return cls(order[len(order) - int(counts.sum()) :], counts)

    def __len__(self) -> int:
        return len(self.sizes)

    def of(self, device: int) -> IntArray:
        """Return the device's samples, as a view."""
        return self.indices[self.offsets[device] : self.offsets[device + 1]]

    def where(self, kept: AnyArray) -> Self:
        """Return the same devices with only those entries of `indices` where `kept`."""
        return replace(
            self,
            indices=self.indices[kept],
            sizes=np.bincount(self.owners[kept], minlength=len(self)),
        )

    def counts(self, y: IntArray, labels: int) -> IntArray:
        """How many samples of each label every device has, (C, labels)."""
        cells = self.owners * labels + y[self.indices]
        return (
            np.bincount(cells, minlength=len(self) * labels)
            .reshape(len(self), labels)
            .astype(np.int64)
        )

    @cached_property
    def offsets(self) -> IntArray:
        """Where each device's samples begin in `indices`, and where the last one's end.

        (C + 1,).
        """
        return np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)

    @cached_property
    def owners(self) -> IntArray:
        """The device of every entry of `indices`."""
        return np.repeat(np.arange(len(self), dtype=np.int64), self.sizes)


@dataclass(frozen=True)
class ModelSpec:
    """A model by its registered name or as `module:factory`, with its options.

    Data knows no learner.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Federation:
    """Everything a simulation needs to know of its data.

    A sample's id is its row in `x` and `y`.
    """

    name: str
    x: AnyArray
    """(N, *sample_shape) float32."""
    y: AnyArray
    """Labels 0..labels-1, (N,) int64; or numbers to predict, (N,) or (N, width) float64."""
    train: Ownership
    test: Ownership
    label_names: tuple[str, ...]
    model: ModelSpec
    """The model this data is meant for, unless the experiment names another."""
    device_names: tuple[str, ...] | None = None
    """None: devices have numbers only."""
    rounds_per_pass: int = 500
    """In how many rounds a device's stream usually brings each of its samples once."""
    targets: NumberTargets | None = None
    """What targets look like that are numbers; `label_names` are then its intervals' names."""

    def __post_init__(self) -> None:
        if len(self.train) != len(self.test):
            raise DataError(
                f"{len(self.train)} devices have training data but {len(self.test)} test data"
            )
        empty = np.flatnonzero(self.train.sizes == 0)
        if len(empty):
            raise DataError(
                f"device {self.device_name(int(empty[0]))} has no training sample; leave it out"
            )

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return len(self.train)

    @property
    def labels(self) -> int:
        """How many labels there are."""
        return len(self.label_names)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.x.shape[1:])

    def device_name(self, device: int) -> str:
        """Return a device's name, or its number where devices have no names."""
        return self.device_names[device] if self.device_names else str(device)

    def take(self, ids: IntArray) -> Batch:
        """Return these samples as a batch."""
        return Batch(self.x[ids], self.y[ids], ids)

    def train_batch(self, device: int) -> Batch:
        """Return the device's training samples."""
        return self.take(self.train.of(device))

    def test_batch(self, device: int) -> Batch:
        """Return the device's test samples."""
        return self.take(self.test.of(device))

    @cached_property
    def pooled_test(self) -> Batch:
        """The test samples of all devices, in the order of the devices.

        Cut it at `test.offsets`.
        """
        return self.take(self.test.indices)

    @cached_property
    def label_counts(self) -> IntArray:
        """Training samples per device and label, or interval, (C, labels)."""
        return self.train.counts(self.strata, self.labels)

    @cached_property
    def strata(self) -> IntArray:
        """The label of each sample; of a number to predict, the interval that it lies in.

        (N,), below `labels`.
        """
        return self.y if self.targets is None else self.targets.assign(self.y)


def hold_out(members: Ownership, fraction: float, seed: int) -> tuple[Ownership, Ownership]:
    """Divide every device's samples into a training and a random test part.

    A device with a single sample keeps it for training; one with more gives at least one to the
    test.

    >>> owned = Ownership.from_assignment(np.array([0, 0, 0, 0, 1]), devices=2)
    >>> train, test = hold_out(owned, 0.25, seed=0)
    >>> train.sizes, test.sizes
    (array([3, 1]), array([1, 0]))
    """
    sizes = members.sizes
    tests = np.clip(
        np.round(fraction * sizes).astype(np.int64),
        np.minimum(1, sizes - 1),
        np.maximum(sizes - 1, 0),
    )
    keys = uniform_keys(child_seed(seed, "hold-out"), members.indices)
    order = np.lexsort((keys, members.owners))
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order)) - np.repeat(members.offsets[:-1], sizes)
    held = rank < np.repeat(tests, sizes)
    return members.where(~held), members.where(held)


class Task(Protocol):
    """A named source of data.

    Its dataclass fields are the keys of `task` in an experiment's TOML.
    """

    def load(self, seed: int, progress: Progress | None = None) -> Federation:
        """Load the federation, the same for the same options and seed.

        Parameters
        ----------
        seed : int
            Draws partitions and splits.
        progress : Progress, optional
            Called while data is downloaded.

        Returns
        -------
        Federation
            All samples and which device owns them.
        """
