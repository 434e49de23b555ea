"""A policy is a score: higher stays, the newest wins ties, -inf is refused."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, dataclass_transform

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from fedkeep.core.errors import FedkeepError, where
from fedkeep.core.protocols import PerSampleGradients
from fedkeep.core.registry import Registered, Registry
from fedkeep.core.types import Batch, BoolArray, FloatArray, IntArray, Scores, State, Vector


@dataclass(frozen=True, eq=False)
class ScoringContext:
    """All that a policy may know of the device when it scores a batch.

    The same view serves arrivals and, after a new model, the samples already stored: then
    `previous` holds the scores they have, and past measurements are looked at without being added
    to.
    """

    measurements: PerSampleGradients
    """The batch under the model the device last received."""
    global_gradient: Vector | None
    """g_hat, the estimate of the global gradient; None until a first one arrives."""
    arrival: IntArray
    """The sample's number in the device's stream."""
    keys: Callable[[], Scores]
    """Draws `uniform`."""
    stored_ids: IntArray
    capacity: int
    memory: State
    """Past measurements, kept by the device so that chunking cannot matter; as many as are asked
    for."""
    previous: Scores | None = None

    @cached_property
    def uniform(self) -> Scores:
        """A random number in [0, 1) per sample, the same however the stream is cut."""
        return self.keys()

    def history(self, k: int, quantity: str = "losses") -> FloatArray:
        """Give the k measurements before each sample, (n, k), padded with NaN.

        `quantity` is "losses", "norms" or "head_norms".
        """
        key = f"window/{quantity}/{k}"
        values: Scores = getattr(self.measurements, quantity)()
        tail = self.memory.get(key, np.full(k, np.nan))
        if self.previous is not None:
            return np.broadcast_to(tail, (len(values), k))
        joined = np.concatenate([tail, values])
        self.memory[key] = joined[len(joined) - k :].copy()
        return sliding_window_view(joined, k)[: len(values)]

    def running_max(self, quantity: str = "losses") -> Scores:
        """Give the largest measurement up to and including each sample."""
        key = f"max/{quantity}"
        values: Scores = getattr(self.measurements, quantity)()
        peak = self.memory.get(key, np.array([-np.inf]))
        if self.previous is not None:
            return np.broadcast_to(peak, values.shape)
        peaks = np.maximum.accumulate(np.concatenate([peak, values]))
        self.memory[key] = peaks[-1:].copy()
        return peaks[1:]

    def running_mean(self, quantity: str = "norms") -> Scores:
        """Average all measurements up to and including each sample."""
        key = f"mean/{quantity}"
        values: Scores = getattr(self.measurements, quantity)()
        total, count = self.memory.get(key, np.zeros(2))
        if self.previous is not None:
            return np.full(values.shape, total / count if count else np.inf)
        totals = np.cumsum(np.concatenate([[total], values]))
        counts = count + np.arange(len(values) + 1)
        self.memory[key] = np.array([totals[-1], counts[-1]])
        return np.asarray(totals[1:] / counts[1:])

    def nearly_empty(self, few: int) -> bool:
        """Tell whether samples come in while at most `few` are stored."""
        return self.previous is None and len(self.stored_ids) <= few


class SelectionPolicy(ABC):
    """How samples are scored: one file, one `score` method.

    Its dataclass fields become keys of `[policy]` in an experiment's TOML.

    >>> @dataclass(frozen=True)
    ... class Young(SelectionPolicy):
    ...     bonus: float = 0.5
    ...     def score(self, batch: Batch, view: ScoringContext) -> Scores:
    ...         return view.uniform + self.bonus * view.arrival
    >>> from fedkeep.testing import check_policy
    >>> check_policy(Young(bonus=2.0)).passed  # a rule that it broke would be raised
    ('scores', 'inputs', 'chunking', 'restart', 'repeatable', 'rescoring', 'memory')
    """

    uses_global_gradient: ClassVar[bool] = False
    """Whether devices estimate gradients for it, and the server merges them (Eq. 7, 8)."""
    coordinated: ClassVar[bool] = False
    """Whether the server divides the labels among the devices by default."""
    balanced: ClassVar[bool] = False
    """Whether a device divides its slots among the labels by itself, by what it has seen of
    each."""
    unbiased: ClassVar[bool] = False
    """Whether what is kept of a label is an unbiased sample of what came of it: a gist then learns
    from it as well."""
    needs_model: ClassVar[bool] = True
    """Whether a score needs a model; if not, the policy also scores what comes before the first."""
    unbounded: ClassVar[bool] = False
    """Whether the device keeps everything, whatever its capacity."""

    @property
    def sequential(self) -> bool:
        """Whether a score depends on what is stored, so that samples must come one by one."""
        return False

    @abstractmethod
    def score(self, batch: Batch, view: ScoringContext) -> Scores:
        """Give one number per sample, however the stream is cut into batches."""


@dataclass(frozen=True)
class FilteringPolicy(SelectionPolicy):
    """A score with a filter against noise."""

    variant: Literal["paper", "authors"] = "paper"
    """The filter as the paper describes it, or as the authors' code has it."""
    window: int = 50

    @property
    def sequential(self) -> bool:
        """Whether samples must be scored one by one."""
        return self.variant == "authors"


POLICIES: Registry[type[SelectionPolicy]] = Registry("policy", base=SelectionPolicy)


@dataclass_transform(frozen_default=True)
def policy(name: str) -> Callable[[Registered], Registered]:
    """Register a policy under its name, and make it a frozen dataclass."""
    return POLICIES.register(name)


def checked_scores(policy: SelectionPolicy, batch: Batch, view: ScoringContext) -> Scores:
    """Ask the policy for scores, and check those of a user-defined one."""
    if type(policy).__module__.startswith("fedkeep."):
        return policy.score(batch, view)
    name = type(policy).__name__
    try:
        scores = policy.score(batch, view)
    except FedkeepError:
        raise
    except Exception as error:
        raise FedkeepError(f"the policy {name} raised {where(error)}") from error
    if (
        not isinstance(scores, np.ndarray)
        or scores.shape != (len(batch),)
        or scores.dtype.kind not in "fiu"
    ):
        given = f"shape {scores.shape}" if isinstance(scores, np.ndarray) else type(scores).__name__
        raise FedkeepError(
            f"the policy {name} must give one number a sample,"
            f" an array of {len(batch)}; it gave {given}"
        )
    if (
        np.isnan(scores).any() and not np.isnan(view.measurements.losses()).any()
    ):  # else it is the model that diverged
        raise FedkeepError(
            f"the policy {name} gave NaN as a score: give a number, or -inf to refuse a sample"
        )
    return scores


def refuse_where(refused: BoolArray, scores: Scores) -> Scores:
    """Set the scores to -inf where `refused`.

    >>> refuse_where(np.array([True, False]), np.array([0.9, 0.1]))
    array([-inf,  0.1])
    """
    return np.where(refused, -np.inf, scores)
