"""What crosses the wire comes back bit for bit, or is refused with a reason."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedkeep.core.errors import RejectedError
from fedkeep.core.screening import Limits, screen_report
from fedkeep.core.types import Assignment, LocalTraining, Profile, Report, TrainOrder
from fedkeep.flower import codec
from fedkeep.protocol.messages import (
    DeviceRequest,
    DeviceStats,
    Evaluated,
    Participate,
    Profiled,
    Reported,
    Request,
)
from fedkeep.protocol.wire import from_bytes, to_bytes

MODEL, GRADIENT, REGIONS = 4, 3, 2
_vector = arrays(np.float32, 4, elements=st.floats(width=32))


def _report() -> Report:
    return Report(3, np.arange(4, dtype=np.float32), 2.5, 5, 7, np.ones(3, dtype=np.float32), 11)


@settings(deadline=None)
@given(
    model=_vector,
    direction=st.none() | _vector,
    batch=st.none() | st.integers(1, 9),
    accepted=st.none() | st.integers(0, 9),
)
def test_an_order_survives_the_wire(
    model: np.ndarray, direction: np.ndarray | None, batch: int | None, accepted: int | None
) -> None:
    plan = Assignment(np.array([1, 0, 2]), np.array([0.5, 0.0, 1e300]), 0.25)
    order = TrainOrder(
        7,
        model,
        direction,
        LocalTraining(0.1, 2, batch, 0.01),
        accepted,
        plan if accepted else None,
    )
    back = codec.decode(_over_the_wire(codec.encode(Participate(order))), DeviceRequest).order
    assert back.model.tobytes() == model.tobytes()
    assert (back.direction is None) == (direction is None)
    assert direction is None or (
        back.direction is not None and back.direction.tobytes() == direction.tobytes()
    )
    assert (back.round, back.local, back.accepted_round) == (7, order.local, accepted)
    assert (back.assignment is None) == (order.assignment is None)
    if back.assignment is not None:
        assert back.assignment.quotas.tolist() == [1, 0, 2]
        assert back.assignment.label_weights.tolist() == plan.label_weights.tolist()
        assert back.assignment.mass_per_slot == 0.25


@settings(deadline=None)
@given(gradient=st.none() | arrays(np.float32, 3, elements=st.floats(width=32)), weight=st.floats())
def test_a_report_survives_the_wire(gradient: np.ndarray | None, weight: float) -> None:
    count = 0 if gradient is None else 11
    report = replace(_report(), local_gradient=gradient, gradient_samples=count, weight=weight)
    back = codec.decode_report(_over_the_wire(codec.encode(Reported(report))), MODEL + GRADIENT)
    assert back.model.tobytes() == report.model.tobytes()
    np.testing.assert_equal(back.weight, weight)
    assert (back.local_gradient is None) == (gradient is None)
    assert (back.round, back.steps, back.samples, back.gradient_samples) == (3, 5, 7, count)


def test_a_profile_survives_the_wire() -> None:
    sent = Profile(10, np.array([0.5, 1.5]))
    terms = {"gist.mode": "local"}
    content = _over_the_wire(codec.encode(Profiled(sent, 4, "hall", terms)))
    profile, device, name = codec.decode_profile(content, REGIONS, terms)
    assert (profile.capacity, profile.velocity.tolist()) == (10, [0.5, 1.5])
    assert (device, name) == (4, "hall")
    with pytest.raises(RejectedError, match=r"gist\.mode is 'local' on the device"):
        codec.decode_profile(content, REGIONS, {})


@pytest.mark.parametrize(
    "vitals",
    [
        DeviceStats(3, (1, 2), arrivals=2**63),
        DeviceStats(-1, ()),
        DeviceStats(3, (2**60,)),
        DeviceStats(3, (1, 2), gist=(0.5, np.nan, 3.0, 0.1)),
        DeviceStats(3, (1, 2), epsilon_spent=np.inf),
    ],
)
def test_what_a_record_could_not_hold_is_refused(vitals: DeviceStats) -> None:
    sound = Evaluated(4, 2.0, 3, vitals=DeviceStats(3, (1, 2), gist=(0.5, 0.9, 30.0, 0.1)))
    assert codec.decode_evaluation(codec.encode(sound)) == sound
    with pytest.raises(RejectedError, match="bad-evaluation"):
        codec.decode_evaluation(codec.encode(Evaluated(4, 2.0, 3, vitals=vitals)))


def _part(content: RecordDict, number: int, data: bytes | None) -> RecordDict:
    """The message with another array of that number on the wire."""
    arrays = dict(content.array_records[codec.ARRAYS])
    arrays.pop(str(number), None)
    if data is not None:
        arrays[str(number)] = Array("float32", (4,), "fedkeep.raw", data)
    return RecordDict({codec.ARRAYS: ArrayRecord(arrays), codec.HEAD: content[codec.HEAD]})


def _said(content: RecordDict, name: str, value: object) -> RecordDict:
    """The message with another value in its report; `...` takes it away."""
    said: dict[str, Any] = codec.decode(content, Any)
    said["report"][name] = value
    if value is ...:
        del said["report"][name]
    return codec.encode(said)


def _head(content: RecordDict, head: object) -> RecordDict:
    return RecordDict(
        {
            codec.ARRAYS: content[codec.ARRAYS],
            codec.HEAD: ConfigRecord({"head": head}),  # type: ignore[dict-item]
        }
    )


def _head_of(content: RecordDict) -> bytes:
    head = content.config_records[codec.HEAD]["head"]
    assert isinstance(head, bytes)
    return head


_F = np.float32
_BAD: list[tuple[str, str, Callable[[RecordDict], RecordDict]]] = [
    ("wrong shape", "model-shape", lambda c: _said(c, "model", np.zeros(5, _F))),
    ("broadcastable", "model-shape", lambda c: _said(c, "model", np.zeros((1, 4), _F))),
    ("one number", "model-shape", lambda c: _said(c, "model", np.zeros(1, _F))),
    ("float64", "model-dtype", lambda c: _said(c, "model", np.zeros(4))),
    ("int32", "model-dtype", lambda c: _said(c, "model", np.zeros(4, np.int32))),
    ("a list", "malformed", lambda c: _said(c, "model", [0.0] * 4)),
    ("missing", "malformed", lambda c: _said(c, "model", ...)),
    ("huge", "oversized", lambda c: _said(c, "model", np.zeros(1_000_000, _F))),
    ("extra array", "malformed", lambda c: _said(c, "more", np.zeros(4, _F))),
    ("array that is not there", "malformed", lambda c: _part(c, 1, None)),
    ("array with another name", "wrong-records", lambda c: _part(_part(c, 1, None), 7, b"\0" * 12)),
    ("cut short", "malformed", lambda c: _part(c, 0, b"\0" * 12)),
    ("too long", "malformed", lambda c: _part(c, 0, b"\0" * 20)),
    ("estimator shape", "estimator-shape", lambda c: _said(c, "local_gradient", np.zeros(4, _F))),
    ("estimator of nothing", "missing-array", lambda c: _said(c, "local_gradient", None)),
    ("text weight", "malformed", lambda c: _said(c, "weight", "1")),
    ("bool steps", "malformed", lambda c: _said(c, "steps", True)),
    ("no weight", "malformed", lambda c: _said(c, "weight", ...)),
    ("negative steps", "bad-steps", lambda c: _said(c, "steps", -1)),
    ("another message", "malformed", lambda c: codec.encode(Profiled(Profile(1, np.zeros(2)), 0))),
    ("another version", "version", lambda c: _head(c, b"\0\x09" + _head_of(c)[2:])),
    ("no head", "wrong-records", lambda c: _head(c, "text")),
    ("empty head", "version", lambda c: _head(c, b"")),
    ("damaged head", "malformed", lambda c: _head(c, _head_of(c)[:-3])),
    ("extra record", "wrong-records", lambda c: RecordDict({**c, "more": ConfigRecord({})})),
    ("empty", "wrong-records", lambda c: RecordDict({})),
    (
        "swapped",
        "wrong-records",
        lambda c: RecordDict({codec.ARRAYS: c[codec.HEAD], codec.HEAD: c[codec.ARRAYS]}),
    ),
]


def _receive(content: RecordDict) -> None:
    """Reads a report and screens it, as the server does."""
    report = codec.decode_report(content, MODEL + GRADIENT)
    screen_report(report, np.ones(MODEL, _F), GRADIENT, np.inf, Limits())


@pytest.mark.parametrize(("reason", "spoil"), [pytest.param(r, s, id=n) for n, r, s in _BAD])
def test_a_malformed_report_is_refused(
    reason: str, spoil: Callable[[RecordDict], RecordDict]
) -> None:
    with pytest.raises(RejectedError) as refused:
        _receive(_over_the_wire(spoil(codec.encode(Reported(_report())))))
    assert refused.value.reason == reason


def test_a_shape_that_promises_the_moon_allocates_nothing() -> None:
    told = codec.encode(Reported(_report()))
    moon = _head_of(told).replace(b"\x93\x00\xa3<f4\x91\x04", b"\x93\x00\xa3<f4\x91\x7f")
    assert moon != _head_of(told)
    with pytest.raises(RejectedError, match="16 bytes do not make an array"):
        codec.decode_report(_head(told, moon), MODEL + GRADIENT)


def test_orders_share_their_model() -> None:
    model = np.ones(1000, dtype=np.float32)
    orders = [TrainOrder(0, model, None, LocalTraining(0.1, 1), accepted) for accepted in (None, 3)]
    first, second = (
        c.array_records[codec.ARRAYS]["0"] for c in codec.encode_all(map(Participate, orders))
    )
    assert first.data is second.data


@settings(deadline=None)
@given(payload=st.binary(max_size=200))
def test_no_bytes_on_a_socket_do_more_than_be_refused(payload: bytes) -> None:
    with pytest.raises(RejectedError):
        from_bytes(payload, Request)


def test_a_socket_carries_what_flower_carries() -> None:
    back = from_bytes(to_bytes(Reported(_report())), Reported).report
    assert back.model.tobytes() == _report().model.tobytes()
    assert (back.weight, back.gradient_samples) == (2.5, 11)


def _over_the_wire(content: RecordDict) -> RecordDict:
    """The record after Flower has flattened and rebuilt it."""
    from flwr.common.serde import recorddict_from_proto, recorddict_to_proto

    return recorddict_from_proto(recorddict_to_proto(content))
