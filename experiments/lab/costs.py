"""What a method asks of a device: forward passes of one sample (a backward pass counts as two), and bytes at rest."""

import math

from fedkeep.core.encoding import SCALE_BYTES, SampleCodec
from fedkeep.sim.assembly import build_learner, load_data
from fedkeep.sim.experiment import Experiment
from lab.curves import Curve

_FORWARD, _GRADIENT = 1, 3
_LOSSES = {"high-loss", "fedbalancer"}
_GRADIENTS = {"ode", "gradient-norm", "sld"}
_FLOAT, _BLOCK = 4, 64
"""Bytes of a number in full, and numbers that share a scale in int8."""


def forward_passes(experiment: Experiment, curve: Curve) -> float:
    """Over a whole run: training, measuring what arrives, and measuring what is stored under every new model.

    A gist measures what is stored under the old model, the new one, and one step ahead.
    """
    policy, gist = experiment.names["policy"], experiment.gist.name != "none"
    arrival = _GRADIENT if gist or policy in _GRADIENTS else 0  # to take it into a gist, or to score it
    if not gist and (policy in _LOSSES or (policy in _GRADIENTS and "last_layers" in experiment.model)):
        arrival = _FORWARD
    stored = curve.samples_trained / experiment.train.epochs
    measured_again = 3 * _GRADIENT if gist else arrival
    return _GRADIENT * curve.samples_trained + arrival * curve.samples_valued + measured_again * stored


def bytes_at_rest(experiment: Experiment) -> int:
    """The stored samples and the gist as they are kept; the model is on every device anyway."""
    data = load_data(experiment.task, experiment.seed)
    codec = SampleCodec(data.sample_shape, encoding=experiment.stream.encoding)
    samples = experiment.storage.capacity * codec.nbytes
    samples += SCALE_BYTES * math.prod(data.sample_shape) if codec.quantised else 0
    if experiment.gist.name == "none":
        return samples
    return samples + vector_bytes(build_learner(experiment, data).gradient_size, experiment.gist.encoding)


def vector_bytes(numbers: int, encoding: str) -> int:
    if encoding == "int8":
        return numbers + _FLOAT * math.ceil(numbers / _BLOCK)
    return numbers * (_FLOAT if encoding == "float32" else _FLOAT // 2)
