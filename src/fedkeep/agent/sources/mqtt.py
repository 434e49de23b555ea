"""Samples from an MQTT broker, JSON as in `lines`.

A message is acknowledged once its sample's fate is on the disk.
"""

import logging
import queue
import re
import threading
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from fedkeep.agent.arrivals import IngestQueue, Overload, Source
from fedkeep.agent.record_fields import FieldNames, Record
from fedkeep.core.bounds import check_range
from fedkeep.core.errors import ConfigError, optional_import

log = logging.getLogger(__name__)
_HEADER_BYTES = 65_536 + 1024
"""The longest topic, and what else stands before a message's payload."""
_BUFFER_BYTES, _LEAST_MESSAGES, _MOST_MESSAGES = 8 << 20, 4, 256
"""Messages that are read ahead, while the agent has not taken them yet."""
_POLL_SECONDS = 0.2
_MOST_PROPERTIES = 64
_FOR_EVER = 0xFFFFFFFF
"""Seconds for which a broker keeps a session, as MQTT 5 writes "for ever"."""
_VERSION_REFUSED = ("Unsupported protocol version", "Unacceptable protocol version")


@dataclass
class MqttSource(Source):
    """Subscribes with QoS 1 and a session that the broker keeps while the agent is away.

    A message that cannot be read is acknowledged and shown by `fedkeep agent refused`, so that it
    does not come again for ever. One longer than a sample can be is never held in memory.
    """

    topic: str
    """What to subscribe to; `#` and `+` as MQTT has them."""
    host: str = "127.0.0.1"
    port: int = 1883
    """Of the broker, which may come later than the agent."""
    protocol: Literal["5", "3.1.1"] = "5"
    """The version of MQTT. By 5 the broker itself holds back messages that are too long or too
    many."""
    client_id: str | None = None
    """The broker keeps unacknowledged messages for this name; None: one of this device and
    source, which no other has."""
    username: str | None = None
    password_file: str | None = None
    """A file with the password, if the broker wants one."""
    ca_file: str | None = None
    """Given, the connection is by TLS and the broker must show a certificate of this authority."""
    cert_file: str | None = None
    """The device's own certificate, if the broker wants one."""
    key_file: str | None = None
    """The certificate's private key, where it is not in the same file."""
    max_bytes: int | None = None
    """The longest message that is read; None: what the numbers of a sample can take as JSON."""
    format: Literal["json", "raw"] = "json"
    """What a message is: a JSON record, or a file as it is, for a decoder. Of a file, the user
    properties of MQTT 5 say `y`, `id`, `time` and all else."""
    fields: dict[str, str] = field(default_factory=dict)
    """Where messages that are not ours have `x`, `y`, `id`, `time`: `{ x = "payload.values" }`."""
    overload: Overload = field(default="sample", kw_only=True)
    """When the agent cannot keep up: `wait` holds the broker back, `sample` values an even
    sample, `drop` drops what comes meanwhile."""

    def __post_init__(self) -> None:
        if not self.topic or not re.fullmatch(r"(([^#+/\0]*|\+)/)*([^#+/\0]*|\+|#)", self.topic):
            raise ValueError(
                "topic must be levels apart by /, with + for one or # for the rest, "
                f"got {self.topic!r}"
            )
        check_range(self, "port", least=1, most=65535)
        check_range(self, "max_bytes", least=1)
        if self.client_id == "":
            raise ValueError("client_id must not be empty: the broker could keep nothing for it")
        if self.cert_file is not None and self.ca_file is None:
            raise ValueError("cert_file needs ca_file: without it the connection is not by TLS")
        if self.key_file is not None and self.cert_file is None:
            raise ValueError("key_file needs the cert_file that it belongs to")
        self._names = FieldNames(self.fields)
        self._lock = threading.Lock()
        self._device = ""
        self._connection = 0
        """Which connection is the present one: an answer belongs to the one its message came by."""

    def set_device(self, name: str) -> None:
        """Take the device's name, of which the default client id is made."""
        self._device = name

    def open(self) -> None:
        """Prepare the client; it connects once the source runs."""
        with optional_import("the MQTT source", "agent"):
            from paho.mqtt import client as paho
        made = {"client_id": self._name(), "manual_ack": True}
        if self.protocol == "5":
            made["protocol"] = paho.MQTTv5
        else:
            made |= {"protocol": paho.MQTTv311, "clean_session": False}
        client = self._client = _bounded_client()(paho.CallbackAPIVersion.VERSION2, **made)
        if self.username is not None:
            try:
                password = (
                    Path(self.password_file).read_text(encoding="utf-8").strip()
                    if self.password_file
                    else None
                )
            except OSError as error:
                raise ConfigError(
                    f"cannot read password_file {self.password_file}: {error.strerror}"
                ) from error
            client.username_pw_set(self.username, password)
        if self.ca_file is not None:
            try:
                client.tls_set(self.ca_file, certfile=self.cert_file, keyfile=self.key_file)
            except (OSError, ValueError) as error:
                given = " with ".join(filter(None, (self.ca_file, self.cert_file, self.key_file)))
                raise ConfigError(
                    f"source '{self.name}': ca_file {given} cannot be used: {error}"
                ) from error
        client.on_connect, client.on_message = self._subscribe, self._receive
        client.on_connect_fail = lambda *_: self._warn("no broker answers at %s; it is tried again")
        client.on_disconnect = self._lost
        client.reconnect_delay_set(1, 60)

    def run(self, intake: IngestQueue) -> None:
        """Hand over one message after another until the intake is stopped."""
        self._intake = intake
        self._longest = self.max_bytes or intake.form.longest_json
        ahead = min(_MOST_MESSAGES, max(_LEAST_MESSAGES, _BUFFER_BYTES // self._longest))
        self._messages: queue.Queue[tuple[int, Any]] = queue.Queue(ahead)
        self._client.longest_packet = self._longest + _HEADER_BYTES
        if self.protocol == "5":
            from paho.mqtt.packettypes import PacketTypes
            from paho.mqtt.properties import Properties

            wanted = Properties(PacketTypes.CONNECT)
            wanted.SessionExpiryInterval = _FOR_EVER
            wanted.MaximumPacketSize = self._client.longest_packet
            wanted.ReceiveMaximum = ahead
            self._client.connect_async(self.host, self.port, clean_start=False, properties=wanted)
        else:
            self._client.connect_async(self.host, self.port)
        # The client's own thread answers the broker's pings, however long the agent waits.
        self._client.loop_start()
        while not intake.stopped:
            try:
                connection, message = self._messages.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if not self._take(connection, message):
                return

    def close(self) -> None:
        """Leave the broker, which keeps what was not acknowledged."""
        self._client.loop_stop()
        self._client.disconnect()

    def _name(self) -> str:
        """Return the client id: the given one, or one of this device and source alone."""
        return self.client_id or f"fedkeep-{self._device or 'agent'}-{self.name}"

    def _warn(self, words: str) -> None:
        if not self._intake.stopped:
            log.warning(f"source '%s': {words}", self.name, f"{self.host}:{self.port}")

    def _lost(self, _client: Any, _data: Any, _flags: Any, reason: Any, *_: Any) -> None:
        with self._lock:
            self._connection += 1
        if str(reason) == "Session taken over":
            self._warn(f"another client calls itself {self._name()} at %s: set client_id")
        else:
            self._warn("the broker at %s is lost; it is tried again")

    def _subscribe(self, client: Any, _data: Any, _flags: Any, reason: Any, *_: Any) -> None:
        if reason.is_failure:
            remedy = (
                "; set protocol = '3.1.1'"
                if self.protocol == "5" and str(reason) in _VERSION_REFUSED
                else ""
            )
            log.warning(
                "source '%s': the broker refuses the agent (%s)%s", self.name, reason, remedy
            )
            return
        log.info(
            "source '%s': connected to the broker at %s:%d as %s",
            self.name,
            self.host,
            self.port,
            self._name(),
        )
        client.subscribe(self.topic, qos=1)

    def _receive(self, _client: Any, _data: Any, message: Any) -> None:
        """Run in the client's own thread.

        A broker that sends more than is read ahead is held back.
        """
        with self._lock:
            connection = self._connection
        while not self._intake.stopped:
            try:
                self._messages.put((connection, message), timeout=_POLL_SECONDS)
                return
            except queue.Full:
                continue

    def _record(self, message: Any) -> Record | None:
        """Return the record of a message; None if it is none."""
        if self.format == "json":
            return self._names.parse_json(message.payload)
        properties = getattr(getattr(message, "properties", None), "UserProperty", None) or []
        return self._names.take_texts(dict(properties[:_MOST_PROPERTIES]), bytes(message.payload))

    def _take(self, connection: int, message: Any) -> bool:
        """Hands a message over; returns False if the agent stops."""

        def acknowledge(_fate: str) -> None:
            with self._lock:
                # After a new connection the broker sends it again, perhaps under another number.
                if connection == self._connection:
                    self._client.ack(message.mid, message.qos)

        if connection != self._connection and message.qos:
            return True  # the broker sends it again by the new connection
        oversized = len(message.payload) > self._longest
        record = None if oversized else self._record(message)
        if record is not None:
            return self.deliver_record(self._intake, record, acknowledge)
        reason = "oversized" if oversized else "malformed"
        self._intake.refuse(reason, self.name, message.payload)
        acknowledge(f"refused.{reason}")
        return True


@cache
def _bounded_client() -> type[Any]:
    """Return a client class that never holds more of a packet than it may have."""
    from paho.mqtt.client import Client

    class BoundedClient(Client):  # type: ignore[misc]
        longest_packet = _HEADER_BYTES

        def _sock_recv(self, bufsize: int) -> bytes:
            """Return what came; of a packet that is too long the rest is read and forgotten.

            Its beginning stays, with the number by which it is acknowledged.
            """
            packet = self._in_packet
            data: bytes = super()._sock_recv(min(bufsize, 1 << 16))
            if len(packet["packet"]) >= self.longest_packet and len(data) > 1:
                packet["to_process"] -= len(data) - 1
                return data[:1]
            return data

    return BoundedClient
