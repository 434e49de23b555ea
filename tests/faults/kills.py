"""Processes that really die: `kill -9` at random and at every call of the store on its disk."""

import os
import signal
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedkeep.agent.cellfile import FileDisk
from fedkeep.agent.cells import PAGE
from tests.faults.script import LAYOUT, Expected, Scripted

POINTS = tuple(
    f"{when} {what}"
    for what in ("cells", "cells sync", "root", "root sync", "wipe")
    for when in ("before", "amid", "after")
    if not ("sync" in what and when == "amid")
)


class DyingDisk(FileDisk):
    """Kills its own process at a named point of a commit, the n-th time that it gets there."""

    def __init__(self, path: Path, size: int, point: str, countdown: int) -> None:
        super().__init__(path, size)
        self._point, self._countdown = point, countdown
        self._last = "cells"

    def write(self, offset: int, data: bytes) -> None:
        geometry = LAYOUT.geometry
        root = offset < PAGE + 2 * geometry.root_size or offset >= geometry.root(0, 1)
        self._last = "root" if root else "cells" if data.strip(b"\0") else "wipe"
        self._pass(f"before {self._last}")
        if self._is(f"amid {self._last}"):
            super().write(offset, data[: len(data) // 2])
            self._pass(f"amid {self._last}")
        super().write(offset, data)
        self._pass(f"after {self._last}")

    def sync(self) -> None:
        self._pass(f"before {self._last} sync")
        super().sync()
        self._pass(f"after {self._last} sync")

    def _is(self, point: str) -> bool:
        return point == self._point

    def _pass(self, point: str) -> None:
        if self._is(point):
            self._countdown -= 1
            if self._countdown == 0:
                os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Tally:
    kills: int = 0
    lost: int = 0
    wrong: int = 0


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # the child touches no thread of the parent's
        return os.fork()


def _live(disk: FileDisk, acks: int) -> None:
    """The child: goes on from where the last one died, acknowledging each step once committed."""
    run = Scripted(disk)
    run.open()
    while True:
        run.commit(wipe=run.advance())
        os.write(acks, run.step.to_bytes(8, "little"))


def _run_child(path: Path, point: str | None, rng: np.random.Generator) -> int:
    """Starts a child and lets it die; returns the last step that it acknowledged."""
    reader, writer = os.pipe()
    pid = _fork()
    if pid == 0:
        try:
            size = LAYOUT.geometry.size
            _live(
                DyingDisk(path, size, point, int(rng.integers(1, 4)))
                if point
                else FileDisk(path, size),
                writer,
            )
        finally:
            os._exit(1)
    os.close(writer)
    if point is None:
        time.sleep(float(rng.uniform(0.002, 0.03)))
        os.kill(pid, signal.SIGKILL)
    acks = b""
    while chunk := os.read(reader, 1 << 16):
        acks += chunk
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), f"the child ended by itself at {point}"
    return (
        int.from_bytes(acks[len(acks) - len(acks) % 8 - 8 :][:8], "little") if len(acks) >= 8 else 0
    )


def try_kills(path: Path, kills: int, seed: int = 0) -> Tally:
    """Kills `kills` processes, half at random, half at the named points; reads the store after."""
    rng = np.random.default_rng(seed)
    disk = FileDisk(path, LAYOUT.geometry.size)
    Scripted(disk).format()
    disk.close()
    expected, tally, before = Expected(), Tally(), 0
    for kill in range(kills):
        point = POINTS[kill // 2 % len(POINTS)] if kill % 2 else None
        acknowledged = max(before, _run_child(path, point, rng))
        disk = FileDisk(path, LAYOUT.geometry.size)
        run = Scripted(disk)
        run.open()
        disk.close()
        tally.kills += 1
        tally.lost += run.step < acknowledged
        tally.wrong += run.digest() != expected.after(run.step)
        before = run.step
    return tally
