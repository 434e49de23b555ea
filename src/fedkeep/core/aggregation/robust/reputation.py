"""Stage 4: devices that are new, or hardly agree with the fleet, count less."""

from collections.abc import Sequence

import numpy as np

from fedkeep.core.aggregation.robust.filter import (
    AGREEMENT_DECAY,
    CONFLICT_DEVIATIONS,
    lower_bound,
)
from fedkeep.core.aggregation.robust.statistics import UpdateStatistics
from fedkeep.core.outliers import MIN_OBSERVATIONS, median
from fedkeep.core.types import DeviceId, FloatArray

_KNOWN_MASS = 1 - AGREEMENT_DECAY**MIN_OBSERVATIONS
"""The mass of an agreement over `MIN_OBSERVATIONS` reports: its device is known from there on."""


def reputation_weights(devices: Sequence[DeviceId], statistics: UpdateStatistics) -> FloatArray:
    """Return what each device counts, from 0 to 1, by its reports so far.

    A newcomer to a fleet of known devices counts in full from its fifth report on. A device that
    agrees with the reference, but stands out by how little, counts by the square of its share of
    the least usual agreement.

    Parameters
    ----------
    devices : Sequence[DeviceId]
        Whose reports are merged.
    statistics : UpdateStatistics
        With their agreement, this round's included.

    Returns
    -------
    FloatArray
        A factor a device, (n,).
    """
    known = statistics.agreement
    settled = median([agreement.mass for agreement in known.values()]) >= _KNOWN_MASS
    factors = np.array(
        [min(1.0, known[device].mass / _KNOWN_MASS) if settled else 1.0 for device in devices]
    )
    if len(known) < MIN_OBSERVATIONS:
        return factors
    least = lower_bound((a.mean for a in known.values()), CONFLICT_DEVIATIONS)
    if least > 0:
        shares = np.clip([known[device].mean / least for device in devices], 0.0, 1.0)
        factors *= shares**2
    return factors
