"""The queue in front of the agent: bounded, thinning evenly, refusing what is no sample."""

import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedkeep.agent.arrivals import Arrival, IngestQueue, OutlierFilter, screen
from fedkeep.agent.record import SampleForm
from fedkeep.agent.sample_ids import SampleIds, exact_id, sample_id
from tests.agent.builders import arrival, make_agent

FORM = SampleForm(np.dtype(np.float32), (2,))


def test_an_overloaded_queue_stays_bounded_and_takes_an_even_sample() -> None:
    intake = IngestQueue(64, FORM, calm_seconds=0.0)
    fates: Counter[str] = Counter()
    for i in range(5000):
        intake.offer(Arrival([i, i], 0, i, "s", lambda fate: fates.update([fate])), wait=False)
        assert len(intake) <= 64
        if i % 50 == 49:
            intake.take(1, 0.0, 0.0)
    assert intake.stride > 8
    skipped = intake.counted()["skipped.overload"]
    assert fates == {"skipped": skipped}
    kept = [a.id for a in intake.take(64, 0.0, 0.0)]
    gaps = np.diff(kept)
    assert (gaps > 0).all()
    assert intake.counted() == {}


def test_the_stride_halves_when_the_rush_is_over() -> None:
    intake = IngestQueue(32, FORM, calm_seconds=0.0)
    for i in range(500):
        intake.offer(Arrival([0, 0], 0, i, "s"), wait=False)
    assert intake.stride > 1
    while intake.take(32, 0.0, 0.0) or intake.stride > 1:
        pass
    intake.offer(Arrival([0, 0], 0, 501, "s"), wait=False)
    assert len(intake) == 1


def test_a_waiting_source_is_held_back_and_loses_nothing() -> None:
    intake = IngestQueue(8, FORM)
    got: list[int] = []

    def feed() -> None:
        for i in range(100):
            intake.offer(Arrival([0, 0], 0, i, "s"), wait=True)

    thread = threading.Thread(target=feed)
    thread.start()
    while len(got) < 100:
        batch = intake.take(5, 1.0, 0.0)
        assert len(batch) <= 5
        got += [a.id for a in batch]
    thread.join()
    assert got == list(range(100))


def test_a_stopped_queue_lets_its_sources_go_and_answers_for_nothing() -> None:
    intake = IngestQueue(8, FORM)
    intake.stop()
    fates: list[str] = []
    intake.offer(Arrival([0, 0], 0, 1, "s", fates.append), wait=True)
    assert fates == []
    assert intake.counted() == {}


@given(
    st.one_of(st.none(), st.integers(), st.text(), st.floats(allow_nan=False)),
    st.binary(min_size=1),
)
def test_every_sample_has_a_number(given_id: object, content: bytes) -> None:
    number = sample_id(given_id, content)
    assert 0 <= number < 1 << 63
    assert number == sample_id(given_id, content)


def test_names_and_numbers_agree_however_they_are_written() -> None:
    assert sample_id("17", b"") == sample_id(17, b"x") == 17
    assert sample_id("a", b"") != sample_id("b", b"")
    assert sample_id(None, b"one") != sample_id(None, b"two")


BAD = [
    (Arrival([1.0], 0, 1, "s"), "shape"),
    (Arrival("text", 0, 1, "s"), "shape"),
    (Arrival([[1, 2], [3]], 0, 1, "s"), "shape"),
    (Arrival([1, "two"], 0, 1, "s"), "shape"),
    (Arrival([1, None], 0, 1, "s"), "shape"),
    (Arrival([1, 2], 3, 1, "s"), "label"),
    (Arrival([1, 2], -1, 1, "s"), "label"),
    (Arrival([1, 2], 1.5, 1, "s"), "label"),
    (Arrival([1, 2], float("nan"), 1, "s"), "label"),
    (Arrival([1, 2], "cat", 1, "s"), "label"),
    (Arrival([1, 2], True, 1, "s"), "label"),
    (Arrival([1, 2], None, 1, "s"), "label"),
    (Arrival([1, float("nan")], 0, 1, "s"), "not-finite"),
    (Arrival([1, float("inf")], 0, 1, "s"), "not-finite"),
    (Arrival([1, 1e39], 0, 1, "s"), "not-finite"),
    (Arrival([1, 2], 0, 9, "s"), "erased"),
]


@pytest.mark.parametrize(
    ("bad", "reason"), BAD, ids=lambda value: value if isinstance(value, str) else ""
)
def test_what_is_no_sample_is_refused_by_its_reason(bad: Arrival, reason: str) -> None:
    intake = IngestQueue(8, FORM)
    good = Arrival([1, 2], 2.0, 5, "s")
    for one in (bad, good):
        intake.offer(one, wait=True)
    batch, sound, refused = screen(
        intake.take(2, 0.0, 0.0),
        FORM,
        3,
        frozenset({9}),
        OutlierFilter(1e6, 0.0),
        SampleIds({"s": "s"}),
        {},
    )
    assert [(a, r) for a, r in refused] == [(bad, reason)]
    assert sound == [good]
    assert batch.y.tolist() == [2]
    assert batch.ids.tolist() == [5]


def test_the_agent_counts_refusals_and_values_the_rest(tmp_path: Path) -> None:
    assembly = make_agent(tmp_path, store={"commit_ms": 10_000})
    agent = assembly.agent
    fates: list[str] = []
    for one in [arrival(1), Arrival([1.0], 0, 2, "s"), Arrival([0.0] * 6, 7, 3, "s"), arrival(4)]:
        one.acknowledge = fates.append
        agent.intake.offer(one, wait=True)
    agent.step(0.0)
    assert fates == []
    agent.commit()
    assert sorted(fates) == ["kept", "kept", "refused.label", "refused.shape"]
    counts = agent.counters.counts()
    assert (counts["seen"], counts["kept"], counts["refused.label"], counts["refused.shape"]) == (
        4,
        2,
        1,
        1,
    )
    assembly.disk.close()
