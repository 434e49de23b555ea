"""What a closed round brought, who did not count in it, and how good the model is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedkeep.core.errors import RejectionReason
from fedkeep.core.outliers import robust_cap
from fedkeep.core.targets import WORST_R2, scores_of_sums
from fedkeep.core.types import AnyArray, DeviceId, FloatArray

_TRIM = 0.2
"""The share of the weight that the robust accuracy leaves out at either end."""
_MAX_LOSS_RATIO = 100.0
"""No device's mean loss counts for more than so many times the median of all."""


@dataclass(frozen=True)
class Rejection:
    """A report or profile that did not count, or not in full, and why.

    Parameters
    ----------
    device : DeviceId
        Who sent it.
    reason : str
        A `RejectionReason`, or the word of a peer of another version.
    detail : str
        One sentence on what was found and what was expected.
    """

    device: DeviceId
    reason: str
    detail: str


@dataclass(frozen=True, eq=False)
class RoundSummary:
    """What a closed round brought."""

    round: int
    participants: tuple[DeviceId, ...]
    accepted: tuple[DeviceId, ...]
    empty: tuple[DeviceId, ...]
    """Devices that had nothing to train on: they took part all the same."""
    missing: tuple[DeviceId, ...]
    rejections: tuple[Rejection, ...]
    filtered: tuple[DeviceId, ...] = ()
    """Devices whose updates a robust mean left out: they keep pointing against the reference."""


def report_cuts(
    quantity: str,
    reason: RejectionReason,
    devices: Sequence[DeviceId],
    reported: AnyArray,
    counted: AnyArray,
) -> list[Rejection]:
    """List the devices of which less counts than they reported."""
    cut = np.flatnonzero(counted < reported).tolist()
    return [
        Rejection(devices[i], reason, f"a {quantity} of {reported[i]:g} counts as {counted[i]:g}")
        for i in cut
    ]


def merge_evaluations(
    evaluations: Mapping[DeviceId, tuple[int, float, int]],
    *,
    capped: bool = True,
    errors: Mapping[DeviceId, Sequence[float]] | None = None,
) -> tuple[dict[str, float], list[Rejection]]:
    """Merge devices' evaluations into loss, accuracy and a robust accuracy over all samples.

    The robust accuracy leaves out the fifth of the fleet's weight that reports the best accuracy
    and the fifth that reports the worst, with no device heavier than the upper quartile.

    Parameters
    ----------
    evaluations : Mapping[DeviceId, tuple[int, float, int]]
        By device: its samples, the sum of their losses, and how many were right.
    capped : bool
        Whether no device counts more samples than the fleet's own counts allow, and no loss beyond
        a hundred times the median.
    errors : Mapping, optional
        Where targets are numbers, by device what `targets.error_sums` gives: `rmse`, `mae` and `r2`
        are among the figures then, and R2 stands for accuracy; a device's own is by the variance of
        all targets.

    Returns
    -------
    tuple[dict[str, float], list[Rejection]]
        The merged figures, and whose counts or losses were cut.
    """
    devices = [device for device, (samples, _, _) in evaluations.items() if samples > 0]
    if not devices:
        return {}, []
    samples, losses, correct = (
        np.array([evaluations[d][i] for d in devices], dtype=np.float64) for i in range(3)
    )
    reported_means = losses / samples
    counted, means = samples, reported_means
    if capped:
        counted = np.minimum(samples, robust_cap(samples))
        means = np.minimum(reported_means, _MAX_LOSS_RATIO * (np.median(reported_means) or np.inf))
    bounded_weights = np.minimum(samples, np.quantile(samples, 0.75))
    shares, numbers = correct / samples, dict[str, float]()
    if errors:
        shares, numbers = _number_figures([errors.get(d) for d in devices], samples, counted)
    merged = {
        "samples": float(counted.sum()),
        "loss": float(means @ counted / counted.sum()),
        "accuracy": numbers.get("r2", float(shares @ counted / counted.sum())),
        "accuracy_robust": _trimmed_mean(shares, bounded_weights),
        **numbers,
    }
    cuts = report_cuts("count", RejectionReason.COUNT_CUT, devices, samples, counted)
    cuts += report_cuts("loss", RejectionReason.LOSS_CUT, devices, reported_means, means)
    return merged, cuts


def _number_figures(
    sums: Sequence[Sequence[float] | None], samples: FloatArray, counted: FloatArray
) -> tuple[FloatArray, dict[str, float]]:
    """Return each device's R2 by the variance of all targets, and the figures of all together.

    A device that sent no sums counts as the worst.
    """
    known = np.array([own is not None for own in sums])
    means = np.array([own if own is not None else (0.0,) * 4 for own in sums]) / samples[:, None]
    weights = np.where(known, counted, 0.0)
    total = weights.sum()
    if not total:
        return np.full(len(sums), WORST_R2), {}
    pooled = weights @ means
    variance = pooled[3] / total - (pooled[2] / total) ** 2
    own_r2 = 1 - means[:, 0] / max(variance, 1e-30)
    r2 = np.where(known, np.maximum(WORST_R2, own_r2), WORST_R2)
    return r2, scores_of_sums(total, pooled.tolist())


def _trimmed_mean(values: FloatArray, weights: FloatArray) -> float:
    """Return the weighted mean without the lowest and the highest `_TRIM` of the weight."""
    order = np.argsort(values)
    ends = np.cumsum(weights[order]) / weights.sum()
    starts = np.concatenate([[0.0], ends[:-1]])
    kept = np.clip(np.minimum(ends, 1 - _TRIM) - np.maximum(starts, _TRIM), 0.0, None)
    return float((values[order] * kept).sum() / kept.sum())
