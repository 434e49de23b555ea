"""What a device keeps of its stream: the policy scores, the store keeps the best, slots follow the plan (step 3)."""

from collections.abc import Callable
from functools import partial
from typing import cast

import numpy as np

from fedkeep.core.errors import FedkeepError
from fedkeep.core.policy import ScoringContext, SelectionPolicy, checked_scores
from fedkeep.core.protocols import Outcome, PerSampleGradients, Store, Stored
from fedkeep.core.seeds import uniform_keys
from fedkeep.core.slices import slice_of
from fedkeep.core.types import Assignment, Batch, FloatArray, IntArray, Scores, State, Vector

_FORGETTING = 0.99
"""What earlier arrivals count after one more participation, in the regions' shares of the stream."""


class _Unmeasured:
    """Stands for measurements before there is a model, for policies that need none."""

    def __getattr__(self, name: str) -> object:
        raise FedkeepError(f"a policy with needs_model = False must not ask for {name}")


class LabelFrequencies:
    """Counts arrivals by region, slowly forgetting; what follows from it does not depend on how a stream is cut.

    >>> shares = LabelFrequencies(3, seed=1)
    >>> shares.see(np.array([0, 0, 0, 0, 2]))
    >>> shares.values().tolist()
    [0.8, 0.0, 0.2]
    >>> shares.divide(6).tolist()
    [4, 0, 2]
    """

    def __init__(self, regions: int, seed: int = 0) -> None:
        self._seed = seed
        self._counts = np.zeros(regions)
        self._arrivals = 0
        self.targets: IntArray = np.zeros(regions, dtype=np.int64)
        """Slots as they were last divided."""

    def see(self, regions: IntArray) -> None:
        self._counts += np.bincount(regions, minlength=len(self._counts))
        self._arrivals += len(regions)

    def age(self) -> None:
        """A participation has passed: what came before counts a little less."""
        self._counts *= _FORGETTING

    def values(self) -> FloatArray:
        """Each region's share of the stream, (Y,); zeros before anything has come."""
        total = self._counts.sum()
        return self._counts / total if total > 0 else self._counts.copy()

    def stretches(self, regions: IntArray) -> list[tuple[int, int, bool]]:
        """Ranges of a batch, and whether targets change at the first sample of each.

        They do at a region never seen before, and whenever twice as many samples have come as at the last such time.
        """
        found, first = np.unique(regions, return_index=True)
        changes = set(first[self._counts[found] == 0].tolist())
        doubled = 1 << self._arrivals.bit_length()
        while doubled <= self._arrivals + len(regions):
            changes.add(doubled - self._arrivals - 1)
            doubled *= 2
        starts = sorted({0, *changes})
        return [
            (a, b, a in changes) for a, b in zip(starts, [*starts[1:], len(regions)], strict=True)
        ]

    def divide(self, capacity: int) -> IntArray:
        """Whole slots for each region, `capacity` in all; where a region's due is a fraction, it takes turns.

        By the root of their shares, rare regions are there and frequent ones have samples enough. The turns are a
        systematic draw by the number of arrivals: over time every region has its due.
        """
        due = np.sqrt(self.values())
        if not due.any():
            return self.targets
        upto = capacity * np.cumsum(due) / due.sum()
        upto[-1] = capacity
        turn = uniform_keys(self._seed, np.array([self._arrivals]))[0]
        self.targets = np.diff(np.floor(upto + turn), prepend=0.0).astype(np.int64)
        return self.targets

    def snapshot(self) -> State:
        return {
            "counts": self._counts.copy(),
            "arrivals": np.array(self._arrivals),
            "targets": self.targets,
        }

    def restore(self, state: State) -> None:
        self._counts = np.array(state["counts"], dtype=np.float64)
        self._arrivals = int(state["arrivals"])
        self.targets = np.array(state["targets"], dtype=np.int64)


class Selection:
    """Offers samples to the store in the order they came; nothing depends on how a stream is cut into batches."""

    def __init__(
        self,
        policy: SelectionPolicy,
        store: Store,
        capacity: int,
        shares: LabelFrequencies,
        seed: int,
    ) -> None:
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
            self._store.configure(
                np.full_like(quotas, np.iinfo(np.int64).max) if self._policy.unbounded else quotas
            )

    def divide(self) -> None:
        """Divides the slots anew by what has come so far, where the device does that by itself."""
        if self.divides:
            self._store.configure(self.shares.divide(self._capacity))

    def offer(
        self, batch: Batch, regions: IntArray, measurements: PerSampleGradients | None
    ) -> Outcome:
        """Scores arrivals and offers them; where the device divides its slots, it does so as they come."""
        parts: list[Outcome] = []
        stretches = self.shares.stretches(regions) if self.divides else [(0, len(batch), False)]
        for start, stop, renewed in stretches:
            if self.divides:
                self.shares.see(regions[start : start + 1])
                if renewed:
                    self.divide()
                self.shares.see(regions[start + 1 : stop])
            step = 1 if self._policy.sequential else stop - start
            for part in (slice(i, i + step) for i in range(start, stop, step)):
                measured = None if measurements is None else slice_of(measurements, part)
                came = batch.take(part)
                arrivals = self.arrivals + np.arange(len(came))
                self.arrivals += len(came)
                scores = self._score(
                    came, measured, arrivals, partial(uniform_keys, self._seed, arrivals)
                )
                parts.append(self._store.offer(came, regions[part], scores, arrivals))
        return Outcome.concatenate(parts)

    def revalue(self, stored: Stored, measurements: PerSampleGradients | None, seed: int) -> None:
        """Scores what is stored anew, as measured under a new model."""
        if len(stored.batch):
            keys = partial(uniform_keys, seed, stored.batch.ids)
            self._store.revalue(
                self._score(stored.batch, measurements, stored.arrivals, keys, stored.scores)
            )

    def _score(
        self,
        batch: Batch,
        measurements: PerSampleGradients | None,
        arrivals: IntArray,
        keys: Callable[[], Scores],
        previous: Scores | None = None,
    ) -> Scores:
        """The policy's scores; random keys while there is no model that it needs to measure with."""
        if measurements is None:
            if self._policy.needs_model:
                return keys()
            measurements = cast(PerSampleGradients, _Unmeasured())
        stored_ids = (
            self._store.stored().batch.ids
            if self._policy.sequential
            else np.empty(0, dtype=np.int64)
        )
        view = ScoringContext(
            measurements,
            self.direction,
            arrivals,
            keys,
            stored_ids,
            self._capacity,
            self.memory,
            previous,
        )
        return checked_scores(self._policy, batch, view)
