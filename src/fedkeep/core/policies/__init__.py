"""The built-in policies, one file each; importing this package registers them."""

from fedkeep.core.policies import (
    central,
    draw,
    fedbalancer,
    fifo,
    full_data,
    gradient_norm,
    high_loss,
    ode,
    reservoir,
    sld,
)

__all__ = [
    "central",
    "draw",
    "fedbalancer",
    "fifo",
    "full_data",
    "gradient_norm",
    "high_loss",
    "ode",
    "reservoir",
    "sld",
]
