"""A file system of its own on a loop device, where the machine allows it.

What reaches the device is counted there.
"""

import fcntl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

_SECTOR = 512
_SECTORS_WRITTEN = 6
"""The column of a device's `stat`, in sectors whatever its own size."""


_FLUSH = 0x1261
"""BLKFLSBUF: a device's own cache is given up."""


@dataclass(frozen=True)
class BlockDevice:
    """A mounted ext4, alone on its device."""

    mount: Path
    device: str

    def written(self) -> int:
        """Return the bytes written to the device so far, journal and metadata included."""
        subprocess.run(["sync", "-f", str(self.mount)], check=True)
        columns = Path(f"/sys/block/{self.device}/stat").read_text().split()
        return int(columns[_SECTORS_WRITTEN]) * _SECTOR

    def image(self) -> bytes:
        """Return all bytes of the device."""
        self.written()
        with Path(f"/dev/{self.device}").open("rb") as device:
            fcntl.ioctl(device, _FLUSH)  # else what was read before is read again
            return device.read()


@contextmanager
def block_device(folder: Path, name: str, megabytes: int = 64) -> Iterator[BlockDevice | None]:
    """Make an ext4 with blocks of 4 kB on a loop device; None where that is not allowed."""
    image, mount = folder / f"{name}.img", folder / name
    with ExitStack() as undo:
        try:
            with image.open("wb") as file:
                file.truncate(megabytes << 20)
            _run("mkfs.ext4", "-q", "-F", "-b", "4096", str(image))
            device = _run("losetup", "--show", "-f", str(image))
            undo.callback(_run, "losetup", "-d", device)
            mount.mkdir()
            _run("mount", device, str(mount))
            undo.callback(_run, "umount", "-l", str(mount))  # also where a measurement failed
        except (OSError, subprocess.CalledProcessError):
            yield None
            return
        yield BlockDevice(mount, Path(device).name)


def _run(*command: str) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.strip()
