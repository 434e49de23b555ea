"""Stage 3: updates that conflict with the reference direction are projected, or filtered out."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from fedkeep.core.aggregation.robust.statistics import (
    REFERENCE_DECAY,
    Agreement,
    UpdateStatistics,
)
from fedkeep.core.aggregation.rows import row_norms, row_products
from fedkeep.core.outliers import MAD_TO_DEVIATION, median
from fedkeep.core.types import BoolArray, DeviceId, FloatArray

AGREEMENT_DECAY = 0.8
"""What is left of a device's agreement after one more report."""
CONFLICT_DEVIATIONS, _FILTER_DEVIATIONS = 2.5, 3.5
"""Deviations below the median agreement at which an update conflicts, and is filtered."""
_LEAST_DEVIATION = 0.05
_FILTER_COSINE = -0.1
"""Nobody is filtered out whose mean cosine with the reference is above this."""
_TINY = 1e-30


class FilteredUpdates(NamedTuple):
    """Updates without what conflicts with the reference, and which devices that concerned."""

    updates: FloatArray
    """(n, P)."""
    projected: BoolArray
    """Whose update lost a component, (n,)."""
    filtered: BoolArray
    """Whose update does not count, (n,)."""


def filter_updates(
    devices: Sequence[DeviceId], updates: FloatArray, statistics: UpdateStatistics
) -> FilteredUpdates:
    """Project out what goes against the reference, and find who keeps going against it.

    A device's agreement is the running mean of its updates' cosines with the direction of the
    others. A second pass leaves out of "the others" whoever conflicted in the first.

    Parameters
    ----------
    devices : Sequence[DeviceId]
        Whose updates these are.
    updates : FloatArray
        Their updates, (n, P).
    statistics : UpdateStatistics
        Reference and agreement of earlier rounds; takes in the agreement of this one.

    References
    ----------
    Yu et al., Gradient Surgery for Multi-Task Learning, 2020 (the projection); Cao et al., FLTrust,
    2021 (trust by cosine, there with a direction of the server's own data).
    """
    trusted = np.ones(len(devices), dtype=bool)
    lengths = np.maximum(row_norms(updates), _TINY)
    for _ in range(2):
        references = reference_directions(updates, trusted, statistics.reference)
        cosines: FloatArray = row_products(updates, references) / lengths
        agreement = dict(statistics.agreement)
        for device, cosine in zip(devices, cosines.tolist(), strict=True):
            agreement[device] = _updated(statistics.agreement.get(device, Agreement()), cosine)
        fleet = [known.mean for known in agreement.values()]
        means = np.array([agreement[device].mean for device in devices])
        # Whoever agrees at all is not in conflict, however much more the others agree.
        trusted = means >= min(lower_bound(fleet, CONFLICT_DEVIATIONS), 0.0)
        if trusted.all():
            break  # a second pass would see the same
    statistics.agreement = agreement
    projected = ~trusted & (cosines < 0)
    if projected.any():
        updates = updates.copy()
        along = (updates[projected] * references[projected]).sum(axis=1, keepdims=True)
        updates[projected] -= along * references[projected]
    threshold = min(lower_bound(fleet, _FILTER_DEVIATIONS), _FILTER_COSINE)
    return FilteredUpdates(updates, projected, means < threshold)


def reference_directions(
    updates: FloatArray, trusted: BoolArray, earlier: FloatArray | None
) -> FloatArray:
    """Return the direction of the others as each device sees it: this round's, and earlier rounds'.

    Parameters
    ----------
    updates : FloatArray
        Updates, (n, P).
    trusted : BoolArray
        Whose updates count as "the others", (n,).
    earlier : FloatArray or None
        The running mean of the model's steps, (P,).

    Returns
    -------
    FloatArray
        A unit vector a device, (n, P).
    """
    total = trusted @ updates
    others: FloatArray = trusted[:, None] * updates
    np.subtract(total, others, out=others)
    others /= np.maximum(trusted.sum() - trusted, 1)[:, None]
    if earlier is not None:
        others *= 1 - REFERENCE_DECAY
        others += REFERENCE_DECAY * earlier
    others /= np.maximum(row_norms(others), _TINY)[:, None]
    return others


def lower_bound(cosines: Iterable[float], deviations: float) -> float:
    """Return the value so many robust deviations below the median."""
    values = np.array([*cosines])
    centre = median(values)
    deviation = MAD_TO_DEVIATION * median(np.abs(values - centre))
    return centre - deviations * max(deviation, _LEAST_DEVIATION)


def _updated(known: Agreement, cosine: float) -> Agreement:
    fresh = 1 - AGREEMENT_DECAY
    return Agreement(
        AGREEMENT_DECAY * known.total + fresh * cosine, AGREEMENT_DECAY * known.mass + fresh
    )
