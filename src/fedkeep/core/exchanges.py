"""Local search on a plan's labels: devices exchange labels in short cycles while the objective (9a) grows.

An exchange "a -> b" lets one device drop label a and take b, so that a loses a holder and b gains one. Round a
cycle of labels nobody loses. A cycle may also pass through one of two pools, at which a label ends up with a holder
more and the next with one less: either that one has more than wanted, or it is no more short than the first was.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fedkeep.core.holdings import Holdings
from fedkeep.core.types import FloatArray, IntArray

_NEVER = -np.inf
_CANDIDATES = 512
"""Cycles looked at per step; most often the first ones are taken."""


@dataclass(frozen=True, eq=False)
class Gains:
    """The best exchange for every two labels: what it adds to the objective, and the device that makes it."""

    best: FloatArray
    """(Y + 2, Y + 2); the last two are the pools."""
    device: IntArray


def improve(holdings: Holdings, capacities: IntArray, stages: Sequence[IntArray], *, concentrated: bool) -> None:
    """Makes exchanges until none of the cycles tried adds to the objective.

    No label comes to have fewer holders than the first of the `stages` asks for, nor do all together come to lack
    more of what the last one asks for. `concentrated` says that all slots but one per label go to a device's fastest
    label; else they are split evenly.
    """
    while _step(holdings, _gains(holdings, capacities, stages, concentrated=concentrated)):
        pass


def _step(holdings: Holdings, gains: Gains) -> bool:
    """Makes the best cycles that share neither labels nor devices, so that gains add up; says if there were any."""
    pools = {len(gains.best) - 2, len(gains.best) - 1}
    busy_labels: set[int] = set()
    busy_devices: set[int] = set()
    for cycle in _cycles(gains.best):
        swaps = [pair for pair in zip(cycle, cycle[1:] + cycle[:1], strict=True) if not pools & set(pair)]
        labels = [label for label in cycle if label not in pools]
        devices = [int(gains.device[pair]) for pair in swaps]
        if _overlap(labels, busy_labels) or _overlap(devices, busy_devices):
            continue
        busy_labels.update(labels)
        busy_devices.update(devices)
        for device, (dropped, taken) in zip(devices, swaps, strict=True):
            holdings.swap(np.array([device]), dropped, taken)
    return bool(busy_labels)


def _overlap(members: list[int], busy: set[int]) -> bool:
    """Whether a member is busy already or comes twice."""
    return len(set(members) - busy) < len(members)


def _gains(holdings: Holdings, capacities: IntArray, stages: Sequence[IntArray], *, concentrated: bool) -> Gains:
    labels = len(holdings.holders)
    best = np.full((labels + 2, labels + 2), _NEVER)
    device = np.full((labels + 2, labels + 2), -1)
    for dropped in range(labels):
        rows = np.flatnonzero(holdings.held[:, dropped])
        if not len(rows):
            continue
        gain = _exchange_gains(holdings, rows, dropped, capacities[rows], concentrated=concentrated)
        winner = gain.argmax(axis=0)
        best[dropped, :labels] = gain[winner, np.arange(labels)]
        device[dropped, :labels] = rows[winner]
    best[:labels, labels] = 0.0
    best[labels, :labels] = np.where(holdings.holders > stages[-1], 0.0, _NEVER)
    best[:labels, labels + 1] = np.where(holdings.holders < stages[-1], 0.0, _NEVER)
    best[labels + 1, :labels] = np.where(holdings.holders > stages[0], 0.0, _NEVER)
    return Gains(best, device)


def _exchange_gains(
    holdings: Holdings, rows: IntArray, dropped: int, capacities: IntArray, *, concentrated: bool
) -> FloatArray:
    """What each device of `rows` adds to the objective by taking each label for `dropped`, (rows, Y)."""
    rates = holdings.velocity[rows].astype(np.float64)
    held = holdings.held[rows]
    labels = held.sum(axis=1)
    change = rates - rates[:, dropped, None]
    if concentrated:
        kept = np.where(held, rates, 0.0)
        top = kept.max(axis=1)
        kept[:, dropped] = 0.0
        change += (capacities - labels)[:, None] * (np.maximum(rates, kept.max(axis=1)[:, None]) - top[:, None])
    else:
        change *= (capacities / labels)[:, None]
    return np.where(held | (rates == 0), _NEVER, change)


def _cycles(best: FloatArray) -> Iterator[list[int]]:
    """Cycles of two, three or four labels with a positive gain, from the largest gain down."""
    through = best[:, :, None] + best[None, :, :]
    middle = through.argmax(axis=1)
    twice = through.max(axis=1)
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
