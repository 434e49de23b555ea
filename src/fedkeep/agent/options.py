"""The agent's configuration file, as dataclasses; other tables belong to the store, the policy and the sources."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

_MOST_NUMBERS, _MOST_LABELS = 1 << 28, 1 << 24
"""Far beyond any device; a slip of the pen beyond them would end in a lack of memory."""


@dataclass(frozen=True)
class AgentOptions:
    """The table `[agent]`."""

    socket: str = "fedkeep.sock"
    """The Unix socket of the local API; only its owner may use it."""
    batch: int = 64
    """Samples that are valued together, at most."""
    linger_ms: int = 10
    """How long a batch waits to fill."""
    queue: int = 512
    """Samples that may wait to be valued; beyond half of it the stream is thinned evenly."""
    nice: int = 10
    """The process's nice level: 19 yields to everything else."""
    cpu_cap: float = 1.0
    """The share of one core that valuation may take."""
    during_training: Literal["continue", "pause"] = "continue"
    """Whether arrivals are valued while the device trains, or wait in the queue until it has."""
    held_out: str | None = None
    """An npz file with `x` and `y` on which models are evaluated; None: on what is stored."""
    seed: int = 0
    velocity_window_seconds: float = 3600.0
    """How far back arrivals are counted for the device's profile."""

    def __post_init__(self) -> None:
        if not 1 <= self.batch <= 4096:
            raise ValueError(f"batch must be between 1 and 4096, got {self.batch}")
        if self.queue < 2 * self.batch:
            raise ValueError(f"queue must be at least twice batch ({2 * self.batch}), got {self.queue}")
        if not 0 < self.cpu_cap <= 1:
            raise ValueError(f"cpu_cap must be above 0 and at most 1, got {self.cpu_cap}")
        if not 0 <= self.nice <= 19:
            raise ValueError(f"nice must be between 0 and 19, got {self.nice}")
        if not 0 <= self.linger_ms <= 1000:
            raise ValueError(f"linger_ms must be between 0 and 1000, got {self.linger_ms}")
        if not self.velocity_window_seconds > 0:
            raise ValueError(f"velocity_window_seconds must be above 0, got {self.velocity_window_seconds}")


@dataclass(frozen=True)
class SampleOptions:
    """The table `[samples]`: what every sample looks like."""

    shape: tuple[int, ...]
    labels: int
    dtype: Literal["float32", "float64", "uint8", "int8", "int16", "float16"] = "float32"
    """How they are stored; the models get float32."""
    limit: float = 1e6
    """A sample with a larger number, either sign, is refused as `huge`: one would outweigh all others for ever."""
    outlier: float = 100.0
    """So is one whose largest number is that many times the usual; 0: only `limit` counts."""

    def __post_init__(self) -> None:
        if not self.limit > 0:
            raise ValueError(f"limit must be above 0, got {self.limit}")
        if not self.outlier >= 0:
            raise ValueError(f"outlier must be 0 or more, got {self.outlier}")
        if not self.shape or min(self.shape) < 1:
            raise ValueError(f"shape must be one or more positive numbers, got {list(self.shape)}")
        if math.prod(self.shape) > _MOST_NUMBERS:
            raise ValueError(f"shape must make at most {_MOST_NUMBERS} numbers, got {list(self.shape)}")
        if not 1 <= self.labels <= _MOST_LABELS:
            raise ValueError(f"labels must be between 1 and {_MOST_LABELS}, got {self.labels}")


@dataclass(frozen=True)
class MetricsOptions:
    """The table `[metrics]`: where Prometheus finds the agent's numbers."""

    port: int = 0
    """0: no endpoint."""
    host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be between 0 and 65535, got {self.port}")
