"""Stage 2: updates, weights and local gradients are clipped to what is usual in the fleet."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from fedkeep.core.aggregation.robust.statistics import UpdateStatistics
from fedkeep.core.aggregation.rows import UpdateRows
from fedkeep.core.errors import RejectionReason
from fedkeep.core.outliers import MIN_OBSERVATIONS, median, weight_cap
from fedkeep.core.types import DeviceId, FloatArray, Report, Vector

_REJECTED_RATIO = 10.0
"""Updates beyond the limit are clipped to it; those beyond so many times the limit are rejected."""
_TINY = 1e-30


class ClippedReports:
    """The reports of a round without outlying lengths, and what was clipped or rejected.

    Parameters
    ----------
    model : Vector
        The model that the updates start from.
    reports : Mapping[DeviceId, Report]
        Valid reports.
    statistics : UpdateStatistics
        The fleet's earlier updates.
    ratio : float
        How many times the usual length an update may have.
    """

    def __init__(
        self,
        model: Vector,
        reports: Mapping[DeviceId, Report],
        statistics: UpdateStatistics,
        ratio: float,
    ) -> None:
        start = model.astype(np.float64)
        self.reports = dict(sorted(reports.items()))
        """Those that count, in the order of the devices' ids."""
        self.findings: list[tuple[DeviceId, RejectionReason, str]] = []
        """Which device, why, and in words."""
        weighty = {device: report for device, report in self.reports.items() if report.weight > 0}
        lengths = UpdateRows.of(model, list(weighty.values())).norms
        norms = dict(zip(weighty, lengths.tolist(), strict=True))
        self.lengths = list(norms.values())
        """Of all updates, rejected ones too."""
        limit = statistics.max_length(self.lengths, ratio)
        for device, norm in norms.items():
            if norm > _REJECTED_RATIO * limit:
                del self.reports[device]
                detail = f"update norm {norm:g} exceeds the limit {_REJECTED_RATIO * limit:.3g}"
                self.findings.append((device, RejectionReason.LARGE_UPDATE, detail))
            elif norm > limit:
                report = self.reports[device]
                clipped = (start + (report.model - start) * (limit / norm)).astype(np.float32)
                self.reports[device] = replace(report, model=clipped)
                detail = f"update norm {norm:g} is clipped to {limit:.3g}"
                self.findings.append((device, RejectionReason.UPDATE_CUT, detail))


class GradientClip:
    """Clips local gradients to a multiple of their median length over all devices' latest.

    Parameters
    ----------
    ratio : float
        How many times the median a gradient may be long.
    """

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self.norms: dict[DeviceId, float] = {}
        """The length of each device's latest gradient."""

    def clip(self, gradients: Mapping[DeviceId, Vector]) -> dict[DeviceId, Vector]:
        """Return the gradients, clipped by the fleet's lengths; take in their own."""
        self.norms |= {
            device: float(np.linalg.norm(gradient.astype(np.float64)))
            for device, gradient in gradients.items()
        }
        enough = len(self.norms) >= MIN_OBSERVATIONS
        usual = median(list(self.norms.values())) if enough else np.inf
        limit = self._ratio * usual
        clipped = dict(gradients)
        for device, gradient in gradients.items():
            if self.norms[device] > limit:
                clipped[device] = gradient * np.float32(limit / self.norms[device])
        return clipped

    def forget(self, device: DeviceId) -> None:
        """Forget a device that has left."""
        self.norms.pop(device, None)


def clip_to_usual(updates: UpdateRows, lengths: FloatArray, usual: float) -> UpdateRows:
    """Return the updates, each at most of the usual length."""
    return updates.scaled(np.minimum(1.0, usual / np.maximum(lengths, _TINY)))


def clip_weights(weights: list[float], statistics: UpdateStatistics) -> FloatArray:
    """Return the weights, each at most what weights usually are; take them in."""
    clipped: FloatArray = np.minimum(weights, weight_cap(statistics.learn_weights(weights)))
    return clipped
