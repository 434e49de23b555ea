"""The task TC: which application a flow of packets belongs to, on the terminals of a mobile network.

The flows are real, or generated: the first packets of flows of twenty applications on thirty terminals.
Applications are burst processes. Each has a few activities (start-up, browsing, background sync ...) of very
different frequency; an activity is a Markov chain over kinds of packet, with its own packet sizes and gaps.
Applications of one category (video, game, download, messaging) are variations of one theme, so they overlap.
A flow has its own round-trip time and padding, a terminal its own access line, and a small share of flows is
traffic that any application of the category may cause (advertisements, analytics): no model can tell whose it
was.

The constants were set so that the traffic CNN reaches 95-96 % with full data, looking at full data and FIFO
only.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from fedkeep.core.bounds import within
from fedkeep.core.quantities import apportion
from fedkeep.core.seeds import generator
from fedkeep.core.types import AnyArray, FloatArray, IntArray
from fedkeep.data import ustc
from fedkeep.data.cache import Progress
from fedkeep.data.federation import Federation, ModelSpec, Ownership, hold_out
from fedkeep.data.partition import Natural, partition_from

PACKETS = 64
CATEGORIES = ("video", "game", "download", "messaging")
_ACTIVITIES = 3
_ACTIVITY_SHARES = np.array([0.6, 0.3, 0.1])
_DIRECTIONS = np.array([1.0, -1.0, 1.0, -1.0])
"""Kinds of packet: request (up), data (down), acknowledgement (up), control (down)."""
_SIZES = np.array([420.0, 1180.0, 70.0, 180.0])
_GAPS = np.array([1.6, 0.4, 0.6, 1.2])
"""Decimal logarithm of the milliseconds before a packet."""
_TENDENCIES = np.array([[0.0, 1.2, 0.3, 0.0], [0.5, -0.5, 0.3, 0.8], [-0.3, 1.6, 0.6, 0.0], [0.3, 0.0, 0.0, 0.6]])
"""How much more or less often each category sends each kind: video and downloads are mostly data."""
_CHAIN_VARIATION = 1.2
_SIZE_VARIATION = 0.8
_GAP_VARIATION = 0.8
_SHARED_TRAFFIC = 0.09
_SMALLEST, _LARGEST, _LONGEST_GAP = 40.0, 1500.0, 3.0
_USUAL_SIZE, _USUAL_GAP, _GAP_UNIT = 400.0, 1.4, 0.85
"""Fixed units in which sizes and gaps have a mean near 0 and a standard deviation near 1."""


@dataclass(frozen=True)
class Traffic:
    """Generated flows of 64 packets x (size, direction, gap); or the real sessions of USTC-TFC2016."""

    dataset: Literal["generated", "ustc"] = "generated"
    """Flows generated here, or real sessions."""
    devices: int = 30
    """Terminals of the generated network; USTC is divided by `partition`."""
    applications: int = 20
    """Labels of the generated network."""
    applications_per_device: int = 15
    """Labels that a generated terminal uses."""
    samples: int = 37_853
    """Flows to generate."""
    generator_seed: int = 2019
    """What the flows themselves follow from; the experiment's seed draws only splits."""
    test_fraction: float = 0.2
    """Held out in each device for testing."""
    partition: Mapping[str, Any] = field(
        default_factory=lambda: {"name": "dirichlet", "devices": 30, "alpha": 0.3, "minimum": 10}
    )
    """USTC only: it does not say who used the applications."""

    def __post_init__(self) -> None:
        within(self, "applications_per_device", least=1, most=self.applications)
        within(self, "devices", least=1)
        within(self, "samples", least=2 * self.devices * self.applications_per_device)
        within(self, "test_fraction", above=0, below=1)
        if isinstance(partition_from(self.partition), Natural):
            raise ValueError("partition.name must not be 'natural': USTC-TFC2016 has no devices of its own")

    def load(self, seed: int, progress: Progress | None = None) -> Federation:
        return self._ustc(seed, progress) if self.dataset == "ustc" else self._generated(seed)

    def _generated(self, seed: int) -> Federation:
        apps = draw_applications(self.applications, self.generator_seed)
        labels, terminals = draw_usage(
            self.applications, self.devices, self.applications_per_device, self.samples, self.generator_seed
        )
        x = draw_flows(apps, labels, terminals, self.generator_seed)
        train, test = hold_out(Ownership.from_assignment(terminals, self.devices), self.test_fraction, seed)
        names = application_names(self.applications)
        return Federation("traffic", x, labels, train, test, names, ModelSpec("traffic-cnn"), rounds_per_pass=500)

    def _ustc(self, seed: int, progress: Progress | None) -> Federation:
        """Real sessions: 784 bytes as an image of 28x28, so that LeNet fits."""
        x, y = ustc.load_sessions(progress)
        members = partition_from(self.partition).divide(y, None, seed)
        train, test = hold_out(members, self.test_fraction, seed)
        return Federation("traffic", x, y, train, test, ustc.LABELS, ModelSpec("lenet"), rounds_per_pass=500)


@dataclass(frozen=True, eq=False)
class Applications:
    """The burst processes, (application, activity, kind of packet ...); the last rows are shared traffic."""

    chains: FloatArray
    """Cumulated transition probabilities, (A, activities, kinds, kinds)."""
    sizes: FloatArray
    gaps: FloatArray


def draw_applications(count: int, seed: int) -> Applications:
    """`count` applications, in turn of the four categories, then one process of shared traffic a category."""
    rng = generator(seed, "applications")
    kinds, themes = len(_SIZES), len(CATEGORIES)
    theme = np.concatenate([np.arange(count) % themes, np.arange(themes)])
    shape = (len(theme), _ACTIVITIES, kinds)
    theme_logits = _TENDENCIES[:, None, None] + 0.8 * rng.normal(size=(themes, 1, kinds, kinds))
    logits = theme_logits[theme] + _CHAIN_VARIATION * rng.normal(size=(*shape, kinds))
    chains = np.exp(logits)
    chains = np.cumsum(chains / chains.sum(axis=-1, keepdims=True), axis=-1)
    theme_sizes = np.log(_SIZES) + 0.2 * rng.normal(size=(themes, 1, kinds))
    sizes = np.exp(theme_sizes[theme] + _SIZE_VARIATION * rng.normal(size=shape))
    theme_gaps = _GAPS + 0.3 * rng.normal(size=(themes, 1, kinds))
    return Applications(chains, sizes, theme_gaps[theme] + _GAP_VARIATION * rng.normal(size=shape))


def draw_flows(apps: Applications, labels: IntArray, terminals: IntArray, seed: int) -> AnyArray:
    """One flow per label, (n, 3, 64) float32: packet size, direction and gap, in fixed units.

    Sizes are whole bytes and gaps have two decimals, so that processors that differ in a last bit agree on the data.
    """
    rng = generator(seed, "flows")
    n = len(labels)
    themes = len(CATEGORIES)
    process = np.where(rng.random(n) < _SHARED_TRAFFIC, len(apps.sizes) - themes + labels % themes, labels)
    activity = rng.choice(_ACTIVITIES, size=n, p=_ACTIVITY_SHARES)
    padding = np.exp(0.08 * rng.normal(size=n))
    line = generator(seed, "lines").normal(0.0, 0.15, int(terminals.max()) + 1)
    delay = line[terminals] + 0.25 * rng.normal(size=n)
    flows = np.empty((n, 3, PACKETS), dtype=np.float32)
    kind = np.zeros(n, dtype=np.int64)
    for step in range(PACKETS):
        size = apps.sizes[process, activity, kind] * padding * np.exp(0.1 * rng.normal(size=n))
        gap = apps.gaps[process, activity, kind] + delay + 0.35 * rng.normal(size=n)
        flows[:, 0, step] = np.clip(np.round(size), _SMALLEST, _LARGEST) / _USUAL_SIZE - 1
        flows[:, 1, step] = _DIRECTIONS[kind]
        flows[:, 2, step] = (np.clip(np.round(gap, 2), 0.0, _LONGEST_GAP) - _USUAL_GAP) / _GAP_UNIT
        kind = (rng.random(n)[:, None] > apps.chains[process, activity, kind, :-1]).sum(axis=1)
    return flows


def application_names(count: int) -> tuple[str, ...]:
    """Names like "video-1", in the order of the labels: the most used applications first."""
    return tuple(f"{CATEGORIES[n % len(CATEGORIES)]}-{n // len(CATEGORIES) + 1}" for n in range(count))


def draw_usage(count: int, terminals: int, per_terminal: int, samples: int, seed: int) -> tuple[IntArray, IntArray]:
    """Labels and terminals of `samples` flows: few make most traffic, each terminal has its own mix."""
    rng = generator(seed, "usage")
    popularity = 1.0 / np.arange(1, count + 1)
    shares = np.zeros((terminals, count))
    for terminal, activity in enumerate(np.exp(0.6 * rng.normal(size=terminals))):
        installed = rng.permutation(count)[:per_terminal]
        used = popularity[installed] * np.exp(0.6 * rng.normal(size=per_terminal))
        shares[terminal, installed] = activity * used / used.sum()
    cells = np.flatnonzero(shares)
    counts = apportion(samples, shares.ravel()[cells], minimum=2)
    return np.repeat(cells % count, counts), np.repeat(cells // count, counts)
