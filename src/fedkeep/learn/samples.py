"""Samples of any form: single arrays, dictionaries and tuples of arrays, sequences of any length.

The core knows a sample by its number. What the number stands for lies here, in the dtype in which
it came: an image of bytes takes its bytes, whatever the model computes in.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from typing import Any, TypeAlias

import numpy as np

from fedkeep.core.errors import ConfigError
from fedkeep.core.types import AnyArray, IntArray, State

Tree: TypeAlias = Any
"""Of tuples ({"tuple": [...]}), dictionaries ({"dict": {...}}) and None for an array."""


def split(value: Any) -> tuple[list[AnyArray], Tree]:
    """Take a tree of arrays or tensors apart, into its arrays and its form.

    >>> leaves, tree = split({"tokens": [1, 2], "image": np.zeros((2, 3))})
    >>> [leaf.shape for leaf in leaves], tree
    ([(2,), (2, 3)], {'dict': {'tokens': None, 'image': None}})
    """
    if isinstance(value, dict):
        parts = {str(name): split(part) for name, part in value.items()}
        return [leaf for leaves, _ in parts.values() for leaf in leaves], {
            "dict": {name: tree for name, (_, tree) in parts.items()}
        }
    if isinstance(value, tuple):
        split_parts = [split(part) for part in value]
        return [leaf for leaves, _ in split_parts for leaf in leaves], {
            "tuple": [tree for _, tree in split_parts]
        }
    return [to_array(value)], None


def join(tree: Tree, leaves: Sequence[Any]) -> Any:
    """Put a tree together again.

    >>> join({"tuple": [None, {"dict": {"a": None}}]}, [1, 2])
    (1, {'a': 2})
    """
    rest = iter(leaves)

    def joined(form: Tree) -> Any:
        if form is None:
            return next(rest)
        if "dict" in form:
            return {name: joined(part) for name, part in form["dict"].items()}
        return tuple(joined(part) for part in form["tuple"])

    return joined(tree)


def to_array(values: Any) -> AnyArray:
    """Make an array of numbers; tensors on another device, or in a graph, are copied out of it.

    Floats become float32; all other numbers stay as they are.
    """
    try:
        if hasattr(values, "detach"):
            values = values.detach().cpu()
            if values.is_floating_point():
                values = values.float()
        array = np.asarray(values)
        if array.dtype.kind == "c":
            raise TypeError("these are complex; offer real and imaginary parts as two channels")
        if array.dtype.kind == "f":
            return array.astype(np.float32, copy=False)
        if array.dtype.kind not in "iub":
            array = array.astype(np.float32)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"offer takes arrays or tensors of numbers: {error}") from error
    return array


@dataclass(frozen=True)
class PoolForm:
    """The form that all samples of a stream share: dtypes and shapes of arrays and target.

    With `varied`, arrays may be of any length: only their number of axes is fixed.
    """

    tree: Tree
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    target: tuple[str, tuple[int, ...]]
    varied: bool = False

    def takes(self, leaves: Sequence[AnyArray], tree: Tree) -> bool:
        """Whether a sample is of this form."""
        if tree != self.tree or len(leaves) != len(self.shapes):
            return False
        return all(
            leaf.ndim == len(shape) if self.varied else leaf.shape == shape
            for leaf, shape in zip(leaves, self.shapes, strict=True)
        )

    def to_json(self) -> str:
        """Write the form as text."""
        return json.dumps([self.tree, self.dtypes, self.shapes, self.target, self.varied])

    @staticmethod
    def from_json(text: str) -> "PoolForm":
        """Read a form that was written as text."""
        tree, dtypes, shapes, (dtype, shape), varied = json.loads(text)
        as_shapes = tuple(tuple(of_leaf) for of_leaf in shapes)
        return PoolForm(tree, tuple(dtypes), as_shapes, (dtype, tuple(shape)), varied)


class SamplePool:
    """The samples themselves, by their numbers; equal samples have equal numbers.

    >>> form = PoolForm(None, ("uint8",), ((2,),), ("int64", ()))
    >>> pool = SamplePool(form)
    >>> [first, second] = [pool.add([np.array(x, np.uint8)], np.array(1)) for x in ([1, 2], [3, 4])]
    >>> pool.prune([second])
    >>> pool.stacked(np.array([second]))[0].dtype.name, pool.sample(second), len(pool)
    ('uint8', array([3, 4], dtype=uint8), 1)
    """

    def __init__(self, form: PoolForm, *, as_float: bool = False) -> None:
        self.form = form
        self.as_float = as_float
        """Whether the model takes float32 where samples are integers."""
        self._samples: dict[int, tuple[tuple[AnyArray, ...], AnyArray]] = {}

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def single(self) -> bool:
        """Whether each sample is one array of one shape."""
        return self.form.tree is None and not self.form.varied

    def add(self, leaves: Iterable[AnyArray], target: AnyArray, number: int | None = None) -> int:
        """Take a sample in, and give its number: the one that its id has, or one of its content."""
        own = tuple(
            np.ascontiguousarray(leaf).astype(dtype, casting="same_kind")
            for leaf, dtype in zip(leaves, self.form.dtypes, strict=True)
        )
        target = np.asarray(target, dtype=self.form.target[0])
        if number is not None:
            self._samples[number] = own, target
            return number
        name = blake2b(digest_size=8)
        for leaf in own:
            name.update(leaf.tobytes())
        name.update(target.tobytes())
        number = int(np.frombuffer(name.digest(), dtype="<i8")[0]) >> 1
        self._samples[number] = own, target
        return number

    def set_target(self, number: int, target: Any) -> None:
        """Give a sample another target."""
        own, _ = self._samples[number]
        self._samples[number] = own, np.asarray(target, dtype=self.form.target[0])

    def __contains__(self, number: int) -> bool:
        return number in self._samples

    def prune(self, numbers: Iterable[int]) -> None:
        """Forget all samples but these."""
        self._samples = {number: self._samples[number] for number in numbers}

    def leaves(self, number: int) -> tuple[AnyArray, ...]:
        """Give the arrays of a sample, as the model takes them."""
        own, _ = self._samples[number]
        return tuple(leaf.astype(np.float32) for leaf in own) if self.as_float else own

    def sample(self, number: int) -> Any:
        """Give a sample in the form in which it came, as the model takes it."""
        return join(self.form.tree, self.leaves(number))

    def stacked(self, numbers: IntArray) -> list[AnyArray]:
        """Stack these samples, to one array (n, ...) for each array of a sample."""
        if not len(numbers):
            return [
                np.zeros((0, *shape), dtype=np.float32 if self.as_float else dtype)
                for dtype, shape in zip(self.form.dtypes, self.form.shapes, strict=True)
            ]
        rows = [self.leaves(number) for number in numbers.tolist()]
        return [np.stack(of_leaf) for of_leaf in zip(*rows, strict=True)]

    def target(self, number: int) -> AnyArray:
        """Give the target of a sample."""
        return self._samples[number][1]

    def targets(self, numbers: IntArray) -> AnyArray:
        """Stack the targets of these samples, (n, ...)."""
        dtype, shape = self.form.target
        rows = [self.target(number) for number in numbers.tolist()]
        return np.stack(rows) if rows else np.zeros((0, *shape), dtype=dtype)

    def snapshot(self, numbers: Sequence[int]) -> State:
        """Write these samples as plain arrays, the values of each end to end."""
        chosen = [self._samples[number] for number in numbers]
        ids = np.array(numbers, dtype=np.int64)
        columns: State = {"numbers": ids, "targets": self.targets(ids)}
        for place, dtype in enumerate(self.form.dtypes):
            own = [leaves[place] for leaves, _ in chosen]
            shapes = np.array([leaf.shape for leaf in own], dtype=np.int64)
            columns[f"shapes.{place}"] = shapes.reshape(len(own), len(self.form.shapes[place]))
            values = np.concatenate([leaf.ravel() for leaf in own]) if own else np.zeros(0, dtype)
            columns[f"values.{place}"] = values
        return columns

    def restore(self, state: State) -> None:
        """Become the pool that `snapshot` described."""
        columns = []
        for place in range(len(self.form.dtypes)):
            shapes = [tuple(shape) for shape in state[f"shapes.{place}"].tolist()]
            ends = np.cumsum([prod(shape) for shape in shapes])[:-1].astype(np.int64)
            parts = np.split(state[f"values.{place}"], ends) if shapes else []
            columns.append([p.reshape(shape) for p, shape in zip(parts, shapes, strict=True)])
        rows = zip(state["numbers"].tolist(), zip(*columns, strict=True), strict=True)
        self._samples = {
            number: (leaves, target)
            for (number, leaves), target in zip(rows, state["targets"], strict=True)
        }
