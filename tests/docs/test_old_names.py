"""Former names are gone from the package, and no line of it is over 100 characters."""

import ast
import re
from pathlib import Path

import pytest


def words(text: str) -> set[str]:
    return set(text.split())


SRC = Path(__file__).parents[2] / "src" / "fedkeep"
FORMER_CLASSES = words(
    """
    Usual Claims Making Mixture Mending Holding Holdings Window Shares Prepared Job Fate Kept View
    Rival Ground Cell Probe Measurements Door Guard Guards Ledger SumBook SumMember SumTerms Vitals
    Asked Voice Frugality Intake Magnitudes Note ModelDate Look Forge Programme Keeping Refusal
    Outer Placed Link Weighing
    """
)
FORMER_FUNCTIONS = words(
    """
    tame founded most_claimed heaviest_of three_spreads_above composition pull bounded reduced_to
    slope_to lasting mend stretches lay_ground unlearn take_in follow draft install adopt complete
    descend naming needing writing beside put_under take_under fair bends direction uses_direction
    """
)
FORMER_ATTRIBUTES = words(
    """
    displaced floors fates bends fair uses_direction likeness worth trust reach guards rival
    """
)
FORMER_MODULES = words(
    """
    usual making judging rivals chain keys names opening running intake trickle lies door sum_book
    estimators coordination
    """
)
DATA = {
    "Reason": {"displaced"},
    "RefusedRecord": {"displaced"},
    "Decision": {"displaced"},
    "Decided": {"displaced"},
    "SampleMetadata": {"displaced"},
    "GistStatus": {"trust", "likeness", "worth", "reach"},
    "Change": {"displaced"},
    "KeeperStatus": {"fates"},
    "GistLine": {"trust", "likeness", "worth", "reach"},
}
"""Fields of messages and of record lines, whose names are data."""


def definitions() -> list[tuple[str, str]]:
    """Every class and function of the package, with its file."""
    return [
        (node.name, path.relative_to(SRC).as_posix())
        for path in sorted(SRC.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    ]


def test_no_class_or_function_has_a_former_name() -> None:
    former = {*FORMER_CLASSES, *FORMER_FUNCTIONS}
    assert [(name, path) for name, path in definitions() if name in former] == []


def test_no_module_has_a_former_name() -> None:
    assert sorted(path.stem for path in SRC.rglob("*.py") if path.stem in FORMER_MODULES) == []


def test_no_field_has_a_former_name_unless_it_is_data() -> None:
    found = [
        (owner.name, field.target.id, path.name)
        for path in SRC.rglob("*.py")
        for owner in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(owner, ast.ClassDef)
        for field in owner.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if field.target.id in FORMER_ATTRIBUTES
        if field.target.id not in DATA.get(owner.name, set())
    ]
    assert found == []


PRAGMA = re.compile(r"  # (noqa|type: ignore).*")


@pytest.mark.parametrize("folder", sorted(p.name for p in SRC.iterdir() if p.is_dir()))
def test_no_line_is_over_a_hundred_characters(folder: str) -> None:
    long = [
        f"{path.relative_to(SRC)}:{number}"
        for path in (SRC / folder).rglob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(PRAGMA.sub("", line)) > 100
    ]
    assert long == []
