"""Arithmetic on updates side by side, (n, P), of which few numbers exist at a time.

For large models it is memory that costs: fifty updates of a million parameters are 400 MB in
float64, and each copy of them as much again.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TypeAlias

import numpy as np

from fedkeep.core.types import FloatArray, IntArray, Report, Vector

_WHOLE, _AT_ONCE = 1 << 17, 1 << 16
"""Numbers of the largest matrix that is kept, 1 MB, and of a part of a larger one: what stays in a
processor's cache from one operation to the next."""
_LEAST_WIDTH = 1 << 11
"""Columns of a block at least, however many rows: each row of it costs a call."""

Chosen: TypeAlias = slice | IntArray
"""Which rows."""
Fill: TypeAlias = Callable[[Chosen, slice, FloatArray], None]
"""Writes these columns of these rows into an array, (rows, columns)."""


class UpdateRows:
    """A matrix of updates in float64, one row a report.

    A small one is made at once and kept. Parts of a larger one are made whenever they are read, so
    that few numbers exist at a time. Each element is computed by itself, and each sum over a column
    in one piece; products along rows are added up block by block.

    Parameters
    ----------
    rows, columns : int
        n and P.
    fill : callable
        Makes a part of the matrix.
    norms : callable, optional
        Gives the length of each row without reading it.

    Examples
    --------
    >>> model = np.array([1.0, 1.0], dtype=np.float32)
    >>> reports = [Report(0, model * k, 1.0, 1, 1, None) for k in (2, 3)]
    >>> updates = UpdateRows.of(model, reports)
    >>> [block.tolist() for _, block in updates.column_blocks()]
    [[[1.0, 1.0], [2.0, 2.0]]]
    >>> updates.scaled(np.array([3.0, 0.0])).norms.round(3).tolist()
    [4.243, 0.0]
    """

    def __init__(
        self,
        rows: int,
        columns: int,
        fill: Fill,
        norms: Callable[[], FloatArray] | None = None,
    ) -> None:
        self.shape = rows, columns
        self._fill = fill
        self._known_norms = norms
        self._whole: FloatArray | None = None
        if rows * columns <= _WHOLE:
            self._whole = np.empty(self.shape)
            fill(slice(0, rows), slice(0, columns), self._whole)

    @classmethod
    def of(cls, model: Vector, reports: Sequence[Report]) -> "UpdateRows":
        """Return the updates by which the reports' models differ from the global one."""

        def fill(rows: Chosen, part: slice, out: FloatArray) -> None:
            for own, row in zip(out, np.arange(len(reports))[rows].tolist(), strict=True):
                own[...] = reports[row].model[part]
            out -= model[part].astype(np.float64)

        return cls(len(reports), len(model), fill)

    def read(self, rows: Chosen, part: slice, out: FloatArray) -> None:
        """Write these columns of these rows into `out`."""
        if self._whole is None:
            self._fill(rows, part, out)
        else:
            out[...] = self._whole[rows, part]

    def column_blocks(self, first: int = 0) -> Iterator[tuple[slice, FloatArray]]:
        """Yield a few columns of all rows at a time, and which; read them, and keep none.

        Parameters
        ----------
        first : int
            The column to begin with.
        """
        rows, columns = self.shape
        if self._whole is not None:
            yield slice(first, columns), self._whole[:, first:]
            return
        width = min(max(_LEAST_WIDTH, _AT_ONCE // rows), columns)
        buffer = np.empty(rows * width)
        for start in range(first, columns, width):
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

    @cached_property
    def norms(self) -> FloatArray:
        """The length of each row, (n,)."""
        if self._known_norms is not None:
            return self._known_norms()
        squares = np.zeros(self.shape[0])
        for _, block in self.column_blocks():
            squares += np.vecdot(block, block)
        return np.asarray(np.sqrt(squares))

    def scaled(self, factors: FloatArray) -> "UpdateRows":
        """Return the rows, each times its factor."""

        def fill(rows: Chosen, part: slice, out: FloatArray) -> None:
            self.read(rows, part, out)
            out *= factors[rows, None]

        return UpdateRows(*self.shape, fill, lambda: np.abs(factors) * self.norms)
