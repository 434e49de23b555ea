"""Length-prefixed frames on a stream socket; too long a frame is rejected before it is read."""

import socket

from fedkeep.core.errors import RejectedError

MESSAGE_LIMIT = 256 << 20
"""Bytes of one message of the local API: a model and its estimators, and some more."""


def send_frame(connection: socket.socket, payload: bytes) -> None:
    """Send one frame."""
    connection.sendall(len(payload).to_bytes(4) + payload)


def receive_frame(connection: socket.socket) -> bytes | None:
    """Receive the next frame; None once the other side has closed the connection.

    Raises
    ------
    RejectedError
        If the frame is longer than `MESSAGE_LIMIT`.

    Examples
    --------
    >>> here, there = socket.socketpair()
    >>> with here, there:
    ...     send_frame(here, b"one message")
    ...     receive_frame(there)
    b'one message'
    """
    if (head := _receive(connection, 4)) is None:
        return None
    length = int.from_bytes(head)
    if length > MESSAGE_LIMIT:
        raise RejectedError(
            "oversized", f"a frame of {length} bytes is above the limit of {MESSAGE_LIMIT}"
        )
    return _receive(connection, length)


def _receive(connection: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        if not (chunk := connection.recv(min(count - len(parts), 1 << 20))):
            return None
        parts += chunk
    return bytes(parts)
