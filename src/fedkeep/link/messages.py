"""The messages of the agent's local API; msgpack on the wire, so that nothing received can run."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from fedkeep.core.errors import RefusedError
from fedkeep.core.types import AnyArray, Assignment, LocalTraining, Profile, Report, TrainOrder

_NUMBERS = ("<f4", "<f8", "<i8")


class Array(msgspec.Struct, frozen=True):
    """An array of numbers."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Participate(msgspec.Struct, frozen=True, tag=True):
    """Take part in a round: train on what is stored and report. Answered by `Reported`, or `Answered` under terms."""

    round: int
    model: Array
    learning_rate: float
    epochs: int
    batch_size: int | None = None
    proximal: float = 0.0
    direction: Array | None = None
    accepted_round: int | None = None
    quotas: Array | None = None
    label_weights: Array | None = None
    mass_per_slot: float = 0.0
    terms: bytes | None = None
    """Of a secure sum: the report is held back for masking, and keys are the answer."""


class AskSum(msgspec.Struct, frozen=True, tag=True):
    """A later exchange of a secure sum, whose bytes only its parties read. Answered by `Answered`."""

    question: bytes


class Evaluate(msgspec.Struct, frozen=True, tag=True):
    """Measure a model on the agent's own samples. Answered by `Evaluated`."""

    model: Array


class AskProfile(msgspec.Struct, frozen=True, tag=True):
    """What the device declares to the server. Answered by `Profiled`."""


class AskEncryptedProfile(msgspec.Struct, frozen=True, tag=True):
    """The same under the key of this name, as one row of a table. Answered by `EncryptedProfiled`."""

    name: bytes
    row: int
    rows: int
    labels: int


class AskStatus(msgspec.Struct, frozen=True, tag=True):
    """How the agent is doing. Answered by `Status`."""


class AskStored(msgspec.Struct, frozen=True, tag=True):
    """What is stored, by label. Answered by `StoredSummary`."""


class AskRefused(msgspec.Struct, frozen=True, tag=True):
    """The records that were refused last. Answered by `RefusedRecords`."""


class AskWhy(msgspec.Struct, frozen=True, tag=True):
    """Why a sample is stored or is not. Answered by `Reasons`."""

    id: str


class Erase(msgspec.Struct, frozen=True, tag=True):
    """Remove all samples that match every condition given. Answered by `Erased`."""

    id: str | None = None
    label: int | None = None
    source: str | None = None
    since: float | None = None
    until: float | None = None


class Reported(msgspec.Struct, frozen=True, tag=True):
    round: int
    model: Array
    weight: float
    steps: int
    samples: int
    gradient_samples: int
    local_gradient: Array | None = None


class Answered(msgspec.Struct, frozen=True, tag=True):
    """What the device says in a secure sum."""

    answer: bytes


class Evaluated(msgspec.Struct, frozen=True, tag=True):
    loss: float
    accuracy: float
    samples: int
    data: str
    """What it was measured on: "held-out" or "stored"."""


class Profiled(msgspec.Struct, frozen=True, tag=True):
    capacity: int
    velocity: Array


class EncryptedProfiled(msgspec.Struct, frozen=True, tag=True):
    name: bytes
    row: int
    capacity: int
    comparisons: tuple[bytes, ...]
    velocities: bytes


class Status(msgspec.Struct, frozen=True, tag=True):
    """Numbers for people and monitors."""

    samples: int
    capacity: int
    bytes: int
    budget: int
    round: int
    model_age_seconds: float | None
    counters: dict[str, int]
    stride: int
    """One of this many arrivals is valued: 1 unless the agent cannot keep up."""
    policy: str
    preset: str
    """The set of defaults under which the policy runs."""
    value_quantiles: tuple[float, ...]
    labels_held: int
    labels: int
    epsilon_spent: float | None = None
    """What was spent of the privacy budget; None where nothing is accounted for."""
    epsilon_budget: float | None = None
    sample_bytes: int = 0
    """Of one stored sample, with what is known of it."""


class LabelSummary(msgspec.Struct, frozen=True):
    label: int
    count: int
    bytes: int
    lowest: float
    median: float
    highest: float
    oldest_seconds: float
    newest_seconds: float


class StoredSummary(msgspec.Struct, frozen=True, tag=True):
    labels: tuple[LabelSummary, ...]


class RefusedRecord(msgspec.Struct, frozen=True):
    time: float
    source: str
    reason: str
    raw: str
    """How the record began."""


class RefusedRecords(msgspec.Struct, frozen=True, tag=True):
    records: tuple[RefusedRecord, ...]


class Reason(msgspec.Struct, frozen=True):
    """One decision; a score or floor of None is not known or not there."""

    id: int
    verdict: str
    label: int
    score: float | None
    floor: float | None
    displaced: int | None
    model_version: int
    policy: str
    time: float


class Reasons(msgspec.Struct, frozen=True, tag=True):
    id: int
    stored: bool
    decisions: tuple[Reason, ...]


class Erased(msgspec.Struct, frozen=True, tag=True):
    count: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The request could not be met; the sentence says why."""

    reason: str
    detail: str


Request = (
    Participate
    | AskSum
    | Evaluate
    | AskProfile
    | AskEncryptedProfile
    | AskStatus
    | AskStored
    | AskRefused
    | AskWhy
    | Erase
)
Reply = (
    Reported
    | Answered
    | Evaluated
    | Profiled
    | EncryptedProfiled
    | Status
    | StoredSummary
    | RefusedRecords
    | Reasons
    | Erased
    | Failed
)

_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_request(payload: bytes) -> Request:
    return _decode(_requests, payload)  # type: ignore[no-any-return]


def decode_reply(payload: bytes) -> Reply:
    return _decode(_replies, payload)  # type: ignore[no-any-return]


def _decode(decoder: msgspec.msgpack.Decoder[Any], payload: bytes) -> Any:
    try:
        return decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise RefusedError("malformed", f"not a message of the agent's API: {error}") from error


def pack(array: AnyArray) -> Array:
    array = np.ascontiguousarray(array)
    return Array(array.dtype.newbyteorder("<").str, array.shape, array.tobytes())


def unpack(array: Array) -> AnyArray:
    """The array, read-only; refused if its bytes do not match its shape."""
    if array.dtype not in _NUMBERS or any(side < 0 for side in array.shape):
        raise RefusedError("malformed", f"no array of {array.dtype} and shape {array.shape} is sent here")
    dtype = np.dtype(array.dtype)
    if len(array.data) != dtype.itemsize * int(np.prod(array.shape, dtype=object)):
        raise RefusedError("malformed", f"{len(array.data)} bytes do not make an array of shape {array.shape}")
    return np.frombuffer(array.data, dtype).reshape(array.shape)


def pack_order(order: TrainOrder, terms: bytes | None = None) -> Participate:
    assignment, local = order.assignment, order.local
    return Participate(
        round=order.round,
        model=pack(order.model),
        learning_rate=local.learning_rate,
        epochs=local.epochs,
        batch_size=local.batch_size,
        proximal=local.proximal,
        direction=None if order.direction is None else pack(order.direction),
        accepted_round=order.accepted_round,
        quotas=None if assignment is None else pack(assignment.quotas),
        label_weights=None if assignment is None else pack(assignment.label_weights),
        mass_per_slot=0.0 if assignment is None else assignment.mass_per_slot,
        terms=terms,
    )


def unpack_order(message: Participate) -> TrainOrder:
    assignment = None
    if message.quotas is not None and message.label_weights is not None:
        assignment = Assignment(unpack(message.quotas), unpack(message.label_weights), message.mass_per_slot)
    return TrainOrder(
        round=message.round,
        model=unpack(message.model),
        direction=None if message.direction is None else unpack(message.direction),
        local=LocalTraining(message.learning_rate, message.epochs, message.batch_size, message.proximal),
        accepted_round=message.accepted_round,
        assignment=assignment,
    )


def pack_report(report: Report) -> Reported:
    return Reported(
        round=report.round,
        model=pack(report.model),
        weight=report.weight,
        steps=report.steps,
        samples=report.samples,
        gradient_samples=report.gradient_samples,
        local_gradient=None if report.local_gradient is None else pack(report.local_gradient),
    )


def unpack_report(message: Reported) -> Report:
    return Report(
        round=message.round,
        model=unpack(message.model),
        weight=message.weight,
        steps=message.steps,
        samples=message.samples,
        local_gradient=None if message.local_gradient is None else unpack(message.local_gradient),
        gradient_samples=message.gradient_samples,
    )


def unpack_profile(message: Profiled) -> Profile:
    return Profile(message.capacity, unpack(message.velocity))
