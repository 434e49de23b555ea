"""Local search on a plan's labels: devices exchange labels in short cycles while the objective (9a) grows.

An exchange "a -> b" lets one device drop label a and take b, so that a loses a holder and b gains one. Round a
cycle of labels nobody loses. A cycle may also pass through one of two pools, at which a label ends up with a holder
more and the next with one less: either that one has more than wanted, or it is no more short than the first was.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from fedkeep.core.holdings import Holdings
from fedkeep.core.types import FloatArray, IntArray

_NEVER = -np.inf
_CANDIDATES = 512
"""Cycles looked at per step; most often the first ones are taken."""


def improve(holdings: Holdings, capacities: IntArray, stages: Sequence[IntArray], *, concentrated: bool) -> None:
    """Makes exchanges until none of the cycles tried adds to the objective.

    No label comes to have fewer holders than the first of the `stages` asks for, nor do all together come to lack
    more of what the last one asks for. `concentrated` says that all slots but one per label go to a device's fastest
    label; else they are split evenly.
    """
    while _step(holdings, *_gains(holdings, capacities, stages, concentrated=concentrated)):
        pass


def _step(holdings: Holdings, best: FloatArray, makers: IntArray) -> bool:
    """Makes the best cycles that share neither labels nor devices, so that gains add up; says if there were any."""
    pools = {len(best) - 2, len(best) - 1}
    busy_labels: set[int] = set()
    busy_devices: set[int] = set()
    for cycle in _cycles(best):
        swaps = [pair for pair in zip(cycle, cycle[1:] + cycle[:1], strict=True) if not pools & set(pair)]
        labels = [label for label in cycle if label not in pools]
        devices = [int(makers[pair]) for pair in swaps]
        if len({*labels} - busy_labels) < len(labels) or len({*devices} - busy_devices) < len(devices):
            continue  # one of them is busy already, or comes twice
        busy_labels.update(labels)
        busy_devices.update(devices)
        for device, (dropped, taken) in zip(devices, swaps, strict=True):
            holdings.swap(np.array([device]), dropped, taken)
    return bool(busy_labels)


def _gains(
    holdings: Holdings, capacities: IntArray, stages: Sequence[IntArray], *, concentrated: bool
) -> tuple[FloatArray, IntArray]:
    """The best exchange for every two labels, (Y + 2, Y + 2), the last two being the pools.

    What it adds to the objective, and the device that makes it.
    """
    labels, holders = len(holdings.holders), holdings.holders
    best = np.full((labels + 2, labels + 2), _NEVER)
    makers = np.full((labels + 2, labels + 2), -1)
    for dropped in np.flatnonzero(holdings.held.any(axis=0)).tolist():
        rows = np.flatnonzero(holdings.held[:, dropped])
        rates, held = holdings.velocity[rows].astype(np.float64), holdings.held[rows]
        change = rates - rates[:, dropped, None]
        if concentrated:
            kept = np.where(held, rates, 0.0)
            top = kept.max(axis=1)
            kept[:, dropped] = 0.0
            spare = (capacities[rows] - held.sum(axis=1))[:, None]
            change += spare * (np.maximum(rates, kept.max(axis=1)[:, None]) - top[:, None])
        else:
            change *= (capacities[rows] / held.sum(axis=1))[:, None]
        gain = np.where(held | (rates == 0), _NEVER, change)
        winner = gain.argmax(axis=0)
        best[dropped, :labels] = gain[winner, np.arange(labels)]
        makers[dropped, :labels] = rows[winner]
    best[:labels, labels] = 0.0
    best[labels, :labels] = np.where(holders > stages[-1], 0.0, _NEVER)
    best[:labels, labels + 1] = np.where(holders < stages[-1], 0.0, _NEVER)
    best[labels + 1, :labels] = np.where(holders > stages[0], 0.0, _NEVER)
    return best, makers


def _cycles(best: FloatArray) -> Iterator[list[int]]:
    """Cycles of two, three or four labels with a positive gain, from the largest gain down."""
    through = best[:, :, None] + best[None, :, :]
    middle, twice = through.argmax(axis=1), through.max(axis=1)
    tables = (best + best.T, twice + best.T, twice + twice.T)
    floor = 1e-9 * np.abs(best[np.isfinite(best)]).max(initial=0.0)
    flat = np.concatenate([table.ravel() for table in tables])
    for position in np.argsort(-flat, kind="stable")[:_CANDIDATES]:
        if flat[position] <= floor:
            return
        kind, cell = divmod(int(position), best.size)
        first, last = divmod(cell, len(best))
        ahead = [int(middle[first, last])] if kind else []
        back = [int(middle[last, first])] if kind == 2 else []
        yield [first, *ahead, last, *back]
