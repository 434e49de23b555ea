"""What a gist is made of: whose noise is in it, and how much. From that follows how to go on, and how far to trust it.

A sample's gradient is the mean of its region, mu_y, and noise; the unit here is the noise's variance. Then a gist is

    m = sum_y composition_y mu_y + sum_i counted_i noise_i + rest,

where i runs over the stored samples, and the rest is noise of samples that are gone. To know what m shares with the
store is what matters where a label does not come for a while: its stored samples are old acquaintances then, and
counting them once more would teach nothing, and push out of m what the others had said.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from fedkeep.core.types import BoolArray, FloatArray, IntArray

_DOUBT = 10.0
"""How far a store that is no fair sample may be off, in a sample's noise: far beyond what anybody could believe."""


@dataclass(frozen=True, eq=False)
class StoreSummary:
    """What is stored: what each sample weighs, (k,), its region, and whether it came since the last participation."""

    weights: FloatArray
    regions: IntArray
    fresh: BoolArray

    def by_region(self, values: FloatArray | BoolArray | None, regions: int) -> FloatArray:
        """The sum of the samples' values over each region, (Y,); None: how many there are."""
        return np.bincount(self.regions, values, minlength=regions).astype(np.float64, copy=False)


@dataclass(frozen=True, eq=False)
class NoiseModel:
    """What m is made of."""

    composition: FloatArray
    """What each region's mean weighs in m, (Y,)."""
    counted: FloatArray
    """What one stored sample of each region weighs in m's noise, (Y,)."""
    held: FloatArray
    """How many stored samples of each region that was said of, (Y,)."""
    rest: float
    """The variance that m has from samples which are not stored."""

    @property
    def worth(self) -> float:
        """n: how many samples would be as noisy."""
        return float(1.0 / (self.held @ self.counted**2 + self.rest))

    def bounded(self, memory: float) -> "NoiseModel":
        """The same with the noise of no more than `memory` samples, so that news always counts for something."""
        rest = max(self.rest, 1.0 / memory - float(self.held @ self.counted**2))
        return NoiseModel(self.composition, self.counted, self.held, rest)

    def reduced_to(self, used: FloatArray | int) -> "NoiseModel":
        """What it is when no more than so many of its stored samples are still there, by region, (Y,)."""
        gone = np.maximum(self.held - used, 0.0)
        return NoiseModel(
            self.composition,
            self.counted,
            self.held - gone,
            self.rest + float(gone @ self.counted**2),
        )

    def pull(self, holding: StoreSummary) -> float:
        """How far to go from the store's gradient towards m for the least noise, 0 to 1, were the model the same."""
        off = holding.weights - self.counted[holding.regions]
        noise = float(off @ off) + self.rest
        return min(max(float(holding.weights @ off) / noise, 0.0), 1.0) if noise > 0 else 0.0

    def carried(
        self, holding: StoreSummary, beta: float, back: float, scale: float
    ) -> "NoiseModel":
        """What a(w_new) + beta (m - a(w_old)) is made of, in units of the noise under the new model.

        `back` is how much of the old noise the new one tells, the covariance over the new variance, and `scale` the old
        variance over the new.
        """
        mass = holding.by_region(holding.weights, len(self.composition))
        own = mass / np.maximum(self.held, 1.0)
        off = float(self.held @ (self.counted - own) ** 2)
        return NoiseModel(
            mass + beta * back * (self.composition - mass),
            own + beta * back * (self.counted - own),
            self.held,
            beta**2 * ((scale - back**2) * off + scale * self.rest),
        )


LinearEstimate: TypeAlias = tuple[float, float, FloatArray, NoiseModel]
"""The new m: what of the old one, what of the window's mean gradient, what of each stored sample's, and its making."""


def mixed(
    past: NoiseModel | None,
    holding: StoreSummary,
    counts: FloatArray,
    shares: FloatArray,
    contrast: float,
    *,
    fair: bool = True,
) -> LinearEstimate:
    """The best linear estimate of sum_y shares_y mu_y from the old m, the window's mean and the stored samples.

    `counts` are the window's arrivals by region. Whatever part alpha of m and tau of the window's mean are taken, the
    store supplies what they lack of each region; the noise of that is least at the solution of two equations. A region
    that is not stored cannot be supplied; its mean is taken to differ from the others' by `contrast`, a variance.
    Where stored samples are no `fair` sample, they may all be off the same way: then they only supply differences.
    """
    regions, n = len(shares), max(1.0, float(counts.sum()))
    held = holding.by_region(None, regions)
    new = holding.by_region(holding.fresh, regions)
    fresh, used = (
        np.minimum(new, counts),
        held - new,
    )  # what came before there was a model is in no window
    none = np.zeros(regions)
    past = (past or NoiseModel(none, none, none, 0.0)).reduced_to(used)
    noise = np.array([past.rest, (n - fresh.sum()) / n**2])
    apart = np.array([past.composition - used * past.counted, (counts - fresh) / n])
    supply = 1.0 / (held + 1.0 / contrast)
    supplied = apart * supply
    normal = supplied @ apart.T
    wanted = supplied @ shares
    if not fair:
        sums = apart.sum(axis=1) * _DOUBT
        normal += sums[:, None] * sums
        wanted += sums * (shares.sum() * _DOUBT)
    normal += np.diag(noise + 1e-12)
    known, seen = np.linalg.solve(normal, wanted).clip(0.0, 1.0).tolist()
    each = np.where(held > 0, (shares - known * apart[0] - seen * apart[1]) * supply, 0.0)
    in_window = seen / n * fresh / np.maximum(new, 1.0)
    in_past = known * past.counted
    weights = each[holding.regions] - np.where(
        holding.fresh, in_window[holding.regions], in_past[holding.regions]
    )
    composition = known * past.composition + seen * counts / n + holding.by_region(weights, regions)
    return (
        known,
        seen,
        weights,
        NoiseModel(composition, each, held, float(noise @ [known**2, seen**2])),
    )


def averaged(past: NoiseModel | None, holding: StoreSummary, count: int) -> LinearEstimate:
    """The same of the old m and the window's mean alone, over one region: for stores that are no fair sample."""
    k, fresh = len(holding.weights), int(holding.fresh.sum())
    new, used = min(fresh, count), k - fresh
    none = np.zeros(1)
    past = (past or NoiseModel(none, none, none, 0.0)).reduced_to(used)
    counted = float(past.counted[0])
    noise = past.rest + used * counted**2
    worth = 1.0 / noise if noise > 0 else 0.0
    known, one = (
        worth / (worth + count),
        1.0 / (worth + count),
    )  # `one` is what an arrival of the window weighs
    each = (known * used * counted + new * one) / k
    spread = (
        used * (known * counted - each) ** 2 + new * (one - each) ** 2 + (fresh - new) * each**2
    )
    rest = known**2 * past.rest + (count - new) * one**2 + spread
    made = NoiseModel(np.ones(1), np.array([each]), np.array([float(k)]), rest)
    return known, 1.0 - known, np.zeros(k), made
