"""What the store promises of budgets, erasure, keys, duplicates and the file under it: at its
bytes.
"""

import errno
import gzip
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.block_device import block_device
from fedkeep.agent.arrivals import Arrival
from fedkeep.agent.cellfile import FileDisk, StoreError
from fedkeep.agent.retention import DAY
from fedkeep.core.errors import ConfigError
from tests.agent.builders import arrival, assembled, config_table, feed, make_agent
from tests.agent.test_store_commands import ask, held_by
from tests.faults.power_loss import RecordingDisk
from tests.faults.script import LAYOUT, RamDisk, Scripted, samples

DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize("name", ["plain", "int8", "full"])
def test_a_store_of_the_version_before_opens_with_all_it_held(tmp_path: Path, name: str) -> None:
    image = gzip.decompress((DATA / f"format-4-{name}.store.gz").read_bytes())
    (tmp_path / "a.store").write_bytes(image)
    tables: dict[str, Any] = {"int8": {"store": {"encoding": "int8"}}}.get(name, {})
    tables |= {"policy": {"name": "balanced-reservoir"}} if name == "full" else {}
    held, total, erased = {
        "plain": (12, 7.0311126708984375, [21, 37, 45]),
        "int8": (12, 7.146597862243652, [21, 37, 45]),
        "full": (84, 14.607678413391113, [2, 5]),
    }[name]
    for _ in range(2):
        assembly = make_agent(tmp_path, **tables)
        batch = assembly.agent.store.stored().batch
        assert len(batch.ids) == held
        assert float(batch.x.sum()) == pytest.approx(total, abs=1e-4)
        assert all(id_ in assembly.agent.tombstones for id_ in erased)
        if name == "full":
            assert assembly.agent.device.capacity >= held
        assert assembly.agent.commit()
        assembly.disk.close()
    size = (tmp_path / "a.store").stat().st_size
    assert size == len(image)
    wider = {**tables.get("store", {}), "name_bytes": 24, "budget": 200_000}
    make_agent(tmp_path, **{**tables, "store": wider}).disk.close()


def test_two_thousand_erased_by_label_are_all_refused(tmp_path: Path) -> None:
    table = {
        "policy": {"name": "balanced-reservoir"},
        "store": {"budget": 1_000_000, "erased_bytes": 12_000},
    }
    assembly = make_agent(tmp_path, **table)
    ids = list(range(2000))
    assembly.agent.erase(ids)
    assembly.disk.close()
    assembly = make_agent(tmp_path, **table)
    feed(assembly.agent, 0, 2000)
    assert assembly.agent.counters["refused.erased"] == 2000
    feed(assembly.agent, 10_000, 300)
    assert assembly.agent.counters["refused.erased"] == 2000
    assembly.disk.close()


def test_nothing_erased_is_on_the_device_after_moves_repairs_and_keys(tmp_path: Path) -> None:
    """Searched on a block device where one can be mounted, else in all files of the folder."""
    with block_device(tmp_path, "device") as device:
        folder = tmp_path if device is None else device.mount
        key = tmp_path / "key"
        key.touch(0o600)
        key.write_text("ab" * 32)
        table: dict[str, Any] = {
            "policy": {"name": "balanced-reservoir"},
            "store": {"budget": 200_000},
        }
        assembly = make_agent(folder, **table)
        feed(assembly.agent, 0, 400)
        seen = {i: x[:6].tobytes() for i, x in held_by(assembly).items()}
        assembly.disk.close()
        for budget in (300_000, 250_000):
            table["store"]["budget"] = budget
            make_agent(folder, **table).disk.close()
        path = folder / "a.store"
        assert ask("rekey", path, "--new-key-file", key)[0] == 0
        assert not _hits(seen, device, folder), "an encrypted store shows nothing"
        assert ask("rekey", path, "--key-file", key, "--plain")[0] == 0
        with path.open(
            "r+b"
        ) as file:  # in place: what a file gives back is not the store's to wipe
            file.seek(60_000)
            byte = file.read(1)
            file.seek(60_000)
            file.write(bytes([byte[0] ^ 1]))
        ask("repair", path)
        table["store"]["damaged_bytes"] = 10**7
        assembly = make_agent(folder, **table)
        held = list(held_by(assembly))
        assert len(held) > 300
        assert _hits({i: seen[i] for i in held}, device, folder), "the search finds what is there"
        assembly.agent.erase(held)
        assembly.disk.close()
        assert not _hits({i: seen[i] for i in held}, device, folder)


def _hits(wanted: dict[int, bytes], device: Any, folder: Path) -> list[int]:
    images = (
        [device.image()] if device else [f.read_bytes() for f in folder.iterdir() if f.is_file()]
    )
    return [id_ for id_, x in wanted.items() if any(x in image for image in images)]


def test_another_budget_is_never_exceeded_on_the_way(tmp_path: Path) -> None:
    assembly = make_agent(tmp_path)
    feed(assembly.agent, 0, 3 * assembly.agent.device.capacity)
    held = held_by(assembly).keys()
    assembly.disk.close()
    most = []
    extend = FileDisk.extend

    def watched(self: FileDisk, size: int) -> None:
        extend(self, size)
        most.append(sum(f.stat().st_size for f in tmp_path.glob("a.store*")))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileDisk, "extend", watched)
        before = 100_000
        for budget in (220_000, 110_000, 300_000):
            most.clear()
            assembly = make_agent(tmp_path, store={"budget": budget})
            assert held_by(assembly).keys() == held
            assembly.disk.close()
            assert max(most) <= max(budget, before)
            before = budget


def test_a_small_store_goes_on_remembering_as_many_erased_ids_as_it_did(tmp_path: Path) -> None:
    assembly = make_agent(tmp_path, store={"erased_bytes": 4096})
    feed(assembly.agent, 0, 40)
    assembly.agent.erase([*range(400)])
    assembly.disk.close()
    again = make_agent(tmp_path)
    assert again.agent.tombstones.capacity == 512
    assert all(id_ in again.agent.tombstones for id_ in range(400))
    again.disk.close()
    (tmp_path / "new").mkdir()
    new = make_agent(tmp_path / "new")
    assert new.agent.tombstones.capacity == 100_000 // 64 // 8
    new.disk.close()


@pytest.mark.parametrize("how", ["unlink", "replace", "move"])
def test_a_file_that_is_deleted_or_replaced_under_the_agent_is_noticed(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    assembly = make_agent(tmp_path)
    feed(assembly.agent, 0, 10)
    path = tmp_path / "a.store"
    if how == "unlink":
        path.unlink()
    elif how == "move":
        path.rename(tmp_path / "elsewhere")
    else:
        (tmp_path / "other").write_bytes(b"another's")
        (tmp_path / "other").rename(path)
    fates: list[str] = []
    for id_ in range(100, 108):
        came = arrival(id_)
        came.acknowledge = fates.append
        assembly.agent.intake.offer(came, wait=True)
    assembly.agent.step(0.0)
    committed = assembly.agent.commit()
    if how == "replace":
        assert not committed
        assert fates == []
        assert assembly.agent.intake.held
        assert path.read_bytes() == b"another's"
        assert "was replaced by another file" in caplog.text
        assembly.disk.close()
        return
    assert committed
    assert fates == ["kept"] * 8
    assert "deleted under the agent: written again" in caplog.text
    assembly.disk.close()
    again = make_agent(tmp_path)
    assert {*range(10), *range(100, 108)} <= held_by(again).keys()
    again.disk.close()


@pytest.mark.parametrize("how", ["cut", "an earlier copy", "another store", "zeros"])
def test_a_file_that_is_written_over_under_the_agent_is_noticed(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    assembly = make_agent(tmp_path)
    feed(assembly.agent, 0, 10)
    path, earlier = tmp_path / "a.store", (tmp_path / "a.store").read_bytes()
    assembly.agent.judge([arrival(10)])
    assert assembly.agent.commit(whole=False)
    if how == "another store":
        (tmp_path / "other").mkdir()
        other = make_agent(tmp_path / "other")
        feed(other.agent, 0, 10)
        other.disk.close()
        earlier = (tmp_path / "other" / "a.store").read_bytes()
    found = {"cut": b"", "zeros": bytes(20_000) + path.read_bytes()[20_000:]}.get(how, earlier)
    path.write_bytes(found)
    fates: list[str] = []
    came = arrival(11)
    came.acknowledge = fates.append
    assembly.agent.judge([came])
    assert not assembly.agent.commit(whole=False)
    assert fates == []
    assert assembly.agent.intake.held
    assert path.read_bytes() == found, "what stands there is its owner's"
    assert "another program has written over the file" in caplog.text
    assert set(range(12)) <= set(assembly.agent.store.records), "memory has them all"
    assembly.disk.close()


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_a_duplicate_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("twice")
    assembly = make_agent(folder, policy={"name": "balanced-reservoir"})
    agent = assembly.agent
    feed(agent, 0, data.draw(st.integers(1, 150)))
    ids = sorted(held_by(assembly))
    before, ranks = held_by(assembly), agent.store.ranks()
    statistics = agent.device.snapshot()
    again = data.draw(st.lists(st.sampled_from(ids), min_size=1, max_size=60))
    for id_ in again:
        agent.intake.offer(arrival(id_), wait=True)
        if len(agent.intake) > 30:
            agent.step(0.0)
    while agent.step(0.0):
        pass
    assert held_by(assembly).keys() == before.keys()
    for name, column in agent.store.ranks().items():
        np.testing.assert_array_equal(column, ranks[name])
    for name, array in agent.device.snapshot().items():
        np.testing.assert_array_equal(array, statistics[name], err_msg=name)
    assert agent.counters["refreshed"] == len(again)
    assembly.disk.close()


def test_keys_do_not_repeat_over_crashes(tmp_path: Path) -> None:
    """90 lives of 40 arrivals, each killed before it says what it counted: newcomers still find
    their way in.
    """
    table = config_table(tmp_path, policy={"name": "balanced-reservoir"}, agent={"seed": 5})
    assembly = assembled(table)
    feed(assembly.agent, 0, 2 * assembly.agent.device.capacity)
    room = assembly.agent.device.capacity
    assembly.disk.close()
    number, kept, keys = 10_000, 0, set()
    for _ in range(90):
        assembly = assembled(table)
        agent = assembly.agent
        agent.commit()
        for id_ in range(number, number + 40):
            agent.intake.offer(arrival(id_), wait=True)
        while agent.step(0.0):
            pass
        agent.commit(whole=False)
        kept += agent.counters["kept"] + agent.counters["replaced"]
        keys |= {note.score for note in agent.store.notes()}
        number += 40
        assembly.disk.close()
    held = held_by(assembled(table))
    late = [id_ for id_ in held if id_ >= 10_000]
    share = 3600 / (3600 + 2 * room)
    assert len(late) == pytest.approx(share * room, abs=0.25 * room)
    assert len(keys) > len(held)


def test_writes_are_bounded_by_the_day(tmp_path: Path) -> None:
    assembly = make_agent(
        tmp_path,
        policy={"name": "balanced-reservoir"},
        store={"budget": 400_000, "daily_writes": 1_000_000},
    )
    agent, disk = assembly.agent, assembly.disk
    before = disk.block_bytes
    for id_ in range(60_000):
        agent.intake.offer(arrival(id_), wait=False, rule="drop")
        if id_ % 8 == 7:
            agent.step(0.0)
    assert agent.counters["skipped.drop"] > 0
    assert agent.waiting == "[store] daily_writes allows no more for now"
    # An hour's share or a megabyte at once, and the commits that are always made.
    assert disk.block_bytes - before < 3_000_000
    # What was read is not left behind by an agent that stops: not every stream can give it again.
    waited, seen = len(agent.intake), agent.counters["seen"]
    agent.intake.stop()
    while agent.step(0.0):
        pass
    assert agent.counters["seen"] == seen + waited > seen
    disk.close()


def test_what_expired_is_removed_at_the_start_and_an_erased_sample_never_comes_back(
    tmp_path: Path,
) -> None:
    assembly = make_agent(tmp_path, store={"ttl_days": 30.0})
    agent = assembly.agent
    feed(agent, 0, 20)
    notes = agent.store.records
    for id_ in range(5):
        notes[id_] = notes[id_]._replace(taken=-31 * DAY)
    agent.tombstones.add([7])  # as if a root from before its erasure counted again
    assert agent.remove_expired() == 6
    assert held_by(assembly).keys() == {5, 6, *range(8, 20)}
    assembly.disk.close()


class CachedDisk(RamDisk):
    """A disk behind a page cache: a failing sync leaves pages that look written, and are not on the
    disk.
    """

    def __init__(self, image: bytes) -> None:
        super().__init__(image)
        self.platter = bytearray(image)
        self.dirty: list[tuple[int, bytes]] = []
        self.fails = False

    def write(self, offset: int, data: bytes) -> None:
        super().write(offset, data)
        self.dirty.append((offset, bytes(data)))

    def sync(self) -> None:
        dirty, self.dirty = self.dirty, []
        if self.fails:
            self.fails = False
            raise OSError(errno.EIO, "Input/output error")
        for offset, data in dirty:
            self.platter[offset : offset + len(data)] = data

    def drop_cache(self) -> None:
        if not self.dirty:
            self.image[:] = self.platter


@pytest.mark.parametrize("light", [False, True])
@pytest.mark.parametrize("restart", [False, True])
def test_what_a_failing_sync_left_in_the_cache_counts_for_nothing(
    light: bool, restart: bool
) -> None:
    disk = CachedDisk(bytes(LAYOUT.geometry.size))
    run = Scripted(disk)
    run.format()
    run.advance_alone(0)
    run.commit()
    held = set(run.store.records)
    run.advance_alone(1)
    disk.fails = True
    with pytest.raises(OSError, match="Input/output"):
        run.store.commit(None if light else run.state())
    if restart:
        run = Scripted(disk)
        run.open()
    else:
        run.reload()
    assert set(run.store.records) == held
    run.advance_alone(2)
    run.store.commit(None)
    after = set(run.store.records)
    power = Scripted(RamDisk(bytes(disk.platter)))
    power.open()
    assert set(power.store.records) == after
    assert after == held | set(samples(16, 8).ids.tolist())


def test_direct_writes_touch_their_own_bytes_only(tmp_path: Path) -> None:
    disk = FileDisk(tmp_path / "f", 40_960)
    image, rng = bytearray(40_960), np.random.default_rng(0)
    for _ in range(300):
        length = int(rng.integers(1, 5000))
        offset = int(rng.integers(0, 40_960 - length))
        data = rng.bytes(length)
        disk.write(offset, data)
        image[offset : offset + length] = data
        if rng.random() < 0.1:
            disk.sync()
    disk.sync()
    assert (tmp_path / "f").read_bytes() == bytes(image)
    assert disk.written == pytest.approx(300 * 2500, rel=0.2)
    disk.close()


def test_a_link_where_a_new_file_is_made_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "a.store.new").symlink_to(tmp_path / "target")
    with pytest.raises(ConfigError, match="is in the way"):
        make_agent(tmp_path)
    assert not (tmp_path / "target").exists()


def test_a_key_that_everybody_can_read_is_refused(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("ab" * 32)
    key.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by everybody: `chmod 600"):
        make_agent(tmp_path, store={"key_file": str(key)})


def test_keys_are_rotated_and_nothing_is_lost(tmp_path: Path) -> None:
    keys = {}
    for name, digits in (("one", "11"), ("two", "22")):
        keys[name] = tmp_path / name
        keys[name].touch(0o600)
        keys[name].write_text(digits * 32)
    assembly = make_agent(tmp_path, store={"budget": 150_000})
    feed(assembly.agent, 0, 60)
    held = held_by(assembly)
    path = tmp_path / "a.store"
    done = subprocess.run(
        [sys.executable, "-m", "fedkeep", "agent", "store", "rekey", str(path), "--plain"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode
    assert "is in use by another agent" in done.stderr
    assembly.disk.close()
    with pytest.raises(ConfigError, match="`fedkeep agent store rekey"):
        make_agent(tmp_path, store={"budget": 150_000, "key_file": str(keys["one"])})
    (tmp_path / "a.store.damaged-1").write_bytes(path.read_bytes())
    assert ask("rekey", path, "--new-key-file", keys["one"])[0] == 0
    assert not [*tmp_path.glob("a.store.damaged-*")], "copies are under no key, or the old one"
    assert ask("rekey", path, "--key-file", keys["one"], "--new-key-file", keys["two"])[0] == 0
    with pytest.raises(ConfigError, match="was encrypted under the key"):
        make_agent(tmp_path, store={"budget": 150_000, "key_file": str(keys["one"])})
    assembly = make_agent(tmp_path, store={"budget": 150_000, "key_file": str(keys["two"])})
    assert path.stat().st_size <= 150_000
    assert all(np.array_equal(x, held[i]) for i, x in held_by(assembly).items())
    assert held_by(assembly).keys() == held.keys()
    assembly.disk.close()


def test_exports_are_private_chosen_and_named_as_samples_came(tmp_path: Path) -> None:
    assembly = make_agent(tmp_path, policy={"name": "balanced-reservoir"})
    agent = assembly.agent
    names = ["hall/7", "../door", "sensor ü", "x" * 40, "42"]
    for label, name in enumerate(names):
        x = np.full(6, label, dtype=np.float32)
        agent.intake.offer(Arrival(x, label % 3, name, "mqtt"), wait=True)
    while agent.step(0.0):
        pass
    feed(agent, 100, 10)
    assembly.disk.close()
    path = tmp_path / "a.store"
    os.umask(0o000)
    try:
        ask("export", path, tmp_path / "all.npz")
        ask("export", path, tmp_path / "all")
    finally:
        os.umask(0o022)
    with np.load(tmp_path / "all.npz") as found:
        assert {"hall/7", "../door", "sensor ü", "42"} <= set(found["names"].tolist())
    assert (tmp_path / "all.npz").stat().st_mode & 0o777 == 0o600
    for place in (tmp_path / "all").rglob("*"):
        assert place.stat().st_mode & 0o777 == (0o700 if place.is_dir() else 0o600)
    assert (tmp_path / "all" / "0" / "hall%2F7.npy").exists()
    for number, (options, count) in enumerate(
        [
            (("--id", "hall/7", "--id", "x" * 40), 2),
            (("--source", "mqtt"), 5),
            (("--source", "mqtt", "--label", "0"), 2),
            (("--since", "2100-01-01"), 0),
            (("--until", "2100-01-01"), 15),
        ]
    ):
        said = ask("export", path, tmp_path / f"{number}.npz", *options)[1]
        assert said.startswith(f"{count} samples"), options


def test_what_is_recorded_twice_costs_nothing_to_a_torn_label() -> None:
    disk = RecordingDisk(bytes(LAYOUT.geometry.size))
    Scripted(disk).format()
    kinds = [event[0] for event in disk.events]
    labels = [i for i, event in enumerate(disk.events) if b"FEDKEEP" in event[2][:8]]
    assert len(labels) == 2
    assert "sync" in kinds[labels[0] : labels[1]]


def test_a_file_system_that_is_read_only_now_may_be_writable_at_another_start(
    tmp_path: Path,
) -> None:
    with block_device(tmp_path, "device", megabytes=16) as device:
        if device is None:
            pytest.skip("no loop device can be mounted here")
        make_agent(device.mount).disk.close()
        subprocess.run(["mount", "-o", "remount,ro", str(device.mount)], check=True)
        with pytest.raises(StoreError, match="cannot be used now: Read-only file system"):
            make_agent(device.mount)
        subprocess.run(["mount", "-o", "remount,rw", str(device.mount)], check=True)
        make_agent(device.mount).disk.close()
