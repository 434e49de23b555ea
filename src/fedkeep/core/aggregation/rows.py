"""Arithmetic on updates side by side, (n, P), of which few numbers exist at a time.

For large models it is memory that costs: fifty updates of a million parameters are 400 MB in
float64, and each copy of them as much again.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from fedkeep.core.types import FloatArray, IntArray, Report, Vector

_WHOLE, _AT_ONCE = 1 << 21, 1 << 17
"""Numbers of the largest matrix that is kept, 16 MB, and of a part of a larger one, 1 MB: what
stays in a processor's cache from one operation to the next."""

Chosen: TypeAlias = slice | IntArray
"""Which rows."""
Fill: TypeAlias = Callable[[Chosen, slice, FloatArray], None]
"""Writes these columns of these rows into an array, (rows, columns)."""


class UpdateRows:
    """A matrix of updates in float64, one row a report.

    A small one is made at once and kept. Parts of a larger one are made whenever they are read: by
    groups of rows, or by blocks of columns. Both give the same numbers, as each element is computed
    by itself, and each sum over a row or a column in one piece.

    Parameters
    ----------
    rows, columns : int
        n and P.
    fill : callable
        Makes a part of the matrix.

    Examples
    --------
    >>> model = np.array([1.0, 1.0], dtype=np.float32)
    >>> reports = [Report(0, model * k, 1.0, 1, 1, None) for k in (2, 3)]
    >>> updates = UpdateRows.of(model, reports)
    >>> updates.weighted_sum(np.array([0.5, 0.25])).tolist()
    [1.0, 1.0]
    >>> updates.scaled(np.array([3.0, 0.0])).norms().round(3).tolist()
    [4.243, 0.0]
    """

    def __init__(self, rows: int, columns: int, fill: Fill) -> None:
        self.shape = rows, columns
        self._fill = fill
        self._whole: FloatArray | None = None
        if rows * columns <= _WHOLE:
            self._whole = np.empty(self.shape)
            fill(slice(0, rows), slice(0, columns), self._whole)

    @classmethod
    def of(cls, model: Vector, reports: Sequence[Report]) -> "UpdateRows":
        """Return the updates by which the reports' models differ from the global one."""

        def fill(rows: Chosen, part: slice, out: FloatArray) -> None:
            for own, row in zip(out, np.arange(len(reports))[rows].tolist(), strict=True):
                np.subtract(reports[row].model[part], model[part], out=own, dtype=np.float64)

        return cls(len(reports), len(model), fill)

    def read(self, rows: Chosen, part: slice, out: FloatArray) -> None:
        """Write these columns of these rows into `out`."""
        if self._whole is None:
            self._fill(rows, part, out)
        else:
            out[...] = self._whole[rows, part]

    def row_groups(self) -> Iterator[tuple[slice, FloatArray]]:
        """Yield whole rows, a few at a time, with their numbers; read them, and keep none."""
        rows, columns = self.shape
        if self._whole is not None:
            yield slice(0, rows), self._whole
            return
        at_once = max(1, _AT_ONCE // columns)
        buffer = np.empty((at_once, columns))
        for start in range(0, rows, at_once):
            chosen = slice(start, min(start + at_once, rows))
            group = buffer[: chosen.stop - start]
            self._fill(chosen, slice(0, columns), group)
            yield chosen, group

    def column_blocks(self) -> Iterator[tuple[slice, FloatArray]]:
        """Yield a few columns of all rows at a time, and which; read them, and keep none."""
        rows, columns = self.shape
        if self._whole is not None:
            yield slice(0, columns), self._whole
            return
        width = max(1, _AT_ONCE // rows)
        buffer = np.empty(rows * width)
        for start in range(0, columns, width):
            part = slice(start, min(start + width, columns))
            block = buffer[: rows * (part.stop - start)].reshape(rows, -1)
            self._fill(slice(0, rows), part, block)
            yield part, block

    def whole(self) -> Iterator[tuple[slice, FloatArray]]:
        """Yield all columns of all rows, however large."""
        everything = slice(0, self.shape[1])
        if self._whole is not None:
            yield everything, self._whole
            return
        matrix = np.empty(self.shape)
        self._fill(slice(0, len(matrix)), everything, matrix)
        yield everything, matrix

    def norms(self) -> FloatArray:
        """Measure the length of each row, (n,)."""
        return np.concatenate([row_norms(group) for _, group in self.row_groups()])

    def weighted_sum(self, weights: FloatArray) -> FloatArray:
        """Add up the rows, each times its weight, (P,)."""
        total = np.empty(self.shape[1])
        for part, block in self.column_blocks():
            np.matmul(weights, block, out=total[part])
        return total

    def scaled(self, factors: FloatArray) -> "UpdateRows":
        """Return the rows, each times its factor."""

        def fill(rows: Chosen, part: slice, out: FloatArray) -> None:
            self.read(rows, part, out)
            out *= factors[rows, None]

        return UpdateRows(*self.shape, fill)


def row_norms(rows: FloatArray) -> FloatArray:
    """Measure the length of each row, (n,).

    >>> row_norms(np.array([[3.0, 4.0], [0.0, 2.0]])).tolist()
    [5.0, 2.0]
    """
    return np.asarray(np.sqrt(row_products(rows, rows)))


def row_products(left: FloatArray, right: FloatArray) -> FloatArray:
    """Multiply each row by the other matrix's, (n,); summed pairwise, as numpy sums along rows.

    >>> row_products(np.array([[1.0, 2.0]]), np.array([[3.0, 4.0]])).tolist()
    [11.0]
    """
    product = np.empty(left.shape[1])
    sums = np.empty(len(left))
    for row, (one, other) in enumerate(zip(left, right, strict=True)):
        sums[row] = np.add.reduce(np.multiply(one, other, out=product))
    return sums
