"""What estimators have told about single samples, by id: one that comes again costs again."""

from __future__ import annotations

import numpy as np

from fedkeep.core.types import IntArray, State

REMEMBERED = 2048
"""Ids that are told apart. One that returns after this many others is taken for a new sample."""
ROW_BYTES = 40
_COST, _OPEN, _CLOSED, _SENT = range(4)


class SampleCosts:
    """By id: the cost so far, and how often it is in the estimate that grows, the one to be sent, the one sent last."""

    def __init__(self) -> None:
        self._rows: dict[int, list[float]] = {}

    def see(self, ids: IntArray) -> None:
        """Samples that enter the estimate that grows."""
        for id_ in ids.tolist():
            row = self._rows.pop(id_, None) or [0.0, 0.0, 0.0, 0.0]
            row[_OPEN] += 1
            self._rows[id_] = row
        while len(self._rows) > REMEMBERED:
            del self._rows[next(iter(self._rows))]

    def close(self) -> None:
        """That estimate is finished and may be sent; a new one grows."""
        for row in self._rows.values():
            row[_CLOSED] += row[_OPEN]
            row[_OPEN] = 0.0

    def worst(self, cost: float, *, resends: bool) -> float:
        """What the dearest sample would have cost after one more release; n times in an estimate costs n^2."""
        return max((_after(row, cost, resends=resends) for row in self._rows.values()), default=0.0)

    def charge(self, cost: float, *, resends: bool) -> None:
        for row in self._rows.values():
            row[_COST] = _after(row, cost, resends=resends)
            row[_SENT] = max(row[_CLOSED], row[_SENT] if resends else 0.0)
            row[_CLOSED] = 0.0

    def snapshot(self) -> State:
        table = np.array(list(self._rows.values()), dtype=np.float64).reshape(-1, 4)
        return {"sample_ids": np.array(list(self._rows), dtype=np.int64), "sample_costs": table}

    def restore(self, state: State) -> None:
        """Becomes what `snapshot` described; what was charged before is never forgotten."""
        charged = {id_: row[_COST] for id_, row in self._rows.items()}
        ids, table = state.get("sample_ids", np.empty(0)), state.get("sample_costs", np.empty((0, 4)))
        self._rows = dict(zip((int(i) for i in ids), (list(map(float, row)) for row in table), strict=True))
        for id_, cost in charged.items():
            row = self._rows.setdefault(id_, [0.0, 0.0, 0.0, 0.0])
            row[_COST] = max(row[_COST], cost)


def _after(row: list[float], cost: float, *, resends: bool) -> float:
    return row[_COST] + cost * (row[_CLOSED] ** 2 + (row[_SENT] ** 2 if resends else 0.0))
