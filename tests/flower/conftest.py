"""The tests of this folder need the flower extra; without it they are not collected, and pytest says so."""

from __future__ import annotations

import warnings
from importlib.util import find_spec

_MISSING = [name for name in ("flwr", "sqlalchemy", "cryptography") if find_spec(name) is None]
collect_ignore_glob = ["test_*.py"] if _MISSING else []

if not _MISSING:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Flower's own imports warn of is not ours to mend
        import flwr.clientapp
        import flwr.serverapp  # noqa: F401


def pytest_report_header() -> str:
    return f"flower tests: skipped, no {', '.join(_MISSING)}" if _MISSING else "flower tests: on"
