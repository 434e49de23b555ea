"""Each sample's gradient by one layer, in the form that is least to keep and to multiply.

Arrays are (C, n, ...) for C models over their own n samples, or (n, ...) for one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np

from fedkeep.core.types import AnyArray


class Factors(Protocol):
    """The samples' gradients by the weight and the bias of a layer."""

    def of(self, c: int, n: int) -> Self:
        """Those of the first n samples of model c."""

    def inner(self, other: Self) -> AnyArray:
        """<grad_i, grad'_i> per sample."""

    def project(self, weight: AnyArray, bias: AnyArray) -> AnyArray:
        """<grad_i, (weight, bias)> per sample."""

    def add_up(self, shares: AnyArray, weight: AnyArray, bias: AnyArray) -> None:
        """Writes sum_i shares_i grad_i into `weight` and `bias`."""


@dataclass(frozen=True, eq=False)
class Outer:
    """A linear layer: the outer products of its errors with its inputs and a one, e (a, 1)^T."""

    a: AnyArray
    e: AnyArray

    def of(self, c: int, n: int) -> Outer:
        return Outer(self.a[c, :n], self.e[c, :n])

    def inner(self, other: Outer) -> AnyArray:
        """For outer products, the product of the factors' own."""
        products: AnyArray = (np.vecdot(self.a, other.a) + 1.0) * np.vecdot(self.e, other.e)
        return products

    def project(self, weight: AnyArray, bias: AnyArray) -> AnyArray:
        """As e . (weight a + bias)."""
        response = self.a @ weight.T
        response += bias
        projections: AnyArray = np.vecdot(self.e, response)
        return projections

    def add_up(self, shares: AnyArray, weight: AnyArray, bias: AnyArray) -> None:
        e = self.e * shares[:, None]
        np.matmul(e.T, self.a, out=weight)
        np.add.reduce(e, axis=0, out=bias)


@dataclass(frozen=True, eq=False)
class Explicit:
    """A convolution: the gradients themselves, as (n, numbers of the weight) and (n, out)."""

    weight: AnyArray
    bias: AnyArray

    def of(self, c: int, n: int) -> Explicit:
        return Explicit(self.weight[c, :n], self.bias[c, :n])

    def inner(self, other: Explicit) -> AnyArray:
        products: AnyArray = np.vecdot(self.weight, other.weight) + np.vecdot(self.bias, other.bias)
        return products

    def project(self, weight: AnyArray, bias: AnyArray) -> AnyArray:
        projections: AnyArray = self.weight @ weight.reshape(-1) + self.bias @ bias
        return projections

    def add_up(self, shares: AnyArray, weight: AnyArray, bias: AnyArray) -> None:
        np.matmul(shares, self.weight, out=weight.reshape(-1))
        np.matmul(shares, self.bias, out=bias)
