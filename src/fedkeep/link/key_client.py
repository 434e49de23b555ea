"""How the server talks to the key-holder: one connection a question, since there are few and far between."""

from __future__ import annotations

import contextlib
import socket
import ssl
from typing import TypeVar

from fedkeep.core.errors import ConfigError, FedkeepError, RefusedError
from fedkeep.link.addresses import Address
from fedkeep.link.framing import receive_frame, send_frame
from fedkeep.link.key_messages import AskPlan, AskPublicKeys, KeyReply, KeyRequest, Planned, PublicKeys
from fedkeep.link.messages import Failed
from fedkeep.link.mutual_tls import KEYHOLDER, peer_name
from fedkeep.link.wire import from_bytes, to_bytes

Answer = TypeVar("Answer", bound=KeyReply)
_CONNECT_SECONDS = 5.0
_HANDSHAKE_SECONDS = 30.0
"""Longer than the key-holder gives to whoever is silent: it may have to see some of them off first."""
_ANSWER_SECONDS = 300.0


class KeyHolderUnreachableError(FedkeepError):
    """Nobody answers at the key-holder's address, or not as the key-holder."""


class KeyHolderClient:
    """The key-holder at an address; without TLS on loopback only."""

    def __init__(self, address: Address, tls: ssl.SSLContext | None) -> None:
        if tls is None and not address.is_loopback:
            raise ConfigError(f"without TLS the key-holder must be on loopback, and {address} is not")
        self.address, self._tls = address, tls

    def public_keys(self) -> PublicKeys:
        return self._ask(AskPublicKeys(), PublicKeys)

    def plan(self, request: AskPlan) -> Planned:
        return self._ask(request, Planned)

    def _ask(self, request: KeyRequest, expected: type[Answer]) -> Answer:
        try:
            payload = self._exchange(to_bytes(request))
        except (OSError, EOFError) as error:
            why = getattr(error, "strerror", None) or error
            raise KeyHolderUnreachableError(f"the key-holder at {self.address} does not answer ({why})") from error
        reply = from_bytes(payload, KeyReply)
        if isinstance(reply, Failed):
            raise RefusedError(reply.reason, reply.detail)
        if not isinstance(reply, expected):
            raise RefusedError("malformed", f"the key-holder answered with {type(reply).__name__}")
        return reply

    def _exchange(self, payload: bytes) -> bytes:
        with contextlib.ExitStack() as stack:
            where = (self.address.host, self.address.port)
            plain = stack.enter_context(socket.create_connection(where, _CONNECT_SECONDS))
            plain.settimeout(_HANDSHAKE_SECONDS)
            connection = plain
            if self._tls is not None:
                secure = stack.enter_context(self._tls.wrap_socket(plain, server_hostname=self.address.host))
                if peer_name(secure) != KEYHOLDER:
                    raise ssl.SSLError(0, f"its certificate is not the {KEYHOLDER}'s")
                connection = secure
            connection.settimeout(_ANSWER_SECONDS)
            send_frame(connection, payload)
            answer = receive_frame(connection)
        if answer is None:
            raise EOFError("it closed the connection")
        return answer
