"""A generator of mobile traffic: the first packets of flows of twenty applications on thirty terminals.

Applications are burst processes. Each has a few activities (start-up, browsing, background sync ...) of very
different frequency; an activity is a Markov chain over kinds of packet, with its own packet sizes and gaps.
Applications of one category (video, game, download, messaging) are variations of one theme, so they overlap.
A flow has its own round-trip time and padding, a terminal its own access line, and a small share of flows is
traffic that any application of the category may cause (advertisements, analytics): no model can tell whose it
was.

The constants were set so that the traffic CNN reaches 95-96 % with full data, looking at full data and FIFO
only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedkeep.core.seeds import generator
from fedkeep.core.types import AnyArray, FloatArray, IntArray
from fedkeep.data.split import apportion

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
