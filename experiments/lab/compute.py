"""What a method asks of a device, counted in forward passes of one sample: a backward pass counts as two."""

from __future__ import annotations

from fedkeep.sim.experiment import Experiment
from lab.summaries import Curve

_FORWARD, _GRADIENT = 1, 3
_LOSSES = {"high-loss", "fedbalancer"}
_GRADIENTS = {"ode", "gradient-norm", "sld"}


def forward_passes(experiment: Experiment, curve: Curve) -> float:
    """Over a whole run: training, measuring what arrives, and measuring what is stored under every new model."""
    arrival = passes_per_arrival(experiment)
    stored = curve.samples_trained / experiment.train.epochs
    measured_again = 2 * _GRADIENT if _has_gist(experiment) else arrival
    return _GRADIENT * curve.samples_trained + arrival * curve.samples_valued + measured_again * stored


def passes_per_arrival(experiment: Experiment) -> int:
    """To score a sample that arrives, or to take it into a gist."""
    if _has_gist(experiment):
        return _GRADIENT
    policy = experiment.names["policy"]
    if policy in _LOSSES or (policy in _GRADIENTS and "last_layers" in experiment.model):
        return _FORWARD
    return _GRADIENT if policy in _GRADIENTS else 0


def _has_gist(experiment: Experiment) -> bool:
    gist = experiment.resolved().get("gist", {"name": "none"})
    return bool(gist["name"] != "none")
