"""The order in which local training visits its samples."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedkeep.core.types import IntArray, LocalTraining


def minibatches(n: int, local: LocalTraining, seed: int) -> Iterator[IntArray | slice]:
    """The samples of each step, epoch after epoch; without a batch size each step takes them all (Eq. 12)."""
    if local.batch_size is None or local.batch_size >= n:
        for _ in range(local.epochs):
            yield slice(None)
        return
    rng = np.random.default_rng(seed)
    for _ in range(local.epochs):
        order = rng.permutation(n)
        for start in range(0, n, local.batch_size):
            yield order[start : start + local.batch_size]
