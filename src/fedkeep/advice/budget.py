"""What a device keeps, in bytes, and how a budget of bytes is best divided.

Bytes may buy more samples, samples in fewer bits, or a gist, whose rank and bits are free as well.
`kept_bytes` counts all that a device keeps between two participations beside the model;
`spend_bytes` chooses slots, sample encoding, rank and bits together by a rule that needs no run.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedkeep.advice.trial import agent_table
from fedkeep.agent.assembly import parse_config, slots_within
from fedkeep.agent.record import META_BYTES
from fedkeep.agent.store_file import LEAST_BUDGET
from fedkeep.config.device import build_device
from fedkeep.config.method import MethodConfig
from fedkeep.core.errors import ConfigError
from fedkeep.core.gist import GistOptions
from fedkeep.core.gradients.codec import Encoding
from fedkeep.core.protocols import Learner
from fedkeep.data import Federation
from fedkeep.encoding import SCALE_BYTES, EncodingName, SampleCodec
from fedkeep.tables import Table

ENOUGH_SLOTS = 50
"""With so many slots, and two for each label, even twice as many gained less than half a point."""
_CORRELATION = 0.7
"""rho squared: what of a sample's noise is the same under two models.

By it five slots with a gist are as good as fifteen, the median of seven tasks: as 6 on pictures of
clothes, 8 and 15 on activities, 10 on spoken digits, 20 on WiFi floors, 40 and 45 on softmax
models.
"""
_GIST_SAMPLES = 100.0
"""The effective sample size that a gist reaches: its cap, `gist.max_ess`."""
_RECOVERED: dict[int | None, float] = {None: 1.0, 16: 0.98, 8: 0.95, 4: 0.88}
"""By rank, the share of a correction that its sketch gives back (docs/gist.md)."""
_KEPT_BY_BITS: dict[Encoding, float] = {"float32": 1.0, "int8": 1.0, "int4": 0.97}
"""By encoding, the share that rounding leaves."""
_CLEARLY = 0.85
"""Of the noise that samples alone leave: a gist must promise less, for what it gains differs from
stream to stream."""
_SLIGHT = 0.02
"""Noise, relatively, that is no reason to take the less simple of two."""


@dataclass(frozen=True)
class KeptBytes:
    """What a device keeps between two participations, beside the model, in bytes.

    Parameters
    ----------
    samples : int
        The stored samples as they are encoded, with the scales of their features.
    metadata : int
        What is kept beside each sample: its id, label, time, score and uses.
    gist : int
        m and its noise model.
    window : int
        The sum of the gradients of all arrivals since the last participation.
    counts : int
        Shares by label, and what is sent until it is accepted.
    """

    samples: int
    metadata: int
    gist: int
    window: int
    counts: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.samples + self.metadata + self.gist + self.window + self.counts


def kept_bytes(
    method: MethodConfig,
    learner: Learner,
    *,
    slots: int,
    sample_shape: tuple[int, ...],
    labels: int,
    encoding: EncodingName | None = None,
) -> KeptBytes:
    """Count what a device keeps with its store full.

    What is the same for every method is not in it: the counts of arrivals by time, and the pages
    that make an agent's file safe against power cuts (its `store.budget` counts all).

    Parameters
    ----------
    method : MethodConfig
        Policy, gist and all.
    learner : Learner
        The model.
    slots : int
        The samples that the store holds.
    sample_shape : tuple of int
        The shape of a sample.
    labels : int
        The number of labels.
    encoding : str, optional
        How samples are stored; None: in float32.

    Examples
    --------
    >>> from fedkeep.config.method import parse_method
    >>> from fedkeep.learn.dense_learner import DenseLearner
    >>> learner, form = DenseLearner((900, 100, 5)), {"sample_shape": (900,), "labels": 5}
    >>> whole = parse_method({"gist": {"mode": "local"}})
    >>> sketch = parse_method({"gist": {"mode": "local", "rank": "auto", "encoding": "int8"}})
    >>> [kept_bytes(m, learner, slots=10, **form).total for m in (whole, sketch)]
    [1124248, 93339]
    """
    codec = SampleCodec(sample_shape, encoding=encoding)
    device = build_device(method, learner, capacity=slots, sample_shape=sample_shape, labels=labels)
    parts = {"gist": 0, "window": 0, "counts": 0}
    for name, spec in device.state_spec().items():
        kind = name.partition(".")[0]
        if kind not in ("store", "model", "direction", "memory", "meter"):
            size = math.prod(spec.shape) * np.dtype(spec.dtype).itemsize
            summed = kind == "window" and name != "window.counts"
            parts["window" if summed else kind if kind == "gist" else "counts"] += size
    scales = SCALE_BYTES * math.prod(sample_shape) if codec.quantised else 0
    return KeptBytes(slots * codec.nbytes + scales, slots * META_BYTES, **parts)


@dataclass(frozen=True)
class StorePlan:
    """One way to spend the bytes of a device.

    Parameters
    ----------
    slots : int
        The samples that fit beside all else.
    encoding : str or None
        How samples are stored; None: in float32.
    gist : GistOptions
        The gist; of mode `none` where all is spent on samples.
    noise : float
        The variance of the gradient that the device trains with, in units of one sample's, as
        the rule expects it.
    """

    slots: int
    encoding: EncodingName | None
    gist: GistOptions
    noise: float

    @property
    def table(self) -> Table:
        """The tables of an experiment that say the same."""
        table: Table = {"storage": {"capacity": self.slots}}
        if self.encoding is not None:
            table["stream"] = {"encoding": self.encoding}
        gist: Table = {"mode": self.gist.mode}
        if self.gist.kept:
            gist["encoding"] = self.gist.used_encoding
            if self.gist.rank is not None:
                gist["rank"] = self.gist.rank
        return table | {"gist": gist}

    def __str__(self) -> str:
        samples = f"{self.slots} samples in {self.encoding or 'float32'}"
        if not self.gist.kept:
            return f"{samples}, no gist"
        rank = "every number" if self.gist.rank is None else f"rank {self.gist.rank}"
        return f"{samples} and a gist ({rank}, {self.gist.used_encoding})"


@dataclass(frozen=True)
class BytePlan:
    """How to spend a budget of bytes, and why.

    Parameters
    ----------
    budget : int
        The bytes.
    plans : tuple of StorePlan
        Every way that holds a sample, the best by the rule first.
    labels : int
        The number of labels.
    """

    budget: int
    plans: tuple[StorePlan, ...]
    labels: int

    @property
    def best(self) -> StorePlan:
        """What to do."""
        return self.plans[0]

    @property
    def samples_alone(self) -> StorePlan:
        """The best way without a gist."""
        return next(plan for plan in self.plans if not plan.gist.kept)

    @property
    def reason(self) -> str:
        """Why, in one sentence."""
        alone = self.samples_alone
        if self.best.gist.kept:
            return (
                f"{self.budget:,} bytes hold {self.best}: fewer samples than the {alone.slots} "
                "without a gist, and less noise"
            )
        if alone.slots >= enough_slots(self.labels):
            return (
                f"{self.budget:,} bytes hold {alone}: with {enough_slots(self.labels)} samples or "
                "more a gist gains nothing, so all is spent on samples"
            )
        return (
            f"{self.budget:,} bytes hold {alone}: a gist would take more samples than it is worth, "
            "so all is spent on samples"
        )


def enough_slots(labels: int) -> int:
    """Say from how many slots on a gist gains nothing."""
    return max(ENOUGH_SLOTS, 2 * labels)


def expected_noise(slots: int, gist: GistOptions) -> float:
    """Predict the variance of a device's gradient, in units of one sample's variance.

    Without a gist it is 1 / k. A gist of ess n, whose noise is correlated with the next model's by
    rho, leaves (1 - rho^2 q n / (n + k)) / k of it, q being what sketch and rounding keep.

    Examples
    --------
    >>> expected_noise(10, GistOptions())
    0.1
    >>> round(expected_noise(10, GistOptions("local", rank=16, encoding="int8")), 3)
    0.038
    """
    if not gist.kept:
        return 1.0 / slots
    rank = 16 if gist.rank == "auto" else gist.rank
    kept = _RECOVERED.get(rank, 0.8) * _KEPT_BY_BITS.get(gist.used_encoding, 1.0)
    removed = _CORRELATION * kept * _GIST_SAMPLES / (_GIST_SAMPLES + slots)
    return (1.0 - removed) / slots


def ways_to_spend(mode: str = "local") -> Iterator[tuple[EncodingName | None, GistOptions]]:
    """List the sample encodings and gists to choose from, the simpler ones first."""
    encodings: tuple[EncodingName | None, ...] = (None, "float16", "int8")
    bits: tuple[Encoding, ...] = ("float32", "int8", "int4")
    for encoding in encodings:
        yield encoding, GistOptions()
    for encoding in encodings:
        for rank in _RECOVERED:
            for word in bits:
                yield encoding, GistOptions(mode, rank=rank, encoding=word)  # type: ignore[arg-type]


def spend_bytes(
    budget: int,
    slots_of: Callable[[EncodingName | None, GistOptions], int],
    labels: int,
    mode: str = "local",
) -> BytePlan:
    """Choose slots, sample encoding, rank and bits for a budget of bytes.

    The rule: where the samples alone are enough (`enough_slots`), all is spent on them. Else the
    way with the least `expected_noise` is taken, of two within 2 % the simpler one; one with a gist
    only if it promises at least 15 % less than samples alone.

    Parameters
    ----------
    budget : int
        The bytes.
    slots_of : callable
        How many samples fit beside a gist, in an encoding; 0: none.
    labels : int
        The number of labels.
    mode : {"local", "shared"}
        Of the gist.

    Raises
    ------
    ConfigError
        If not even one sample fits.

    Examples
    --------
    >>> def slots(encoding, gist):  # 400 bytes a sample, and 2,000 for a gist of any kind
    ...     return (8_000 - 2_000 * gist.kept) // (100 if encoding == "int8" else 400)
    >>> spend_bytes(8_000, slots, labels=4).best.slots
    80
    >>> print(spend_bytes(8_000, lambda e, g: slots(e, g) // 8, labels=4).best)
    7 samples in int8 and a gist (every number, float32)
    """
    found: list[StorePlan] = []
    for encoding, gist in ways_to_spend(mode):
        if (slots := slots_of(encoding, gist)) > 0:
            found.append(StorePlan(slots, encoding, gist, expected_noise(slots, gist)))
    if not any(not plan.gist.kept for plan in found):
        raise ConfigError(f"{budget:,} bytes hold no sample: raise the budget")
    alone = _first_of_the_best([plan for plan in found if not plan.gist.kept])
    clearer = [p for p in found if p.gist.kept and p.noise <= _CLEARLY * alone.noise]
    best = alone
    if clearer and alone.slots < enough_slots(labels):
        best = _first_of_the_best(clearer)
    rest = sorted((plan for plan in found if plan is not best), key=lambda plan: plan.noise)
    return BytePlan(budget, (best, *rest), labels)


def spend_in_simulation(
    budget: int,
    method: MethodConfig,
    learner: Learner,
    *,
    sample_shape: tuple[int, ...],
    labels: int,
    mode: str = "local",
) -> BytePlan:
    """Choose for the bytes that `kept_bytes` counts.

    Parameters
    ----------
    budget : int
        The bytes of a device, beside the model.
    method : MethodConfig
        What the device does; its gist is replaced.
    learner : Learner
        The model.
    sample_shape : tuple of int
        The shape of a sample.
    labels : int
        The number of labels.
    mode : {"local", "shared"}
        Of the gist.

    Examples
    --------
    >>> from fedkeep.config.method import parse_method
    >>> from fedkeep.learn.dense_learner import DenseLearner
    >>> learner, form = DenseLearner((900, 100, 5)), {"sample_shape": (900,), "labels": 5}
    >>> for budget in (10_000, 100_000):
    ...     print(spend_in_simulation(budget, parse_method({}), learner, **form).best)
    5 samples in float16, no gist
    81 samples in int8, no gist
    """

    def slots_of(encoding: EncodingName | None, gist: GistOptions) -> int:
        own = replace(method, gist=gist)

        def size(slots: int) -> int:
            kept = kept_bytes(
                own, learner, slots=slots, sample_shape=sample_shape, labels=labels,
                encoding=encoding,
            )  # fmt: skip
            return kept.total

        first = size(1)
        if first > budget:
            return 0
        return 1 + (budget - first) // max(1, size(2) - first)

    return spend_bytes(budget, slots_of, labels, mode)


def spend_on_device(budget: int, data: Federation, mode: str = "local") -> BytePlan:
    """Choose for the file of an agent: `store.budget`, with the model and all metadata.

    Parameters
    ----------
    budget : int
        The bytes of the file.
    data : Federation
        The user's data, for the form of its samples and its model.
    mode : {"local", "shared"}
        Of the gist.

    Raises
    ------
    ConfigError
        If they hold no sample.
    """

    def slots_of(encoding: EncodingName | None, gist: GistOptions) -> int:
        agent = agent_table("balanced-reservoir", data)
        agent["store"] |= {"budget": max(budget, LEAST_BUDGET)}
        if encoding is not None:
            agent["store"]["encoding"] = encoding
        agent["gist"] = StorePlan(0, encoding, gist, 0.0).table["gist"]
        return slots_within(parse_config(agent)) if budget >= LEAST_BUDGET else 0

    return spend_bytes(budget, slots_of, data.labels, mode)


def _first_of_the_best(plans: Sequence[StorePlan]) -> StorePlan:
    """Choose the least noise; of those that are hardly worse the first."""
    least = min(plan.noise for plan in plans)
    return next(plan for plan in plans if plan.noise <= least * (1 + _SLIGHT))
