"""Small state that is committed with the samples: what was counted, and what was erased."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable

import numpy as np

from fedkeep.core.types import State

REMEMBERED = 512


class CounterBook:
    """Counts by name since the store was made."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        self._counts[name] += count

    def add_all(self, counts: Counter[str]) -> None:
        self._counts.update(counts)

    def counts(self) -> dict[str, int]:
        return dict(sorted(self._counts.items()))

    def snapshot(self) -> State:
        return {"json": np.frombuffer(json.dumps(self.counts()).encode(), dtype=np.uint8)}

    def restore(self, state: State) -> None:
        self._counts = Counter(json.loads(state["json"].tobytes()))


class ModelDate:
    """Of which round the present model and g_hat are, and when they came by the age clock."""

    def __init__(self) -> None:
        self.round = -1
        self.received: float | None = None

    def snapshot(self) -> State:
        return {"date": np.array([self.round, np.nan if self.received is None else self.received])}

    def restore(self, state: State) -> None:
        round_, received = state["date"].tolist()
        self.round, self.received = int(round_), None if np.isnan(received) else received


class Tombstones:
    """The ids that were erased last, and nothing else of them: what is sent again is refused."""

    def __init__(self) -> None:
        self._ids: dict[int, None] = {}
        self.ids: frozenset[int] = frozenset()

    def add(self, ids: Iterable[int]) -> None:
        self._ids.update(dict.fromkeys(ids))
        while len(self._ids) > REMEMBERED:
            del self._ids[next(iter(self._ids))]
        self.ids = frozenset(self._ids)

    def snapshot(self) -> State:
        return {"ids": np.array(list(self._ids), dtype=np.int64)}

    def restore(self, state: State) -> None:
        self._ids = {}
        self.add(state["ids"].tolist())
