"""Opening the store's file: the right label, key and size, whatever state a crash or a failing flash left it in."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep.agent.audit import CHUNK, ROW_BYTES
from fedkeep.agent.cellfile import CellFile, Contents
from fedkeep.agent.cells import HEADER, PAGE, Geometry, Label, decode_label
from fedkeep.agent.cipher import OVERHEAD, Cipher, check_key, read_key
from fedkeep.agent.disk import FileDisk, StoreError
from fedkeep.agent.durable_store import RANK_BYTES
from fedkeep.agent.form import SampleForm
from fedkeep.agent.record import META_BYTES, SAMPLE, decode_sample, encode_sample
from fedkeep.core.errors import ConfigError

log = logging.getLogger(__name__)
_ALIGNMENT = 64
_SMALL_ARRAYS = 12
"""Cells for the arrays of a device whose size is no multiple of a cell."""


@dataclass(frozen=True)
class StoreOptions:
    """Where samples are kept, how many bytes they may take, and for how long."""

    path: str = "fedkeep.store"
    budget: int = 9_000_000
    """Bytes of the file, with its journal, indexes and the device's state; the file has this size from the start."""
    ttl_days: float = 30.0
    """A sample older than this is removed and overwritten; 0 keeps samples for ever."""
    clock_tolerance_hours: float = 24.0
    """How wrong the wall clock may be after a reboot before a TTL could fire early."""
    commit_ms: int = 100
    """Samples are committed together at most this often, to spare the flash."""
    log_length: int | None = None
    """How many decisions are remembered for `fedkeep agent why`; None: as many as fit a twentieth of the budget."""
    key_file: str | None = None
    """A file with the key of 64 hex digits under which samples are encrypted; None: not encrypted."""
    key_env: str | None = None
    """An environment variable with that key, instead of a file."""

    def __post_init__(self) -> None:
        for name in ("ttl_days", "clock_tolerance_hours", "log_length"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"{name} must be 0 or more, got {value}")
        if not 1 <= self.commit_ms <= 10_000:
            raise ValueError(f"commit_ms must be between 1 and 10000, got {self.commit_ms}")
        if self.budget < 8 * PAGE:
            raise ValueError(f"budget must be at least {8 * PAGE} bytes, got {self.budget}")
        if self.key_file is not None and self.key_env is not None:
            raise ValueError("key_file and key_env must not both be set")

    @property
    def decisions(self) -> int:
        """The length of the log of decisions."""
        return min(2048, self.budget // (20 * ROW_BYTES)) if self.log_length is None else self.log_length

    def cipher(self) -> Cipher | None:
        if self.key_file is None and self.key_env is None:
            return None
        return Cipher(read_key(Path(self.key_file) if self.key_file else None, self.key_env))


@dataclass(frozen=True)
class Layout:
    """How a budget is divided."""

    geometry: Geometry
    capacity: int
    """The samples it holds."""
    reserve: int
    """The samples that one commit may replace; there is room for both the old and the new ones."""


def plan(options: StoreOptions, form: SampleForm, state_bytes: int) -> Layout:
    """The most samples for a budget, with room for a second copy of whatever one commit can change.

    `state_bytes` is what the device commits besides samples: model, direction, estimator.
    """
    layout = _layout(options, form, state_bytes)
    if layout.capacity:
        return layout
    low, high = options.budget // PAGE, 2 * (options.budget + 4 * state_bytes + 64 * form.nbytes) // PAGE + 1024
    while low + 1 < high:
        middle = (low + high) // 2
        fits = _layout(replace(options, budget=middle * PAGE), form, state_bytes).capacity
        low, high = (low, middle) if fits else (middle, high)
    least = high * PAGE
    raise ConfigError(f"a budget of {options.budget} bytes holds no sample beside the model: it needs {least}")


def _layout(options: StoreOptions, form: SampleForm, state_bytes: int) -> Layout:
    overhead = HEADER + (OVERHEAD if options.key_file or options.key_env else 0)
    cell_size = -(-(overhead + META_BYTES + form.nbytes) // _ALIGNMENT) * _ALIGNMENT
    geometry = Geometry.within(options.budget, cell_size)
    payload = cell_size - overhead

    def cells(capacity: int) -> int:
        state = -(-state_bytes // payload) + _SMALL_ARRAYS
        ranks = -(-RANK_BYTES * capacity // payload) + capacity // 64 + 1
        chunks = -(-options.decisions // CHUNK) + _reserve(capacity) // CHUNK + 2
        log_cells = chunks * -(-(CHUNK * ROW_BYTES + 512) // payload)
        return capacity + _reserve(capacity) + 2 * (state + ranks) + log_cells

    low, high = 0, geometry.cells
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cells(middle) <= geometry.cells else (low, middle - 1)
    return Layout(geometry, low, _reserve(low))


def _reserve(capacity: int) -> int:
    return max(8, min(capacity, 128, max(32, capacity // 8)))


def open_file(options: StoreOptions, form: SampleForm, geometry: Geometry) -> tuple[CellFile, Contents, FileDisk]:
    """The file, made or found, and what is in it; a damaged one is copied aside and gives back what is undamaged."""
    path = Path(options.path)
    _new_path(path).unlink(missing_ok=True)
    cipher = options.cipher()
    label = Label(geometry, _form(form, cipher))
    existed = path.exists() and path.stat().st_size > 0
    found, both = _find_label(path) if existed else (None, False)
    if found is not None:
        _check_form(found, label, cipher, path)
        if found.geometry != geometry:
            _resize(path, found, label, form, cipher)
    disk = FileDisk(path, geometry.size)
    file = CellFile(disk, geometry, cipher)
    if not existed or _blank(path):
        file.format(label)
    contents = file.load()
    if existed and found is None and contents.blobs:
        contents.damage.label = True
    if contents.damage:
        _set_aside(path)
    if not both:
        file.write_label(label)
    return file, contents, disk


def set_aside_path(path: Path) -> Path:
    """Where the copy of a damaged file goes; there is at most one."""
    return path.with_name(path.name + ".damaged")


def discard_set_aside(path: Path) -> None:
    """Overwrites and removes the copy of a damaged file: it holds samples that must not outlive the store's own."""
    aside = set_aside_path(path)
    if not aside.exists():
        return
    with aside.open("r+b") as file:
        file.write(bytes(aside.stat().st_size))
        file.flush()
        os.fsync(file.fileno())
    aside.unlink()


def _new_path(path: Path) -> Path:
    return path.with_name(path.name + ".new")


def _form(form: SampleForm, cipher: Cipher | None) -> dict[str, Any]:
    return {"dtype": form.dtype.str, "shape": list(form.shape), "key": cipher.name if cipher else None}


def _find_label(path: Path) -> tuple[Label | None, bool]:
    """The label at either end of the file, and whether it stands at both."""
    with path.open("rb") as file:
        first = file.read(PAGE).ljust(PAGE, b"\0")
        file.seek(max(0, path.stat().st_size - PAGE))
        last = file.read(PAGE).ljust(PAGE, b"\0")
    label = decode_label(first) or decode_label(last)
    return label, label is not None and first == last


def _blank(path: Path) -> bool:
    """Whether a file holds nothing at all, as after a crash while it was being made."""
    with path.open("rb") as file:
        while chunk := file.read(1 << 18):
            if chunk.strip(b"\0"):
                return False
    return True


def _check_form(found: Label, wanted: Label, cipher: Cipher | None, path: Path) -> None:
    check_key(found.form["key"], cipher, path)
    for name in ("shape", "dtype"):
        if found.form[name] != wanted.form[name]:
            raise StoreError(
                f"{path} holds samples of {name} {found.form[name]}, not {wanted.form[name]}: "
                "set [model] to match, or move the file away to start anew"
            )


def _set_aside(path: Path) -> None:
    """Keeps a copy of a damaged file for whoever wants to look; without room for one, goes on all the same."""
    import shutil  # a megabyte that most agents never need

    aside = set_aside_path(path)
    try:
        shutil.copyfile(path, aside)
        aside.chmod(0o600)
        log.warning("%s is damaged: a copy is at %s, what is undamaged goes on", path, aside)
    except OSError as error:
        aside.unlink(missing_ok=True)
        log.warning("%s is damaged and there was no room to set a copy aside (%s)", path, error.strerror)


def _resize(path: Path, found: Label, wanted: Label, form: SampleForm, cipher: Cipher | None) -> None:
    """Moves all into a file of another budget; of too many samples, those with the highest scores."""
    disk = FileDisk(path, found.geometry.size)
    contents = CellFile(disk, found.geometry, cipher).load()
    new_path = _new_path(path)
    new_disk = FileDisk(new_path, wanted.geometry.size)
    new = CellFile(new_disk, wanted.geometry, cipher)
    new.format(wanted)
    samples = [decode_sample(b, form.dtype, form.shape) for b in contents.blobs if b.kind == SAMPLE]
    samples.sort(key=lambda sample: -sample[0].score)
    arrays = [(b.kind, b.data) for b in contents.blobs if b.kind != SAMPLE]
    room = max(0, new.free // 2 - sum(new.cells_for(len(data)) for _, data in arrays))
    new.commit([*arrays, *((SAMPLE, encode_sample(note, x)) for note, x in samples[:room])], [])
    new_path.replace(path)
    disk.close()
    new_disk.close()


def form_of(dtype: str, shape: tuple[int, ...]) -> SampleForm:
    return SampleForm(np.dtype(dtype), shape)
