"""Length-prefixed records over TCP or a Unix socket; each is answered with its fate once that is on the disk."""

import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
import numpy as np

from fedkeep.agent.arrivals import Acknowledge, Arrival, Sink
from fedkeep.agent.connections import AddressTakenError, Listener, listen_unix
from fedkeep.core.bounds import within
from fedkeep.core.errors import RefusedError


@dataclass(frozen=True)
class RecordsOptions:
    """A record is a 4-byte big-endian length and a msgpack map `{"x": bytes or list, "y": 3, "id": ...}`."""

    name: str
    """How messages, `why` and `erase --source` call it."""
    address: str = "tcp://127.0.0.1:9107"
    """`tcp://host:port` or `unix:///path`; TCP has no password, so keep it on loopback."""
    dtype: str = "float32"
    """What the numbers are when `x` comes as bytes, little-endian."""
    overload: Literal["wait", "sample"] = "sample"
    """When the agent cannot keep up: hold senders back, or value an even sample."""
    connections: int = 64
    """Senders at a time; one more takes the place of the one silent the longest."""
    record_seconds: float = 30.0
    """How long one record may take to come in."""

    def __post_init__(self) -> None:
        within(self, "connections", least=1)
        within(self, "record_seconds", above=0)
        parts = urlsplit(self.address)
        if parts.scheme not in ("tcp", "unix") or (parts.scheme == "tcp" and not parts.port):
            raise ValueError(f"address must be tcp://host:port or unix:///path, got {self.address}")
        try:
            np.dtype(self.dtype)
        except TypeError:
            raise ValueError(f"dtype must be a numpy number type such as float32, got {self.dtype}") from None


class Record(msgspec.Struct):
    x: bytes | list[Any]
    y: Any
    id: Any = None


class Answer(msgspec.Struct):
    """`n` counts the records of a connection from 0."""

    n: int
    fate: str


_decoder = msgspec.msgpack.Decoder(Record)
_LENGTH = struct.Struct(">I")
_UNSENT = 1 << 18
"""Bytes of answers that may wait for a sender to read them."""
_POLL_MS = 200


class RecordsSource:
    def __init__(self, options: RecordsOptions, sample_bytes: int) -> None:
        self.name = options.name
        self._options = options
        self._limit = 4096 + 16 * sample_bytes
        self._dtype = np.dtype(options.dtype).newbyteorder("<")
        self._listener: Listener | None = None

    def open(self) -> None:
        parts = urlsplit(self._options.address)
        try:
            if parts.scheme == "unix":
                server = listen_unix(Path(parts.path))
            else:
                server = socket.create_server((parts.hostname or "127.0.0.1", parts.port or 0))
        except OSError as error:
            raise AddressTakenError(self._options.address, error.strerror) from error
        self._listener = Listener(server, self._options.connections)

    def run(self, sink: Sink) -> None:
        assert self._listener is not None
        listener = self._listener
        listener.run(lambda connection: self._serve(connection, sink, listener), lambda: sink.stopped)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def _serve(self, connection: socket.socket, sink: Sink, listener: Listener) -> None:
        exchange = _Exchange(connection, self._limit, self._options.record_seconds)
        try:
            while not sink.stopped and exchange.turn():
                for payload in exchange.frames():
                    listener.touch(connection)
                    self._take(payload, sink, exchange)
        except RefusedError as refusal:
            sink.refuse(refusal.reason, self.name, exchange.unread())

    def _take(self, payload: bytes, sink: Sink, exchange: "_Exchange") -> None:
        acknowledge = exchange.next()
        try:
            record = _decoder.decode(payload)
            x = np.frombuffer(record.x, self._dtype) if isinstance(record.x, bytes) else record.x
        except (msgspec.DecodeError, ValueError, RecursionError, MemoryError):
            sink.refuse("malformed", self.name, payload)
            acknowledge("refused.malformed")
            return
        sink.offer(Arrival(x, record.y, record.id, self.name, acknowledge), wait=self._options.overload == "wait")


class _Exchange:
    """One connection: records come in, numbered answers go out as fast as the sender reads them, and nobody waits."""

    def __init__(self, connection: socket.socket, limit: int, record_seconds: float) -> None:
        self._connection, self._limit, self._patience = connection, limit, record_seconds
        connection.setblocking(False)
        self._poll = select.poll()
        self._came, self._unsent = bytearray(), bytearray()
        self._begun: float | None = None
        self._count = 0
        self._lock = threading.Lock()

    def turn(self) -> bool:
        """Sends and receives what can be now; False once the other side is gone, or too slow."""
        self._poll.register(self._connection, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        events = self._poll.poll(_POLL_MS)
        if self._begun is not None and time.monotonic() - self._begun > self._patience:
            raise RefusedError("too-slow", "a record took too long to come")
        with self._lock:
            self._flush()
        if not any(event & (select.POLLIN | select.POLLHUP | select.POLLERR) for _, event in events):
            return True
        chunk = self._connection.recv(1 << 16)
        self._came += chunk
        return bool(chunk)

    def frames(self) -> Iterator[bytes]:
        """The records that have come in whole."""
        while len(self._came) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._came)
            if length > self._limit:
                raise RefusedError("oversized", f"a frame of {length} bytes is above the limit of {self._limit}")
            end = _LENGTH.size + length
            if len(self._came) < end:
                break
            payload = bytes(self._came[_LENGTH.size : end])
            del self._came[:end]
            self._begun = None
            yield payload
        if self._came and self._begun is None:
            self._begun = time.monotonic()

    def unread(self) -> bytes:
        return bytes(self._came)

    def next(self) -> Acknowledge:
        self._count += 1
        return partial(self.send, self._count - 1)

    def send(self, number: int, fate: str) -> None:
        """Called from the agent's thread, which must not wait: what cannot be sent now goes when the sender reads."""
        payload = msgspec.msgpack.encode(Answer(number, fate))
        with self._lock:
            if len(self._unsent) > _UNSENT:
                return  # it has not read for long; it will be cut off, and sends again what was not answered
            waits = bool(self._unsent)
            self._unsent += _LENGTH.pack(len(payload)) + payload
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
