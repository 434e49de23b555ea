"""Numbers under CKKS: added up, and told apart by sign, by whoever lacks the key (TenSEAL)."""

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from fedkeep.core.errors import RefusedError, needing
from fedkeep.core.types import FloatArray, IntArray

Ciphertext: TypeAlias = Any
"""A vector of TenSEAL, which has no types."""

_OUTER_BITS = 60
_EXPAND = np.array([4589.0, -16577.0, 25614.0, -12860.0]) / 1024
"""g_3 of Cheon et al. (Asiacrypt'20): pushes small numbers away from 0."""
_FLATTEN = np.array([35.0, -35.0, 21.0, -5.0]) / 16
"""f_3 of the same: pulls what is near 1 or -1 closer to it."""
_DEPTH = 3
_CLEAR = 0.9
"""The least magnitude that a sign must come out with on the grid."""


def tenseal() -> ModuleType:
    with needing("encrypted profiles", "privacy"):
        import tenseal as module
    loaded: ModuleType = module
    return loaded


@dataclass(frozen=True)
class Scheme:
    """The parameters of CKKS; TenSEAL refuses those with less than 128 bits of security."""

    degree: int = 32768
    scale_bits: int = 40
    expansions: int = 5
    """How often small differences are expanded before their sign is read: each 4.5 times finer, and 3 levels."""

    @property
    def slots(self) -> int:
        """How many numbers a ciphertext holds."""
        return self.degree // 2

    @cached_property
    def levels(self) -> int:
        """The finest grid on [-1, 1] of which every step has a clear sign."""
        fine = np.linspace(0.0, 1.0, 200_001)[1:]
        unclear = fine[_composite_sign(fine, self.expansions) < _CLEAR]
        return int(1 / unclear.max())

    def new_context(self) -> Ciphertext:
        """A context with fresh keys, the secret one among them."""
        module = tenseal()
        inner = [self.scale_bits] * (_DEPTH * (self.expansions + 1))
        context = module.context(
            module.SCHEME_TYPE.CKKS, self.degree, coeff_mod_bit_sizes=[_OUTER_BITS, *inner, _OUTER_BITS]
        )
        context.global_scale = 2**self.scale_bits
        return context


COARSE = Scheme(degree=16384, scale_bits=30, expansions=2)
"""Some thirty levels only, for a fifth of the bytes and a tenth of the time."""
SCHEMES = {"full": Scheme(), "coarse": COARSE}
SUMS = Scheme(degree=8192, scale_bits=40, expansions=-1)
"""For sums alone: no comparison, so a small and fast one."""


def context_bytes(context: Ciphertext, *, secret: bool = False, multiply: bool = False) -> bytes:
    """A context to send or store: with the public key, or with the secret one alone."""
    packed: bytes = context.serialize(
        save_public_key=not secret, save_secret_key=secret, save_galois_keys=False, save_relin_keys=multiply
    )
    return packed


def read_context(packed: bytes) -> Ciphertext:
    try:
        return tenseal().context_from(packed)
    except (ValueError, RuntimeError) as error:
        raise RefusedError("unreadable encryption context", str(error)) from error


def digest(packed: bytes) -> bytes:
    """A name for a context, by which ciphertexts of another one are told."""
    return blake2b(packed, digest_size=16).digest()


def encrypt(context: Ciphertext, values: FloatArray) -> bytes:
    packed: bytes = tenseal().ckks_vector(context, values).serialize()
    return packed


def read(context: Ciphertext, packed: bytes, size: int) -> Ciphertext:
    """A ciphertext of `size` numbers; damaged ones and those of another context are refused."""
    if not packed:
        raise RefusedError("unreadable ciphertext", "it is empty")
    try:
        vector = tenseal().ckks_vector_from(context, packed)
    except (ValueError, RuntimeError) as error:
        raise RefusedError("unreadable ciphertext", f"{error}: damaged, or of another context") from error
    if vector.size() != size:
        raise RefusedError("ciphertext of the wrong size", f"{vector.size()} numbers instead of {size}")
    return vector


def add(total: Ciphertext | None, vector: Ciphertext) -> Ciphertext:
    """The sum of two ciphertexts, the first of which may be none."""
    return vector if total is None else total + vector


def decrypt(context: Ciphertext, packed: bytes, size: int) -> FloatArray:
    """The numbers, for whoever has the secret key."""
    vector = read(context, packed, size)
    if not context.has_secret_key():
        raise RefusedError("lost key", "only the key-holder can decrypt")
    return np.asarray(vector.decrypt())


def sign(vector: Ciphertext, expansions: int) -> Ciphertext:
    """About -1, 0 or 1 for each number between -1 and 1, by composite polynomials."""
    for coefficients in [_EXPAND] * expansions + [_FLATTEN]:
        vector = _odd_polynomial(vector, coefficients.tolist())
    return vector


def rounded_signs(values: FloatArray) -> IntArray:
    """The signs behind decrypted numbers; what is no clear sign is refused rather than guessed."""
    signs = np.rint(values)
    if not (
        np.isfinite(values).all()
        and np.abs(values - signs).max(initial=0.0) < 0.25
        and np.abs(signs).max(initial=0) <= 1
    ):
        raise RefusedError("unclear comparison", "the ciphertexts do not hold differences within the grid")
    return signs.astype(np.int64)


def _odd_polynomial(x: Ciphertext, c: list[float]) -> Ciphertext:
    """c0 x + c1 x^3 + c2 x^5 + c3 x^7, three multiplications deep."""
    squared = x * x
    upper = ((x * c[3]) * squared + x * c[2]) * (squared * squared)
    return upper + (x * c[1]) * squared + x * c[0]


def _composite_sign(x: FloatArray, expansions: int) -> FloatArray:
    for c in [_EXPAND] * expansions + [_FLATTEN]:
        x = x * (c[0] + x * x * (c[1] + x * x * (c[2] + x * x * c[3])))
    return x
