"""The agent's store against the same port on SQLite and LMDB.

    python benchmarks/store.py [--quick] [--json FILE]

LMDB is optional (`pip install lmdb`). Bytes at the device and the search for erased samples need a
loop mount, so mostly root; without one these two are left out.
"""

import argparse
import json
import logging
import os
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Protocol

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.block_device import BlockDevice, block_device
from fedkeep.agent.durable_store import DurableStore
from fedkeep.agent.record import DecisionLog, SampleForm, Verdict
from fedkeep.agent.retention import AgeClock
from fedkeep.agent.store_file import StoreOptions, open_file, plan
from fedkeep.core.store import MemoryStore
from fedkeep.core.types import Batch

NUMBERS = 192
SAMPLE_BYTES = 4 * NUMBERS
BUDGET = 2_000_000
_PAGE = 4096
_STATE_BYTES = 20_000


class StorePort(Protocol):
    """What the agent asks of a store on disk."""

    def replace(self, ids: list[int], rows: list[bytes], gone: list[int]) -> None:
        """Put samples in, take others out; on the disk when it returns."""

    def erase(self, ids: list[int]) -> None:
        """Take samples out for good."""

    def read(self) -> dict[int, bytes]:
        """Return all samples that can be read."""

    def close(self) -> None:
        """Close the store."""


class CellStore:
    """The agent's own."""

    def __init__(self, path: Path, sector: int | None = None) -> None:
        form = SampleForm(np.dtype("<f4"), (NUMBERS,))
        options = StoreOptions(path=str(path), budget=BUDGET, sector=sector, log_length=64)
        layout = plan(options, form, _STATE_BYTES)
        opened = open_file(layout, 1)
        index = MemoryStore(np.array([layout.capacity]))
        self._disk, self.capacity = opened.file.disk, layout.capacity
        log = DecisionLog(64, "bench")
        self._store = DurableStore(opened.file, index, form, log, AgeClock(), layout.capacity)
        self._store.load(opened.blobs)
        self._store.restore({"quotas": np.array([layout.capacity])})
        self._store.commit({})

    def replace(self, ids: list[int], rows: list[bytes], gone: list[int]) -> None:  # noqa: ARG002
        """Put samples in; which ones leave, the store decides by itself: any of the older half."""
        x = np.frombuffer(b"".join(rows), "<f4").reshape(-1, NUMBERS)
        batch = Batch(x, np.zeros(len(ids), dtype=np.int64), np.array(ids))
        scores = batch.ids + self.capacity * np.random.default_rng(ids[0]).random(len(ids))
        self._store.offer(batch, batch.y, scores, batch.ids)
        self._store.commit(None)

    def erase(self, ids: list[int]) -> None:
        """Overwrite samples."""
        self._store.forget(ids, Verdict.ERASED)
        self._store.commit({}, wipe=True)

    def read(self) -> dict[int, bytes]:
        """Return all samples."""
        held = self._store.stored().batch
        return {i: x.tobytes() for i, x in zip(held.ids.tolist(), held.x, strict=True)}

    def close(self) -> None:
        """Close the file."""
        self._disk.close()


class SqliteStore:
    """A table of blobs in numbered slots, every commit on the disk, deleted content overwritten."""

    def __init__(self, path: Path, journal: str) -> None:
        self._base = sqlite3.connect(path, isolation_level=None)
        run = self._base.execute
        run(f"PRAGMA journal_mode = {journal}")
        for pragma in ("synchronous = FULL", "secure_delete = ON", "cache_size = -500"):
            run(f"PRAGMA {pragma}")
        run(f"PRAGMA max_page_count = {BUDGET // _PAGE}")
        run(
            "CREATE TABLE IF NOT EXISTS samples (slot INTEGER PRIMARY KEY, id INT, score "
            "REAL, x BLOB)"
        )
        self._slots: dict[int, int] = {}

    def replace(self, ids: list[int], rows: list[bytes], gone: list[int]) -> None:
        """Put samples into the slots of others in one transaction."""
        run = self._base.execute
        slots = [self._slots.get(i, len(self._slots) + k) for k, i in enumerate(gone or ids)]
        run("BEGIN")
        try:
            values = [
                (slot, i, float(i), row) for slot, i, row in zip(slots, ids, rows, strict=True)
            ]
            self._base.executemany("INSERT OR REPLACE INTO samples VALUES (?, ?, ?, ?)", values)
            run("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                run("ROLLBACK")
            raise
        for id_ in gone:
            self._slots.pop(id_, None)
        self._slots.update(zip(ids, slots, strict=True))

    def erase(self, ids: list[int]) -> None:
        """Delete, and bring the log of writes into the file."""
        self._base.execute("BEGIN")
        self._base.executemany("DELETE FROM samples WHERE id = ?", [(i,) for i in ids])
        self._base.execute("COMMIT")
        self._base.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def read(self) -> dict[int, bytes]:
        """Return what can be read, slot by slot."""
        found = {}
        for slot in range(BUDGET // SAMPLE_BYTES):
            with suppress(sqlite3.Error):
                select = "SELECT id, x FROM samples WHERE slot = ?"
                found.update(dict(self._base.execute(select, (slot,))))
        return found

    def close(self) -> None:
        """Close the base."""
        with suppress(sqlite3.Error):
            self._base.close()


class LmdbStore:
    """A tree of numbered slots under a map of the budget's size, every commit on the disk."""

    def __init__(self, path: Path) -> None:
        import lmdb

        self._base = lmdb.open(str(path), map_size=BUDGET // _PAGE * _PAGE, subdir=False)
        self._slots: dict[int, int] = {}

    def replace(self, ids: list[int], rows: list[bytes], gone: list[int]) -> None:
        """Put samples into the slots of others in one transaction."""
        slots = [self._slots.get(i, len(self._slots) + k) for k, i in enumerate(gone or ids)]
        with self._base.begin(write=True) as change:
            for slot, id_, row in zip(slots, ids, rows, strict=True):
                change.put(slot.to_bytes(8, "big"), id_.to_bytes(8, "big") + row)
        for id_ in gone:
            self._slots.pop(id_, None)
        self._slots.update(zip(ids, slots, strict=True))

    def erase(self, ids: list[int]) -> None:  # noqa: ARG002 - all of them
        """Delete; the pages keep what they held until they are used again."""
        with self._base.begin(write=True) as change:
            for slot in list(range(len(self._slots) or BUDGET // SAMPLE_BYTES)):
                change.delete(slot.to_bytes(8, "big"))

    def read(self) -> dict[int, bytes]:
        """Return what can be read, slot by slot."""
        import lmdb

        found = {}
        for slot in range(BUDGET // SAMPLE_BYTES):
            with suppress(lmdb.Error), self._base.begin() as look:
                value = look.get(slot.to_bytes(8, "big"))
                if value is not None:
                    found[int.from_bytes(value[:8], "big")] = bytes(value[8:])
        return found

    def close(self) -> None:
        """Close the base."""
        self._base.close()


def stores() -> dict[str, Callable[[Path], StorePort]]:
    """What is compared, as far as it is installed."""
    found: dict[str, Callable[[Path], StorePort]] = {
        "fedkeep": CellStore,
        "fedkeep, sector 512": lambda path: CellStore(path, 512),
        "SQLite, TRUNCATE": lambda path: SqliteStore(path, "TRUNCATE"),
        "SQLite, WAL": lambda path: SqliteStore(path, "WAL"),
    }
    try:
        import lmdb  # noqa: F401

        found["LMDB"] = LmdbStore
    except ImportError:
        print("LMDB: skipped, since it is not installed (`pip install lmdb`)")
    return found


class PeakBytes:
    """The most bytes that all files of a folder took at any moment."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._ended, self.most = folder, threading.Event(), 0
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "PeakBytes":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def look(self) -> None:
        """Count once more."""
        total = 0
        for path in self._folder.iterdir():
            with suppress(OSError):
                total += path.stat().st_size if path.is_file() else 0
        self.most = max(self.most, total)

    def _watch(self) -> None:
        while not self._ended.wait(0.0005):
            self.look()


def sample(id_: int) -> bytes:
    """The one sample of that id."""
    return np.random.default_rng(id_).standard_normal(NUMBERS).astype("<f4").tobytes()


def _chunks(ids: range, size: int) -> Iterator[list[int]]:
    for start in range(ids.start, ids.stop, size):
        yield list(range(start, min(ids.stop, start + size)))


def filled(store: StorePort) -> int:
    """Puts samples in, ten at a time, until no more fit; returns how many are there."""
    if isinstance(store, CellStore):  # which keeps its own room
        for ids in _chunks(range(1, store.capacity + 1), 10):
            store.replace(ids, [sample(i) for i in ids], [])
        return store.capacity
    for ids in _chunks(range(1, 100_000), 10):
        try:
            store.replace(ids, [sample(i) for i in ids], [])
        except Exception:  # noqa: BLE001 - each base says in its own way that it is full
            return ids[0] - 1
    raise AssertionError


def measure(make: Callable[[Path], StorePort], device: BlockDevice | None, folder: Path,
            *, quick: bool) -> dict[str, float | str]:  # fmt: skip
    """Everything about one store."""
    figures: dict[str, float | str] = {}
    place, rng = folder / "store", np.random.default_rng(0)
    with PeakBytes(folder) as peak:
        store = make(place)
        held = filled(store)
        figures["samples held"] = held
        figures["bytes at rest per sample"] = BUDGET / held
        count, following = (200 if quick else 600), held + 1000
        for per_commit in (1, 10):
            begun = device.written() if device else 0
            seconds = []
            stored = [] if isinstance(store, CellStore) else list(store.read())
            for ids in _chunks(range(following, following + count), per_commit):
                gone = [stored.pop(int(rng.integers(len(stored)))) for _ in ids] if stored else []
                rows, before = [sample(i) for i in ids], time.perf_counter()
                try:
                    store.replace(ids, rows, gone)
                except Exception as error:  # noqa: BLE001 - each base fails in its own way
                    figures[f"full, commits of {per_commit}"] = f"{type(error).__name__}: {error}"
                    break
                seconds.append(time.perf_counter() - before)
                peak.look()
            following += count
            if seconds:
                figures[f"ms per commit of {per_commit}"] = 1000 * float(np.median(seconds))
            if device and len(seconds) * per_commit == count:
                written = (device.written() - begun) / count / SAMPLE_BYTES
                figures[f"written over sample, commits of {per_commit}"] = written
        figures["most bytes over budget"] = peak.most / BUDGET
        kept = store.read()
        store.close()
    image = place.read_bytes()
    with tempfile.TemporaryDirectory() as elsewhere:  # or the device would hold copies
        figures |= _salvage(make, Path(elsewhere), image, kept, tries=10 if quick else 40)
    store = make(place)
    victims = list(store.read())
    try:
        store.erase(victims)
    except Exception as error:  # noqa: BLE001 - what a base does when it cannot is the finding
        figures["erase"] = type(error).__name__
    if device:
        image = device.image()
        hits = sum(kept[i][100:160] in image for i in victims)
        figures["erased samples found on the device"] = f"{hits} of {len(victims)}"
    store.close()
    return figures


def _salvage(make: Callable[[Path], StorePort], folder: Path, image: bytes,
             kept: dict[int, bytes], tries: int) -> dict[str, float | str]:  # fmt: skip
    """What is left when one block of 4 kB turns to garbage."""
    place, rng = folder / "store", np.random.default_rng(0)
    saved, wrong, unreadable = [], 0, 0
    for _ in range(tries):
        broken = bytearray(image)
        at = int(rng.integers(len(image) // _PAGE)) * _PAGE
        broken[at : at + _PAGE] = rng.bytes(_PAGE)
        place.write_bytes(broken)
        found = _read_in_child(make, place)
        unreadable += found is None
        found = found or {}
        saved.append(sum(found.get(i) == x for i, x in kept.items()) / len(kept))
        wrong += sum(i in kept and kept[i] != x for i, x in found.items())
        for left in folder.glob("store*"):
            left.unlink()
    return {
        "saved after a lost block, mean": float(np.mean(saved)),
        "saved after a lost block, least": float(np.min(saved)),
        "samples read wrong": float(wrong),
        "files that did not open": f"{unreadable} of {tries}",
    }


def _read_in_child(make: Callable[[Path], StorePort], place: Path) -> dict[int, bytes] | None:
    """What a process of its own reads from a damaged file; None where it fails or dies of it."""
    out = place.with_name("read")
    pid = os.fork()
    if pid == 0:
        try:
            found = make(place).read()
            np.savez(out, ids=list(found), rows=np.array(list(found.values()), dtype="V768"))
            os._exit(0)
        except BaseException:  # noqa: BLE001 - not to be opened at all is one of the outcomes
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    if status:
        return None
    with np.load(f"{out}.npz") as arrays:
        rows = arrays["rows"]
        return {int(i): rows[k].tobytes() for k, i in enumerate(arrays["ids"])}


def main() -> None:
    """Measure all stores, each on a device of its own where there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer commits and damages")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    logging.getLogger("fedkeep").setLevel(logging.ERROR)
    found = {}
    for name, make in stores().items():
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            device = stack.enter_context(block_device(Path(folder), "device", 32))
            if device is None:
                print("no loop device can be mounted here: bytes at the device are left out")
            home = Path(folder) / "plain" if device is None else device.mount
            home.mkdir(exist_ok=True)
            lost = home / "lost+found"
            if lost.exists():
                lost.rmdir()
            found[name] = measure(make, device, home, quick=options.quick)
        print(f"{name}")
        for what, value in found[name].items():
            print(f"    {what:42} {value if isinstance(value, str) else round(value, 3)}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
