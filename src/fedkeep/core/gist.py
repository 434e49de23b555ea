"""The gist: a running estimate of the whole stream's gradient, with which a device mends each of its local steps.

A store of k samples gives the gradient of the loss with the noise of k samples. But the device has seen all N that
came, and their mean gradient g under the model it had then, w_old. Where a sample's gradients under the old and the new
model are alike, what the store says too much or too little under w_old it says under w_new as well: so the device adds
beta (m - a(w_old)) to each step, where a is the store's gradient and m, the gist, the best it knows of the stream's.

With V the variance of a sample's gradient, rho its likeness under the two models and m worth n samples,

    Var[a(w_new) + beta (m - a(w_old))] = V (1/k + beta^2 (1/n + 1/k) - 2 beta rho / k),

which is least at beta = rho n / (n + k), where it is V (1 - rho beta) / k: never more than the store's own V / k.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedkeep.core.bounds import within
from fedkeep.core.estimators import Window
from fedkeep.core.packing import Encoding, Packed, pack
from fedkeep.core.ports import Measurements
from fedkeep.core.seeds import child_seed
from fedkeep.core.types import FloatArray, IntArray, State, Vector

_BLOCK = 1024


@dataclass(frozen=True)
class GistOptions:
    """`gist`: whether devices keep a gist of their stream, and how they use it."""

    name: Literal["none", "local", "shared"] = "none"
    """`local` sends nothing that plain federated averaging does not; `shared` sends each gist to the server, which
    sends back the fleet's: it also corrects the drift between devices."""
    kappa: float = 0.5
    """How far steps turn from the device's gist to the fleet's (`shared`), as trust and `fading` allow."""
    fading: float = 3.0
    """The power of the likeness that `kappa` is multiplied by, beside the trust: the higher, the sooner it fades where
    models move far between two participations."""
    matched: bool = True
    """Compare stream and store label by label: without it, a window of one label is taken for the whole world."""
    memory: float = 100.0
    """The most samples a gist counts for: the more, the steadier, and the slower to follow a drift."""
    encoding: Encoding = "float32"
    """How the gist is kept: `int8` takes a quarter of the bytes, with a scale for every `block` numbers."""
    block: int = 64
    """Numbers that share a scale in `float16` and `int8`: fewer are finer and take more bytes."""
    last_layers: int | None = None
    """Let the gist cover the last layers only; None: all that are valued."""

    def __post_init__(self) -> None:
        within(self, "kappa", least=0, most=1)
        within(self, "fading", least=0)
        within(self, "memory", "block", "last_layers", least=1)

    @property
    def kept(self) -> bool:
        """Whether there is a gist at all."""
        return self.name != "none"

    @property
    def shared(self) -> bool:
        return self.name == "shared"


@dataclass(frozen=True, eq=False)
class StoredGradients:
    """What is stored, as measured under the model the device had (`before`) and the one it has been sent (`after`)."""

    weights: FloatArray
    """What each sample counts, (k,); they add up to 1."""
    regions: IntArray
    before: Measurements
    after: Measurements

    @property
    def effective_size(self) -> float:
        """1 / sum w_i^2: how many samples of equal weight would be as noisy."""
        return 1.0 / float(self.weights @ self.weights)

    def under(self, measurements: Measurements, weights: FloatArray) -> Vector:
        """sum_i w_i grad_i."""
        return measurements.weighted_gradient(weights * len(weights))

    def spread(self, parts: FloatArray) -> FloatArray:
        """Weights, (k,), that give each region its part, (Y,); parts of regions that are not stored go to all alike."""
        mass = np.bincount(self.regions, self.weights, minlength=len(parts))
        held = mass > 0
        of_region: FloatArray = parts / np.where(held, mass, 1.0) + parts[~held].sum()
        weights: FloatArray = self.weights * of_region[self.regions]
        return weights


@dataclass(frozen=True, eq=False)
class Mending:
    """What a gist does in one participation, and what is left of it afterwards."""

    correction: Vector | None
    """Added to the gradient of each local step; None: nothing is known yet."""
    trust: float
    """beta: how much of the gist is used, 0 to 1."""
    likeness: float
    """rho: how alike a sample's gradients are under the old model and the new, 0 to 1."""
    worth: float
    """n: how many samples the gist is worth, after this participation."""
    reach: float
    """The correction's length over that of the stored samples' gradient."""
    gist: Vector | None
    """m, carried over to the new model."""
    shares: FloatArray | None = None
    """The regions' shares of the stream that m was made for."""


class Gist:
    """The gist m of one device and what it is worth; it changes only when the device takes part.

    `Device` shows it at work; docs/gist.md has the method, step by step.
    """

    def __init__(self, options: GistOptions, size: int, seed: int = 0) -> None:
        self.options, self.size, self._seed = options, size, seed
        self._kept: Packed | None = None
        self._shares: FloatArray | None = None
        self._changes = 0
        self.worth = 0.0
        """n, in samples."""
        self.latest: Mending | None = None
        """What it did when the device last took part."""

    def figures(self) -> tuple[float, float, float, float] | None:
        """Trust, likeness, worth and reach when the device last took part; None where there was nothing to trust."""
        did = self.latest
        return None if did is None or did.gist is None else (did.trust, did.likeness, did.worth, did.reach)

    def vector(self) -> Vector | None:
        """m as it is kept; None while nothing is known."""
        return None if self._kept is None else self._kept.unpack()

    @property
    def nbytes(self) -> int:
        """What it takes at rest."""
        return 0 if self._kept is None else self._kept.nbytes

    @np.errstate(over="ignore", invalid="ignore")
    def mend(
        self, stored: StoredGradients, window: Window, shares: FloatArray, fleet: Vector | None, *, moved: bool
    ) -> Mending:
        """What to add to each local step; `moved` says whether the new model differs from the old.

        `shares` are the regions' shares of the stream in the long run, `fleet` is G, the gist of the whole fleet.
        """
        before = stored.under(stored.before, stored.weights)
        after = stored.under(stored.after, stored.weights)
        gist, worth = self._taken_in(stored, window, shares)
        rho = _likeness(stored, before, after) if moved else 1.0
        if gist is None:
            return Mending(None, 0.0, rho, 0.0, 0.0, None)
        k = stored.effective_size
        beta = rho * worth / (worth + k)
        mended = beta * (gist - self._own(before))
        # Times the trust as well, or the noise of a gist that few samples made would come into every step.
        turn = self.options.kappa * beta * rho**self.options.fading
        correction = mended if fleet is None else mended + turn * (fleet - gist)
        left = min(k / max(1.0 - rho * beta, 1e-9), self.options.memory)
        reach = float(np.sqrt(_inner(correction, correction) / max(_inner(after, after), 1e-30)))
        if not np.isfinite(reach):  # a huge sample: better no correction than one that ends the model
            return Mending(None, 0.0, rho, 0.0, 0.0, None)
        return Mending(correction, beta, rho, left, reach, self._own(after) + mended, shares)

    def keep(self, mending: Mending | None) -> None:
        """Lets a participation count; None, or one that holds no finite gist: nothing is known any more."""
        self.latest = mending
        self._changes += 1
        if mending is None or mending.gist is None or not np.isfinite(mending.gist).all():
            self._kept, self.worth, self._shares = None, 0.0, None
        else:
            seed = child_seed(self._seed, "gist", self._changes)
            self._kept = pack(mending.gist, self.options.encoding, seed, self.options.block)
            self.worth, self._shares = mending.worth, mending.shares

    def snapshot(self) -> State:
        state: State = {"state": np.array([self.worth, self._changes])}
        if self._shares is not None:
            state["shares"] = self._shares
        return state if self._kept is None else state | self._kept.snapshot()

    def restore(self, state: State) -> None:
        worth, changes = state["state"].tolist()
        self.worth, self._changes, self.latest = worth, int(changes), None
        form = self.options.encoding, self.options.block
        self._kept = Packed.from_snapshot(state, *form) if "packed" in state else None
        self._shares = state.get("shares")

    def _taken_in(self, stored: StoredGradients, window: Window, shares: FloatArray) -> tuple[Vector | None, float]:
        """m and n with the window's arrivals counted in."""
        known, worth = self.vector(), self.worth
        if known is None and not window.count:
            return None, 0.0
        match = _match(stored, window.counts, shares) if self.options.matched else _unmatched(stored, window.count)
        moved = np.zeros(len(stored.weights))
        if known is not None and self._shares is not None and self.options.matched:
            moved = stored.spread(shares - self._shares)  # or m would hold on to the labels of the past
            worth = 1.0 / (1.0 / worth + float(moved @ moved))
        total = worth + match.worth
        share = match.worth / total
        gist = self._own(window.mean(share * match.seen))
        weights = share * match.weights + (1.0 - share) * moved
        if weights.any():
            gist += self._own(stored.under(stored.before, weights))
        if known is not None:
            gist += (1.0 - share) * known
        return gist, min(total, self.options.memory)

    def _own(self, gradient: Vector) -> Vector:
        """The part of a gradient that the gist covers: the last of it."""
        return gradient[len(gradient) - self.size :]


@dataclass(frozen=True, eq=False)
class _Match:
    """z, the window's word on the whole stream's gradient under the old model: seen * g + sum_i weights_i grad_i.

    What the window did not see is as the store has it.
    """

    seen: float
    """s: the long-run share of the regions that the window saw."""
    weights: FloatArray
    worth: float
    """N_z, in samples."""


def _match(stored: StoredGradients, counts: FloatArray, shares: FloatArray) -> _Match:
    """Matches a window's regions, (Y,) arrivals, with the store's: z = a + s (g - a_q) in the letters of the paper.

    a_q is the store's gradient with its regions weighted as in the window; what of the window the store lacks counts
    with a itself.
    """
    if not counts.any():
        return _Match(0.0, np.zeros(len(stored.weights)), 0.0)
    window, arrived = counts / counts.sum(), counts > 0
    seen = float(shares[arrived].sum())
    weights = stored.weights - stored.spread(seen * window)
    variance = float(weights @ weights) + (seen**2 * window[arrived] ** 2 / counts[arrived]).sum()
    return _Match(seen, weights, float(1.0 / max(variance, 1e-30)))


def _unmatched(stored: StoredGradients, count: int) -> _Match:
    """The window taken for the whole stream: z = g."""
    return _Match(1.0, np.zeros(len(stored.weights)), float(count))


def _likeness(stored: StoredGradients, before: Vector, after: Vector) -> float:
    """rho: the covariance of the stored samples' gradients under the two models over their mean variance, in [0, 1].

    Of a single sample, which has no variance, the gradients themselves are compared. Gradients too long to be squared
    are not alike.
    """
    both = stored.weights @ stored.after.inner(stored.before)
    each = stored.weights @ (stored.after.norms() ** 2 + stored.before.norms() ** 2) / 2
    if len(stored.weights) > 1:
        both, each = both - _inner(after, before), each - (_inner(after, after) + _inner(before, before)) / 2
    return min(max(float(both / each), 0.0), 1.0) if 0 < each < np.inf else 0.0


def _inner(left: Vector, right: Vector) -> float:
    """<left, right>, blocks of it added up in float64: what variances leave of it is too small for float32 alone."""
    whole = len(left) - len(left) % _BLOCK
    blocks = np.vecdot(left[:whole].reshape(-1, _BLOCK), right[:whole].reshape(-1, _BLOCK))
    return float(blocks.sum(dtype=np.float64)) + float(left[whole:] @ right[whole:])
