"""What a device keeps of its stream: the policy scores, the store keeps the best, slots follow the plan (step 3)."""

from collections.abc import Callable
from functools import partial

import numpy as np

from fedkeep.core.memory import Memory
from fedkeep.core.policy import SelectionPolicy, View, sound_scores
from fedkeep.core.ports import Measurements, Outcome, Store
from fedkeep.core.seeds import uniform_keys
from fedkeep.core.shares import Shares
from fedkeep.core.slices import SliceOf
from fedkeep.core.types import Assignment, Batch, IntArray, Scores, Vector


class Selection:
    """Offers samples to the store in the order they came; nothing depends on how a stream is cut into batches."""

    def __init__(self, policy: SelectionPolicy, store: Store, capacity: int, shares: Shares, seed: int) -> None:
        self._policy, self._store, self._capacity, self._seed = policy, store, capacity, seed
        self.shares, self.memory = shares, Memory()
        self.assignment: Assignment | None = None
        self.direction: Vector | None = None
        """g_hat, which changes with the model alone."""
        self.arrivals = 0

    @property
    def divides(self) -> bool:
        """Whether the device divides its slots by itself: by policy, and before there is a plan."""
        return self._policy.balanced or self.assignment is None

    def assign(self, assignment: Assignment) -> None:
        """Follows a plan, as far as the policy leaves slots to it."""
        self.assignment = assignment
        quotas = assignment.quotas
        if not self.divides:
            self._store.configure(np.full_like(quotas, np.iinfo(np.int64).max) if self._policy.unbounded else quotas)

    def divide(self) -> None:
        """Divides the slots anew by what has come so far, where the device does that by itself."""
        if self.divides:
            self._store.configure(self.shares.divide(self._capacity))

    def offer(self, batch: Batch, regions: IntArray, measurements: Measurements | None) -> Outcome:
        """Scores arrivals and offers them; where the device divides its slots, it does so as they come."""
        if not self.divides:
            return self._offer(batch, regions, measurements)
        parts = []
        for start, stop, renewed in self.shares.stretches(regions):
            self.shares.see(regions[start : start + 1])
            if renewed:
                self.divide()
            self.shares.see(regions[start + 1 : stop])
            part = slice(start, stop)
            parts.append(self._offer(batch.take(part), regions[part], _part_of(measurements, part)))
        return Outcome.concatenate(parts)

    def revalue(self, measure: Callable[[Batch], Measurements | None], seed: int) -> None:
        """Scores what is stored anew, as measured under a new model."""
        stored = self._store.stored()
        if len(stored.batch):
            keys = partial(uniform_keys, seed, stored.batch.ids)
            scores = self._score(stored.batch, measure(stored.batch), stored.arrivals, keys, stored.scores)
            self._store.revalue(scores)

    def _offer(self, batch: Batch, regions: IntArray, measurements: Measurements | None) -> Outcome:
        if not self._policy.sequential or len(batch) <= 1:
            return self._offer_at_once(batch, regions, measurements)
        each = [slice(i, i + 1) for i in range(len(batch))]
        return Outcome.concatenate(
            [self._offer_at_once(batch.take(i), regions[i], _part_of(measurements, i)) for i in each]
        )

    def _offer_at_once(self, batch: Batch, regions: IntArray, measurements: Measurements | None) -> Outcome:
        arrivals = self.arrivals + np.arange(len(batch))
        self.arrivals += len(batch)
        scores = self._score(batch, measurements, arrivals, partial(uniform_keys, self._seed, arrivals))
        return self._store.offer(batch, regions, scores, arrivals)

    def _score(
        self,
        batch: Batch,
        measurements: Measurements | None,
        arrivals: IntArray,
        keys: Callable[[], Scores],
        previous: Scores | None = None,
    ) -> Scores:
        """The policy's scores; random keys while there is no model to measure with."""
        if measurements is None:
            return keys()
        stored_ids = self._store.stored().batch.ids if self._policy.sequential else np.empty(0, dtype=np.int64)
        view = View(measurements, self.direction, arrivals, keys, stored_ids, self._capacity, self.memory, previous)
        return sound_scores(self._policy, batch, view)


def _part_of(measurements: Measurements | None, part: slice) -> Measurements | None:
    return None if measurements is None else SliceOf(measurements, part)
