"""Any torch module as a learner: by closed forms where they hold, trained by weighted local SGD.

Which way of measuring is right is found out at the first batch: three samples are measured one by
one by plain backprop, then together. That costs a few milliseconds once. A module which calls a
layer twice, ties weights, or mixes samples in a way no list of layer types could foresee is found
out rather than measured wrongly.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.random import fork_rng

from fedkeep.core.errors import FedkeepError
from fedkeep.core.protocols import PerSampleGradients, TrainingJob
from fedkeep.core.types import AnyArray, Batch, LocalTraining, Vector
from fedkeep.learn.backends import (
    BatchMeasurements,
    ChunkedMeasurements,
    FrozenModel,
    TracedMeasurements,
    local_sgd,
)
from fedkeep.learn.batched_layers import Linear, Pass, is_bilinear
from fedkeep.learn.network import CHUNK, Network
from fedkeep.learn.objective import Objective, as_tensor, closed_error
from fedkeep.learn.torch_measurements import AutogradMeasurements, ChainTrace, TorchMeasurements

MeasurementsClass: TypeAlias = type[TorchMeasurements] | type[AutogradMeasurements]
_TRACED_SAMPLES, _TRACED_MODELS = 12, 32
"""With more samples each, one model after the other was as fast or faster."""
_STACKED_SAMPLES = 24
"""With more samples each, training one by one was as fast, with LeNet and the traffic CNN."""
_TOLERANCE = 1e-3


class TorchLearner:
    """An architecture given by a factory of modules; `last_layers` restricts the valued parameters.

    One module serves all models, one at a time: calls from several threads wait for each other.

    >>> learner = TorchLearner(lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 2)))
    >>> learner.size, learner.layout.names
    (14, ('1.weight', '1.bias'))
    >>> x, y = np.ones((5, 2, 3), dtype=np.float32), np.zeros(5, dtype=np.int64)
    >>> batch = Batch(x, y, np.arange(5))
    >>> learner.probe(learner.initial(0)).measure(batch).norms().shape
    (5,)
    """

    def __init__(
        self,
        factory: Callable[[], nn.Module],
        last_layers: int | None = None,
        chunk: int = CHUNK,
        objective: Objective | None = None,
    ) -> None:
        self._factory, self._chunk = factory, chunk
        self._network = network = Network(factory(), last_layers, objective)
        self.layout, self.size, self.gradient_size = (
            network.layout,
            network.layout.size,
            network.valued.size,
        )
        self.tail, self.gradient_shapes = network.tail, network.gradient_shapes
        self.valued_names = network.valued.names
        self.constants, self.load_constants = network.constants, network.load_constants
        self._descend = partial(local_sgd, self.layout, self.gradient_size, as_tensor)
        self._ways: tuple[MeasurementsClass, bool] | None = None

    def initial(self, seed: int) -> Vector:
        """Make the parameters of a new module, as its own layers initialise them."""
        with fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            module = self._factory()
        trained = [p for p in module.parameters() if p.requires_grad]
        return torch.cat([p.detach().float().reshape(-1) for p in trained]).cpu().numpy()

    def probe(self, model: Vector) -> FrozenModel:
        """Freeze a model to measure samples with."""
        return FrozenModel(self, model)

    def measure_many(
        self, models: Sequence[Vector], batches: Sequence[Batch]
    ) -> list[PerSampleGradients]:
        """Measure each batch under its own model, which must not change any more.

        All small batches of chains of layers are measured at once.
        """
        network = self._network
        if network.objective.pool is not None:
            batches = [network.objective.dense(batch) for batch in batches]
        batches = [network.objective.prepared(batch) for batch in batches]
        small = [
            c
            for c, batch in enumerate(batches)
            if 0 < len(batch) <= min(_TRACED_SAMPLES, self._chunk)
        ]
        if not small or not self._ways_for(models[small[0]], batches[small[0]])[1]:
            small = []
        measured: dict[int, PerSampleGradients] = {}
        for start in range(0, len(small), _TRACED_MODELS):
            group = small[start : start + _TRACED_MODELS]
            trace = ChainTrace(
                self._network, [models[c] for c in group], [batches[c] for c in group]
            )
            for place, c in enumerate(group):
                measured[c] = TracedMeasurements(trace, len(batches[c]), place)
        return [measured.get(c) or self._alone(models[c], batches[c]) for c in range(len(batches))]

    def _alone(self, model: Vector, batch: Batch) -> BatchMeasurements:
        if 0 < len(batch) <= self._chunk:
            return self._ways_for(model, batch)[0](self._network, model, batch)
        return ChunkedMeasurements(
            partial(self._alone, model), batch, self._chunk, self.gradient_size
        )

    def _ways_for(self, model: Vector, batch: Batch) -> tuple[MeasurementsClass, bool]:
        if not self._network.plain:
            return AutogradMeasurements, False
        if self._ways is None:
            with self._network.lock:
                self._ways = ways_to_measure(self._network, model, batch)
        return self._ways

    def train(self, model: Vector, job: TrainingJob, local: LocalTraining) -> Vector:
        """Train by weighted local SGD (Eq. 12)."""
        return self.train_many(model, [job], local)[0]

    def train_many(
        self, model: Vector, jobs: Sequence[TrainingJob], local: LocalTraining
    ) -> list[Vector]:
        """Train each job from the same model, in one call where that is faster."""
        network = self._network
        objective = network.objective
        if objective.pool is not None and not network.plain:
            raise FedkeepError("a model with a loss of its own is trained by its user's loop")
        jobs = [replace(job, batch=objective.prepared(job.batch)) for job in jobs]
        most = max((len(job.batch) for job in jobs), default=0)
        if network.chain is not None and 0 < most <= _STACKED_SAMPLES and local.batch_size is None:
            models = as_tensor(model).repeat(len(jobs), 1)
            self._descend(models, jobs, local, self._chained)
            return list(models.numpy())
        trained = []
        way = self._differentiated if objective.stacked else self._by_own_loss
        for job in jobs:
            with network.loaded(model, frozen=False), network.training(job.seed):
                self._descend(network.flat[None], [job], local, way)
                trained.append(network.flat.numpy().copy())
        return trained

    def _chained(
        self, parameters: Sequence[Tensor], x: Tensor, y: Tensor, share: Tensor
    ) -> Sequence[Tensor]:
        """Gradients of chains of layers, by matrix products; padding has no share."""
        passed = Pass(self._network.chain or [], parameters, x)
        error = closed_error(self._network.objective.closed, passed.logits, y)
        return passed.gradients(error.mul_(share[:, None]))

    def _differentiated(
        self, _: Sequence[Tensor], x: Tensor, y: Tensor, share: Tensor
    ) -> Sequence[Tensor]:
        """Gradients of the one loaded model by autograd, as many samples as stay in the cache."""
        network, closed = self._network, self._network.objective.closed

        def weighted(part: Tensor, targets: Tensor, own: Tensor) -> Tensor:
            logits = network.module(part)
            error = closed_error(closed, logits.detach(), targets).mul_(own[:, None])
            return torch.sum(logits * error)

        return self._summed(weighted, x, y, share)

    def _by_own_loss(
        self, _: Sequence[Tensor], x: Tensor, y: Tensor, share: Tensor
    ) -> Sequence[Tensor]:
        """Gradients of the one loaded model by autograd, through a loss of the user's."""
        network = self._network

        def weighted(part: Tensor, targets: Tensor, own: Tensor) -> Tensor:
            losses = network.objective.losses(network.module, part, targets)
            return torch.sum(losses * own)

        return self._summed(weighted, x, y, share)

    def _summed(
        self, weighted: Callable[[Tensor, Tensor, Tensor], Tensor], *columns: Tensor
    ) -> Sequence[Tensor]:
        """Add up the gradients of a weighted loss, over as many samples as stay in the cache."""
        total: Sequence[Tensor] = ()
        for rows in zip(*(torch.split(column[0], CHUNK) for column in columns), strict=True):
            found = torch.autograd.grad(
                weighted(*rows), self._network.parameters, materialize_grads=True
            )
            total = (
                [one + other for one, other in zip(total, found, strict=True)] if total else found
            )
        return total

    @property
    def loss(self) -> "TorchLoss":
        """The loss of outputs that are arrays."""
        return TorchLoss(self._network.objective)

    def logits(self, model: Vector, x: AnyArray) -> AnyArray:
        """Compute the module's outputs, (n, outputs)."""
        network = self._network
        with network.loaded(model, frozen=False):
            return torch.cat(
                [network.module(part) for part in torch.split(as_tensor(x), CHUNK)]
            ).numpy()

    def logits_of(self, model: Vector, numbers: AnyArray) -> AnyArray:
        """Compute the outputs for samples of the objective's pool, by their numbers, (n, 1)."""
        network = self._network
        with network.loaded(model, frozen=False):
            return network.objective.outputs_of(network.module, numbers).numpy()


@dataclass(frozen=True)
class TorchLoss:
    """What an evaluation asks of a loss that is computed in torch."""

    objective: Objective

    def targets(self, y: AnyArray, outputs: int) -> AnyArray:  # noqa: ARG002 - `losses` does it
        """Take targets as they are."""
        return y

    def predictions(self, outputs: AnyArray) -> AnyArray:
        """Give what outputs predict, in the targets' own units."""
        return self.objective.predictions(outputs)

    def losses(self, outputs: AnyArray, y: AnyArray) -> AnyArray:
        """Compute the loss of each sample, (n,)."""
        return self.objective.of_arrays(outputs, y)


def ways_to_measure(
    network: Network, model: Vector, batch: Batch
) -> tuple[MeasurementsClass, bool]:
    """Find the fastest measurements that are exact for this module.

    Three different samples, made from the first of a batch, must be seen as plain backprop of each
    alone sees them.

    Returns
    -------
    tuple
        The measurements, and whether one pass of many models is exact, too.
    """
    x = np.stack(
        [np.roll(batch.x[0].ravel(), shift).reshape(batch.x[0].shape) for shift in (0, 1, 5)]
    )
    three = Batch(x, np.repeat(batch.y[:1], 3, axis=0), np.arange(3))
    alone = [AutogradMeasurements(network, model, three.take(slice(i, i + 1))) for i in range(3)]
    together = AutogradMeasurements(network, model, three).losses()
    if not np.allclose(
        together, np.concatenate([one.losses() for one in alone]), rtol=_TOLERANCE, atol=_TOLERANCE
    ):
        raise FedkeepError(
            "the model's loss of a sample depends on the other samples of its batch, so no sample "
            "has a gradient of its own: replace the layer that mixes samples"
        )
    gradients = np.stack([one.mean_gradient() for one in alone]).astype(np.float64)
    direction = np.random.default_rng(0).normal(size=len(gradients[0])).astype(np.float32)
    norms = np.linalg.norm(gradients, axis=1)
    margin = _TOLERANCE * (float(np.linalg.norm(direction) * norms.max()) + 1e-12)

    def is_exact(seen: PerSampleGradients) -> bool:
        try:
            right = np.allclose(
                seen.projections(direction), gradients @ direction, rtol=0.0, atol=margin
            )
            return right and np.allclose(seen.norms(), norms, rtol=_TOLERANCE)
        except (
            RuntimeError,
            ValueError,
        ):  # a layer called twice or never, or an output changed in place
            return False

    closed = all(map(is_bilinear, network.valued_layers)) and is_exact(
        TorchMeasurements(network, model, three)
    )
    chained = network.chain is not None and network.chain[-1][0] is Linear
    traced = chained and is_exact(TracedMeasurements(ChainTrace(network, [model], [three]), 3))
    return TorchMeasurements if closed else AutogradMeasurements, traced
