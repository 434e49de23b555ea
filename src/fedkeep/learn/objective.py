"""How stored samples become a module's inputs, and its outputs one loss a sample.

The default is the cross-entropy of class scores, over arrays that go into the module as they are.
A user's own module may want more: keyword arguments, integer tokens, a batch of sequences of
different length, a loss of its own. All of that is an `Objective`; the rest of `learn` knows
parameters, samples' losses and nothing else.
"""

from collections.abc import Callable, Sequence
from functools import partial
from inspect import Parameter, signature
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fedkeep.core.errors import ConfigError, where
from fedkeep.core.types import AnyArray, Batch
from fedkeep.learn.losses import CROSS_ENTROPY, CrossEntropy, NumberLoss
from fedkeep.learn.samples import SamplePool, join

Loss: TypeAlias = Callable[[Any, Any], Tensor]
"""From the outputs of n samples and their targets to n losses."""
cross_entropy = partial(F.cross_entropy, reduction="none")
"""The loss of each sample, (n,), from logits and labels; autograd and vmap can go through it."""
_MINUS_ONE = torch.tensor(-1.0)


def as_tensor(array: AnyArray) -> Tensor:
    """Turn an array into a tensor, floats as float32.

    It is copied only where it must be: torch wants writable memory.
    """
    if array.dtype.kind == "f" and array.dtype != "float32":
        array = array.astype("float32")
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def closed_losses(loss: CrossEntropy | NumberLoss, outputs: Tensor, y: Tensor) -> Tensor:
    """Compute the loss of each sample, of outputs whose axis 1 are classes or numbers."""
    if isinstance(loss, CrossEntropy):
        return cross_entropy(outputs, y)
    targets = y.movedim(-1, 1)
    if loss.name == "squared":
        return F.mse_loss(outputs, targets, reduction="none").mean(1) / 2
    return F.huber_loss(outputs, targets, reduction="none", delta=loss.delta).mean(1)


def closed_error(loss: CrossEntropy | NumberLoss, outputs: Tensor, y: Tensor) -> Tensor:
    """Compute the gradient of each sample's loss by its outputs; axis 1 as in `closed_losses`."""
    if isinstance(loss, CrossEntropy):
        return output_error(outputs, y)
    residuals = outputs - y.movedim(-1, 1)
    if loss.name == "huber":
        residuals.clamp_(-loss.delta, loss.delta)
    return residuals.div_(outputs.shape[1])


def output_error(logits: Tensor, y: Tensor) -> Tensor:
    """Compute the gradient of each sample's cross-entropy by its logits, softmax(z) - onehot(y).

    Classes are axis 1.
    """
    index = y[:, None]
    return torch.softmax(logits, dim=1).scatter_add_(1, index, _MINUS_ONE.expand(index.shape))


class Objective:
    """The loss of each sample of a batch under a module.

    Parameters
    ----------
    loss
        From outputs and targets of n samples to n losses; or one of closed form; None is the
        cross-entropy.
    output
        From what the module returns to what the loss takes; None: as it is.
    pool
        Where the samples are that a batch names by number; None: the batch holds them itself.
    collate
        From a list of samples to the module's input, for samples of different form; None: stacked.
    width
        How many numbers a sample's target is, where the loss is of closed form for numbers.
    """

    def __init__(
        self,
        loss: Loss | NumberLoss | None = None,
        output: Callable[[Any], Any] | None = None,
        pool: SamplePool | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        width: int = 1,
    ) -> None:
        if isinstance(loss, nn.Module) and getattr(loss, "reduction", "none") != "none":
            raise ConfigError(
                f"this {type(loss).__name__} makes one number of a batch: make it with "
                "reduction='none', and take the mean in your loop"
            )
        self.closed = loss if isinstance(loss, NumberLoss) else CROSS_ENTROPY
        """The loss whose gradient by the outputs is known, unless `stacked` says otherwise."""
        self._own_loss = loss is not None and not isinstance(loss, NumberLoss)
        self._loss: Loss = partial(closed_losses, self.closed)
        if loss is not None and not isinstance(loss, NumberLoss):
            self._loss = loss
        self._output, self._collate, self._width = output, collate, width
        self.pool = pool

    @property
    def collates(self) -> bool:
        """Whether a batch is made by a function of the user's."""
        return self._collate is not None

    @property
    def stacked(self) -> bool:
        """Whether the loss is of closed form, and the module called with one array."""
        plain = not (self._own_loss or self._output or self._collate)
        return plain and (self.pool is None or self.pool.single)

    def prepared(self, batch: Batch) -> Batch:
        """Give the batch with targets as the loss takes them."""
        if self._own_loss or self.closed is CROSS_ENTROPY:
            return batch
        return Batch(batch.x, self.closed.targets(batch.y, self._width), batch.ids)

    def of_arrays(self, outputs: AnyArray, y: AnyArray) -> AnyArray:
        """Compute the loss of each sample, (n,), from outputs and targets that are arrays."""
        targets = y if self._own_loss else self.closed.targets(y, self._width)
        with torch.no_grad():
            found = self._loss(as_tensor(outputs), as_tensor(targets))
        if not isinstance(found, Tensor) or found.dim() == 0:
            return np.asarray(found)
        found = found.flatten(1).mean(1) if found.dim() > 1 else found
        return found.double().numpy()

    def predictions(self, outputs: AnyArray) -> AnyArray:
        """Give what outputs predict: by a loss of one's own as its `predictions` says, if any."""
        if isinstance(self.closed, NumberLoss):
            return self.closed.predictions(outputs)
        own = getattr(self._loss, "predictions", None)
        if own is None:
            return outputs
        with torch.no_grad():
            return np.asarray(own(as_tensor(outputs)), dtype=np.float64)

    def dense(self, batch: Batch) -> Batch:
        """Put samples in place of their numbers, where a batch of them is one array."""
        if self.pool is None or not self.stacked:
            return batch
        [x] = self.pool.stacked(batch.x[:, 0])
        return Batch(x, batch.y, batch.ids)

    def read(self, batch: Batch, device: torch.device) -> tuple[Any, Any]:
        """Make the module's input and the loss's targets, as tensors on the module's device."""
        if self.pool is None or self.stacked:
            return as_tensor(batch.x).to(device), as_tensor(batch.y).to(device)
        pool, numbers = self.pool, batch.x[:, 0]
        targets = pool.targets(numbers) if self._own_loss else batch.y
        y = as_tensor(targets).to(device)
        if self._collate is None:
            leaves = [as_tensor(leaf).to(device) for leaf in pool.stacked(numbers)]
            return join(pool.form.tree, leaves), y
        samples = [
            join(pool.form.tree, [as_tensor(leaf) for leaf in pool.leaves(number)])
            for number in numbers.tolist()
        ]
        return _moved(self._collate(samples), device), y

    def losses(self, module: Callable[..., Any], x: Any, y: Any) -> Tensor:
        """Compute the loss of each sample, (n,), the mean over its targets if it has many."""
        found = self._loss(self.outputs(module, x), y)
        return found.flatten(1).mean(1) if found.dim() > 1 else found

    def outputs(self, module: Callable[..., Any], x: Any) -> Any:
        """Compute what the loss takes: the module's outputs for a batch."""
        args, named = arguments(module, x)
        given = module(*args, **named)
        return given if self._output is None else self._output(given)

    def outputs_of(self, module: nn.Module, numbers: AnyArray) -> Tensor:
        """Compute the outputs for samples of the pool, by their numbers, (n, outputs)."""
        ids = numbers[:, 0]
        batch = self.dense(Batch(numbers, np.zeros(len(ids), dtype=np.int64), ids))
        x, _ = self.read(batch, next(module.parameters()).device)
        with torch.no_grad():
            found: Tensor = self.outputs(module, x)
        return found.cpu()

    def check(self, module: nn.Module, x: Any, y: Any) -> int:
        """Find out whether module and loss take two samples, and the number of scores of each.

        Returns
        -------
        int
            Columns of the outputs; 0 where they are no matrix.

        Raises
        ------
        ConfigError
            If the module, `output` or the loss raises, or gives no number for each sample.
        """
        try:
            with torch.no_grad():
                outputs = self.outputs(module, x)
        except Exception as error:
            shapes = [] if self.pool is None else [str(shape) for shape in self.pool.form.shapes]
            raise ConfigError(
                f"the model takes no samples of shape {', '.join(shapes)}: {where(error)}"
            ) from error
        matrix = isinstance(outputs, Tensor) and outputs.dim() == 2
        if not self._own_loss:
            if not isinstance(outputs, Tensor):
                raise ConfigError(
                    f"the model gives a {type(outputs).__name__}, not class scores: name the part "
                    "that the loss takes, as in output=lambda out: out[0]"
                )
            if not matrix or outputs.shape[1] < 2:
                raise ConfigError(
                    "the model has no two outputs a sample, and the loss is the cross-entropy of "
                    "class scores: give the loss you train with, as in "
                    "loss=lambda out, y: torch.nn.functional.mse_loss(out, y, reduction='none')"
                )
            return outputs.shape[1]
        try:
            found = self._loss(outputs, y)
        except Exception as error:
            raise ConfigError(f"the loss takes no such outputs: {where(error)}") from error
        if not isinstance(found, Tensor) or found.dim() == 0 or found.shape[0] != 2:
            raise ConfigError(
                "the loss must give one number a sample: make it with reduction='none', and take "
                "the mean in your loop"
            )
        return outputs.shape[1] if matrix else 0


def arguments(module: Callable[..., Any], x: Any) -> tuple[Sequence[Any], dict[str, Any]]:
    """How a batch is given to a module: by keyword, one after the other, or whole.

    A dictionary goes by keyword where the module's parameters have its names, a tuple or list one
    by one where there are as many parameters.
    """
    if not isinstance(x, dict | tuple | list):
        return (x,), {}
    forward = getattr(module, "forward", module)
    args, named = ((), x) if isinstance(x, dict) else (tuple(x), {})
    try:
        bound = signature(forward).bind(*args, **named)
    except TypeError:
        return (x,), {}
    kinds = {p.kind for p in signature(forward).parameters.values()}
    swallowed = Parameter.VAR_POSITIONAL in kinds and not isinstance(x, dict)
    return ((x,), {}) if swallowed and len(bound.args) < len(args) else (args, named)


def _moved(tree: Any, device: torch.device) -> Any:
    """Move the tensors of a tree to a device."""
    if isinstance(tree, PackedSequence):
        sequences: Any = tree  # torch's types know of no device here
        return sequences.to(device)
    if isinstance(tree, dict):
        return {name: _moved(part, device) for name, part in tree.items()}
    if isinstance(tree, tuple | list):
        parts = [_moved(part, device) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    if isinstance(tree, np.ndarray):
        tree = as_tensor(tree)
    return tree.to(device) if isinstance(tree, Tensor) else tree
