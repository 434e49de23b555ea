"""What a gist is made of: whose noise is in it, and how much.

A sample's gradient is the mean of its region, mu_y, and noise; the unit here is the noise's
variance. Then a gist is

    m = sum_y l_y mu_y + sum_i c_i noise_i + rest,

where i runs over the stored samples, and the rest is noise of samples that are gone, of variance r.
What m shares with the store matters where a label does not come for a while. Samples already
counted in m carry no new information: counting them once more would push out of m what the others
contributed. Equations are those of docs/gist.md.
"""

from dataclasses import dataclass

import numpy as np

from fedkeep.core.types import BoolArray, FloatArray, IntArray

_BIAS_SCALE = 10.0
"""How far a biased store may be off, in a sample's noise: far beyond any plausible bias."""
_LABEL_VARIANCE = 10.0
"""lambda: the variance of the labels' mean gradients over that of a sample, for labels not
stored."""
_RIDGE = 1e-12
"""Keeps the two equations solvable where a source holds nothing."""


@dataclass(frozen=True, eq=False)
class StoreSummary:
    """What is stored, as far as the noise model needs it.

    Parameters
    ----------
    weights : FloatArray
        omega, what each sample weighs in the store's gradient, (k,).
    regions : IntArray
        The region of each sample, (k,).
    fresh : BoolArray
        Whether each sample came since the last participation, (k,).
    """

    weights: FloatArray
    regions: IntArray
    fresh: BoolArray

    def by_region(self, values: FloatArray | BoolArray | None, regions: int) -> FloatArray:
        """Sum the samples' values over each region, (Y,); count the samples if None."""
        sums = np.bincount(self.regions, values, minlength=regions)
        return sums.astype(np.float64, copy=False)


@dataclass(frozen=True, eq=False)
class NoiseModel:
    """The noise in m, sample by sample as far as they are stored.

    Parameters
    ----------
    label_coefficients : FloatArray
        l_y, what each region's mean weighs in m, (Y,).
    sample_coefficients : FloatArray
        c_y, what the noise of one stored sample of each region weighs in m, (Y,).
    counts : FloatArray
        How many stored samples of each region have that coefficient, (Y,).
    residual_variance : float
        r, the variance that m has from samples which are not stored.
    """

    label_coefficients: FloatArray
    sample_coefficients: FloatArray
    counts: FloatArray
    residual_variance: float

    @property
    def ess(self) -> float:
        """Effective sample size n: how many samples would be as noisy; equation (7)."""
        return float(1.0 / (self._stored_variance() + self.residual_variance))

    def cap_ess(self, most: float) -> "NoiseModel":
        """Add noise until the effective sample size is at most `most`, so that news counts."""
        lacking = 1.0 / most - self._stored_variance()
        return self._with(self.counts, max(self.residual_variance, lacking))

    def drop_evicted(self, held: FloatArray | int) -> "NoiseModel":
        """Move the noise of samples that are no longer stored to the residual.

        Parameters
        ----------
        held : FloatArray or int
            How many of the samples that m has counted are still stored, by region, (Y,).
        """
        evicted = np.maximum(self.counts - held, 0.0)
        variance = self.residual_variance + float(evicted @ self.sample_coefficients**2)
        return self._with(self.counts - evicted, variance)

    def optimal_weight(self, store: StoreSummary) -> float:
        """Find the control-variate coefficient with the least variance.

        It minimises Var[a + x (m - a)] over x, where a is the store's gradient, if the model has
        not moved since.

        Parameters
        ----------
        store : StoreSummary
            What is stored.

        Returns
        -------
        float
            x in [0, 1]; 0 keeps the store's own gradient.

        References
        ----------
        docs/gist.md, equation (3); Nelson, Control variates, 1990.
        """
        off = store.weights - self.sample_coefficients[store.regions]
        variance = float(off @ off) + self.residual_variance
        if variance <= 0:
            return 0.0
        covariance = float(store.weights @ off)
        return min(max(covariance / variance, 0.0), 1.0)

    def propagate(
        self, store: StoreSummary, beta: float, slope: float, ratio: float
    ) -> "NoiseModel":
        """Carry the noise over to m <- a(w_new) + beta (m - a(w_old)); equation (6).

        Parameters
        ----------
        store : StoreSummary
            What is stored.
        beta : float
            The correction weight.
        slope : float
            The regression of the old noise on the new: their covariance over the new variance.
        ratio : float
            The old variance over the new, in whose unit the result is.
        """
        mass = store.by_region(store.weights, len(self.label_coefficients))
        own = mass / np.maximum(self.counts, 1.0)
        off = float(self.counts @ (self.sample_coefficients - own) ** 2)
        unexplained = (ratio - slope**2) * off
        return NoiseModel(
            mass + beta * slope * (self.label_coefficients - mass),
            own + beta * slope * (self.sample_coefficients - own),
            self.counts,
            beta**2 * (unexplained + ratio * self.residual_variance),
        )

    def _stored_variance(self) -> float:
        """Sum of c_i^2 over the stored samples."""
        return float(self.counts @ self.sample_coefficients**2)

    def _with(self, counts: FloatArray, residual_variance: float) -> "NoiseModel":
        return NoiseModel(
            self.label_coefficients, self.sample_coefficients, counts, residual_variance
        )


@dataclass(frozen=True, eq=False)
class LinearEstimate:
    """m <- alpha m + tau g + sum_i d_i grad_i, of the old m, the arrivals' mean g and the store.

    Parameters
    ----------
    past_weight : float
        alpha, what the old m counts.
    window_weight : float
        tau, what the mean gradient of the arrivals counts.
    sample_weights : FloatArray
        d, what each stored sample's gradient counts, (k,).
    noise_model : NoiseModel
        What the new m is made of.
    """

    past_weight: float
    window_weight: float
    sample_weights: FloatArray
    noise_model: NoiseModel


def best_linear_estimate(
    past: NoiseModel | None,
    store: StoreSummary,
    counts: FloatArray,
    shares: FloatArray,
    *,
    unbiased: bool = True,
) -> LinearEstimate:
    """Estimate sum_y p_y mu_y from the old m, the arrivals' mean and the stored samples.

    Whatever part alpha of m and tau of the arrivals' mean are taken, the store supplies what they
    lack of each region; the noise of that is least at the solution of two equations. A region that
    is not stored cannot be supplied: its mean is taken to differ from the others'.

    Parameters
    ----------
    past : NoiseModel or None
        What the old m is made of; None if there is none.
    store : StoreSummary
        What is stored.
    counts : FloatArray
        The arrivals by region, (Y,).
    shares : FloatArray
        p, the regions' long-run shares of the stream, (Y,).
    unbiased : bool
        Whether what is stored of a label is a random sample of it. If not, stored samples may all
        be off in one direction: then they only supply differences between labels.

    References
    ----------
    docs/gist.md, equations (1) and (9).
    """
    regions, n = len(shares), max(1.0, float(counts.sum()))
    held = store.by_region(None, regions)
    new = store.by_region(store.fresh, regions)
    # What came before there was a model is in no sum of arrivals.
    fresh, used = np.minimum(new, counts), held - new
    none = np.zeros(regions)
    past = (past or NoiseModel(none, none, none, 0.0)).drop_evicted(used)

    # u and v of equation (9): what alpha m and tau g supply by samples that are not stored.
    by_past = past.label_coefficients - used * past.sample_coefficients
    by_window = (counts - fresh) / n
    supplied_apart = np.array([by_past, by_window])
    noise = np.array([past.residual_variance, (n - fresh.sum()) / n**2])

    # The two normal equations for alpha and tau.
    supply = 1.0 / (held + 1.0 / _LABEL_VARIANCE)
    weighted = supplied_apart * supply
    normal = weighted @ supplied_apart.T
    wanted = weighted @ shares
    if not unbiased:
        sums = supplied_apart.sum(axis=1) * _BIAS_SCALE
        normal += sums[:, None] * sums
        wanted += sums * (shares.sum() * _BIAS_SCALE)
    normal += np.diag(noise + _RIDGE)
    alpha, tau = np.linalg.solve(normal, wanted).clip(0.0, 1.0).tolist()

    lacking = shares - alpha * by_past - tau * by_window
    each = np.where(held > 0, lacking * supply, 0.0)
    in_window = tau / n * fresh / np.maximum(new, 1.0)
    in_past = alpha * past.sample_coefficients
    counted = np.where(store.fresh, in_window[store.regions], in_past[store.regions])
    weights = each[store.regions] - counted
    labels = alpha * past.label_coefficients + tau * counts / n + store.by_region(weights, regions)
    residual = float(noise @ [alpha**2, tau**2])
    return LinearEstimate(alpha, tau, weights, NoiseModel(labels, each, held, residual))


def pooled_mean(past: NoiseModel | None, store: StoreSummary, count: int) -> LinearEstimate:
    """Average the old m and the arrivals' mean by their sample sizes, over one region.

    Parameters
    ----------
    past : NoiseModel or None
        What the old m is made of; None if there is none.
    store : StoreSummary
        What is stored, all of it in region 0.
    count : int
        The number of arrivals.
    """
    k, fresh = len(store.weights), int(store.fresh.sum())
    new, used = min(fresh, count), k - fresh
    none = np.zeros(1)
    past = (past or NoiseModel(none, none, none, 0.0)).drop_evicted(used)
    counted = float(past.sample_coefficients[0])
    variance = past.residual_variance + used * counted**2
    ess = 1.0 / variance if variance > 0 else 0.0
    alpha = ess / (ess + count)
    per_arrival = 1.0 / (ess + count)

    # Stored samples share one coefficient; what they differ from it goes to the residual.
    each = (alpha * used * counted + new * per_arrival) / k
    spread = (
        used * (alpha * counted - each) ** 2
        + new * (per_arrival - each) ** 2
        + (fresh - new) * each**2
    )
    residual = alpha**2 * past.residual_variance + (count - new) * per_arrival**2 + spread
    noise_model = NoiseModel(np.ones(1), np.array([each]), np.array([float(k)]), residual)
    return LinearEstimate(alpha, 1.0 - alpha, np.zeros(k), noise_model)
