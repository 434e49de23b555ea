"""What every backend has in common: its probe, the order in which samples are visited, and what mends the steps."""

from collections.abc import Iterator, Sequence

import numpy as np

from fedkeep.core.ports import FleetLearner, Job, Measurements
from fedkeep.core.types import AnyArray, Batch, IntArray, LocalTraining, Vector


class FrozenModel:
    """The probe of a learner that measures many at once: a copy of one model."""

    def __init__(self, learner: FleetLearner, model: Vector) -> None:
        self._learner, self._model = learner, np.array(model, dtype=np.float32)

    def measure(self, batch: Batch) -> Measurements:
        return self._learner.measure_many([self._model], [batch])[0]


def minibatches(n: int, local: LocalTraining, seed: int) -> Iterator[IntArray | slice]:
    """The samples of each step, epoch after epoch; without a batch size each step takes them all (Eq. 12)."""
    if local.batch_size is None or local.batch_size >= n:
        for _ in range(local.epochs):
            yield slice(None)
        return
    rng = np.random.default_rng(seed)
    for _ in range(local.epochs):
        order = rng.permutation(n)
        for start in range(0, n, local.batch_size):
            yield order[start : start + local.batch_size]


def corrections(jobs: Sequence[Job], size: int) -> AnyArray | None:
    """The corrections of C jobs, (C, size), zero for jobs without one or without weight; None where none has one."""
    if all(job.correction is None for job in jobs):
        return None
    alone = jobs[0].correction if len(jobs) == 1 and jobs[0].weights.any() else None
    if alone is not None and alone.shape == (size,):  # of a large model even one copy is felt
        return alone[None]
    stacked = np.zeros((len(jobs), size), dtype=np.float32)
    for row, job in zip(stacked, jobs, strict=True):
        if job.correction is not None and job.weights.any():
            row[:] = job.correction
    return stacked
