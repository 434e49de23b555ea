"""The libraries of the `plan` extra, loaded when first needed: scipy alone takes some 50 MB."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fedkeep.core.errors import MissingExtraError


def load(module: str, feature: str) -> Any:
    """The module, or a kind word on what to install for the feature."""
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtraError(feature, "plan") from error
