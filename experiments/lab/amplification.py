"""What a device's releases reveal to an outsider who sees only aggregates: less by sampling.

The server draws the participants, so nothing is amplified against the server, and no ledger counts
on this.
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
    """The device-level epsilon over `rounds` rounds, with so many participants a round.

    `poisson`: each device takes part at random by itself (add or remove a device). Otherwise a
    fixed number of devices is drawn (replace one).
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
