"""Learners by the name of their model: ours, or any torch module by `package.module:factory`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from math import prod
from typing import TYPE_CHECKING, Any

from fedkeep.core.errors import ConfigError, MissingExtraError
from fedkeep.core.names import did_you_mean, load_object
from fedkeep.core.ports import FleetLearner
from fedkeep.learn.dense_learner import DenseLearner

if TYPE_CHECKING:
    from torch import nn

DENSE: dict[str, tuple[int, ...]] = {"softmax": (), "mlp": (100,)}
"""Models that need no torch, with the widths of their hidden layers unless the option `hidden` gives others."""
TORCH: dict[str, str] = {
    "lenet": "fedkeep.learn.torch_models:lenet",
    "traffic-cnn": "fedkeep.learn.torch_models:traffic_cnn",
}
"""Factories of torch modules by name; they take the number of classes."""


def learner_for(
    name: str,
    sample_shape: tuple[int, ...],
    classes: int,
    *,
    last_layers: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> FleetLearner:
    """The learner of a model by name for samples of this shape, in numpy where that suffices.

    A factory of one's own takes just its `options`: it knows its shapes.
    """
    options = dict(options or {})
    if name in DENSE:
        hidden = options.pop("hidden", DENSE[name])
        _refuse_unknown(name, options, ("hidden",) if name == "mlp" else ())
        return DenseLearner((prod(sample_shape), *_widths(hidden), classes), last_layers)
    if name in TORCH:
        options = {"classes": classes, **options}
    make = _fitting(name, torch_factory(name), options)
    from fedkeep.learn.torch_learner import TorchLearner

    return TorchLearner(partial(make, **options), last_layers)


def torch_factory(name: str) -> Callable[..., nn.Module]:
    """The factory of torch modules registered under `name`, or the one at `package.module:function`."""
    if ":" not in name and name not in TORCH:
        hint = did_you_mean(name, [*DENSE, *TORCH])
        raise ConfigError(f"unknown model '{name}': {hint}; your own is written 'package.module:factory'")
    try:
        importlib.import_module("torch")
    except ImportError as error:
        raise MissingExtraError(f"model '{name}'", "torch") from error
    found: Callable[..., nn.Module] = load_object(TORCH.get(name, name))
    if not callable(found):
        raise ConfigError(f"model '{name}' is not a function that makes a module")
    return found


def _widths(hidden: Sequence[int]) -> tuple[int, ...]:
    if isinstance(hidden, str) or not all(isinstance(width, int) and width > 0 for width in hidden):
        raise ConfigError(f"'hidden' must be a list of layer widths, got {hidden!r}")
    return tuple(hidden)


def _refuse_unknown(name: str, options: Mapping[str, Any], allowed: Sequence[str]) -> None:
    for option in options:
        takes = f"it takes {', '.join(allowed)}" if allowed else "it takes none"
        raise ConfigError(f"model '{name}' has no option '{option}': {takes}")


def _fitting(name: str, make: Callable[..., nn.Module], options: Mapping[str, Any]) -> Callable[..., nn.Module]:
    """The factory, if it takes these options."""
    try:
        signature(make).bind(**options)
    except TypeError as error:
        raise ConfigError(f"model '{name}' takes {signature(make)}: {error}") from error
    return make
