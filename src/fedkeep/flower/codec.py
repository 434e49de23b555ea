"""Core values to Flower records and back: exact names, shapes and dtypes, sizes checked before parsing.

One ArrayRecord and one ConfigRecord per message, since each record costs Flower a request of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from types import MappingProxyType
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedkeep.core.errors import RefusedError
from fedkeep.core.types import AnyArray, Assignment, LocalTraining, Profile, Report, TrainOrder, Vector

ARRAYS, VALUES = "fedkeep.arrays", "fedkeep.values"
TERMS, ANSWER = "terms", "answer"
"""Arrays of bytes: the terms of a secure sum beside an order, and whatever else its parties say."""
_NUMPY = "numpy.ndarray"
_HEADER_BYTES = 1024
"""A .npy header is 128 bytes; more than this is no header of ours."""
_MOST = 10**9
"""No device counts further than this in a round."""
_DTYPES: Mapping[str, Any] = {"quotas": np.int64, "label_weights": np.float64, TERMS: np.uint8, ANSWER: np.uint8}
_EMPTY = np.empty(0, dtype=np.float32)


@dataclass(frozen=True)
class Sizes:
    """P, the length of a direction, and the number of regions: all that a well-formed message depends on."""

    model: int
    gradient: int
    regions: int


@dataclass(frozen=True)
class Evaluation:
    """A model on a device's own samples: how many, their losses summed, how many labels were right."""

    samples: int
    loss: float
    correct: int


class OrderEncoder:
    """Encodes the orders of one round; arrays that they share are serialised, and uploaded, once."""

    def __init__(self) -> None:
        self._encoded: dict[int, tuple[AnyArray, Array]] = {}

    def __call__(self, order: TrainOrder) -> RecordDict:
        arrays = {"model": order.model}
        if order.direction is not None:
            arrays["direction"] = order.direction
        content = encode_order(replace(order, model=_EMPTY, direction=None))
        content.array_records[ARRAYS].update({name: self._array(array) for name, array in arrays.items()})
        return content

    def _array(self, array: AnyArray) -> Array:
        if id(array) not in self._encoded:
            self._encoded[id(array)] = (array, Array(np.ascontiguousarray(array)))
        return self._encoded[id(array)][1]


def encode_order(order: TrainOrder) -> RecordDict:
    arrays: dict[str, AnyArray] = {"model": order.model}
    local = order.local
    values: dict[str, Any] = {
        "round": order.round,
        "learning_rate": local.learning_rate,
        "epochs": local.epochs,
        "batch_size": local.batch_size or 0,
        "proximal": local.proximal,
        "accepted_round": -1 if order.accepted_round is None else order.accepted_round,
    }
    if order.direction is not None:
        arrays["direction"] = order.direction
    if order.assignment is not None:
        arrays["quotas"] = order.assignment.quotas
        arrays["label_weights"] = order.assignment.label_weights
        values["mass_per_slot"] = order.assignment.mass_per_slot
    return _encode(arrays, values)


def decode_order(content: RecordDict) -> TrainOrder:
    """The order, as the server of this fleet wrote it; its sizes are taken from the message itself."""
    arrays, values = _records(content)
    required = {"round": int, "learning_rate": float, "epochs": int, "batch_size": int, "proximal": float}
    numbers = _values(values, required | {"accepted_round": int}, optional={"mass_per_slot": float})
    vectors = {name: _declared(name, array) for name, array in arrays.items()}
    _names(vectors, {"model"}, {"direction", "quotas", "label_weights", TERMS})
    assignment = None
    if "quotas" in vectors:
        _names(vectors, {"model", "quotas", "label_weights"}, {"direction", TERMS})
        assignment = Assignment(vectors["quotas"], vectors["label_weights"], numbers["mass_per_slot"])
    accepted = numbers["accepted_round"]
    return TrainOrder(
        round=numbers["round"],
        model=vectors["model"],
        direction=vectors.get("direction"),
        local=LocalTraining(
            numbers["learning_rate"], numbers["epochs"], numbers["batch_size"] or None, numbers["proximal"]
        ),
        accepted_round=None if accepted < 0 else accepted,
        assignment=assignment,
    )


def add_terms(content: RecordDict, terms: bytes) -> RecordDict:
    """The order with the terms of a secure sum: its report is not to be sent, but held for masking."""
    content.array_records[ARRAYS][TERMS] = Array(np.frombuffer(terms, dtype=np.uint8))
    return content


def terms_of(content: RecordDict) -> bytes | None:
    """The terms of the secure sum that an order asks for; None for an order of the usual kind."""
    array = _records(content)[0].get(TERMS)
    return None if array is None else _declared(TERMS, array).tobytes()


def encode_answer(payload: bytes) -> RecordDict:
    """What a party of a secure sum says."""
    return _encode({ANSWER: np.frombuffer(payload, dtype=np.uint8)}, {})


def decode_answer(content: RecordDict, most: int) -> bytes:
    """What a party of a secure sum says in at most that many bytes; a report in the clear is refused as such."""
    arrays, _ = _records(content)
    if "model" in arrays or "local_gradient" in arrays:
        raise RefusedError("answer in the clear", "it was asked to mask its report; what it sent is dropped")
    _names(arrays, {ANSWER}, set())
    if len(arrays[ANSWER].data) > most + _HEADER_BYTES:
        raise RefusedError("answer-size", f"{len(arrays[ANSWER].data)} bytes; at most {most} are expected")
    return _declared(ANSWER, arrays[ANSWER]).tobytes()


def encode_report(report: Report) -> RecordDict:
    arrays: dict[str, AnyArray] = {"model": report.model}
    if report.local_gradient is not None:
        arrays["local_gradient"] = report.local_gradient
    values = {
        "round": report.round,
        "weight": report.weight,
        "steps": report.steps,
        "samples": report.samples,
        "gradient_samples": report.gradient_samples,
    }
    return _encode(arrays, values)


def decode_report(content: RecordDict, sizes: Sizes) -> Report:
    """The report, if names, shapes and dtypes are exactly right; whether it is sound is the core's to say."""
    arrays, values = _records(content)
    _names(arrays, {"model"}, {"local_gradient"})
    kinds = {"round": int, "weight": float, "steps": int, "samples": int, "gradient_samples": int}
    numbers = _values(values, kinds)
    _counts(numbers, "steps", "samples", "gradient_samples")
    gradient = arrays.get("local_gradient")
    if gradient is None and numbers["gradient_samples"]:
        raise RefusedError("missing-array", f"no estimator of {numbers['gradient_samples']} samples")
    return Report(
        model=_exact("model", arrays["model"], (sizes.model,), np.float32),
        local_gradient=None if gradient is None else _exact("estimator", gradient, (sizes.gradient,), np.float32),
        **numbers,
    )


def encode_profile(profile: Profile, device: int) -> RecordDict:
    return _encode({"velocity": profile.velocity}, {"capacity": profile.capacity, "device": device})


def decode_profile(content: RecordDict, sizes: Sizes) -> tuple[Profile, int]:
    """The profile and the device number its sender claims."""
    arrays, values = _records(content)
    _names(arrays, {"velocity"}, set())
    numbers = _values(values, {"capacity": int, "device": int})
    _counts(numbers, "device", "capacity")
    velocity = _exact("velocity", arrays["velocity"], (sizes.regions,), np.float64)
    return Profile(numbers["capacity"], velocity), numbers["device"]


def arrays_of(model: Vector) -> ArrayRecord:
    """The model as Flower keeps results: one array named `model`."""
    return ArrayRecord({"model": Array(np.ascontiguousarray(model))})


def model_of(arrays: ArrayRecord) -> Vector:
    _names(arrays, {"model"}, set())
    return _declared("model", arrays["model"])


def encode_model(model: Vector) -> RecordDict:
    return RecordDict({ARRAYS: arrays_of(model), VALUES: ConfigRecord({})})


def decode_model(content: RecordDict) -> Vector:
    return model_of(_records(content)[0])


def encode_evaluation(evaluation: Evaluation) -> RecordDict:
    return _encode({}, asdict(evaluation))


def decode_evaluation(content: RecordDict) -> Evaluation:
    arrays, values = _records(content)
    _names(arrays, set(), set())
    said = Evaluation(**_values(values, {"samples": int, "loss": float, "correct": int}))
    if not (0 <= said.correct <= said.samples and 0 <= said.loss < np.inf):
        raise RefusedError("bad-evaluation", f"{said.correct} of {said.samples} right, loss {said.loss:g}")
    return said


def content_of(reply: Message) -> RecordDict:
    """What a reply says; an error of the sender's is refused like anything else that is no answer."""
    if reply.has_error():
        raise RefusedError("error", (reply.error.reason or "the node failed")[:300])
    return reply.content


def _encode(arrays: Mapping[str, AnyArray], values: Mapping[str, Any]) -> RecordDict:
    record = ArrayRecord({name: Array(np.ascontiguousarray(array)) for name, array in arrays.items()})
    return RecordDict({ARRAYS: record, VALUES: ConfigRecord(dict(values))})


def _records(content: RecordDict) -> tuple[ArrayRecord, ConfigRecord]:
    arrays, values = content.get(ARRAYS), content.get(VALUES)
    if set(content) != {ARRAYS, VALUES}:
        raise RefusedError("wrong-records", f"expected {ARRAYS} and {VALUES}, got {sorted(content)[:5]}")
    if not isinstance(arrays, ArrayRecord) or not isinstance(values, ConfigRecord):
        raise RefusedError("wrong-records", "a record is not of its kind")
    return arrays, values


def _names(given: Mapping[str, Any], required: set[str], optional: set[str]) -> None:
    if missing := required - set(given):
        raise RefusedError("missing-array", f"no {', '.join(sorted(missing))}")
    if extra := set(given) - required - optional:
        raise RefusedError("extra-array", f"unexpected {', '.join(sorted(extra)[:3])[:80]!r}")


def _values(
    record: ConfigRecord, required: Mapping[str, type], optional: Mapping[str, type] = MappingProxyType({})
) -> dict[str, Any]:
    kinds = {**required, **optional}
    if not set(required) <= set(record) <= set(kinds):
        raise RefusedError("wrong-values", f"expected {sorted(required)}, got {sorted(record)[:9]}")
    for name, value in record.items():
        if type(value) is not kinds[name]:
            raise RefusedError("wrong-type", f"{name} is {type(value).__name__}, not {kinds[name].__name__}")
    return dict(record)


def _counts(numbers: Mapping[str, int], *names: str) -> None:
    for name in names:
        if not 0 <= numbers[name] <= _MOST:
            raise RefusedError(f"bad-{name}", f"{numbers[name]} is not a number from 0 to {_MOST}")


def _declared(name: str, array: Array) -> AnyArray:
    """An array from the fleet's own server, of the one dtype its name stands for."""
    dtype = _DTYPES.get(name, np.float32)
    return _exact(name, array, tuple(array.shape[:1]), dtype)


def _exact(name: str, array: Array, shape: tuple[int, ...], dtype: Any) -> AnyArray:
    """The array, if it is exactly of this shape and dtype; refused by its size before it is parsed."""
    kind = np.dtype(dtype)
    expected = kind.itemsize * int(np.prod(shape))
    if len(array.data) > expected + _HEADER_BYTES:
        raise RefusedError(f"{name}-size", f"{len(array.data)} bytes for an array of {expected}")
    if tuple(array.shape) != shape:
        raise RefusedError(f"{name}-shape", f"expected shape {shape}, got {tuple(array.shape)[:5]}")
    if array.dtype != kind.name or array.stype != _NUMPY:
        raise RefusedError(f"{name}-dtype", f"expected {kind.name} as {_NUMPY}, got {array.dtype[:20]!r}")
    return _parse(name, array.data, shape, kind)


def _parse(name: str, data: bytes, shape: tuple[int, ...], kind: np.dtype[Any]) -> AnyArray:
    """The numbers behind a .npy header that says the same as the record; numpy would believe any header."""
    stream = BytesIO(data)
    try:
        version = np.lib.format.read_magic(stream)
        if version != (1, 0):
            raise ValueError(f"version {version}")
        said_shape, _, said_kind = np.lib.format.read_array_header_1_0(stream)
    except ValueError as error:
        raise RefusedError(f"{name}-header", str(error)[:100]) from error
    if said_shape != shape or said_kind != kind.newbyteorder("<"):
        raise RefusedError(f"{name}-header", f"the bytes hold {said_kind} {said_shape}")
    body = data[stream.tell() :]
    if len(body) != kind.itemsize * int(np.prod(shape)):
        raise RefusedError(f"{name}-size", f"{len(body)} bytes of numbers")
    return np.frombuffer(body, dtype=kind.newbyteorder("<")).reshape(shape).astype(kind)
