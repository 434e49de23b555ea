"""Any torch module as a learner: measured by closed forms where they hold, trained by weighted local SGD.

Which way of measuring is right is found out at the first look: three samples are measured one by one by plain backprop,
then as a batch. That costs a few milliseconds once, and means that a module which calls a layer twice, ties weights, or
mixes samples in a way no list of layer types could foresee is found out rather than measured wrongly.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from torch import nn

from fedkeep.core.errors import FedkeepError
from fedkeep.core.ports import Job, Measurements
from fedkeep.core.types import AnyArray, Batch, LocalTraining, Vector
from fedkeep.learn.jobs import FrozenModel
from fedkeep.learn.layers import as_tensor, is_bilinear
from fedkeep.learn.measurements import BatchMeasurements, ChunkedMeasurements, TracedMeasurements
from fedkeep.learn.network import CHUNK, Network, seeded
from fedkeep.learn.torch_measurements import AutogradMeasurements, ChainTrace, TorchMeasurements
from fedkeep.learn.torch_training import is_stackable, train_alone, train_stacked

MeasurementsClass: TypeAlias = type[TorchMeasurements] | type[AutogradMeasurements]

_TRACED_SAMPLES, _TRACED_MODELS = 12, 32
"""With more samples each, one model after the other was as fast or faster."""
_TOLERANCE = 1e-3


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
        self._factory, self._chunk = factory, chunk
        self._network = Network(factory(), last_layers)
        self.layout = self._network.layout
        self.size, self.gradient_size = self.layout.size, self._network.valued.size
        self._traces: bool | None = None
        self._measurements: MeasurementsClass | None = None

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

    def probe(self, model: Vector) -> FrozenModel:
        return FrozenModel(self, model)

    def measure_many(self, models: Sequence[Vector], batches: Sequence[Batch]) -> list[Measurements]:
        """What each batch's own model, which must not change any more, sees in it: all small ones of chains at once."""
        small = [c for c, batch in enumerate(batches) if 0 < len(batch) <= min(_TRACED_SAMPLES, self._chunk)]
        if small and self._traces is None:
            self._traces = _Trial(self._network, models[small[0]], batches[small[0]]).is_traceable()
        measured: dict[int, Measurements] = {}
        for start in range(0, len(small) if self._traces else 0, _TRACED_MODELS):
            group = small[start : start + _TRACED_MODELS]
            trace = ChainTrace(self._network, [models[c] for c in group], [batches[c] for c in group])
            for place, c in enumerate(group):
                measured[c] = TracedMeasurements(trace, self.gradient_size, len(batches[c]), place)
        return [measured.get(c) or self._alone(models[c], batches[c]) for c in range(len(batches))]

    def _alone(self, model: Vector, batch: Batch) -> Measurements:
        if 0 < len(batch) <= self._chunk:
            return self._piece(model, batch)
        return ChunkedMeasurements(partial(self._piece, model), batch, self._chunk, self.gradient_size)

    def _piece(self, model: Vector, batch: Batch) -> BatchMeasurements:
        if self._measurements is None:
            self._measurements = _Trial(self._network, model, batch).chosen()
        return self._measurements(self._network, model, batch)

    def train(self, model: Vector, job: Job, local: LocalTraining) -> Vector:
        return self.train_many(model, [job], local)[0]

    def train_many(self, model: Vector, jobs: Sequence[Job], local: LocalTraining) -> list[Vector]:
        """Where each job leads from the same model, in one call where that is possible and faster."""
        if is_stackable(self._network, jobs, local):
            with self._network.lock:
                return train_stacked(self._network, model, jobs, local)
        trained = []
        for job in jobs:
            with self._network.training(job.seed):
                trained.append(train_alone(self._network, model, job, local))
        return trained

    def logits(self, model: Vector, x: AnyArray) -> AnyArray:
        with self._network.lock:
            self._network.load(model)
            parts = [self._network.module(part) for part in torch.split(as_tensor(x), CHUNK)]
        scores: AnyArray = torch.cat(parts).numpy()
        return scores


class _Trial:
    """Three different samples, made from the first of a batch, as plain backprop of each alone measures them."""

    def __init__(self, network: Network, model: Vector, batch: Batch) -> None:
        self._network, self._model = network, model
        x = np.stack([np.roll(batch.x[0].ravel(), shift).reshape(batch.x[0].shape) for shift in (0, 1, 5)])
        self._batch = Batch(x, np.repeat(batch.y[:1], 3), np.arange(3))
        self._direction = np.random.default_rng(0).normal(size=network.valued.size).astype(np.float32)
        alone = [AutogradMeasurements(network, model, self._batch.take(slice(i, i + 1))) for i in range(3)]
        self._losses = np.concatenate([one.losses() for one in alone])
        gradients = np.stack([one.mean_gradient() for one in alone]).astype(np.float64)
        self._norms = np.linalg.norm(gradients, axis=1)
        self._projections = gradients @ self._direction

    def chosen(self) -> MeasurementsClass:
        """The fastest measurements that are exact for this module."""
        with self._network.lock:
            together = AutogradMeasurements(self._network, self._model, self._batch).losses()
            if not np.allclose(together, self._losses, rtol=_TOLERANCE, atol=_TOLERANCE):
                raise FedkeepError(
                    "the model's loss of a sample depends on the other samples of its batch, so no sample has a "
                    "gradient of its own: replace the layer that mixes samples"
                )
            try:
                closed = all(map(is_bilinear, self._network.valued_layers))
                right = closed and self._agrees(TorchMeasurements(self._network, self._model, self._batch))
            except (RuntimeError, ValueError):  # a layer called twice or never, or an output changed in place
                right = False
        return TorchMeasurements if right else AutogradMeasurements

    def is_traceable(self) -> bool:
        """Whether the module is a chain of layers whose one pass over many models sees what each alone would see."""
        if self._network.chain is None or not self._network.chain.ends_linear:
            return False
        try:
            trace = ChainTrace(self._network, [self._model], [self._batch])
            return self._agrees(TracedMeasurements(trace, self._network.valued.size, 3))
        except RuntimeError:  # a linear layer that is used at several places, for instance
            return False

    def _agrees(self, seen: Measurements) -> bool:
        scale = float(np.linalg.norm(self._direction) * self._norms.max()) + 1e-12
        found = seen.projections(self._direction)
        right = np.allclose(found, self._projections, rtol=0.0, atol=_TOLERANCE * scale)
        return right and np.allclose(seen.norms(), self._norms, rtol=_TOLERANCE)
