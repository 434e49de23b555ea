"""Samples committed alone, without a root: a kill or power cut loses nothing acknowledged."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedkeep.agent.cellfile import FileDisk
from tests.faults.kills import _fork
from tests.faults.power_loss import RecordingDisk, crash_image
from tests.faults.script import BATCH, LAYOUT, REGIONS, RamDisk, Scripted, sample, samples

_WHOLE_EVERY = 37


@dataclass
class Losses:
    tried: int = 0
    lost: int = 0
    wrong: int = 0


def take(run: Scripted, step: int) -> None:
    """Offers the next samples, each of a higher score than all before, and commits them alone.

    Some steps commit the state too.
    """
    batch = samples(step * BATCH, BATCH)
    run.store.offer(batch, batch.y, batch.ids.astype(np.float64), batch.ids)
    run.store.commit({"estimator": np.full(300, float(step))} if step % _WHOLE_EVERY == 0 else None)


def judge(run: Scripted, acknowledged: set[int], losses: Losses) -> None:
    """Checks which samples of the acknowledged steps are missing.

    One may be missing only where newer ones of its region take the room, but for the places of one
    batch: of two newcomers a crash may leave the one that replaced it, and not the other.
    """
    held = run.store.stored().batch
    losses.tried += 1
    losses.wrong += sum(
        not np.array_equal(x, sample(i)) for x, i in zip(held.x, held.ids.tolist(), strict=True)
    )
    room, ids = int(run.quotas[0]), held.ids
    for id_ in {step * BATCH + i for step in acknowledged for i in range(BATCH)} - set(
        ids.tolist()
    ):
        region = ids[ids % REGIONS == id_ % REGIONS]
        losses.lost += int((region > id_).sum()) < room - BATCH // REGIONS


def newest(run: Scripted) -> int:
    """The step after the last that left a sample."""
    return int(run.store.stored().batch.ids.max(initial=-1)) // BATCH + 1


def try_kills(path: Path, kills: int, seed: int = 0) -> Losses:
    """Kills processes that commit samples alone, at random moments, and reads what they left."""
    rng, losses = np.random.default_rng(seed), Losses()
    acknowledged = _anew(path)
    for _ in range(kills):
        acknowledged |= _killed_child(path, float(rng.uniform(0.005, 0.03)))
        disk = FileDisk(path, LAYOUT.geometry.size)
        run = Scripted(disk)
        run.open()
        disk.close()
        judge(run, acknowledged, losses)
        if len(acknowledged) > 400:
            acknowledged = _anew(path)
    return losses


def _anew(path: Path) -> set[int]:
    """An empty store, of which nothing is acknowledged."""
    path.unlink(missing_ok=True)
    disk = FileDisk(path, LAYOUT.geometry.size)
    Scripted(disk).format()
    disk.close()
    return set()


def _killed_child(path: Path, seconds: float) -> set[int]:
    """The steps that a process acknowledged before it died."""
    reader, writer = os.pipe()
    pid = _fork()
    if pid == 0:
        try:
            run = Scripted(FileDisk(path, LAYOUT.geometry.size))
            run.open()
            for step in range(newest(run), 10**6):
                take(run, step)
                os.write(writer, step.to_bytes(8, "little"))
        finally:
            os._exit(1)
    os.close(writer)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    acks = b""
    while chunk := os.read(reader, 1 << 16):
        acks += chunk
    os.close(reader)
    os.waitpid(pid, 0)
    return {int.from_bytes(acks[i : i + 8], "little") for i in range(0, len(acks) - 7, 8)}


def try_power_cuts(steps: int, states: int, seed: int = 0) -> Losses:
    """Cuts the power at random points, with unsynced sectors lost, torn and reordered."""
    rng, losses = np.random.default_rng(seed), Losses()
    disk = RecordingDisk(bytes(LAYOUT.geometry.size))
    run = Scripted(disk)
    run.format()
    disk.start = bytes(disk.image)
    disk.events.clear()
    for step in range(steps):
        take(run, step)
        disk.acknowledge(step + 1)
    for _ in range(states):
        image, acknowledged = crash_image(disk, int(rng.integers(0, len(disk.events) + 1)), rng)
        again = Scripted(RamDisk(image))
        again.open()
        judge(again, set(range(acknowledged)), losses)
    return losses
