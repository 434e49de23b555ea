"""Which versions a run was made with."""

import platform
from importlib.metadata import PackageNotFoundError, version

import fedkeep


def versions() -> dict[str, str]:
    """What the numbers of a run may depend on besides its options."""
    found = {"fedkeep": fedkeep.__version__, "python": platform.python_version(), "machine": platform.machine()}
    for package in ("numpy", "torch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
