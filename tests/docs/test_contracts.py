"""The contracts of imports leave no room out."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
    "contracts"
]
HOMES = {
    "torch": {"learn"},
    "flwr": {"flower"},
    "scipy": {"solvers"},
    "tenseal": {"keyholder"},
}


def rooms() -> set[str]:
    """The packages and modules that stand directly in fedkeep."""
    found = {path.parent.name for path in (ROOT / "src" / "fedkeep").glob("*/__init__.py")}
    return found | {path.stem for path in (ROOT / "src" / "fedkeep").glob("[a-z]*.py")}


@pytest.mark.parametrize("library", HOMES)
def test_a_library_with_a_home_is_forbidden_everywhere_else(library: str) -> None:
    named = [
        c["source_modules"]
        for c in CONTRACTS
        if library in c.get("forbidden_modules", ()) and len(c["source_modules"]) > 1
    ]
    assert [{name.removeprefix("fedkeep.") for name in names} for names in named] == [
        rooms() - HOMES[library]
    ]


def test_every_room_has_its_layer() -> None:
    layers = next(contract["layers"] for contract in CONTRACTS if contract["type"] == "layers")
    named = [name.strip().removeprefix("fedkeep.") for layer in layers for name in layer.split("|")]
    assert sorted(named) == sorted(rooms())
