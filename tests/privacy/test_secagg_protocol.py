"""Masks that cancel, whoever drops out; and what each party refuses."""

from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkeep.core.errors import RejectedError

pytest.importorskip("Crypto", reason="needs the privacy extra")
pytest.importorskip("cryptography", reason="needs the privacy extra")

from fedkeep.privacy.secagg.fixed_point import FixedPoint, Words
from fedkeep.privacy.secagg.protocol import (
    AggregationSession,
    Envelopes,
    MaskedWords,
    MaskingDevice,
    OpenedShares,
    PartyKeys,
    Survivors,
    decode,
    encode,
    require_threshold,
)
from tests.privacy.weighting import weighted, weighted_mean

SIZE = 6
DTYPE = np.dtype(np.uint64)


@dataclass
class Session:
    """A sum under way, with all its parties in one place."""

    devices: dict[int, MaskingDevice]
    server: AggregationSession
    envelopes: dict[int, Envelopes]

    def masked(self, device: int, words: Words) -> MaskedWords:
        self.devices[device].words = words.tobytes()
        return self.devices[device].mask(self.envelopes[device].envelopes)

    def unmaskings(self, without: frozenset[int] = frozenset()) -> dict[int, OpenedShares]:
        survivors = self.server.survivors()
        return {d: self.devices[d].unmask(survivors) for d in survivors if d not in without}


def session(
    count: int, threshold: int, *, silent: frozenset[int] = frozenset(), name: bytes = b"run/1"
) -> Session:
    devices = {10 * i: MaskingDevice(10 * i, name, threshold) for i in range(count)}
    server = AggregationSession(name, threshold, SIZE)
    roster = server.open({d: device.keys() for d, device in devices.items()}).keys
    sent = {d: device.share(roster) for d, device in devices.items() if d not in silent}
    return Session(devices, server, server.route(sent))


def words(device: int) -> Words:
    return np.random.default_rng(device).integers(0, 2**64, SIZE, dtype=DTYPE)


def total(devices: list[int]) -> Words:
    summed: Words = np.sum([words(d) for d in devices], axis=0, dtype=DTYPE)
    return summed


@settings(deadline=None, max_examples=25)
@given(st.integers(3, 7), st.data())
def test_the_sum_is_exact_whoever_drops_out_at_whatever_step(
    count: int, data: st.DataObject
) -> None:
    threshold = data.draw(st.integers(count // 2 + 1, count))
    leave = data.draw(st.permutations([10 * i for i in range(count)]))[: count - threshold]
    steps = data.draw(st.lists(st.integers(1, 3), min_size=len(leave), max_size=len(leave)))
    gone = {
        step: frozenset(d for d, s in zip(leave, steps, strict=True) if s == step)
        for step in (1, 2, 3)
    }
    running = session(count, threshold, silent=gone[1])
    present = [d for d in running.envelopes if d not in gone[2]]
    for device in present:
        running.server.receive(device, running.masked(device, words(device)))
    unmasked = running.server.total(running.unmaskings(without=gone[3]))
    np.testing.assert_array_equal(unmasked, total(present))


def test_a_masked_vector_reveals_nothing_of_what_it_hides() -> None:
    zeros = np.zeros(SIZE, DTYPE)
    seen = np.concatenate(
        [np.frombuffer(session(3, 2).masked(0, zeros).words, DTYPE) for _ in range(300)]
    )
    assert abs(seen.mean() / 2**64 - 0.5) < 0.03
    assert len(set(seen.tolist())) > 0.99 * len(seen)


def test_too_many_dropouts_end_the_round_without_a_sum() -> None:
    running = session(5, 4)
    for device in (0, 10, 20):
        running.server.receive(device, running.masked(device, words(device)))
    with pytest.raises(RejectedError, match="too few devices: 3 are left, 4 are needed"):
        running.server.survivors()
    with pytest.raises(RejectedError, match="survivors"):
        running.devices[0].unmask([0, 10, 20])


def test_a_device_never_gives_both_shares_of_another() -> None:
    running = session(3, 2)
    for device in (0, 10, 20):
        running.server.receive(device, running.masked(device, words(device)))
    answer = running.devices[0].unmask([0, 10])
    assert set(answer.own_masks) == {0, 10}
    assert set(answer.masking_keys) == {20}
    with pytest.raises(RejectedError, match="unmasks once"):
        running.devices[0].unmask([0, 10, 20])


def test_a_device_shares_and_masks_once() -> None:
    running = session(3, 2)
    with pytest.raises(RejectedError, match="second sharing"):
        running.devices[0].share({d: device.keys() for d, device in running.devices.items()})
    running.masked(0, words(0))
    with pytest.raises(RejectedError, match="second masking"):
        running.masked(0, words(1))


def kept(device: MaskingDevice) -> MaskingDevice:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(device), type=MaskingDevice)


def test_a_device_restored_between_messages_goes_on_and_does_nothing_twice() -> None:
    running = session(3, 2)
    for device, part in running.devices.items():
        running.devices[device] = kept(part)
        running.server.receive(device, running.masked(device, words(device)))
        running.devices[device] = kept(running.devices[device])
        with pytest.raises(RejectedError, match="second masking"):
            running.masked(device, words(device))
    np.testing.assert_array_equal(running.server.total(running.unmaskings()), total([0, 10, 20]))
    with pytest.raises(RejectedError, match="unmasks once"):
        kept(running.devices[0]).unmask([0, 10, 20])


def test_an_answer_in_the_clear_is_refused_and_the_sum_goes_on() -> None:
    running = session(3, 2)
    with pytest.raises(RejectedError, match="malformed: expected MaskedWords"):
        decode(words(0).tobytes(), MaskedWords)
    for device in (10, 20):
        running.server.receive(device, running.masked(device, words(device)))
    np.testing.assert_array_equal(running.server.total(running.unmaskings()), total([10, 20]))


def test_a_device_answers_questions_of_a_sum_only() -> None:
    running = session(3, 2)
    with pytest.raises(RejectedError, match="malformed: expected a question"):
        decode(encode(running.masked(0, words(0))), PartyKeys | Envelopes | Survivors)


@pytest.mark.parametrize("size", [8, 4 * SIZE])
def test_answers_of_another_size_are_refused(size: int) -> None:
    with pytest.raises(RejectedError, match="wrong form"):
        session(3, 2).server.receive(0, MaskedWords(b"run/1", bytes(size)))


def test_a_stranger_or_a_second_answer_is_refused() -> None:
    running = session(3, 2)
    running.server.receive(0, running.masked(0, words(0)))
    for device in (0, 99):
        with pytest.raises(RejectedError, match="not expected"):
            running.server.receive(device, MaskedWords(b"run/1", words(0).tobytes()))


def test_changed_envelopes_and_shares_are_noticed() -> None:
    running = session(3, 2)
    running.envelopes[0].envelopes[10] = running.envelopes[0].envelopes[10][:-1] + b"?"
    for device in (0, 10, 20):
        running.server.receive(device, running.masked(device, words(device)))
    with pytest.raises(RejectedError, match="does not open"):
        running.devices[0].unmask([0, 10, 20])
    answers = {d: running.devices[d].unmask([0, 10, 20]) for d in (10, 20)}
    answers[10].own_masks[20] = bytes(16)
    with pytest.raises(RejectedError, match="shares that do not fit"):
        running.server.total(answers)


def test_a_roster_with_foreign_keys_is_refused() -> None:
    device, other = MaskingDevice(0, b"s", 2), MaskingDevice(1, b"s", 2)
    with pytest.raises(RejectedError, match="roster"):
        device.share({0: other.keys(), 1: other.keys(), 2: other.keys()})


@pytest.mark.parametrize(("threshold", "count"), [(0, 3), (1, 2), (2, 4), (5, 4), (1, 1)])
def test_thresholds_of_half_or_less_are_refused(threshold: int, count: int) -> None:
    with pytest.raises(RejectedError, match="threshold"):
        require_threshold(threshold, count)


def test_the_weighted_mean_of_estimators_comes_out_of_the_masks() -> None:
    grid = FixedPoint(bound=4.0, summands=3)
    rng = np.random.default_rng(1)
    gradients, rates = rng.normal(size=(3, SIZE - 1)).clip(-1, 1), np.array([1.0, 2.5, 4.0])
    running = session(3, 2)
    for i, device in enumerate(running.devices):
        running.server.receive(
            device, running.masked(device, grid.encode(weighted(gradients[i], rates[i])))
        )
    mean = weighted_mean(grid.decode(running.server.total(running.unmaskings())))
    np.testing.assert_allclose(mean, rates @ gradients / rates.sum(), atol=1e-12)
