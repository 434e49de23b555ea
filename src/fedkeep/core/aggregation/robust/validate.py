"""Stage 1: a local gradient must agree with its own device's update."""

from collections.abc import Sequence

import numpy as np

from fedkeep.core.aggregation.robust.filter import CONFLICT_DEVIATIONS, lower_bound
from fedkeep.core.aggregation.rows import UpdateRows
from fedkeep.core.gradients.layout import GradientLayout
from fedkeep.core.types import BoolArray, Report


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
    for rows, group in updates.row_groups():
        for row, (report, update) in enumerate(zip(reports[rows], group, strict=True), rows.start):
            gradient = report.local_gradient
            if gradient is not None:
                if layout is None:
                    valued = update[len(update) - len(gradient) :]
                else:
                    valued = layout.of_gradient(update)
                lengths = float(np.linalg.norm(valued)) * float(np.linalg.norm(gradient))
                cosines[row] = -float(valued @ gradient) / max(lengths, 1e-30)
    known = cosines[~np.isnan(cosines)]
    least = lower_bound(known, CONFLICT_DEVIATIONS) if len(known) else 0.0
    below: BoolArray = np.less(
        cosines, least if strict else min(least, 0.0)
    )  # False where there is no gradient
    return below
