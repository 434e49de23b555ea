"""A trace of torch models that are chains of layers: a few samples each, all models in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import islice
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedkeep.core.types import AnyArray, Batch, Vector
from fedkeep.learn.chain import Chain, Pass
from fedkeep.learn.factors import Factors, Outer
from fedkeep.learn.network import Network, as_tensor
from fedkeep.learn.torch_loss import losses, output_error


class ChainTrace:
    """C models, each over its own batch."""

    def __init__(self, network: Network, models: Sequence[Vector], batches: Sequence[Batch]) -> None:
        self._network, self._models, self._batches = network, models, batches
        self._chain = cast("Chain", network.chain)

    @cached_property
    def losses(self) -> AnyArray:
        found: AnyArray = losses(self._passed.logits, self._y).numpy()
        return found

    @cached_property
    def head(self) -> Outer:
        return Outer(self.activations, self._error.mT.numpy())

    @property
    def activations(self) -> AnyArray:
        inputs: AnyArray = self._passed.kept[-1][-1].mT.numpy()
        return inputs

    @cached_property
    def valued(self) -> list[Factors]:
        wanted = len(self._network.valued_layers)
        links = islice(self._chain.errors(self._parameters, self._passed, self._error), wanted)
        factors = [link.factors(kept, error) for link, kept, error in links][::-1]
        del self._passed.kept[:-1]  # the activations of all layers are much larger than what is made of them
        return factors

    @cached_property
    def _y(self) -> Tensor:
        return pad_sequence([as_tensor(batch.y) for batch in self._batches], batch_first=True)

    @cached_property
    def _parameters(self) -> list[Tensor]:
        first = self._models[0]
        if all(model is first for model in self._models):
            return self._network.stacked(as_tensor(first).expand(len(self._models), -1))
        return self._network.stacked(torch.from_numpy(np.stack(self._models)))

    @cached_property
    def _passed(self) -> Pass:
        x = pad_sequence([as_tensor(batch.x) for batch in self._batches], batch_first=True)
        return self._chain.forward(self._parameters, x)

    @cached_property
    def _error(self) -> Tensor:
        return output_error(self._passed.logits, self._y)
