"""Quantities by Eq. 10: with the labels of each device fixed, slots that follow the stream as nearly as they can."""

from __future__ import annotations

import numpy as np

from fedkeep.core.errors import FedkeepError, MissingExtraError
from fedkeep.core.fleet import Fleet
from fedkeep.core.quantities import Held, quantities, quota_table
from fedkeep.core.types import AnyArray, FloatArray, IntArray


@quantities("lp")
def lp(fleet: Fleet, held: Held) -> AnyArray:
    """Slots closest to each label's share of the stream and, among those, the most for fast devices (Eq. 10).

    Shares are rounded to whole slots and may be missed at a price. What is left is a network flow, whose optimal
    corner is whole, so that nothing need be rounded afterwards.
    """
    try:
        from scipy.optimize import linprog
        from scipy.sparse import csr_array
    except ImportError as error:
        raise MissingExtraError("lp quantities", "plan") from error
    rows, labels = np.nonzero(held)
    pairs, count = len(rows), fleet.labels
    rates = fleet.velocities[rows, labels].astype(np.float64)
    busy, device = np.unique(rows, return_inverse=True)
    column = np.arange(pairs)
    over_under = pairs + np.arange(2 * count)
    entry = np.concatenate([np.ones(2 * pairs), -np.ones(count), np.ones(count)])
    row = np.concatenate([device, len(busy) + labels, len(busy) + np.tile(np.arange(count), 2)])
    matrix = csr_array((entry, (row, np.concatenate([column, column, over_under]))))
    spare = fleet.capacities[busy] - held[busy].sum(axis=1)
    wanted = slot_targets(fleet.label_mass, int(fleet.capacities[busy].sum())) - held.sum(axis=0)
    miss = 2.0 * (count + 1) * rates.max(initial=1e-300)
    found = linprog(
        np.concatenate([-rates, np.full(2 * count, miss)]) / miss,
        A_eq=matrix,
        b_eq=np.concatenate([spare, wanted]),
        method="highs-ds",
    )
    if found.status != 0:
        raise FedkeepError(f"no lp quantities: {found.message}")
    quotas = quota_table(fleet)
    quotas[rows, labels] = 1 + np.rint(found.x[:pairs])
    return quotas


def slot_targets(mass: FloatArray, slots: int) -> IntArray:
    """Whole slots per label in proportion to its mass, summing to `slots`: largest remainders are rounded up."""
    exact = mass / max(mass.sum(), 1e-300) * slots
    target = np.floor(exact).astype(np.int64)
    left = int(slots - target.sum()) if mass.sum() > 0 else 0
    target[np.argsort(target - exact, kind="stable")[:left]] += 1
    return target
