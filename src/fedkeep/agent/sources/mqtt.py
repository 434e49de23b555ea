"""Samples from an MQTT broker, JSON as in `lines`; a message is acknowledged once its sample's fate is on the disk."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedkeep.agent.arrivals import Arrival, Sink
from fedkeep.agent.sources.lines import parse_line
from fedkeep.core.errors import ConfigError, MissingExtraError


@dataclass(frozen=True)
class MqttOptions:
    name: str
    topic: str
    host: str = "127.0.0.1"
    port: int = 1883
    client_id: str = "fedkeep-agent"
    """The broker keeps unacknowledged messages for this name while the agent is away."""
    qos: Literal[0, 1] = 1
    username: str | None = None
    password_file: str | None = None
    ca_file: str | None = None
    """Given, the connection is by TLS and the broker must show a certificate of this authority."""
    overload: Literal["sample", "wait"] = "sample"


class MqttSource:
    def __init__(self, options: MqttOptions, sample_bytes: int) -> None:
        self.name = options.name
        self._options = options
        self._limit = 4096 + 32 * sample_bytes
        self._client: Any = None
        self._sink: Sink | None = None
        self._acks = threading.Lock()

    def open(self) -> None:
        try:
            from paho.mqtt import client as paho
        except ImportError:
            raise MissingExtraError("the MQTT source", "agent") from None
        options = self._options
        client = paho.Client(
            paho.CallbackAPIVersion.VERSION2, options.client_id, clean_session=options.qos == 0, manual_ack=True
        )
        if options.username is not None:
            client.username_pw_set(options.username, _password(options))
        if options.ca_file is not None:
            client.tls_set(options.ca_file)
        client.on_connect = self._subscribe
        client.on_message = self._take
        try:
            client.connect(options.host, options.port)
        except OSError as error:
            raise ConfigError(f"no MQTT broker answers at {options.host}:{options.port}: {error}") from error
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

    def _subscribe(self, client: Any, *_: Any) -> None:
        client.subscribe(self._options.topic, self._options.qos)

    def _take(self, client: Any, _data: Any, message: Any) -> None:
        """Runs in the client's own thread."""
        assert self._sink is not None

        def acknowledge(_fate: str) -> None:
            with self._acks:
                client.ack(message.mid, message.qos)

        sample = parse_line(message.payload) if len(message.payload) <= self._limit else None
        if sample is None:
            self._sink.refuse("malformed")
            acknowledge("refused.malformed")
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
