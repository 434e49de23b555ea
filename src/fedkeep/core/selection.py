"""What a device keeps of its stream: the best by score, slots by plan or by share (step 3)."""

from collections.abc import Callable
from functools import partial
from typing import cast

import numpy as np

from fedkeep.core.errors import FedkeepError
from fedkeep.core.policy import ScoringContext, SelectionPolicy, checked_scores
from fedkeep.core.protocols import Outcome, PerSampleGradients, Store, Stored
from fedkeep.core.seeds import uniform_keys
from fedkeep.core.slices import slice_of
from fedkeep.core.types import (
    ArraySpec,
    Assignment,
    Batch,
    FloatArray,
    IntArray,
    Scores,
    State,
    StateSpec,
    Vector,
)

_DECAY = 0.99
"""The factor on earlier counts at each participation, in the regions' shares of the stream."""


class _Unmeasured:
    """Stands for measurements before there is a model, for policies that need none."""

    def __getattr__(self, name: str) -> object:
        raise FedkeepError(f"a policy with needs_model = False must not ask for {name}")


class LabelFrequencies:
    """Counts of arrivals by region, decaying slowly; they do not depend on how a stream is cut.

    Parameters
    ----------
    regions : int
        Y, the number of regions.
    seed : int
        The seed of the systematic draw by which slots rotate.

    Examples
    --------
    >>> frequencies = LabelFrequencies(3, seed=1)
    >>> frequencies.update(np.array([0, 0, 0, 0, 2]))
    >>> frequencies.values().tolist()
    [0.8, 0.0, 0.2]
    >>> frequencies.allocate(6).tolist()
    [4, 0, 2]
    """

    def __init__(self, regions: int, seed: int = 0) -> None:
        self._seed = seed
        self._counts = np.zeros(regions)
        self._arrivals = 0
        self.targets: IntArray = np.zeros(regions, dtype=np.int64)
        """The slots of each region, as they were last allocated."""

    def update(self, regions: IntArray) -> None:
        """Count arrivals."""
        self._counts += np.bincount(regions, minlength=len(self._counts))
        self._arrivals += len(regions)

    def decay(self) -> None:
        """Let what came before a participation count a little less."""
        self._counts *= _DECAY

    def values(self) -> FloatArray:
        """Give each region's share of the stream, (Y,); zeros before anything has come."""
        total = self._counts.sum()
        return self._counts / total if total > 0 else self._counts.copy()

    def change_points(self, regions: IntArray) -> list[tuple[int, int, bool]]:
        """Cut a batch where slots are allocated anew.

        They are at the first sample of a region, and whenever twice as many samples have come as
        at the last such time.

        Returns
        -------
        list of tuple
            Ranges (start, stop) of the batch, and whether slots change at the first sample of each.
        """
        unseen = np.flatnonzero(self._counts[regions] == 0)
        changes: set[int] = set()
        if len(unseen):
            _, first = np.unique(regions[unseen], return_index=True)
            changes.update(unseen[first].tolist())
        doubled = 1 << self._arrivals.bit_length()
        while doubled <= self._arrivals + len(regions):
            changes.add(doubled - self._arrivals - 1)
            doubled *= 2
        starts = sorted({0, *changes})
        stops = [*starts[1:], len(regions)]
        return [(a, b, a in changes) for a, b in zip(starts, stops, strict=True)]

    def allocate(self, capacity: int) -> IntArray:
        """Allocate slots in proportion to the root of the regions' shares.

        So rare regions are present and frequent ones have samples enough. Where a region's due is
        a fraction, slots rotate: a systematic draw by the number of arrivals gives every region its
        due over time.

        Parameters
        ----------
        capacity : int
            All slots.

        Returns
        -------
        IntArray
            Whole slots for each region, (Y,), `capacity` in all.
        """
        due = np.sqrt(self.values())
        if not due.any():
            return self.targets
        upto = capacity * np.cumsum(due) / due.sum()
        upto[-1] = capacity
        offset = uniform_keys(self._seed, np.array([self._arrivals]))[0]
        self.targets = np.diff(np.floor(upto + offset), prepend=0.0).astype(np.int64)
        return self.targets

    def repair(self, state: State, held: IntArray, capacity: int) -> State:
        """Make a snapshot's counts at least those that the stored samples show.

        Parameters
        ----------
        state : State
            A snapshot.
        held : IntArray
            Stored samples of each region, (Y,).
        capacity : int
            All slots; an allocation of other slots is dropped.
        """
        counts, targets = state["counts"], state["targets"]
        return {
            "counts": np.where(counts > 0, counts, held),
            "arrivals": np.maximum(state["arrivals"], held.sum()),
            "targets": targets if targets.sum() == capacity else np.zeros_like(targets),
        }

    def state_spec(self) -> StateSpec:
        """Describe the arrays of `snapshot`."""
        regions = len(self._counts)
        return {
            "counts": ArraySpec((regions,), np.float64),
            "arrivals": ArraySpec((), np.int64),
            "targets": ArraySpec((regions,), np.int64),
        }

    def snapshot(self) -> State:
        """Take counts, arrivals and slots."""
        return {
            "counts": self._counts.copy(),
            "arrivals": np.array(self._arrivals),
            "targets": self.targets,
        }

    def restore(self, state: State) -> None:
        """Become what `snapshot` described."""
        self._counts = np.array(state["counts"], dtype=np.float64)
        self._arrivals = int(state["arrivals"])
        self.targets = np.array(state["targets"], dtype=np.int64)


class Selection:
    """Offers samples to the store in the order they came, however the stream is cut into batches.

    Parameters
    ----------
    policy : SelectionPolicy
        How samples are scored.
    store : Store
        Where the best are kept.
    capacity : int
        All slots.
    frequencies : LabelFrequencies
        What slots are allocated by, where the device does that by itself.
    seed : int
        The seed of the samples' random keys.
    draw_seed : int, optional
        Where it is given, a sample's random key follows from its id under this seed: one that
        comes again draws the same.
    """

    def __init__(
        self,
        policy: SelectionPolicy,
        store: Store,
        capacity: int,
        frequencies: LabelFrequencies,
        seed: int,
        draw_seed: int | None = None,
    ) -> None:
        self._policy, self._store, self._capacity, self._seed = policy, store, capacity, seed
        self.frequencies = frequencies
        self._draw_seed = draw_seed
        self.memory: State = {}
        """Past measurements that the policy asks for."""
        self.assignment: Assignment | None = None
        self.global_gradient: Vector | None = None
        """g_hat, which changes with the model alone."""
        self.arrivals = 0

    @property
    def divides(self) -> bool:
        """Whether the device allocates its slots itself: by policy, or before there is a plan."""
        return self._policy.balanced or self.assignment is None

    def assign(self, assignment: Assignment) -> None:
        """Follow a plan, as far as the policy leaves slots to it."""
        self.assignment = assignment
        if not self.divides:
            quotas = assignment.quotas
            unlimited = np.full_like(quotas, np.iinfo(np.int64).max)
            self._store.configure(unlimited if self._policy.unbounded else quotas)

    def divide(self) -> None:
        """Allocate the slots anew by what has come, where the device does that by itself."""
        if self.divides:
            self._store.configure(self.frequencies.allocate(self._capacity))

    def offer(
        self, batch: Batch, regions: IntArray, measurements: PerSampleGradients | None
    ) -> Outcome:
        """Score arrivals and offer them; slots that the device allocates change as they come."""
        parts: list[Outcome] = []
        whole = [(0, len(batch), False)]
        for start, stop, changes in (
            self.frequencies.change_points(regions) if self.divides else whole
        ):
            if self.divides:
                self.frequencies.update(regions[start : start + 1])
                if changes:
                    self.divide()
                self.frequencies.update(regions[start + 1 : stop])
            step = 1 if self._policy.sequential else stop - start
            for part in (slice(i, i + step) for i in range(start, stop, step)):
                measured = None if measurements is None else slice_of(measurements, part)
                came = batch.take(part)
                arrivals = self.arrivals + np.arange(len(came))
                self.arrivals += len(came)
                keys = partial(uniform_keys, self._seed, arrivals)
                if self._draw_seed is not None:
                    keys = partial(uniform_keys, self._draw_seed, came.ids)
                scores = self._score(came, measured, arrivals, keys)
                parts.append(self._store.offer(came, regions[part], scores, arrivals))
        return Outcome.concatenate(parts)

    def rescore(self, stored: Stored, measurements: PerSampleGradients | None, seed: int) -> None:
        """Score what is stored anew, as measured under a new model."""
        if len(stored.batch):
            self._store.rescore(self.new_scores(stored, measurements, seed))

    def new_scores(
        self, stored: Stored, measurements: PerSampleGradients | None, seed: int
    ) -> Scores:
        """Score stored samples anew, and change nothing."""
        keys = partial(uniform_keys, seed, stored.batch.ids)
        return self._score(stored.batch, measurements, stored.arrivals, keys, stored.scores)

    def _score(
        self,
        batch: Batch,
        measurements: PerSampleGradients | None,
        arrivals: IntArray,
        keys: Callable[[], Scores],
        previous: Scores | None = None,
    ) -> Scores:
        """Ask the policy for scores; random keys while there is no model that it needs."""
        if measurements is None:
            if self._policy.needs_model:
                return keys()
            measurements = cast(PerSampleGradients, _Unmeasured())
        none = np.empty(0, dtype=np.int64)
        stored_ids = self._store.stored().batch.ids if self._policy.sequential else none
        context = ScoringContext(
            measurements,
            self.global_gradient,
            arrivals,
            keys,
            stored_ids,
            self._capacity,
            self.memory,
            previous,
        )
        return checked_scores(self._policy, batch, context)
