"""What the workflows run is there: targets of the Makefile, supported versions, and no other."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / ".github").rglob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def commands() -> set[str]:
    """Every target that a step makes."""
    steps = [
        step.get("run", "")
        for path in (ROOT / ".github" / "workflows").glob("*.yml")
        for job in read(path)["jobs"].values()
        for step in job["steps"]
    ]
    made = (re.findall(r"\bmake ([a-z -]+)", step) for step in steps)
    return {target for found in made for words in found for target in words.split()}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_is_yaml(path: Path) -> None:
    assert isinstance(read(path), dict)


def test_steps_make_what_the_makefile_has() -> None:
    assert {"demo", "test", "check", "docs", "coverage"} <= commands() <= TARGETS


def test_tests_run_on_every_version_that_is_promised() -> None:
    promised = [
        name.rpartition(" ")[2]
        for name in PROJECT["classifiers"]
        if re.fullmatch(r"Programming Language :: Python :: 3\.\d+", name)
    ]
    matrix = read(ROOT / ".github" / "workflows" / "tests.yml")["jobs"]["test"]["strategy"]
    assert matrix["matrix"]["python"] == promised == ["3.11", "3.12", "3.13"]
    assert PROJECT["requires-python"] == f">={promised[0]}"


def test_hooks_run_what_check_runs() -> None:
    (repository,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert {"ruff-format", "ruff", "lint-imports", "mypy"} <= {
        hook["id"] for hook in repository["hooks"]
    }
