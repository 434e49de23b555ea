"""The store on disk: the same decisions as in memory, still there after a restart, gone when they should be."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from fedkeep.agent.audit import Decision, DecisionLog, Verdict
from fedkeep.agent.cells import FORMAT, Cell
from fedkeep.agent.clock import DAY, AgeClock
from fedkeep.agent.disk import StoreError
from fedkeep.agent.opening import StoreOptions, open_file, plan, set_aside_path
from fedkeep.agent.record import SAMPLE
from fedkeep.core.errors import ConfigError
from fedkeep.core.seeds import uniform_keys
from fedkeep.core.store import AfterUse, MemoryStore
from fedkeep.core.types import Batch
from tests.faults.corruption import open_at
from tests.faults.script import FORM, LAYOUT, Expected, RamDisk, Scripted, samples


def test_it_decides_as_the_memory_store_and_survives_reopening() -> None:
    disk = RamDisk(bytes(LAYOUT.geometry.size))
    run, expected = Scripted(disk), Expected()
    run.format()
    for step in range(60):
        run.commit(wipe=run.advance())
        again = Scripted(disk)
        assert not again.open().damage
        assert again.step == step + 1
        assert again.digest() == run.digest() == expected.after(step + 1)


@pytest.mark.parametrize("rule", ["keep", "discount", "renew"])
def test_ranks_after_use_survive_reopening(rule: str) -> None:
    disk = RamDisk(bytes(LAYOUT.geometry.size))

    def opened() -> Scripted:
        run = Scripted(disk)
        run.store._index = MemoryStore(run.quotas, AfterUse(rule))  # type: ignore[arg-type]
        return run

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
    assert (line.verdict, line.label) == (Verdict.ERASED, -1)
    assert np.isnan(line.score)


def test_a_file_of_the_previous_format_is_still_read() -> None:
    disk = RamDisk(bytes(LAYOUT.geometry.size))
    run = Scripted(disk)
    run.format()
    run.commit(wipe=run.advance())
    _rewrite_as_format_1(disk)
    old = Scripted(disk)
    assert not old.open().damage
    assert old.digest() == run.digest()
    assert {note.source for note in old.store.notes()} == {""}
    old.commit(wipe=old.advance())
    mixed = Scripted(disk)
    mixed.open()
    assert mixed.digest() == old.digest()


def _rewrite_as_format_1(disk: RamDisk) -> None:
    """Takes the fields that format 2 added out of every sample, as a store of format 1 was written."""
    from fedkeep.agent.cells import decode_cell
    from fedkeep.agent.record import _ADDED, _FIRST

    geometry = LAYOUT.geometry
    for index in range(geometry.cells):
        at = geometry.cell(index)
        cell = decode_cell(bytes(disk.image[at : at + geometry.cell_size]))
        if cell is not None and cell.kind == SAMPLE:
            data = cell.data[: _FIRST.size] + cell.data[_FIRST.size + _ADDED.size :]
            old = Cell(cell.kind, cell.blob, cell.part, cell.parts, cell.sequence, data, version=FORMAT - 1)
            disk.image[at : at + geometry.cell_size] = old.encode().ljust(geometry.cell_size, b"\0")


def options(tmp_path: Path, **changes: object) -> StoreOptions:
    return StoreOptions(path=str(tmp_path / "s"), **{"budget": 100_000, "log_length": 64, **changes})  # type: ignore[arg-type]


def test_another_budget_keeps_the_samples(tmp_path: Path) -> None:
    store = open_at(tmp_path / "s")
    batch = samples(0, 40)
    store.offer(batch, batch.y, uniform_keys(0, batch.ids), batch.ids)
    store.commit({"estimator": np.arange(300.0)})
    store.close()  # type: ignore[attr-defined]
    larger = options(tmp_path, budget=200_000)
    _, contents, disk = open_file(larger, FORM, plan(larger, FORM, 4_000).geometry)
    assert sum(blob.kind == SAMPLE for blob in contents.blobs) == 40
    assert (tmp_path / "s").stat().st_size <= 200_000
    disk.close()
    smaller = options(tmp_path, budget=40_000, log_length=0)
    _, contents, disk = open_file(smaller, FORM, plan(smaller, FORM, 100).geometry)
    assert 0 < sum(blob.kind == SAMPLE for blob in contents.blobs) <= 40
    assert (tmp_path / "s").stat().st_size <= 40_000
    disk.close()


def test_a_store_belongs_to_one_process_and_one_form_of_sample(tmp_path: Path) -> None:
    store = open_at(tmp_path / "s")
    with pytest.raises(StoreError, match="in use by another agent"):
        open_at(tmp_path / "s")
    store.close()  # type: ignore[attr-defined]
    from fedkeep.agent.form import SampleForm

    wrong = SampleForm(np.dtype("<f4"), (25,))
    with pytest.raises(StoreError, match=r"shape \[24\], not \[25\]"):
        open_file(options(tmp_path), wrong, plan(options(tmp_path), wrong, 4_000).geometry)
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600


def test_a_lost_key_is_said_plainly_and_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = tmp_path / "key"
    key.write_text("ab" * 32 + "\n")
    sealed = options(tmp_path, key_file=str(key))
    geometry = plan(sealed, FORM, 4_000).geometry
    _, _, disk = open_file(sealed, FORM, geometry)
    disk.close()
    image = (tmp_path / "s").read_bytes()
    with pytest.raises(StoreError, match="is encrypted: set key_file or key_env"):
        open_file(options(tmp_path), FORM, geometry)
    monkeypatch.setenv("OTHER_KEY", "cd" * 32)
    with pytest.raises(StoreError, match="was encrypted under the key"):
        open_file(options(tmp_path, key_env="OTHER_KEY"), FORM, geometry)
    with pytest.raises(ConfigError, match="holds no key"):
        open_file(options(tmp_path, key_env="UNSET_KEY"), FORM, geometry)
    key.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        open_file(sealed, FORM, geometry)
    assert (tmp_path / "s").read_bytes() == image


def test_a_damaged_file_is_set_aside_once_and_the_store_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "s"
    store = open_at(path)
    batch = samples(0, 40)
    store.offer(batch, batch.y, uniform_keys(0, batch.ids), batch.ids)
    store.commit({})
    store.close()  # type: ignore[attr-defined]
    image = bytearray(path.read_bytes())
    start = image.index(batch.x[7].tobytes())
    image[start] ^= 1
    path.write_bytes(image)
    for expected in (39, 39):
        store = open_at(path)
        assert len(store) == expected
        store.commit({"n": np.array(1)})
        store.close()  # type: ignore[attr-defined]
    assert set_aside_path(path).read_bytes() == bytes(image)
    shutil.copyfile(path, tmp_path / "copy")
    path.write_bytes(b"garbage" * 1000)
    assert len(open_at(path)) == 0


def test_a_label_lost_at_one_end_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "s"
    open_at(path).close()  # type: ignore[attr-defined]
    sound = path.read_bytes()
    for damaged in (bytes(100) + sound[100:], sound[:-4096] + bytes(4096)):
        path.write_bytes(damaged)
        open_at(path).close()  # type: ignore[attr-defined]
        assert path.read_bytes() == sound


def test_the_age_clock_ignores_wall_clocks_within_tolerance() -> None:
    wall, boot = [1e9], [50.0]
    clock = AgeClock(DAY, lambda: wall[0], lambda: boot[0], lambda: "boot-1")
    boot[0] += 100
    wall[0] += 30 * DAY
    assert clock.now() == 100
    state = clock.snapshot()
    boot[0] += 10
    same_boot = AgeClock(DAY, lambda: wall[0] - 40 * DAY, lambda: boot[0], lambda: "boot-1")
    same_boot.restore(state)
    assert same_boot.now() == 110
    for jump, passed in ((DAY, 0.0), (-DAY, 0.0), (3 * DAY, 2 * DAY)):
        rebooted = AgeClock(DAY, lambda j=jump: wall[0] + j, lambda: 0.0, lambda: "boot-2")  # type: ignore[misc]
        rebooted.restore(state)
        assert rebooted.now() == 100 + passed


def test_the_log_is_a_ring_and_forgets_on_request() -> None:
    log = DecisionLog(32, "ode")
    for i in range(100):
        log.add(Decision(i, i, 1, Verdict.KEPT, 0.5, np.nan, i - 50, 3, float(i), ""))
    assert [d.id for d in log.about(40)] == [90], "only the one that displaced it is still there"
    assert [d.policy for d in log.about(99)] == ["ode"]
    restored = DecisionLog(32, "ode")
    restored.restore(log.snapshot())
    assert [d.id for d in restored.about(40)] == [90]
    log.forget(np.array([99]))
    assert not log.about(99)
    assert not log.about(49)
    refused = Batch(np.zeros((3, 1)), np.array([0, 1, 2]), np.array([500, 501, 502]))
    log.add_refusals(refused, np.arange(3), np.array([1.0, 2, 3]), np.array([4.0, 5, 6]), 2, 7.0)
    (line,) = log.about(501)
    assert (line.verdict, line.label, line.score, line.floor) == (Verdict.REFUSED, 1, 2.0, 5.0)
