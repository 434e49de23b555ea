"""Online data selection for federated learning with limited storage.

The names below are the whole public interface; each is imported when it is first used, so that
`import fedkeep` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedkeep.advice import advise
    from fedkeep.api import compare, load_records, simulate
    from fedkeep.config.experiment import Experiment
    from fedkeep.core import errors
    from fedkeep.core.device import Device
    from fedkeep.core.policy import SelectionPolicy
    from fedkeep.core.server import Server
    from fedkeep.flower import Keeper, KeeperStrategy
    from fedkeep.sim.engine import Simulator

__version__ = "0.1.0"

__all__ = [
    "Device",
    "Experiment",
    "Keeper",
    "KeeperStrategy",
    "SelectionPolicy",
    "Server",
    "Simulator",
    "advise",
    "compare",
    "errors",
    "load_records",
    "simulate",
]

_MODULES = {
    "Device": "fedkeep.core.device",
    "Experiment": "fedkeep.config.experiment",
    "Keeper": "fedkeep.flower",
    "KeeperStrategy": "fedkeep.flower",
    "SelectionPolicy": "fedkeep.core.policy",
    "Server": "fedkeep.core.server",
    "Simulator": "fedkeep.sim.engine",
    "advise": "fedkeep.advice",
    "compare": "fedkeep.api",
    "load_records": "fedkeep.api",
    "simulate": "fedkeep.api",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("fedkeep.core.errors")
    if name not in _MODULES:
        raise AttributeError(f"module 'fedkeep' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
