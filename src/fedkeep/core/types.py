"""Values that cross the borders of the core.

Shape letters, here and in all of fedkeep: n samples, P parameters, C devices, Y regions (labels, by
default).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

Vector: TypeAlias = NDArray[np.float32]
"""A model or a gradient, flattened: (P,)."""
Scores: TypeAlias = NDArray[np.float64]
"""One number per sample: (n,)."""
FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]
BoolArray: TypeAlias = NDArray[np.bool_]
AnyArray: TypeAlias = NDArray[Any]
State: TypeAlias = dict[str, AnyArray]
"""A snapshot: plain arrays by name, so that any file format can hold it."""
DeviceId: TypeAlias = int


@dataclass(frozen=True)
class ArraySpec:
    """One array of a snapshot: its form, and what it depends on.

    Parameters
    ----------
    shape : tuple of int
        The shape; where `bounded`, the largest one that the array can have.
    dtype : dtype-like
        The type of its numbers.
    bounded : bool
        Whether the array may also be smaller, down to empty.
    optional : bool
        Whether a snapshot may lack it.
    learned : bool
        Whether it means nothing under another model.
    initial : float or tuple of float
        The numbers of a new one that is not `bounded`; one for all, or one each.

    Examples
    --------
    >>> ArraySpec((10, 2), np.float64).nbytes
    160
    """

    shape: tuple[int, ...]
    dtype: DTypeLike
    bounded: bool = False
    optional: bool = False
    learned: bool = False
    initial: float | tuple[float, ...] = 0

    @property
    def nbytes(self) -> int:
        """The most bytes that the array can take."""
        return np.dtype(self.dtype).itemsize * math.prod(self.shape)

    def fresh(self) -> AnyArray:
        """Make the array that a new part has: empty where it is `bounded`."""
        if self.bounded:
            return np.zeros((0,) * len(self.shape), dtype=self.dtype)
        return np.broadcast_to(self.initial, self.shape).astype(self.dtype)

    def fits(self, array: AnyArray) -> bool:
        """Tell whether an array that was found has this form."""
        if array.dtype != np.dtype(self.dtype):
            return False
        if not self.bounded:
            return array.shape == self.shape
        return array.ndim == len(self.shape) and all(
            found <= most for found, most in zip(array.shape, self.shape, strict=True)
        )


StateSpec: TypeAlias = dict[str, ArraySpec]
"""The arrays of a snapshot by name. A name that ends with `*` stands for all that begin so."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Samples with their targets and identities; an id seen again is the same sample."""

    x: AnyArray
    y: AnyArray
    """Labels, (n,) int64; or numbers to predict, (n,) or (n, width) float64."""
    ids: IntArray

    def __len__(self) -> int:
        return len(self.y)

    def take(self, index: Any) -> "Batch":
        """Take the samples at `index`, any numpy index along the first axis."""
        return Batch(self.x[index], self.y[index], self.ids[index])

    @staticmethod
    def concatenate(batches: "Sequence[Batch]") -> "Batch":
        """Put batches one behind the other."""
        return Batch(*map(np.concatenate, zip(*((b.x, b.y, b.ids) for b in batches), strict=True)))


@dataclass(frozen=True, eq=False)
class Profile:
    """What a device tells the server before training: |B_c| and V_c (step 1)."""

    capacity: int
    velocity: FloatArray

    @property
    def rate(self) -> float:
        """v_c, the arrivals per unit of time over all regions."""
        return float(self.velocity.sum())


@dataclass(frozen=True, eq=False)
class Assignment:
    """What the server tells one device to store, and what each stored sample counts (step 2).

    `label_weights` is gamma (Eq. 11), zero for a region nobody holds. `mass_per_slot` is ||V||_1 /
    ||D||_1, the share of the fleet's stream that an average slot stands for: it puts V_cy /
    stored_cy on the scale of gamma.
    """

    quotas: IntArray
    label_weights: FloatArray
    mass_per_slot: float


@dataclass(frozen=True)
class LocalTraining:
    """How a device trains in one round (Eq. 12)."""

    learning_rate: float
    """eta of Eq. 1 and 12: the step of local training in the first rounds."""
    epochs: int
    """m of Eq. 1: passes over what is stored when a device takes part."""
    batch_size: int | None = None
    """Samples a step; left out: all that is stored at once, as in Eq. 12."""
    proximal: float = 0.0
    """mu of FedProx: how hard a device is pulled back to the model it began with; 0 is FedAvg."""


@dataclass(frozen=True, eq=False)
class TrainOrder:
    """What the server sends to a participant (step 7)."""

    round: int
    model: Vector
    global_gradient: Vector | None
    """g_hat; None until a first estimate exists."""
    local: LocalTraining
    accepted_round: int | None = None
    """The latest round of which the server accepted this device's report."""
    assignment: Assignment | None = None
    """What the plan has for this device; None where there is no plan."""


@dataclass(frozen=True, eq=False)
class Report:
    """What a participant sends back (step 6)."""

    round: int
    model: Vector
    weight: float
    """zeta_c of Eq. 12: the weights of the samples trained on, summed. 0 means "no data" and is no
    failure."""
    steps: int
    samples: int
    local_gradient: Vector | None
    """g_hat_c, the mean gradient over `gradient_samples` arrivals; None if nothing arrived since
    the last one."""
    gradient_samples: int = 0
