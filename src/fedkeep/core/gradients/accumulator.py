"""The sum of the gradients of all arrivals since the model last changed (Eq. 7)."""

import numpy as np

from fedkeep.core.gradients.layout import GradientLayout
from fedkeep.core.protocols import PerSampleGradients
from fedkeep.core.types import AnyArray, ArraySpec, IntArray, Scores, State, StateSpec, Vector


def clip_weights(norms: Scores, clip: float) -> Scores:
    """Factors min(1, clip / norm) that make no gradient longer than `clip`.

    Parameters
    ----------
    norms : Scores
        The length of each sample's gradient, (n,).
    clip : float
        The greatest length.

    Returns
    -------
    Scores
        One factor per sample, (n,).

    Examples
    --------
    >>> clip_weights(np.array([0.5, 2.0]), clip=1.0).tolist()
    [1.0, 0.5]
    """
    return clip / np.maximum(norms, clip)


def mean_gradient(
    measurements: PerSampleGradients, clip: float | None, layout: GradientLayout | None = None
) -> Vector:
    """Average the samples' gradients, each first clipped to `clip` if there is one."""
    if clip is not None:
        weights = clip_weights(measurements.norms(), clip)
    elif layout is None:
        return measurements.mean_gradient()
    else:
        weights = np.ones(len(measurements.losses()))
    if layout is None:
        return measurements.weighted_gradient(weights)
    return measurements.sketched_gradient(layout, weights)


class GradientAccumulator:
    """Sum of the gradients of all arrivals since the model last changed, and counts by region.

    The sum of whole gradients is kept in float64; of sketches, which are there to save bytes, in
    float32.

    Parameters
    ----------
    size : int
        The length of a gradient; 0 counts arrivals alone.
    regions : int
        Y, the number of regions.
    clip : float, optional
        The length to which each sample's gradient is clipped before it is added: the sensitivity
        that the noise of differential privacy is made for.
    layout : GradientLayout, optional
        The layout that the gradients are summed in, with `size` numbers; as they are without one.
    """

    def __init__(
        self,
        size: int,
        regions: int,
        clip: float | None = None,
        layout: GradientLayout | None = None,
    ) -> None:
        self._sum: AnyArray = np.zeros(size, dtype=np.float64 if layout is None else np.float32)
        self._clip, self.layout = clip, layout
        self.counts = np.zeros(regions)

    @property
    def size(self) -> int:
        """The length of a gradient."""
        return len(self._sum)

    @property
    def count(self) -> int:
        """N, the arrivals counted."""
        return int(self.counts.sum())

    @property
    def nbytes(self) -> int:
        """The bytes of the sum and the counts."""
        return self._sum.nbytes + self.counts.nbytes

    def add(self, measurements: PerSampleGradients, regions: IntArray) -> None:
        """Count arrivals, measured under the present model."""
        if len(regions):
            mean = mean_gradient(measurements, self._clip, self.layout)
            self._sum += mean.astype(self._sum.dtype) * len(regions)
            self.counts += np.bincount(regions, minlength=len(self.counts))

    def mean(self, share: float = 1.0) -> Vector:
        """Average the gradients of all arrivals (Eq. 7), multiplied by `share`."""
        mean = np.empty(self.size, dtype=np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            return np.multiply(self._sum, share / max(1, self.count), out=mean, casting="same_kind")

    def clear(self) -> None:
        """Begin anew, as when the model changes."""
        self._sum[:] = 0.0
        self.counts[:] = 0.0

    def state_spec(self) -> StateSpec:
        """Describe the arrays of `snapshot`."""
        return {
            "sum": ArraySpec((self.size,), self._sum.dtype, learned=True),
            "counts": ArraySpec((len(self.counts),), np.float64, learned=True),
        }

    def snapshot(self) -> State:
        """Take the sum and the counts."""
        return {"sum": self._sum.copy(), "counts": self.counts.copy()}

    def restore(self, state: State) -> None:
        """Become the accumulator that `snapshot` described."""
        self._sum = np.array(state["sum"], dtype=self._sum.dtype)
        self.counts = np.array(state["counts"], dtype=np.float64)
