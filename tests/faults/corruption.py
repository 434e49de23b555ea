"""Damage to the file itself: flipped bits, lost and swapped sectors, garbage, a cut-off end."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedkeep.agent.cells import PAGE, Geometry, decode_cell, decode_label
from fedkeep.agent.durable_store import DurableStore
from fedkeep.agent.record import SAMPLE, DecisionLog, SampleForm
from fedkeep.agent.retention import AgeClock
from fedkeep.agent.store_file import StoreOptions, open_file, plan
from fedkeep.core.store import MemoryStore
from fedkeep.core.types import AnyArray, Batch
from tests.faults.script import FORM, REGIONS, samples

OPTIONS = StoreOptions(budget=100_000, log_length=64)
LAYOUT = plan(OPTIONS, FORM, 4_000)
FORMS = (FORM, replace(FORM, encoding="int8"), replace(FORM, deflate_to=90))
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


def open_at(path: Path, form: SampleForm = FORM) -> DurableStore:
    """The store at `path` by the same way as the agent opens it."""
    options = StoreOptions(path=str(path), budget=OPTIONS.budget, log_length=64)
    layout = plan(options, form, 4_000)
    opened = open_file(layout, REGIONS)
    quotas = np.full(REGIONS, layout.capacity // REGIONS)
    store = DurableStore(
        opened.file, MemoryStore(quotas), form, DecisionLog(64, "ode"), AgeClock(), layout.capacity
    )
    store.load(opened.blobs)
    store.restore({"quotas": quotas})
    store.close = opened.file.disk.close  # type: ignore[attr-defined]
    return store


@dataclass(frozen=True)
class Sound:
    """A store before anything happened to it."""

    form: SampleForm
    image: bytes
    offered: dict[int, AnyArray]
    """Every sample that ever came, as it is kept."""
    places: dict[int, int]
    """Where the cells of those that are stored lie."""


def make(path: Path, form: SampleForm = FORM) -> Sound:
    """A full store in which many samples have been replaced."""
    geometry = plan(OPTIONS, form, 4_000).geometry
    store = open_at(path, form)
    offered: dict[int, AnyArray] = {}
    for first in range(0, 4 * LAYOUT.capacity, 8):
        batch = samples(first, 8)
        batch = Batch(store.as_stored(batch.x), batch.y, batch.ids)
        offered |= dict(zip(batch.ids.tolist(), batch.x, strict=True))
        store.offer(batch, batch.y, batch.ids / 7.0 % 1.0 + batch.ids / 500, batch.ids)
        store.commit({"estimator": np.full(300, float(first))})
    ids = set(store.stored().batch.ids.tolist())
    store.close()  # type: ignore[attr-defined]
    return Sound(form, path.read_bytes(), offered, _places(path.read_bytes(), ids, geometry))


def _places(image: bytes, ids: set[int], geometry: Geometry) -> dict[int, int]:
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
    label = decode_label(bytes(image[:PAGE]))
    assert label is not None
    places = [label.geometry.root(half, copy) for half in (0, 1) for copy in (0, 1)]
    for place in rng.permutation(places)[: int(rng.integers(1, 5))]:
        image[int(place) + int(rng.integers(24 + label.geometry.cells // 8))] ^= 1 << int(
            rng.integers(8)
        )


def _cut(image: bytearray, rng: np.random.Generator) -> None:
    del image[int(rng.integers(len(image) // 2, len(image))) :]


KINDS: tuple[Callable[[bytearray, np.random.Generator], None], ...] = (
    _flip,
    _zero,
    _garbage,
    _swap,
    _cut,
    _root,
)


def try_corruptions(folder: Path, count: int, seed: int = 0) -> Salvage:
    """Damages `count` copies of files, of one encoding after the other, and counts the outcomes."""
    rng = np.random.default_rng(seed)
    stores = [make(folder / f"sound-{number}.store", form) for number, form in enumerate(FORMS)]
    salvage, broken = Salvage(), folder / "broken.store"
    for number in range(count):
        sound = stores[number // len(KINDS) % len(stores)]
        image = bytearray(sound.image)
        KINDS[number % len(KINDS)](image, rng)
        broken.write_bytes(image)
        salvage.corruptions += 1
        size = plan(OPTIONS, sound.form, 4_000).geometry.cell_size
        whole = {
            i
            for i, at in sound.places.items()
            if image[at : at + size] == sound.image[at : at + size]
        }
        _count(salvage, broken, sound, whole)
    return salvage


def _count(salvage: Salvage, path: Path, sound: Sound, whole: set[int]) -> None:
    try:
        store = open_at(path, sound.form)
        held = store.stored()
        store.commit({})
        store.close()  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001 - any exception at all is what this counts
        salvage.crashes += 1
        return
    ids = held.batch.ids.tolist()
    salvage.wrong += sum(
        not np.array_equal(x, sound.offered[i]) for x, i in zip(held.batch.x, ids, strict=True)
    )
    salvage.undamaged += len(whole)
    salvage.saved += len(whole & set(ids))
