"""The store on disk: the same decisions as in memory, still there after a restart, gone when they
should be.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedkeep.agent.cellfile import StoreError
from fedkeep.agent.cells import decode_root
from fedkeep.agent.record import (
    ROW_BYTES,
    SAMPLE,
    DecisionLog,
    SampleForm,
    SampleMetadata,
    Verdict,
    _inflated,
)
from fedkeep.agent.retention import DAY, AgeClock
from fedkeep.agent.store_file import Opened, StoreOptions, copies_of, open_file, plan
from fedkeep.core.errors import ConfigError
from fedkeep.core.protocols import OfferResult, Outcome
from fedkeep.core.seeds import uniform_keys
from fedkeep.core.store import AfterUse, MemoryStore
from fedkeep.core.types import Batch, State
from tests.faults.corruption import LAYOUT as LAYOUT_AT
from tests.faults.corruption import make, open_at
from tests.faults.script import FORM, LAYOUT, REGIONS, Expected, RamDisk, Scripted, samples


def test_it_decides_as_the_memory_store_and_survives_reopening() -> None:
    disk = RamDisk(bytes(LAYOUT.geometry.size))
    run, expected = Scripted(disk), Expected()
    run.format()
    for step in range(60):
        run.commit(wipe=run.advance())
        again = Scripted(disk)
        again.open()
        assert not again.file.damage
        assert again.step == step + 1
        assert again.digest() == run.digest() == expected.after(step + 1)


@pytest.mark.parametrize("rule", ["keep", "discount", "evict_trained_first"])
def test_ranks_after_use_survive_reopening(rule: str) -> None:
    disk = RamDisk(bytes(LAYOUT.geometry.size))

    def opened() -> Scripted:
        return Scripted(
            disk, form=replace(FORM, discounts=rule == "discount"), after_use=AfterUse(rule)
        )  # type: ignore[arg-type]

    run, plain = opened(), MemoryStore(Scripted(disk).quotas, AfterUse(rule))  # type: ignore[arg-type]
    run.format()
    for round_ in range(6):
        for store in (run.store, plain):
            batch = samples(round_ * 20, 20)
            store.offer(batch, batch.y, uniform_keys(3, batch.ids), round_ * 40 + np.arange(20))
            again = samples(round_ * 10, 5)
            store.offer(again, again.y, uniform_keys(4, again.ids), round_ * 40 + 20 + np.arange(5))
            store.mark_used(store.stored().batch.ids)
            store.expire(round_ * 20)
        run.commit()
        run = opened()
        run.open()
        ours, theirs = run.store._index.snapshot(), plain.snapshot()
        for name, array in theirs.items():
            np.testing.assert_array_equal(ours[name], array, err_msg=name)


def test_a_stored_sample_that_comes_again_and_is_refused_leaves_the_file() -> None:
    disk = RamDisk(bytes(LAYOUT.geometry.size))
    run = Scripted(disk)
    run.format()
    batch = samples(0, 8)
    run.store.offer(batch, batch.y, np.ones(8), np.arange(8))
    run.commit()
    run.store.offer(batch.take([3]), batch.y[3:4], np.array([-np.inf]), np.array([8]))
    run.commit()
    again = Scripted(disk)
    again.open()
    assert again.store.stored().batch.ids.tolist() == [0, 1, 2, 4, 5, 6, 7]
    assert len(again.store.notes()) == 7


def test_what_was_erased_is_in_no_file(tmp_path: Path) -> None:
    path = tmp_path / "a.store"
    store = open_at(path)
    for first in range(0, 80, 8):
        batch = samples(first, 8)
        store.offer(batch, batch.y, -batch.ids.astype(np.float64), batch.ids)
        store.commit({})
    held = store.stored().batch
    victims = [held.x[i].tobytes() for i in range(10)]
    assert all(victim in path.read_bytes() for victim in victims)
    assert store.forget(held.ids[:10].tolist(), Verdict.ERASED) == 10
    store.commit({}, wipe=True)
    assert not any(victim in file.read_bytes() for victim in victims for file in tmp_path.iterdir())
    assert held.x[11].tobytes() in path.read_bytes()
    (line,) = store.log.about(int(held.ids[0]))
    assert (line.verdict, line.label, line.score) == ("erased", -1, None)


def options(tmp_path: Path, **changes: object) -> StoreOptions:
    return StoreOptions(
        path=str(tmp_path / "s"), **{"budget": 100_000, "log_length": 64, **changes}
    )  # type: ignore[arg-type]


def opened(
    chosen: StoreOptions, form: SampleForm = FORM, labels: int = REGIONS, state: int = 4_000
) -> Opened:
    return open_file(plan(chosen, form, state), labels)


def test_another_budget_keeps_every_sample_or_says_which_one_would(tmp_path: Path) -> None:
    store = open_at(tmp_path / "s")
    batch = samples(0, 40)
    store.offer(batch, batch.y, uniform_keys(0, batch.ids), batch.ids)
    store.commit({"estimator": np.arange(300.0)})
    store.close()  # type: ignore[attr-defined]
    for budget in (200_000, 90_000):
        found = opened(options(tmp_path, budget=budget))
        assert sum(blob.kind == SAMPLE for blob in found.blobs) == 40
        assert (tmp_path / "s").stat().st_size <= budget
        found.file.disk.close()
    image = (tmp_path / "s").read_bytes()
    with pytest.raises(
        ConfigError, match=r"holds 40 samples .* room for \d+: set it to (\d+)"
    ) as refusal:
        opened(options(tmp_path, budget=66_000))
    assert (tmp_path / "s").read_bytes() == image
    least = int(str(refusal.value).split("set it to ")[1].split()[0])
    opened(options(tmp_path, budget=least)).file.disk.close()
    with pytest.raises(ConfigError, match="set it to"):
        opened(options(tmp_path, budget=least - 4096))


def test_a_store_belongs_to_one_process_and_one_form_of_sample(tmp_path: Path) -> None:
    store = open_at(tmp_path / "s")
    with pytest.raises(StoreError, match="in use by another agent"):
        open_at(tmp_path / "s")
    store.close()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"shape \[24\], not \[25\]"):
        opened(options(tmp_path), SampleForm(np.dtype("<f4"), (25,)))
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600


def test_a_lost_key_is_said_plainly_and_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "key"
    key.write_text("ab" * 32 + "\n")
    key.chmod(0o600)
    sealed = options(tmp_path, key_file=str(key))
    opened(sealed).file.disk.close()
    image = (tmp_path / "s").read_bytes()
    with pytest.raises(ConfigError, match="is encrypted: set key_file or key_env"):
        opened(options(tmp_path))
    monkeypatch.setenv("OTHER_KEY", "cd" * 32)
    with pytest.raises(ConfigError, match="was encrypted under the key"):
        opened(options(tmp_path, key_env="OTHER_KEY"))
    with pytest.raises(ConfigError, match="holds no key"):
        opened(options(tmp_path, key_env="UNSET_KEY"))
    key.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        opened(sealed)
    assert (tmp_path / "s").read_bytes() == image


def filled(path: Path) -> Batch:
    store = open_at(path)
    batch = samples(0, 40)
    store.offer(batch, batch.y, uniform_keys(0, batch.ids), batch.ids)
    store.commit({})
    store.close()  # type: ignore[attr-defined]
    return batch


def test_a_damaged_file_goes_on_and_copies_of_it_are_numbered_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "s"
    batch = filled(path)
    for damaged, (allowed, copies) in enumerate([(0, 0), (250_000, 1), (250_000, 2), (250_000, 2)]):
        image = bytearray(path.read_bytes())
        image[image.index(batch.x[7 + damaged].tobytes())] ^= 1
        path.write_bytes(image)
        found = opened(options(tmp_path, damaged_bytes=allowed))
        assert found.file.damage
        assert sum(blob.kind == SAMPLE for blob in found.blobs) == 39 - damaged
        found.file.discard([])
        found.file.disk.close()
        assert (
            sorted(file.name for file in copies_of(path).values())
            == ["s.damaged-1", "s.damaged-2"][:copies]
        )
    assert copies_of(path)[1].stat().st_mode & 0o777 == 0o600


def test_a_damaged_file_refuses_a_lower_budget_as_a_sound_one_does(tmp_path: Path) -> None:
    path = tmp_path / "s"
    batch = filled(path)
    image = bytearray(path.read_bytes())
    image[image.index(batch.x[7].tobytes())] ^= 1
    path.write_bytes(image)
    with pytest.raises(ConfigError, match="holds 39 samples"):
        opened(options(tmp_path, budget=66_000))
    assert path.read_bytes() == bytes(image)
    assert sum(blob.kind == SAMPLE for blob in opened(options(tmp_path)).blobs) == 39


@pytest.mark.parametrize(
    "content", [b"garbage" * 700_000, bytes(200_000), b"short", b"\x89PNG" + bytes(5000)]
)
def test_a_file_that_is_not_a_store_is_refused_and_not_touched(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "s"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is not a store of fedkeep: left untouched"):
        open_at(path)
    assert path.read_bytes() == content
    assert [file.name for file in tmp_path.iterdir()] == ["s"]


def test_a_file_in_the_way_of_a_new_store_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "s.new").write_text("mine")
    with pytest.raises(ConfigError, match=r"s\.new is in the way"):
        open_at(tmp_path / "s")
    assert (tmp_path / "s.new").read_text() == "mine"


def wipe_roots(path: Path, halves: tuple[int, ...], copies: tuple[int, ...]) -> None:
    geometry, image = LAYOUT_AT.geometry, bytearray(path.read_bytes())
    for half in halves:
        for copy in copies:
            at = geometry.root(half, copy)
            image[at + 20] ^= 1
    path.write_bytes(image)


def test_a_bit_of_a_root_costs_nothing(tmp_path: Path) -> None:
    batch = filled(tmp_path / "s")
    for copy in (0, 1):
        wipe_roots(tmp_path / "s", (0, 1), (copy,))
        store = open_at(tmp_path / "s")
        assert store.stored().batch.ids.tolist() == batch.ids.tolist()
        store.commit({"n": np.array(copy)})
        store.commit({"n": np.array(copy + 10)})
        store.close()  # type: ignore[attr-defined]


def test_a_newest_root_lost_in_both_places_is_said_and_loses_no_sample(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "s"
    batch = filled(path)
    halves = [
        decode_root(path.read_bytes()[LAYOUT_AT.geometry.root(h) :], LAYOUT_AT.geometry.cells)
        for h in (0, 1)
    ]
    newest = 0 if halves[0].sequence > halves[1].sequence else 1  # type: ignore[union-attr]
    wipe_roots(path, (newest,), (0, 1))
    store = open_at(path)
    assert store.stored().batch.ids.tolist() == batch.ids.tolist()
    assert "the newest root is lost: rolled back" in caplog.text
    store.close()  # type: ignore[attr-defined]


def test_a_full_store_that_lost_all_roots_is_salvaged_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "s"
    places = make(path).places
    wipe_roots(path, (0, 1), (0, 1))
    store = open_at(path)
    held = store.stored().batch.ids.tolist()
    assert len(held) == LAYOUT_AT.capacity
    assert len(set(held) & places.keys()) >= 0.9 * len(places)
    batch = samples(90_000, 16)
    store.offer(batch, batch.y, np.full(16, 1e6), 10**6 + np.arange(16))
    store.commit({"estimator": np.zeros(300)})
    store.close()  # type: ignore[attr-defined]
    store = open_at(path)
    assert set(batch.ids.tolist()) <= set(store.stored().batch.ids.tolist())
    store.close()  # type: ignore[attr-defined]


def test_samples_alone_are_committed_without_a_root_and_survive(tmp_path: Path) -> None:
    path = tmp_path / "s"
    store = open_at(path)
    written = 0
    for first in range(0, 6 * LAYOUT_AT.capacity, 8):
        batch = samples(first, 8)
        store.offer(batch, batch.y, batch.ids.astype(np.float64), batch.ids)
        before = store.file.disk.written
        store.commit(None)
        written += store.file.disk.written - before
    held = store.stored().batch
    store.close()  # type: ignore[attr-defined]
    assert written / first < 1.3 * LAYOUT_AT.geometry.cell_size
    again = open_at(path)
    np.testing.assert_array_equal(again.stored().batch.ids, held.ids)
    np.testing.assert_array_equal(again.stored().batch.x, held.x)
    again.close()  # type: ignore[attr-defined]


def test_a_label_lost_at_one_end_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "s"
    open_at(path).close()  # type: ignore[attr-defined]
    sound = path.read_bytes()
    for damaged in (bytes(100) + sound[100:], sound[:-4096] + bytes(4096)):
        path.write_bytes(damaged)
        open_at(path).close()  # type: ignore[attr-defined]
        assert path.read_bytes() == sound


def test_the_age_clock_ignores_wall_clocks_within_tolerance(tmp_path: Path) -> None:
    wall, boot = [1e9], [50.0]
    this, next_ = tmp_path / "boot-1", tmp_path / "boot-2"
    for name in (this, next_):
        name.write_text(f"{name.name}\n")
    clock = AgeClock(DAY, lambda: wall[0], lambda: boot[0], this)
    boot[0] += 100
    wall[0] += 30 * DAY
    assert clock.now() == 100
    state = clock.snapshot()
    boot[0] += 10
    same_boot = AgeClock(DAY, lambda: wall[0] - 40 * DAY, lambda: boot[0], this)
    same_boot.restore(state)
    assert same_boot.now() == 110
    for jump, passed in ((DAY, 0.0), (-DAY, 0.0), (3 * DAY, 2 * DAY)):
        rebooted = AgeClock(DAY, lambda j=jump: wall[0] + j, lambda: 0.0, next_)  # type: ignore[misc]
        rebooted.restore(state)
        assert rebooted.now() == 100 + passed


def test_the_log_is_deflated_and_reads_what_a_version_before_wrote() -> None:
    log = DecisionLog(64, "ode")
    assert log.snapshot().keys() == {"written"}, "a chunk that nothing stands in takes no room"
    for i in range(40):
        log.add(SampleMetadata(i, i, i / 7, wall=1.8e9 + i), Verdict.KEPT)
    taken = log.snapshot()
    assert taken.keys() == {"written", "0", "1"}
    assert sum(taken[name].nbytes for name in "01") < 64 * ROW_BYTES / 3
    before = {name: _inflated(array) for name, array in taken.items() if name != "written"}
    plain: State = {"written": taken["written"]}
    plain |= {name: rows for name, rows in before.items() if rows is not None}
    damaged: State = {**taken, "1": taken["1"][:-9], "0": np.frombuffer(b"nonsense", np.uint8)}
    for state, known in ((taken, [0, 31, 32, 39]), (plain, [0, 31, 32, 39]), (damaged, [])):
        again = DecisionLog(64, "ode")
        again.restore(state)
        assert [i for i in (0, 31, 32, 39) if again.about(i) == log.about(i)] == known
        again.add(SampleMetadata(99, 99, 1.0), Verdict.KEPT)
        once_more = DecisionLog(64, "ode")
        once_more.restore(again.snapshot())
        assert len(once_more.about(99)) == 1, "what was deflated before is not taken for the rest"
    assert DecisionLog(0, "ode").snapshot().keys() == {"written"}


def test_the_log_is_a_ring_and_forgets_on_request() -> None:
    log = DecisionLog(32, "ode")
    for i in range(100):
        log.add(
            SampleMetadata(i, i, 0.5, displaced=i - 50, label=1, model_version=3, wall=float(i)),
            Verdict.KEPT,
        )
    assert [d.id for d in log.about(40)] == [90], "only the one that displaced it is still there"
    assert [d.policy for d in log.about(99)] == ["ode"]
    restored = DecisionLog(32, "ode")
    restored.restore(log.snapshot())
    assert [d.id for d in restored.about(40)] == [90]
    log.forget(np.array([99]))
    assert not log.about(99)
    assert not log.about(49)
    refused = Batch(np.zeros((3, 1)), np.array([0, 1, 2]), np.array([500, 501, 502]))
    outcome = Outcome(
        np.full(3, OfferResult.REFUSED),
        np.full(3, -1),
        np.array([4.0, 5, 6]),
        np.array([1.0, 2, 3]),
    )
    log.add_refusals(refused.y, refused.ids, np.arange(3), outcome, 2, 7.0)
    (line,) = log.about(501)
    assert (line.verdict, line.label, line.score, line.floor) == ("refused", 1, 2.0, 5.0)
