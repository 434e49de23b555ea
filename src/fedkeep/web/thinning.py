"""A series of any length in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Thinned(Generic[Item]):
    """Merges neighbours, twice as many whenever `limit` is reached; `limit` is even."""

    def __init__(self, limit: int, merge: Callable[[Item, Item], Item]) -> None:
        self._limit = limit
        self._merge = merge
        self._bins: list[Item] = []
        self._width = 1
        self._in_last = 0

    def add(self, item: Item) -> None:
        if self._bins and self._in_last < self._width:
            self._bins[-1] = self._merge(self._bins[-1], item)
            self._in_last += 1
            return
        if len(self._bins) == self._limit:
            pairs = zip(self._bins[::2], self._bins[1::2], strict=True)
            self._bins = [self._merge(early, late) for early, late in pairs]
            self._width *= 2
        self._bins.append(item)
        self._in_last = 1

    def items(self) -> Sequence[Item]:
        return self._bins


def evenly(items: Sequence[Item], limit: int) -> Sequence[Item]:
    """At most about `limit` of the items, evenly spaced, the last always among them."""
    step = -(-len(items) // limit) or 1
    return items[::-1][::step][::-1]
