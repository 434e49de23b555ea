"""Samples from an MQTT broker, JSON as in `lines`; a message is acknowledged once its sample's fate is on the disk."""

import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedkeep.agent.arrivals import Arrival, Sink
from fedkeep.agent.sources.lines import parse_line
from fedkeep.core.bounds import within
from fedkeep.core.errors import ConfigError, needing

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MqttOptions:
    name: str
    """How messages, `why` and `erase --source` call it."""
    topic: str
    """What to subscribe to; `#` and `+` as MQTT has them."""
    host: str = "127.0.0.1"
    port: int = 1883
    """Of the broker, which may come later than the agent."""
    client_id: str = "fedkeep-agent"
    """The broker keeps unacknowledged messages for this name while the agent is away."""
    qos: Literal[0, 1] = 1
    """1: the broker sends again what was not acknowledged."""
    username: str | None = None
    password_file: str | None = None
    """A file with the password, if the broker wants one."""
    ca_file: str | None = None
    """Given, the connection is by TLS and the broker must show a certificate of this authority."""
    overload: Literal["sample", "wait"] = "sample"
    """When the agent cannot keep up: hold the broker back, or value an even sample."""

    def __post_init__(self) -> None:
        *above, last = self.topic.split("/")
        wild = [level for level in above if "#" in level or ("+" in level and level != "+")]
        if not self.topic or "\0" in self.topic or wild or (len(last) > 1 and ("#" in last or "+" in last)):
            raise ValueError(f"topic must be levels apart by /, with + for one or # for the rest, got {self.topic!r}")
        within(self, "port", least=1, most=65535)


class MqttSource:
    def __init__(self, options: MqttOptions, sample_bytes: int) -> None:
        self.name = options.name
        self._options = options
        self._limit = 4096 + 32 * sample_bytes
        self._broker = f"{options.host}:{options.port}"
        self._client: Any = None
        self._sink: Sink | None = None
        self._acks = threading.Lock()

    def open(self) -> None:
        with needing("the MQTT source", "agent"):
            from paho.mqtt import client as paho
        options = self._options
        client = paho.Client(
            paho.CallbackAPIVersion.VERSION2, options.client_id, clean_session=options.qos == 0, manual_ack=True
        )
        if options.username is not None:
            client.username_pw_set(options.username, _password(options))
        if options.ca_file is not None:
            try:
                client.tls_set(options.ca_file)
            except (OSError, ValueError) as error:
                raise ConfigError(f"source '{self.name}': ca_file {options.ca_file} cannot be used: {error}") from error
        client.on_connect = self._subscribe
        client.on_connect_fail = self._missing
        client.on_disconnect = self._lost
        client.on_message = self._take
        client.reconnect_delay_set(1, 60)
        client.connect_async(options.host, options.port)
        self._client = client

    def run(self, sink: Sink) -> None:
        self._sink = sink
        self._client.loop_start()
        while not sink.stopped:
            time.sleep(0.1)

    def close(self) -> None:
        if self._client is not None:
            self._client.loop_stop()
            self._client.disconnect()

    def _subscribe(self, client: Any, _data: Any, _flags: Any, reason: Any, *_: Any) -> None:
        if reason.is_failure:
            log.warning("source '%s': the broker refuses the agent (%s)", self.name, reason)
            return
        log.info("source '%s': connected to the broker at %s", self.name, self._broker)
        client.subscribe(self._options.topic, self._options.qos)

    def _missing(self, *_: Any) -> None:
        log.warning("source '%s': no broker answers at %s; it is tried again", self.name, self._broker)

    def _lost(self, *_: Any) -> None:
        if self._sink is not None and not self._sink.stopped:
            log.warning("source '%s': the broker at %s is lost; it is tried again", self.name, self._broker)

    def _take(self, client: Any, _data: Any, message: Any) -> None:
        """Runs in the client's own thread."""
        assert self._sink is not None

        def acknowledge(_fate: str) -> None:
            with self._acks:
                client.ack(message.mid, message.qos)

        oversized = len(message.payload) > self._limit
        sample = None if oversized else parse_line(message.payload)
        if sample is None:
            reason = "oversized" if oversized else "malformed"
            self._sink.refuse(reason, self.name, message.payload)
            acknowledge(f"refused.{reason}")
            return
        arrival = Arrival(sample.x, sample.y, sample.id, self.name, acknowledge)
        self._sink.offer(arrival, wait=self._options.overload == "wait")


def _password(options: MqttOptions) -> str | None:
    if options.password_file is None:
        return None
    try:
        return Path(options.password_file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"cannot read password_file {options.password_file}: {error.strerror}") from error
