"""Measurements of modules whose valued parameters are not all in plain linear or convolutional layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedkeep.core.ports import Measurements
from fedkeep.core.slices import of_same_kind
from fedkeep.core.types import AnyArray, Batch, Scores, Vector
from fedkeep.learn.network import Network, as_tensor
from fedkeep.learn.torch_loss import losses
from fedkeep.learn.torch_measurements import CHUNK, join, per_sample, pieces

_BLOCK = 1 << 22
"""Numbers of per-sample gradients held at a time."""


class AutogradMeasurements:
    """The same quantities by autograd alone: slower, and right for all that autograd differentiates twice."""

    def __init__(self, network: Network, model: Vector, batch: Batch, chunk: int = CHUNK) -> None:
        self._network, self._model, self._n, self._chunk = network, model, len(batch), chunk
        self._x, self._y = as_tensor(batch.x), as_tensor(batch.y)

    def losses(self) -> Scores:
        return per_sample([self._losses(x, y) for x, y in self._pieces(self._chunk)])

    def projections(self, direction: Vector) -> Scores:
        views = self._network.valued.views(np.array(direction, dtype=np.float32))
        tangents = [torch.from_numpy(view) for view in views]
        with _plain_attention():
            return per_sample([self._project(x, y, tangents) for x, y in self._pieces(self._chunk)])

    def inner(self, other: Measurements) -> Scores:
        return self._inner(of_same_kind(self, other), self._network.valued.names)

    def norms(self) -> Scores:
        return np.sqrt(self.inner(self))

    def head_norms(self) -> Scores:
        own = len(list(self._network.head.parameters(recurse=False)))
        return np.sqrt(self._inner(self, self._network.valued.names[-own:]))

    def mean_gradient(self) -> Vector:
        return self.weighted_gradient(np.ones(self._n))

    def weighted_gradient(self, weights: Scores) -> Vector:
        total = torch.zeros(self._network.valued.size)
        shares = torch.split(torch.from_numpy(weights.astype(np.float32)), self._chunk)
        for (x, y), share in zip(self._pieces(self._chunk), shares, strict=False):
            with self._network.differentiable():
                found = self._losses(x, y)
                parts = torch.autograd.grad(found, self._network.valued_parameters, share, materialize_grads=True)
            total += torch.cat([part.reshape(-1) for part in parts])
        gradient: Vector = total.div_(self._n).numpy()
        return gradient

    def activations(self) -> AnyArray:
        parts = []
        for x, _ in self._pieces(self._chunk):
            _, [calls] = self._network.observe(x, [self._network.head])
            parts.append(calls[-1][0].flatten(1))
        return join(parts)

    def _losses(self, x: Tensor, y: Tensor) -> Tensor:
        return losses(self._network.module(x), y)

    def _project(self, x: Tensor, y: Tensor, tangents: list[Tensor]) -> Tensor:
        """<grad_i, tangents>, as the derivative of <sum_i v_i grad_i, tangents> by v."""
        with self._network.differentiable():
            found = self._losses(x, y)
            v = torch.ones_like(found, requires_grad=True)
            parameters = self._network.valued_parameters
            mixed = torch.autograd.grad(found, parameters, v, create_graph=True, materialize_grads=True)
        used = [(part, tangent) for part, tangent in zip(mixed, tangents, strict=True) if part.requires_grad]
        parts, along = zip(*used, strict=True)
        return torch.autograd.grad(parts, v, along)[0]

    def _inner(self, other: AutogradMeasurements, names: Sequence[str]) -> Scores:
        """<grad_i, grad'_i> over the parameters `names`, from the gradients of a few samples at a time."""
        width = sum(p.numel() for name, p in self._network.module.named_parameters() if name in names)
        size = min(self._chunk, max(1, _BLOCK // (width if other is self else 2 * width)))
        with _plain_attention():
            mine = self._gradients(size, names)
            pairs = ((g, g) for g in mine) if other is self else zip(mine, other._gradients(size, names), strict=True)
            return per_sample([_products(*pair) for pair in pairs])

    def _gradients(self, size: int, names: Sequence[str]) -> Iterator[list[Tensor]]:
        """The gradient of every sample by each parameter of `names`, (n, *shape), `size` samples at a time."""
        for x, y in self._pieces(size):
            yield self._gradients_of(x, y, names)

    def _gradients_of(self, x: Tensor, y: Tensor, names: Sequence[str]) -> list[Tensor]:
        parameters = {name: self._network.module.get_parameter(name).detach() for name in names}
        per_sample_gradient = grad(self._single_loss)
        try:
            return list(vmap(per_sample_gradient, (None, 0, 0))(parameters, x, y).values())
        except RuntimeError:  # not every layer can be mapped over (recurrent ones, for instance)
            singles = [per_sample_gradient(parameters, *pair) for pair in zip(x, y, strict=True)]
            return [torch.stack([single[name] for single in singles]) for name in names]

    def _single_loss(self, parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return losses(functional_call(self._network.module, parameters, (x[None],)), y[None])[0]

    def _pieces(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The samples of each chunk, while the model is loaded."""
        for x, y in zip(pieces(self._x, size), pieces(self._y, size), strict=True):
            with self._network.lock:
                self._network.load(self._model, frozen=True)
                yield x, y


def _products(mine: list[Tensor], other: list[Tensor]) -> Tensor:
    parts = [(g.double() * h.double()).flatten(1).sum(1) for g, h in zip(mine, other, strict=True)]
    return torch.stack(parts).sum(0)


def _plain_attention() -> AbstractContextManager[None]:
    """Without the fused attention kernels, which can be neither differentiated twice nor mapped over."""
    return sdpa_kernel(SDPBackend.MATH)
