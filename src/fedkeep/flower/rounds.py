"""When a round opens and closes, how it ended, and its metrics for Prometheus."""

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from fedkeep.config.options import MetricsOptions
from fedkeep.core.bounds import check_range
from fedkeep.core.errors import ConfigError, RejectedError, optional_import
from fedkeep.core.rounds import Rejection, RoundSummary
from fedkeep.core.types import DeviceId
from fedkeep.protocol.messages import Evaluated

log = logging.getLogger("fedkeep.flower")


@dataclass(frozen=True)
class RoundOptions:
    """`rounds`: whom a round asks, and what it waits for.

    >>> options = RoundOptions(participation=0.5, over_selection=1.3, quorum=0.5)
    >>> options.wanted(10), options.asked(10), options.least(5)
    (5, 7, 3)
    """

    participation: float = 0.1
    """|C_t| / |C|: the share of the devices online that a round waits for, at least one."""
    over_selection: float = 1.3
    """How many times as many devices are asked as reports are waited for."""
    deadline: float = 60.0
    """Seconds after which a round closes with what came in."""
    quorum: float = 0.5
    """The share of the reports waited for without which a round leaves the model as it was."""
    min_devices: int = 1
    """Devices to wait for before the first round."""
    evaluate_every: int = 0
    """Rounds between evaluations on the devices; 0: none."""
    identity: Literal["key", "claim"] = "key"
    """Devices are known by their keys; `claim` trusts their numbers, for nodes without keys."""
    deterministic: bool = False
    """Ask exactly the chosen devices and await them all: the same run again gives the same bits."""

    def __post_init__(self) -> None:
        check_range(self, "participation", above=0, most=1)
        check_range(self, "over_selection", "min_devices", least=1)
        check_range(self, "deadline", above=0)
        check_range(self, "quorum", least=0, most=1)
        check_range(self, "evaluate_every", least=0)

    def wanted(self, devices: int) -> int:
        """How many reports a round waits for."""
        return max(1, round(self.participation * devices))

    def asked(self, devices: int) -> int:
        """How many devices a round asks."""
        wanted = self.wanted(devices)
        return (
            wanted if self.deterministic else min(devices, math.ceil(self.over_selection * wanted))
        )

    def least(self, wanted: int) -> int:
        """How many reports a round needs."""
        return wanted if self.deterministic else math.ceil(self.quorum * wanted)

    @property
    def patience(self) -> float:
        """Seconds that a round waits for its reports."""
        return math.inf if self.deterministic else self.deadline


@dataclass(frozen=True, eq=False)
class RoundOutcome:
    """A round as it ended."""

    summary: RoundSummary
    quorate: bool
    """Whether enough reports came in for the round to count."""
    rejections: tuple[Rejection, ...]
    """All that did not count: reports, profiles and messages that could not be read."""
    seconds: float
    evaluated: Mapping[DeviceId, Evaluated]
    evaluation: Mapping[str, float]
    """Loss and accuracy over all devices that answered, and a robust accuracy."""

    def metrics(self) -> dict[str, int | float | list[int] | list[float]]:
        """Return the round in Flower's terms; `rejected` and `filtered` name the devices."""
        return {
            "accepted": len(self.summary.accepted),
            "empty": len(self.summary.empty),
            "missing": len(self.summary.missing),
            "rejected": sorted({rejection.device for rejection in self.rejections}),
            "filtered": list(self.summary.filtered),
            "quorate": int(self.quorate),
            "seconds": self.seconds,
        }


class Rejections:
    """What did not count since the last round closed; each is logged and listed once.

    >>> rejections = Rejections()
    >>> with rejections.attributed_to(7):
    ...     raise RejectedError("replayed", "a report of round 2 to an order of 3")
    >>> rejections.take()
    (Rejection(device=7, reason='replayed', detail='a report of round 2 to an order of 3'),)
    >>> rejections.take()
    ()
    """

    def __init__(self) -> None:
        self._listed: list[Rejection] = []

    def add(self, *rejections: Rejection) -> None:
        """List these, each once, and log them."""
        for rejection in rejections:
            if rejection not in self._listed:
                log.warning(
                    "device %d rejected: %s: %s",
                    rejection.device,
                    rejection.reason,
                    rejection.detail,
                )
                self._listed.append(rejection)

    @contextmanager
    def attributed_to(self, device: DeviceId) -> Iterator[None]:
        """List a `RejectedError` inside the block as this device's, and go on."""
        try:
            yield
        except RejectedError as error:
            self.add(Rejection(device, error.reason, error.detail))

    def take(self) -> tuple[Rejection, ...]:
        """Return what was listed, and begin anew."""
        listed, self._listed = tuple(self._listed), []
        return listed


class ServerMetrics:
    """Counts rounds and what did not count in them; an endpoint serves it."""

    def __init__(self) -> None:
        self._gauges: dict[str, tuple[str, float]] = {}
        self._rejected, self._rounds = Counter[str](), Counter[str]()

    def see(self, outcome: RoundOutcome, online: int, bytes_down: int, bytes_up: int) -> None:
        """Take in a closed round."""
        summary = outcome.summary
        self._rounds["quorate" if outcome.quorate else "without quorum"] += 1
        self._rejected.update(rejection.reason for rejection in outcome.rejections)
        self._gauges |= {
            "round": ("Rounds done", summary.round + 1),
            "devices_online": ("Devices online", online),
            "accepted": ("Reports accepted in the last round", len(summary.accepted)),
            "missing": (
                "Devices asked in the last round that did not report",
                len(summary.missing),
            ),
            "round_seconds": ("Seconds that the last round took", outcome.seconds),
            "bytes_down": ("Bytes sent to devices", bytes_down),
            "bytes_up": ("Bytes received from devices", bytes_up),
        }
        for name in outcome.evaluation.keys() & {"accuracy", "loss"}:
            self._gauges[name] = (
                f"The devices' {name} when last evaluated",
                outcome.evaluation[name],
            )

    def collect(self) -> Iterator[Any]:
        """Yield the metrics in Prometheus' terms."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, (text, value) in self._gauges.items():
            yield GaugeMetricFamily(f"fedkeep_server_{name}", text, value)
        for name, label, text, counts in (
            ("refusals", "reason", "Reports and profiles that did not count", self._rejected),
            ("rounds", "outcome", "Rounds since this server started", self._rounds),
        ):
            family = CounterMetricFamily(f"fedkeep_server_{name}", text, labels=[label])
            for word, count in sorted(counts.items()):
                family.add_metric([word], count)
            yield family

    def serve(self, options: MetricsOptions) -> None:
        """Answers at the port for as long as the process lives."""
        with optional_import("the metrics endpoint", "flower"):
            from prometheus_client import CollectorRegistry, start_http_server
        registry = CollectorRegistry()
        registry.register(self)
        try:
            start_http_server(options.port, options.host, registry)
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on {options.host}:{options.port}: {error.strerror}"
            ) from error
