"""Opening the store's file: its own and no other, under the right label, key and size, whatever a crash left of it."""

from __future__ import annotations

import errno
import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedkeep.agent.cellfile import Blob, CellFile, Contents
from fedkeep.agent.cells import PAGE, Geometry, Label, claims_to_be_a_store, decode_label
from fedkeep.agent.cipher import Cipher, check_key
from fedkeep.agent.copies import set_aside
from fedkeep.agent.disk import FileDisk, ReadOnlyDisk, StoreError
from fedkeep.agent.form import SampleForm
from fedkeep.agent.identity import Identity
from fedkeep.agent.layout import StoreLayout, StoreOptions, least_budget
from fedkeep.agent.record import META_BYTES, SAMPLE, decode_note, decode_sample, encode_sample
from fedkeep.agent.shelf import older_arrays
from fedkeep.core.errors import ConfigError

log = logging.getLogger(__name__)
_FOR_GOOD = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.ENOENT, errno.ELOOP, errno.ENAMETOOLONG,
)  # fmt: skip
"""What does not mend itself; a disk that is full or fails may."""
_AT_ONCE = 4096
"""Blobs that are moved to another file in one commit."""


@dataclass(frozen=True)
class Opened:
    """The store's file, and what is in it."""

    file: CellFile
    contents: Contents
    disk: FileDisk
    before: Identity | None
    """For what it was made, if that is known."""


def open_file(options: StoreOptions, form: SampleForm, layout: StoreLayout, identity: Identity) -> Opened:
    """The file, made or found, and what is in it.

    A file that is not a store is refused untouched; a damaged store gives back what is undamaged; one of another
    budget or an earlier format is moved over whole, or refused with the budget that it needs.
    """
    path, cipher = options.file, options.cipher()
    wanted = Label(layout.geometry, {**_form(form, cipher, identity), "capacity": layout.capacity})
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is not a file: left untouched; set [store] path to another")
        if not path.exists() or not path.stat().st_size:
            _make(path, wanted, cipher)
        elif beside(path).exists() and _is_left_over(beside(path)):
            beside(path).unlink()  # of a move that was killed: its bytes are in no budget
        return _open(path, options, form, layout, wanted, cipher)
    except OSError as error:
        if error.errno not in _FOR_GOOD:
            raise StoreError(f"{path} cannot be used now: {error.strerror}") from error
        raise ConfigError(f"{path} cannot be used as a store: {error.strerror}; set [store] path to another") from error


def _open(
    path: Path, options: StoreOptions, form: SampleForm, layout: StoreLayout, wanted: Label, cipher: Cipher | None
) -> Opened:
    found, both = find_label(path, wanted.geometry)
    _check_form(found, wanted, cipher, path)
    disk = FileDisk(path, found.geometry.size)
    try:
        file = CellFile(disk, found.geometry, cipher)
        contents = file.load()
        if not found.form:
            contents.damage.label = True
            _check_records(contents, form, path)
        _report(path, contents, options)
        _check_labels(contents, wanted, path)
        _fit(path, file, contents, options, form, layout)
        if found.geometry != wanted.geometry:
            moved = _move(path, contents.blobs, wanted, cipher)
            disk.close()
            disk, file = moved
            contents = Contents(file.load().blobs, contents.damage)
        elif not both or found != wanted:
            file.write_label(wanted)
    except BaseException:
        disk.close()
        raise
    before = Identity(found.form["labels"], found.form["model"]) if "model" in found.form else None
    return Opened(file, contents, disk, before)


def find_label(path: Path, likely: Geometry | None) -> tuple[Label, bool]:
    """The label at either end of the file, and whether it stands at both.

    Without a label it is a store only if it holds parts of one where they would `likely` be; else it is somebody
    else's, and nothing of it may change.
    """
    with path.open("rb") as file:
        first = file.read(PAGE).ljust(PAGE, b"\0")
        file.seek(max(0, path.stat().st_size - PAGE))
        last = file.read(PAGE).ljust(PAGE, b"\0")
    label = decode_label(first) or decode_label(last)
    if label is not None:
        return label, first == last
    if likely is not None and _holds_cells(path, likely):
        return Label(likely, {}), False
    if claims_to_be_a_store(first):
        raise ConfigError(f"{path} was made by a later version of fedkeep, or is damaged at both ends: left untouched")
    raise ConfigError(f"{path} is not a store of fedkeep: left untouched; set [store] path to another file")


def _holds_cells(path: Path, geometry: Geometry) -> bool:
    disk = ReadOnlyDisk(path)
    try:
        contents = CellFile(disk, geometry).load()
    finally:
        disk.close()
    return not contents.damage.roots or bool(contents.blobs)


def _form(form: SampleForm, cipher: Cipher | None, identity: Identity) -> dict[str, Any]:
    key = cipher.name if cipher else None
    sample = {"dtype": form.name, "shape": list(form.shape), "key": key}
    return {**sample, "labels": identity.labels, "model": identity.model}


def _check_form(found: Label, wanted: Label, cipher: Cipher | None, path: Path) -> None:
    if not found.form:
        return
    check_key(found.form["key"], cipher, path)
    for name in ("shape", "dtype"):
        if found.form[name] != wanted.form[name]:
            raise ConfigError(
                f"{path} holds samples of {name} {found.form[name]}, not {wanted.form[name]}: set [samples] shape and "
                "dtype and [store] encoding as they were, or [store] path to another file "
                "(`fedkeep agent store export` takes the samples out of this one)"
            )


def _check_records(contents: Contents, form: SampleForm, path: Path) -> None:
    """Without a label nothing says what the samples are: they must look as configured, or nothing is touched."""
    lengths = {len(blob.data) for blob in contents.blobs if blob.kind == SAMPLE and blob.version > 1}
    if not contents.blobs or lengths - {META_BYTES + form.nbytes}:
        raise ConfigError(
            f"{path} has lost its label, and what it holds is not as [samples] and the key of [store] say: "
            "left untouched; set them as they were when it was made"
        )


def _report(path: Path, contents: Contents, options: StoreOptions) -> None:
    if contents.damage:
        log.warning("%s is damaged: %s; all else goes on", path, contents.damage)
        set_aside(path, options.damaged_bytes)
    elif contents.damage.root_copies:
        log.warning("%s: %d copies of a root are damaged; nothing is lost", path, contents.damage.root_copies)


def _check_labels(contents: Contents, wanted: Label, path: Path) -> None:
    labels = wanted.form["labels"]
    beyond = {note.label for b in contents.blobs if b.kind == SAMPLE and (note := decode_note(b)).label >= labels}
    if beyond:
        raise ConfigError(
            f"{path} holds samples of label {max(beyond)}, but [samples] labels is {labels}: set it to "
            f"{max(beyond) + 1} or more, or first erase them by `fedkeep agent erase --label {max(beyond)}`"
        )


def _fit(
    path: Path, file: CellFile, contents: Contents, options: StoreOptions, form: SampleForm, layout: StoreLayout
) -> None:
    """Refuses a budget that would cost samples; what was salvaged beyond it was replaced before, and goes."""
    if contents.damage:
        gone = superfluous(contents.blobs, layout.capacity)
        contents.blobs[:] = [blob for blob in contents.blobs if blob.number not in gone]
        file.discard(gone)
    count = len({decode_note(blob).id for blob in contents.blobs if blob.kind == SAMPLE})
    if count > layout.capacity:
        least = least_budget(options, form, layout.state_bytes, count)
        raise ConfigError(
            f"{path} holds {count} samples and [store] budget = {options.budget} has room for {layout.capacity}: "
            f"set it to {least} or more, or first erase some (`fedkeep agent store export` takes them out)"
        )


def superfluous(blobs: list[Blob], capacity: int) -> set[int]:
    """The numbers of blobs that go: earlier records of the same, then samples beyond the capacity.

    Regions take turns, each with its highest scores first, so that none is lost to another's larger values.
    """
    newest: dict[int, Blob] = {}
    gone = older_arrays(blobs)
    for blob in sorted((b for b in blobs if b.kind == SAMPLE), key=lambda b: b.number):
        id_ = decode_note(blob).id
        if id_ in newest:
            gone.add(newest[id_].number)
        newest[id_] = blob
    notes = sorted(((decode_note(blob), blob.number) for blob in newest.values()), key=lambda pair: -pair[0].score)
    turns: Counter[int] = Counter()
    ranked = []
    for note, number in notes:
        ranked.append((turns[note.region], number))
        turns[note.region] += 1
    return gone | {number for _, number in sorted(ranked)[capacity:]}


def _make(path: Path, label: Label, cipher: Cipher | None) -> None:
    """An empty store, under its name only once it is whole."""
    disk, _ = _make_beside(path, label, cipher)
    beside(path).replace(path)
    disk.close()


def beside(path: Path) -> Path:
    """Where a file is made before it takes its name."""
    return path.with_name(path.name + ".new")


def _make_beside(path: Path, label: Label, cipher: Cipher | None) -> tuple[FileDisk, CellFile]:
    new = beside(path)
    if new.exists() and not _is_left_over(new):
        raise ConfigError(f"{new} is in the way, and not a store of fedkeep: move it away")
    new.unlink(missing_ok=True)
    try:
        disk = FileDisk(new, label.geometry.size)
        file = CellFile(disk, label.geometry, cipher)
        file.format(label)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    return disk, file


def _is_left_over(path: Path) -> bool:
    """Whether a file is one that an earlier process was making when it was killed."""
    with path.open("rb") as file:
        first = file.read(PAGE)
    return claims_to_be_a_store(first) or not first.strip(b"\0")


def _move(path: Path, blobs: list[Blob], label: Label, cipher: Cipher | None) -> tuple[FileDisk, CellFile]:
    """All blobs in a new file, which takes the old one's name once it is whole."""
    disk, file = _make_beside(path, label, cipher)
    try:
        for start in range(0, len(blobs), _AT_ONCE):
            file.commit([(blob.kind, _upgraded(blob)) for blob in blobs[start : start + _AT_ONCE]], [])
        beside(path).replace(path)
    except BaseException:
        disk.close()
        beside(path).unlink(missing_ok=True)
        raise
    log.info("%s moved to a budget of %d bytes with all it held", path, label.geometry.size)
    return disk, file


def _upgraded(blob: Blob) -> bytes:
    """Its bytes in the present format."""
    return encode_sample(*decode_sample(blob)) if blob.kind == SAMPLE else blob.data
