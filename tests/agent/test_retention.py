"""Ages under reboots and clocks that are set, and the memory of erased ids."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkeep.agent.retention import DAY, EXACT, AgeClock, ErasedIds
from fedkeep.core.types import State

HOUR = 3600.0
START = 1.8e9


class Device:
    """A device whose true time is known, with a wall clock that errs and reboots that forget the
    boot-time clock.
    """

    def __init__(self, folder: Path) -> None:
        self.true, self.error, self.booted = START, 0.0, START
        self.boots, self.folder = 0, folder
        self.state: State = {}
        self.boot()

    def boot(self) -> None:
        self.boots += 1
        self.booted = self.true
        self.name = self.folder / f"boot-{self.boots}"
        self.name.write_text(f"{self.boots}\n")
        self.start()

    def start(self) -> None:
        """Another process of the same boot, or the first of a new one."""
        self.clock = AgeClock(
            DAY, lambda: self.true + self.error, lambda: self.true - self.booted, self.name
        )
        if self.state:
            self.clock.restore(self.state)

    def stop(self) -> None:
        self.clock.look()
        self.state = self.clock.snapshot()

    def run(self, hours: float) -> None:
        self.true += hours * HOUR
        self.clock.look()


def test_thirty_days_are_thirty_days_of_the_wall_at_eight_hours_a_day(tmp_path: Path) -> None:
    device = Device(tmp_path)
    taken, wall = device.clock.now(), device.clock.wall()
    fired = None
    for day in range(40):
        device.run(8.0)
        device.stop()
        device.true += 16 * HOUR
        device.boot()
        if fired is None and device.clock.age(taken, wall) > 30 * DAY:
            fired = day + 1
    assert fired in (31, 32), "after 30 days and the tolerance of one, at the next start"


def test_seventy_restarts_in_one_boot_forget_nothing(tmp_path: Path) -> None:
    device = Device(tmp_path)
    taken, wall = device.clock.now(), device.clock.wall()
    for _ in range(70):
        device.run(0.01)
        device.stop()
        device.true += HOUR
        device.start()
    assert device.clock.age(taken, wall) == pytest.approx(70 * 1.01 * HOUR)


@pytest.mark.parametrize("ahead", [DAY, -DAY, 0.5 * DAY])
def test_a_clock_wrong_by_a_day_removes_nothing_early(tmp_path: Path, ahead: float) -> None:
    device = Device(tmp_path)
    taken, wall = device.clock.now(), device.clock.wall()
    for _ in range(60):
        device.run(4.0)
        device.stop()
        device.true += 4 * HOUR
        device.error = ahead - device.error
        device.boot()
        true_age = device.true - START
        assert device.clock.age(taken, wall) <= true_age + 1e-6


@given(
    steps=st.lists(
        st.tuples(
            st.floats(0.1, 30), st.floats(0, 400), st.floats(-0.49, 0.49), st.sampled_from("rp")
        ),
        min_size=1,
        max_size=12,
    )
)
@settings(max_examples=150, deadline=None)
def test_an_age_is_never_more_than_true_and_never_much_less(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[float, float, float, str]]
) -> None:
    """Whatever the order of runs, switched-off times, processes and clock errors within the
    tolerance.
    """
    device = Device(tmp_path_factory.mktemp("boots"))
    samples: list[tuple[float, float, float]] = []
    for run, off, error, how in steps:
        device.true += 5.0  # within a second of a step the time that makes a sample younger counts
        samples.append((device.true, device.clock.now(), device.clock.wall()))
        device.run(run)
        device.stop()
        device.true += off * HOUR if how == "r" else 0.0
        device.error = error * DAY
        device.boot() if how == "r" else device.start()
        for born, taken, wall in samples:
            age, true = device.clock.age(taken, wall), device.true - born
            assert age <= true + 1.0
            assert age >= min(true, true - 2 * DAY) - 1.0


def test_a_device_without_a_clock_is_corrected_once_it_knows_the_time(tmp_path: Path) -> None:
    device = Device(tmp_path)
    before = device.clock.now(), device.clock.wall(), device.true
    device.run(1.0)
    device.stop()
    device.true += 20 * DAY
    device.error = -20 * DAY  # it comes up with the time of its last run
    device.boot()
    device.run(0.01)
    early = device.clock.now(), device.clock.wall(), device.true
    device.run(0.1)
    device.error = 0.0  # the time server answers
    device.run(0.01)
    assert device.clock.age(*early[:2]) == pytest.approx(device.true - early[2])
    assert device.clock.age(*before[:2]) < DAY, "not believed at once"
    device.run(1.1)
    assert device.clock.age(*before[:2]) == pytest.approx(device.true - before[2] - DAY)
    device.stop()
    device.true += HOUR
    device.boot()
    assert device.clock.age(*early[:2]) <= device.true - early[2] + 1.0
    assert device.clock.age(*before[:2]) == pytest.approx(device.true - before[2] - DAY)


def test_a_clock_that_was_never_set_says_nothing(tmp_path: Path) -> None:
    device = Device(tmp_path)
    device.error = -START
    device.start()
    taken, wall = device.clock.now(), device.clock.wall()
    device.run(1.0)
    device.stop()
    device.error = 0.0
    device.boot()
    device.run(2.0)
    assert device.clock.age(taken, 0.0) < 60 * 365 * DAY
    assert device.clock.age(taken, wall + 1.0) <= (device.clock.now() - taken)


def test_a_clock_state_of_the_version_before_is_read(tmp_path: Path) -> None:
    device = Device(tmp_path)
    device.run(2.0)
    device.stop()
    device.state = {"seconds": device.state["seconds"][:3], "boot": device.state["boot"]}
    device.start()
    assert device.clock.now() == pytest.approx(2 * HOUR)


@given(
    ids=st.lists(st.integers(0, (1 << 63) - 1), max_size=80),
    spare=st.integers(0, 60),
    cut=st.integers(1, 20),
)
@settings(max_examples=60, deadline=None)
def test_erased_ids_are_known_up_to_the_capacity_and_over_restarts(
    ids: list[int], spare: int, cut: int
) -> None:
    erased = ErasedIds(8 * 16 + 0) if spare == 0 else ErasedIds(8 * EXACT + 4 * spare)
    for start in range(0, len(ids), cut):
        erased.add(ids[start : start + cut])
        again = ErasedIds(8 * 16 + 0) if spare == 0 else ErasedIds(8 * EXACT + 4 * spare)
        again.restore(erased.snapshot())
        erased = again
    latest = list(dict.fromkeys(reversed(ids)))[: erased.capacity]
    assert all(id_ in erased for id_ in latest)
    assert len(erased) <= erased.capacity


def test_ten_thousand_erased_ids_are_refused_and_hardly_another() -> None:
    erased = ErasedIds(45_000)
    assert erased.capacity > 10_000
    ids = np.random.default_rng(0).integers(0, 1 << 62, erased.capacity).tolist()
    assert erased.add(ids) == 0
    again = ErasedIds(45_000)
    again.restore(erased.snapshot())
    assert all(id_ in again for id_ in ids)
    others = np.random.default_rng(1).integers(0, 1 << 62, 200_000).tolist()
    assert sum(id_ in again for id_ in others) <= 5, "10,000 / 2^32 of 200,000 is 0.5"
    assert again.add([7]) == 1
    assert again.snapshot()["marks"].nbytes + again.snapshot()["ids"].nbytes <= 45_000
