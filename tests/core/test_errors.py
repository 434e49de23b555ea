"""Every reason of a rejection has one name, and every exception a user can cause one root."""

import ast
import inspect
from pathlib import Path

import pytest

import fedkeep
from fedkeep.core import errors
from fedkeep.core.errors import FedkeepError, RejectedError, RejectionReason

SOURCE = Path(fedkeep.__file__).parent
PAGE = SOURCE.parents[1] / "docs" / "design.md"
_REASON_AT = {"RejectedError": 0, "Failed": 0, "Rejection": 1, "Declined": 1}
"""Where the reason stands among the arguments."""


def written_reasons() -> set[str]:
    """The reasons that any call in the package writes out."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            place = _REASON_AT.get(name, len(node.args))
            argument = node.args[place] if place < len(node.args) else None
            if isinstance(argument, ast.Constant):
                found.add(str(argument.value))
    return found


def test_every_reason_that_the_code_writes_is_a_member() -> None:
    assert len(written_reasons()) > 20
    assert written_reasons() <= {reason.value for reason in RejectionReason}


def test_a_reason_is_its_word_wherever_it_is_written() -> None:
    error = RejectedError(RejectionReason.LARGE_UPDATE, "too long")
    assert str(error) == "large-update: too long"
    assert error.reason == "large-update"
    assert f"{RejectionReason.STALE_SERVER}" == "stale server"


@pytest.mark.parametrize("word", ["model", "velocity", "estimator", "direction"])
def test_every_array_that_is_screened_has_its_reasons(word: str) -> None:
    known = {reason.value for reason in RejectionReason}
    assert {f"{word}-shape", f"{word}-not-finite"} <= known


def test_the_tree_of_exceptions_is_documented() -> None:
    classes = [
        found
        for _, found in inspect.getmembers(errors, inspect.isclass)
        if issubclass(found, Exception)
    ]
    assert all(issubclass(found, FedkeepError) for found in classes)
    page = PAGE.read_text(encoding="utf-8")
    for found in classes:
        assert f"`{found.__name__}`" in page
        assert found.__doc__
