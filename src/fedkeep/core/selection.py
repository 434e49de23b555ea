"""What a device keeps of its stream: the policy scores, the store keeps the best, slots follow the plan (step 3)."""

from collections.abc import Callable
from functools import partial

import numpy as np

from fedkeep.core.policy import SelectionPolicy, View, sound_scores
from fedkeep.core.ports import Measurements, Outcome, Store, Stored
from fedkeep.core.seeds import uniform_keys
from fedkeep.core.shares import Shares
from fedkeep.core.slices import SliceOf
from fedkeep.core.types import Assignment, Batch, IntArray, Scores, State, Vector


class Selection:
    """Offers samples to the store in the order they came; nothing depends on how a stream is cut into batches."""

    def __init__(self, policy: SelectionPolicy, store: Store, capacity: int, shares: Shares, seed: int) -> None:
        self._policy, self._store, self._capacity, self._seed = policy, store, capacity, seed
        self.shares = shares
        self.memory: State = {}
        """Past measurements that the policy asks for."""
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
        parts: list[Outcome] = []
        for start, stop, renewed in self.shares.stretches(regions) if self.divides else [(0, len(batch), False)]:
            if self.divides:
                self.shares.see(regions[start : start + 1])
                if renewed:
                    self.divide()
                self.shares.see(regions[start + 1 : stop])
            step = 1 if self._policy.sequential else stop - start
            for part in (slice(i, i + step) for i in range(start, stop, step)):
                measured = None if measurements is None else SliceOf(measurements, part)
                parts.append(self._offer(batch.take(part), regions[part], measured))
        return Outcome.concatenate(parts)

    def revalue(self, stored: Stored, measurements: Measurements | None, seed: int) -> None:
        """Scores what is stored anew, as measured under a new model."""
        if len(stored.batch):
            keys = partial(uniform_keys, seed, stored.batch.ids)
            self._store.revalue(self._score(stored.batch, measurements, stored.arrivals, keys, stored.scores))

    def _offer(self, batch: Batch, regions: IntArray, measurements: Measurements | None) -> Outcome:
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
