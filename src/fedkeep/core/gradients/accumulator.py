"""The sum of the gradients of all arrivals since the model last changed (Eq. 7)."""

import numpy as np

from fedkeep.core.gradients.codec import SumEncoding, pack, packed_form, scale_count, unpack
from fedkeep.core.gradients.layout import GradientLayout
from fedkeep.core.protocols import PerSampleGradients
from fedkeep.core.seeds import child_seed
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

    Whole gradients are summed in float64, and sketches, which are there to save bytes, in float32.
    In `int16` either sum takes two bytes a number and a scale for every 64: each addition rounds
    at random by at most a 32,767th of the block's largest number, and by nothing on average.

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
    encoding : {"float32", "int16"}
        How the sum is kept between arrivals; `float32` is float64 for whole gradients.
    seed : int
        The seed of the rounding.
    """

    def __init__(
        self,
        size: int,
        regions: int,
        clip: float | None = None,
        layout: GradientLayout | None = None,
        encoding: SumEncoding = "float32",
        seed: int = 0,
    ) -> None:
        self.size, self._clip, self.layout = size, clip, layout
        self._encoding, self._seed = encoding, seed
        self._wide = np.float64 if layout is None else np.float32
        self.counts = np.zeros(regions)
        self._kept: State = self._empty()

    @property
    def count(self) -> int:
        """N, the arrivals counted."""
        return int(self.counts.sum())

    @property
    def nbytes(self) -> int:
        """The bytes of the sum and the counts."""
        return sum(array.nbytes for array in self._kept.values()) + self.counts.nbytes

    def add(self, measurements: PerSampleGradients, regions: IntArray) -> None:
        """Count arrivals, measured under the present model."""
        if not len(regions):
            return
        mean = mean_gradient(measurements, self._clip, self.layout)
        self.counts += np.bincount(regions, minlength=len(self.counts))
        if self._encoding == "float32":
            self._kept["sum"] += mean.astype(self._wide) * len(regions)
            return
        seed = child_seed(self._seed, "window", self.count)
        with np.errstate(over="ignore", invalid="ignore"):
            total = self._total()
            total += mean * np.float32(len(regions))
            self._kept = pack(total, self._encoding, seed)

    def mean(self, share: float = 1.0) -> Vector:
        """Average the gradients of all arrivals (Eq. 7), multiplied by `share`."""
        mean = np.empty(self.size, dtype=np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            total, factor = self._total(), share / max(1, self.count)
            return np.multiply(total, factor, out=mean, casting="same_kind")

    def clear(self) -> None:
        """Begin anew, as when the model changes."""
        for array in (*self._kept.values(), self.counts):
            array[:] = 0

    def state_spec(self) -> StateSpec:
        """Describe the arrays of `snapshot`."""
        spec = {
            name: ArraySpec(array.shape, array.dtype, learned=True)
            for name, array in self._empty().items()
        }
        return spec | {"counts": ArraySpec((len(self.counts),), np.float64, learned=True)}

    def snapshot(self) -> State:
        """Take the sum and the counts."""
        own = {name: array.copy() for name, array in self._kept.items()}
        return own | {"counts": self.counts.copy()}

    def restore(self, state: State) -> None:
        """Become the accumulator that `snapshot` described."""
        self._kept = {
            name: np.array(state[name], dtype=array.dtype) for name, array in self._empty().items()
        }
        self.counts = np.array(state["counts"], dtype=np.float64)

    def _empty(self) -> State:
        """Make the arrays of a sum of nothing."""
        if self._encoding == "float32":
            return {"sum": np.zeros(self.size, dtype=self._wide)}
        length, form = packed_form(self.size, self._encoding)
        scales = np.zeros(scale_count(self.size, self._encoding), dtype=np.float32)
        return {"packed": np.zeros(length, dtype=form), "scales": scales}

    def _total(self) -> AnyArray:
        """Give the sum as plain numbers."""
        if self._encoding == "float32":
            return self._kept["sum"]
        return np.asarray(unpack(self._kept, self.size))
