"""The gist, a control variate with memory: options, estimate, noise model, correction and codec.

docs/gist.md has the method and its equations.
"""

from fedkeep.core.gist.correction import (
    Correction,
    GistFigures,
    NoiseCovariance,
    StoredGradients,
)
from fedkeep.core.gist.estimate import Gist
from fedkeep.core.gist.noise_model import (
    LinearEstimate,
    NoiseModel,
    StoreSummary,
    best_linear_estimate,
    pooled_mean,
)
from fedkeep.core.gist.options import GistOptions
from fedkeep.core.gradients.codec import Encoding, pack, packed_bytes, unpack

__all__ = [
    "Correction",
    "Encoding",
    "Gist",
    "GistFigures",
    "GistOptions",
    "LinearEstimate",
    "NoiseCovariance",
    "NoiseModel",
    "StoreSummary",
    "StoredGradients",
    "best_linear_estimate",
    "pack",
    "packed_bytes",
    "pooled_mean",
    "unpack",
]
