"""What a gist adds to the local steps of one participation.

Equations are those of docs/gist.md.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fedkeep.core.gist.noise_model import NoiseModel, StoreSummary
from fedkeep.core.gradients.layout import GradientLayout, KnownGradient
from fedkeep.core.protocols import PerSampleGradients
from fedkeep.core.types import FloatArray, Vector

_INNER_BLOCK = 1024
"""Numbers of an inner product that are added up in float32."""


@dataclass(frozen=True)
class GistFigures:
    """What a gist did in one participation, in four figures.

    Records and messages write them in this order, under the names `trust`, `likeness`, `worth` and
    `reach`.

    Parameters
    ----------
    beta : float
        The correction weight, as an average over the local steps, 0 to 1.
    rho : float
        The correlation of a sample's gradients under the old model and the new, 0 to 1.
    ess : float
        The effective sample size of the gist afterwards.
    relative_norm : float
        The length of the correction over that of the store's gradient.
    """

    beta: float
    rho: float
    ess: float
    relative_norm: float


@dataclass(frozen=True, eq=False)
class NoiseCovariance:
    """How the noise of stored samples under the old model comes back under the new.

    Parameters
    ----------
    covariance : float
        Of a sample's deviations under the two models.
    before, after : float
        Their variance under the old model and under the new.
    """

    covariance: float
    before: float
    after: float

    @property
    def rho(self) -> float:
        """The covariance over the mean of the two variances, 0 to 1; equation (2)."""
        return _ratio(self.covariance, (self.before + self.after) / 2)

    @property
    def theta(self) -> float:
        """The regression of the new noise on the old, 0 to 1; equation (2)."""
        return _ratio(self.covariance, self.before)


UNMOVED = NoiseCovariance(1.0, 1.0, 1.0)
"""Under the same model twice."""


@dataclass(frozen=True, eq=False)
class StoredGradients(StoreSummary):
    """What is stored, as measured under two models; its weights add up to 1.

    Parameters
    ----------
    before : PerSampleGradients
        Under the model that the device had, w_old.
    after : PerSampleGradients
        Under the model that it has been sent, w_new.
    """

    before: PerSampleGradients
    after: PerSampleGradients

    def weighted_sum(
        self, measurements: PerSampleGradients, weights: FloatArray | None = None
    ) -> Vector:
        """Add up sum_i w_i grad_i; by default with the samples' own weights."""
        weights = self.weights if weights is None else weights
        return measurements.weighted_gradient(weights * len(weights))

    @cached_property
    def means(self) -> tuple[Vector, Vector]:
        """The store's gradient under the two models, a(w_old) and a(w_new)."""
        return self.weighted_sum(self.before), self.weighted_sum(self.after)

    @cached_property
    def noise_covariance(self) -> NoiseCovariance:
        """The samples' deviations under the two models, compared.

        A single sample has no variance: its gradients themselves are compared.
        """
        before, after = self.means
        several = len(self.weights) > 1
        first = float(self.weights @ self.before.norms() ** 2) - several * _inner(before, before)
        second = float(self.weights @ self.after.norms() ** 2) - several * _inner(after, after)
        covariance = self._covariance(self.before, before, self.after, after)
        return NoiseCovariance(covariance, first, second)

    def noise_regression(self, ahead: PerSampleGradients) -> float:
        """Regress the deviations under a next model on those under the new one.

        Returns
        -------
        float
            phi of equation (4): how much of a deviation is left, 0 to 1.
        """
        mean = self.weighted_sum(ahead)
        covariance = self._covariance(self.after, self.means[1], ahead, mean)
        return _ratio(covariance, self.noise_covariance.after)

    def _covariance(
        self, one: PerSampleGradients, mean: Vector, other: PerSampleGradients, other_mean: Vector
    ) -> float:
        both = float(self.weights @ other.inner(one))
        return both - _inner(mean, other_mean) if len(self.weights) > 1 else both


@dataclass(frozen=True, eq=False)
class Correction:
    """What a gist adds to the gradient of each local step, and what it is afterwards.

    Parameters
    ----------
    variance_term : Vector or None
        beta (m - a(w_old)), which corrects what the store gets wrong; None: nothing is known yet.
    drift_term : Vector or None
        What turns steps towards the fleet's gist G; None in the local mode.
    beta : float
        The correction weight, 0 to 1, averaged over the local steps.
    rho : float
        The correlation of a sample's gradients under the old model and the new, 0 to 1.
    store_norm : float
        The length of the store's gradient, a(w_new).
    gist : Vector or None
        m, carried over to the new model.
    noise_model : NoiseModel or None
        What that m is made of.
    layout : GradientLayout, optional
        The layout of terms and gist; None: they are as long as the gradient that they are of.
    known : tuple of KnownGradient
        Gradients along which the correction may lie: the store's gradient a(w_old) and, in the
        shared mode, the step that the model has made, w_old - w_new.
    made : Vector, optional
        The vector that the sketches are of, where it has been made already.
    """

    variance_term: Vector | None
    drift_term: Vector | None
    beta: float
    rho: float
    store_norm: float
    gist: Vector | None
    noise_model: NoiseModel | None
    layout: GradientLayout | None = None
    known: tuple[KnownGradient, ...] = ()
    made: Vector | None = None

    @cached_property
    def vector(self) -> Vector | None:
        """What is added to the gradient of each local step; equation (5).

        Of a sketch it is made once, from both terms together: made apart, each would have the
        error of its own reconstruction.
        """
        terms = self.variance_term
        if terms is not None and self.drift_term is not None:
            terms = terms + self.drift_term
        if terms is None or self.layout is None:
            return terms
        if self.made is not None:
            return self.made
        return self.layout.reconstruct_near(terms, self.known)

    @cached_property
    def relative_norm(self) -> float:
        """The correction's length over that of the store's gradient."""
        vector = self.vector
        if vector is None:
            return 0.0
        return float(np.sqrt(_inner(vector, vector)) / max(self.store_norm, 1e-15))

    @property
    def ess(self) -> float:
        """The effective sample size of the gist after this participation."""
        return 0.0 if self.noise_model is None else self.noise_model.ess

    @property
    def figures(self) -> GistFigures | None:
        """What is recorded; None where nothing was known."""
        if self.gist is None:
            return None
        return GistFigures(self.beta, self.rho, self.ess, self.relative_norm)

    def step_average(self, phi: float, steps: int) -> "Correction":
        """Average the variance term over local steps, as the noise that it corrects fades.

        The correction stays the same over all steps: where one step all but fits the stored
        samples, that of five would overshoot.

        Parameters
        ----------
        phi : float
            How much of the stored samples' deviations each step leaves.
        steps : int
            The local steps to come.

        References
        ----------
        docs/gist.md, equation (4).
        """
        share = 1.0 if phi >= 1 else (1.0 - phi**steps) / (steps * (1.0 - phi))
        term = None if self.variance_term is None else self.variance_term * np.float32(share)
        made = None
        if self.layout is not None and self.drift_term is None and self.vector is not None:
            # A multiple of a sketch gives that multiple of the vector.
            made = self.vector * np.float32(share)
        return replace(self, variance_term=term, beta=self.beta * share, made=made)


def norm(vector: Vector) -> float:
    """Measure a vector's length, blocks of it added up in float64."""
    return float(np.sqrt(_inner(vector, vector)))


def _ratio(part: float, whole: float) -> float:
    """Divide, cut to [0, 1]; 0 where it is undefined, as of gradients too long to be squared."""
    if not 0 < whole < np.inf or not np.isfinite(part):
        return 0.0
    return min(max(part / whole, 0.0), 1.0)


def _inner(left: Vector, right: Vector) -> float:
    """Multiply two vectors, blocks of the product added up in float64.

    What variances leave of it is too small for float32 alone.
    """
    whole = len(left) - len(left) % _INNER_BLOCK
    if not whole:
        return float(left @ right)
    blocks = np.vecdot(
        left[:whole].reshape(-1, _INNER_BLOCK), right[:whole].reshape(-1, _INNER_BLOCK)
    )
    return float(blocks.sum(dtype=np.float64)) + float(left[whole:] @ right[whole:])
