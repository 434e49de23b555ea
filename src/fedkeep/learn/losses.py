"""Losses whose gradient by a model's outputs is known in closed form, in numpy.

Cross-entropy for labels; squared and Huber loss for numbers to predict. A learner asks its loss for
two things: the loss of each sample, and the gradient of each by the outputs, its error.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from fedkeep.core.bounds import check_range
from fedkeep.core.errors import ConfigError
from fedkeep.core.targets import NumberTargets
from fedkeep.core.types import AnyArray, IntArray


class Loss(Protocol):
    """The loss of each sample, from a model's outputs, (..., outputs), and the targets of each."""

    def targets(self, y: AnyArray, outputs: int) -> AnyArray:
        """Bring a batch's targets into the form that the other two take."""

    def losses(self, outputs: AnyArray, y: AnyArray) -> AnyArray:
        """Compute the loss of each sample, (...)."""

    def errors(self, outputs: AnyArray, y: AnyArray) -> AnyArray:
        """Compute the gradient of each sample's loss by its outputs, (..., outputs)."""


@dataclass(frozen=True)
class CrossEntropy:
    """The cross-entropy of class scores, for labels."""

    def targets(self, y: AnyArray, outputs: int) -> AnyArray:  # noqa: ARG002 - one label each
        """Take labels as they are."""
        return y

    def losses(self, outputs: AnyArray, y: AnyArray) -> AnyArray:
        """Compute -log softmax(outputs)_y of each sample."""
        return cross_entropy(outputs, y)

    def errors(self, outputs: AnyArray, y: AnyArray) -> AnyArray:
        """Compute softmax(outputs) - onehot(y)."""
        return output_error(outputs, y)


CROSS_ENTROPY = CrossEntropy()


@dataclass(frozen=True)
class NumberLoss:
    """Squared or Huber loss of numbers to predict, each in units of `scale` from `centre`.

    With the residual r = output - (y - centre) / scale, the squared loss is r^2 / 2. The Huber loss
    is the same up to |r| = delta, and grows linearly beyond, delta (|r| - delta / 2): no sample's
    error is larger than delta. Of several numbers a sample, it is the mean.

    Parameters
    ----------
    name : str
        `squared` or `huber`.
    delta : float
        Where the Huber loss becomes linear, in units of `scale`.
    centre, scale : float
        What the model's outputs are measured from and in: 0 and 1 are the targets' own units. With
        the targets' mean and deviation usual learning rates fit. They are settings of the fleet:
        all devices need the same.

    References
    ----------
    Huber, Robust Estimation of a Location Parameter, Annals of Mathematical Statistics, 1964.

    Examples
    --------
    >>> outputs, y = np.array([[1.0], [5.0]]), np.array([0.0, 0.0])
    >>> NumberLoss("squared").losses(outputs, y).tolist()
    [0.5, 12.5]
    >>> NumberLoss("huber", delta=2.0).losses(outputs, y).tolist()  # 2 * (5 - 1)
    [0.5, 8.0]
    >>> NumberLoss("huber", delta=2.0).errors(outputs, y).tolist()
    [[1.0], [2.0]]
    """

    name: Literal["squared", "huber"] = "squared"
    delta: float = 1.0
    centre: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.name not in NUMBER_LOSSES:
            raise ValueError(f"loss must be one of {', '.join(NUMBER_LOSSES)}, got {self.name!r}")
        check_range(self, "delta", "scale", above=0)
        if not np.isfinite([self.centre, self.scale, self.delta]).all():
            raise ValueError("centre, scale and delta must be finite")

    def targets(self, y: AnyArray, outputs: int) -> AnyArray:
        """Give targets in units of `scale` from `centre`, (n, outputs) float32."""
        exact = np.asarray(y, dtype=np.float64).reshape(len(y), outputs)
        return np.asarray((exact - self.centre) / self.scale, dtype=np.float32)

    def predictions(self, outputs: AnyArray) -> AnyArray:
        """Give what outputs predict, in the targets' own units."""
        return np.asarray(np.asarray(outputs, dtype=np.float64) * self.scale + self.centre)

    def losses(self, outputs: AnyArray, y: AnyArray) -> AnyArray:
        """Compute the loss of each sample."""
        return np.asarray(self.of_residuals(self._residuals(outputs, y)).mean(axis=-1))

    def errors(self, outputs: AnyArray, y: AnyArray) -> AnyArray:
        """Compute r, or what is left of it within delta, over the number of outputs."""
        residuals = self._residuals(outputs, y)
        if self.name == "huber":
            np.clip(residuals, -self.delta, self.delta, out=residuals)
        residuals /= outputs.shape[-1]
        return residuals

    def of_residuals(self, residuals: AnyArray) -> AnyArray:
        """Compute the loss of each number from its residual."""
        if self.name == "squared":
            return residuals * residuals / 2
        size = np.abs(residuals)
        within = np.minimum(size, self.delta)
        # r^2 / 2 within, and delta (r - delta / 2) beyond: both are within (r - within / 2).
        return np.asarray(within * (size - within / 2))

    def _residuals(self, outputs: AnyArray, y: AnyArray) -> AnyArray:
        return np.asarray(outputs - y.reshape(outputs.shape))


NUMBER_LOSSES = ("squared", "huber")
LOSS_KEYS = ("loss", "delta", "centre", "scale")
"""Keys of `model` that describe its loss."""


def loss_of(
    table: dict[str, Any], targets: NumberTargets | None
) -> "CrossEntropy | NumberLoss | str":
    """Take the loss out of the options of a model.

    Parameters
    ----------
    table : dict
        The options; the loss's own keys are taken out of it.
    targets : NumberTargets or None
        What targets look like; None: they are labels.

    Returns
    -------
    CrossEntropy or NumberLoss or str
        A loss, or where one's own is found, as `module:function`.

    Raises
    ------
    ConfigError
        If the loss does not go with the targets.

    Examples
    --------
    >>> options = {"hidden": [8], "loss": "huber", "delta": 2.0}
    >>> loss_of(options, NumberTargets()).delta, options
    (2.0, {'hidden': [8]})
    """
    given = {key: table.pop(key) for key in LOSS_KEYS if key in table}
    name = given.pop("loss", None)
    if isinstance(name, str) and ":" in name:
        if given:
            raise ConfigError(
                f"model.{min(given)} goes with the losses {' and '.join(NUMBER_LOSSES)}: "
                "your own loss has its numbers in its function"
            )
        return name
    if targets is None:
        if name not in (None, "cross-entropy") or given:
            raise ConfigError(
                f"model.{'loss' if name else min(given)} is for numbers to predict, and the "
                'targets are classes: set target = "number", or leave it out'
            )
        return CROSS_ENTROPY
    if name == "cross-entropy":
        raise ConfigError(
            "the cross-entropy is for classes, and the targets are numbers: set model.loss to "
            f"{' or '.join(NUMBER_LOSSES)}"
        )
    try:
        return NumberLoss(name or "squared", **_numbers(given))
    except ValueError as error:
        raise ConfigError(f"'model': {error}") from None


def _numbers(given: Mapping[str, Any]) -> dict[str, float]:
    for key, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"'model.{key}' must be a number, got {value!r}")
    return {key: float(value) for key, value in given.items()}


def cross_entropy(logits: AnyArray, y: IntArray) -> AnyArray:
    """Compute the loss of each sample, -log softmax(z)_y."""
    z = _class_rows(logits)
    losses = np.log(np.add.reduce(np.exp(z), axis=0)) - z[y.reshape(-1), np.arange(y.size)]
    return np.asarray(losses.reshape(y.shape))


def output_error(logits: AnyArray, y: IntArray) -> AnyArray:
    """Compute the gradient of each sample's loss by its logits, softmax(z) - onehot(y)."""
    z = _class_rows(logits)
    np.exp(z, out=z)
    z /= np.add.reduce(z, axis=0)
    z -= np.arange(len(z))[:, None] == y.reshape(-1)
    return np.ascontiguousarray(z.T).reshape(logits.shape)


def _class_rows(logits: AnyArray) -> AnyArray:
    """Each sample's logits less their maximum, a row per class: numpy is slow along short rows."""
    z = np.array(logits.reshape(-1, logits.shape[-1]).T, order="C")
    z -= np.maximum.reduce(z, axis=0)
    return z
