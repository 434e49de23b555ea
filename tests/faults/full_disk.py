"""A disk that is full, or fails, at one chosen call and works again afterwards."""

import errno
from dataclasses import dataclass

from tests.faults.script import LAYOUT, Expected, RamDisk, Scripted


class FailingDisk(RamDisk):
    """Fails the n-th call; a failing write gets half-way first."""

    def __init__(self, image: bytes, fails_at: int) -> None:
        super().__init__(image)
        self.calls = 0
        self.fails_at = fails_at

    def write(self, offset: int, data: bytes) -> None:
        if self._fails():
            super().write(offset, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(offset, data)

    def sync(self) -> None:
        if self._fails():
            raise OSError(errno.EIO, "Input/output error")

    def _fails(self) -> bool:
        self.calls += 1
        return self.calls == self.fails_at


@dataclass
class Failures:
    calls: int = 0
    lost: int = 0
    wrong: int = 0
    stuck: int = 0


def try_every_call(steps: int) -> Failures:
    """Runs the script once for each call that it makes on the disk, with that call failing."""
    expected, failures, fails_at = Expected(), Failures(), 0
    start = RamDisk(bytes(LAYOUT.geometry.size))
    Scripted(start).format()
    while True:
        fails_at += 1
        disk = FailingDisk(bytes(start.image), fails_at)
        run = Scripted(disk)
        try:
            run.open()
        except OSError:
            run.open()
        failed = _walk(run, steps, failures, expected)
        if not failed and disk.calls < fails_at:
            return failures
        failures.calls += 1
        again = Scripted(RamDisk(disk.image))
        again.open()
        failures.stuck += again.step != steps
        failures.wrong += again.digest() != expected.after(again.step)


def _walk(run: Scripted, steps: int, failures: Failures, expected: Expected) -> bool:
    """To the end of the script; a step whose commit failed is taken again. True if one failed."""
    failed = False
    while run.step < steps:
        committed = run.step
        try:
            run.commit(wipe=run.advance())
        except OSError:
            failed = True
            run.reload()
            failures.lost += run.step < committed
            failures.wrong += run.digest() != expected.after(run.step)
    return failed
