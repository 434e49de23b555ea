"""Parameters <-> vector: where each array of a model lies in its flat form."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import Any

from fedkeep.core.errors import ConfigError, FedkeepError


@dataclass(frozen=True)
class Layout:
    """The names and shapes of a model's parameters, in the order in which they are flattened."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """Where each parameter lies in the vector."""
        return tuple(slice(*ends) for ends in pairwise(accumulate(map(prod, self.shapes), initial=0)))

    @cached_property
    def size(self) -> int:
        return sum(map(prod, self.shapes))

    def views(self, vectors: Any) -> list[Any]:
        """Each parameter as a view of `vectors`, numpy's or torch's, whose last axis is P: (..., P) to (..., *shape).

        >>> import numpy as np
        >>> weight, bias = Layout(("weight", "bias"), ((2, 3), (2,))).views(np.arange(8))
        >>> weight.tolist(), bias.tolist()
        ([[0, 1, 2], [3, 4, 5]], [6, 7])
        """
        self.require(vectors)
        lead = vectors.shape[:-1]
        return [vectors[..., part].reshape(lead + shape) for part, shape in zip(self.slices, self.shapes, strict=True)]

    def require(self, vectors: Any) -> None:
        """Raises where the last axis is not P."""
        if vectors.shape[-1] != self.size:
            raise FedkeepError(
                f"a vector of {vectors.shape[-1]} numbers does not fit a model of {self.size}: "
                "it comes from another architecture or other shape options"
            )

    def since(self, first: int) -> "Layout":
        """The layout of the parameters from number `first` on."""
        return Layout(self.names[first:], self.shapes[first:])


def require_layers(count: int | None, depth: int) -> int:
    """How many of `depth` layers are meant by the option `last_layers`; None: all."""
    if count is not None and not 1 <= count <= depth:
        raise ConfigError(f"last_layers must be between 1 and {depth}, got {count}")
    return depth if count is None else count
