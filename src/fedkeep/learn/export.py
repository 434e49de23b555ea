"""From a torch module to the file that a device without torch can run."""

import json
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from fedkeep.core.errors import ConfigError, DataError, optional_import
from fedkeep.learn.losses import CROSS_ENTROPY, CrossEntropy, NumberLoss
from fedkeep.learn.models import made_module
from fedkeep.learn.onnx_learner import INPUTS, LAYOUT_KEY, OUTPUTS, PICKLE_STARTS, OnnxLearner

with optional_import("exporting a model", "export"):
    import onnx
    import onnxscript  # noqa: F401 - torch writes by it
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    from torch import Tensor, nn

TOLERANCE = 1e-5


def export(
    factory: Callable[[], nn.Module],
    shape: Sequence[int] | None,
    weights: Path | None,
    out: Path,
    loss: CrossEntropy | NumberLoss = CROSS_ENTROPY,
) -> float:
    """Write an ONNX file with values, activations and logits.

    Its difference from torch is returned; it is 1e-5 at most.

    The file says with which loss its values are; a device that runs it needs no word of it.
    Without a shape, the samples are those that the module's first layer takes, if that says it.
    """
    module = made_module(factory, "the model").float().eval()
    layers = {
        name: part for name, part in module.named_modules() if list(part.parameters(recurse=False))
    }
    first, head = next(iter(layers.values()), None), next(reversed(layers.values()), None)
    if not shape and isinstance(first, nn.Linear):
        shape = (first.in_features,)
    if not shape:
        raise ConfigError(
            "the model does not tell the shape of a sample: give it by --shape, e.g. --shape 3,64"
        )
    if weights is not None:
        load_weights(module, weights)
    if not isinstance(head, nn.Linear) or head.bias is None:
        raise ConfigError(
            "only a model whose last layer is a torch.nn.Linear with a bias can be exported"
        )
    valued = _Valued(module, next(reversed(layers)), loss).eval()
    _try(module, head, shape)
    _write(valued, head, shape, out)
    difference = _difference(valued, head, shape, out)
    if not difference <= TOLERANCE:
        out.unlink()
        raise DataError(
            f"the exported model differs from the torch model by {difference:.2g}, "
            f"above {TOLERANCE:g}"
        )
    return difference


def load_weights(module: nn.Module, path: Path) -> None:
    """Load a safetensors file; anything with a pickle in it is refused by its first bytes."""
    try:
        with path.open("rb") as file:
            start = file.read(16)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    if start.startswith(PICKLE_STARTS):
        raise DataError(
            f"{path} holds a pickle, which could run code: save the weights as safetensors instead"
        )
    try:
        module.load_state_dict(load_file(path))
    except SafetensorError as error:
        raise DataError(f"{path} is not a safetensors file: {error}") from error
    except RuntimeError as error:
        raise DataError(f"the weights of {path} do not fit the model: {error}") from error


class _Valued(nn.Module):
    """Projections of the last layer's gradients on (weight, bias), and its input and output."""

    def __init__(
        self, whole: nn.Module, head: str, loss: CrossEntropy | NumberLoss = CROSS_ENTROPY
    ) -> None:
        super().__init__()
        self.whole, self._head, self.loss = whole, head, loss

    def forward(
        self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        seen: list[Tensor] = []
        head = self.whole.get_submodule(self._head)
        hook = head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        try:
            logits = self.whole(x)
        finally:
            hook.remove()
        if len(seen) != 1 or seen[0].dim() != 2:
            raise ConfigError(
                f"the last layer '{self._head}' must be used once, on one row per sample"
            )
        response = nn.functional.linear(seen[0], weight, bias)
        if isinstance(self.loss, NumberLoss):
            error = logits - y
            if self.loss.name == "huber":
                error = torch.clamp(error, -self.loss.delta, self.loss.delta)
            return (error * response).mean(1, keepdim=True), seen[0], logits
        projections = (torch.softmax(logits, 1) * response).sum(1, keepdim=True) - response.gather(
            1, y
        )
        return projections, seen[0], logits


def _try(module: nn.Module, head: nn.Linear, shape: Sequence[int]) -> None:
    """Try two samples: the shape must fit, and the last layer's output be the model's."""
    outputs: list[Tensor] = []

    def plant(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        # Values of both signs: a ReLU behind the layer would let positive ones through unseen.
        outputs.append(torch.linspace(-3.0, 3.0, output.numel()).reshape(output.shape))
        return outputs[-1]

    hook = head.register_forward_hook(plant)
    try:
        with torch.no_grad():
            logits = module(_example(head, shape, 2)[0])
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"the model cannot take samples of shape {list(shape)} (--shape): {reason}"
        ) from error
    finally:
        hook.remove()
    if not outputs or outputs[-1].shape != logits.shape or not torch.equal(outputs[-1], logits):
        raise ConfigError(
            "the model must end in its last Linear layer: take out what comes after it, "
            "such as a ReLU"
        )


def _example(
    head: nn.Linear, shape: Sequence[int], n: int, loss: CrossEntropy | NumberLoss = CROSS_ENTROPY
) -> tuple[Tensor, ...]:
    """Make samples, targets and a direction."""
    random = torch.Generator().manual_seed(n)
    labels = torch.randint(0, head.out_features, (n, 1), generator=random)
    if isinstance(loss, NumberLoss):
        labels = 2 * torch.randn(n, head.out_features, generator=random)
    weight = torch.randn(head.weight.shape, generator=random) / head.in_features**0.5
    x = torch.randn(n, *shape, generator=random)
    return x, labels, weight, torch.randn(head.out_features, generator=random)


def _write(valued: _Valued, head: nn.Linear, shape: Sequence[int], out: Path) -> None:
    """Write the file, with the flat order of the parameters under torch's names.

    The exporter warns of its own workings and of libraries that nobody asked for.
    """
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    samples = {0: torch.export.Dim("n", min=1)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            valued, _example(head, shape, 2, valued.loss), out,
            input_names=list(INPUTS), output_names=list(OUTPUTS), dynamo=True,
            dynamic_shapes={"x": samples, "y": samples, "weight": None, "bias": None},
            external_data=False,
            verbose=False,
        )  # fmt: skip
    model = onnx.load(out)
    shapes = {name: list(parameter.shape) for name, parameter in valued.whole.named_parameters()}
    renamed = {f"whole.{name}": name for name in shapes}
    for initializer in model.graph.initializer:
        initializer.name = renamed.get(initializer.name, initializer.name)
    for node in model.graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
    layout = {"names": list(shapes), "shapes": list(shapes.values()), "sample": list(shape)}
    if isinstance(valued.loss, NumberLoss):
        layout["loss"] = asdict(valued.loss)
    model.metadata_props.add(key=LAYOUT_KEY, value=json.dumps(layout))
    onnx.save(model, out)


def _difference(valued: _Valued, head: nn.Linear, shape: Sequence[int], out: Path) -> float:
    """Find the largest difference between torch and the file, over batches of several sizes."""
    learner = OnnxLearner(out)
    probe = learner.probe(learner.initial(0))
    worst = 0.0
    for n in (1, 3, 64):
        example = _example(head, shape, n, valued.loss)
        with torch.no_grad():
            expected = [part.numpy() for part in valued(*example)]
        x, y, weight, bias = (part.numpy() for part in example)
        ours = probe.run(x, y, np.concatenate([weight.ravel(), bias]))
        worst = max(
            worst, *(float(np.abs(a - b).max()) for a, b in zip(ours, expected, strict=True))
        )
    return worst
