"""Fourteen kinds of bad update, on each of model, estimator and profile, through Flower's own messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict

from fedkeep.flower import codec
from tests.flower.small_fleet import App

Part = Literal["model", "estimator", "profile"]
PARTS: tuple[Part, ...] = ("model", "estimator", "profile")
Arrays = dict[str, np.ndarray]
Values = dict[str, float]

ARRAY = {"model": "model", "estimator": "local_gradient", "profile": "velocity"}
WEIGHT = {"model": "weight", "estimator": "gradient_samples", "profile": "velocity"}


def _fill(value: float) -> Callable[[Arrays, Values, Part], None]:
    def spoil(arrays: Arrays, values: Values, part: Part) -> None:
        arrays[ARRAY[part]] = np.full_like(arrays[ARRAY[part]], value)

    return spoil


def _weigh(value: float) -> Callable[[Arrays, Values, Part], None]:
    """A lying weight: of the report, of the estimator's samples, or of the declared rate."""

    def spoil(arrays: Arrays, values: Values, part: Part) -> None:
        if part == "profile":
            arrays["velocity"] = np.full_like(arrays["velocity"], value)
        elif part == "estimator" and np.isfinite(value):
            values["gradient_samples"] = int(value)
        else:
            values[WEIGHT[part]] = value

    return spoil


def _longer(arrays: Arrays, values: Values, part: Part) -> None:
    arrays[ARRAY[part]] = np.append(arrays[ARRAY[part]], arrays[ARRAY[part]][:1])


def _broadcastable(arrays: Arrays, values: Values, part: Part) -> None:
    arrays[ARRAY[part]] = arrays[ARRAY[part]][None, :1]


def _missing(arrays: Arrays, values: Values, part: Part) -> None:
    del arrays[ARRAY[part]]


def _extra(arrays: Arrays, values: Values, part: Part) -> None:
    arrays[f"{ARRAY[part]}_2"] = arrays[ARRAY[part]]


def _dtype(arrays: Arrays, values: Values, part: Part) -> None:
    arrays[ARRAY[part]] = arrays[ARRAY[part]].astype(np.float16)


def _huge(arrays: Arrays, values: Values, part: Part) -> None:
    arrays[ARRAY[part]] = np.zeros(1_000_000, dtype=arrays[ARRAY[part]].dtype)


FAULTS: dict[str, Callable[[Arrays, Values, Part], None]] = {
    "nan": _fill(np.nan),
    "inf": _fill(np.inf),
    "1e30": _fill(1e30),
    "zeros": _fill(0.0),
    "wrong-shape": _longer,
    "broadcastable": _broadcastable,
    "missing": _missing,
    "extra": _extra,
    "dtype": _dtype,
    "huge-payload": _huge,
    "negative-weight": _weigh(-1e6),
    "huge-weight": _weigh(1e12),
    "nan-weight": _weigh(np.nan),
}
"""And `duplicate`, which `spoiled` does itself: an old report again, or another device's number."""


def spoiled(app: App, fault: str, part: Part) -> App:
    """The app of a device that sends this fault instead of each of its honest answers."""
    kind = "query.profile" if part == "profile" else "train"
    first: list[RecordDict] = []

    def run(message: Message, context: Context) -> Message:
        reply = app(message, context)
        if message.metadata.message_type != kind:
            return reply
        arrays = {name: array.numpy() for name, array in reply.content.array_records[codec.ARRAYS].items()}
        values = dict(reply.content.config_records[codec.VALUES])
        if part == "estimator" and "local_gradient" not in arrays:
            return reply
        if fault == "duplicate":
            first.append(reply.content)
            values = values | {"device": 0} if part == "profile" else dict(first[0].config_records[codec.VALUES])
        else:
            FAULTS[fault](arrays, values, part)  # type: ignore[arg-type]
        record = ArrayRecord({name: Array(array) for name, array in arrays.items()})
        return Message(RecordDict({codec.ARRAYS: record, codec.VALUES: ConfigRecord(values)}), reply_to=message)

    return run
