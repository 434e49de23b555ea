"""Whether model, samples and labels belong together, and what stays of a store when one of them has changed."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from fedkeep.config import Table
from fedkeep.core.errors import ConfigError, FedkeepError
from fedkeep.core.ports import Learner
from fedkeep.core.types import State

log = logging.getLogger(__name__)
_LEARNED = (
    "device.model", "device.direction", "device.estimator.", "device.window.", "device.told.", "device.gist.",
    "device.memory.", "gate.clean", "gate.noisy", "sums.",
)  # fmt: skip
_COUNTED = ("device.", *_LEARNED)


@dataclass(frozen=True)
class Identity:
    """What the samples of a store are for; when it changes, the samples stay and what was learned begins anew."""

    labels: int
    model: str = ""
    """Tells models apart whose vectors mean different things."""


def identity_of(model: Table, labels: int) -> Identity:
    """A model is known by its table, and by its file's content where it has one."""
    table = {**model, "path": _digest(Path(str(model["path"])))} if "path" in model else dict(model)
    return Identity(labels, json.dumps(table, sort_keys=True, default=str)[:512])


def check_model(learner: Learner, shape: tuple[int, ...], labels: int) -> None:
    """Has the model look at one sample of zeros, before anything is written."""
    try:
        outputs = learner.logits(np.zeros(learner.size, dtype=np.float32), np.zeros((1, *shape), dtype=np.float32))
    except FedkeepError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a runtime raises, the model does not take such samples
        reason = str(error).strip().splitlines()[-1][:200] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"[model] does not take samples of [samples] shape = {list(shape)}: {reason}; set the shape it was made for"
        ) from None
    if outputs.shape != (1, labels):
        raise ConfigError(
            f"[model] has {outputs.shape[-1]} outputs, but [samples] labels = {labels}: set labels to the model's"
        )


def carried_over(state: State, before: Identity | None, now: Identity, learner: Learner, regions: int) -> State:
    """What of a store's state still means the same; samples always do."""
    if before is not None and before.labels != now.labels:
        log.warning(
            "[samples] labels was %d and is %d: samples stay, model, plan and rates begin anew",
            before.labels,
            now.labels,
        )
        return _without(state, _COUNTED)
    counts = state.get("device.shares.counts", state.get("device.store.quotas"))
    if counts is not None and counts.shape != (regions,):
        log.warning("[policy] divides slots otherwise than before: samples stay, model, plan and rates begin anew")
        return _without(state, _COUNTED)
    model = state.get("device.model")
    if (before is not None and before.model != now.model) or (model is not None and model.shape != (learner.size,)):
        log.warning("[model] is another than before: samples stay, what was learned begins anew")
        return _without(state, _LEARNED)
    return state


def _without(state: State, prefixes: tuple[str, ...]) -> State:
    return {name: array for name, array in state.items() if not name.startswith(prefixes)}


def _digest(path: Path) -> str:
    try:
        return blake2b(path.read_bytes(), digest_size=16).hexdigest()
    except OSError as error:
        raise ConfigError(f"cannot read the model {path}: {error.strerror}") from error
