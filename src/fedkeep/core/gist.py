"""The gist: a running estimate of the whole stream's gradient, with which a device mends each of its local steps.

A store of k samples gives the gradient of the loss with the noise of k samples. But the device has seen all N that
came, and their mean gradient g under the model it had then, w_old. Where a sample's gradients under the old and the new
model are alike, what the store says too much or too little under w_old it says under w_new as well: so the device adds
beta (m - a(w_old)) to each step, where a is the store's gradient and m, the gist, the best it knows of the stream's.

How much of it depends on what m knows that the store does not (`core.making`), and on how much of a sample's noise is
the same under both models. The least noise that can be had by beta is never more than the store's own.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np

from fedkeep.core.bounds import check_range
from fedkeep.core.estimators import GradientAccumulator
from fedkeep.core.making import NoiseModel, StoreSummary, averaged, mixed
from fedkeep.core.protocols import PerSampleGradients
from fedkeep.core.seeds import child_seed
from fedkeep.core.types import FloatArray, State, Vector

Encoding: TypeAlias = Literal["float32", "float16", "int8"]
_BLOCK = 64
"""Numbers that share a scale in the shorter encodings."""
_DRIFT_POWER = 3.0
"""The power of the gradient correlation rho that damps the drift term, beside beta."""
_LABEL_CONTRAST = 10.0
"""Prior variance of the labels' mean gradients over that of a sample, for labels not stored."""


@dataclass(frozen=True)
class GistOptions:
    """`gist`: whether devices keep a gist of their stream, and how they use it."""

    mode: Literal["none", "local", "shared"] = "none"
    """`local` sends nothing that plain federated averaging does not; `shared` sends each gist to the server, which
    sends back the fleet's: it also corrects the drift between devices."""
    drift_weight: float = 0.5
    """Strength of the drift term of `shared`, from the device's gist towards the fleet's, 0 to 1.

    It is multiplied by beta and by the cube of the gradient correlation rho.
    """
    label_matching: bool = True
    """Whether stream and store are compared label by label; without it all samples count as one label."""
    max_ess: float = 100.0
    """The largest effective sample size: the larger, the less noise, and the slower to follow a drift."""
    encoding: Encoding = "float32"
    """How the gist is kept: `int8` takes a quarter of the bytes, with a scale for every 64 numbers."""
    last_layers: int | None = None
    """Let the gist cover the last layers only; None: all that are valued."""

    def __post_init__(self) -> None:
        check_range(self, "drift_weight", least=0, most=1)
        check_range(self, "max_ess", "last_layers", least=1)

    @property
    def kept(self) -> bool:
        """Whether there is a gist at all."""
        return self.mode != "none"

    @property
    def shared(self) -> bool:
        return self.mode == "shared"


@dataclass(frozen=True, eq=False)
class StoredGradients(StoreSummary):
    """What is stored, as measured under the model the device had (`before`) and the one it has been sent (`after`).

    Its weights add up to 1.
    """

    before: PerSampleGradients
    after: PerSampleGradients

    def under(self, measurements: PerSampleGradients, weights: FloatArray | None = None) -> Vector:
        """sum_i w_i grad_i; by default with the samples' own weights."""
        weights = self.weights if weights is None else weights
        return measurements.weighted_gradient(weights * len(weights))

    @cached_property
    def means(self) -> tuple[Vector, Vector]:
        """a(w_old) and a(w_new)."""
        return self.under(self.before), self.under(self.after)

    @cached_property
    def echo(self) -> tuple[float, float, float]:
        """How the noise under the old model comes back under the new: their covariance, and the variance under each.

        A single sample has no variance: its gradients themselves are compared.
        """
        before, after = self.means
        weights = self.weights
        several = len(weights) > 1
        first = float(weights @ self.before.norms() ** 2) - several * _inner(before, before)
        second = float(weights @ self.after.norms() ** 2) - several * _inner(after, after)
        return self._covariance(self.before, before, self.after, after), first, second

    def slope_to(self, ahead: PerSampleGradients) -> float:
        """How much of the stored samples' deviations under the new model is left under a next one, 0 to 1."""
        return _share(
            self._covariance(self.after, self.means[1], ahead, self.under(ahead)), self.echo[2]
        )

    def _covariance(
        self, one: PerSampleGradients, mean: Vector, other: PerSampleGradients, other_mean: Vector
    ) -> float:
        both = float(self.weights @ other.inner(one))
        return both - _inner(mean, other_mean) if len(self.weights) > 1 else both


@dataclass(frozen=True, eq=False)
class Correction:
    """What a gist does in one participation, and what is left of it afterwards."""

    own: Vector | None
    """beta (m - a(w_old)), which mends what the store gets wrong; None: nothing is known yet."""
    turn: Vector | None
    """What turns steps towards the fleet's gist; None in the local form."""
    trust: float
    """How much of the gist is used, 0 to 1: beta, and how long it holds while the device trains."""
    likeness: float
    """rho: how alike a sample's gradients are under the old model and the new, 0 to 1."""
    length: float
    """That of the stored samples' gradient, a(w_new)."""
    gist: Vector | None
    """m, carried over to the new model."""
    making: NoiseModel | None

    @property
    def correction(self) -> Vector | None:
        """Added to the gradient of each local step."""
        return self.own if self.own is None or self.turn is None else self.own + self.turn

    @cached_property
    def reach(self) -> float:
        """The correction's length over that of the stored samples' gradient."""
        correction = self.correction
        return (
            0.0
            if correction is None
            else float(np.sqrt(_inner(correction, correction)) / max(self.length, 1e-15))
        )

    @property
    def worth(self) -> float:
        """n: how many samples the gist is worth, after this participation."""
        return 0.0 if self.making is None else self.making.worth

    def lasting(self, slope: float, steps: int) -> "Correction":
        """The same for `steps` local steps, each of which leaves `slope` of what the store gets wrong.

        What is added stays while the error that it mends fades: where one step all but fits the stored samples, the
        mending of five would overshoot. The correction is one vector, so it is the mean over the steps that counts.
        """
        share = 1.0 if slope >= 1 else (1.0 - slope**steps) / (steps * (1.0 - slope))
        own = None if self.own is None else self.own * np.float32(share)
        return replace(self, own=own, trust=self.trust * share)


class Gist:
    """The gist m of one device and what it is worth; it changes only when the device takes part.

    `Device` shows it at work; docs/gist.md has the method, step by step.
    """

    def __init__(
        self, options: GistOptions, size: int, seed: int = 0, *, fair: bool = True
    ) -> None:
        self.options, self.size, self._seed, self._fair = options, size, seed, fair
        self._kept: State | None = None
        self._making: NoiseModel | None = None
        self._changes = 0
        self.latest: Correction | None = None
        """What it did when the device last took part."""

    @property
    def worth(self) -> float:
        """n, in samples."""
        return 0.0 if self._making is None else self._making.worth

    def figures(self) -> tuple[float, float, float, float] | None:
        """Trust, likeness, worth and reach when the device last took part; None where there was nothing to trust."""
        did = self.latest
        return (
            None
            if did is None or did.gist is None
            else (did.trust, did.likeness, did.worth, did.reach)
        )

    def vector(self) -> Vector | None:
        """m as it is kept; None while nothing is known."""
        return None if self._kept is None else unpack(self._kept)

    @property
    def nbytes(self) -> int:
        """What it takes at rest."""
        return sum(array.nbytes for array in (self._kept or {}).values())

    @np.errstate(over="ignore", invalid="ignore")
    def mend(
        self,
        stored: StoredGradients,
        window: GradientAccumulator,
        shares: FloatArray,
        fleet: Vector | None,
        *,
        moved: bool,
    ) -> Correction:
        """What to add to each local step; `moved` says whether the new model differs from the old.

        `shares` are the regions' shares of the stream in the long run, `fleet` is G, the gist of the whole fleet.
        """
        options, past, made = self.options, self.vector(), self._making
        holding: StoreSummary = stored
        covariance, first, second = stored.echo if moved else (1.0, 1.0, 1.0)
        likeness = _share(covariance, (first + second) / 2)
        slope = _share(covariance, first)
        nothing = Correction(None, None, 0.0, likeness, 0.0, None, None)
        if past is None and not window.count:
            return nothing
        if options.label_matching:
            mixture = mixed(made, holding, window.counts, shares, _LABEL_CONTRAST, fair=self._fair)
        else:
            holding = replace(stored, regions=np.zeros_like(stored.regions))
            mixture = averaged(made, holding, window.count)
        known, seen, weights, making = mixture
        making = making.bounded(options.max_ess)
        gist = self._own(window.mean(seen))
        if weights.any():
            gist += self._own(stored.under(stored.before, weights))
        if past is not None:
            gist += np.float32(known) * past
        beta = slope * making.pull(holding) if second > 0 else 0.0
        own = gist - self._own(stored.means[0])
        own *= beta
        # Times the trust as well, or the noise of a gist that few samples made would come into every step.
        turned = options.drift_weight * beta * likeness**_DRIFT_POWER
        turn = None if fleet is None else turned * (fleet - gist)
        back, scale = (covariance / second, first / second) if beta > 0 else (0.0, 0.0)
        left = making.carried(holding, beta, back, scale).bounded(options.max_ess)
        length = float(np.sqrt(_inner(stored.means[1], stored.means[1])))
        mending = Correction(
            own, turn, beta, likeness, length, self._own(stored.means[1]) + own, left
        )
        # A huge sample: better no correction than one that ends the model.
        return mending if np.isfinite(mending.reach) else nothing

    def keep(self, mending: Correction | None) -> None:
        """Lets a participation count; None, or one that holds no finite gist: nothing is known any more."""
        self.latest = mending
        self._changes += 1
        self._kept = self._making = None
        if mending is not None and mending.gist is not None and np.isfinite(mending.gist).all():
            seed = child_seed(self._seed, "gist", self._changes)
            self._kept = pack(mending.gist, self.options.encoding, seed)
            self._making = mending.making

    def snapshot(self) -> State:
        state: State = {"changes": np.array(self._changes)}
        if self._kept is None or self._making is None:
            return state
        made = self._making
        by_region = np.stack([made.composition, made.counted, made.held])
        return state | {"by_region": by_region, "rest": np.array(made.rest)} | self._kept

    def restore(self, state: State) -> None:
        self._changes = int(state.get("changes", 0))
        self.latest = None
        self._kept = self._making = None
        if (
            "by_region" in state
        ):  # a gist of an older form did not say what it is made of: it begins anew
            composition, counted, held = np.array(state["by_region"], dtype=np.float64)
            self._making = NoiseModel(composition, counted, held, float(state["rest"]))
            forms = {"packed": self.options.encoding, "scales": "float32"}
            self._kept = {name: np.array(state[name], dtype=form) for name, form in forms.items()}

    def _own(self, gradient: Vector) -> Vector:
        """The part of a gradient that the gist covers: the last of it."""
        return gradient[len(gradient) - self.size :]


def _share(part: float, whole: float) -> float:
    """part / whole between 0 and 1; 0 where it cannot be told, as of gradients too long to be squared."""
    return min(max(part / whole, 0.0), 1.0) if 0 < whole < np.inf and np.isfinite(part) else 0.0


def _inner(left: Vector, right: Vector) -> float:
    """<left, right>, blocks of it added up in float64: what variances leave of it is too small for float32 alone."""
    whole = len(left) - len(left) % 1024
    blocks = np.vecdot(left[:whole].reshape(-1, 1024), right[:whole].reshape(-1, 1024))
    return float(blocks.sum(dtype=np.float64)) + float(left[whole:] @ right[whole:])


def packed_bytes(size: int, encoding: Encoding) -> int:
    """What a vector of so many numbers takes in that encoding.

    >>> packed_bytes(1000, "float32"), packed_bytes(1000, "int8")  # a byte each, and a scale for every 64
    (4000, 1064)
    """
    scales = 0 if encoding == "float32" else 4 * -(-size // _BLOCK)
    return np.dtype(encoding).itemsize * size + scales


def pack(vector: Vector | FloatArray, encoding: Encoding, seed: int) -> State:
    """The numbers of a vector in that encoding and, for the shorter ones, a scale for every block of them.

    `int8` rounds at random by the seed, so that on average nothing is lost.

    >>> packed = pack(np.array([1.0, -0.5, 0.25]), "int8", seed=0)
    >>> packed["packed"].nbytes + packed["scales"].nbytes, [f"{number:.2f}" for number in unpack(packed)]
    (7, ['1.00', '-0.50', '0.24'])
    """
    if encoding == "float32":
        return {
            "packed": vector.astype(np.float32, copy=False),
            "scales": np.empty(0, dtype=np.float32),
        }
    blocks = np.abs(np.append(vector, np.zeros(-len(vector) % _BLOCK))).reshape(-1, _BLOCK)
    scales = (blocks.max(axis=1) / (127.0 if encoding == "int8" else 1.0)).astype(np.float32)
    steps = np.repeat(scales.astype(np.float64), _BLOCK)[: len(vector)]
    scaled = np.divide(vector, steps, out=np.zeros(len(vector)), where=steps > 0)
    if encoding == "int8":
        scaled = np.clip(
            np.floor(scaled + np.random.default_rng(seed).random(len(vector))), -127, 127
        )
    return {"packed": scaled.astype(encoding), "scales": scales}


def unpack(packed: State) -> Vector:
    """The vector that `pack` made this of, as near as it comes."""
    numbers: Vector = packed["packed"]
    scales: Vector = packed["scales"]
    if not len(scales):
        return numbers
    return numbers.astype(np.float32) * np.repeat(scales, _BLOCK)[: len(numbers)]
