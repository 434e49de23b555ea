"""Any torch module as a learner: measured by closed forms where they hold, trained by weighted local SGD."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from fedkeep.core.ports import Job, Measurements
from fedkeep.core.types import AnyArray, Batch, LocalTraining, Scores, Vector
from fedkeep.learn.chain_trace import ChainTrace
from fedkeep.learn.flat import Layout
from fedkeep.learn.inspection import MeasurementsClass, choose_measurements, is_traceable
from fedkeep.learn.network import Network, as_tensor, seeded
from fedkeep.learn.torch_measurements import CHUNK
from fedkeep.learn.torch_training import is_stackable, train_alone, train_stacked
from fedkeep.learn.traced import TracedMeasurements

_INFERENCE_CHUNK = 1024
_TRACED_SAMPLES, _TRACED_MODELS = 12, 32
"""With more samples each, one model after the other was as fast or faster."""


class EmptyMeasurements:
    """What any model sees in an empty batch, which many layers would refuse to look at."""

    def __init__(self, gradient_size: int) -> None:
        self._gradient_size = gradient_size

    def losses(self) -> Scores:
        return np.zeros(0)

    def projections(self, direction: Vector) -> Scores:  # noqa: ARG002
        return np.zeros(0)

    def inner(self, other: Measurements) -> Scores:  # noqa: ARG002
        return np.zeros(0)

    def norms(self) -> Scores:
        return np.zeros(0)

    def head_norms(self) -> Scores:
        return np.zeros(0)

    def mean_gradient(self) -> Vector:
        return np.zeros(self._gradient_size, dtype=np.float32)

    def weighted_gradient(self, weights: Scores) -> Vector:  # noqa: ARG002 - there is nothing to weigh
        return self.mean_gradient()

    def activations(self) -> AnyArray:
        return np.zeros((0, 0), dtype=np.float32)


class TorchProbe:
    """A frozen torch model that measures samples."""

    def __init__(self, learner: TorchLearner, model: Vector) -> None:
        self._learner = learner
        self._model = np.array(model, dtype=np.float32)

    def measure(self, batch: Batch) -> Measurements:
        return self._learner.measure(self._model, batch)


class TorchLearner:
    """An architecture given by a factory of modules; `last_layers` restricts the valued parameters.

    One module serves all models, one at a time: calls from several threads wait for each other.

    >>> learner = TorchLearner(lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 2)))
    >>> learner.size, learner.layout.names
    (14, ('1.weight', '1.bias'))
    >>> batch = Batch(np.ones((5, 2, 3), dtype=np.float32), np.zeros(5, dtype=np.int64), np.arange(5))
    >>> learner.probe(learner.initial(0)).measure(batch).norms().shape
    (5,)
    """

    def __init__(self, factory: Callable[[], nn.Module], last_layers: int | None = None, chunk: int = CHUNK) -> None:
        self._factory = factory
        self._chunk = chunk
        self._network = Network(factory(), last_layers)
        self._stacks = True
        self._traces: bool | None = None
        self._measurements: MeasurementsClass | None = None

    @property
    def layout(self) -> Layout:
        return self._network.layout

    @property
    def size(self) -> int:
        return self._network.layout.size

    @property
    def gradient_size(self) -> int:
        return self._network.valued.size

    def tail(self, layers: int | None) -> int:
        return self._network.tail(layers)

    def load_statistics(self, named: Mapping[str, AnyArray]) -> None:
        """Gives frozen BatchNorm layers the running means and variances of these names."""
        self._network.load_statistics(named)

    def initial(self, seed: int) -> Vector:
        """The parameters of a new module, as its own layers initialise them."""
        with seeded(seed):
            module = self._factory()
        vector: Vector = torch.cat([p.detach().float().reshape(-1) for p in module.parameters()]).numpy()
        return vector

    def probe(self, model: Vector) -> TorchProbe:
        return TorchProbe(self, model)

    def measure(self, model: Vector, batch: Batch) -> Measurements:
        """What `model`, which must not change any more, sees in the batch."""
        if len(batch) == 0:
            return EmptyMeasurements(self.gradient_size)
        if self._measurements is None:
            self._measurements = choose_measurements(self._network, model, batch)
        return self._measurements(self._network, model, batch, self._chunk)

    def measure_many(self, models: Sequence[Vector], batches: Sequence[Batch]) -> list[Measurements]:
        """What each batch's own model sees in it; chains of layers see all small batches in one pass."""
        small = [c for c, batch in enumerate(batches) if 0 < len(batch) <= min(_TRACED_SAMPLES, self._chunk)]
        if small and self._traces is None:
            self._traces = is_traceable(self._network, models[small[0]], batches[small[0]])
        measured: dict[int, Measurements] = {}
        for start in range(0, len(small) if self._traces else 0, _TRACED_MODELS):
            measured |= self._traced(small[start : start + _TRACED_MODELS], models, batches)
        return [measured.get(c) or self.probe(models[c]).measure(batches[c]) for c in range(len(batches))]

    def _traced(
        self, chosen: Sequence[int], models: Sequence[Vector], batches: Sequence[Batch]
    ) -> dict[int, Measurements]:
        own = [batches[c] for c in chosen]
        trace = ChainTrace(self._network, [models[c] for c in chosen], own)
        return {
            c: TracedMeasurements(trace, self._network.valued, len(batch), place)
            for place, (c, batch) in enumerate(zip(chosen, own, strict=True))
        }

    def train(self, model: Vector, job: Job, local: LocalTraining) -> Vector:
        with self._network.training(job.seed):
            return train_alone(self._network, model, job, local)

    def train_many(self, model: Vector, jobs: Sequence[Job], local: LocalTraining) -> list[Vector]:
        """Where each job leads from the same model, in one call where that is possible and faster."""
        if self._stacks and is_stackable(self._network, jobs, local):
            try:
                with self._network.lock if self._network.chain else self._network.training(jobs[0].seed):
                    return train_stacked(self._network, model, jobs, local)
            except RuntimeError:  # layers that cannot be mapped over: recurrent ones, or ones that draw at random
                self._stacks = False
        return [self.train(model, job, local) for job in jobs]

    def logits(self, model: Vector, x: AnyArray) -> AnyArray:
        with self._network.lock:
            self._network.load(model)
            parts = [self._network.module(part) for part in torch.split(as_tensor(x), _INFERENCE_CHUNK)]
        scores: AnyArray = torch.cat(parts).numpy()
        return scores
