"""Gradient layouts: how the numbers of a gradient are kept, summed and sent, whole or as a sketch.

A weight gradient M (a x b, the larger side first) is close to low rank: it is a sum of outer
products of the errors and inputs of few samples. Its sketch keeps two products with fixed random
matrices instead,

    Y = M Omega  (a x r)     and     Z = Psi M  (l x b),     l = 2 r + 1,

that is r a + l b numbers for a b. The sketch is linear: sums, means, differences and decays of
gradients are computed in the sketch, exactly. Only where a vector of the model's length is needed
is one made again, once (`reconstruct`).

References
----------
Tropp, Yurtsever, Udell and Cevher, "Practical sketching algorithms for low-rank matrix
approximation", SIAM J. Matrix Anal. Appl. 38 (4), 2017.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import prod, sqrt

import numpy as np

from fedkeep.core.seeds import generator
from fedkeep.core.types import AnyArray, Vector

AUTO_RANK = 16
"""The rank of `gist.rank = "auto"`: the smallest that kept what a whole gist gains on every task
of the choice (docs/gist.md)."""
_SEED = 20_170_311
"""Of the random signs: all devices of all fleets share it, so that sketches can be added."""
_CACHED_MATRICES = 512
"""Two for each sketched weight, shared by all layouts of a process."""
_RIDGE = 1e-12
"""Over the sum of the squared singular values: smaller ones are the rounding of a lower rank."""
_COLLINEAR = 1e-5
"""The same for gradients that are known whole, whose products are made in float32."""


class Block(ABC):
    """One parameter of a model, as a layout represents its gradient.

    Parameters
    ----------
    shape : tuple of int
        The parameter's shape.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    @property
    def parameters(self) -> int:
        """The numbers of the gradient itself."""
        return prod(self.shape)

    @property
    @abstractmethod
    def size(self) -> int:
        """The numbers of its representation."""

    @abstractmethod
    def of_gradient(self, gradient: Vector) -> Vector:
        """Represent a flat gradient."""

    @abstractmethod
    def of_products(self, errors: Vector, inputs: Vector) -> Vector:
        """Represent errors.T @ inputs; errors are (n, outputs), inputs (n, inputs)."""

    @abstractmethod
    def reconstruct(self, numbers: Vector) -> Vector:
        """Make a flat gradient again."""


class WholeBlock(Block):
    """A parameter whose gradient is kept number by number."""

    @property
    def size(self) -> int:
        """The numbers of its representation."""
        return self.parameters

    def of_gradient(self, gradient: Vector) -> Vector:
        """Represent a flat gradient: by itself."""
        return gradient

    def of_products(self, errors: Vector, inputs: Vector) -> Vector:
        """Represent errors.T @ inputs."""
        return (errors.T @ inputs).ravel()

    def reconstruct(self, numbers: Vector) -> Vector:
        """Give the numbers themselves."""
        return numbers


class SketchedBlock(Block):
    """A weight whose gradient is kept as a sketch: Y, then Z.

    A sketch of lower rank is part of one of higher rank: the first columns of Omega and the first
    rows of Psi are the same for every rank.

    Parameters
    ----------
    shape : tuple of int
        The weight's shape, outputs first; all other axes count as inputs, as of a convolution.
    rank : int
        r, the columns of Y.
    number : int
        Which parameter of the model it is: each has random signs of its own.
    """

    def __init__(self, shape: tuple[int, ...], rank: int, number: int) -> None:
        super().__init__(shape)
        self.rank, self._number = rank, number
        outputs, inputs = shape[0], prod(shape[1:])
        self._matrix = (outputs, inputs)
        self._tall = outputs >= inputs
        self._long, self._short = max(outputs, inputs), min(outputs, inputs)

    @property
    def rows(self) -> int:
        """The rows of Z, l."""
        return 2 * self.rank + 1

    @property
    def size(self) -> int:
        """The numbers of Y and Z."""
        return self.rank * self._long + self.rows * self._short

    @property
    def omega(self) -> Vector:
        """The signs on the right, (b, r)."""
        return _signs(self.rank, self._short, self._number, "omega").T

    @property
    def psi(self) -> Vector:
        """The signs on the left, (l, a)."""
        return _signs(self.rows, self._long, self._number, "psi")

    def of_gradient(self, gradient: Vector) -> Vector:
        """Sketch a flat gradient."""
        matrix = gradient.reshape(self._matrix)
        m = matrix if self._tall else matrix.T
        return np.concatenate([(m @ self.omega).ravel(), (self.psi @ m).ravel()])

    def of_products(self, errors: Vector, inputs: Vector) -> Vector:
        """Sketch errors.T @ inputs by thin products: that matrix is never made."""
        left, right = (errors, inputs) if self._tall else (inputs, errors)
        y = left.T @ (right @ self.omega)
        z = (self.psi @ left.T) @ right
        return np.concatenate([y.ravel(), z.ravel()])

    def reconstruct(self, numbers: Vector) -> Vector:
        """Make the matrix of rank r that fits the sketch best, flat: Y (Psi Y)^+ Z.

        |Z|^2 / l estimates |M|^2 without bias; a reconstruction that is longer than that is
        shortened, unless the rank is full and nothing has to be estimated.
        """
        y, z = self.products(numbers)
        solved = _least_squares(self.psi @ y, z).astype(np.float32)
        # In the order of the weight itself: to transpose it takes longer than to multiply.
        matrix = y @ solved if self._tall else solved.T @ y.T
        flat: Vector = matrix.ravel()
        length = sqrt(float(flat @ flat))
        estimate = float(np.linalg.norm(z)) / sqrt(self.rows)
        if self.rank < self._short and length > estimate:
            flat *= np.float32(estimate / length)
        return flat

    def products(self, numbers: Vector) -> tuple[Vector, Vector]:
        """Split a sketch into Y and Z."""
        columns = self.rank * self._long
        y = numbers[:columns].reshape(self._long, self.rank)
        return y, numbers[columns:].reshape(self.rows, self._short)

    def both_ways(self, numbers: Vector) -> tuple[Vector, Vector]:
        """Give Psi Y and Z Omega, which are equal for the sketch of any matrix: Psi M Omega."""
        y, z = self.products(numbers)
        return self.psi @ y, z @ self.omega


@dataclass(frozen=True, eq=False)
class KnownGradient:
    """A gradient that is known whole, with its representation.

    Parameters
    ----------
    gradient : Vector
        By the parameters that a layout covers.
    numbers : Vector
        Its representation.
    """

    gradient: Vector
    numbers: Vector

    @cached_property
    def norm(self) -> float:
        """The length of the representation; 0 of one that cannot be used."""
        length = float(np.linalg.norm(self.numbers))
        return length if np.isfinite(length) else 0.0


@dataclass(frozen=True, eq=False)
class GradientLayout:
    """How a gradient by the last parameters of a model is represented, parameter by parameter.

    Parameters
    ----------
    blocks : tuple of Block
        The parameters, in the order in which they are flattened.

    Examples
    --------
    >>> shapes = [(100, 900), (100,), (5, 100), (5,)]
    >>> layout = sketched_layout(shapes, rank=4)
    >>> layout.parameters, layout.size
    (90605, 5050)
    >>> whole_layout(90605).size
    90605
    """

    blocks: tuple[Block, ...]

    @cached_property
    def parameters(self) -> int:
        """The parameters that it covers, the last ones of the model."""
        return sum(block.parameters for block in self.blocks)

    @cached_property
    def size(self) -> int:
        """The numbers of the representation."""
        return sum(block.size for block in self.blocks)

    @cached_property
    def whole(self) -> bool:
        """Whether every number of the gradient is kept."""
        return all(isinstance(block, WholeBlock) for block in self.blocks)

    @cached_property
    def rank(self) -> int:
        """The rank of the sketched weights; 0 where nothing is sketched."""
        return max((b.rank for b in self.blocks if isinstance(b, SketchedBlock)), default=0)

    @cached_property
    def parts(self) -> tuple[slice, ...]:
        """Where each block's numbers stand."""
        return _slices([block.size for block in self.blocks])

    def of_gradient(self, gradient: Vector) -> Vector:
        """Represent a gradient; of a longer one its last part.

        Parameters
        ----------
        gradient : Vector
            By the parameters covered, or by more of the model.

        Returns
        -------
        Vector
            `size` numbers; where nothing is sketched a view of the gradient.
        """
        covered = gradient[len(gradient) - self.parameters :]
        if self.whole:
            return covered
        places = _slices([block.parameters for block in self.blocks])
        numbers = np.empty(self.size, dtype=np.float32)
        for block, place, part in zip(self.blocks, places, self.parts, strict=True):
            numbers[part] = block.of_gradient(covered[place])
        return numbers

    def reconstruct(self, numbers: Vector) -> Vector:
        """Make a gradient by the parameters covered.

        Parameters
        ----------
        numbers : Vector
            `size` numbers.

        Returns
        -------
        Vector
            `parameters` numbers; where nothing is sketched the same.
        """
        if self.whole:
            return numbers
        places = _slices([block.parameters for block in self.blocks])
        gradient = np.empty(self.parameters, dtype=np.float32)
        for block, place, part in zip(self.blocks, places, self.parts, strict=True):
            gradient[place] = block.reconstruct(numbers[part])
        return gradient

    def reconstruct_near(self, numbers: Vector, known: Sequence[KnownGradient]) -> Vector:
        """Make a gradient of which much lies along gradients that are known whole.

        What of it lies along them is found by least squares in the sketch; only the rest, which
        is shorter, is made of the sketch.

        Parameters
        ----------
        numbers : Vector
            `size` numbers.
        known : sequence of KnownGradient
            Such gradients.
        """
        if self.whole:
            return numbers
        known = [one for one in known if one.norm > 0]
        if not known:
            return self.reconstruct(numbers)
        units = np.stack([one.numbers / np.float32(one.norm) for one in known])
        products = (units @ units.T).astype(np.float64)
        products[np.diag_indices_from(products)] += _COLLINEAR
        shares = np.linalg.solve(products, units @ numbers)
        gradient = self.reconstruct(numbers - shares.astype(np.float32) @ units)
        for share, one in zip(shares, known, strict=True):
            gradient += np.float32(share / one.norm) * one.gradient
        return gradient

    def disagreement(self, numbers: Vector) -> float:
        """Compare Psi Y with Z Omega, which are equal for the sketch of any matrix.

        Returns
        -------
        float
            The length of their difference over that of the longer one, of all weights together;
            0 if they agree, and at most 2.
        """
        lengths = np.zeros(3)
        for block, part in zip(self.blocks, self.parts, strict=True):
            if isinstance(block, SketchedBlock):
                left, right = (one.ravel() for one in block.both_ways(numbers[part]))
                apart = left - right
                lengths += [apart @ apart, left @ left, right @ right]
        longest = float(lengths[1:].max())
        return sqrt(float(lengths[0]) / longest) if longest > 0 else 0.0


def whole_layout(parameters: int) -> GradientLayout:
    """Lay out a gradient of so many numbers number by number."""
    return GradientLayout((WholeBlock((parameters,)),))


def sketched_layout(shapes: Sequence[tuple[int, ...]], rank: int) -> GradientLayout:
    """Lay out a gradient with a sketch of each weight that gets smaller by it.

    Biases, and weights that would not get smaller, stay whole.

    Parameters
    ----------
    shapes : sequence of tuples
        The shapes of the parameters covered, in the order in which they are flattened.
    rank : int
        r of every sketched weight.
    """
    blocks: list[Block] = []
    for number, shape in enumerate(shapes):
        sketched = SketchedBlock(shape, rank, number) if len(shape) > 1 else None
        smaller = sketched is not None and sketched.size < sketched.parameters
        blocks.append(sketched if sketched is not None and smaller else WholeBlock(shape))
    return GradientLayout(tuple(blocks))


def sketch_of(shapes: Sequence[tuple[int, ...]], rank: int, size: int) -> GradientLayout | None:
    """Find the layout of a sketch from its length: it may cover the last parameters only.

    Parameters
    ----------
    shapes : sequence of tuples
        The shapes of a model's parameters, in the order in which they are flattened.
    rank : int
        r of every sketched weight.
    size : int
        The numbers of the sketch.

    Returns
    -------
    GradientLayout or None
        None if no sketch of the last parameters has that length.

    Examples
    --------
    >>> shapes = [(100, 900), (100,), (5, 100), (5,)]
    >>> found = sketch_of(shapes, rank=4, size=5050)
    >>> found is not None and found.parameters
    90605
    """
    layouts = (sketched_layout(shapes[start:], rank) for start in range(len(shapes)))
    return next((one for one in layouts if one.size == size and not one.whole), None)


def _least_squares(left: Vector, right: Vector) -> AnyArray:
    """Solve left @ x = right for x with a slight ridge, by the normal equations in float64.

    What is not finite gives what is not finite, and nothing gives nothing.
    """
    thin = left.astype(np.float64)
    normal = thin.T @ thin
    scale = float(normal.trace())
    if not 0 < scale < np.inf:
        return np.full((left.shape[1], right.shape[1]), scale)
    normal[np.diag_indices_from(normal)] += _RIDGE * scale
    return np.linalg.solve(normal, thin.T @ right)


def _slices(lengths: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(*ends) for ends in pairwise(accumulate(lengths, initial=0)))


@lru_cache(_CACHED_MATRICES)
def _signs(rows: int, columns: int, number: int, purpose: str) -> Vector:
    """Draw random signs, (rows, columns); the first rows are the same however many there are."""
    bits = generator(_SEED, "sketch", number, purpose).integers(
        0, 2, (rows, columns), dtype=np.int8
    )
    signs = (2 * bits - 1).astype(np.float32)
    signs.flags.writeable = False
    return signs
