"""User-defined components: `module:name` and `path/to/file.py:name` in a configuration."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from fedkeep.core.errors import ConfigError
from fedkeep.core.registry import Registry, did_you_mean, find

Thing = TypeVar("Thing")


def find_component(known: Registry[Thing], name: str) -> Thing:
    """Return the member of that name, or the user-defined class at `module:Class`.

    >>> from fedkeep.core.policies.fifo import Fifo
    >>> from fedkeep.core.policy import POLICIES
    >>> find_component(POLICIES, "fifo") is Fifo
    True
    >>> find_component(POLICIES, "fedkeep.core.policies.fifo:Fifo") is Fifo
    True
    """
    return known.admit(name, load_object(name)) if ":" in name else find(name, known, known.kind)


def load_object(path: str) -> Any:
    """Load what stands at `module:name` or `path/to/file.py:name`.

    Modules are looked for in the working directory, too.

    >>> load_object("math:hypot")(3, 4)
    5.0
    """
    module, _, name = path.rpartition(":")
    if not module or not name:
        raise ConfigError(f"'{path}' is not of the form module:name or path/to/file.py:name")
    if module.endswith(".py") and not Path(module).is_file():
        raise ConfigError(f"there is no file {module} (of '{path}')")
    try:
        file = Path(module).resolve() if module.endswith(".py") else None
        for folder in (Path.cwd(), file.parent if file else Path.cwd()):
            if str(folder) not in sys.path:
                sys.path.append(str(folder))
        loaded = _load_file(file) if file else importlib.import_module(module)
    except SyntaxError as error:
        raise ConfigError(
            f"cannot import '{module}': {error.msg} in line {error.lineno}"
        ) from error
    # Whatever the module does when it is run.
    except (Exception, SystemExit) as error:
        why = "it ends the process when imported" if isinstance(error, SystemExit) else error
        raise ConfigError(f"cannot import '{module}' (of '{path}'): {why}") from error
    if not hasattr(loaded, name):
        public = [n for n in vars(loaded) if not n.startswith("_")]
        raise ConfigError(f"'{module}' has no '{name}': {did_you_mean(name, public)}")
    return getattr(loaded, name)


def _load_file(file: Path) -> ModuleType:
    """Load a file as a module named by its whole path: equal names elsewhere cannot collide."""
    if str(file) not in sys.modules:
        spec = importlib.util.spec_from_file_location(str(file), file)
        assert spec is not None and spec.loader is not None  # noqa: PT018 - its name ends in .py
        module = sys.modules[str(file)] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[str(file)]
            raise
    return sys.modules[str(file)]
