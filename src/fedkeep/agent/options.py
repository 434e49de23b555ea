"""The agent's configuration file, as dataclasses; other tables belong to the store, the policy and the sources."""

import math
from dataclasses import dataclass
from typing import Literal

from fedkeep.core.bounds import within

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

    def __post_init__(self) -> None:
        within(self, "batch", least=1, most=4096)
        if self.queue < 2 * self.batch:
            raise ValueError(f"queue must be at least twice batch ({2 * self.batch}), got {self.queue}")
        within(self, "cpu_cap", above=0, most=1)
        within(self, "nice", least=0, most=19)
        within(self, "linger_ms", least=0, most=1000)
        within(self, "seed", least=0, most=(1 << 63) - 1)


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
        within(self, "limit", above=0)
        within(self, "outlier", least=0)
        within(self, "labels", least=1, most=_MOST_LABELS)
        if not self.shape or min(self.shape) < 1:
            raise ValueError(f"shape must be one or more positive numbers, got {list(self.shape)}")
        if math.prod(self.shape) > _MOST_NUMBERS:
            raise ValueError(f"shape must make at most {_MOST_NUMBERS} numbers, got {list(self.shape)}")
