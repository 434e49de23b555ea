"""What a device's releases tell an outsider who sees aggregates only and cannot tell who took part: less by sampling.

The server draws the participants, so against the server nothing is amplified, and no ledger counts on this.
"""

import dp_accounting as accounting
from dp_accounting import pld, rdp


def amplified_epsilon(
    multiplier: float,
    rounds: int,
    delta: float,
    *,
    participants: int,
    population: int,
    poisson: bool,
) -> float:
    """The device-level epsilon over `rounds` rounds, with so many participants of the population in each.

    `poisson`: each device flips its own coin (add or remove a device); otherwise a fixed number is drawn (replace one).
    """
    release = accounting.GaussianDpEvent(multiplier)
    if poisson:
        accountant = pld.PLDAccountant()
        event = accounting.PoissonSampledDpEvent(participants / population, release)
    else:
        accountant = rdp.RdpAccountant(
            neighboring_relation=accounting.NeighboringRelation.REPLACE_ONE
        )
        event = accounting.SampledWithoutReplacementDpEvent(population, participants, release)
    return float(accountant.compose(event, rounds).get_epsilon(delta))
