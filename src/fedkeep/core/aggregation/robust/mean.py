"""RobustMean: the four stages put together."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from fedkeep.core.aggregation.base import Aggregator, MergedReports, aggregation
from fedkeep.core.aggregation.fedavg import FedAvg
from fedkeep.core.aggregation.robust.clip import clip_to_usual, clip_weights
from fedkeep.core.aggregation.robust.filter import filter_updates
from fedkeep.core.aggregation.robust.reputation import reputation_weights
from fedkeep.core.aggregation.robust.statistics import UpdateStatistics
from fedkeep.core.aggregation.robust.validate import inconsistent_gradients
from fedkeep.core.aggregation.rows import row_norms, stacked_updates
from fedkeep.core.types import DeviceId, FloatArray, Report, Vector

_LENGTH_RATIO = 2.0
"""An update counts towards the length of the step with at most so many times the usual length."""


@aggregation("robust")
class RobustMean(Aggregator):
    """Eq. 2 over updates that were validated, clipped, filtered and reweighted.

    Each update is clipped to the usual length, and its weight to the usual weight. What conflicts
    with the direction of the others is projected out of the update of a device that keeps
    conflicting; one far out is filtered; one that hardly agrees counts little, and a newcomer less
    at first. The step is as long as it would be unclipped, so that honest fleets lose no speed. A
    local gradient counts where its device agrees with the fleet and its own update does not
    contradict it.

    References
    ----------
    docs/security.md; Cao et al., FLTrust, 2021; Sun et al., Can You Really Backdoor Federated
    Learning?, 2019; Karimireddy et al., Learning from History for Byzantine Robust Optimization,
    2021.
    """

    requires_limits = True
    verifies_gradients = True
    gradient_ratio = 2.0

    def aggregate(self, model: Vector, reports: Sequence[Report]) -> Vector:
        """Merge one round of a fleet of which nothing else is known."""
        return self.merge(model, dict(enumerate(reports)), UpdateStatistics()).model

    def merge(
        self, model: Vector, reports: Mapping[DeviceId, Report], statistics: UpdateStatistics
    ) -> MergedReports:
        """Merge a round with what earlier rounds showed of each device."""
        counted, filtered = self.reweight(model, reports, statistics)
        return MergedReports(FedAvg().aggregate(model, list(counted.values())), counted, filtered)

    def reweight(
        self, model: Vector, reports: Mapping[DeviceId, Report], statistics: UpdateStatistics
    ) -> tuple[dict[DeviceId, Report], tuple[DeviceId, ...]]:
        """Return the reports whose plain weighted mean is the robust one, and whose were filtered.

        Parameters
        ----------
        model : Vector
            The global model that the round began with.
        reports : Mapping[DeviceId, Report]
            Valid reports in the order of their devices' ids.
        statistics : UpdateStatistics
            The fleet's earlier updates; takes in this round's.
        """
        counted = {device: r for device, r in reports.items() if r.weight > 0}
        if not counted:
            return dict(reports), ()
        devices, senders = list(counted), list(counted.values())
        updates = stacked_updates(model, senders)

        inconsistent = inconsistent_gradients(senders, updates, statistics.gradient_layout)

        lengths = row_norms(updates)
        usual = statistics.median_length(lengths.tolist())
        clipped = clip_to_usual(updates, lengths, usual)
        weights = clip_weights([r.weight for r in senders], statistics)

        kept, projected, out = filter_updates(devices, clipped, statistics)
        inconsistent |= projected | out
        if out.all():
            out = np.zeros_like(out)  # they differ from earlier rounds alone
        weights[out] = 0.0

        weights *= reputation_weights(devices, statistics)

        scale = _length_preserving_scale(weights, kept, np.minimum(lengths, _LENGTH_RATIO * usual))
        if weights.any():  # a round of nobody but those that conflict says nothing of the direction
            statistics.learn_reference(scale * (weights @ kept) / weights.sum())

        merged = dict(reports)
        moved = np.empty(len(model))
        for row, device in enumerate(devices):
            np.add(np.multiply(kept[row], scale, out=moved), model, out=moved)
            merged[device] = replace(
                counted[device],
                model=moved.astype(np.float32),
                weight=float(weights[row]),
                local_gradient=None if inconsistent[row] else counted[device].local_gradient,
            )
        return merged, tuple(device for row, device in enumerate(devices) if out[row])


def _length_preserving_scale(
    weights: FloatArray, updates: FloatArray, lengths: FloatArray
) -> float:
    """Return the factor that gives the updates, together, these lengths again."""
    left = float(weights @ row_norms(updates))
    return float(weights @ lengths) / left if left > 0 else 1.0
