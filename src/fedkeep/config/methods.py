"""Methods by name: one name stands for one method, wherever a method can be named.

The demo, `fedkeep advise`, `fedkeep.compare`, experiments (`methods = ["fifo", "ode"]`) and the
documentation take their methods from here.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from fedkeep.config.presets import BALANCED_FIFO
from fedkeep.core.registry import find
from fedkeep.tables import Table, merged


@dataclass(frozen=True)
class NamedMethod:
    """A method: what it does, and the tables of an experiment that configure it."""

    summary: str
    table: Table


_RESERVOIR = {"name": "balanced-reservoir"}

METHODS: dict[str, NamedMethod] = {
    "fifo": NamedMethod(
        "First in, first out: a device keeps its newest samples.",
        {"policy": {"name": "fifo"}},
    ),
    "reservoir": NamedMethod(
        "Reservoir sampling: a uniform sample of all arrivals.",
        {"policy": {"name": "reservoir"}},
    ),
    "balanced-fifo": NamedMethod(
        "Class-balanced FIFO: the newest samples of each label, in fixed slots per label that the "
        "coordinator plans.",
        BALANCED_FIFO,
    ),
    "balanced-reservoir": NamedMethod(
        "Class-balanced reservoir sampling of what arrived since the last participation.",
        {"policy": _RESERVOIR, "gist": {"mode": "none"}},
    ),
    "gist-local": NamedMethod(
        "The balanced reservoir and a control variate with memory (gist) that stays on the device.",
        {"policy": _RESERVOIR, "gist": {"mode": "local"}},
    ),
    "gist-shared": NamedMethod(
        "The balanced reservoir and a gist that is averaged over the fleet: the default.",
        {"policy": _RESERVOIR, "gist": {"mode": "shared"}},
    ),
    "ode": NamedMethod(
        "ODE's score and coordination with the options that serve it best (preset default).",
        {"policy": {"name": "ode"}},
    ),
    "ode-paper": NamedMethod(
        "ODE as the paper describes it (preset paper).",
        {"preset": "paper", "policy": {"name": "ode"}},
    ),
    "high-loss": NamedMethod(
        "The samples with the highest loss.",
        {"policy": {"name": "high-loss"}},
    ),
    "gradient-norm": NamedMethod(
        "The samples with the longest gradients.",
        {"policy": {"name": "gradient-norm"}},
    ),
    "fedbalancer": NamedMethod(
        "FedBalancer: the highest losses, without those above the 90th percentile.",
        {"policy": {"name": "fedbalancer"}},
    ),
    "sld": NamedMethod(
        "Sample-level data selection (SLD): the longest gradients up to the median.",
        {"policy": {"name": "sld"}},
    ),
    "full-data": NamedMethod(
        "Unlimited storage: a device trains on all its samples.",
        {"policy": {"name": "full-data"}},
    ),
}
"""From the simplest to the most elaborate, in groups; unlimited storage last."""
DEFAULT_METHOD = "gist-shared"
"""The method of a configuration that sets nothing; `default` is another name for it."""


def method_table(name: str) -> Table:
    """Return the tables of a registered method.

    Raises
    ------
    ConfigError
        If no method has that name; the nearest name is suggested.

    Examples
    --------
    >>> method_table("fifo")
    {'policy': {'name': 'fifo'}}
    >>> method_table("balanced-fifi")
    Traceback (most recent call last):
    fedkeep.core.errors.ConfigError: unknown method 'balanced-fifi': did you mean 'balanced-fifo'?
    """
    known = {**METHODS, "default": METHODS[DEFAULT_METHOD]}
    return merged(find(name, known, "method").table, {})


def method_tables(names: Iterable[str]) -> dict[str, Table]:
    """Return the tables of several registered methods by their names, in the given order."""
    return {name: method_table(name) for name in names}
