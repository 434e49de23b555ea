"""From a torch module to the file that a device without torch can run."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedkeep.core.errors import ConfigError, DataError, MissingExtraError
from fedkeep.learn.onnx_probe import ACTIVATIONS, LAYOUT_KEY, LOGITS, OnnxLearner

if TYPE_CHECKING:
    import torch
    from torch import nn

TOLERANCE = 1e-5
_PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


def export(factory: Callable[[], nn.Module], shape: Sequence[int], weights: Path | None, out: Path) -> float:
    """Writes an ONNX file with activations and logits; returns by how much it differs from torch, at most 1e-5."""
    torch = _torch()
    module = factory().float().eval()
    if weights is not None:
        load_weights(module, weights)
    split = _split(torch, module)
    example = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    _write(torch, split, example, out)
    _describe(module, out)
    difference = _difference(torch, split, shape, out)
    if not difference <= TOLERANCE:
        out.unlink()
        raise DataError(f"the exported model differs from the torch model by {difference:.2g}, above {TOLERANCE:g}")
    return difference


def load_weights(module: nn.Module, path: Path) -> None:
    """Loads a safetensors file; anything with a pickle in it is refused by its first bytes."""
    try:
        with path.open("rb") as file:
            start = file.read(16)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    if start.startswith(_PICKLE_STARTS):
        raise DataError(f"{path} holds a pickle, which could run code: save the weights as safetensors instead")
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError:
        raise MissingExtraError("reading safetensors", "torch") from None
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise DataError(f"{path} is not a safetensors file: {error}") from error
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:
        raise DataError(f"the weights of {path} do not fit the model: {error}") from error


def _torch() -> Any:
    try:
        import onnxscript
        import torch
    except ImportError:
        raise MissingExtraError("exporting a model", "export") from None
    assert onnxscript
    return torch


def _split(torch: Any, module: nn.Module) -> nn.Module:
    """The module with two outputs: what goes into its last layer, and what comes out."""
    layers = [(name, part) for name, part in module.named_modules() if list(part.parameters(recurse=False))]
    if not layers or not isinstance(layers[-1][1], torch.nn.Linear) or layers[-1][1].bias is None:
        raise ConfigError("only a model whose last layer is a torch.nn.Linear with a bias can be exported")
    name, head = layers[-1]

    class Split(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.whole = module

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            seen: list[torch.Tensor] = []
            hook = head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
            try:
                logits = self.whole(x)
            finally:
                hook.remove()
            if len(seen) != 1 or seen[0].dim() != 2:
                raise ConfigError(f"the last layer '{name}' must be used once, on one row per sample")
            return seen[0], logits

    split: nn.Module = Split().eval()
    return split


def _write(torch: Any, split: nn.Module, example: torch.Tensor, out: Path) -> None:
    """The exporter warns of its own workings and of libraries that nobody asked for; neither helps a user."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            split, (example,), out, input_names=["x"], output_names=[ACTIVATIONS, LOGITS],
            dynamic_shapes={"x": {0: torch.export.Dim("n", min=1)}}, dynamo=True, external_data=False, verbose=False,
        )  # fmt: skip


def _describe(module: nn.Module, out: Path) -> None:
    """Writes down the flat order of the parameters, under the names that torch gives them."""
    import onnx

    model = onnx.load(out)
    named = list(module.named_parameters())
    renamed = {f"whole.{name}": name for name, _ in named}
    for initializer in model.graph.initializer:
        initializer.name = renamed.get(initializer.name, initializer.name)
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = renamed.get(name, name)
    entry = model.metadata_props.add()
    entry.key = LAYOUT_KEY
    entry.value = json.dumps([[name for name, _ in named], [list(p.shape) for _, p in named]])
    onnx.save(model, out)


def _difference(torch: Any, split: nn.Module, shape: Sequence[int], out: Path) -> float:
    """The largest difference between torch and the file, over batches of several sizes."""
    learner = OnnxLearner(out)
    probe = learner.probe(learner.initial(0))
    worst = 0.0
    for n in (1, 3, 64):
        x = torch.randn(n, *shape, generator=torch.Generator().manual_seed(n))
        with torch.no_grad():
            expected = [part.numpy() for part in split(x)]
        for ours, theirs in zip(probe.run(x.numpy()), expected, strict=True):
            worst = max(worst, float(np.abs(ours - theirs).max()))
    return worst
