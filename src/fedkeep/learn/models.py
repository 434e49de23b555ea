"""Learners by the name of their model: ours, or any torch module by `package.module:factory`."""

import copy
import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from fedkeep.core.errors import ConfigError, optional_import, where
from fedkeep.core.protocols import FleetLearner
from fedkeep.core.registry import did_you_mean
from fedkeep.core.targets import NumberTargets
from fedkeep.core.types import AnyArray
from fedkeep.learn.dense_learner import DenseLearner
from fedkeep.learn.fedboost import FedBoost
from fedkeep.learn.losses import CROSS_ENTROPY, CrossEntropy, NumberLoss, loss_of
from fedkeep.loading import load_object

if TYPE_CHECKING:
    from torch import nn

DENSE: dict[str, tuple[int, ...]] = {"softmax": (), "linear": (), "mlp": (100,)}
"""Models that need no torch, with the widths of their hidden layers by default.

`linear` is `softmax` by the name that fits numbers to predict.
"""
FEDBOOST = "fedboost"
"""The weights of a mixture of fixed predictors."""
TORCH = {
    "lenet": "fedkeep.learn.torch_models:lenet",
    "traffic-cnn": "fedkeep.learn.torch_models:traffic_cnn",
    "char-mlp": "fedkeep.learn.torch_models:char_mlp",
    "char-gru": "fedkeep.learn.torch_models:char_gru",
    "char-transformer": "fedkeep.learn.torch_models:char_transformer",
}
"""Factories of torch modules by name; they take the number of classes."""
SESSION: "dict[str, Callable[..., nn.Module]]" = {}
"""Factories that exist in this process only, by the names that `session_model` gave them."""


def session_model(model: "nn.Module | Callable[..., nn.Module]", name: str) -> str:
    """Register a torch module, or a factory of modules, of this process; return its model name.

    A module serves as a template: every run begins with a copy whose layers are initialised anew.
    """
    from torch import nn

    def fresh() -> nn.Module:
        made = copy.deepcopy(model)
        assert isinstance(made, nn.Module)
        for layer in made.modules():
            reset = getattr(layer, "reset_parameters", None)
            if callable(reset):
                reset()
        return made

    key = f"session-{name}"
    SESSION[key] = fresh if isinstance(model, nn.Module) else model
    return key


def learner_for(
    name: str,
    sample_shape: tuple[int, ...],
    classes: int,
    /,
    targets: NumberTargets | None = None,
    **options: Any,
) -> FleetLearner:
    """Make the learner of a model by name for samples of this shape, in numpy where it can.

    The option `last_layers` restricts the valued parameters, and `loss`, `delta`, `centre`,
    `scale` describe the loss. A user's factory takes just the others: it knows its shapes. Where
    targets are numbers, the model has an output for each of them instead of for each class.

    >>> learner_for("softmax", (5, 4), 3).size
    63
    >>> learner_for("mlp", (20,), 3, hidden=[8], last_layers=1).gradient_size
    27
    """
    last_layers = options.pop("last_layers", None)
    loss = loss_of(options, targets)
    outputs = classes if targets is None else targets.width
    if name in DENSE:
        if isinstance(loss, str):
            raise ConfigError(
                f"model '{name}' is in numpy, and a loss of your own goes with a torch model: "
                "name one as 'package.module:factory'"
            )
        widths = (prod(sample_shape), *_hidden(name, options), outputs)
        return DenseLearner(widths, last_layers, loss)
    if name == FEDBOOST:
        if loss is not CROSS_ENTROPY:
            raise ConfigError(f"model '{name}' mixes predictors of classes: leave out the loss")
        if last_layers is not None:
            raise ConfigError(f"model '{name}' has no layers: leave out last_layers")
        try:
            return FedBoost(sample_shape, classes, **options)
        except TypeError as error:
            raise ConfigError(
                f"model '{name}' takes predictors, sampled, sampling: {error}"
            ) from error
    if name in TORCH:
        options = {"classes": outputs, **options}
    make = torch_factory(name)
    try:
        signature(make).bind(**options)
    except TypeError as error:
        raise ConfigError(f"model '{name}' takes {signature(make)}: {error}") from error
    from fedkeep.learn.objective import Objective
    from fedkeep.learn.torch_learner import TorchLearner

    objective = Objective(_torch_loss(loss), width=outputs)
    learner = TorchLearner(
        partial(made_module, partial(make, **options), f"model '{name}'"),
        last_layers,
        objective=objective,
    )
    try:  # so that a wrong shape is reported before anything runs
        logits = learner.logits(learner.initial(0), np.zeros((2, *sample_shape), dtype=np.float32))
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"model '{name}' cannot take samples of shape {list(sample_shape)}: {reason}"
        ) from error
    shape = list(logits.shape)
    if len(shape) != 2 or shape[0] != 2:
        raise ConfigError(
            f"model '{name}' must give a row of outputs a sample, it gave shape {shape} for 2"
        )
    if targets is None and shape[1] < classes and not isinstance(loss, str):
        raise ConfigError(
            f"model '{name}' has {shape[1]} outputs, and the data has {classes} labels"
        )
    if targets is not None and shape[1] != outputs:
        raise ConfigError(
            f"model '{name}' has {shape[1]} outputs, and a sample's target is {outputs} "
            f"number{'s' if outputs > 1 else ''}"
        )
    _try_loss(learner, loss, logits, targets)
    return learner


def _torch_loss(loss: CrossEntropy | NumberLoss | str) -> Any:
    """Give what an `Objective` takes for a loss."""
    if isinstance(loss, str):
        found = load_object(loss)
        if not callable(found):
            raise ConfigError(f"loss '{loss}' is no function of outputs and targets")
        return found
    return None if loss is CROSS_ENTROPY else loss


def _try_loss(
    learner: Any,
    loss: CrossEntropy | NumberLoss | str,
    outputs: AnyArray,
    targets: NumberTargets | None,
) -> None:
    """Try a user's loss on two samples, so that a mistake is reported before anything runs."""
    if not isinstance(loss, str):
        return
    y: AnyArray = np.zeros(2, dtype=np.int64)
    if targets is not None:
        y = targets.settled(np.zeros((2, targets.width)))
    try:
        found = learner.loss.losses(outputs, y)
    except Exception as error:
        raise ConfigError(f"loss '{loss}' takes no such outputs: {where(error)}") from error
    if found.shape != (2,):
        raise ConfigError(
            f"loss '{loss}' must give one number a sample: with reduction='none', and no mean "
            "over the batch"
        )


def torch_factory(name: str) -> "Callable[..., nn.Module]":
    """Find the factory of torch modules of this name, or at `package.module:function`."""
    if ":" not in name and name not in TORCH and name not in SESSION:
        hint = did_you_mean(name, [*DENSE, FEDBOOST, *TORCH])
        raise ConfigError(
            f"unknown model '{name}': {hint}; your own is written 'package.module:factory'"
        )
    with optional_import(f"model '{name}'", "torch"):
        importlib.import_module("torch")
    found: Callable[..., nn.Module] = SESSION.get(name) or load_object(TORCH.get(name, name))
    if not callable(found):
        raise ConfigError(f"model '{name}' is not a function that makes a module")
    return found


def made_module(make: "Callable[[], nn.Module]", named: str) -> "nn.Module":
    """Make a module of the factory, whose mistakes become one sentence."""
    from torch import nn

    try:
        module = make()
    except Exception as error:
        raise ConfigError(f"the factory of {named} raised {where(error)}") from error
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"the factory of {named} must make a torch.nn.Module, it made {type(module).__name__}"
        )
    return module


def _hidden(name: str, options: Mapping[str, Any]) -> Sequence[int]:
    allowed = ["hidden"] if DENSE[name] else []
    for option in options.keys() - allowed:
        raise ConfigError(
            f"model '{name}' has no option '{option}': it takes {', '.join(allowed) or 'none'}"
        )
    hidden: Sequence[int] = options.get("hidden", DENSE[name])
    if isinstance(hidden, str) or not all(isinstance(width, int) and width > 0 for width in hidden):
        raise ConfigError(f"'hidden' must be a list of layer widths, got {hidden!r}")
    return hidden
