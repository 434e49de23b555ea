"""fedkeep on Flower: the only package that knows `flwr`.

For existing apps: `Keeper` in the ClientApp, `KeeperStrategy` around the strategy. For fedkeep's
own server and devices: `FedkeepStrategy` and `make_client_app`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedkeep.flower.client_app import make_client_app
    from fedkeep.flower.keeper import Keeper
    from fedkeep.flower.keeper_strategy import KeeperStrategy
    from fedkeep.flower.strategy import FedkeepStrategy

__all__ = ["FedkeepStrategy", "Keeper", "KeeperStrategy", "make_client_app"]

_HOMES = {
    "FedkeepStrategy": "strategy",
    "Keeper": "keeper",
    "KeeperStrategy": "keeper_strategy",
    "make_client_app": "client_app",
}


def __getattr__(name: str) -> Any:
    """Load a name when it is first asked for: a ClientApp starts anew for every message."""
    from importlib import import_module

    from fedkeep.core.errors import MissingExtraError

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"fedkeep.flower.{_HOMES[name]}"), name)
    except ModuleNotFoundError as missing:
        if missing.name in ("flwr", "sqlalchemy"):
            raise MissingExtraError("fedkeep.flower", "flower") from missing
        raise
