"""From received reports to a model and the gradients that count: the same stages everywhere.

The simulator, a served fleet and Keeper's strategy run this one class with one set of limits.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from fedkeep.core.aggregation.base import Aggregator, MergedReports
from fedkeep.core.aggregation.robust.clip import ClippedReports, GradientClip
from fedkeep.core.aggregation.robust.statistics import UpdateStatistics
from fedkeep.core.errors import ConfigError, RejectionReason
from fedkeep.core.gradients.layout import GradientLayout
from fedkeep.core.outliers import weight_cap
from fedkeep.core.screening import Limits, screen_report, screen_sketch
from fedkeep.core.state import add_prefix, put_table, strip_prefix, take_table
from fedkeep.core.types import DeviceId, Report, State, Vector

_STATISTICS, _NORMS = "usual", "norms"
"""State keys."""


@dataclass(frozen=True, eq=False)
class MergedRound:
    """A round after all stages."""

    merged: MergedReports
    reports: Mapping[DeviceId, Report]
    """The reports that took part, as they came out of the length limit."""
    findings: tuple[tuple[DeviceId, RejectionReason, str], ...]
    """What was clipped or rejected by its length."""

    @property
    def dropped_gradients(self) -> list[DeviceId]:
        """Devices whose local gradient does not count; what they sent earlier counts no more."""
        return [
            device
            for device, report in self.reports.items()
            if report.local_gradient is not None
            and self.merged.reports[device].local_gradient is None
        ]


class UpdatePipeline:
    """Validates reports, merges a round by an aggregator, and clips the gradients that count.

    Parameters
    ----------
    aggregator : Aggregator
        The rule; its class attributes say which checks it needs.
    limits : Limits
        With `enabled = false` nothing is clipped, capped or rejected but for its form.
    layout : GradientLayout, optional
        How local gradients are represented, where it is not number by number.
    noisy : bool
        Whether they come with noise, which makes the two products of a sketch differ.

    Raises
    ------
    ConfigError
        If the rule clips by itself and the limits are off.
    """

    def __init__(
        self,
        aggregator: Aggregator,
        limits: Limits,
        layout: GradientLayout | None = None,
        *,
        noisy: bool = False,
    ) -> None:
        if aggregator.requires_limits and not limits.enabled:
            raise ConfigError(
                f'aggregation "{aggregator.label()}" clips updates, which limits.enabled = false '
                'switches off: choose another, such as aggregation = { name = "fedavg" }'
            )
        self._aggregator, self._limits = aggregator, limits
        self.statistics = UpdateStatistics(layout)
        self._noisy = noisy
        self._gradients = GradientClip(aggregator.gradient_ratio)
        self._rate_cap = np.inf

    def validate(
        self, report: Report, model: Vector, gradient_size: int, max_weight: float
    ) -> Report:
        """Return the report as far as it counts.

        Raises
        ------
        RejectedError
            If any part of it is invalid.
        """
        valid = screen_report(report, model, gradient_size, max_weight, self._limits)
        layout, gradient = self.statistics.gradient_layout, valid.local_gradient
        if layout is not None and gradient is not None and not self._noisy:
            screen_sketch(gradient, layout, self._limits)
        return valid

    def merge(self, model: Vector, reports: Mapping[DeviceId, Report]) -> MergedRound:
        """Merge the valid reports of a round."""
        ordered = dict(sorted(reports.items()))
        if not self._limits.enabled:
            return MergedRound(self._aggregator.merge(model, ordered, self.statistics), ordered, ())
        clipped = ClippedReports(model, ordered, self.statistics, self._limits.update_ratio)
        merged = self._aggregator.merge(model, clipped.reports, self.statistics)
        self.statistics.learn_lengths(clipped.lengths)
        return MergedRound(merged, clipped.reports, tuple(clipped.findings))

    def clip_gradients(
        self, reports: Mapping[DeviceId, Report], rate: Callable[[DeviceId], float]
    ) -> dict[DeviceId, tuple[Vector, float]]:
        """Return the reports' local gradients as they count, each with its rate."""
        found = {d: r.local_gradient for d, r in reports.items() if r.local_gradient is not None}
        if not self._limits.enabled:
            return {d: (gradient, rate(d)) for d, gradient in found.items()}
        clipped = self._gradients.clip(found)
        return {d: (gradient, min(rate(d), self._rate_cap)) for d, gradient in clipped.items()}

    def follow_plan(self, rates: Mapping[DeviceId, float]) -> None:
        """Take over the rates of a new plan, in whose units weights are from now on."""
        self.set_rates(rates)
        self.statistics.forget_weights()

    def set_rates(self, rates: Mapping[DeviceId, float]) -> None:
        """Take over the fleet's rates, by which a rule may cap the weight of a local gradient."""
        if not self._aggregator.verifies_gradients:
            return
        positive = np.array([rate for rate in rates.values() if rate > 0])
        self._rate_cap = weight_cap(positive) if len(positive) else np.inf

    def forget(self, device: DeviceId) -> None:
        """Forget a device that has left."""
        self._gradients.forget(device)
        self.statistics.forget(device)

    def snapshot(self) -> State:
        """Return the memory of all stages as plain arrays."""
        statistics = add_prefix(_STATISTICS, self.statistics.snapshot())
        return statistics | put_table(_NORMS, self._gradients.norms)

    def restore(self, state: State) -> None:
        """Take over what `snapshot` returned."""
        self.statistics.restore(strip_prefix(_STATISTICS, state))
        self._gradients.norms = take_table(_NORMS, state)
