"""These tests need the flower extra; without it they are not collected, and pytest reports it."""

from importlib.util import find_spec

_MISSING = [name for name in ("flwr", "sqlalchemy", "cryptography") if find_spec(name) is None]
collect_ignore_glob = ["test_*.py"] if _MISSING else []


def pytest_report_header() -> str:
    return f"flower tests: left out, no {', '.join(_MISSING)}" if _MISSING else "flower tests: on"
