"""The velocity meter: how fast samples of each region arrive, over a sliding window of time."""

import numpy as np

from fedkeep.core.bounds import check_range
from fedkeep.core.types import ArraySpec, FloatArray, IntArray, State, StateSpec


class VelocityMeter:
    """Counts arrivals in buckets of time, in a ring: memory is (buckets, Y) whatever arrives.

    It looks back over `length`, in the caller's unit of time: rounds in the simulator, seconds in
    the agent. More buckets are finer and take more memory. A rate is defined from the first sample
    on: `least` is the shortest time to take it over, where times are continuous; without it a
    bucket once begun counts as whole. A clock that jumps back adds to the latest bucket; nothing is
    refused for it. Only times count, not how the stream is cut into batches.

    >>> meter = VelocityMeter(regions=2, length=10, buckets=10)
    >>> meter.observe(np.array([0, 0, 1]), time=0.0)
    >>> meter.observe(np.array([0]), time=3.0)
    >>> meter.velocity().tolist()  # over the four parts begun so far
    [0.75, 0.25]
    """

    def __init__(
        self, regions: int, length: float = 100.0, buckets: int = 100, least: float | None = None
    ) -> None:
        self.length, self.buckets, self.least = length, buckets, least
        check_range(self, "length", "least", above=0)
        check_range(self, "buckets", least=1)
        self._width = length / buckets
        self._counts = np.zeros((buckets, regions))
        self._first = self._latest = -1
        self._since = self._now = 0.0
        """When the first sample came, and the latest time heard of."""

    def observe(self, regions: IntArray, time: float | FloatArray) -> None:
        """Count samples that arrived in these regions at `time`, one for all or one each."""
        if not len(regions):
            return
        times = np.broadcast_to(np.asarray(time, dtype=np.float64), regions.shape)
        self._since = self._since if self._first >= 0 else float(times[0])
        self._now = max(self._now, float(times.max()))
        buckets = np.floor(times * (self.buckets / self.length)).astype(np.int64)
        ascending = np.maximum.accumulate(np.maximum(buckets, max(self._latest, 0)))
        found, starts = np.unique(ascending, return_index=True)
        for bucket, members in zip(found.tolist(), np.split(regions, starts[1:]), strict=True):
            self._advance(bucket)
            self._counts[bucket % self.buckets] += np.bincount(
                members, minlength=self._counts.shape[1]
            )

    def advance(self, time: float) -> None:
        """Let time pass without arrivals, so that rates fall."""
        if self._first >= 0:
            self._now = max(self._now, time)
            self._advance(int(np.floor(time * (self.buckets / self.length))))

    def velocity(self) -> FloatArray:
        """Give V_c: arrivals per unit of time in each region over the window.

        Or since the first arrival, if that is later.
        """
        if self._first < 0:
            return np.zeros(self._counts.shape[1])
        return np.asarray(self._counts.sum(axis=0) / self.span())

    def span(self) -> float:
        """Give the time over which the velocity was counted: one arrival adds 1 / span."""
        if self.least is None:
            return min(self._latest - self._first + 1, self.buckets) * self._width
        oldest = max(self._since, (self._latest - self.buckets + 1) * self._width)
        return max(self._now - oldest, self.least)

    def state_spec(self) -> StateSpec:
        """Describe the arrays of `snapshot`."""
        return {
            "counts": ArraySpec(self._counts.shape, np.float64),
            "span": ArraySpec((2,), np.int64, initial=-1),
            "times": ArraySpec((2,), np.float64, optional=True),
        }

    def snapshot(self) -> State:
        """Take the state as plain arrays."""
        return {
            "counts": self._counts.copy(),
            "span": np.array([self._first, self._latest]),
            "times": np.array([self._since, self._now]),
        }

    def restore(self, state: State) -> None:
        """Become what `snapshot` described."""
        if state["counts"].shape != self._counts.shape:
            raise ValueError(
                f"counts must be of shape {self._counts.shape}, got {state['counts'].shape}"
            )
        self._counts = state["counts"].astype(np.float64)
        self._first, self._latest = (int(bucket) for bucket in state["span"])
        self._since, self._now = state.get("times", state["span"] * self._width).tolist()

    def _advance(self, bucket: int) -> None:
        """Empty the buckets between the latest and this one, which now belong to a later time."""
        if self._first < 0:
            self._first = self._latest = bucket
        passed = min(bucket - self._latest, self.buckets)
        self._counts[(bucket - np.arange(passed)) % self.buckets] = 0.0
        self._latest = max(self._latest, bucket)


class KnownVelocity(VelocityMeter):
    """A velocity known beforehand, "from the statistics of previous time periods"."""

    def __init__(self, velocity: FloatArray) -> None:
        super().__init__(len(velocity), buckets=1)
        self._velocity = velocity

    def observe(self, regions: IntArray, time: float | FloatArray) -> None:
        """Count arrivals."""
        pass

    def velocity(self) -> FloatArray:
        """Give the arrivals per unit of time in each region."""
        return self._velocity

    def state_spec(self) -> StateSpec:
        """Describe the arrays of `snapshot`."""
        return {"velocity": ArraySpec(self._velocity.shape, np.float64)}

    def snapshot(self) -> State:
        """Take the state as plain arrays."""
        return {"velocity": self._velocity}

    def restore(self, state: State) -> None:
        """Become what `snapshot` described."""
        self._velocity = np.array(state["velocity"], dtype=np.float64)
