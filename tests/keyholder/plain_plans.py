"""Fleets in the clear as the key-holder sees them: velocities in the steps of a grid, and exact totals."""

from fedkeep.core.fleet import Fleet
from fedkeep.keyholder.ckks import Scheme
from fedkeep.keyholder.order import Grid, OrderedFleet


def on_the_grid(fleet: Fleet, scheme: Scheme) -> OrderedFleet:
    levels = Grid(scheme.levels).level_of(fleet.velocities)
    return OrderedFleet(fleet.devices, fleet.capacities, levels.astype(float), fleet.label_mass)
