"""A store with slots that rules reserve, beside those of the policy.

What the policy keeps is what it would keep without rules in a store that is smaller by the reserved
slots, and only that is trained on: a sample that a rule alone holds counts 0 in training. So rules
that keep samples cannot bias it. A sample may be held by the policy and by rules; it leaves once
nothing holds it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from fedkeep.core.protocols import OfferResult, Outcome
from fedkeep.core.rules.held import HeldSamples
from fedkeep.core.rules.limits import LimitedGroups
from fedkeep.core.rules.options import Rule
from fedkeep.core.seeds import child_seed, uniform_keys
from fedkeep.core.store import AfterUse, MemoryStore
from fedkeep.core.types import AnyArray, Batch, FloatArray, IntArray, Scores, State

HELD = 2
"""The tier of a sample that rules alone hold."""
Claims = dict[int, list[tuple[int, int]]]
"""By id, the rules that match a sample, and its group under each."""


class HeldSample(NamedTuple):
    """A sample that a rule holds, with all that is known of it."""

    id: int
    x: AnyArray
    y: Any
    region: int
    score: float
    arrival: int
    tag: Any = None
    """What the store's owner wants to know of it again."""


class RuledStore(MemoryStore):
    """A `MemoryStore` in which rules hold samples, too.

    Parameters
    ----------
    quotas : IntArray
        The policy's slots of each region.
    after_use : AfterUse
        What becomes of samples that were trained on.
    soft_quotas : bool
        Whether regions lend their free slots.
    rules : sequence of Rule
        The rules, whose slots come on top of the policy's.
    labels : int
        The number of labels.

    Examples
    --------
    >>> store = RuledStore(np.array([1]), rules=[Rule("alarms", "alarm", slots=1)], labels=2)
    >>> def come(number, score, alarm):
    ...     batch = Batch(np.zeros((1, 2)), np.array([0]), np.array([number]))
    ...     store.claim({number: [(0, 0)]} if alarm else {})
    ...     outcome = store.offer(batch, batch.y, np.array([score]), batch.ids)
    ...     return OfferResult(outcome.results[0]).name
    >>> come(1, 0.9, alarm=False), come(2, 0.1, alarm=True), come(3, 0.2, alarm=False)
    ('KEPT', 'KEPT', 'REFUSED')
    >>> len(store), store.stored().batch.ids.tolist()  # the alarm is not trained on
    (2, [1])
    """

    def __init__(
        self,
        quotas: IntArray,
        after_use: AfterUse = AfterUse(),
        *,
        soft_quotas: bool = False,
        rules: Sequence[Rule] = (),
        labels: int = 1,
    ) -> None:
        super().__init__(quotas, after_use, soft_quotas=soft_quotas)
        self.rules, self.labels, self.seed = tuple(rules), labels, 0
        self.reserved = sum(rule.reserved(labels) for rule in rules)
        self.dropped: list[int] = []
        """Samples that left with the last offers for no newcomer of the policy's."""
        self.late: list[HeldSample] = []
        """Samples that the last offers made rules hold which they did not when these came."""
        self.tag: Callable[[int], Any] = lambda _: None
        self._clear_rules()

    def _clear_rules(self) -> None:
        self._holds = {
            index: HeldSamples(rule, rule.reserved(self.labels))
            for index, rule in enumerate(self.rules)
            if rule.holds
        }
        self._limits = {
            index: LimitedGroups(rule)
            for index, rule in enumerate(self.rules)
            if rule.action == "most"
        }
        self._held: dict[int, HeldSample] = {}
        self._ring: dict[str, deque[HeldSample]] = {}
        self._claims: Claims = {}
        self._triggers: dict[int, list[tuple[int, int]]] = {}
        self._source = ""
        self._late_labels = False
        self._ranked_claims: Sequence[tuple[int, IntArray]] = ()
        self._offered = 0
        """How many samples were offered since rules claimed some."""
        self._most_before = max((rule.before for rule in self.rules), default=0)

    def __len__(self) -> int:
        return super().__len__() + sum(id_ not in self._entries for id_ in self._held)

    def claim(
        self,
        claims: Claims,
        triggers: Claims | None = None,
        source: str = "",
        *,
        late: bool = False,
        ranked: Sequence[tuple[int, IntArray]] = (),
    ) -> None:
        """Say which rules match the samples that are offered next.

        Parameters
        ----------
        claims
            By id, the rules that match, with the sample's group under each.
        triggers
            The same for rules that also hold what came before such a sample.
        source
            Where the samples come from.
        late
            Whether they came before, and only their labels come now: then they are not among those
            that came before the next sample.
        ranked
            Of rules without groups, the places of the samples that match: by their scores alone
            most of them are told to be too low.
        """
        self._ranked_claims, self._offered = ranked, 0
        self._claims, self._triggers, self._source = claims, triggers or {}, source
        self._late_labels = late

    def holders(self, id_: int) -> tuple[int, ...]:
        """Give the rules that hold a sample, and those that limit it."""
        if id_ not in self._held and id_ not in self._claims:
            return ()
        holding = [index for index, held in self._holds.items() if id_ in held.ids]
        limiting = [index for index, _ in self._claims.get(id_, ()) if index in self._limits]
        return (*holding, *limiting)

    @property
    def remembers(self) -> bool:
        """Whether samples may be held after they came."""
        return self._most_before > 0

    def in_policy(self, id_: int) -> bool:
        """Tell whether a sample is among those that the policy keeps."""
        return id_ in self._entries

    def held(self, id_: int) -> HeldSample | None:
        """Give a sample that rules hold."""
        return self._held.get(id_)

    def stands_for(self, ids: IntArray) -> FloatArray:
        """Give how many arrivals each sample stands for under the limits of rules."""
        found = np.ones(len(ids))
        for limited in self._limits.values():
            found *= [limited.stands_for(id_) for id_ in ids.tolist()]
        return found

    def offer(self, batch: Batch, regions: IntArray, scores: Scores, arrivals: IntArray) -> Outcome:
        """Offer samples to the policy's slots, and those that rules claim to theirs, too."""
        if not self._claims and not self._ranked_claims and not self._most_before:
            outcome = super().offer(batch, regions, scores, arrivals)
        else:
            outcome = self._offer_limited(batch, regions, scores, arrivals)
            self._hold_claimed(batch, regions, scores, arrivals)
            if self._held:
                self._correct_refusals(outcome, batch.ids.tolist())
        if self._held:
            self._correct(outcome)
        return outcome

    @property
    def slots(self) -> int:
        """All slots of the policy, as they are divided now."""
        return self._slots

    def _offer_limited(
        self, batch: Batch, regions: IntArray, scores: Scores, arrivals: IntArray
    ) -> Outcome:
        """Offer to the policy what limits let through; what is limited comes one by one."""
        if not self._limits:
            return super().offer(batch, regions, scores, arrivals)
        limited = [
            i
            for i, id_ in enumerate(batch.ids.tolist())
            if any(index in self._limits for index, _ in self._claims.get(id_, ()))
        ]
        cuts = sorted({0, len(batch), *limited, *(i + 1 for i in limited)})
        parts, alone = [], set(limited)
        for start, stop in pairwise(cuts):
            part = slice(start, stop)
            own = scores[part].copy()
            if start in alone and not self._admits(int(batch.ids[start])):
                own[:] = -np.inf
            parts.append(super().offer(batch.take(part), regions[part], own, arrivals[part]))
        for groups in self._limits.values():
            groups.forget(self._entries)
        found = Outcome.concatenate(parts)
        return Outcome(found.results, found.evicted, found.thresholds, scores)

    def _admits(self, id_: int) -> bool:
        """Whether all limits let a sample through; what they let go makes way at once."""
        admitted = True
        for index, group in self._claims.get(id_, ()):
            if (limited := self._limits.get(index)) is None:
                continue
            key = uniform_keys(child_seed(self.seed, "limit", index), np.array([id_]))[0]
            leaving = limited.admit(id_, float(key), group)
            admitted = admitted and leaving != id_
            if leaving not in (id_, -1) and (entry := self._entries.get(leaving)) is not None:
                self._settle()
                self._let_leave(self._drop(entry))
        return admitted

    def _hold_claimed(
        self, batch: Batch, regions: IntArray, scores: Scores, arrivals: IntArray
    ) -> None:
        """Let rules hold what they match, and what came before it."""
        ring = None
        if self._most_before and not self._late_labels:
            ring = self._ring.setdefault(self._source, deque(maxlen=self._most_before))
        ids = batch.ids.tolist()
        found = self._with_ranked(ids, scores)
        for i, id_ in enumerate(ids):
            claims = found.get(id_)
            if claims is not None:
                score = float(scores[i])
                claims = [claim for claim in claims if self._may_hold(*claim, score)]
            if not claims and ring is None:
                continue
            y = batch.y[i]
            sample = HeldSample(
                id_,
                batch.x[i],
                y if y.ndim else y.item(),
                int(regions[i]),
                float(scores[i]),
                int(arrivals[i]),
            )
            if ring is not None:
                sample = sample._replace(x=sample.x.copy(), tag=self.tag(id_))
            for index, group in claims or ():
                self._take(index, group, sample)
            if ring is not None:
                self._hold_earlier(id_, ring)
                ring.append(sample)

    def _with_ranked(self, ids: Sequence[int], scores: Scores) -> Claims:
        """Give all claims, but those of samples that rank too low for rules without groups."""
        first, self._offered = self._offered, self._offered + len(ids)
        if not self._ranked_claims:
            return self._claims
        found = {id_: [*claims] for id_, claims in self._claims.items()}
        for index, places in self._ranked_claims:
            begin, end = places.searchsorted((first, self._offered))
            own = places[begin:end] - first
            for i in own[~(scores[own] < self._holds[index].floor)].tolist():
                found.setdefault(ids[i], []).append((index, 0))
        return found

    def _may_hold(self, index: int, group: int, score: float) -> bool:
        held = self._holds.get(index)
        return held is not None and not held.refuses(score, group)

    def _hold_earlier(self, id_: int, ring: Iterable[HeldSample]) -> None:
        """Let rules hold what came before a sample that triggers them."""
        for index, group in self._triggers.get(id_, ()):
            for earlier in list(ring)[-self.rules[index].before :]:
                was_held = earlier.id in self._holds[index].ids
                self._take(index, group, earlier)
                if not was_held and earlier.id in self._holds[index].ids:
                    self.late.append(earlier)

    def _take(self, index: int, group: int, sample: HeldSample) -> None:
        """Let one rule hold a sample, if it is not too low."""
        leaving = self._holds[index].take(sample.id, sample.score, sample.arrival, group)
        if leaving != sample.id and sample.id not in self._held:
            # Only what is held is copied from its batch.
            self._held[sample.id] = sample._replace(x=sample.x.copy(), y=_own(sample.y))
        if leaving not in (-1, sample.id):
            self._release(leaving)

    def _release(self, id_: int) -> None:
        """Forget a sample that no rule holds any more."""
        if any(id_ in held.ids for held in self._holds.values()):
            return
        self._held.pop(id_, None)
        if id_ not in self._entries:
            self.dropped.append(id_)

    def _let_leave(self, id_: int) -> None:
        if id_ not in self._held:
            self.dropped.append(id_)

    def _correct(self, outcome: Outcome) -> None:
        """Say that nothing left where rules still hold what the policy evicted."""
        for i in np.flatnonzero(outcome.evicted >= 0).tolist():
            if int(outcome.evicted[i]) in self._held:
                outcome.evicted[i] = -1
                if outcome.results[i] == OfferResult.REPLACED:
                    outcome.results[i] = OfferResult.KEPT

    def _correct_refusals(self, outcome: Outcome, ids: list[int]) -> None:
        """Say that what the policy refused was kept, where rules hold it."""
        held, entries, results = self._held, self._entries, outcome.results
        for i in [i for i, id_ in enumerate(ids) if id_ in held and id_ not in entries]:
            if results[i] == OfferResult.REFUSED:
                results[i] = OfferResult.KEPT

    def take_changes(self) -> tuple[list[int], list[HeldSample]]:
        """Give what left and what came besides, since last asked."""
        gone = [id_ for id_ in self.dropped if id_ not in self._entries and id_ not in self._held]
        late = [sample for sample in self.late if sample.id in self._held]
        self.dropped, self.late = [], []
        return gone, late

    def configure(self, quotas: IntArray) -> list[int]:
        """Set the policy's slots of each region; what rules hold stays."""
        return [id_ for id_ in super().configure(quotas) if id_ not in self._held]

    def rescore(self, scores: Scores) -> list[int]:
        """Set new scores for what the policy keeps; what rules hold keeps its own."""
        return [id_ for id_ in super().rescore(scores) if id_ not in self._held]

    def label_of(self, id_: int) -> Any:
        """Give the label of a stored sample, whoever holds it."""
        found = super().label_of(id_)
        held = self._held.get(id_)
        return held.y if found is None and held is not None else found

    def relabel(self, id_: int, label: Any, region: int, score: float) -> list[int]:
        """Correct the label of a stored sample, whoever holds it."""
        if (held := self._held.get(id_)) is not None:
            self._held[id_] = held._replace(y=label, region=region)
        if id_ not in self._entries:
            return []
        dropped = super().relabel(id_, label, region, score)
        return [gone for gone in dropped if gone not in self._held]

    def remove(self, ids: Iterable[int]) -> None:
        """Take samples out, whoever holds them."""
        ids = {*ids}
        super().remove(ids)
        for id_ in ids:
            for held in self._holds.values():
                if id_ in held.ids:
                    held.let_go(id_)
            self._held.pop(id_, None)
        for source, ring in self._ring.items():
            left = (sample for sample in ring if sample.id not in ids)
            self._ring[source] = deque(left, maxlen=ring.maxlen)

    def ranks(self) -> dict[str, AnyArray]:
        """Give the ranks of all that is stored; those of what rules alone hold are their own."""
        ranks = super().ranks()
        alone = [sample for id_, sample in self._held.items() if id_ not in self._entries]
        if not alone:
            return ranks
        scores = [sample.score for sample in alone]
        added = {
            "ids": [sample.id for sample in alone],
            "regions": [sample.region for sample in alone],
            "arrivals": [sample.arrival for sample in alone],
            "uses": [0] * len(alone),
            "scores": scores,
            "tiers": [HELD] * len(alone),
            "effective": scores,
        }
        joined = {
            name: np.concatenate([column, np.array(added[name], dtype=column.dtype)])
            for name, column in ranks.items()
        }
        order = np.argsort(joined["arrivals"], kind="stable")
        return {name: column[order] for name, column in joined.items()}

    def hold_again(self, sample: HeldSample, claims: Iterable[tuple[int, int]]) -> None:
        """Let rules hold a sample again that a file says they held."""
        for index, group in claims:
            if index in self._holds:
                self._take(index, group, sample)
            elif index in self._limits:
                key = uniform_keys(child_seed(self.seed, "limit", index), np.array([sample.id]))
                self._limits[index].admit(sample.id, float(key[0]), group)

    def hold_instead(self, sample: HeldSample, claims: Iterable[tuple[int, int]]) -> None:
        """Let a rule hold a sample that nothing else does, not one that the policy has, too.

        For a store that was read back: a file may say that a rule holds a sample which it has let
        go since, and that one would take the place of this.
        """
        for index, group in claims:
            if (held := self._holds.get(index)) is None:
                continue
            spare = [id_ for id_ in held.ids if id_ in self._entries]
            # Of its own group first, and the lowest.
            spare.sort(key=lambda id_: (held.ids[id_][0] != group, held.ids[id_][1]))
            while spare and held.is_full(group):
                leaving = spare.pop(0)
                held.let_go(leaving)
                self._release(leaving)
            if not held.is_full(group):
                self._take(index, group, sample)
                return

    def leave_to_rules(self, quotas: IntArray) -> None:
        """Take from the policy what it has no slot for under these quotas, if rules hold it.

        The lowest scores first. For a store that was read back: a file may not say what had left
        the policy and stayed with a rule, and without this another sample would make way for it.
        """
        ranks = super().ranks()
        held = np.bincount(ranks["regions"], minlength=self.regions)
        leaving = []
        for place in np.argsort(ranks["effective"], kind="stable").tolist():
            if self.would_hold(held, quotas):
                break
            id_, region = int(ranks["ids"][place]), int(ranks["regions"][place])
            if id_ in self._held and (self.soft_quotas or held[region] > quotas[region]):
                held[region] -= 1
                leaving.append(id_)
        super().remove(leaving)

    def snapshot(self) -> State:
        """Take the state as plain arrays, rules and all."""
        policy = {**super().ranks(), "quotas": np.array(self._quotas, dtype=np.int64)}
        batch = self.stored().batch
        samples = [*self._held.values()]
        recent = [*self._ring.get("", ())]
        claims = [
            (id_, index, group)
            for index, held in self._holds.items()
            for id_, (group, _) in held.ids.items()
        ]
        limited = [
            (index, group, id_, groups.seen[group])
            for index, groups in self._limits.items()
            for group, members in groups.groups.items()
            for _, id_ in members
        ]
        return {
            "x": batch.x,
            "y": batch.y,
            **policy,
            **_columns("held", samples),
            **_columns("recent", recent),
            "claims": np.array(claims, dtype=np.int64).reshape(-1, 3),
            "limited": np.array(limited, dtype=np.int64).reshape(-1, 4),
        }

    def restore(self, state: State) -> None:
        """Become what `snapshot` described; a state without rules has none that hold anything."""
        super().restore(state)
        self._clear_rules()
        self.dropped, self.late = [], []
        for sample in _samples("held", state):
            self._held[sample.id] = sample
        for id_, index, group in state.get("claims", np.zeros((0, 3), np.int64)).tolist():
            sample = self._held[id_]
            self._holds[index].take(id_, sample.score, sample.arrival, group)
        if self._most_before:
            self._ring[""] = deque(_samples("recent", state), maxlen=self._most_before)
        for index, group, id_, seen in state.get("limited", np.zeros((0, 4), np.int64)).tolist():
            key = uniform_keys(child_seed(self.seed, "limit", index), np.array([id_]))
            self._limits[index].admit(id_, float(key[0]), group)
            self._limits[index].seen[group] = seen


def _own(y: Any) -> Any:
    """Give a target memory of its own."""
    return y.copy() if isinstance(y, np.ndarray) else y


def _columns(name: str, samples: Sequence[HeldSample]) -> State:
    """Give samples as arrays, none where there are none."""
    if not samples:
        return {}
    return {
        f"{name}.x": np.stack([sample.x for sample in samples]),
        f"{name}.y": np.array([sample.y for sample in samples]),
        f"{name}.numbers": np.array(
            [(sample.id, sample.region, sample.arrival) for sample in samples], dtype=np.int64
        ),
        f"{name}.scores": np.array([sample.score for sample in samples]),
    }


def _samples(name: str, state: State) -> list[HeldSample]:
    """Give the samples that `_columns` made arrays of."""
    if f"{name}.x" not in state:
        return []
    columns = (
        state[f"{name}.x"],
        state[f"{name}.y"],
        state[f"{name}.numbers"].tolist(),
        state[f"{name}.scores"].tolist(),
    )
    return [
        HeldSample(id_, x.copy(), y.copy() if y.ndim else y.item(), region, score, arrival)
        for x, y, (id_, region, arrival), score in zip(*columns, strict=True)
    ]
