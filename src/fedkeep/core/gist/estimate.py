"""The gist: a control variate with memory, the running mean gradient of all arrivals.

A store of k samples gives the gradient of the loss with the noise of k samples. But the device has
seen all N that came, and their mean gradient g under the model it had then, w_old. Where a sample's
gradients under the old and the new model correlate, what the store has too much or too little under
w_old it has under w_new as well: so the device adds beta (m - a(w_old)) to each step, where a is
the store's gradient and m, the gist, the best estimate of the stream's.

How much of it depends on what m knows that the store does not (`noise_model`), and on how much of a
sample's noise is the same under both models. At the least-variance beta the noise is never more
than the store's own. Equations are those of docs/gist.md.
"""

from dataclasses import replace

import numpy as np

from fedkeep.core.gist.correction import (
    UNMOVED,
    Correction,
    GistFigures,
    StoredGradients,
    norm,
)
from fedkeep.core.gist.noise_model import (
    LinearEstimate,
    NoiseModel,
    StoreSummary,
    best_linear_estimate,
    pooled_mean,
)
from fedkeep.core.gist.options import GistOptions
from fedkeep.core.gradients.accumulator import GradientAccumulator
from fedkeep.core.gradients.codec import pack, packed_form, scale_count, unpack
from fedkeep.core.gradients.layout import GradientLayout, KnownGradient
from fedkeep.core.protocols import PerSampleGradients
from fedkeep.core.seeds import child_seed
from fedkeep.core.types import ArraySpec, FloatArray, State, StateSpec, Vector

_RHO_POWER = 3
"""How soon the drift term fades where models move far between two participations."""


class Gist:
    """The gist m of one device; it changes only when the device takes part.

    Parameters
    ----------
    options : GistOptions
        How it is kept and used.
    layout : GradientLayout
        Which parameters m covers, and whether every number of it is kept or a sketch.
    regions : int
        Y, the number of regions.
    seed : int
        The seed of the rounding, where it is kept as `int8`.
    unbiased : bool
        Whether what is stored of a label is a random sample of it.

    References
    ----------
    docs/gist.md has the method, step by step. Control variates: Nelson, 1990; SVRG: Johnson and
    Zhang, 2013; STORM: Cutkosky and Orabona, 2019.
    """

    def __init__(
        self,
        options: GistOptions,
        layout: GradientLayout,
        regions: int,
        seed: int = 0,
        *,
        unbiased: bool = True,
    ) -> None:
        self.options, self.layout, self.size = options, layout, layout.size
        self._regions, self._seed, self._unbiased = regions, seed, unbiased
        self._kept: State | None = None
        self._noise_model: NoiseModel | None = None
        self._changes = 0
        self.latest: Correction | None = None
        """What it did when the device last took part."""

    @property
    def ess(self) -> float:
        """The effective sample size n; 0 while nothing is known."""
        return 0.0 if self._noise_model is None else self._noise_model.ess

    @property
    def figures(self) -> GistFigures | None:
        """What it did when the device last took part; None where nothing was known."""
        return None if self.latest is None else self.latest.figures

    def vector(self) -> Vector | None:
        """Decode m; None while nothing is known."""
        return None if self._kept is None else unpack(self._kept, self.size)

    @property
    def nbytes(self) -> int:
        """The bytes it takes at rest."""
        return sum(array.nbytes for array in (self._kept or {}).values())

    @np.errstate(over="ignore", invalid="ignore")
    def correct(
        self,
        stored: StoredGradients,
        arrivals: GradientAccumulator,
        shares: FloatArray,
        fleet: Vector | None,
        models: tuple[Vector, Vector] | None,
    ) -> Correction:
        """Compute what to add to each local step.

        Parameters
        ----------
        stored : StoredGradients
            What is stored, as measured under the old model and the new.
        arrivals : GradientAccumulator
            The gradients of all arrivals under the old model.
        shares : FloatArray
            p, the regions' long-run shares of the stream, (Y,).
        fleet : Vector or None
            G, the gist of the fleet; None in the local mode.
        models : tuple of two Vector or None
            w_old and w_new, by all parameters; None where the model has not moved.

        Returns
        -------
        Correction
            The correction, and the gist carried over to the new model; `keep` makes it the
            device's.
        """
        options, past = self.options, self.vector()
        noise = UNMOVED if models is None else stored.noise_covariance
        nothing = Correction(None, None, 0.0, noise.rho, 0.0, None, None)
        if past is None and not arrivals.count:
            return nothing
        store, estimate = self._linear_estimate(stored, arrivals, shares)
        noise_model = estimate.noise_model.cap_ess(options.max_ess)
        old_store = self._mean_of(stored, stored.before, stored.means[0])
        new_store = self._mean_of(stored, stored.after, stored.means[1])

        # Equation (1): m <- alpha m + tau g + sum_i d_i grad_i(w_old).
        mean = arrivals.mean(estimate.window_weight)
        gist = mean if arrivals.layout is self.layout else self.layout.of_gradient(mean)
        if estimate.sample_weights.any():
            gist += self._weighted_sum(stored.before, estimate.sample_weights)
        if past is not None:
            gist += np.float32(estimate.past_weight) * past

        # Equations (3) and (5): beta = theta x, and the two terms of the correction.
        beta = noise.theta * noise_model.optimal_weight(store) if noise.after > 0 else 0.0
        variance_term = gist - old_store
        variance_term *= beta
        drift_term = None
        if fleet is not None:
            # Beta is a factor here too, or the noise of a small gist would come into every step.
            drift_weight = options.drift_weight * beta * noise.rho**_RHO_POWER
            drift_term = drift_weight * (fleet - gist)

        # Equation (6): m <- a(w_new) + beta (m - a(w_old)).
        slope, ratio = (0.0, 0.0)
        if beta > 0:
            slope, ratio = noise.covariance / noise.after, noise.before / noise.after
        carried = noise_model.propagate(store, beta, slope, ratio).cap_ess(options.max_ess)
        correction = Correction(
            variance_term,
            drift_term,
            beta,
            noise.rho,
            norm(stored.means[1]),
            new_store + variance_term,
            carried,
            *self._reconstruction(stored.means[0], old_store, None if fleet is None else models),
        )
        # A huge sample: better no correction than one that ends the model.
        return correction if np.isfinite(correction.relative_norm) else nothing

    def keep(self, correction: Correction | None) -> None:
        """Take over the gist of a correction; None or an infinite one: nothing is known any more.

        Parameters
        ----------
        correction : Correction or None
            What a participation used.
        """
        self.latest = correction
        self._changes += 1
        self._kept = self._noise_model = None
        if correction is None or correction.gist is None:
            return
        if np.isfinite(correction.gist).all():
            seed = child_seed(self._seed, "gist", self._changes)
            self._kept = pack(correction.gist, self.options.used_encoding, seed)
            self._noise_model = correction.noise_model

    def state_spec(self) -> StateSpec:
        """Describe the arrays of `snapshot`."""
        encoding = self.options.used_encoding
        scales = scale_count(self.size, encoding)
        length, form = packed_form(self.size, encoding)
        known = {"optional": True, "learned": True}
        return {
            "changes": ArraySpec((), np.int64, optional=True),
            "by_region": ArraySpec((3, self._regions), np.float64, bounded=True, **known),
            "rest": ArraySpec((), np.float64, **known),
            "packed": ArraySpec((length,), form, **known),
            "scales": ArraySpec((scales,), np.float32, **known),
        }

    def snapshot(self) -> State:
        """Take m as it is kept, and what it is made of."""
        state: State = {"changes": np.array(self._changes)}
        if self._kept is None or self._noise_model is None:
            return state
        model = self._noise_model
        rows = [model.label_coefficients, model.sample_coefficients, model.counts]
        residual = np.array(model.residual_variance)
        return state | {"by_region": np.stack(rows), "rest": residual} | self._kept

    def restore(self, state: State) -> None:
        """Become what `snapshot` described; without all of it nothing is known."""
        self._changes = int(state.get("changes", 0))
        self.latest = None
        self._kept = self._noise_model = None
        if state.keys() >= {"by_region", "rest", "packed", "scales"}:
            labels, samples, counts = np.array(state["by_region"], dtype=np.float64)
            self._noise_model = NoiseModel(labels, samples, counts, float(state["rest"]))
            _, form = packed_form(self.size, self.options.used_encoding)
            forms = {"packed": form, "scales": "float32"}
            self._kept = {name: np.array(state[name], dtype=form) for name, form in forms.items()}

    def _linear_estimate(
        self, stored: StoredGradients, arrivals: GradientAccumulator, shares: FloatArray
    ) -> tuple[StoreSummary, LinearEstimate]:
        """Estimate the stream's gradient label by label, or as a whole; with the store it used."""
        past = self._noise_model
        if self.options.label_matching:
            estimate = best_linear_estimate(
                past, stored, arrivals.counts, shares, unbiased=self._unbiased
            )
            return stored, estimate
        undivided = replace(stored, regions=np.zeros_like(stored.regions))
        return undivided, pooled_mean(past, undivided, arrivals.count)

    def _mean_of(
        self, stored: StoredGradients, measurements: PerSampleGradients, mean: Vector
    ) -> Vector:
        """Represent the store's gradient; a sketch is made without the gradient itself."""
        if self.layout.whole:
            return self.layout.of_gradient(mean)
        return self._weighted_sum(measurements, stored.weights)

    def _weighted_sum(self, measurements: PerSampleGradients, weights: FloatArray) -> Vector:
        """Represent sum_i w_i grad_i."""
        scaled = weights * len(weights)
        if self.layout.whole:
            return self.layout.of_gradient(measurements.weighted_gradient(scaled))
        return measurements.sketched_gradient(self.layout, scaled)

    def _reconstruction(
        self, old_store: Vector, numbers: Vector, models: tuple[Vector, Vector] | None
    ) -> tuple[GradientLayout | None, tuple[KnownGradient, ...]]:
        """Say in which layout the correction is, and along which gradients it may lie.

        What the fleet's gist adds lies along the step that the model has made, w_old - w_new; the
        rest does not, and takes some noise by it.
        """
        if self.layout.whole:
            return None, ()
        size = self.layout.parameters
        known = [KnownGradient(old_store[len(old_store) - size :], numbers)]
        if models is not None:
            old, new = (model[len(model) - size :] for model in models)
            covered = old - new
            known.append(KnownGradient(covered, self.layout.of_gradient(covered)))
        return self.layout, tuple(known)
