"""Quantities by Eq. 10: with the labels of each device fixed, slots that follow the stream as nearly as they can."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedkeep.core.errors import FedkeepError
from fedkeep.core.fleet import Fleet
from fedkeep.core.quantities import Held, quantities, quota_table
from fedkeep.core.types import AnyArray, FloatArray, IntArray
from fedkeep.planning.extras import load


@quantities("lp")
def lp(fleet: Fleet, held: Held) -> AnyArray:
    """Slots closest to each label's share of the stream and, among those, the most for fast devices (Eq. 10).

    Shares are rounded to whole slots and may be missed at a price. What is left is a network flow, whose optimal
    corner is whole, so that nothing need be rounded afterwards.
    """
    quotas = quota_table(fleet)
    rows, labels = np.nonzero(held)
    if not len(rows):
        return quotas
    rates = fleet.velocities[rows, labels].astype(np.float64)
    miss = 2.0 * (fleet.labels + 1) * rates.max()
    found = load("scipy.optimize", "lp quantities").linprog(
        np.concatenate([-rates, np.full(2 * fleet.labels, miss)]) / miss,
        A_eq=_flows(held),
        b_eq=_supplies(fleet, held),
        method="highs-ds",
    )
    if found.status != 0:
        raise FedkeepError(f"no lp quantities: {found.message}")
    quotas[rows, labels] = 1 + np.rint(found.x[: len(rows)])
    return quotas


def _flows(held: Held) -> Any:
    """Rows: devices that hold something, then labels. Columns: pairs held, then slots over and under per label."""
    rows, labels = np.nonzero(held)
    busy, device = np.unique(rows, return_inverse=True)
    pair, label = np.arange(len(rows)), np.arange(held.shape[1])
    row = np.concatenate([device, len(busy) + labels, len(busy) + np.tile(label, 2)])
    column = np.concatenate([pair, pair, len(rows) + np.arange(2 * len(label))])
    entry = np.concatenate([np.ones(2 * len(pair)), -np.ones(len(label)), np.ones(len(label))])
    return load("scipy.sparse", "lp quantities").csr_array((entry, (row, column)))


def _supplies(fleet: Fleet, held: Held) -> FloatArray:
    """The slots left to each device and wanted for each label, once every pair held has its first one."""
    busy = held.any(axis=1)
    spare = fleet.capacities[busy] - held[busy].sum(axis=1)
    wanted = slot_targets(fleet.label_mass, int(fleet.capacities[busy].sum())) - held.sum(axis=0)
    return np.concatenate([spare, wanted]).astype(np.float64)


def slot_targets(mass: FloatArray, slots: int) -> IntArray:
    """Whole slots per label in proportion to its mass, summing to `slots`: the largest remainders are rounded up."""
    exact = mass / mass.sum() * slots
    target: IntArray = np.floor(exact).astype(np.int64)
    target[np.argsort(target - exact, kind="stable")[: int(slots - target.sum())]] += 1
    return target
