"""Arithmetic on updates side by side, (n, P), without temporary arrays of that size.

For large models it is memory that takes the time: each fresh array costs more than what is computed
in it.
"""

from collections.abc import Sequence

import numpy as np

from fedkeep.core.types import FloatArray, Report, Vector


def stacked_updates(model: Vector, reports: Sequence[Report]) -> FloatArray:
    """Put the reports' updates side by side in float64, (n, P)."""
    updates = np.empty((len(reports), len(model)))
    for row, report in zip(updates, reports, strict=True):
        np.subtract(report.model, model, out=row, dtype=np.float64)
    return updates


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
