"""A user's own module: made without a trace, called as its samples want, and checked once.

The check compares what is measured with plain autograd on a module of the user's, in evaluation
mode: each of a few samples alone, then together. What does not agree is named.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.random import fork_rng

from fedkeep.core.errors import ConfigError, FedkeepError, where
from fedkeep.core.types import AnyArray, Batch, Vector
from fedkeep.learn.network import with_frozen_norms, without_statistics
from fedkeep.learn.objective import Loss, Objective
from fedkeep.learn.samples import SamplePool
from fedkeep.learn.torch_learner import TorchLearner

_SPREAD = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_TOLERANCE = 2e-3
"""Largest relative difference between a measured gradient and autograd's."""

_WRAPPERS = ("module.", "_orig_mod.", "_module.")
"""What wrappers put before a parameter's name: DistributedDataParallel, torch.compile, Opacus."""


class UserModel:
    """A module of the user's with its loss, ready to be measured.

    Parameters
    ----------
    model
        A module, a class, or a function that makes a module. It is never changed, and torch's
        random numbers go on as if it had not been made.
    pool
        The samples; one of them at least, by which lazy layers get their shapes.
    example
        The number of a sample in the pool.
    loss, output, collate
        As in `Objective`.
    last_layers
        How many of the last trainable layers are valued; None: all.
    """

    def __init__(
        self,
        model: Any,
        pool: SamplePool,
        example: int,
        *,
        loss: Loss | None = None,
        output: Callable[[Any], Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        last_layers: int | None = None,
    ) -> None:
        self._objective = Objective(loss, output, pool, collate)
        pair = np.array([example, example])
        self._pair = Batch(pair[:, None], np.zeros(2, dtype=np.int64), pair)
        self._reference = self._made(model)
        self.scores = self._scores()
        """Columns of the model's outputs; 0 where they are no matrix."""
        made = with_frozen_norms(self._made(model))
        self.learner = TorchLearner(lambda: made, last_layers, objective=self._objective)
        self._initial = self.learner.constants()

    def changed_constants(self) -> dict[str, AnyArray]:
        """Frozen parameters and buffers that are not as the module was made with."""
        return {
            name: array
            for name, array in self.learner.constants().items()
            if not np.array_equal(array, self._initial[name])
        }

    def vector(self, named: Mapping[str, AnyArray]) -> Vector:
        """Make the flat model of a state dict, and load what is frozen in it.

        Parameters are found by their names; arrays that are merely numbered are taken in the order
        of the module's own state dict.

        Raises
        ------
        ConfigError
            If a trainable parameter is missing or has another shape.
        """
        own = self._reference.state_dict()
        if len(named) == len(own) and all(name.isdecimal() for name in named):
            named = dict(zip(own, named.values(), strict=True))
        named = {plain_name(name): array for name, array in named.items()} | dict(named)
        parts = []
        for name, shape in zip(self.learner.layout.names, self.learner.layout.shapes, strict=True):
            if name not in named:
                raise ConfigError(
                    f"the model that came has no parameter '{name}': give the keeper the model "
                    f"that the server sends, which has {', '.join(list(named)[:3])}, ..."
                )
            if tuple(named[name].shape) != shape:
                raise ConfigError(
                    f"parameter '{name}' has shape {tuple(named[name].shape)} in the model that "
                    f"came, and {shape} in the keeper's: give the keeper the model that is trained"
                )
            parts.append(np.asarray(named[name]).ravel())
        self.learner.load_constants(named)
        return np.concatenate(parts).astype(np.float32)

    def check(self, model: Vector, batch: Batch) -> None:
        """Compare measured gradients of a few samples with those of plain autograd.

        Raises
        ------
        ConfigError
            If they differ, with the name of the first parameter or layer where they do.
        """
        try:
            self._compare(model, batch)
        except FedkeepError:
            raise
        except Exception as error:
            raise ConfigError(
                f"the gradients of this model cannot be measured sample by sample: {where(error)}"
            ) from error

    def _compare(self, model: Vector, batch: Batch) -> None:
        """Raise where what is measured differs from autograd's."""
        self._load(model)
        alone = [self._autograd(batch.take(slice(i, i + 1))) for i in range(len(batch))]
        losses = np.array([loss for loss, _ in alone])
        together = self._losses(batch)
        if not np.allclose(together, losses, rtol=_TOLERANCE, atol=_TOLERANCE):
            raise ConfigError(self._mixing_words(batch))
        measured = self.learner.probe(model).measure(batch)
        gradients = [of_one for _, of_one in alone]
        valued = len(measured.mean_gradient())
        found = np.zeros(self.learner.size, dtype=np.float32)
        found[self.learner.size - valued :] = measured.mean_gradient()
        size = max(float(np.linalg.norm(found)), 1e-6)
        layout = self.learner.layout
        start = self.learner.size
        for name, own in reversed(list(zip(layout.names, layout.views(found), strict=True))):
            start -= own.size
            if start < self.learner.size - valued:
                break
            right = np.mean([of_one[name] for of_one in gradients], axis=0)
            if not float(np.linalg.norm(own - right)) <= _TOLERANCE * size:
                raise ConfigError(
                    f"the gradient by '{name}' cannot be measured sample by sample: freeze it "
                    "(requires_grad_(False)) or replace its layer"
                )
        names = layout.names[len(layout.names) - len(self.learner.valued_names) :]
        norms = [np.sqrt(sum(float((g[n] ** 2).sum()) for n in names)) for g in gradients]
        if not np.allclose(measured.norms(), norms, rtol=10 * _TOLERANCE, atol=_TOLERANCE * size):
            raise ConfigError(
                "the gradients of single samples do not agree with autograd: "
                "the model is not a function of each sample alone"
            )

    def mixing_in_training(self, model: Vector, batch: Batch) -> str | None:
        """Name the first layer in which, while it trains, a sample depends on the others.

        The first sample is passed beside others, then beside copies of one of these, with the same
        random numbers. Batches that `collate` makes may differ in length, and are not compared.

        Returns
        -------
        str, optional
            Empty for the module itself; None if no sample depends on others.
        """
        if len(batch) < 2 or self._objective.collates:
            return None
        others = np.full(len(batch) - 1, 1 if len(batch) > 2 else 0)
        both = batch, batch.take(np.concatenate([[0], others]))
        with fork_rng(devices=self._gpus()):
            one, other = (float(self._losses_in_training(model, part)[0]) for part in both)
            if np.isclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE):
                return None
            seen = self._outputs_seen(*both, train=True)
        mixing = [name for name, calls in seen.items() if not _same(calls[0][1], calls[1][1])]
        return mixing[0] if mixing else ""

    def _losses_in_training(self, model: Vector, batch: Batch) -> AnyArray:
        """Compute the losses as a first step would; buffers are as they were afterwards."""
        self._load(model)
        buffers = {name: buffer.clone() for name, buffer in self._reference.named_buffers()}
        self._reference.train()
        try:
            torch.manual_seed(0)
            return self._losses(batch)
        finally:
            self._reference.eval()
            for name, buffer in self._reference.named_buffers():
                buffer.copy_(buffers[name])

    def _gpus(self) -> list[torch.device]:
        device = next(self._reference.parameters()).device
        return [device] if device.type == "cuda" else []

    def _outputs_seen(
        self, one: Batch, other: Batch, *, train: bool = False
    ) -> dict[str, list[tuple[Any, Tensor]]]:
        """Pass two batches, and note the first tensors of each layer's inputs and outputs.

        Of a layer that is called several times it is the first call by each batch.
        """
        module, objective = self._reference, self._objective
        seen: dict[str, list[tuple[Tensor | None, Tensor]]] = {}

        def note(name: str) -> Callable[[nn.Module, Any, Any], None]:
            def hook(_: nn.Module, given: Any, output: Any) -> None:
                if (result := _first_tensor(output)) is not None:
                    seen.setdefault(name, []).append((_first_tensor(given), result))

            return hook

        handles = [part.register_forward_hook(note(name)) for name, part in module.named_modules()]
        device = next(module.parameters()).device
        module.train(train)
        for part in (one, other):
            x, _ = objective.read(objective.dense(part), device)
            with torch.no_grad():
                torch.manual_seed(0)
                objective.outputs(module, x)
        module.eval()
        for handle in handles:
            handle.remove()
        return {name: [found[0], found[len(found) // 2]] for name, found in seen.items()}

    def _made(self, model: Any) -> nn.Module:
        made = without_statistics(self._materialised(make_module(model)))
        sparse = [name for name, part in made.named_modules() if getattr(part, "sparse", False)]
        if sparse:
            raise ConfigError(
                f"layer '{sparse[0]}' makes sparse gradients, which no gist can correct: make it "
                "with sparse=False"
            )
        for name, parameter in made.named_parameters():
            if parameter.requires_grad and parameter.dtype != torch.float32:
                raise ConfigError(
                    f"parameter '{name}' is of {str(parameter.dtype).removeprefix('torch.')}, and "
                    "the keeper measures in float32: give it a function that makes the module in "
                    "float32, as in lambda: Net().float(); the one you train may stay as it is"
                )
        return made

    def _materialised(self, module: nn.Module) -> nn.Module:
        """Give lazy layers their shapes by the example."""
        lazy = [name for name, part in module.named_modules() if isinstance(part, LazyModuleMixin)]
        if lazy:
            with fork_rng(devices=[]):
                try:
                    self._call(module.eval())
                except Exception as error:
                    raise ConfigError(
                        f"layer '{lazy[0]}' gets its shape from a sample, and the model takes "
                        f"none like this: {where(error)}"
                    ) from error
        return module

    def _call(self, module: nn.Module) -> Any:
        parameter = next(module.parameters(), torch.zeros(0))
        batch = self._objective.dense(self._pair)
        x, _ = self._objective.read(batch, parameter.device)
        with torch.no_grad():
            return self._objective.outputs(module, x)

    def _scores(self) -> int:
        """Count the outputs; samples become floats where the model takes no integers."""
        module, pool = self._reference.eval(), self._objective.pool
        integers = pool is not None and {np.dtype(d).kind for d in pool.form.dtypes} & set("iub")
        if integers and pool is not None:
            try:
                self._call(module)
            except Exception:  # noqa: BLE001 - whatever the module says of integers
                pool.as_float = True
        parameter = next(module.parameters(), torch.zeros(0))
        x, y = self._objective.read(self._objective.dense(self._pair), parameter.device)
        try:
            return self._objective.check(module, x, y)
        except ConfigError:
            if not pool or not pool.as_float:
                raise
            pool.as_float = False
            x, y = self._objective.read(self._objective.dense(self._pair), parameter.device)
            return self._objective.check(module, x, y)

    def _load(self, model: Vector) -> None:
        """Give the reference module the parameters of a model."""
        layout = self.learner.layout
        named = dict(zip(layout.names, layout.views(model), strict=True)) | self.learner.constants()
        with torch.no_grad():
            for name, tensor in self._reference.state_dict(keep_vars=True).items():
                if name in named:
                    tensor.copy_(torch.from_numpy(np.array(named[name])))

    def _autograd(self, batch: Batch) -> tuple[float, dict[str, AnyArray]]:
        module, objective = self._reference.eval(), self._objective
        module.zero_grad()
        x, y = objective.read(objective.dense(batch), next(module.parameters()).device)
        with torch.enable_grad():
            loss = objective.losses(module, x, y).sum()
            torch.autograd.backward(loss)
        named = dict(module.named_parameters())
        gradients = {}
        for name in self.learner.layout.names:
            given = named[name].grad
            shape = named[name].shape
            gradients[name] = np.zeros(shape) if given is None else given.cpu().double().numpy()
        return float(loss.detach()), gradients

    def _losses(self, batch: Batch) -> AnyArray:
        module, objective = self._reference, self._objective
        x, y = objective.read(objective.dense(batch), next(module.parameters()).device)
        with torch.no_grad():
            return objective.losses(module, x, y).cpu().numpy()

    def _mixing_words(self, batch: Batch) -> str:
        """Say where a sample's loss begins to depend on the others of its batch."""
        self._reference.eval()
        if not np.allclose(self._losses(batch), self._losses(batch)):
            return (
                "the model or its loss draws random numbers in evaluation mode, too, so no sample "
                "has one gradient: draw them only `if self.training`, as "
                "F.dropout(x, training=self.training) does"
            )
        with fork_rng(devices=self._gpus()):
            seen = self._outputs_seen(batch, batch.take(slice(0, 1)))
        differing = [
            (name, _same(together[0], alone[0]))
            for name, (together, alone) in seen.items()
            if not _same(together[1], alone[1])
        ]
        if not differing:
            return (
                "the loss compares the samples of a batch with each other, so no sample has a loss "
                "of its own: give the keeper the part that is of each sample alone"
            )
        name, by_itself = differing[0]
        what = f"layer '{name}'" if name else "the model"
        if not by_itself and name:
            what = f"what the model does before layer '{name}'"
        return (
            f"{what} mixes the samples of a batch, so no sample has a gradient of its own: replace "
            "it, for instance by LayerNorm or GroupNorm, or put the samples first (batch_first)"
        )


def _first_tensor(given: Any) -> Tensor | None:
    """Find the tensor of a layer's inputs or outputs that all others go with."""
    if isinstance(given, tuple | list) and given:
        return _first_tensor(given[0])
    return given.detach() if isinstance(given, Tensor) else None


def _same(together: Tensor | None, alone: Tensor | None) -> bool:
    """Say whether the first sample looks the same in a batch and alone."""
    if together is None or alone is None:
        return True
    first, own = together[:1].double(), alone[:1].double()
    return first.shape == own.shape and torch.allclose(first, own, rtol=1e-3, atol=1e-4)


def make_module(model: Any) -> nn.Module:
    """Make a module of a user's module, class or function, without a trace.

    Raises
    ------
    ConfigError
        If it cannot be made, or copied, or is no module.
    """
    if isinstance(model, nn.Module):
        try:
            return deepcopy(_unwrapped(model))
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"this {type(model).__name__} cannot be copied ({where(error)}): give the keeper "
                "a function that makes it"
            ) from error
    if not callable(model):
        raise ConfigError(
            "the keeper takes a torch module, its class, or a function that makes it, "
            f"not {type(model).__name__}"
        )
    named = getattr(model, "__name__", type(model).__name__)
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = list(range(torch.cuda.device_count())) if on_gpu else []
    with fork_rng(devices=devices):
        try:
            module = model()
        except TypeError as error:
            raise ConfigError(
                f"{named} cannot be made without arguments: give the keeper a function that makes "
                f"the module, as in lambda: {named}(...) ({error})"
            ) from error
        except Exception as error:
            raise ConfigError(f"{named} raised {where(error)}") from error
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{named} must make a torch.nn.Module, it made {type(module).__name__}")
    return _unwrapped(module)


def _unwrapped(module: nn.Module) -> nn.Module:
    """Take out of its wrappers what is compiled, or spread over devices; refuse what is scripted.

    Samples are measured one by one, to which compiled code and replicas are in the way.
    """
    while (inner := getattr(module, "_orig_mod", getattr(module, "module", None))) is not None:
        if not isinstance(module, _SPREAD) and not hasattr(module, "_orig_mod"):
            break
        module = inner
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigError(
            "a module of torch.jit cannot be measured sample by sample: give the keeper the module "
            "that it was scripted or traced from; the one you train may stay as it is"
        )
    return module


def plain_name(name: str) -> str:
    """Take what wrappers put before a parameter's name away.

    >>> plain_name("module._orig_mod.head.weight")
    'head.weight'
    """
    while name.startswith(_WRAPPERS):
        name = name.partition(".")[2]
    return name


def mixing_layers(module: nn.Module) -> list[str]:
    """Names of the layers that, as the module trains now, mix the samples of a batch."""
    return [
        name
        for name, part in module.named_modules()
        if isinstance(part, _BatchNorm) and (part.training or part.running_mean is None)
    ]
