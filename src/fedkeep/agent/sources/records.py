"""Length-prefixed records over TCP or a Unix socket; each is answered with its fate once that is on the disk."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
import numpy as np

from fedkeep.agent.arrivals import Arrival, Sink
from fedkeep.core.errors import ConfigError, FedkeepError, RefusedError
from fedkeep.link.framing import receive_frame, send_frame


class AddressTakenError(FedkeepError):
    """Another program listens there."""

    def __init__(self, address: str, detail: str | None) -> None:
        super().__init__(f"cannot listen at {address}: {detail}; choose another address or stop what is there")


@dataclass(frozen=True)
class RecordsOptions:
    """A record is a 4-byte big-endian length and a msgpack map `{"x": bytes or list, "y": 3, "id": ...}`."""

    name: str
    address: str = "tcp://127.0.0.1:9107"
    """`tcp://host:port` or `unix:///path`; TCP has no password, so keep it on loopback."""
    dtype: str = "float32"
    """What the numbers are when `x` comes as bytes, little-endian."""
    overload: Literal["wait", "sample"] = "sample"

    def __post_init__(self) -> None:
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


_SEND_TIMEOUT = struct.pack("@ll", 1, 0)
_decoder = msgspec.msgpack.Decoder(Record)


class RecordsSource:
    def __init__(self, options: RecordsOptions, sample_bytes: int) -> None:
        self.name = options.name
        self._options = options
        self._limit = 4096 + 16 * sample_bytes
        self._dtype = np.dtype(options.dtype).newbyteorder("<")
        self._socket: socket.socket | None = None

    def open(self) -> None:
        parts = urlsplit(self._options.address)
        try:
            if parts.scheme == "unix":
                self._socket = listen_unix(Path(parts.path))
            else:
                self._socket = socket.create_server((parts.hostname or "127.0.0.1", parts.port or 0))
        except OSError as error:
            raise AddressTakenError(self._options.address, error.strerror) from error
        self._socket.settimeout(0.2)

    def run(self, sink: Sink) -> None:
        assert self._socket is not None
        while not sink.stopped:
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                continue
            threading.Thread(target=self._serve, args=(connection, sink), daemon=True).start()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _serve(self, connection: socket.socket, sink: Sink) -> None:
        answers = _Answers(connection)
        with connection:
            try:
                while not sink.stopped and (payload := receive_frame(connection, self._limit)) is not None:
                    self._take(payload, sink, answers)
            except RefusedError as refusal:
                sink.refuse(refusal.reason)
            except OSError:
                return  # the sender went away; what it sent is judged, and asked for again if not acknowledged

    def _take(self, payload: bytes, sink: Sink, answers: _Answers) -> None:
        acknowledge = answers.next()
        try:
            record = _decoder.decode(payload)
            x = np.frombuffer(record.x, self._dtype) if isinstance(record.x, bytes) else record.x
        except (msgspec.DecodeError, ValueError):
            sink.refuse("malformed")
            acknowledge("refused.malformed")
            return
        sink.offer(Arrival(x, record.y, record.id, self.name, acknowledge), wait=self._options.overload == "wait")


class _Answers:
    """The numbered answers of one connection, sent from the agent's thread, which a slow reader may not hold up."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
        self._count = 0
        self._lock = threading.Lock()

    def next(self) -> _Acknowledge:
        self._count += 1
        return _Acknowledge(self, self._count - 1)

    def send(self, number: int, fate: str) -> None:
        payload = msgspec.msgpack.encode(Answer(number, fate))
        with self._lock:
            try:
                send_frame(self._connection, payload)
            except OSError:
                # Nobody hears it, or not in time; half a frame may be out, so nothing more can follow.
                with suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True, slots=True)
class _Acknowledge:
    answers: _Answers
    number: int

    def __call__(self, fate: str) -> None:
        self.answers.send(self.number, fate)


def listen_unix(path: Path) -> socket.socket:
    """A Unix socket that only its owner may use; a file left over from a dead process is replaced."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket() and not _answers(path):
            path.unlink()
        server.bind(str(path))
        path.chmod(0o600)
        server.listen()
    except OSError as error:
        server.close()
        if isinstance(error, FileNotFoundError):
            raise ConfigError(f"there is no folder {path.parent} for the socket {path.name}") from error
        raise
    return server


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
