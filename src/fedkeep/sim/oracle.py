"""What no real fleet can know: exact gradients over all training data."""

from __future__ import annotations

import numpy as np

from fedkeep.core.estimators import Estimate
from fedkeep.core.ports import Learner
from fedkeep.core.seeds import generator
from fedkeep.core.types import Batch, DeviceId, FloatArray, IntArray, Vector
from fedkeep.data import Federation

_CHUNK = 4096


class Oracle:
    """Exact gradients of the global loss and of each device's, over all samples or a fixed seeded subset."""

    def __init__(self, learner: Learner, data: Federation, samples: int | None, seed: int) -> None:
        self._learner, self._data = learner, data
        self._ids = np.sort(data.train.indices)
        if samples is not None and samples < len(self._ids):
            self._ids = np.sort(generator(seed, "oracle").choice(self._ids, samples, replace=False))

    def gradient(self, model: Vector) -> Vector:
        """The global gradient: every device weighs as many samples as it has."""
        return self._mean(model, self._ids).astype(np.float32)

    def device_gradients(self, model: Vector, rates: dict[DeviceId, float]) -> dict[DeviceId, Estimate]:
        """Every device's gradient over its training samples, as if each had reported before the first round."""
        return {
            d: Estimate(self._mean(model, self._data.train.of(d)).astype(np.float32), rate, -1)
            for d, rate in rates.items()
        }

    def _mean(self, model: Vector, ids: IntArray) -> FloatArray:
        probe = self._learner.probe(model)
        total = np.zeros(self._learner.gradient_size)
        for start in range(0, len(ids), _CHUNK):
            part: Batch = self._data.take(ids[start : start + _CHUNK])
            total += probe.measure(part).mean_gradient().astype(np.float64) * len(part)
        return total / len(ids)
