"""Length-prefixed frames on a stream socket; a frame that is too long is refused before a byte of it is read."""

import socket
import struct

from fedkeep.core.errors import RefusedError

_LENGTH = struct.Struct(">I")
MESSAGE_LIMIT = 256 << 20
"""Bytes of one message of the local API: a model and its estimators, with room to spare."""


def send_frame(connection: socket.socket, payload: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(payload)) + payload)


def receive_frame(connection: socket.socket, limit: int = MESSAGE_LIMIT) -> bytes | None:
    """The next frame; None once the other side has closed the connection."""
    head = _receive(connection, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > limit:
        raise RefusedError("oversized", f"a frame of {length} bytes is above the limit of {limit}")
    return _receive(connection, length)


def _receive(connection: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        chunk = connection.recv(min(count - len(parts), 1 << 20))
        if not chunk:
            return None
        parts += chunk
    return bytes(parts)
