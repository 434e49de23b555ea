"""The agent's numbers for Prometheus, gathered when they are asked for."""

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from fedkeep.agent.agent import Agent
from fedkeep.agent.connections import Listener
from fedkeep.agent.service import QUANTILES, summarise
from fedkeep.core.errors import needing

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_PATIENCE, _CLIENTS, _QUESTION_BYTES = 5.0, 8, 8192
"""Seconds that a client may be silent, how many there may be at a time, and what each of them may ask."""
_GIST = {
    "worth": "Samples that the gist is worth",
    "arrivals": "Arrivals since the device last took part, which the gist will take in when it next does",
    "bytes": "Bytes of the gist at rest, with the sums over those arrivals",
    "trust": "How much of the gist was used when the device last took part",
    "likeness": "How alike a sample's gradients were then under the device's old model and the new one",
    "reach": "The correction's length then over that of the stored samples' gradient",
}


@dataclass(frozen=True)
class Collector:
    """Turns the agent's status into metrics."""

    agent: Agent

    def collect(self) -> "Iterator[Metric]":
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        status = summarise(self.agent)
        for name, text, value in (
            ("bytes_used", "Bytes of the store that hold samples and state", status.bytes),
            ("bytes_budget", "Bytes that the store may take", status.budget),
            ("samples", "Samples stored", status.samples),
            ("capacity", "Samples that the budget holds", status.capacity),
            ("labels_held", "Labels of which at least one sample is stored", status.labels_held),
            ("labels", "Labels of the task", status.labels),
            ("stride", "One of this many arrivals is valued", status.stride),
            ("model_round", "The round of the model last received, -1 before the first", status.round),
            ("sample_bytes", "Bytes of the budget that one stored sample takes", status.sample_bytes),
            ("seconds_per_sample", "Time to value and judge one sample", self.agent.seconds_per_sample),
            ("epsilon_spent", "Epsilon spent of the privacy budget", status.epsilon_spent),
            ("epsilon_budget", "Epsilon that may be spent", status.epsilon_budget),
            ("model_age_seconds", "Seconds since the model and g_hat were received", status.model_age_seconds),
        ):
            if value is not None:
                yield GaugeMetricFamily(f"fedkeep_{name}", text, value)
        if status.gist is not None:
            for field, value in msgspec.structs.asdict(status.gist).items():
                if isinstance(value, float | int):
                    gauge = GaugeMetricFamily(f"fedkeep_gist_{field}", _GIST[field], labels=["form"])
                    gauge.add_metric([status.gist.name], value)
                    yield gauge
        values = GaugeMetricFamily("fedkeep_value", "Values of the samples stored", labels=["quantile"])
        for quantile, value in zip(QUANTILES, status.value_quantiles, strict=False):
            values.add_metric([f"{quantile:g}"], value)
        yield values
        fates = CounterMetricFamily("fedkeep_arrivals", "Arrivals by what became of them", labels=["fate", "reason"])
        for name, count in status.counters.items():
            fate, _, reason = name.partition(".")
            fates.add_metric([fate, reason], count)
        yield fates


def serve_metrics(agent: Agent) -> Callable[[], None]:
    """Starts the endpoint and returns what stops it; without a port there is none.

    Not by the client library's own server: it would take as many connections as come, and descriptors are few.
    """
    options = agent.config.metrics
    if not options.port:
        return lambda: None
    with needing("the metrics endpoint", "agent"):
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
    registry = CollectorRegistry()
    registry.register(Collector(agent))
    listener = Listener((options.host, options.port), _CLIENTS)

    def answer(connection: socket.socket) -> None:
        """Whatever is asked for, the metrics are the answer."""
        connection.settimeout(_PATIENCE)
        question = b""
        while b"\r\n\r\n" not in question and len(question) < _QUESTION_BYTES:
            if not (chunk := connection.recv(_QUESTION_BYTES)):
                return
            question += chunk
        page = generate_latest(registry)
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {CONTENT_TYPE_LATEST}\r\nContent-Length: {len(page)}\r\n"
        connection.sendall(f"{head}Connection: close\r\n\r\n".encode() + page)

    listener.start(answer)
    return listener.close
