"""A device's rules at work: which samples match, and what stored samples count for it."""

from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any
from zlib import crc32

import numpy as np

from fedkeep.core.rules.grammar import NumberedColumns
from fedkeep.core.rules.options import Rule, check_rules, conditions
from fedkeep.core.rules.store import Claims, RuledStore
from fedkeep.core.types import AnyArray, Batch, BoolArray, FloatArray, IntArray

_DAY = 86_400.0
_SPANS = {"minute": 60.0, "hour": 3600.0, "day": _DAY}
_WITH_LABELS = frozenset({"label", "loss"})
"""What is not known of a sample before its label is."""
_THURSDAY = 3
"""The weekday of 1970-01-01, counted from Monday."""


@dataclass(frozen=True)
class RecordContext:
    """What is known of a batch beside its samples."""

    fields: Sequence[Mapping[str, Any]] | None = None
    """What each record says of itself: numbers, texts and flags by name."""
    source: str = ""
    """Where the batch comes from."""
    times: FloatArray | None = None
    """The records' own times, (n,), in seconds since 1970."""
    matched: Sequence[Container[str]] | None = None
    """Of samples whose labels come later: the rules that matched each when it came, by name."""


class RuleBook:
    """Finds out which rules match what arrives.

    Parameters
    ----------
    rules : sequence of Rule
        The rules.
    store : RuledStore
        Where they hold samples.
    label_names : sequence of str
        The names of the labels, for conditions.

    Raises
    ------
    ConfigError
        If a condition cannot be read, with the place of the mistake.

    Examples
    --------
    >>> rules = [Rule("alarms", "alarm", slots=2), Rule("night", "hour < 6", "never")]
    >>> book = RuleBook(rules, RuledStore(np.array([4]), rules=rules))
    >>> batch = Batch(np.zeros((2, 1)), np.array([0, 0]), np.array([7, 8]))
    >>> context = RecordContext([{"alarm": True}, {}], times=np.array([36_000.0, 7200.0]))
    >>> book.look(batch, context, {}).tolist()
    [True, False]
    >>> book.refused
    {8: 'night'}
    """

    def __init__(
        self, rules: Sequence[Rule], store: RuledStore, label_names: Sequence[str] = ()
    ) -> None:
        check_rules(rules)
        self.rules, self.store = tuple(rules), store
        self._conditions = conditions(rules, label_names)
        self._after: dict[tuple[int, str], int] = {}
        """By rule and source, how many samples are still to be held after one that matched."""
        self._unlabelled: dict[str, deque[int]] = {}
        """By source, the last samples that came without a label."""
        self.refused: dict[int, str] = {}
        """The samples of the last batch that are never stored, each with its rule's name."""

    def look(
        self,
        batch: Batch,
        context: RecordContext,
        known: Mapping[str, Callable[[], AnyArray]],
    ) -> BoolArray:
        """Match a batch, and tell the store which of its samples rules claim.

        Parameters
        ----------
        batch : Batch
            Samples that are about to be ingested.
        context : RecordContext
            What is known of them.
        known : mapping
            What gives `loss`, `prediction` and `confidence`, when they are looked at.

        Returns
        -------
        BoolArray
            Which samples may be stored, (n,).
        """
        labels = {"label": lambda: batch.y if batch.y.ndim == 1 else np.full(len(batch), np.nan)}
        matches = self._matches(len(batch), context, {**known, **labels})
        late = context.matched is not None
        if context.matched is not None:
            for index, rule in enumerate(self.rules):
                came = np.array([rule.name in names for names in context.matched], dtype=bool)
                matches[index] = matches[index] | came
        allowed = self._allowed(batch.ids, matches)
        ids = batch.ids.tolist()
        claims: Claims = {}
        triggers: Claims = {}
        ranked: list[tuple[int, IntArray]] = []
        place_of = None if allowed.all() else allowed.cumsum() - 1
        for index, (rule, matched) in enumerate(zip(self.rules, matches, strict=True)):
            if rule.action == "never":
                continue
            claimed = matched & allowed
            if not late:  # else what came before and after it was looked at when it came
                claimed = self._with_followers(index, claimed, context.source)
            places = claimed.nonzero()[0]
            if rule.holds and not rule.per and not rule.before:
                if len(places):
                    ranked.append((index, places if place_of is None else place_of[places]))
                continue
            groups = self._groups(rule, batch.y, context, places)
            for i, group in zip(places.tolist(), groups, strict=True):
                claims.setdefault(ids[i], []).append((index, group))
                if rule.before and matched[i] and not late:
                    triggers.setdefault(ids[i], []).append((index, group))
        self.store.claim(claims, triggers, context.source, late=late, ranked=ranked)
        return allowed

    def screen(
        self,
        ids: IntArray,
        context: RecordContext,
        known: Mapping[str, Callable[[], AnyArray]],
    ) -> tuple[BoolArray, dict[int, list[str]]]:
        """Match samples that come without labels, as far as rules do not look at labels.

        Parameters
        ----------
        ids : ndarray of int
            Samples that are about to wait, none of which waits already.
        context : RecordContext
            What is known of them.
        known : mapping
            What gives `prediction` and `confidence`, when they are looked at.

        Returns
        -------
        tuple
            Which of them may be stored, (n,); and by id the rules that want a sample kept: of
            these samples, and of those that came before one that matches.
        """
        matches = [
            found if not _WITH_LABELS & condition.names else np.zeros(len(ids), dtype=bool)
            for condition, found in zip(
                self._conditions, self._matches(len(ids), context, known), strict=True
            )
        ]
        allowed = self._allowed(ids, matches)
        wanted: dict[int, list[str]] = {}
        most = max((rule.before for rule in self.rules), default=0)
        recent = self._unlabelled.setdefault(context.source, deque(maxlen=most))
        came = [*recent, *ids.tolist()]
        for index, (rule, matched) in enumerate(zip(self.rules, matches, strict=True)):
            if not rule.holds:
                continue
            sound = matched & allowed
            claimed = self._with_followers(index, sound, context.source) & allowed
            places = {len(recent) + i for i in claimed.nonzero()[0].tolist()}
            for i in sound.nonzero()[0].tolist():
                trigger = len(recent) + i
                places |= {*range(max(0, trigger - rule.before), trigger)}
            for place in sorted(places):
                wanted.setdefault(came[place], []).append(rule.name)
        recent.extend(ids[allowed].tolist())
        banned = {*ids[~allowed].tolist()}
        return allowed, {id_: names for id_, names in wanted.items() if id_ not in banned}

    def _matches(
        self, count: int, context: RecordContext, known: Mapping[str, Callable[[], AnyArray]]
    ) -> list[BoolArray]:
        """Tell for each rule which samples of a batch its condition holds of."""
        times = context.times
        given = dict(known)
        if times is not None:
            given["time"] = lambda: times
            given["hour"] = lambda: times / 3600 % 24
            given["weekday"] = lambda: (times // _DAY + _THURSDAY) % 7
        columns = NumberedColumns(count, context.fields, given, context.source)
        with np.errstate(all="ignore"):
            return [condition.holds_quietly(columns) for condition in self._conditions]

    def group(self, rule: Rule, label: Any, source: str, time: float) -> int:
        """Give the group of a sample under a rule."""
        match rule.per:
            case None:
                return 0
            case "label":
                return int(label)
            case "source":
                return crc32(source.encode(errors="surrogatepass"))
            case span:
                return int(time // _SPANS[span]) if isfinite(time) else 0

    def weigh(self, weights: FloatArray, regions: IntArray, ids: IntArray) -> FloatArray:
        """Let stored samples count for those that limits kept out, within each region.

        Examples
        --------
        >>> rule = Rule("calm", "not alarm", "most", n=1, per="day")
        >>> store = RuledStore(np.array([4]), rules=[rule])
        >>> book = RuleBook([rule], store)
        >>> store._limits[0].seen, store._limits[0].groups = {0: 3}, {0: [(0.5, 7)]}
        >>> store._limits[0]._group_of = {7: 0}
        >>> book.weigh(np.ones(2), np.zeros(2, int), np.array([7, 8])).tolist()
        [1.5, 0.5]
        """
        stand_for = self.store.stands_for(ids)
        if np.all(stand_for == 1):
            return weights
        scaled = weights * stand_for
        before = np.bincount(regions, weights)
        after = np.bincount(regions, scaled)
        ratio = np.divide(before, after, out=np.ones_like(before), where=after > 0)
        return np.asarray(scaled * ratio[regions])

    def _allowed(self, ids: IntArray, matches: Sequence[BoolArray]) -> BoolArray:
        allowed = np.ones(len(ids), dtype=bool)
        self.refused = {}
        for rule, matched in zip(self.rules, matches, strict=True):
            if rule.action == "never" and matched.any():
                self.refused |= dict.fromkeys(ids[matched & allowed].tolist(), rule.name)
                allowed &= ~matched
        return allowed

    def _with_followers(self, index: int, matched: BoolArray, source: str) -> BoolArray:
        """Add the samples that come after one that matches."""
        after = self.rules[index].after
        if not after:
            return matched
        left = self._after.get((index, source), 0)
        if not left and not matched.any():
            return matched
        claimed = matched.copy()
        for i, one in enumerate(matched.tolist()):
            if one:
                left = after
            elif left:
                claimed[i] = True
                left -= 1
        self._after[index, source] = left
        return claimed

    def _groups(
        self, rule: Rule, y: AnyArray, context: RecordContext, places: IntArray
    ) -> list[int]:
        """Give the group of each of these samples of a batch."""
        if rule.per == "label" and y.ndim == 1:
            return list(map(int, y[places].tolist()))
        if rule.per not in _SPANS or context.times is None:
            return [self.group(rule, 0, context.source, np.nan)] * len(places)
        return [self.group(rule, 0, "", time) for time in context.times[places].tolist()]
