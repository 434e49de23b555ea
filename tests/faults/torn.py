"""Every state that a power cut can leave of a short history, also with one block that was being
written as garbage.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, combinations
from pathlib import Path

import numpy as np

from fedkeep.agent.cells import Label
from fedkeep.agent.store_file import StoreLayout, StoreOptions, open_file, plan
from fedkeep.agent.store_moves import resize
from tests.faults.power_loss import RecordingDisk, _sectors
from tests.faults.script import FORM, REGIONS, STATE_BYTES, RamDisk, Scripted

_ALL_SUBSETS = 6
"""Up to so many unsynced sectors every subset is tried.

Of more, those that lack or have one, and those in order.
"""
BUDGETS = {None: 88_000, 512: 160_000, 4096: 1_500_000}


def layout_of(sector: int | None) -> StoreLayout:
    """A small store whose samples share no block of so many bytes."""
    return plan(
        StoreOptions(budget=BUDGETS[sector], log_length=64, sector=sector), FORM, STATE_BYTES
    )


@dataclass
class Losses:
    states: int = 0
    lost: int = 0
    wrong: int = 0


@dataclass(frozen=True)
class CrashState:
    image: bytes
    acknowledged: int


def crash_states(disk: RecordingDisk, block: int | None) -> Iterator[CrashState]:
    """Every crash state of a history, with `block` also those where one block being written holds
    garbage.
    """
    image, pending, acknowledged = bytearray(disk.start), list[tuple[int, bytes]](), 0
    for kind, offset, data in [*disk.events, ("end", 0, b"")]:
        if kind == "write":
            pending.append((offset, data))
            continue
        yield from _between(bytes(image), pending, block, acknowledged)
        if kind == "sync":
            for place, written in pending:
                image[place : place + len(written)] = written
            pending.clear()
        acknowledged = offset if kind == "ack" else acknowledged


def _between(
    image: bytes, pending: list[tuple[int, bytes]], block: int | None, acknowledged: int
) -> Iterator[CrashState]:
    sectors = [piece for offset, data in pending for piece in _sectors(offset, data)]
    for survivors in _subsets(len(sectors)):
        state = bytearray(image)
        for i in survivors:
            offset, data = sectors[i]
            state[offset : offset + len(data)] = data
        yield CrashState(bytes(state), acknowledged)
    if block is None:
        return
    for torn in sorted({offset // block for offset, _ in sectors}):
        for survivors in ((), tuple(range(len(sectors)))):
            state = bytearray(image)
            for i in survivors:
                offset, data = sectors[i]
                state[offset : offset + len(data)] = data
            garbage = np.random.default_rng(torn).bytes(block)
            state[torn * block : (torn + 1) * block] = garbage
            yield CrashState(bytes(state), acknowledged)


def _subsets(count: int) -> Iterator[tuple[int, ...]]:
    everything = tuple(range(count))
    if count <= _ALL_SUBSETS:
        yield from chain.from_iterable(combinations(everything, n) for n in range(count + 1))
        return
    for i in everything:
        yield everything[:i]
        yield (i,)
        yield everything[:i] + everything[i + 1 :]
    yield everything


def record(layout: StoreLayout, first: int, steps: int, *, light: bool) -> RecordingDisk:
    """A history of `steps` commits on a store that has `first` of them behind it."""
    disk = RecordingDisk(bytes(layout.geometry.size))
    run = Scripted(disk, layout)
    run.format(layout.geometry)
    for step in range(first + steps):
        if step == first:
            disk.start = bytes(disk.image)
            disk.events.clear()
        wipe = run.advance()
        if light and step >= first and not wipe:
            run.store.commit(None)
        else:
            run.commit(wipe=wipe)
        disk.acknowledge(run.step)
    return disk


def try_all(sector: int | None, block: int | None, first: int, steps: int) -> Losses:
    """Reads every crash state of a history of whole commits.

    All of a step is there, or nothing of it.
    """
    layout, losses = layout_of(sector), Losses()
    walk = Scripted(RamDisk(bytes(layout.geometry.size)), layout)
    digests = [walk.digest()]
    for _ in range(first + steps):
        walk.advance()
        digests.append(walk.digest())
    for state in crash_states(record(layout, first, steps, light=False), block):
        run = Scripted(RamDisk(state.image), layout)
        run.open()
        losses.states += 1
        losses.lost += run.step < max(first, state.acknowledged)
        losses.wrong += run.digest() != digests[run.step]
    return losses


def try_all_light(sector: int | None, block: int | None, first: int, steps: int) -> Losses:
    """Reads every crash state of samples committed alone.

    What was acknowledged is there, or made way for others.
    """
    layout, losses = layout_of(sector), Losses()
    disk = RecordingDisk(bytes(layout.geometry.size))
    run = Scripted(disk, layout)
    run.format(layout.geometry)
    held: list[set[int]] = [set()]
    for step in range(first + steps):
        if step == first:
            disk.start = bytes(disk.image)
            disk.events.clear()
        run.advance_alone(step)
        run.store.commit(None if step >= first else run.state())
        held.append(set(run.store.records))
        disk.acknowledge(step + 1)
    for state in crash_states(disk, block):
        again = Scripted(RamDisk(state.image), layout)
        again.open()
        losses.states += 1
        done = max(first, state.acknowledged)
        # In the middle of the next commit some of its samples may already have taken the
        # places of others.
        following = held[min(done + 1, len(held) - 1)]
        losses.lost += not held[done] & following <= set(again.store.records)
        losses.wrong += not set(again.store.records) <= held[done] | following
    return losses


def try_resizes(folder: Path, budgets: tuple[int, int], block: int | None) -> Losses:
    """Reads every crash state of a change of the budget in place, opened as an agent does."""
    before, after = (
        plan(StoreOptions(path=str(folder / "s"), budget=b, log_length=64), FORM, STATE_BYTES)
        for b in budgets
    )
    losses = Losses()
    disk = RecordingDisk(bytes(max(before.geometry.size, after.geometry.size)))
    run = Scripted(disk, before)
    form = {"dtype": "<f4", "shape": [24], "deflate_to": None, "name_bytes": 0, "key": None}
    use = {"labels": REGIONS, "model": "", "capacity": before.capacity, "salt": 1}
    run.file.format(Label(before.geometry, form | use))
    for _ in range(7):
        run.commit(wipe=run.advance())
    held = set(run.store.records)
    disk.start = bytes(disk.image)
    disk.events.clear()
    blobs = run.file.load()
    assert resize(run.file, blobs, Label(after.geometry, form | use))
    path = folder / "s"
    for state in crash_states(disk, block):
        path.write_bytes(state.image)
        opened = open_file(after, REGIONS)
        fresh = Scripted(opened.file.disk, replace(after))
        fresh.file = opened.file
        fresh.store.load(opened.blobs)
        losses.states += 1
        losses.lost += not held <= set(fresh.store.records)
        losses.wrong += len(held) != len(fresh.store.records)
        opened.file.disk.close()
    return losses
