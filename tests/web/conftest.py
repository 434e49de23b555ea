"""Fake runs for the tests of the page."""

import runpy
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def fleet() -> dict[str, Any]:
    """The names in fleet.py, which tests in other folders use too."""
    return runpy.run_path(str(Path(__file__).with_name("fleet.py")))
