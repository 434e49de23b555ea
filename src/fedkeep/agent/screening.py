"""From what sources hand over to a batch in which every sample is one."""

from __future__ import annotations

import numpy as np

from fedkeep.agent.arrivals import Arrival, sample_id
from fedkeep.agent.form import SampleForm
from fedkeep.core.screening import screen_samples
from fedkeep.core.types import AnyArray, Batch, BoolArray


def screen(
    arrivals: list[Arrival], form: SampleForm, labels: int, erased: frozenset[int], limit: float = np.inf
) -> tuple[Batch, list[Arrival], list[tuple[Arrival, str]]]:
    """The sound samples as a batch with their arrivals, and the others with the reason of each."""
    rows: list[tuple[Arrival, AnyArray, float]] = []
    refused: list[tuple[Arrival, str]] = []
    for arrival in arrivals:
        x = arrival.x
        label = _number(arrival.y)
        if x is None:
            refused.append((arrival, "shape"))
        elif label is None:
            refused.append((arrival, "label"))
        elif not isinstance(arrival.id, str | int | float | None):
            refused.append((arrival, "id"))
        else:
            rows.append((arrival, x, label))
    if not rows:
        return _empty(form), [], refused
    x = np.stack([row[1] for row in rows])
    y = np.array([row[2] for row in rows])
    sound = screen_samples(x, y, form.shape, labels)[0]
    unlabelled = _unlabelled(y, labels)
    refused += [(rows[i][0], "label" if unlabelled[i] else "not-finite") for i in np.flatnonzero(~sound).tolist()]
    huge = sound & _beyond(x, limit)
    refused += [(rows[i][0], "huge") for i in np.flatnonzero(huge).tolist()]
    sound &= ~huge
    return _identified(rows, x.astype(form.dtype, copy=False), y, sound, erased, refused)


def _identified(
    rows: list[tuple[Arrival, AnyArray, float]],
    x: AnyArray,
    y: AnyArray,
    sound: BoolArray,
    erased: frozenset[int],
    refused: list[tuple[Arrival, str]],
) -> tuple[Batch, list[Arrival], list[tuple[Arrival, str]]]:
    """Gives every sample its number; those that were erased on request do not come back."""
    kept, ids = [], []
    for i in np.flatnonzero(sound).tolist():
        id_ = sample_id(rows[i][0].id, x[i].tobytes())
        if id_ in erased:
            refused.append((rows[i][0], "erased"))
        else:
            kept.append(i)
            ids.append(id_)
    batch = Batch(x[kept], y[kept].astype(np.int64), np.array(ids, dtype=np.int64))
    return batch, [rows[i][0] for i in kept], refused


def _beyond(x: AnyArray, limit: float) -> BoolArray:
    flat = x.reshape(len(x), -1)
    largest, least = flat.max(axis=1).astype(np.float64), flat.min(axis=1).astype(np.float64)
    beyond: BoolArray = (largest > limit) | (least < -limit)
    return beyond


def _number(y: object) -> float | None:
    if not isinstance(y, int | float | np.number) or isinstance(y, bool):
        return None
    try:
        return float(y)
    except (OverflowError, ValueError, TypeError):
        return None


def _unlabelled(y: AnyArray, labels: int) -> BoolArray:
    with np.errstate(invalid="ignore"):
        known: BoolArray = np.isfinite(y) & (y == np.floor(y)) & (y >= 0) & (y < labels)
    return ~known


def _empty(form: SampleForm) -> Batch:
    none = np.empty(0, dtype=np.int64)
    return Batch(np.empty((0, *form.shape), form.dtype), none, none)
