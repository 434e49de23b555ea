"""Stage 3: updates that conflict with the reference direction are projected, or filtered out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedkeep.core.aggregation.robust.statistics import (
    REFERENCE_DECAY,
    Agreement,
    UpdateStatistics,
)
from fedkeep.core.aggregation.rows import Chosen, UpdateRows
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

    updates: UpdateRows
    """(n, P)."""
    projected: BoolArray
    """Whose update lost a component, (n,)."""
    filtered: BoolArray
    """Whose update does not count, (n,)."""


@dataclass
class _InnerProducts:
    """Products of the updates v, the sum T of the trusted ones, and E of earlier rounds."""

    with_total: FloatArray
    """v . T, (n,)."""
    with_earlier: FloatArray
    """v . E, (n,)."""
    total_square: float = 0.0
    """T . T."""
    total_earlier: float = 0.0
    """T . E."""
    earlier_square: float = 0.0
    """E . E."""


class ReferenceDirections:
    """The direction of the others as each device sees it: this round's, and earlier rounds'.

    Parameters
    ----------
    updates : UpdateRows
        Updates, (n, P).
    trusted : BoolArray
        Whose updates count as "the others", (n,).
    earlier : FloatArray or None
        The running mean of the model's steps, (P,).
    """

    def __init__(self, updates: UpdateRows, trusted: BoolArray, earlier: FloatArray | None) -> None:
        self._updates, self._trusted, self._earlier = updates, trusted, earlier
        self._total = np.empty(updates.shape[1])
        self._others = trusted.sum() - trusted
        known = self._inner_products()
        share = np.where(self._others > 0, 1.0, 0.0) / np.maximum(self._others, 1)
        decay = 0.0 if earlier is None else REFERENCE_DECAY
        share *= 1 - decay
        own = trusted * updates.norms**2
        # |share (T - v) + decay E|^2 and v . (share (T - v) + decay E), multiplied out.
        squares = (
            share**2 * (known.total_square - 2 * trusted * known.with_total + own)
            + 2 * share * decay * (known.total_earlier - trusted * known.with_earlier)
            + decay**2 * known.earlier_square
        )
        self._lengths = np.maximum(np.sqrt(np.maximum(squares, 0.0)), _TINY)
        along = share * (known.with_total - own) + decay * known.with_earlier
        self.products: FloatArray = along / self._lengths
        """Of each update with its direction, (n,)."""

    def _inner_products(self) -> "_InnerProducts":
        """Add up the trusted updates, and multiply by the sum and by earlier rounds: one reading.

        What updates and their directions have in common follows from these products.
        """
        count = self._updates.shape[0]
        found = _InnerProducts(np.zeros(count), np.zeros(count))
        chosen = self._trusted.astype(np.float64)
        for part, block in self._updates.column_blocks():
            total = np.matmul(chosen, block, out=self._total[part])
            found.with_total += block @ total
            found.total_square += float(total @ total)
            if self._earlier is not None:
                earlier = self._earlier[part]
                found.with_earlier += block @ earlier
                found.total_earlier += float(total @ earlier)
                found.earlier_square += float(earlier @ earlier)
        return found

    def of(self, rows: Chosen, part: slice, updates: FloatArray) -> FloatArray:
        """Return these columns of the directions of these rows, from the same of the updates."""
        directions = self._mean_of_others(rows, part, updates)
        directions /= self._lengths[rows, None]
        return directions

    def _mean_of_others(self, rows: Chosen, part: slice, updates: FloatArray) -> FloatArray:
        trusted = self._trusted[rows]
        others: FloatArray = trusted[:, None] * updates
        np.subtract(self._total[part], others, out=others)
        others /= np.maximum(self._others[rows], 1)[:, None]
        if self._earlier is not None:
            others *= 1 - REFERENCE_DECAY
            others += REFERENCE_DECAY * self._earlier[part]
        return others

    def project_out(self, chosen: BoolArray) -> UpdateRows:
        """Return the updates, the chosen ones without what goes along their direction."""

        def fill(rows: Chosen, part: slice, out: FloatArray) -> None:
            self._updates.read(rows, part, out)
            if (here := chosen[rows]).any():
                conflicting = np.arange(len(chosen))[rows][here]
                along = self.products[conflicting, None]
                out[here] -= along * self.of(conflicting, part, out[here])

        return UpdateRows(*self._updates.shape, fill)


def filter_updates(
    devices: Sequence[DeviceId], updates: UpdateRows, statistics: UpdateStatistics
) -> FilteredUpdates:
    """Project out what goes against the reference, and find who keeps going against it.

    A device's agreement is the running mean of its updates' cosines with the direction of the
    others. A second pass leaves out of "the others" whoever conflicted in the first.

    Parameters
    ----------
    devices : Sequence[DeviceId]
        Whose updates these are.
    updates : UpdateRows
        Their updates, (n, P).
    statistics : UpdateStatistics
        Reference and agreement of earlier rounds; takes in the agreement of this one.

    References
    ----------
    Yu et al., Gradient Surgery for Multi-Task Learning, 2020 (the projection); Cao et al., FLTrust,
    2021 (trust by cosine, there with a direction of the server's own data).
    """
    trusted = np.ones(len(devices), dtype=bool)
    lengths = np.maximum(updates.norms, _TINY)
    for _ in range(2):
        references = ReferenceDirections(updates, trusted, statistics.reference)
        cosines: FloatArray = references.products / lengths
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
        updates = references.project_out(projected)
    threshold = min(lower_bound(fleet, _FILTER_DEVIATIONS), _FILTER_COSINE)
    return FilteredUpdates(updates, projected, means < threshold)


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
