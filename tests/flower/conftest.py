"""The tests of this folder need the flower extra; without it they are not collected, and pytest says so."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

_MISSING = [name for name in ("flwr", "sqlalchemy", "cryptography") if find_spec(name) is None]
collect_ignore_glob = ["test_*.py"] if _MISSING else []


def pytest_report_header() -> str:
    return f"flower tests: left out, no {', '.join(_MISSING)}" if _MISSING else "flower tests: on"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints what tests measured, passed or not."""
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in report.user_properties:
            if name == "measured":
                terminalreporter.write_line(f"{report.head_line}: {value}")
