"""Mean gradients of streams: summed on a device, sent, and merged over the fleet (Eqs. 7 and 8)."""

from fedkeep.core.gradients.accumulator import GradientAccumulator, clip_weights, mean_gradient
from fedkeep.core.gradients.fleet import (
    Estimate,
    GivenEstimator,
    GlobalEstimator,
    IncrementalEstimator,
    RoundMeanEstimator,
    global_estimator,
)
from fedkeep.core.gradients.local import LocalGradientEstimator

__all__ = [
    "Estimate",
    "GivenEstimator",
    "GlobalEstimator",
    "GradientAccumulator",
    "IncrementalEstimator",
    "LocalGradientEstimator",
    "RoundMeanEstimator",
    "clip_weights",
    "global_estimator",
    "mean_gradient",
]
