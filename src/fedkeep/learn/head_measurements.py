"""Measurements over the last layer alone: inference by torch, then softmax regression on its activations."""

from __future__ import annotations

from fedkeep.core.types import AnyArray, Batch, Vector
from fedkeep.learn.dense import DenseTrace
from fedkeep.learn.network import Network, as_tensor
from fedkeep.learn.torch_measurements import join, pieces
from fedkeep.learn.traced import TracedMeasurements


class HeadMeasurements(TracedMeasurements):
    """The closed form of a linear last layer with bias whose outputs are the logits: no autograd at all."""

    def __init__(self, network: Network, model: Vector, batch: Batch, chunk: int) -> None:
        def infer() -> tuple[list[AnyArray], AnyArray]:
            inputs, logits = [], []
            for x in pieces(as_tensor(batch.x), chunk):
                with network.lock:
                    network.load(model, frozen=True)
                    output, [[(activations, _)]] = network.observe(x, [network.head])
                inputs.append(activations)
                logits.append(output)
            return [join(inputs)[None]], join(logits)[None]

        super().__init__(DenseTrace(infer, batch.y[None]), network.valued, len(batch))
