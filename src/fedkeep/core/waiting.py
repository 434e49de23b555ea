"""The waiting room: samples whose label has not come yet, in a part of the device's own slots."""

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple, Protocol, TypeAlias

import numpy as np

from fedkeep.core.bounds import check_range
from fedkeep.core.protocols import OfferResult
from fedkeep.core.seeds import uniform_keys
from fedkeep.core.types import (
    AnyArray,
    ArraySpec,
    FloatArray,
    IntArray,
    Scores,
    State,
    StateSpec,
)

UNLABELLED = -1
"""Stands for the label of a sample that has none yet."""
WaitingRule: TypeAlias = Literal[
    "random", "balanced", "uncertain", "balanced-uncertain", "newest", "oldest"
]
_PATIENCE = 2
"""Times the longest wait that ended in a label, for which a sample may wait."""
_BALANCED = ("balanced", "balanced-uncertain")
COUNTED = ("arrived", "labelled", "pseudo", "displaced", "expired", "early_lost")
"""What a room counts since it was made, in the order of its state."""


@dataclass(frozen=True)
class WaitingOptions:
    """`waiting`: samples that come without a label, and wait for it."""

    share: float = 0.0
    """Share of the device's slots in which samples wait for their label, one slot at least; 0:
    samples without a label are not taken."""
    rule: WaitingRule = "balanced"
    """Which samples wait when more come than there are slots: a `random` draw, the same
    `balanced` by predicted label, the most `uncertain` ones, these balanced, the `newest` or the
    `oldest`."""
    max_age: int | None = None
    """Arrivals without a label after which a sample waits no longer; None: twice the longest wait
    after which a label has come so far, and only once its slot is wanted; 0: it waits for as long
    as its rule keeps it."""
    early_labels: int = 64
    """Labels that are remembered if they come before their samples; the oldest are forgotten
    first."""
    pseudo_labels: float | None = None
    """Probability from which the model's own prediction counts as a sample's label until a true
    one comes; None: only true labels count."""

    def __post_init__(self) -> None:
        check_range(self, "share", least=0, below=1)
        check_range(self, "max_age", least=0)
        check_range(self, "early_labels", least=0, most=1 << 20)
        check_range(self, "pseudo_labels", above=0, most=1)
        if self.share == 0 and self.pseudo_labels is not None:
            raise ValueError("pseudo_labels are for samples that wait: set share above 0")

    def slots(self, capacity: int) -> int:
        """Give the slots of the waiting room of a device with so many slots in all.

        At least one slot is left to the store.

        Examples
        --------
        >>> options = WaitingOptions(share=0.25)
        >>> options.slots(10), options.slots(2), options.slots(1), WaitingOptions().slots(10)
        (2, 1, 0, 0)
        """
        if not self.share:
            return 0
        return min(max(1, round(self.share * capacity)), capacity - 1)


class LabelResult(IntEnum):
    """What became of a label."""

    UNKNOWN = 0
    """No sample of that id is here, and there is no room to remember its label."""
    EARLY = 1
    """The label is remembered until its sample comes."""
    LABELLED = 2
    """A waiting sample got its label, and was offered to the store."""
    KNOWN = 3
    """The sample is stored under this label."""
    CORRECTED = 4
    """The sample was stored under another label, which this one replaced."""


class Departure(IntEnum):
    """How a sample left the waiting room."""

    LABELLED = 0
    PSEUDO = 1
    """The model's own prediction became its label."""
    DISPLACED = 2
    """Another sample took its slot."""
    EXPIRED = 3


class WaitingJournal(Protocol):
    """Makes a waiting room's decisions durable; a room in memory has none."""

    def waits(self, id_: int, x: AnyArray, arrival: int, displaced: int | None) -> None:
        """Note that a sample waits from now on, in the slot of another or in a free one."""

    def leaves(self, id_: int, how: Departure) -> None:
        """Note that a sample has left, other than for a newcomer."""

    def held(self) -> list[int]:
        """Give the ids of what waited and rules want kept, when the process ended."""

    def waiting(self) -> tuple[AnyArray, IntArray, IntArray]:
        """Give samples, ids and arrival numbers of what waited when the process ended."""


class _Place(NamedTuple):
    """A sample's place: of a region the lowest key leaves first, of equals the oldest.

    What a rule wants kept leaves after all others.
    """

    held: bool
    key: float
    arrival: int
    id: int


class WaitingRoom:
    """Keeps a bounded number of samples without labels; which of them is decided without labels.

    A sample is of use only if it still waits when its label comes, so that a newcomer must be
    better by the rule than the one it displaces, and never wins by being new. Balanced rules
    divide the slots by predicted label, of the device's present model: the label with most samples
    gives way to one that has at least two fewer.

    Parameters
    ----------
    options : WaitingOptions
        The rule, and for how long samples wait.
    slots : int
        How many samples may wait.
    labels : int
        The number of labels; 1 where there is nothing to balance.
    seed : int
        The seed of the samples' random keys by order of arrival.
    draw_seed : int, optional
        The seed of random keys by id, instead.
    journal : WaitingJournal, optional
        Where decisions are made durable.

    Examples
    --------
    >>> room = WaitingRoom(WaitingOptions(0.5, "oldest"), slots=2, labels=3, seed=0)
    >>> x = np.zeros((3, 4), dtype=np.float32)
    >>> [result.name for result in room.offer(x, np.array([5, 6, 7]), None)]
    ['KEPT', 'KEPT', 'REFUSED']
    >>> room.leave(np.array([5]), Departure.LABELLED)
    >>> 5 in room, 6 in room, len(room)
    (False, True, 1)
    """

    def __init__(
        self,
        options: WaitingOptions,
        slots: int,
        labels: int,
        seed: int,
        draw_seed: int | None = None,
        journal: WaitingJournal | None = None,
    ) -> None:
        self.options, self.slots, self._labels = options, slots, labels
        self._seed, self._draw_seed, self._journal = seed, draw_seed, journal
        self._x: dict[int, AnyArray] = {}
        """What waits, by id, oldest first."""
        self._places: dict[int, tuple[int, _Place]] = {}
        """Region and place of each sample."""
        self._ranked: list[list[_Place]] = [[] for _ in range(max(1, labels))]
        """The samples of each region, the lowest key first."""
        self._held: set[int] = set()
        """What a rule wants kept: at most half of what may wait."""
        self.early: dict[int, float] = {}
        """Labels that came before their samples, by id, oldest first."""
        self.counts = dict.fromkeys(COUNTED, 0)
        self.longest = 0
        """The longest wait, in arrivals, after which a label has come."""

    def __len__(self) -> int:
        return len(self._x)

    def __contains__(self, id_: int) -> bool:
        return id_ in self._x

    @property
    def predicts(self) -> bool:
        """Whether anything here depends on what the model predicts."""
        by_rule = self.options.rule in ("uncertain", *_BALANCED)
        return self._labels > 1 and (by_rule or self.options.pseudo_labels is not None)

    @property
    def ids(self) -> IntArray:
        """The ids of what waits, oldest first."""
        return np.array([*self._x], dtype=np.int64)

    @property
    def arrivals(self) -> IntArray:
        """The arrival numbers of what waits, as `ids`."""
        return np.array([self._places[id_][1].arrival for id_ in self._x], dtype=np.int64)

    def x(self, ids: list[int]) -> AnyArray:
        """Give waiting samples, which stay where they are."""
        return np.stack([self._x[id_] for id_ in ids])

    def offer(
        self, x: AnyArray, ids: IntArray, scores: FloatArray | None, *, held: bool = False
    ) -> list[OfferResult]:
        """Offer samples in order, however a stream is cut into batches.

        Parameters
        ----------
        x : ndarray
            The samples, (n, ...).
        ids : ndarray of int
            Their ids; one that waits already changes nothing.
        scores : ndarray or None
            The probability of each label under the present model, (n, Y); None without a model.
        held : bool
            Whether a rule wants them kept: then no other displaces them, and they do not expire.

        Returns
        -------
        list of OfferResult
            What became of each sample.
        """
        first = self.counts["arrived"]
        arrivals = first + np.arange(len(ids))
        self.counts["arrived"] += len(ids)
        regions, keys = self._rank_by_rule(ids, arrivals, scores)
        results = []
        for i, id_ in enumerate(ids.tolist()):
            self._expire(first + i)
            if id_ in self:
                results.append(OfferResult.REFRESHED)
                continue
            place = _Place(held and self._may_hold, float(keys[i]), first + i, id_)
            admitted, displaced = self._way_in(int(regions[i]), place)
            if not admitted:
                results.append(OfferResult.REFUSED)
                continue
            results.append(OfferResult.KEPT if displaced is None else OfferResult.REPLACED)
            if displaced is not None:
                self.counts["displaced"] += 1
                self._take_out(displaced)
            self._put(x[i].copy(), int(regions[i]), place)
            if place.held:
                self._held.add(id_)
            if self._journal is not None:
                self._journal.waits(id_, x[i], first + i, displaced)
        return results

    @property
    def _may_hold(self) -> bool:
        return len(self._held) < max(1, self.slots // 2)

    def hold(self, id_: int) -> bool:
        """Let a rule keep a sample that waits already; False where too many are."""
        if not self._may_hold or id_ not in self._x:
            return False
        x = self._x[id_]
        region, place = self._places[id_]
        order = [*self._x]
        self._take_out(id_)
        self._held.add(id_)
        self._put(x, region, place._replace(held=True))
        self._x = {one: self._x[one] for one in order}  # it stays as old as it was
        return True

    def leave(self, ids: IntArray, how: Departure) -> None:
        """Let samples go, those among them that wait."""
        for id_ in ids.tolist():
            self.early.pop(id_, None)
            if id_ in self._x:
                if how == Departure.LABELLED:
                    wait = self.counts["arrived"] - self._places[id_][1].arrival
                    self.longest = max(self.longest, wait)
                self._take_out(id_)
                self.counts[how.name.lower()] += 1
                if self._journal is not None:
                    self._journal.leaves(id_, how)

    def forget(self, ids: IntArray) -> int:
        """Erase samples and early labels; gives how many samples waited.

        A journal is not notified: whoever erases also erases there.
        """
        waited = [id_ for id_ in ids.tolist() if id_ in self._x]
        for id_ in ids.tolist():
            self.early.pop(id_, None)
        for id_ in waited:
            self._take_out(id_)
        return len(waited)

    def remember(self, id_: int, label: float) -> bool:
        """Keep a label until its sample comes; False where none is kept."""
        self.early.pop(id_, None)
        self.early[id_] = label
        while len(self.early) > self.options.early_labels:
            del self.early[next(iter(self.early))]
            self.counts["early_lost"] += 1
        return id_ in self.early

    def rank(self, predict: Callable[[AnyArray], FloatArray | None]) -> None:
        """Rank what waits anew, under another model."""
        if not len(self) or not self.predicts:
            return
        ids, arrivals = self.ids, self.arrivals
        x = self.x(ids.tolist())
        self._fill(x, ids, arrivals, predict(x))

    def confident(self, scores: FloatArray | None) -> IntArray:
        """Give the pseudo-label of each sample, `UNLABELLED` where the model is not sure enough."""
        least = self.options.pseudo_labels
        if scores is None or least is None or self._labels < 2:
            return np.full(0 if scores is None else len(scores), UNLABELLED, dtype=np.int64)
        return np.where(scores.max(axis=1) >= least, scores.argmax(axis=1), UNLABELLED)

    def state_spec(self) -> StateSpec:
        """Describe the arrays of `snapshot`; with a journal, samples have a place of their own."""
        spec = {
            "counts": ArraySpec((len(COUNTED),), np.int64),
            "longest": ArraySpec((), np.int64),
            "early.ids": ArraySpec((self.options.early_labels,), np.int64, bounded=True),
            "early.labels": ArraySpec((self.options.early_labels,), np.float64, bounded=True),
        }
        samples = {"*": ArraySpec((0,), np.float64, optional=True)}
        return spec if self._journal is not None else spec | samples

    def snapshot(self) -> State:
        """Take the state as plain arrays."""
        state: State = {
            "counts": np.array([*self.counts.values()], dtype=np.int64),
            "longest": np.array(self.longest),
            "early.ids": np.array([*self.early], dtype=np.int64),
            "early.labels": np.array([*self.early.values()], dtype=np.float64),
        }
        if self._journal is not None:
            return state
        x = self.x([*self._x]) if self._x else np.zeros((0, 0), dtype=np.float32)
        held = np.array(sorted(self._held), dtype=np.int64)
        waits = {"x": x, "ids": self.ids, "arrivals": self.arrivals}
        return state | waits | ({"held": held} if len(held) else {})

    def restore(self, state: State) -> None:
        """Become what `snapshot` described; `rank` then ranks it under the device's model.

        A state from before there was a waiting room leaves it empty.
        """
        if "counts" not in state:
            state = {name: form.fresh() for name, form in self.state_spec().items() if name != "*"}
        self.counts = dict(zip(COUNTED, state["counts"].tolist(), strict=True))
        self.longest = int(state["longest"])
        early = (state["early.ids"].tolist(), state["early.labels"].tolist())
        self.early = dict(zip(*early, strict=True))
        none = np.zeros(0, dtype=np.int64)
        found = (state.get("x", none), state.get("ids", none), state.get("arrivals", none))
        x, ids, arrivals = found if self._journal is None else self._journal.waiting()
        kept = state.get("held", none).tolist() if self._journal is None else self._journal.held()
        self._held = set(kept) & set(ids.tolist())
        self.counts["arrived"] = max(self.counts["arrived"], int(arrivals.max(initial=-1)) + 1)
        order = np.argsort(arrivals, kind="stable")
        self._fill(x[order], ids[order], arrivals[order], None)

    def shrink(self) -> int:
        """Let go of what is beyond the slots, as after a change of options; gives how many went."""
        gone = sorted(place for _, place in self._places.values())[: max(0, len(self) - self.slots)]
        self.leave(np.array([place.id for place in gone], dtype=np.int64), Departure.DISPLACED)
        return len(gone)

    def _way_in(self, region: int, place: _Place) -> tuple[bool, int | None]:
        """Tell whether a newcomer is admitted, and the id of the sample that it displaces."""
        if len(self) < self.slots:
            return True, None
        held = [len(ranked) for ranked in self._ranked]
        most = max(held)
        if most >= held[region] + 2:
            lowest = min(ranked[0] for ranked in self._ranked if len(ranked) == most)
            if place.held or not lowest.held:
                return True, lowest.id
        rivals = [self._ranked[region]] if held[region] else self._ranked
        lowest = min(ranked[0] for ranked in rivals if ranked)
        if place.held and lowest.held:  # it has a region of its own kind to itself
            lowest = min(ranked[0] for ranked in self._ranked if ranked)
        return (True, lowest.id) if place[:2] > lowest[:2] else (False, None)

    def _put(self, x: AnyArray, region: int, place: _Place) -> None:
        self._x[place.id] = x
        self._places[place.id] = region, place
        insort(self._ranked[region], place)

    def _take_out(self, id_: int) -> None:
        del self._x[id_]
        self._held.discard(id_)
        region, place = self._places.pop(id_)
        ranked = self._ranked[region]
        del ranked[bisect_left(ranked, place)]

    def _fill(
        self, x: AnyArray, ids: IntArray, arrivals: IntArray, scores: FloatArray | None
    ) -> None:
        """Let these samples wait, and no others, oldest first."""
        self._x, self._places = {}, {}
        self._ranked = [[] for _ in self._ranked]
        regions, keys = self._rank_by_rule(ids, arrivals, scores)
        columns = zip(x, *(c.tolist() for c in (regions, keys, arrivals, ids)), strict=True)
        for sample, region, key, arrival, id_ in columns:
            self._put(sample, region, _Place(id_ in self._held, key, arrival, id_))

    def _rank_by_rule(
        self, ids: IntArray, arrivals: IntArray, scores: FloatArray | None
    ) -> tuple[IntArray, Scores]:
        """Give region and key of samples by the rule, from predictions where it needs them."""
        rule, order = self.options.rule, arrivals.astype(np.float64)
        regions = np.zeros(len(ids), dtype=np.int64)
        if rule in ("newest", "oldest"):
            return regions, order if rule == "newest" else -order
        keys = (
            uniform_keys(self._seed, arrivals)
            if self._draw_seed is None
            else uniform_keys(self._draw_seed, ids)
        )
        if scores is None or self._labels < 2:
            return regions, keys
        if rule in _BALANCED:
            regions = scores.argmax(axis=1)
        if rule in ("uncertain", "balanced-uncertain"):
            two = np.partition(scores, -2, axis=1)[:, -2:]
            keys = 1.0 - (two[:, 1] - two[:, 0])
        return regions, keys

    def _expire(self, arrival: int) -> None:
        """Let go of what has waited too long when this arrival comes."""
        given = self.options.max_age
        most = _PATIENCE * self.longest if given is None else given
        while most and (given or len(self) >= self.slots):
            first = next((id_ for id_ in self._x if id_ not in self._held), None)
            if first is None or self._places[first][1].arrival >= arrival - most:
                return
            self.leave(np.array([first]), Departure.EXPIRED)
