"""Components by name: what may stand in `name = "..."` of a configuration table."""

from __future__ import annotations

import dataclasses
import inspect

import fedkeep.core.policies
import fedkeep.planning
from fedkeep.core.errors import ConfigError
from fedkeep.core.names import find, load_object
from fedkeep.core.policy import POLICIES, SelectionPolicy

assert fedkeep.core.policies  # importing these is what registers their components
assert fedkeep.planning


def find_policy(name: str) -> type[SelectionPolicy]:
    """The policy of that name, or the class at `module:Class`."""
    if ":" not in name:
        return find(name, POLICIES, "policy")
    found = load_object(name)
    if not (isinstance(found, type) and issubclass(found, SelectionPolicy)):
        raise ConfigError(f"{name} is not a SelectionPolicy; see docs/add-a-policy.md")
    if inspect.isabstract(found):
        raise ConfigError(f"{name} lacks a method: {', '.join(sorted(found.__abstractmethods__))}")
    if not dataclasses.is_dataclass(found):
        raise ConfigError(f'{name} is not registered: put @policy("a-name") above the class')
    return found
