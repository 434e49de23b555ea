"""The slots that one rule reserves: which of the samples that match are held in them."""

from bisect import bisect_left, insort
from collections import Counter

from fedkeep.core.rules.options import Rule

_Key = tuple[float, int, int]
"""(score, arrival, id): the lowest leaves first, so that the newest wins ties."""
_IN_TIME = ("minute", "hour", "day")


class HeldSamples:
    """The samples that one rule holds: values rank inside its slots.

    Of a full group, and of full slots without groups, the lowest leaves. Where slots are full of
    several groups, the oldest of time makes room, or of labels and sources the largest.

    Examples
    --------
    >>> held = HeldSamples(Rule("alarms", "alarm", slots=2), slots=2)
    >>> [held.take(id_, score, id_, 0) for id_, score in ((1, 0.5), (2, 0.9), (3, 0.7), (4, 0.1))]
    [-1, -1, 1, 4]
    >>> sorted(held.ids)
    [2, 3]
    """

    def __init__(self, rule: Rule, slots: int) -> None:
        self.rule, self._slots = rule, slots
        self.ids: dict[int, tuple[int, _Key]] = {}
        """Group and key of each sample that is held."""
        self._groups: dict[int, list[_Key]] = {}
        """The keys of each group, the lowest first."""

    @property
    def floor(self) -> float:
        """The score below which nothing is taken; -inf where it depends on the sample's group."""
        if self.rule.per is not None or len(self.ids) < self._slots:
            return float("-inf")
        return self._groups[0][0][0]

    def refuses(self, score: float, group: int) -> bool:
        """Tell at once whether a newcomer is too low; where it is not sure, `take` decides."""
        own = self._groups.get(group)
        if own is None or score >= own[0][0]:
            return False
        if self.rule.n is None:
            return self.rule.per is None and len(self.ids) >= self._slots
        return len(own) >= self.rule.n

    def is_full(self, group: int) -> bool:
        """Tell whether a newcomer of a group can be held only in the place of another."""
        own = len(self._groups.get(group, ()))
        return len(self.ids) >= self._slots or (self.rule.n is not None and own >= self.rule.n)

    def take(self, id_: int, score: float, arrival: int, group: int) -> int:
        """Hold a sample; gives the id that leaves for it, its own where it is lower, or -1."""
        score = score if score == score else float("-inf")  # noqa: PLR0124 - NaN ranks lowest
        if id_ in self.ids:
            self.let_go(id_)
        key = (score, arrival, id_)
        own = self._groups.get(group, [])
        leaving = -1
        if self.rule.n is not None and len(own) >= self.rule.n:
            leaving = self._beaten(own[0], key)
        elif len(self.ids) >= self._slots:
            giver = self._giver(group)
            lowest = self._groups[giver][0]
            if giver != group and self.rule.per in _IN_TIME and giver > group:
                return id_  # what is older than all that is held does not displace it
            leaving = lowest[2] if giver != group else self._beaten(lowest, key)
        if leaving == id_:
            return id_
        if leaving >= 0:
            self.let_go(leaving)
        insort(self._groups.setdefault(group, []), key)
        self.ids[id_] = (group, key)
        return leaving

    def let_go(self, id_: int) -> None:
        """Hold a sample no longer."""
        group, key = self.ids.pop(id_)
        keys = self._groups[group]
        del keys[bisect_left(keys, key)]
        if not keys:
            del self._groups[group]

    def _giver(self, newcomer: int) -> int:
        """Find the group that makes room when all slots are taken."""
        if self.rule.per in _IN_TIME:
            return min(self._groups)
        sizes = Counter({group: len(keys) for group, keys in self._groups.items()})
        sizes[newcomer] += 1
        return max(self._groups, key=lambda group: (sizes[group], group == newcomer))

    @staticmethod
    def _beaten(lowest: _Key, key: _Key) -> int:
        """Give the id that leaves where only the higher of two may stay."""
        return lowest[2] if key >= lowest else key[2]
