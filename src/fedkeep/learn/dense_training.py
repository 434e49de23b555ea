"""Weighted local SGD of dense networks, in numpy."""

from __future__ import annotations

import numpy as np

from fedkeep.core.types import AnyArray, IntArray, LocalTraining
from fedkeep.learn.dense import Layers, backward, forward, output_error


class Descent:
    """The steps of Eq. 12 for C models at once, in place: `layers` are views of `models`, (C, P)."""

    def __init__(self, models: AnyArray, layers: Layers, correction: AnyArray | None, local: LocalTraining) -> None:
        self._models, self._layers = models, layers
        self._rate, self._pull = local.learning_rate, local.learning_rate * local.proximal
        self._anchor = models.copy() if local.proximal else None
        self._constant = None if correction is None else local.learning_rate * correction

    def step(self, x: AnyArray, y: IntArray, gamma: AnyArray) -> None:
        """One step on samples (C, n, d) that weigh `gamma`; where they all weigh nothing the model stays."""
        total = gamma.sum(axis=1, keepdims=True)
        if not total.any():
            return
        away = None if self._anchor is None else self._models - self._anchor
        share = np.divide(gamma, total, out=np.zeros_like(gamma), where=total > 0) * np.float32(self._rate)
        inputs, logits = forward(self._layers, x)
        errors = backward(self._layers, inputs, output_error(logits, y) * share[..., None])
        for (weight, bias), a, e in zip(self._layers, inputs, errors, strict=True):
            np.subtract(weight, e.swapaxes(-1, -2) @ a, out=weight)
            np.subtract(bias, e.sum(axis=1), out=bias)
        if away is not None:
            self._models -= self._pull * away
        if self._constant is not None:
            self._models[:, -self._constant.shape[1] :] -= self._constant
