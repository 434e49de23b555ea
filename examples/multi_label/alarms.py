"""Machines with three faults that come alone or together: a loss of one's own in torch."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits


class MultiLabel:
    """The loss of each sample and fault; `predictions` says what is judged against the targets."""

    predictions = staticmethod(torch.sigmoid)

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(outputs, y, reduction="none")


loss = MultiLabel()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def read() -> Iterator[tuple[str, list[float], list[float]]]:
    rng = np.random.default_rng(0)
    for n in range(3000):
        faults = (rng.random(3) < (0.5, 0.3, 0.1)).astype(float)
        x = np.repeat(faults, 2) * 2 - 1 + rng.normal(0, 0.7, 6)
        yield f"machine-{n % 10}", x.tolist(), faults.tolist()
