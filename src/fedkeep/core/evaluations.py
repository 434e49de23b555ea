"""What devices say of a model, merged so that no single one decides."""

from collections.abc import Mapping

import numpy as np

from fedkeep.core.rounds import Refusal, cuts
from fedkeep.core.screening import most_claimed
from fedkeep.core.types import DeviceId, FloatArray

Told = tuple[int, float, int]
"""Samples, their losses added up, and how many were right."""
_TRIM = 0.2
_WORST_LOSS = 100.0
"""No mean loss of a device counts for more than so many times the median of all."""


def merge_evaluations(told: Mapping[DeviceId, Told]) -> tuple[dict[str, float], list[Refusal]]:
    """Loss and accuracy over all samples, the robust accuracy beside them, and whose counts or losses were cut.

    No device counts more samples than the fleet's own counts allow. The robust accuracy leaves out the fifth of the
    fleet that says the best and the fifth that says the worst, no device heavier than the upper quartile.
    """
    devices = [device for device, (samples, _, _) in told.items() if samples > 0]
    if not devices:
        return {}, []
    samples, losses, correct = (np.array([told[d][i] for d in devices], dtype=np.float64) for i in range(3))
    counted = np.minimum(samples, most_claimed(samples))
    means = losses / samples
    worst = np.minimum(means, _WORST_LOSS * (np.median(means) or np.inf))
    merged = {
        "samples": float(counted.sum()),
        "loss": float(worst @ counted / counted.sum()),
        "accuracy": float((correct / samples) @ counted / counted.sum()),
        "accuracy_robust": _trimmed(correct / samples, np.minimum(samples, np.quantile(samples, 0.75))),
    }
    return merged, cuts("count", devices, samples, counted) + cuts("loss", devices, means, worst)


def _trimmed(values: FloatArray, weights: FloatArray) -> float:
    """The weighted mean of the middle: without the lowest and the highest `_TRIM` of the weight."""
    order = np.argsort(values)
    ends = np.cumsum(weights[order]) / weights.sum()
    starts = np.concatenate([[0.0], ends[:-1]])
    kept = np.clip(np.minimum(ends, 1 - _TRIM) - np.maximum(starts, _TRIM), 0.0, None)
    return float((values[order] * kept).sum() / kept.sum())
