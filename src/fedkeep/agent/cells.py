"""The store's file, byte by byte.

A label, two roots, and cells of one size that each describe themselves.

    [label 4096][root A][root B][cell 0][cell 1] ... [copy of root A][copy of root B][copy of the
    label 4096]

A cell holds one part of one blob: a sample, or an array of the device's state. Its header and
checksum make it readable without any other part of the file, which is what lets a damaged file give
back all that is undamaged. A root lists the cells that count, as a bitmap under a sequence number;
the newest one that is whole wins, in either of its two places. A cell newer than that root may
count by itself: it says so, and which cell it takes the place of. Encryption at rest is AES-GCM
over the content of each cell.
"""

import json
import os
import stat
import struct
from bisect import bisect_right
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from fedkeep.core.errors import ConfigError, optional_import

FORMAT = 4
PAGE = 4096
LABEL_MAGIC = b"FEDKEEP\n"
_LABEL = struct.Struct("<8sII")
_ROOT = struct.Struct("<4sHHQII")
_ROOT_MAGIC = b"ROOT"
_CELL = struct.Struct("<2sBBIIIQI")
"""Behind it stands the checksum, over it and the data."""
_CELL_MAGIC = b"FC"
_HEADER = _CELL.size + 4
_KEY, _NONCE = 32, 12
OVERHEAD = {False: _HEADER, True: _HEADER + _NONCE + 16}
"""Bytes of a cell beside its part of a blob, by whether that is sealed."""
SHIFT = 20
"""A blob's number is that of its transaction, shifted by this, and its place within it."""
FAR = 4
"""The kind of a blob that is kept half a file away from what is written with it.

The copy of something dear.
"""
LIGHT = 0x80
"""Beside a cell's kind: it counts without a root that says so."""


@dataclass(frozen=True)
class Geometry:
    """Where things lie in a file of `size` bytes."""

    size: int
    cell_size: int
    cells: int
    root_size: int

    @classmethod
    def within(cls, budget: int, cell_size: int) -> "Geometry":
        """Return the geometry of the most cells that fit into `budget` bytes with all else.

        Also when counted in whole pages.
        """
        room = budget // PAGE * PAGE - 2 * PAGE

        def root_size(cells: int) -> int:
            """Whole pages, so that a write to one root cannot tear the other."""
            return -(-(_ROOT.size + -(-cells // 8)) // PAGE) * PAGE

        tried = range(1, room // cell_size + 1)
        cells = bisect_right(
            tried, room, key=lambda count: 4 * root_size(count) + count * cell_size
        )
        size = 2 * PAGE + 4 * root_size(cells) + -(-cells * cell_size // PAGE) * PAGE
        return cls(size, cell_size, cells, root_size(cells))

    def root(self, half: int, copy: int = 0) -> int:
        """Return where a root begins."""
        return (PAGE if copy == 0 else self.label_copy - 2 * self.root_size) + half * self.root_size

    def cell(self, index: int) -> int:
        """Return where a cell begins."""
        return PAGE + 2 * self.root_size + index * self.cell_size

    @property
    def label_copy(self) -> int:
        """Where the second label begins."""
        return self.size - PAGE


@dataclass(frozen=True)
class Label:
    """What a reader must know before it can read anything else."""

    geometry: Geometry
    form: dict[str, Any]
    """What the owner of the file writes down about its blobs, as JSON."""

    def fits(self, *later: str) -> bool:
        """Whether there is room for it in its page, also with these numbers put into it later."""
        numbers = len(json.dumps(dict.fromkeys(later, 1 << 62)))
        return len(self.encode().rstrip(b"\0")) + numbers <= PAGE

    def encode(self) -> bytes:
        """Return the label as a page."""
        body = json.dumps({"format": FORMAT, **asdict(self.geometry), "form": self.form}).encode()
        return (_LABEL.pack(LABEL_MAGIC, len(body), crc32(body)) + body).ljust(PAGE, b"\0")


def decode_label(page: bytes) -> Label | None:
    """Return the label, or None if the page is damaged.

    A whole one of another format cannot be repaired.
    """
    magic, length, checksum = _LABEL.unpack_from(page)
    body = page[_LABEL.size : _LABEL.size + length]
    if magic != LABEL_MAGIC or len(body) != length or crc32(body) != checksum:
        return None
    fields = json.loads(body)
    if (version := fields.pop("format")) != FORMAT:
        raise ConfigError(
            f"is a store of format {version} and this fedkeep reads {FORMAT}: left untouched; "
            "take its samples out by "
            "`fedkeep agent store export` of the version that wrote it, or set [store] path "
            "to another file"
        )
    return Label(form=fields.pop("form"), geometry=Geometry(**fields))


@dataclass(frozen=True)
class Root:
    """Which cells count, as of transaction `sequence`."""

    sequence: int
    bitmap: bytes
    wipe: bool = False
    """Whether free cells may still hold what was erased."""

    def encode(self, cells: int) -> bytes:
        """Return the root as bytes."""
        fields = (_ROOT_MAGIC, FORMAT, self.wipe, self.sequence, cells)
        return _ROOT.pack(*fields, crc32(self.bitmap, crc32(_ROOT.pack(*fields, 0)))) + self.bitmap


def decode_root(area: bytes, cells: int) -> Root | None:
    """Return the root, or None if it is damaged or of another geometry."""
    magic, version, wipe, sequence, count, _ = _ROOT.unpack_from(area)
    if magic != _ROOT_MAGIC or version != FORMAT or count != cells:
        return None
    root = Root(sequence, area[_ROOT.size : _ROOT.size + -(-cells // 8)], bool(wipe))
    return root if area.startswith(root.encode(cells)) else None


class FileCell(NamedTuple):
    """One part of a blob; `blob` is the same in all parts and never used twice."""

    kind: int
    blob: int
    part: int
    parts: int
    data: bytes
    light: bool = False
    """Whether it counts without a root, from the moment it is whole."""
    frees: int | None = None
    """The cell that counts no more once this one does."""

    @property
    def sequence(self) -> int:
        """The transaction that wrote it."""
        return self.blob >> SHIFT

    def encode(self) -> bytes:
        """Return the cell as bytes."""
        kind = self.kind | LIGHT * self.light
        freed = 0 if self.frees is None else self.frees + 1
        head = _CELL.pack(
            _CELL_MAGIC, FORMAT, kind, self.part, self.parts, freed, self.blob, len(self.data)
        )
        return head + crc32(self.data, crc32(head)).to_bytes(4, "little") + self.data


def decode_cell(raw: bytes) -> FileCell | None:
    """Return the cell, or None if it is empty or damaged."""
    magic, version, kind, part, parts, freed, blob, length = _CELL.unpack_from(raw)
    if magic != _CELL_MAGIC or version != FORMAT or length > len(raw) - _HEADER or part >= parts:
        return None
    data = raw[_HEADER : _HEADER + length]
    if crc32(data, crc32(raw[: _CELL.size])).to_bytes(4, "little") != raw[_CELL.size : _HEADER]:
        return None
    light = bool(kind & LIGHT)
    return FileCell(
        kind & ~LIGHT, blob, part, parts, data, light, freed - 1 if light and freed else None
    )


class Cipher:
    """Seals and opens cells under one key; a cell moved to another blob no longer opens."""

    def __init__(self, key: bytes) -> None:
        with optional_import("encryption at rest", "agent"):
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        self._aead = AESGCM(key)
        self.name = sha256(b"fedkeep store key" + key).hexdigest()[:16]
        """Tells keys apart without telling the key."""

    def seal(self, data: bytes, place: bytes) -> bytes:
        """Return the content encrypted, to be opened at this place only."""
        nonce = os.urandom(_NONCE)
        return nonce + self._aead.encrypt(nonce, data, place)

    def unseal(self, sealed: bytes, place: bytes) -> bytes | None:
        """Return the content, or None if it was tampered with."""
        from cryptography.exceptions import InvalidTag

        try:
            return self._aead.decrypt(sealed[:_NONCE], sealed[_NONCE:], place)
        except InvalidTag:
            return None


def cipher_of(file: str | Path | None, variable: str | None) -> Cipher | None:
    """Under the key of a file of 64 hex digits (or 32 raw bytes), or of an environment variable.

    None for neither.
    """
    if file is None and variable is None:
        return None
    place = str(file) if file is not None else f"the environment variable {variable}"
    try:
        if file is not None and Path(file).stat().st_mode & stat.S_IRWXO:
            raise ConfigError(f"{place} can be read by everybody: `chmod 600 {place}` first")
        key = (
            os.environ.get(variable or "", "").encode() if file is None else Path(file).read_bytes()
        )
    except OSError as error:
        raise ConfigError(
            f"the store's key cannot be read from {place}: {error.strerror}"
        ) from None
    if len(key) != _KEY:
        try:
            key = bytes.fromhex(key.decode().strip())
        except ValueError:
            key = b""
    if len(key) != _KEY:
        raise ConfigError(
            f"{place} holds no key: write 64 hex digits into it, e.g. by `openssl rand -hex 32`"
        )
    return Cipher(key)


def check_key(written: str | None, cipher: Cipher | None, path: Path) -> None:
    """Refuses to go on when the file was made under another key.

    Nothing of it could be read, nor may it be lost.
    """
    given = cipher.name if cipher else None
    if written == given:
        return
    if written is None:
        raise ConfigError(
            f"{path} is not encrypted, but a key is set: encrypt it by "
            f"`fedkeep agent store rekey {path} --new-key-file FILE`, or unset the key"
        )
    if given is None:
        raise ConfigError(
            f"{path} is encrypted: set key_file or key_env of [store] to the key {written}"
        )
    raise ConfigError(
        f"{path} was encrypted under the key {written}, not {given}: its samples need that key; "
        "`fedkeep agent store rekey` changes it where both are known"
    )
