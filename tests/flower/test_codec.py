"""What crosses the wire comes back bit for bit, or is refused with a reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedkeep.core.errors import RefusedError
from fedkeep.core.types import Assignment, LocalTraining, Profile, Report, TrainOrder
from fedkeep.flower import codec

SIZES = codec.Sizes(model=4, gradient=3, regions=2)
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
    order = TrainOrder(7, model, direction, LocalTraining(0.1, 2, batch, 0.01), accepted, plan if accepted else None)
    back = codec.decode_order(_over_the_wire(codec.encode_order(order)))
    assert back.model.tobytes() == model.tobytes()
    assert (back.direction is None) == (direction is None)
    assert direction is None or (back.direction is not None and back.direction.tobytes() == direction.tobytes())
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
    back = codec.decode_report(_over_the_wire(codec.encode_report(report)), SIZES)
    assert back.model.tobytes() == report.model.tobytes()
    np.testing.assert_equal(back.weight, weight)
    assert (back.local_gradient is None) == (gradient is None)
    assert (back.round, back.steps, back.samples, back.gradient_samples) == (3, 5, 7, count)


def test_a_profile_survives_the_wire() -> None:
    sent = Profile(10, np.array([0.5, 1.5]))
    profile, device = codec.decode_profile(_over_the_wire(codec.encode_profile(sent, 4)), SIZES)
    assert (profile.capacity, profile.velocity.tolist(), device) == (10, [0.5, 1.5], 4)


def _array(content: RecordDict, name: str, array: Array | None) -> RecordDict:
    record = ArrayRecord(dict(content.array_records[codec.ARRAYS]))
    record.pop(name, None)
    if array is not None:
        record[name] = array
    return RecordDict({codec.ARRAYS: record, codec.VALUES: content[codec.VALUES]})


def _value(content: RecordDict, name: str, value: float | str | None) -> RecordDict:
    record = ConfigRecord(dict(content.config_records[codec.VALUES]))
    record.pop(name, None)
    if value is not None:
        record[name] = value
    return RecordDict({codec.ARRAYS: content[codec.ARRAYS], codec.VALUES: record})


def _lying(shape: tuple[int, ...]) -> Array:
    """Says one shape in the record and another in the bytes."""
    return Array("float32", shape, "numpy.ndarray", Array(np.zeros(1, np.float32)).data)


_F = np.float32
_BAD: list[tuple[str, str, Callable[[RecordDict], RecordDict]]] = [
    ("wrong shape", "model-shape", lambda c: _array(c, "model", Array(np.zeros(5, _F)))),
    ("broadcastable", "model-shape", lambda c: _array(c, "model", Array(np.zeros((1, 4), _F)))),
    ("one number", "model-shape", lambda c: _array(c, "model", Array(np.zeros(1, _F)))),
    ("no shape", "model-shape", lambda c: _array(c, "model", Array(np.zeros((), _F)))),
    ("missing", "missing-array", lambda c: _array(c, "model", None)),
    ("extra", "extra-array", lambda c: _array(c, "more", Array(np.zeros(4, _F)))),
    ("float64", "model-dtype", lambda c: _array(c, "model", Array(np.zeros(4)))),
    ("int32", "model-dtype", lambda c: _array(c, "model", Array(np.zeros(4, np.int32)))),
    ("huge", "model-size", lambda c: _array(c, "model", Array(np.zeros(1_000_000, _F)))),
    ("lying record", "model-header", lambda c: _array(c, "model", _lying((4,)))),
    (
        "no header",
        "model-header",
        lambda c: _array(c, "model", Array("float32", (4,), "numpy.ndarray", b"x" * 16)),
    ),
    (
        "cut short",
        "model-size",
        lambda c: _array(c, "model", Array("float32", (4,), "numpy.ndarray", Array(np.zeros(4, _F)).data[:-4])),
    ),
    ("other stype", "model-dtype", lambda c: _array(c, "model", Array("float32", (4,), "pickle", b""))),
    ("estimator shape", "estimator-shape", lambda c: _array(c, "local_gradient", Array(np.zeros(4, _F)))),
    ("text weight", "wrong-type", lambda c: _value(c, "weight", "1")),
    ("int weight", "wrong-type", lambda c: _value(c, "weight", 1)),
    ("bool steps", "wrong-type", lambda c: _value(c, "steps", True)),
    ("no weight", "wrong-values", lambda c: _value(c, "weight", None)),
    ("extra value", "wrong-values", lambda c: _value(c, "more", 1.0)),
    ("extra record", "wrong-records", lambda c: RecordDict({**c, "more": ConfigRecord({})})),
    ("empty", "wrong-records", lambda c: RecordDict({})),
    (
        "swapped",
        "wrong-records",
        lambda c: RecordDict({codec.ARRAYS: c[codec.VALUES], codec.VALUES: c[codec.ARRAYS]}),
    ),
]


@pytest.mark.parametrize(("reason", "spoil"), [pytest.param(r, s, id=n) for n, r, s in _BAD])
def test_a_malformed_report_is_refused(reason: str, spoil: Callable[[RecordDict], RecordDict]) -> None:
    with pytest.raises(RefusedError) as refused:
        codec.decode_report(_over_the_wire(spoil(codec.encode_report(_report()))), SIZES)
    assert refused.value.reason == reason


def test_a_header_that_promises_the_moon_allocates_nothing() -> None:
    header = np.lib.format.header_data_from_array_1_0(np.zeros(4, _F)) | {"shape": (10**13,)}
    from io import BytesIO

    stream = BytesIO()
    np.lib.format.write_array_header_1_0(stream, header)
    moon = Array("float32", (4,), "numpy.ndarray", stream.getvalue() + b"\0" * 16)
    with pytest.raises(RefusedError, match="model-header"):
        codec.decode_report(_array(codec.encode_report(_report()), "model", moon), SIZES)


def _over_the_wire(content: RecordDict) -> RecordDict:
    """The record after Flower has flattened and rebuilt it."""
    from flwr.common.serde import recorddict_from_proto, recorddict_to_proto

    return recorddict_from_proto(recorddict_to_proto(content))
