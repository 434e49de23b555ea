"""What a stored sample counts in training: by label, by device and label, or between."""

from dataclasses import dataclass

import numpy as np

from fedkeep.core.bounds import check_range
from fedkeep.core.types import Assignment, FloatArray, IntArray


def label_weights(mass: FloatArray, stored: IntArray) -> FloatArray:
    """Compute gamma of Eq. 11: a label's share of the stream over its share of the slots.

    It is zero where nobody stores the label.

    Shares of the stream are taken over the labels that are stored, so that gamma times the stored
    share sums to 1. `stored` may be the planned slots (the paper) or the samples actually held.

    >>> label_weights(np.array([6.0, 2.0, 4.0]), stored=np.array([2, 2, 0])).tolist()
    [1.5, 0.5, 0.0]
    """
    kept = stored > 0
    stream_total, stored_total = mass[kept].sum(), stored.sum()
    weights = np.zeros(len(mass))
    if stream_total > 0:
        weights[kept] = (mass[kept] / stream_total) / (stored[kept] / stored_total)
    return weights


@dataclass(frozen=True)
class Weighting:
    """Weights between `label` (0) and `client-label` (1), linear in between.

    `label` is gamma: over the fleet the stored labels weigh what they weigh in the stream, but a
    device that sees a label rarely counts for it as much as one that sees it often. `client-label`
    is V_cy / stored_cy: every device and label weighs what it weighs in the stream, at the price of
    very unequal weights: less bias, more variance.
    """

    client_label: float = 0.0
    """0: gamma of Eq. 11 alone, as in the paper; 1: every device and label by its own share of the
    stream."""

    def __post_init__(self) -> None:
        check_range(self, "client_label", least=0, most=1)

    def weigh(self, regions: IntArray, assignment: Assignment, velocity: FloatArray) -> FloatArray:
        """Weigh stored samples that lie in `regions`, (n,), on a device that sees `velocity`.

        >>> assignment = Assignment(np.array([2, 1]), np.array([1.0, 2.0]), mass_per_slot=2.0)
        >>> stored, velocity = np.array([0, 0, 1]), np.array([8.0, 1.0])
        >>> Weighting(client_label=0).weigh(stored, assignment, velocity).tolist()
        [1.0, 1.0, 2.0]
        >>> # 8 / 2 / 2 and 1 / 1 / 2
        >>> Weighting(client_label=1).weigh(stored, assignment, velocity).tolist()
        [2.0, 2.0, 0.5]
        """
        if not self.client_label or not assignment.mass_per_slot > 0:
            return assignment.label_weights[regions]
        own = own_mass(regions, velocity)[regions] / assignment.mass_per_slot
        if self.client_label == 1:  # a plan for an undivided store has weights of one region alone
            return own
        return (1 - self.client_label) * assignment.label_weights[regions] + self.client_label * own


UNCOORDINATED = Weighting(client_label=1.0)
"""Where no plan divides the labels, a device weighs what its own stream weighs."""


def own_mass(regions: IntArray, velocity: FloatArray) -> FloatArray:
    """Compute the part of the stream that one stored sample of each region stands for.

    Labels seen but not stored are spread over the stored ones in proportion, so that the device
    keeps its rate.

    >>> # 9 by two samples, 3 by one
    >>> own_mass(np.array([0, 0, 1]), velocity=np.array([6.0, 2.0, 4.0])).tolist()
    [4.5, 3.0, 0.0]
    """
    stored = np.bincount(regions, minlength=len(velocity))
    share = np.where(stored > 0, velocity, 0.0)
    if not share.any():
        share = stored.astype(np.float64)
    return np.asarray(velocity.sum() * (share / max(share.sum(), 1e-30)) / np.maximum(stored, 1))
