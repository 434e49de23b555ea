"""Stage 1: a local gradient must agree with its own device's update."""

from collections.abc import Sequence
from functools import partial
from typing import cast

import numpy as np

from fedkeep.core.aggregation.robust.filter import CONFLICT_DEVIATIONS, lower_bound
from fedkeep.core.aggregation.rows import UpdateRows
from fedkeep.core.gradients.layout import GradientLayout
from fedkeep.core.types import BoolArray, FloatArray, IntArray, Report, Vector

_TINY = 1e-30


def inconsistent_gradients(
    reports: Sequence[Report],
    updates: UpdateRows,
    layout: GradientLayout | None = None,
    *,
    strict: bool = False,
) -> BoolArray:
    """Find the local gradients that their devices' own updates contradict.

    Training descends the gradient of the stream; a reversed gradient asks to climb it. Where noise
    hides all gradients, none stands out.

    Parameters
    ----------
    reports : Sequence[Report]
        Reports, some of them with a local gradient.
    updates : UpdateRows
        Their updates, (n, P); a gradient is of the last parameters.
    layout : GradientLayout, optional
        How the gradients are represented, if not number by number: updates are compared in it.
    strict : bool
        Whether a gradient that agrees with its update counts no more where it agrees far less than
        those of the others.

    Returns
    -------
    BoolArray
        True for each report whose gradient does not count, (n,).
    """
    cosines = np.full(len(reports), np.nan)
    sending = [row for row, report in enumerate(reports) if report.local_gradient is not None]
    if sending:
        compare = _cosines if layout is None else partial(_sketched_cosines, layout)
        gradients = [cast("Vector", reports[row].local_gradient) for row in sending]
        cosines[sending] = -compare(updates, np.array(sending), gradients)
    known = cosines[~np.isnan(cosines)]
    least = lower_bound(known, CONFLICT_DEVIATIONS) if len(known) else 0.0
    below: BoolArray = np.less(
        cosines, least if strict else min(least, 0.0)
    )  # False where there is no gradient
    return below


def _cosines(updates: UpdateRows, rows: IntArray, gradients: Sequence[Vector]) -> FloatArray:
    """Return the cosine of each gradient with the last parameters of its row."""
    first = updates.shape[1] - len(gradients[0])
    products, squares = np.zeros(len(rows)), np.zeros(len(rows))
    for part, block in updates.column_blocks(first):
        numbers = slice(part.start - first, part.stop - first)
        for place, (row, gradient) in enumerate(zip(rows.tolist(), gradients, strict=True)):
            products[place] += block[row] @ gradient[numbers]
            squares[place] += block[row] @ block[row]
    lengths = np.sqrt(squares) * [float(np.linalg.norm(gradient)) for gradient in gradients]
    return np.asarray(products / np.maximum(lengths, _TINY))


def _sketched_cosines(
    layout: GradientLayout, updates: UpdateRows, rows: IntArray, gradients: Sequence[Vector]
) -> FloatArray:
    """Return the cosine of each gradient with its row, represented as the gradient is."""
    update = np.empty((1, updates.shape[1]))
    cosines = np.empty(len(rows))
    for place, (row, gradient) in enumerate(zip(rows.tolist(), gradients, strict=True)):
        updates.read(slice(row, row + 1), slice(0, updates.shape[1]), update)
        valued = layout.of_gradient(update[0])
        lengths = float(np.linalg.norm(valued)) * float(np.linalg.norm(gradient))
        cosines[place] = float(valued @ gradient) / max(lengths, _TINY)
    return cosines
