"""At most n of each group take part in what the policy keeps: an even sample of those that came."""

from bisect import insort
from collections.abc import Container

from fedkeep.core.rules.options import Rule

_LATEST_GROUPS = 64
"""Groups that are remembered in any case; more of them as long as one of theirs is stored."""


class LimitedGroups:
    """A reservoir of n for each group of one rule, by random keys that nothing else depends on.

    So a sample that stays stands for those of its group that did not, whatever the policy does
    with it then.

    Examples
    --------
    >>> limited = LimitedGroups(Rule("calm", "not alarm", "most", n=2, per="hour"))
    >>> [limited.admit(id_, key, group=0) for id_, key in ((1, 0.3), (2, 0.9), (3, 0.5), (4, 0.1))]
    [-1, -1, 1, 4]
    >>> limited.stands_for(2)  # four came, and two of them may stay
    2.0
    """

    def __init__(self, rule: Rule) -> None:
        self.rule, self._n = rule, rule.n or 0
        self.groups: dict[int, list[tuple[float, int]]] = {}
        """Keys and ids of the samples of each group that may stay, the lowest first."""
        self.seen: dict[int, int] = {}
        """How many of each group have come."""
        self._group_of: dict[int, int] = {}

    def admit(self, id_: int, key: float, group: int) -> int:
        """Let a sample take part; gives the id that does not any more, its own, or -1."""
        if id_ in self._group_of:
            return -1
        members = self.groups.setdefault(group, [])
        self.seen[group] = self.seen.get(group, 0) + 1
        if len(members) >= self._n and key < members[0][0]:
            return id_
        leaving = members.pop(0)[1] if len(members) >= self._n else -1
        if leaving >= 0:
            del self._group_of[leaving]
        insort(members, (key, id_))
        self._group_of[id_] = group
        return leaving

    def stands_for(self, id_: int) -> float:
        """Give how many arrivals of its group a sample stands for; 1 where no limit applies."""
        group = self._group_of.get(id_)
        return 1.0 if group is None else self.seen[group] / len(self.groups[group])

    def forget(self, stored: Container[int]) -> None:
        """Forget early groups of which nothing is stored."""
        early = list(self.groups)[: max(0, len(self.groups) - _LATEST_GROUPS)]
        for group in early:
            if not any(id_ in stored for _, id_ in self.groups[group]):
                for _, id_ in self.groups.pop(group):
                    del self._group_of[id_]
                del self.seen[group]
