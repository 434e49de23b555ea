"""From what sources hand over to a batch in which every sample is one."""

from collections import deque

import numpy as np

from fedkeep.agent.arrivals import Arrival, sample_id
from fedkeep.agent.record import SampleForm
from fedkeep.core.screening import screen_samples
from fedkeep.core.types import AnyArray, Batch, BoolArray


class Magnitudes:
    """How large samples usually are, by the largest number of each: what is far beyond would outweigh all others.

    The usual is a median of what came before, or at first of what came together, refused samples included, so that a
    stream whose scale really changes is believed after a while.
    """

    _LATEST, _LEAST = 64, 16

    def __init__(self, limit: float, outlier: float) -> None:
        self._limit, self._outlier = limit, outlier
        self._seen: deque[float] = deque(maxlen=self._LATEST)

    def huge(self, x: AnyArray) -> BoolArray:
        """Which samples are too large, of finite ones."""
        flat = x.reshape(len(x), -1)
        largest = np.maximum(flat.max(axis=1).astype(np.float64), -flat.min(axis=1).astype(np.float64))
        known = self._seen if len(self._seen) >= self._LEAST else [*self._seen, *largest.tolist()]
        usual = float(np.median(known)) if len(known) >= self._LEAST else 0.0
        self._seen.extend(largest[-self._LATEST :].tolist())
        bound = min(self._limit, self._outlier * usual) if usual and self._outlier else self._limit
        return np.asarray(largest > bound)


def screen(
    arrivals: list[Arrival], form: SampleForm, labels: int, erased: frozenset[int], magnitudes: Magnitudes
) -> tuple[Batch, list[Arrival], list[tuple[Arrival, str]]]:
    """The sound samples as a batch with their arrivals, and the others with the reason of each."""
    refused: list[tuple[Arrival, str]] = []
    read, numbers = [], []
    for arrival in arrivals:
        number = _number(arrival.y)
        if arrival.x is None:
            refused.append((arrival, "shape"))
        elif number is None:
            refused.append((arrival, "label"))
        elif not isinstance(arrival.id, str | int | float | None):
            refused.append((arrival, "id"))
        else:
            read.append(arrival)
            numbers.append(number)
    x = np.stack([arrival.x for arrival in read]) if read else np.empty((0, *form.shape), form.dtype)
    y = np.array(numbers, dtype=np.float64)
    sound = screen_samples(x, y, form.shape, labels)[0] if read else np.zeros(0, dtype=bool)
    huge = np.zeros(len(read), dtype=bool)
    if sound.any():
        huge[sound] = magnitudes.huge(x if sound.all() else x[sound])
    x = x.astype(form.dtype, copy=False)
    rows, ids = [], []
    for row, arrival in enumerate(read):
        if not sound[row]:
            known = numbers[row].is_integer() and 0 <= numbers[row] < labels
            refused.append((arrival, "not-finite" if known else "label"))
        elif huge[row]:
            refused.append((arrival, "huge"))
        elif (id_ := sample_id(arrival.id, x[row].tobytes())) in erased:
            refused.append((arrival, "erased"))
        else:
            rows.append(row)
            ids.append(id_)
    batch = Batch(x[rows], y[rows].astype(np.int64), np.array(ids, dtype=np.int64))
    return batch, [read[row] for row in rows], refused


def _number(y: object) -> float | None:
    if not isinstance(y, int | float | np.number) or isinstance(y, bool):
        return None
    try:
        return float(y)
    except (OverflowError, ValueError, TypeError):
        return None
