"""RobustMean: the four stages put together."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf

import numpy as np

from fedkeep.core.aggregation.base import Aggregator, MergedReports, aggregation
from fedkeep.core.aggregation.robust.clip import clip_to_usual, clip_weights
from fedkeep.core.aggregation.robust.filter import filter_updates
from fedkeep.core.aggregation.robust.reputation import reputation_weights
from fedkeep.core.aggregation.robust.statistics import UpdateStatistics
from fedkeep.core.aggregation.robust.validate import inconsistent_gradients
from fedkeep.core.aggregation.rows import UpdateRows
from fedkeep.core.bounds import check_range
from fedkeep.core.types import DeviceId, FloatArray, Report, Vector

_LENGTH_RATIO = 2.0
"""An update counts towards the length of the step with at most so many times the usual length."""
_GRADIENT_REPUTATION = 0.5
"""Under `strict_gradients` the local gradient of whoever counts less than this does not count."""


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

    strict_gradients: bool = False
    """Whether a local gradient or gist counts only where it agrees with its device's update about
    as well as those of the others do, and the device with the fleet. It stops attackers who know
    the rule from steering the fleet by gists that agree with their updates just enough; a device
    with news may lose its gist by it."""
    gradient_ratio: float = 2.0
    """Local gradients or gists longer than so many times the median are clipped to that. With 1
    devices that collude move the fleet by their gists half as far; honest fleets learn from long
    gists less (docs/security.md)."""

    requires_limits = True
    verifies_gradients = True

    def __post_init__(self) -> None:
        check_range(self, "gradient_ratio", above=0, below=inf)

    def aggregate(self, model: Vector, reports: Sequence[Report]) -> Vector:
        """Merge one round of a fleet of which nothing else is known."""
        return self.merge(model, dict(enumerate(reports)), UpdateStatistics()).model

    def merge(
        self, model: Vector, reports: Mapping[DeviceId, Report], statistics: UpdateStatistics
    ) -> MergedReports:
        """Merge a round with what earlier rounds showed of each device.

        The plain weighted mean of the models that count is the new model.
        """
        devices = [device for device, report in reports.items() if report.weight > 0]
        if not devices:
            return MergedReports(model, reports)
        senders = [reports[device] for device in devices]
        updates = UpdateRows.of(model, senders)

        inconsistent = inconsistent_gradients(
            senders, updates, statistics.gradient_layout, strict=self.strict_gradients
        )

        lengths = updates.norms
        usual = statistics.median_length(lengths.tolist())
        clipped = clip_to_usual(updates, lengths, usual)
        weights = clip_weights([r.weight for r in senders], statistics)

        kept, projected, out = filter_updates(devices, clipped, statistics)
        inconsistent |= projected | out
        if out.all():
            out = np.zeros_like(out)  # they differ from earlier rounds alone
        weights[out] = 0.0

        reputation = reputation_weights(devices, statistics)
        weights *= reputation
        if self.strict_gradients:
            inconsistent |= reputation < _GRADIENT_REPUTATION

        scale = _length_preserving_scale(weights, kept, np.minimum(lengths, _LENGTH_RATIO * usual))
        counted = CountedModels(model, kept, scale)
        new = model
        if weights.any():  # a round of nobody but those that conflict says nothing of the direction
            new, step = counted.merged(weights)
            statistics.learn_reference(step)

        merged = dict(reports)
        for row, device in enumerate(devices):
            gradient = None if inconsistent[row] else reports[device].local_gradient
            merged[device] = replace(
                reports[device], weight=float(weights[row]), local_gradient=gradient
            )
        return MergedReports(
            new,
            merged,
            tuple(device for row, device in enumerate(devices) if out[row]),
            {device: partial(counted.model_of, row) for row, device in enumerate(devices)},
        )


class CountedModels:
    """The models of a round's reports as they count: after all stages, in float32.

    Parameters
    ----------
    model : Vector
        The global model that the round began with.
    updates : UpdateRows
        What is left of the reports' updates, (n, P).
    scale : float
        The factor by which all of them count.
    """

    def __init__(self, model: Vector, updates: UpdateRows, scale: float) -> None:
        self._model, self._updates, self._scale = model, updates, scale

    def model_of(self, row: int) -> Vector:
        """Return the model of one report."""
        moved = np.empty((1, len(self._model)))
        self._updates.read(slice(row, row + 1), slice(0, len(self._model)), moved)
        moved *= self._scale
        moved += self._model
        model: Vector = moved[0].astype(np.float32)
        return model

    def merged(self, weights: FloatArray) -> tuple[Vector, FloatArray]:
        """Return the weighted mean of the models, and the step to it before rounding, (P,)."""
        counted = np.flatnonzero(weights)
        shares = weights[counted] / weights.sum()
        model, step = np.empty_like(self._model), np.empty(len(self._model))
        buffer = np.empty(0)
        rounded = np.empty(0, dtype=np.float32)
        for part, block in self._updates.column_blocks():
            shape = len(counted), part.stop - part.start
            if len(buffer) < (numbers := shape[0] * shape[1]):
                buffer, rounded = np.empty(numbers), np.empty(numbers, dtype=np.float32)
            own, single = buffer[:numbers].reshape(shape), rounded[:numbers].reshape(shape)
            np.take(block, counted, axis=0, out=own, mode="clip")
            own *= self._scale
            np.matmul(shares, own, out=step[part])
            start = self._model[part].astype(np.float64)
            np.add(own, start, out=single, casting="same_kind")
            np.subtract(single, start, out=own)
            model[part] = start + shares @ own
        return model, step


def _length_preserving_scale(
    weights: FloatArray, updates: UpdateRows, lengths: FloatArray
) -> float:
    """Return the factor that gives the updates, together, these lengths again."""
    left = float(weights @ updates.norms)
    return float(weights @ lengths) / left if left > 0 else 1.0
