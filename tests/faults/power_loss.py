"""Power cuts: the store's writes and syncs are recorded and replayed as far as a disk could get."""

from dataclasses import dataclass, field

import numpy as np

from tests.faults.script import LAYOUT, Expected, RamDisk, Scripted

SECTOR = 512


@dataclass
class RecordingDisk(RamDisk):
    """Keeps all writes, and how many had been made at each sync and at each acknowledgement."""

    def __init__(self, image: bytes) -> None:
        super().__init__(image)
        self.start = bytes(image)
        self.events: list[tuple[str, int, bytes]] = []

    def write(self, offset: int, data: bytes) -> None:
        super().write(offset, data)
        self.events.append(("write", offset, data))

    def sync(self) -> None:
        self.events.append(("sync", 0, b""))

    def acknowledge(self, step: int) -> None:
        self.events.append(("ack", step, b""))


@dataclass
class Losses:
    """What went wrong over all crash states."""

    states: int = 0
    lost: int = 0
    wrong: int = 0
    details: list[str] = field(default_factory=list)


def record(steps: int) -> RecordingDisk:
    """A run of the script from an empty store."""
    disk = RecordingDisk(bytes(LAYOUT.geometry.size))
    run = Scripted(disk)
    run.format()
    disk.start = bytes(disk.image)
    disk.events.clear()
    for _ in range(steps):
        run.commit(wipe=run.advance())
        disk.acknowledge(run.step)
    return disk


def crash_image(disk: RecordingDisk, point: int, rng: np.random.Generator) -> tuple[bytes, int]:
    """The file after a power cut at event `point`, and the last step acknowledged by then.

    Synced writes are there. Of the others any may be missing, in part and in any order, by sectors.
    """
    events = disk.events[:point]
    synced = max((i for i, event in enumerate(events) if event[0] == "sync"), default=-1)
    image = bytearray(disk.start)
    unsynced: list[tuple[int, bytes]] = []
    for i, (kind, offset, data) in enumerate(events):
        if kind == "write" and i < synced:
            image[offset : offset + len(data)] = data
        elif kind == "write":
            unsynced += _sectors(offset, data)
    survive = rng.random(len(unsynced)) < rng.choice([0.0, 0.1, 0.5, 0.9, 1.0])
    for i in rng.permutation(len(unsynced)):
        offset, data = unsynced[i]
        if survive[i]:
            image[offset : offset + len(data)] = data
    acknowledged = max((event[1] for event in events if event[0] == "ack"), default=0)
    return bytes(image), acknowledged


def _sectors(offset: int, data: bytes) -> list[tuple[int, bytes]]:
    """A write in the pieces that a disk writes whole."""
    pieces = []
    while data:
        size = SECTOR - offset % SECTOR
        pieces.append((offset, data[:size]))
        offset, data = offset + size, data[size:]
    return pieces


def try_power_cuts(steps: int, states: int, seed: int = 0) -> Losses:
    """Cuts the power at `states` random points and checks what comes back each time."""
    rng = np.random.default_rng(seed)
    disk, expected, losses = record(steps), Expected(), Losses()
    for _ in range(states):
        point = int(rng.integers(0, len(disk.events) + 1))
        image, acknowledged = crash_image(disk, point, rng)
        run = Scripted(RamDisk(image))
        run.open()
        losses.states += 1
        losses.lost += run.step < acknowledged
        losses.wrong += run.digest() != expected.after(run.step)
    return losses
