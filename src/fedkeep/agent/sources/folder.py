"""A folder into which other programs drop npz files, or pictures, sounds and arrays."""

import fcntl
import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedkeep.agent.arrivals import SOUND_REFUSALS, IngestQueue, Source
from fedkeep.agent.payloads import SUFFIXES, looks_whole
from fedkeep.agent.record_fields import FieldNames, Record, typed
from fedkeep.core.errors import ConfigError, DataError, FedkeepError, RejectedError
from fedkeep.core.types import AnyArray

log = logging.getLogger(__name__)
_POLL_SECONDS, _LAST_SECONDS = 0.5, 1.0
_SETTLED_SECONDS = 2.0
"""A file that has not changed for so long is not being written."""
_READ = ".npz"
_UNFINISHED = {".tmp", ".part", ".partial", ".new", ".swp", ".crdownload"}
"""How programs name what they are still writing."""
_QUARANTINE, _DONE = "refused", "done"
_AT_ONCE = 32
"""Files that are samples and are under way together."""
_SIDECAR, _LONGEST_SIDECAR = ".json", 65_536
_MOSTLY = 0.5
"""A file of which more than this share is no sample was made for something else, or the labels
are set wrongly."""
_NOT_THE_FILES_FAULT = SOUND_REFUSALS | {"refused.erased", "refused.no-sample"}
_Identity = tuple[int, int, int, int]


@dataclass
class FolderSource(Source):
    """Files hold `x` (n, ...), `y` (n,) and, if wanted, `ids` (n,).

    A file without `y` holds samples whose labels come later, one without `x` the labels of such.

    Write under another suffix, then rename to .npz.

    With a decoder each .jpg, .png, .wav, .flac or .npy is a sample. Its label is the name of the
    folder within this one in which it is, or stands with all else in `NAME.json` beside it
    (`{"y": "ok", "id": 7, "time": ...}`), which is there before it; its id is its name.

    A file stays where it is until the fate of all its samples is on the disk. One that cannot be
    read, or of which most records are no samples, is never deleted: it is moved to the folder
    `refused`, with a report beside it. Two sources may read one folder: each file is read by one.
    """

    path: str
    """The folder."""
    afterwards: Literal["delete", "keep"] = "delete"
    """What becomes of a file once all its samples are judged; `keep` moves it to the folder
    `done`."""
    max_bytes: int = 64_000_000
    """A larger file is refused unread, and so is one that would unpack to more."""
    fields: dict[str, str] = field(default_factory=dict)
    """Where a `NAME.json` that is not ours has `y`, `id` and `time`: `{ y = "state" }`."""

    settles = True

    def __post_init__(self) -> None:
        self._names = FieldNames(self.fields)

    def open(self) -> None:
        """Fail if there is no such folder."""
        self._folder = Path(self.path)
        self._stuck: dict[Path, _Identity] = {}
        """Files that are done with and cannot be put away."""
        self._seen: dict[Path, tuple[_Identity | None, float]] = {}
        """What files that are not read looked like, and since when."""
        self._named: set[str] = set()
        """Suffixes already reported as not read."""
        if not self._folder.is_dir():
            raise ConfigError(f"source '{self.name}': there is no folder {self._folder}")

    def run(self, intake: IngestQueue) -> None:
        """Read every file of the folder, and those that come, until the intake is stopped."""
        is_file = intake.form.payload_bytes is not None
        self._read_suffixes = SUFFIXES if is_file else (_READ,)
        while not intake.stopped:
            found, files = False, self._files(intake)
            if is_file:
                for start in range(0, len(files), _AT_ONCE):
                    found |= self._take_payloads(files[start : start + _AT_ONCE], intake)
                files = []
            for file in files:
                found |= self._take(file, intake)
                if intake.stopped:
                    return
            if not found:
                intake.wait_stopped(_POLL_SECONDS)

    def _files(self, intake: IngestQueue) -> list[Path]:
        """Return the files to be read, by name; the others are named once for each suffix."""
        if not self._folder.is_dir():
            raise DataError(f"the folder {self._folder} is gone")
        files, others = [], dict[str, list[Path]]()
        found = sorted(self._folder.iterdir())
        if _READ not in self._read_suffixes:
            found += [one for folder in found if self._is_of_a_label(folder) for one in _in(folder)]
        self._seen = {file: self._seen[file] for file in found if file in self._seen}
        for file in found:
            if file.suffix.lower() in self._read_suffixes:
                if self._stuck.get(file) is None or self._stuck[file] != _identity(file):
                    files.append(file)
            elif file.name[0] != "." and file.suffix not in _UNFINISHED | self._named:
                if file.suffix == _SIDECAR and _READ not in self._read_suffixes:
                    continue
                others.setdefault(file.suffix, []).append(file)
        for suffix, same in others.items():
            self._name_unread(suffix, same, intake)
        return files

    def _name_unread(self, suffix: str, files: list[Path], intake: IngestQueue) -> None:
        """Says once that files of a suffix are not read, when they are there to stay."""
        settled = [file for file in files if file.is_file() and self._is_settled(file)]
        if not settled:
            return
        self._named.add(suffix)
        kind = f"end in {suffix}" if suffix else "have no suffix"
        reads = f"{_READ} files with x, y and, if wanted, ids"
        if _READ not in self._read_suffixes:
            reads = f"{', '.join(self._read_suffixes)} files"
        sentence = (
            f"{len(settled)} files in {self._folder} {kind} and are not read: this source reads "
            f"{reads}; {settled[0].name} is one that stays"
        )
        log.warning("source '%s': %s", self.name, sentence)
        intake.refuse("suffix", self.name, sentence, count=0)

    def _is_settled(self, file: Path) -> bool:
        """Whether a file has stayed the same for so long that nobody seems to be writing it.

        By the time since this source first saw it so, since clocks jump.
        """
        identity, now = _identity(file), time.monotonic()
        before = self._seen.get(file)
        if before is None or before[0] != identity:
            self._seen[file] = (identity, now)
            return False
        return now - before[1] >= _SETTLED_SECONDS

    def _take(self, file: Path, intake: IngestQueue) -> bool:
        """Hands over a file's samples, and puts it away once the last of them has its fate.

        Returns whether there was something to do: a file that another source reads is left to it.
        """
        with _claimed(file) as identity:
            if identity is None:
                return False
            try:
                arrays = read_npz(file, self.max_bytes)
                x, y, ids = (arrays.get(name) for name in ("x", "y", "ids"))
                if x is None and (y is None or ids is None):
                    raise DataError("it holds neither x, nor the y and ids of other samples")
            except Exception as error:  # noqa: BLE001 - a damaged archive may raise anything at all
                reason = error.reason if isinstance(error, RejectedError) else "malformed"
                if reason == "malformed" and not self._is_settled(file):
                    return False  # perhaps it is still being written
                intake.refuse(reason, self.name, f"{file.name}: {error}")
                self._quarantine(file, identity, 0, Counter({reason: 1}), str(error))
                return True
            columns = {"x": x, "y": y, "ids": ids}
            given = {name: column for name, column in columns.items() if column is not None}
            lengths = {len(column) if column.ndim else 1 for column in given.values()}
            flat = all(column.ndim == 1 for name, column in given.items() if name != "x")
            if len(lengths) > 1 or not flat or (x is not None and not (x.ndim and x.size)):
                count = max(1, *lengths)
                intake.refuse("shape", self.name, file.name, count)
                shapes = ", ".join(f"{name} {column.shape}" for name, column in given.items())
                self._quarantine(file, identity, count, Counter(shape=count), shapes)
                return True
            fates = self._judged(x, y, ids, intake)
            if fates is None:
                return True
            self._put_away(file, identity, fates)
            return True

    def _is_of_a_label(self, folder: Path) -> bool:
        return folder.name not in (_QUARANTINE, _DONE) and folder.is_dir()

    def _take_payloads(self, files: list[Path], intake: IngestQueue) -> bool:
        """Hands over files that are samples, and puts each away once it has its fate.

        Returns whether there was something to do.
        """
        judged: list[tuple[Path, _Identity, str]] = []
        settled = threading.Condition()

        def acknowledge(file: Path, identity: _Identity, fate: str) -> None:
            with settled:
                judged.append((file, identity, fate))
                settled.notify_all()

        handed = did = 0
        with ExitStack() as claims:
            for file in files:
                identity = claims.enter_context(_claimed(file))
                record = None if identity is None else self._record_of(file, identity, intake)
                if identity is None or not isinstance(record, Record):
                    did += record is False
                    continue
                answer = partial(acknowledge, file, identity)
                if not self.deliver_record(intake, record, answer):
                    break
                handed += 1
            with settled:
                while len(judged) < handed:
                    stopped = intake.stopped
                    # Of an agent that stops, the last commits may still be under way.
                    if not settled.wait(_LAST_SECONDS) and stopped:
                        break
            for file, identity, fate in judged:
                goes = self._put_away(file, identity, Counter({fate: 1}))
                beside = file.with_name(file.name + _SIDECAR)
                if (found := _identity(beside)) is not None and not file.exists():
                    self._move(beside, found, goes)
        return bool(handed or did)

    def _record_of(
        self, file: Path, identity: _Identity, intake: IngestQueue
    ) -> Record | Literal[False] | None:
        """Return the record of a file; None while it is being written, False where it is none."""
        try:
            payload = _read_file(file, min(self.max_bytes, intake.form.payload_bytes or 0))
            record = self._described(file, payload)
        except (FedkeepError, OSError) as error:
            if not self._is_settled(file):
                return None
            reason = error.reason if isinstance(error, RejectedError) else "malformed"
            intake.refuse(reason, self.name, f"{file.name}: {error}")
            self._quarantine(file, identity, 1, Counter({reason: 1}), str(error))
            return False
        return record if looks_whole(payload) or self._is_settled(file) else None

    def _described(self, file: Path, payload: bytes) -> Record:
        """Return the record of a file: by what stands beside it, else by where it is."""
        beside = file.with_name(file.name + _SIDECAR)
        fields: Any = {}
        if beside.is_file():
            try:
                fields = json.loads(_read_file(beside, _LONGEST_SIDECAR))
            except (ValueError, RecursionError) as error:
                raise DataError(f"{beside.name} is not JSON: {error}") from None
            if not isinstance(fields, dict):
                raise DataError(f"{beside.name} is no table")
        label = typed(file.parent.name) if file.parent != self._folder else None
        record = self._names.take_file(fields, payload, label)
        if record is None:
            raise DataError("[source.fields] x is not for files")
        record.id = file.name if record.id is None else record.id
        return record

    def _judged(
        self, x: AnyArray | None, y: AnyArray | None, ids: AnyArray | None, intake: IngestQueue
    ) -> Counter[str] | None:
        """Return all samples' fates, once they are on the disk; None if the agent stops before."""
        fates: Counter[str] = Counter()
        settled = threading.Condition()

        def acknowledge(fate: str) -> None:
            with settled:
                fates[fate] += 1
                settled.notify_all()

        count = max(len(column) for column in (x, y, ids) if column is not None)
        for i in range(count):
            label, id_ = (None if column is None else column[i].item() for column in (y, ids))
            if not self.deliver(intake, None if x is None else x[i], label, id_, acknowledge):
                return None
        with settled:
            while fates.total() < count:
                stopped = intake.stopped
                # Of an agent that stops, the last commits may still be under way.
                if not settled.wait(_LAST_SECONDS) and stopped:
                    return None
        return fates

    def _put_away(self, file: Path, identity: _Identity, fates: Counter[str]) -> str | None:
        """Remove or keeps a file that is done with, or sets it aside with a report.

        Returns the folder into which it goes, if any.
        """
        count = fates.total()
        wrong = Counter(
            {
                fate.removeprefix("refused."): number
                for fate, number in fates.items()
                if fate.startswith("refused.") and fate not in _NOT_THE_FILES_FAULT
            }
        )
        if wrong.total() > _MOSTLY * count:
            self._quarantine(file, identity, count, wrong, "")
            return _QUARANTINE
        goes = _DONE if self.afterwards == "keep" else None
        self._move(file, identity, goes)
        return goes

    def _quarantine(
        self, file: Path, identity: _Identity, records: int, wrong: Counter[str], detail: str
    ) -> None:
        """Move a file to where it is not read again, with a report of what was wrong beside it."""
        target = self._move(file, identity, _QUARANTINE)
        if target is None:
            return
        report = {
            "file": file.name,
            "source": self.name,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "records": records,
            "refused": dict(wrong.most_common()),
            "detail": detail[:500],
        }
        reasons = ", ".join(f"{number} {reason}" for reason, number in wrong.most_common())
        log.warning(
            "source '%s': %s was not read as samples (%s of %d records refused); it is at %s",
            self.name,
            file.name,
            reasons,
            records,
            target,
        )
        try:
            beside = target.with_name(target.name + ".report.json")
            beside.unlink(missing_ok=True)  # perhaps a link, by which another file would be lost
            with beside.open("x", encoding="utf-8") as text:
                text.write(json.dumps(report, indent=2) + "\n")
        except OSError as error:
            log.warning("source '%s': no report on %s (%s)", self.name, file.name, error.strerror)

    def _move(self, file: Path, identity: _Identity, folder: str | None) -> Path | None:
        """Put a file into a folder beside whatever has its name there, or removes it.

        Returns where it is now. What has been written under its name meanwhile is a new file, and
        stays to be read.
        """
        if _identity(file) != identity:
            return None
        try:
            if folder is None:
                file.unlink()
                return None
            target, number = self._folder / folder / file.name, 0
            target.parent.mkdir(exist_ok=True)
            while target.exists():
                number += 1
                target = target.with_name(f"{file.stem}-{number}{file.suffix}")
            file.rename(target)
        except OSError as error:
            if file.exists():
                self._stuck[file] = identity
                log.warning(
                    "source '%s': %s stays and is not read again (%s)",
                    self.name,
                    file,
                    error.strerror,
                )
            return None
        return target


@contextmanager
def _claimed(file: Path) -> Iterator[_Identity | None]:
    """Keep a file from being read by another source; None where another has it, or it is gone."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        # What cannot be opened says why when it is read.
        yield _identity(file)
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield None
            return
        # Under the lock it must still have its name: whoever had it before may have put it away.
        found = _identity(file)
        yield found if found == _identity_of(os.fstat(handle)) else None
    finally:
        os.close(handle)


def _in(folder: Path) -> list[Path]:
    """Return what is in a folder, by name; nothing where it cannot be looked into."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _read_file(path: Path, limit: int) -> bytes:
    """Return the bytes of a file of at most so many."""
    if not path.is_file():  # a pipe would be waited for, a device read for ever
        raise DataError(f"{path} is not a file")
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise RejectedError("oversized", f"{path.name} has more than {limit} bytes")
    return content


def _identity(file: Path) -> _Identity | None:
    """Return what tells a file from another that has its name later; None where there is none."""
    try:
        return _identity_of(file.stat())
    except OSError:
        return None


def _identity_of(found: os.stat_result) -> _Identity:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


_ENTRY, _MOST_ENTRIES = b"PK\1\2", 64
"""How each entry of an archive's table of contents begins."""


def read_npz(path: Path, limit: int) -> dict[str, AnyArray]:
    """Return the arrays of an archive; Python objects are no arrays here.

    A damaged one may raise anything.
    """
    from zipfile import (  # a megabyte that other agents do not need
        ZIP_DEFLATED,
        ZIP_STORED,
        ZipFile,
    )

    if not path.is_file():  # a pipe would be waited for, a device read for ever
        raise DataError(f"{path} is not a file")
    if path.stat().st_size > limit:
        raise RejectedError("oversized", f"{path} has more than {limit} bytes")
    if _entries(path) > _MOST_ENTRIES:  # each becomes an object many times its size
        raise RejectedError("oversized", f"{path} holds more than {_MOST_ENTRIES} arrays")
    with ZipFile(path) as archive:
        members = archive.infolist()
        if sum(member.file_size for member in members) > limit:
            raise RejectedError("oversized", f"{path} would unpack to more than {limit} bytes")
        if any(member.compress_type not in (ZIP_STORED, ZIP_DEFLATED) for member in members):
            raise DataError(
                f"{path} is compressed in a way of which zipfile does not bound what it unpacks to"
            )
        arrays = {}
        for member in members:
            with archive.open(member) as file:
                array = np.lib.format.read_array(file, allow_pickle=False)
            if array.size > member.file_size:  # numbers of no bytes
                raise DataError(
                    f"an array of {array.shape} {array.dtype} is not in {member.file_size} bytes"
                )
            arrays[member.filename.removesuffix(".npy")] = array
        return arrays


def _entries(path: Path) -> int:
    """At least as many as the archive has: what it says of their number need not be true."""
    count, seam = 0, b""
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            count += (seam + chunk).count(_ENTRY)
            seam = chunk[-len(_ENTRY) + 1 :]
    return count
