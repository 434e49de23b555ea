"""From what sources hand over to a batch in which every sample is one."""

from __future__ import annotations

from collections import deque

import numpy as np

from fedkeep.agent.arrivals import Arrival, sample_id
from fedkeep.agent.form import SampleForm
from fedkeep.core.screening import screen_samples
from fedkeep.core.types import AnyArray, Batch, BoolArray


class Magnitudes:
    """How large samples usually are, by the largest number of each: what is far beyond would outweigh all others.

    The usual is a median of what came last, refused samples included, so that a stream whose scale really changes is
    believed after a while.
    """

    _LATEST, _LEAST = 64, 16

    def __init__(self, limit: float, outlier: float) -> None:
        self._limit, self._outlier = limit, outlier
        self._seen: deque[float] = deque(maxlen=self._LATEST)

    def huge(self, x: AnyArray) -> BoolArray:
        """Which samples are too large, of finite ones."""
        flat = x.reshape(len(x), -1)
        largest = np.maximum(flat.max(axis=1).astype(np.float64), -flat.min(axis=1).astype(np.float64))
        usual = float(np.median(self._seen)) if len(self._seen) >= self._LEAST else 0.0
        self._seen.extend(largest[-self._LATEST :].tolist())
        huge: BoolArray = largest > (
            min(self._limit, self._outlier * usual) if usual and self._outlier else self._limit
        )
        return huge


def screen(
    arrivals: list[Arrival], form: SampleForm, labels: int, erased: frozenset[int], magnitudes: Magnitudes
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
    finite = np.flatnonzero(sound)
    if len(finite):
        huge = finite[magnitudes.huge(x[finite] if len(finite) < len(x) else x)]
        refused += [(rows[i][0], "huge") for i in huge.tolist()]
        sound[huge] = False
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
