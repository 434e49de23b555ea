"""The queue in front of the agent: bounded, thinning evenly, refusing what is no sample."""

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedkeep.agent.arrivals import Arrival, IngestQueue, OutlierFilter, queue_limit, screen
from fedkeep.agent.record import SampleForm
from fedkeep.agent.sample_ids import SampleIds, sample_id
from tests.agent.builders import arrival, make_agent

FORM = SampleForm(np.dtype(np.float32), (2,))


def overloaded(labels: list[int], limit: int = 64, every: int = 50) -> tuple[Counter[int], int]:
    """How many of each label are valued where one in `every` can be, and how many skipped."""
    intake = IngestQueue(limit, FORM, calm_seconds=0.0, key=b"a key of a test.")
    fates: Counter[str] = Counter()
    valued: Counter[int] = Counter()
    for i, label in enumerate(labels):
        one = Arrival([i, i], label, i, "s", lambda fate: fates.update([fate]))
        assert intake.offer(one, wait=False)
        assert len(intake) <= limit
        if i % every == every - 1:
            valued.update(one.y for one in intake.take(1, 0.0, 0.0))
    while left := intake.take(limit, 0.0, 0.0):
        valued.update(one.y for one in left)
    skipped = intake.counted()["skipped.sample"]
    assert fates == {"skipped": skipped}
    assert valued.total() + skipped == len(labels)
    return valued, skipped


@pytest.mark.parametrize("period", [2, 3, 4, 8, 64, 128])
def test_an_overloaded_queue_values_an_even_sample_of_labels_in_turn(period: int) -> None:
    labels = [i % period % 2 for i in range(60_000)]
    valued, _ = overloaded(labels, every=20)
    count, share = valued.total(), sum(labels) / len(labels)
    # Four standard deviations of a binomial draw.
    assert abs(valued[1] - share * count) < 4 * (share * (1 - share) * count) ** 0.5
    assert count > 2500


@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 400)), min_size=1, max_size=8),
)
def test_in_a_burst_each_arrival_is_as_likely_as_any_other(
    seed: int, runs: list[tuple[int, int]]
) -> None:
    """However a burst is ordered by label, and however long it is, its runs keep their share."""
    labels = [run for run, (_, length) in enumerate(runs) for _ in range(length)]
    kept: Counter[int] = Counter()
    for turn in range(40):
        intake = IngestQueue(64, FORM, key=bytes([seed, turn]))
        for label in labels:
            intake.offer(Arrival([0, 0], label, None, "s"), wait=False)
        kept.update(one.y for one in intake.take(64, 0.0, 0.0))
    total, n = kept.total(), len(labels)
    for run, (_, length) in enumerate(runs):
        share = length / n
        # What is left of a burst is correlated by its last halving: a wide margin is five
        # deviations.
        assert abs(kept[run] - share * total) <= 5 * (share * (1 - share) * total + 1) ** 0.5 + 1


def test_a_burst_that_fits_the_queue_is_valued_whole() -> None:
    intake = IngestQueue(512, FORM)
    for i in range(512):
        intake.offer(Arrival([0, 0], 0, i, "s"), wait=False)
    assert (len(intake), intake.counted()) == (512, {})


def test_dropping_counts_what_came_while_the_queue_was_full() -> None:
    intake = IngestQueue(8, FORM)
    fates: list[str] = []
    for i in range(20):
        intake.offer(Arrival([0, 0], 0, i, "s", fates.append), wait=False, rule="drop")
    assert [one.id for one in intake.take(64, 0.0, 0.0)] == list(range(8))
    assert (fates, intake.counted()) == (["skipped"] * 12, {"skipped.drop": 12})


def test_thinning_never_skips_what_waits() -> None:
    intake = IngestQueue(16, FORM)
    for i in range(12):
        intake.offer(Arrival([0, 0], 0, i, "patient"), wait=True)
    for i in range(500):
        intake.offer(Arrival([0, 0], 1, i, "hasty"), wait=False)
    assert [one.id for one in intake.take(64, 0.0, 0.0) if one.y == 0] == list(range(12))


@pytest.mark.parametrize("rule", ["sample", "drop"])
def test_a_held_queue_makes_everybody_wait(rule: Any) -> None:
    intake = IngestQueue(4, FORM)
    intake.hold(held=True)

    def feed() -> None:
        for i in range(20):
            intake.offer(Arrival([0, 0], 0, i, "s"), wait=False, rule=rule)

    thread = threading.Thread(target=feed)
    thread.start()
    got: list[int] = []
    while len(got) < 20:
        assert len(intake) <= 4
        got += [one.id for one in intake.take(4, 1.0, 0.0)]
    thread.join()
    assert (got, intake.counted()) == (list(range(20)), {})


def test_the_rate_comes_back_when_the_rush_is_over() -> None:
    intake = IngestQueue(32, FORM, calm_seconds=0.0)
    for i in range(500):
        intake.offer(Arrival([0, 0], 0, i, "s"), wait=False)
    assert intake.stride > 1
    while intake.take(32, 0.0, 0.0) or intake.stride > 1:
        pass
    intake.offer(Arrival([0, 0], 0, 501, "s"), wait=False)
    assert len(intake) == 1


@pytest.mark.parametrize(("shape", "limit"), [((2,), 4096), ((192,), 4096), ((1024, 1024), 64)])
def test_the_default_queue_holds_four_megabytes(shape: tuple[int, ...], limit: int) -> None:
    assert queue_limit(SampleForm(np.dtype(np.float32), shape)) == limit


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
    (Arrival([1, 2], 0, [7], "s"), "id"),
    (Arrival([1, 2], 0, float("nan"), "s"), "id"),
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
