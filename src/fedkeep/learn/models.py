"""Learners by the name of their model: the paper's four, or any torch module by `package.module:factory`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

from fedkeep.core.errors import ConfigError, MissingExtraError
from fedkeep.core.ports import FleetLearner
from fedkeep.learn.dense_learner import DenseLearner

if TYPE_CHECKING:
    from torch import nn

MODELS: dict[str, str] = {
    "logistic": "fedkeep.learn.torch_models:logistic",
    "har-dnn": "fedkeep.learn.torch_models:har_dnn",
    "lenet": "fedkeep.learn.torch_models:lenet",
    "traffic-cnn": "fedkeep.learn.torch_models:traffic_cnn",
}
"""Factories of torch modules by name; their arguments are the shape options."""

DENSE: dict[str, dict[str, int]] = {
    "logistic": {"features": 60, "classes": 10},
    "har-dnn": {"features": 900, "hidden": 100, "classes": 5},
}
"""Of these, the ones that need no torch: the width of each layer, by the name of its option."""


def learner(name: str, last_layers: int | None = None, **options: Any) -> FleetLearner:
    """The learner of a model by name, in numpy where that suffices; `options` are those of its shape."""
    if name in DENSE:
        return DenseLearner(_widths(name, options), last_layers)
    make = _fitting(name, factory(name), options)
    from fedkeep.learn.torch_learner import TorchLearner

    return TorchLearner(partial(make, **options), last_layers)


def factory(name: str) -> Callable[..., nn.Module]:
    """The factory of torch modules registered under `name`, or the one at `package.module:function`."""
    try:
        importlib.import_module("torch")
    except ImportError as error:
        raise MissingExtraError(f"model '{name}'", "torch") from error
    if ":" in name:
        return _imported(name)
    if name not in MODELS:
        close = get_close_matches(name, MODELS, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"choose one of {', '.join(MODELS)}."
        raise ConfigError(f"unknown model '{name}': {hint} Your own is written 'package.module:factory'.")
    return _imported(MODELS[name])


def _widths(name: str, options: Mapping[str, int]) -> list[int]:
    allowed = DENSE[name]
    for option in options:
        if option not in allowed:
            raise ConfigError(f"model '{name}' has no option '{option}': it takes {', '.join(allowed)}")
    return list({**allowed, **options}.values())


def _fitting(
    name: str, make: Callable[..., nn.Module], options: Mapping[str, Any]
) -> Callable[..., nn.Module]:
    """The factory, if it takes these options."""
    try:
        signature(make).bind(**options)
    except TypeError as error:
        raise ConfigError(f"model '{name}' takes {signature(make)}: {error}") from error
    return make


def _imported(path: str) -> Callable[..., nn.Module]:
    module, _, attribute = path.partition(":")
    try:
        found: Callable[..., nn.Module] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"model '{path}' cannot be imported: {error}") from error
    if not callable(found):
        raise ConfigError(f"model '{path}' is not a function that makes a module")
    return found
