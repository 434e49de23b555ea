"""What all tests share: the figures that they measure are shown."""

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints what tests measured, passed or not."""
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in report.user_properties:
            if name == "measured":
                terminalreporter.write_line(f"{report.head_line}: {value}")
