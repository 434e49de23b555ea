"""The messages of a secure round, as bytes that any transport can carry; msgpack, so that nothing received can run."""

from __future__ import annotations

from typing import TypeAlias, TypeVar

import msgspec

from fedkeep.core.errors import RefusedError
from fedkeep.core.types import DeviceId
from fedkeep.privacy.fixed_point import FixedPoint
from fedkeep.privacy.secure_sum import PublicKeys

SESSION_BYTES = 16
_FLEET = 1 << 16
"""Devices whose estimators a running sum can hold."""


def grid(bound: float, summands: int) -> FixedPoint:
    """For numbers within the bound and weights of 1 at most; 64 bits, so that limits need not be tight."""
    return FixedPoint(max(bound, 1.0), summands, bits=64)


def estimator_grid(gradient_norm: float) -> FixedPoint:
    """For the estimators of a whole fleet, the same in every round."""
    return grid(gradient_norm, _FLEET)


class SumTerms(msgspec.Struct, frozen=True, tag=True):
    """What a device is told of the sum it is asked into; comes with the order and is answered by `Keys`."""

    session: bytes
    device: DeviceId
    """The number under which the others know this device."""
    threshold: int
    summands: int
    """How many devices are asked."""
    update_norm: float
    gradient_norm: float
    gradient_size: int
    """0: no estimators are summed."""
    heaviest: float
    """The most this device's report may weigh."""
    weight_unit: float
    """Weights count in this unit, which makes them 1 at most."""
    rate: float
    """What this device's estimator weighs, 1 at most."""
    counted: bytes = b""
    """The session in which the running sum last counted this device's estimator; empty: in none."""
    per_step: bool = False
    """Whether updates are divided by their local steps (`fednova`)."""

    @property
    def update_grid(self) -> FixedPoint:
        """For one round's updates: as wide as the limits, so that what is sound also fits."""
        return grid(self.update_norm, self.summands)

    @property
    def estimator_grid(self) -> FixedPoint:
        return estimator_grid(self.gradient_norm)


class Keys(msgspec.Struct, frozen=True, tag=True):
    """Exchange 1: a device has its report ready, and publishes its keys."""

    session: bytes
    keys: PublicKeys
    lost: bool = False
    """Its memory of what the running sum counts is gone: the sum must begin anew."""


class Declined(msgspec.Struct, frozen=True, tag=True):
    """A device's report is not fit to be masked, and why: in a sum it would spoil all others, and nobody could tell."""

    session: bytes
    reason: str
    detail: str


class PartyKeys(msgspec.Struct, frozen=True, tag=True):
    """Everybody's keys; answered by `Envelopes`."""

    session: bytes
    keys: dict[DeviceId, PublicKeys]


class Envelopes(msgspec.Struct, frozen=True, tag=True):
    """Exchange 2: up, by receiver; down, by sender, and answered by `MaskedWords`."""

    session: bytes
    envelopes: dict[DeviceId, bytes]


class MaskedWords(msgspec.Struct, frozen=True, tag=True):
    """Exchange 3: the report under its masks, little-endian."""

    session: bytes
    words: bytes


class Survivors(msgspec.Struct, frozen=True, tag=True):
    """Whose words are in the sum; answered by `OpenedShares`."""

    session: bytes
    devices: tuple[DeviceId, ...]


class OpenedShares(msgspec.Struct, frozen=True, tag=True):
    """Exchange 4: a survivor's shares of the masks that are left."""

    session: bytes
    own_masks: dict[DeviceId, bytes]
    masking_keys: dict[DeviceId, bytes]


Request: TypeAlias = PartyKeys | Envelopes | Survivors
Reply: TypeAlias = Keys | Declined | Envelopes | MaskedWords | OpenedShares
Told = TypeVar("Told", SumTerms, Keys, Envelopes, MaskedWords, OpenedShares)

_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)


def encode(message: SumTerms | Request | Reply) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_request(payload: bytes) -> Request:
    """What the server asks of a device in a sum under way."""
    try:
        return _requests.decode(payload)
    except msgspec.DecodeError as error:
        raise RefusedError("malformed", f"not a question of a secure sum: {error}") from error


def decode(payload: bytes, expected: type[Told]) -> Told:
    """The message, if it is of the kind that is expected now; a device that declines is refused by its own word."""
    try:
        message: Told | Declined = msgspec.msgpack.decode(payload, type=expected | Declined)
    except msgspec.DecodeError as error:
        raise RefusedError("malformed", f"expected {expected.__name__} of a secure sum: {error}") from error
    if isinstance(message, Declined):
        raise RefusedError(message.reason[:40], message.detail[:300])
    return message
