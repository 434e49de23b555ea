"""Damage to the file itself: flipped bits, lost and swapped sectors, garbage, a cut-off end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedkeep.agent.audit import DecisionLog
from fedkeep.agent.cells import decode_cell
from fedkeep.agent.clock import AgeClock
from fedkeep.agent.durable_store import DurableStore
from fedkeep.agent.identity import Identity
from fedkeep.agent.layout import StoreOptions, plan
from fedkeep.agent.opening import open_file
from fedkeep.agent.record import SAMPLE
from fedkeep.core.store import MemoryStore
from tests.faults.script import FORM, REGIONS, sample, samples

OPTIONS = StoreOptions(budget=100_000, log_length=64)
LAYOUT = plan(OPTIONS, FORM, 4_000)
_SECTOR = 512


@dataclass
class Salvage:
    corruptions: int = 0
    crashes: int = 0
    wrong: int = 0
    undamaged: int = 0
    saved: int = 0

    @property
    def saved_percent(self) -> float:
        return 100 * self.saved / max(1, self.undamaged)


def open_at(path: Path) -> DurableStore:
    """The store at `path` by the same way as the agent opens it."""
    options = StoreOptions(path=str(path), budget=OPTIONS.budget, log_length=64)
    opened = open_file(options, FORM, LAYOUT, Identity(REGIONS))
    quotas = np.full(REGIONS, LAYOUT.capacity // REGIONS)
    store = DurableStore(opened.file, MemoryStore(quotas), FORM, DecisionLog(64, "ode"), AgeClock(), LAYOUT.capacity)
    store.load(opened.contents)
    store.restore({"quotas": quotas})
    store.close = opened.disk.close  # type: ignore[attr-defined]
    return store


def make(path: Path) -> dict[int, int]:
    """A full store in which many samples have been replaced; returns where the samples' cells lie, by id."""
    store = open_at(path)
    for first in range(0, 4 * LAYOUT.capacity, 8):
        batch = samples(first, 8)
        store.offer(batch, batch.y, batch.ids / 7.0 % 1.0 + batch.ids / 500, batch.ids)
        store.commit({"estimator": np.full(300, float(first))})
    ids = set(store.stored().batch.ids.tolist())
    store.close()  # type: ignore[attr-defined]
    return _places(path.read_bytes(), ids)


def _places(image: bytes, ids: set[int]) -> dict[int, int]:
    geometry = LAYOUT.geometry
    places: dict[int, tuple[int, int]] = {}
    for index in range(geometry.cells):
        offset = geometry.cell(index)
        cell = decode_cell(image[offset : offset + geometry.cell_size])
        if cell is None or cell.kind != SAMPLE:
            continue
        id_ = int.from_bytes(cell.data[:8], "little")
        if id_ in ids and cell.sequence > places.get(id_, (-1, 0))[0]:
            places[id_] = (cell.sequence, offset)
    return {id_: offset for id_, (_, offset) in places.items()}


def _flip(image: bytearray, rng: np.random.Generator) -> None:
    for _ in range(int(rng.integers(1, 9))):
        image[int(rng.integers(len(image)))] ^= 1 << int(rng.integers(8))


def _zero(image: bytearray, rng: np.random.Generator) -> None:
    start = int(rng.integers(len(image)))
    length = int(rng.integers(1, 4096))
    image[start : start + length] = bytes(len(image[start : start + length]))


def _garbage(image: bytearray, rng: np.random.Generator) -> None:
    start = int(rng.integers(len(image)))
    length = len(image[start : start + int(rng.integers(1, 2048))])
    image[start : start + length] = rng.bytes(length)


def _swap(image: bytearray, rng: np.random.Generator) -> None:
    a, b = (int(i) * _SECTOR for i in rng.integers(len(image) // _SECTOR, size=2))
    image[a : a + _SECTOR], image[b : b + _SECTOR] = image[b : b + _SECTOR], image[a : a + _SECTOR]


def _root(image: bytearray, rng: np.random.Generator) -> None:
    """One bit in one to four of the places where roots stand."""
    places = [LAYOUT.geometry.root(half, copy) for half in (0, 1) for copy in (0, 1)]
    for place in rng.permutation(places)[: int(rng.integers(1, 5))]:
        image[int(place) + int(rng.integers(24 + LAYOUT.geometry.cells // 8))] ^= 1 << int(rng.integers(8))


def _cut(image: bytearray, rng: np.random.Generator) -> None:
    del image[int(rng.integers(len(image) // 2, len(image))) :]


KINDS: tuple[Callable[[bytearray, np.random.Generator], None], ...] = (_flip, _zero, _garbage, _swap, _cut, _root)


def try_corruptions(folder: Path, count: int, seed: int = 0) -> Salvage:
    """Damages copies of one file in `count` ways and counts what comes back."""
    rng = np.random.default_rng(seed)
    path = folder / "sound.store"
    places = make(path)
    sound = path.read_bytes()
    salvage, broken = Salvage(), folder / "broken.store"
    for number in range(count):
        image = bytearray(sound)
        KINDS[number % len(KINDS)](image, rng)
        broken.write_bytes(image)
        salvage.corruptions += 1
        size = LAYOUT.geometry.cell_size
        whole = {i for i, at in places.items() if image[at : at + size] == sound[at : at + size]}
        _count(salvage, broken, whole)
    return salvage


def _count(salvage: Salvage, path: Path, whole: set[int]) -> None:
    try:
        store = open_at(path)
        held = store.stored()
        store.commit({})
        store.close()  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001 - any exception at all is what this counts
        salvage.crashes += 1
        return
    ids = held.batch.ids.tolist()
    salvage.wrong += sum(not np.array_equal(x, sample(i)) for x, i in zip(held.batch.x, ids, strict=True))
    salvage.undamaged += len(whole)
    salvage.saved += len(whole & set(ids))
