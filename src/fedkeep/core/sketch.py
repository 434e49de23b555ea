"""Gradient layouts: how the numbers of a gradient are kept, summed and sent, whole or as a linear sketch.

A weight gradient M (a x b, the larger side first) is close to low rank: it is a sum of outer products of the errors
and inputs of few samples. Its sketch keeps two products with fixed random matrices instead,

    Y = M Omega  (a x r)     and     Z = Psi M  (l x b),     l = 2 r + 1,

that is r a + l b numbers for a b. The sketch is linear: sums, means, differences and decays of gradients happen in
the sketch, exactly. Only where a vector of the model's length is needed is one made again, once (`reconstruct`).

References
----------
J. A. Tropp, A. Yurtsever, M. Udell, V. Cevher, "Practical sketching algorithms for low-rank matrix approximation",
SIAM J. Matrix Anal. Appl. 38 (4), 2017.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import Protocol

import numpy as np

from fedkeep.core.seeds import generator
from fedkeep.core.types import FloatArray, Vector

AUTO_RANK = 8
"""The rank of `rank = "auto"`."""


class GradientLayout(Protocol):
    """How a gradient over the last parameters of a model is represented."""

    @property
    def size(self) -> int:
        """How many numbers the representation has."""

    @property
    def parameters(self) -> int:
        """How many parameters it stands for: the last ones of a model."""

    def of_vector(self, gradient: Vector) -> Vector:
        """The representation of a gradient; of a longer one, of its last part."""

    def reconstruct(self, numbers: Vector) -> Vector:
        """A gradient with this representation."""


@dataclass(frozen=True)
class WholeLayout:
    """Every parameter has its own number.

    >>> WholeLayout(2).of_vector(np.array([1.0, 2.0, 3.0], dtype=np.float32)).tolist()
    [2.0, 3.0]
    """

    parameters: int

    @property
    def size(self) -> int:
        """How many numbers the representation has."""
        return self.parameters

    def of_vector(self, gradient: Vector) -> Vector:
        """The last part of the gradient."""
        return gradient[len(gradient) - self.parameters :]

    def reconstruct(self, numbers: Vector) -> Vector:
        """The numbers themselves."""
        return numbers


@dataclass(frozen=True)
class SketchedMatrix:
    """The sketch of one weight's gradient, of which `shape` is (outputs, inputs).

    Parameters
    ----------
    shape : (int, int)
        Outputs and inputs; of a convolution's weight, inputs times the size of the kernel.
    rank : int
        r, the columns of Y.
    seed : int
        Of the random signs; devices and server of a fleet share it.

    Notes
    -----
    A matrix of lower rank is a prefix: Omega's first columns and Psi's first rows are the same for every rank.
    """

    shape: tuple[int, int]
    rank: int
    seed: int

    @property
    def rows(self) -> int:
        """l, the rows of Z."""
        return 2 * self.rank + 1

    @property
    def tall(self) -> bool:
        """Whether the outputs are the larger side; if not, the matrix is sketched transposed."""
        return self.shape[0] >= self.shape[1]

    @property
    def size(self) -> int:
        """The numbers of Y and Z."""
        return self.rank * max(self.shape) + self.rows * min(self.shape)

    @cached_property
    def omega(self) -> Vector:
        """(b, r), random signs."""
        return _signs(self.rank, min(self.shape), self.seed, "omega").T

    @cached_property
    def psi(self) -> Vector:
        """(l, a), random signs."""
        return _signs(self.rows, max(self.shape), self.seed, "psi")

    def of_matrix(self, matrix: Vector) -> Vector:
        """The sketch of a matrix of this shape."""
        m = matrix if self.tall else matrix.T
        return np.concatenate([(m @ self.omega).ravel(), (self.psi @ m).ravel()])

    def of_products(self, errors: Vector, inputs: Vector) -> Vector:
        """The sketch of errors.T @ inputs by thin products, without making that matrix.

        Parameters
        ----------
        errors : (n, outputs)
        inputs : (n, inputs)
        """
        left, right = (errors, inputs) if self.tall else (inputs, errors)
        y = left.T @ (right @ self.omega)
        z = (self.psi @ left.T) @ right
        return np.concatenate([y.ravel(), z.ravel()])

    def split(self, numbers: Vector) -> tuple[Vector, Vector]:
        """Y and Z."""
        a, b = max(self.shape), min(self.shape)
        columns = self.rank * a
        return numbers[:columns].reshape(a, self.rank), numbers[columns:].reshape(self.rows, b)

    def reconstruct(self, numbers: Vector) -> Vector:
        """A matrix of rank r whose sketch comes closest to this one.

        Its length is at most what Z tells: |Z|^2 / l is |M|^2 on average.
        """
        y, z = self.split(numbers)
        basis, _ = np.linalg.qr(y.astype(np.float64))
        coefficients, *_ = np.linalg.lstsq(self.psi @ basis, z.astype(np.float64), rcond=None)
        length = np.linalg.norm(coefficients)  # the basis is orthonormal
        told = np.linalg.norm(z) / np.sqrt(self.rows)
        if length > told:
            coefficients *= told / length
        matrix = (basis @ coefficients).astype(np.float32)
        return matrix if self.tall else matrix.T

    def contradiction(self, numbers: Vector) -> float:
        """How far the two products contradict each other: |Psi Y - Z Omega| over the larger of the two; 0 if they agree."""
        y, z = self.split(numbers)
        left, right = self.psi @ y, z @ self.omega
        scale = max(float(np.linalg.norm(left)), float(np.linalg.norm(right)))
        return float(np.linalg.norm(left - right)) / scale if scale > 0 else 0.0


class SketchLayout:
    """A sketch for each large weight; biases, and weights that would not get smaller, stay whole.

    Parameters
    ----------
    shapes : sequence of tuples
        The shapes of the parameters covered, in the order in which they are flattened.
    rank : int
        r of every sketched weight.
    seed : int
        The same for the whole fleet.

    Examples
    --------
    >>> layout = SketchLayout([(100, 900), (100,), (5, 100), (5,)], rank=4, seed=0)
    >>> layout.parameters, layout.size
    (90605, 5450)
    >>> gradient = np.outer(np.ones(100), np.arange(900)).ravel()
    >>> gradient = np.concatenate([gradient, np.zeros(605)]).astype(np.float32)
    >>> bool(np.allclose(layout.reconstruct(layout.of_vector(gradient)), gradient, rtol=1e-3))
    True
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], rank: int, seed: int) -> None:
        self.blocks: list[SketchedMatrix | int] = []
        for number, shape in enumerate(shapes):
            matrix = SketchedMatrix((shape[0], prod(shape[1:])), rank, seed + number)
            smaller = len(shape) > 1 and matrix.size < prod(shape)
            self.blocks.append(matrix if smaller else prod(shape))
        self.parameters = sum(map(prod, shapes))
        lengths = [prod(shape) for shape in shapes]
        self._places = [slice(*ends) for ends in pairwise(accumulate(lengths, initial=0))]
        sizes = [block if isinstance(block, int) else block.size for block in self.blocks]
        self._parts = [slice(*ends) for ends in pairwise(accumulate(sizes, initial=0))]
        self.size = sum(sizes)

    def of_vector(self, gradient: Vector) -> Vector:
        """The sketch of a gradient; of a longer one, of its last part."""
        gradient = gradient[len(gradient) - self.parameters :]
        numbers = np.empty(self.size, dtype=np.float32)
        for block, place, part in zip(self.blocks, self._places, self._parts, strict=True):
            own = gradient[place]
            numbers[part] = own if isinstance(block, int) else block.of_matrix(own.reshape(block.shape))
        return numbers

    def reconstruct(self, numbers: Vector) -> Vector:
        """A gradient with (nearly) this sketch."""
        gradient = np.empty(self.parameters, dtype=np.float32)
        for block, place, part in zip(self.blocks, self._places, self._parts, strict=True):
            own = numbers[part]
            gradient[place] = own if isinstance(block, int) else block.reconstruct(own).ravel()
        return gradient


def _signs(rows: int, columns: int, seed: int, purpose: str) -> Vector:
    """Random signs, (rows, columns); the first rows are the same however many there are."""
    bits = generator(seed, "sketch", purpose).integers(0, 2, (rows, columns), dtype=np.int8)
    return (2 * bits - 1).astype(np.float32)
