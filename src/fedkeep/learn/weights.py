"""Models on disk, as safetensors only: a file that may hold a pickle is refused by its first bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedkeep.core.errors import DataError, MissingExtraError
from fedkeep.core.types import AnyArray, Vector
from fedkeep.learn.flat import Layout, flatten

_PICKLES = {
    b"PK\x03\x04": "a zip archive, as torch.save writes them",
    b"\x80": "a pickle",
    b"\x1f\x8b": "a gzip file",
}


def save_weights(path: Path, layout: Layout, model: Vector) -> None:
    """Writes the parameters under their names; the file appears whole or not at all."""
    try:
        from safetensors.numpy import save
    except ImportError as error:
        raise MissingExtraError("saving a model", "torch") from error
    arrays = {n: np.ascontiguousarray(v) for n, v in zip(layout.names, layout.views(model), strict=True)}
    partial = path.with_name(path.name + ".part")
    partial.write_bytes(save(arrays))
    partial.replace(path)


def load_weights(path: Path, layout: Layout) -> Vector:
    """The parameters in a safetensors file as one vector; names and shapes must be those of `layout`."""
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import load
    except ImportError as error:
        raise MissingExtraError("loading a model", "torch") from error
    content = _read(path)
    try:
        arrays: dict[str, AnyArray] = load(content)
    except (SafetensorError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a readable safetensors file: {error}") from error
    _require_layout(path, arrays, layout)
    return flatten([arrays[name] for name in layout.names])


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    for magic, kind in _PICKLES.items():
        if content.startswith(magic):
            raise DataError(
                f"{path} is {kind}, which may run code when it is opened: "
                "save the model with safetensors.torch.save_file instead"
            )
    return content


def _require_layout(path: Path, arrays: dict[str, AnyArray], layout: Layout) -> None:
    expected = dict(zip(layout.names, layout.shapes, strict=True))
    found = {name: array.shape for name, array in arrays.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise DataError(
                f"{path} does not fit the model: '{name}' is {found.get(name, 'missing')} in the file "
                f"and {expected.get(name, 'missing')} in the model"
            )
