"""Samples by HTTP: one POST for each, answered with its fate once that is on the disk."""

import json
import logging
import socket
import threading
import time
from dataclasses import dataclass, field
from hmac import compare_digest
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qsl, urlsplit

from fedkeep.agent.arrivals import SOUND_REFUSALS, IngestQueue, Overload, Source
from fedkeep.agent.connections import Listener
from fedkeep.agent.record_fields import FieldNames, Record
from fedkeep.core.bounds import check_range
from fedkeep.core.errors import ConfigError
from fedkeep.protocol.addresses import require_loopback

log = logging.getLogger(__name__)
_POLL_SECONDS, _PIECE = 0.5, 1 << 16
_MOST_QUERY = 4096
_STATUS = {"refused.oversized": 413, "refused.malformed": 400}


@dataclass
class HttpSource(Source):
    """`POST` with a JSON record, or with a file as it is where a decoder is set.

    Of a file, label, id and time stand in the query: `POST /?y=ok&id=7&time=2026-03-01T12:00:00Z`;
    what else stands there is a field of the record. The answer is `{"fate": "kept"}`, with 200 for
    a sound sample, 4xx for one that is none, and 503 where it got no fate and is to be sent again.
    """

    host: str = "127.0.0.1"
    """Beyond loopback it needs `token_file` or `insecure`."""
    port: int = 9109
    connections: int = 64
    """Senders at a time; one more takes the place of one that has sent nothing, or else of the
    one silent the longest."""
    token_file: str | None = None
    """A file with a token that every request must bring: `Authorization: Bearer TOKEN`."""
    insecure: bool = False
    """Whether anybody who reaches an address beyond this machine may send, without a token."""
    cert_file: str | None = None
    """Given, the connection is by TLS: the certificate, with its chain."""
    key_file: str | None = None
    """The certificate's private key, where it is not in the same file."""
    max_bytes: int | None = None
    """The longest body that is read; None: what a sample can take."""
    seconds: float = 30.0
    """How long a request may take to come."""
    fields: dict[str, str] = field(default_factory=dict)
    """Where JSON that is not ours has `x`, `y`, `id` and `time`: `{ x = "payload.values" }`."""
    overload: Overload = field(default="sample", kw_only=True)
    """When the agent cannot keep up: `wait` holds senders back, `sample` values an even sample,
    `drop` drops what comes meanwhile."""

    def __post_init__(self) -> None:
        self._names = FieldNames(self.fields)
        check_range(self, "connections", "max_bytes", least=1)
        check_range(self, "port", least=1, most=65535)
        check_range(self, "seconds", above=0)
        if self.key_file is not None and self.cert_file is None:
            raise ValueError("key_file needs the cert_file that it belongs to")

    def open(self) -> None:
        """Listen, if it is clear who may send."""
        self._token, self._tls = self._read_token(), self._make_tls()
        if self._token is None:
            require_loopback(self.host, f"source '{self.name}': host", insecure=self.insecure)
        elif self._tls is None and not self.insecure:
            where = f"source '{self.name}': the token goes unencrypted; set cert_file. host"
            require_loopback(self.host, where, insecure=self.insecure)
        self._listener = Listener((self.host, self.port), self.connections)

    def run(self, intake: IngestQueue) -> None:
        """Serve senders until the intake is stopped."""
        handler = _handler(self, intake)

        def serve(connection: socket.socket) -> None:
            connection.settimeout(self.seconds)
            if self._tls is None:
                handler(connection, ("", 0), connection)
                return
            # A second descriptor: the listener can still shut the connection by its own.
            with self._tls.wrap_socket(connection.dup(), server_side=True) as wrapped:
                handler(wrapped, ("", 0), connection)

        self._listener.start(serve)
        intake.wait_stopped()

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()

    def _read_token(self) -> bytes | None:
        if self.token_file is None:
            return None
        try:
            token = Path(self.token_file).read_bytes().strip()
        except OSError as error:
            raise ConfigError(
                f"source '{self.name}' cannot read token_file {self.token_file}: {error.strerror}"
            ) from error
        if not token:
            raise ConfigError(f"source '{self.name}': token_file {self.token_file} is empty")
        return token

    def _make_tls(self) -> Any:
        if self.cert_file is None:
            return None
        import ssl  # megabytes that other agents do not need

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.cert_file, self.key_file)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"source '{self.name}': cert_file {self.cert_file} cannot be used: {error}"
            ) from error
        return context

    def allows(self, given: str) -> bool:
        """Whether a request with this `Authorization` may send."""
        wanted = b"" if self._token is None else b"Bearer " + self._token
        return self._token is None or compare_digest(given.encode("latin-1", "replace"), wanted)

    def record(self, body: bytes, kind: str, query: str, *, is_file: bool) -> Record | None:
        """Return the record of a request; None if it is none."""
        if is_file and not kind.startswith("application/json"):
            try:
                fields = dict(parse_qsl(query[:_MOST_QUERY], max_num_fields=64))
            except ValueError:
                return None
            return self._names.take_texts(fields, body)
        return self._names.parse_json(body)

    def touch(self, connection: socket.socket) -> None:
        """Note that a sender has just sent a valid message."""
        self._listener.touch(connection)


def _handler(source: HttpSource, intake: IngestQueue) -> Any:
    """Return a class that answers the requests of one connection."""
    from http.server import BaseHTTPRequestHandler  # a megabyte that other agents do not need

    form = intake.form
    is_file = form.payload_bytes is not None
    longest = source.max_bytes or form.longest_json

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        server_version, sys_version = "fedkeep", ""

        def do_POST(self) -> None:
            connection = cast(socket.socket, self.server)
            if not source.allows(self.headers.get("Authorization", "")):
                intake.refuse("token", source.name)
                return self._answer(401, "refused.token", ends=True)
            source.touch(connection)
            length = self.headers.get("Content-Length", "")
            if not length.isdecimal() or "Transfer-Encoding" in self.headers:
                return self._answer(411, "refused.malformed", ends=True)
            if len(length) > 12 or int(length) > longest:
                intake.refuse("oversized", source.name, f"a body of {length[:20]} bytes")
                return self._answer(413, "refused.oversized", ends=True)
            body = self._body(int(length))
            if body is None:
                intake.refuse("too-slow", source.name)
                return self._answer(408, "refused.too-slow", ends=True)
            kind, query = self.headers.get_content_type(), urlsplit(self.path).query
            record = source.record(body, kind, query, is_file=is_file)
            if record is None:
                intake.refuse("malformed", source.name, body)
                return self._answer(400, "refused.malformed")
            return self._deliver(record)

        def _deliver(self, record: Record) -> None:
            """Hand a record over, and wait for its fate."""
            fates: list[str] = []
            settled = threading.Event()

            def acknowledge(fate: str) -> None:
                fates.append(fate)
                settled.set()

            if not source.deliver_record(intake, record, acknowledge):
                return self._answer(503, "stopping", ends=True)
            # Of an agent that stops, the last commits may still be under way.
            while not settled.wait(_POLL_SECONDS):
                if intake.stopped and not settled.wait(2 * _POLL_SECONDS):
                    return self._answer(503, "stopping", ends=True)
            (fate,) = fates
            sound = fate in SOUND_REFUSALS or not fate.startswith("refused.")
            return self._answer(200 if sound else _STATUS.get(fate, 422), fate)

        def _body(self, length: int) -> bytes | None:
            """Return the whole body; None where it does not come in time."""
            last, parts = time.monotonic() + source.seconds, bytearray()
            try:
                while len(parts) < length:
                    piece = self.rfile.read1(min(_PIECE, length - len(parts)))
                    if not piece or time.monotonic() > last:
                        return None
                    parts += piece
            except TimeoutError:
                return None
            return bytes(parts)

        def _answer(self, status: int, fate: str, *, ends: bool = False) -> None:
            content = json.dumps({"fate": fate}).encode() + b"\n"
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            if status == 503:
                self.send_header("Retry-After", "5")
            if ends:  # what is left of the request is not read
                self.send_header("Connection", "close")
                self.close_connection = True
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
            log.debug("source '%s': " + format, source.name, *args)

    return Handler
