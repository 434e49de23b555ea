"""What the server and the key-holder say to each other; msgpack on the wire, so that nothing received can run."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from fedkeep.core.errors import RefusedError
from fedkeep.core.plan import Plan
from fedkeep.core.shortfalls import Shortfall
from fedkeep.link.messages import Array, Failed, pack, unpack


class AskPublicKeys(msgspec.Struct, frozen=True, tag=True):
    """The public keys with which to compute under encryption. Answered by `PublicKeys`."""


class AskPlan(msgspec.Struct, frozen=True, tag=True):
    """Plan from these tables, which only the key-holder can read. Answered by `Planned`."""

    name: bytes
    devices: Array
    capacities: Array
    labels: int
    signs: tuple[bytes, ...]
    totals: bytes
    quantities: str
    clients_per_label: int | None
    labels_per_client: int | None
    before: PlanArrays | None = None


class PlanArrays(msgspec.Struct, frozen=True):
    """A plan."""

    devices: Array
    quotas: Array
    label_weights: Array
    mass_per_slot: float


class PublicKeys(msgspec.Struct, frozen=True, tag=True):
    packed: bytes
    least_devices: int
    """For fewer the key-holder makes no plan."""


class Planned(msgspec.Struct, frozen=True, tag=True):
    plan: PlanArrays
    shortfalls: tuple[Shortfall, ...] = ()


KeyRequest = AskPublicKeys | AskPlan
KeyReply = PublicKeys | Planned | Failed

_requests = msgspec.msgpack.Decoder(KeyRequest)
_replies = msgspec.msgpack.Decoder(KeyReply)


def encode(message: KeyRequest | KeyReply) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_request(payload: bytes) -> KeyRequest:
    return _decode(_requests, payload)  # type: ignore[no-any-return]


def decode_reply(payload: bytes) -> KeyReply:
    return _decode(_replies, payload)  # type: ignore[no-any-return]


def pack_plan(plan: Plan) -> PlanArrays:
    quotas = plan.quotas.astype(np.int64)
    return PlanArrays(pack(plan.devices), pack(quotas), pack(plan.label_weights), plan.mass_per_slot)


def unpack_plan(message: PlanArrays, shortfalls: tuple[Shortfall, ...] = ()) -> Plan:
    """The plan, if its parts fit each other."""
    devices, quotas, weights = (unpack(a) for a in (message.devices, message.quotas, message.label_weights))
    fits = devices.ndim == weights.ndim == 1 and quotas.shape == (len(devices), len(weights))
    kinds = [array.dtype.name for array in (devices, quotas, weights)]
    if not fits or kinds != ["int64", "int64", "float64"] or (np.diff(devices) <= 0).any() or (quotas < 0).any():
        raise RefusedError("malformed plan", "its devices, quotas and weights do not fit each other")
    if not (np.isfinite(weights).all() and (weights >= 0).all() and 0 <= message.mass_per_slot < np.inf):
        raise RefusedError("malformed plan", "its weights are not finite numbers of at least 0")
    return Plan(devices, quotas, weights, message.mass_per_slot, shortfalls)


def _decode(decoder: msgspec.msgpack.Decoder[Any], payload: bytes) -> Any:
    try:
        return decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise RefusedError("malformed", f"not a message between server and key-holder: {error}") from error
