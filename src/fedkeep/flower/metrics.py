"""The server's numbers for Prometheus, gathered when they are asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedkeep.core.errors import ConfigError, MissingExtraError
from fedkeep.flower.rounds import RoundOutcome

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


@dataclass(frozen=True)
class ServerMetricsOptions:
    """`metrics`: where Prometheus finds the server's numbers."""

    port: int = 0
    """0: no endpoint."""
    host: str = "127.0.0.1"


class ServerMetrics:
    """Counts rounds and what did not count in them; an endpoint serves it."""

    def __init__(self) -> None:
        self._gauges: dict[str, tuple[str, float]] = {}
        self._refused: Counter[str] = Counter()
        self._rounds: Counter[str] = Counter()

    def see(self, outcome: RoundOutcome, online: int, bytes_down: int, bytes_up: int) -> None:
        """Takes in a round."""
        summary = outcome.summary
        self._rounds["quorate" if outcome.quorate else "without quorum"] += 1
        self._refused.update(refusal.reason for refusal in outcome.refusals)
        self._gauges |= {
            "server_round": ("Rounds done", summary.round + 1),
            "server_devices_online": ("Devices online", online),
            "server_accepted": ("Reports accepted in the last round", len(summary.accepted)),
            "server_missing": ("Devices asked in the last round that did not report", len(summary.missing)),
            "server_round_seconds": ("Seconds that the last round took", outcome.seconds),
            "server_bytes_down": ("Bytes sent to devices", bytes_down),
            "server_bytes_up": ("Bytes received from devices", bytes_up),
        }
        for name in ("accuracy", "loss"):
            if name in outcome.evaluation:
                self._gauges[f"server_{name}"] = (f"The devices' {name} when last evaluated", outcome.evaluation[name])

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, (text, value) in self._gauges.items():
            yield GaugeMetricFamily(f"fedkeep_{name}", text, value)
        for name, text, label, counts in (
            ("server_refusals", "Reports and profiles that did not count", "reason", self._refused),
            ("server_rounds", "Rounds since this server started", "outcome", self._rounds),
        ):
            family = CounterMetricFamily(f"fedkeep_{name}", text, labels=[label])
            for value_of_label, count in sorted(counts.items()):
                family.add_metric([value_of_label], count)
            yield family

    def serve(self, options: ServerMetricsOptions) -> None:
        """Answers at the port for as long as the process lives."""
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError:
            raise MissingExtraError("the metrics endpoint", "flower") from None
        registry = CollectorRegistry()
        registry.register(self)
        try:
            start_http_server(options.port, options.host, registry)
        except OSError as error:
            raise ConfigError(f"cannot serve metrics on {options.host}:{options.port}: {error.strerror}") from error
