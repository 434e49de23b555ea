"""Samples from an MQTT broker, JSON as in `lines`; a message is acknowledged once its sample's fate is on the disk."""

import logging
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedkeep.agent.arrivals import IngestQueue, Source
from fedkeep.agent.sources.lines import parse_json
from fedkeep.core.bounds import check_range
from fedkeep.core.errors import ConfigError, optional_import

log = logging.getLogger(__name__)


@dataclass
class MqttSource(Source):
    topic: str
    """What to subscribe to; `#` and `+` as MQTT has them."""
    host: str = "127.0.0.1"
    port: int = 1883
    """Of the broker, which may come later than the agent."""
    client_id: str = "fedkeep-agent"
    """The broker keeps unacknowledged messages for this name while the agent is away."""
    username: str | None = None
    password_file: str | None = None
    """A file with the password, if the broker wants one."""
    ca_file: str | None = None
    """Given, the connection is by TLS and the broker must show a certificate of this authority."""
    overload: Literal["sample", "wait"] = "sample"
    """When the agent cannot keep up: hold the broker back, or value an even sample."""

    def __post_init__(self) -> None:
        if not self.topic or not re.fullmatch(r"(([^#+/\0]*|\+)/)*([^#+/\0]*|\+|#)", self.topic):
            raise ValueError(
                f"topic must be levels apart by /, with + for one or # for the rest, got {self.topic!r}"
            )
        check_range(self, "port", least=1, most=65535)
        self._acks = threading.Lock()

    def open(self) -> None:
        with optional_import("the MQTT source", "agent"):
            from paho.mqtt import client as paho
        version = paho.CallbackAPIVersion.VERSION2
        client = self._client = paho.Client(
            version, self.client_id, clean_session=False, manual_ack=True
        )
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
                client.tls_set(self.ca_file)
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"source '{self.name}': ca_file {self.ca_file} cannot be used: {error}"
                ) from error
        client.on_connect, client.on_message = self._subscribe, self._take
        client.on_connect_fail = lambda *_: self._warn("no broker answers at %s; it is tried again")
        client.on_disconnect = lambda *_: self._warn("the broker at %s is lost; it is tried again")
        client.reconnect_delay_set(1, 60)
        client.connect_async(self.host, self.port)

    def run(self, intake: IngestQueue) -> None:
        self._intake = intake
        self._client.loop_start()
        intake.wait_stopped()

    def close(self) -> None:
        self._client.loop_stop()
        self._client.disconnect()

    def _warn(self, words: str) -> None:
        if not self._intake.stopped:
            log.warning(f"source '%s': {words}", self.name, f"{self.host}:{self.port}")

    def _subscribe(self, client: Any, _data: Any, _flags: Any, reason: Any, *_: Any) -> None:
        if reason.is_failure:
            log.warning("source '%s': the broker refuses the agent (%s)", self.name, reason)
            return
        log.info("source '%s': connected to the broker at %s:%d", self.name, self.host, self.port)
        client.subscribe(self.topic, qos=1)

    def _take(self, client: Any, _data: Any, message: Any) -> None:
        """Runs in the client's own thread."""

        def acknowledge(_fate: str) -> None:
            with self._acks:
                client.ack(message.mid, message.qos)

        oversized = len(message.payload) > 4096 + 32 * self._intake.sample_bytes
        arrival = None if oversized else parse_json(message.payload, self.name, acknowledge)
        if arrival is None:
            self._intake.refuse(
                "oversized" if oversized else "malformed", self.name, message.payload
            )
            acknowledge("refused")
        else:
            self._intake.offer(arrival, wait=self.overload == "wait")
