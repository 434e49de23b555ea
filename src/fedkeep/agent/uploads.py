"""Chosen samples sent out of the device: by consent only, bounded a day, each one written down.

What is asked for, begun and sent stands in a journal beside the store, which is on the disk before
a byte leaves. The samples themselves stay in the store until they are sent: an erased one is not
sent, and an encrypted store leaves no plain copy behind.
"""

import io
import json
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode, urlsplit

import numpy as np

from fedkeep.agent.payloads import suffix_of
from fedkeep.agent.record import SampleMetadata
from fedkeep.agent.retention import DAY
from fedkeep.core.bounds import check_range
from fedkeep.core.errors import ConfigError, FedkeepError, RejectedError
from fedkeep.files import atomic_write
from fedkeep.protocol.addresses import require_loopback

if TYPE_CHECKING:
    from fedkeep.agent.agent import Agent

log = logging.getLogger(__name__)
_IDLE_SECONDS, _FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 2.0, 600.0
_JOURNAL_BYTES = 1 << 20
"""A longer journal is begun anew; the one before stays beside it, once."""
_TRY_AGAIN = (401, 403, 404, 407, 408, 425, 429)
"""Answers of a target that is not ready, beside those from 500 on; all other 4xx are for good."""
_PRIVATE, _PRIVATE_FOLDER = 0o600, 0o700


@dataclass(frozen=True)
class UploadOptions:
    """The table `[upload]`: whether samples may leave the device, and which."""

    enabled: bool = False
    """The consent: while it is false, no sample leaves the device this way."""
    to: str = ""
    """A folder, or an address to which each sample is sent by POST: `https://host/path`."""
    labels: tuple[str, ...] = ()
    """Samples of these labels, by number or name, are sent once they are stored."""
    sources: tuple[str, ...] = ()
    """Samples from these sources are sent once they are stored; with `labels`, both must hold. \
Where none is given, only what `fedkeep agent upload` asks for."""
    rules: tuple[str, ...] = ()
    """Samples that one of these rules holds are sent once they are stored; likewise."""
    daily_bytes: int = 10_000_000
    """Bytes of samples that may leave within any 24 hours."""
    queue: int = 1024
    """Samples that may be asked for and not be sent yet."""
    token_file: str | None = None
    """A file with a token that each request brings: `Authorization: Bearer TOKEN`."""
    ca_file: str | None = None
    """The authority that the target's certificate must be of; None: those of the system."""
    insecure: bool = False
    """Whether `http://` may be used beyond this machine."""
    seconds: float = 30.0
    """How long a request may take."""

    def __post_init__(self) -> None:
        check_range(self, "daily_bytes", "queue", least=1)
        check_range(self, "seconds", above=0)
        if self.enabled and not self.to:
            raise ValueError("enabled = true needs `to`, a folder or an address")

    @property
    def is_automatic(self) -> bool:
        """Whether samples are sent that nobody asked for one by one."""
        return bool(self.labels or self.sources or self.rules)


@dataclass(frozen=True)
class Outgoing:
    """One sample on its way out."""

    note: SampleMetadata
    content: bytes
    suffix: str
    label: str

    @property
    def description(self) -> dict[str, Any]:
        """What is sent of it beside its bytes."""
        described: dict[str, Any] = {"y": self.label, "id": self.note.name or str(self.note.id)}
        if not math.isnan(self.note.time):
            described["time"] = self.note.time
        return {**described, "source": self.note.source, "stored": self.note.wall}


class UploadRefusedError(FedkeepError):
    """The target does not take this sample, whenever it is sent."""


class Journal:
    """What was asked for, begun and sent; on the disk before anything leaves.

    Parameters
    ----------
    path
        The file; it is made when something is first written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.asked: dict[int, None] = {}
        """The numbers of samples that were asked for and are not sent yet, oldest first."""
        self.sent: dict[int, int] = {}
        """The arrivals of samples that were sent, or refused for good, by their numbers."""
        self._begun: deque[tuple[float, int]] = deque()
        """When, by the age clock, and how many bytes were begun to be sent of late."""
        for line in self._lines():
            self._note(line)

    def _lines(self) -> Iterator[dict[str, Any]]:
        """Yield what is written; a line that a crash cut is none."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return
        for raw in content.splitlines():
            try:
                line = json.loads(raw)
            except ValueError:
                continue
            if isinstance(line, dict) and isinstance(line.get("id"), int):
                yield line

    def _note(self, line: dict[str, Any]) -> None:
        match line.get("state"):
            case "asked":
                self.sent.pop(line["id"], None)
                self.asked[line["id"]] = None
            case "begun":
                self._begun.append((float(line["age"]), int(line["bytes"])))
            case "sent" | "refused" | "gone":
                self.asked.pop(line["id"], None)
                self.sent[line["id"]] = int(line["arrival"])

    def spent(self, now: float) -> int:
        """Return the bytes that were begun to be sent in the 24 hours before `now`."""
        while self._begun and now - self._begun[0][0] >= DAY:
            self._begun.popleft()
        return sum(size for _, size in self._begun)

    def write(self, *lines: dict[str, Any]) -> None:
        """Write lines, each with its `state` and `id`; returns once they are on the disk.

        Raises
        ------
        OSError
            If the disk does not take them: then nothing may leave.
        """
        content = b"".join(
            json.dumps({**line, "time": round(time.time(), 3)}).encode() + b"\n" for line in lines
        )
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, _PRIVATE)
        try:
            if os.fstat(handle).st_size and not self._ends_whole():
                content = b"\n" + content
            os.write(handle, content)
            os.fsync(handle)
        finally:
            os.close(handle)
        for line in lines:
            self._note(line)

    def _ends_whole(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read() == b"\n"

    def shorten(self, stored: Mapping[int, SampleMetadata]) -> None:
        """Begin anew once it is long, with what still matters; the one before stays beside it."""
        if not self.path.exists() or self.path.stat().st_size < _JOURNAL_BYTES:
            return
        self.sent = {id_: at for id_, at in self.sent.items() if id_ in stored}
        lines: list[dict[str, Any]] = [
            {"state": "begun", "id": -1, "age": age, "bytes": size} for age, size in self._begun
        ]
        lines += [{"state": "sent", "id": id_, "arrival": at} for id_, at in self.sent.items()]
        lines += [{"state": "asked", "id": id_} for id_ in self.asked]
        before = self.path.with_name(self.path.name + ".1")
        with atomic_write(before, _PRIVATE) as file:
            file.write(self.path.read_bytes())
        with atomic_write(self.path, _PRIVATE) as file:
            file.writelines(json.dumps(line).encode() + b"\n" for line in lines)


class Uploads:
    """The samples of one agent that are to leave the device, and those that did.

    Parameters
    ----------
    agent
        Whose samples.
    """

    def __init__(self, agent: "Agent") -> None:
        self.options, self._agent = agent.config.upload, agent
        path = agent.store_path
        self.journal = Journal(path.with_name(path.name + ".uploads"))
        self.error = ""
        """Why nothing is sent at present."""
        self._labels = self._chosen_labels()
        known = [rule.name for rule in agent.config.method.rules]
        for name in self.options.rules:
            if name not in known:
                raise ConfigError(f"[upload] rules: there is no rule '{name}'")
        self._target = make_target(self.options, agent.identity.name)

    def _chosen_labels(self) -> set[int]:
        names, chosen = self._agent.config.samples.names, set()
        for label in self.options.labels:
            if label in names:
                chosen.add(names.index(label))
            elif label.isdecimal() and int(label) < self._agent.config.samples.count:
                chosen.add(int(label))
            else:
                raise ConfigError(f"[upload] labels: there is no label '{label}'")
        return chosen

    def ask(self, ids: list[int]) -> int:
        """Queue stored samples that somebody asked for; returns how many are new."""
        new = [id_ for id_ in ids if id_ not in self.journal.asked]
        room = self.options.queue - len(self.journal.asked)
        if len(new) > room:
            raise RejectedError(
                "upload",
                f"{len(new)} samples are more than the {max(0, room)} for which [upload] queue "
                "has room: ask for fewer, or wait",
            )
        try:
            if new:
                self.journal.write(*({"state": "asked", "id": id_} for id_ in new))
        except OSError as error:
            why = f"the journal of uploads cannot be written ({error.strerror})"
            raise RejectedError("disk", why) from error
        return len(new)

    def waiting(self) -> list[SampleMetadata]:
        """Return what is to be sent, in order: what was asked for, then what is sent by itself."""
        records, sent, asked = self._agent.store.records, self.journal.sent, self.journal.asked
        found = [records[id_] for id_ in asked if id_ in records]
        if self.options.is_automatic:
            others = [
                note
                for note in records.values()
                if sent.get(note.id) is None
                and note.id not in asked
                and (not self._labels or note.label in self._labels)
                and (not self.options.sources or note.source in self.options.sources)
                and self._is_held(note)
            ]
            found += sorted(others, key=lambda note: note.arrival)
        return found

    def _is_held(self, note: SampleMetadata) -> bool:
        """Whether a rule that is named holds a sample; true where none is named."""
        rules = self.options.rules
        return not rules or not {*rules}.isdisjoint(self._agent.store.holders(note.id))

    def left_today(self) -> int:
        """Return the bytes that may still leave within the present 24 hours."""
        spent = self.journal.spent(self._agent.store.clock.now())
        return max(0, self.options.daily_bytes - spent)

    def summary(self) -> str:
        """Return what waits, and why, in a sentence."""
        why = f"; {self.error}" if self.error else ""
        return (
            f"{len(self.waiting())} samples wait for {self.options.to}, "
            f"{self.left_today()} bytes may leave within 24 hours{why}"
        )

    def send_next(self) -> bool:
        """Send one sample, if one waits and the day's bytes allow it.

        Returns
        -------
        bool
            Whether there may be more to do at once.

        Raises
        ------
        OSError
            If the target or the journal's disk does not answer; it is tried again.
        """
        with self._agent.lock:
            self._forget_gone()
            if self._agent.disk_error or not (waiting := self.waiting()):
                return False
            note = waiting[0]
            if note.id in self._agent.store.staged and not self._agent.commit(whole=False):
                return False
            out, left = self._outgoing(note), self.left_today()
            about = {"id": note.id, "arrival": note.arrival}
            if len(out.content) > self.options.daily_bytes:
                log.warning("sample %s is larger than [upload] daily_bytes: not sent", note.id)
                self.journal.write({"state": "refused", **about})
                self._agent.counters["upload.refused"] += 1
                return True
            if len(out.content) > left:
                self._say(f"[upload] daily_bytes allows {left} more bytes for now")
                return False
            begun = {"label": note.label, "bytes": len(out.content), "to": self.options.to}
            age = self._agent.store.clock.now()
            self.journal.write({"state": "begun", **about, **begun, "age": age})
        state = "sent"
        try:
            self._target.send(out)
        except UploadRefusedError as error:
            log.warning("sample %s was not taken by %s: %s", note.id, self.options.to, error)
            state = "refused"
        with self._agent.lock:
            self.journal.write({"state": state, **about})
            self._agent.counters[f"upload.{state}"] += 1
            self.journal.shorten(self._agent.store.records)
        if state == "sent":
            log.info(
                "uploaded sample %s of label %s, %d bytes, to %s",
                out.description["id"],
                out.label,
                len(out.content),
                self.options.to,
            )
        self.error = ""
        return True

    def _forget_gone(self) -> None:
        """Write down that samples which were asked for left the store before they were sent."""
        records = self._agent.store.records
        gone = [id_ for id_ in self.journal.asked if id_ not in records]
        if gone:
            self.journal.write(*({"state": "gone", "id": id_, "arrival": -1} for id_ in gone))
            self._agent.counters["upload.gone"] += len(gone)

    def _outgoing(self, note: SampleMetadata) -> Outgoing:
        store, names = self._agent.store, self._agent.config.samples.names
        content = store.payload(note.id)
        if content is None:
            buffer = io.BytesIO()
            np.save(buffer, store.numbers(note.id), allow_pickle=False)
            content = buffer.getvalue()
        label = names[note.label] if 0 <= note.label < len(names) else str(note.label)
        return Outgoing(note, content, suffix_of(content), label)

    def _say(self, error: str) -> None:
        if error != self.error:
            log.warning("uploads wait: %s", error)
        self.error = error

    def run(self, stopped: threading.Event) -> None:
        """Send what waits until told to stop, ever more slowly while it fails."""
        pause = _FIRST_PAUSE
        while not stopped.is_set():
            try:
                if not self.send_next():
                    stopped.wait(_IDLE_SECONDS)
                pause = _FIRST_PAUSE
            except Exception as error:  # noqa: BLE001 - whatever a target or its library does
                self._say(f"{self.options.to}: {type(error).__name__}: {error}"[:300])
                stopped.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)


@dataclass(frozen=True)
class FolderTarget:
    """A folder, perhaps of another machine: a file for each sample, and `NAME.json` beside it."""

    folder: Path

    def send(self, out: Outgoing) -> None:
        """Write both files whole, the description first."""
        name = quote(str(out.description["id"]), safe=" ")[:100].lstrip(".") or str(out.note.id)
        name = f"{name.removesuffix(out.suffix)}-{out.note.arrival}{out.suffix}"
        place = self.folder / (quote(out.label, safe=" ").lstrip(".") or "%") / name
        place.parent.mkdir(_PRIVATE_FOLDER, parents=True, exist_ok=True)
        with atomic_write(place.with_name(name + ".json"), _PRIVATE) as file:
            file.write(json.dumps(out.description).encode() + b"\n")
        with atomic_write(place, _PRIVATE) as file:
            file.write(out.content)


class HttpTarget:
    """An address to which samples are sent by POST; `kind = "http"` of another agent takes them."""

    def __init__(self, options: UploadOptions, device: str) -> None:
        parts = urlsplit(options.to)
        try:
            port = parts.port
        except ValueError:
            raise ConfigError(f"[upload] to has no port that is one: {options.to}") from None
        if not parts.hostname:
            raise ConfigError(f"[upload] to must be https://host/path, not {options.to}")
        self._is_plain, self._host, self._port = parts.scheme == "http", parts.hostname, port
        if self._is_plain:
            require_loopback(self._host, "[upload] to", insecure=options.insecure)
        self._path, self._query, self._device = parts.path or "/", parts.query, device
        self._options = options

    def send(self, out: Outgoing) -> None:
        """Send one sample, and follow no redirection."""
        import http.client
        import ssl

        connection: http.client.HTTPConnection
        if self._is_plain:
            connection = http.client.HTTPConnection(
                self._host, self._port, timeout=self._options.seconds
            )
        else:
            context = ssl.create_default_context(cafile=self._options.ca_file)
            connection = http.client.HTTPSConnection(
                self._host, self._port, timeout=self._options.seconds, context=context
            )
        query = "&".join(
            filter(None, (self._query, urlencode({**out.description, "device": self._device})))
        )
        headers = {"Content-Type": "application/octet-stream"}
        if self._options.token_file is not None:
            token = Path(self._options.token_file).read_text(encoding="utf-8").strip()
            headers["Authorization"] = f"Bearer {token}"
        try:
            connection.request("POST", f"{self._path}?{query}", out.content, headers)
            status = connection.getresponse().status
        except http.client.HTTPException as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if 400 <= status < 500 and status not in _TRY_AGAIN:
            raise UploadRefusedError(f"answered {status}")
        if not 200 <= status < 300:
            raise ConnectionError(f"answered {status}")


def make_target(options: UploadOptions, device: str) -> FolderTarget | HttpTarget:
    """Return where samples go."""
    if options.to.startswith(("http://", "https://")):
        return HttpTarget(options, device)
    if "://" in options.to:
        raise ConfigError(f"[upload] to must be https://host/path or a folder, not {options.to}")
    return FolderTarget(Path(options.to))
