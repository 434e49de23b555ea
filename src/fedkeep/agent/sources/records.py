"""Length-prefixed records over TCP or a Unix socket.

Each is answered with its fate once that is on the disk.
"""

import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hmac import compare_digest
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np

from fedkeep.agent.arrivals import IngestQueue, Overload, Source
from fedkeep.agent.connections import Listener
from fedkeep.agent.record_fields import FieldNames
from fedkeep.core.bounds import check_range
from fedkeep.core.errors import ConfigError, RejectedError
from fedkeep.protocol.addresses import require_loopback

_UNSENT = 1 << 18
"""Bytes of answers that may wait for a sender to read them."""
_RECORD_SECONDS = 30.0
_POLL_MS = 200


_decoder = msgspec.msgpack.Decoder(dict[str, Any])


@dataclass
class RecordsSource(Source):
    """Records on a TCP or Unix socket.

    Each is a 4-byte big-endian length and a msgpack map `{"x": bytes or list, "y": 3, "id": ...}`.
    A sample whose label comes later has no `y`; its label comes with the `id` and without `x`.
    """

    address: str = "tcp://127.0.0.1:9107"
    """`tcp://host:port` or `unix:///path`; beyond loopback it needs `token_file` or `insecure`."""
    dtype: str = "float32"
    """What the numbers are when `x` comes as bytes, little-endian."""
    connections: int = 64
    """Senders at a time; one more takes the place of one that has sent nothing, or else of the
    one silent the longest."""
    token_file: str | None = None
    """A file with a token that every sender's first frame must be."""
    insecure: bool = False
    """Whether anybody who reaches a TCP address beyond this machine may send, without a token."""
    fields: dict[str, str] = field(default_factory=dict)
    """Where maps that are not ours have `x`, `y`, `id` and `time`: `{ x = "payload.values" }`."""
    overload: Overload = field(default="sample", kw_only=True)
    """When the agent cannot keep up: `wait` holds senders back, `sample` values an even sample,
    `drop` drops what comes meanwhile."""

    def __post_init__(self) -> None:
        check_range(self, "connections", least=1)
        self._names = FieldNames(self.fields)
        parts = urlsplit(self.address)
        if parts.scheme not in ("tcp", "unix") or (parts.scheme == "tcp" and not parts.port):
            raise ValueError(f"address must be tcp://host:port or unix:///path, got {self.address}")
        if parts.scheme == "unix" and (parts.netloc or not parts.path.startswith("/")):
            raise ValueError(
                f"address must have an absolute path, as in unix:///run/fedkeep/in.sock, "
                f"got {self.address}"
            )
        host = parts.hostname or "127.0.0.1", parts.port or 0
        self._where: Path | tuple[str, int] = Path(parts.path) if parts.scheme == "unix" else host
        try:
            self._dtype = np.dtype(self.dtype).newbyteorder("<")
        except TypeError:
            raise ValueError(
                f"dtype must be a numpy number type such as float32, got {self.dtype}"
            ) from None

    def open(self) -> None:
        """Listen, if it is clear who may send."""
        self._token: bytes | None = None
        if self.token_file is not None:
            try:
                self._token = Path(self.token_file).read_bytes().strip()
            except OSError as error:
                raise ConfigError(
                    f"source '{self.name}' cannot read token_file {self.token_file}: "
                    f"{error.strerror}"
                ) from error
            if not self._token:
                raise ConfigError(f"source '{self.name}': token_file {self.token_file} is empty")
        elif isinstance(self._where, tuple):
            where = f"source '{self.name}': address"
            require_loopback(self._where[0], where, insecure=self.insecure)
        self._listener = Listener(self._where, self.connections)

    def run(self, intake: IngestQueue) -> None:
        """Serve senders until the intake is stopped."""
        self._listener.start(partial(self._serve, intake))
        intake.wait_stopped()

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()

    def _serve(self, intake: IngestQueue, connection: socket.socket) -> None:
        exchange = _Exchange(connection)
        records = exchange.records(intake)
        try:
            if self._token is not None:
                first = next(records, b"")
                if not compare_digest(first, self._token):
                    raise RejectedError("token", "the first frame is not the token")
            for number, payload in enumerate(records):
                acknowledge = partial(exchange.answer, number)
                try:
                    record = self._names.take(_decoder.decode(payload))
                    if record is None:
                        raise ValueError("neither a sample nor the label of another record")
                    if isinstance(record.x, bytes) and intake.form.payload_bytes is None:
                        record.x = np.frombuffer(record.x, self._dtype)
                except (msgspec.DecodeError, ValueError, RecursionError, MemoryError):
                    intake.refuse("malformed", self.name, payload)
                    acknowledge("refused.malformed")
                    continue
                self._listener.touch(connection)
                if not self.deliver_record(intake, record, acknowledge):
                    return
        except RejectedError as refusal:
            # Of a wrong token nothing is shown: it may be another's.
            shown = b"" if refusal.reason == "token" else bytes(exchange.came)
            intake.refuse(refusal.reason, self.name, shown)


class _Exchange:
    """One connection.

    Records come in, numbered answers go out as fast as the sender reads them, and nobody waits.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.setblocking(False)
        self.came, self._unsent = bytearray(), bytearray()
        self._lock = threading.Lock()

    def records(self, intake: IngestQueue) -> Iterator[bytes]:
        """Each record once it has come in whole, until the sender is gone.

        What can be sent to it is sent meanwhile.
        """
        limit, poll = intake.form.longest_packed, select.poll()
        begun: float | None = None
        while not intake.stopped:
            poll.register(self._connection, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            events = poll.poll(_POLL_MS)
            if begun is not None and time.monotonic() - begun > _RECORD_SECONDS:
                raise RejectedError("too-slow", "a record took too long to come")
            with self._lock:
                self._flush()
            if not any(
                event & (select.POLLIN | select.POLLHUP | select.POLLERR) for _, event in events
            ):
                continue
            if not (chunk := self._connection.recv(1 << 16)):
                return
            self.came += chunk
            while len(self.came) >= 4:
                length = int.from_bytes(self.came[:4])
                if length > limit:
                    raise RejectedError(
                        "oversized", f"a frame of {length} bytes is above the limit of {limit}"
                    )
                if len(self.came) < 4 + length:
                    break
                payload = bytes(self.came[4 : 4 + length])
                del self.came[: 4 + length]
                begun = None
                yield payload
            if self.came and begun is None:
                begun = time.monotonic()

    def answer(self, number: int, fate: str) -> None:
        """Tells what became of a record, by its number on the connection, from 0.

        Called from the agent's thread, which must not wait: what cannot be sent now goes when the
        sender reads.
        """
        payload = msgspec.msgpack.encode({"n": number, "fate": fate})
        with self._lock:
            if len(self._unsent) > _UNSENT:
                return  # it has not read for long and is cut off; it sends again what has no answer
            waits = bool(self._unsent)
            self._unsent += len(payload).to_bytes(4) + payload
            if not waits:
                self._flush()
            if len(self._unsent) > _UNSENT:
                with suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()  # nobody hears it
