"""Fourteen kinds of bad update, on model, estimator and profile, through Flower's own messages."""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from flwr.app import Context, Message

from fedkeep.flower import codec
from tests.flower.small_fleet import App

Part = Literal["model", "estimator", "profile"]
PARTS: tuple[Part, ...] = ("model", "estimator", "profile")
Told = dict[str, Any]
"""A report or profile as it is on the wire."""

ARRAY = {"model": "model", "estimator": "local_gradient", "profile": "velocity"}
WEIGHT = {"model": "weight", "estimator": "gradient_samples", "profile": "velocity"}


def _fill(value: float) -> Callable[[Told, Part], None]:
    def spoil(told: Told, part: Part) -> None:
        told[ARRAY[part]] = np.full_like(told[ARRAY[part]], value)

    return spoil


def _weigh(value: float) -> Callable[[Told, Part], None]:
    """A lying weight: of the report, of the estimator's samples, or of the declared rate."""

    def spoil(told: Told, part: Part) -> None:
        if part == "profile":
            told["velocity"] = np.full_like(told["velocity"], value)
        elif part == "estimator" and np.isfinite(value):
            told["gradient_samples"] = int(value)
        else:
            told[WEIGHT[part]] = value

    return spoil


def _longer(told: Told, part: Part) -> None:
    told[ARRAY[part]] = np.append(told[ARRAY[part]], told[ARRAY[part]][:1])


def _broadcastable(told: Told, part: Part) -> None:
    told[ARRAY[part]] = told[ARRAY[part]][None, :1]


def _missing(told: Told, part: Part) -> None:
    del told[ARRAY[part]]


def _extra(told: Told, part: Part) -> None:
    told[f"{ARRAY[part]}_2"] = told[ARRAY[part]]


def _dtype(told: Told, part: Part) -> None:
    told[ARRAY[part]] = told[ARRAY[part]].astype(np.float16)


def _huge(told: Told, part: Part) -> None:
    told[ARRAY[part]] = np.zeros(1_000_000, dtype=told[ARRAY[part]].dtype)


FAULTS: dict[str, Callable[[Told, Part], None]] = {
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
    first: list[dict[str, Any]] = []

    def run(message: Message, context: Context) -> Message:
        reply = app(message, context)
        if message.metadata.message_type != kind:
            return reply
        said: dict[str, Any] = codec.decode(reply.content, Any)
        told = said["profile" if part == "profile" else "report"]
        if part == "estimator" and told["local_gradient"] is None:
            return reply
        if fault == "duplicate" and part == "profile":
            said["device"] = 0
        elif fault == "duplicate":
            first.append(said)
            said = first[0]
        else:
            FAULTS[fault](told, part)
        return Message(codec.encode(said), reply_to=message)

    return run
