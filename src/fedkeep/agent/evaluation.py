"""How good a model is on the device's own samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedkeep.agent.agent import Agent
from fedkeep.agent.summary import vitals
from fedkeep.core.errors import ConfigError
from fedkeep.core.orders import screen_parameters
from fedkeep.core.screening import screen_samples
from fedkeep.core.types import AnyArray, Vector
from fedkeep.learn.judging import judge
from fedkeep.link.messages import Evaluated

_CHUNK = 256


class Evaluator:
    """Measures models on held-out samples where the operator gave some, else on what is stored."""

    def __init__(self, agent: Agent, held_out: str | None, shape: tuple[int, ...]) -> None:
        self._agent = agent
        self._held_out = _read(Path(held_out), shape, agent.labels) if held_out else None

    def evaluate(self, model: Vector) -> Evaluated:
        """Losses summed, and how many labels were right."""
        screen_parameters(model, self._agent.device.learner.size, "model")
        if self._held_out is not None:
            x, y = self._held_out
        else:
            with self._agent.lock:
                batch = self._agent.store.stored().batch
            x, y = batch.x, batch.y
        loss, right = 0.0, 0
        for start in range(0, len(y), _CHUNK):
            part = slice(start, start + _CHUNK)
            losses, found = judge(self._agent.device.learner, model, x[part], y[part])
            loss, right = loss + float(losses.sum()), right + int(found.sum())
        where = "stored" if self._held_out is None else "held-out"
        return Evaluated(len(y), loss, right, where, self._agent.door.vitals(vitals(self._agent)))


def _read(path: Path, shape: tuple[int, ...], labels: int) -> tuple[AnyArray, AnyArray]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            x, y = arrays["x"], arrays["y"]
    except Exception as error:
        raise ConfigError(f"held_out must be an npz file with x and y, {path} is not: {error}") from error
    sound, refused = screen_samples(x, y, shape, labels)
    if refused:
        raise ConfigError(f"held_out file {path} holds unsound samples: {dict(refused)}")
    return x[sound], y[sound].astype(np.int64)
