"""One name, one method: tables call what suites compare by the registered names."""

import dataclasses
from pathlib import Path

import pytest
from lab.names import METHODS, is_named, method_name, named_tasks, papers_task, stream_name
from lab.suite import read_suite

from fedkeep.config.experiment import expand
from fedkeep.config.methods import METHODS as REGISTERED
from fedkeep.tables import read_toml

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
SUITES = sorted((EXPERIMENTS / "suites").glob("*.toml"))
DESCRIBED = read_toml(EXPERIMENTS / "methods" / "arena.toml")["methods"]


@pytest.mark.parametrize("path", SUITES, ids=lambda path: str(path.stem))
def test_every_method_and_stream_of_a_suite_has_a_name_in_tables(path: Path) -> None:
    suite = read_suite(path)
    methods = {method for stage in suite.stages for method in stage.methods}
    assert [method for method in methods if not is_named(method)] == []
    tasks = {task for stage in suite.stages for task in stage.tasks}
    known = {task for task, _ in named_tasks()}
    assert [t for t in tasks if t not in known and papers_task(t) == t] == []


def test_no_two_methods_or_streams_share_a_name() -> None:
    methods = [method_name(name) for name in DESCRIBED]
    assert sorted(methods) == sorted(set(methods))
    streams = [name for task, name in named_tasks() if task not in ("engines", "demo")]
    assert sorted(streams) == sorted(set(streams))


@pytest.mark.parametrize(
    "name", ["class-balanced-fifo", "draw", "ode-default", "fifo", "full-data"]
)
def test_a_registered_name_in_a_table_is_the_registered_method(name: str) -> None:
    tables = {"described": DESCRIBED[name], "registered": REGISTERED[method_name(name)].table}
    cells = expand({"task": {"name": "demo"}, "methods": tables})
    described, registered = (dataclasses.replace(cell.experiment, label="") for cell in cells)
    assert described == registered


def test_tables_have_no_name_of_the_files_of_results() -> None:
    text = (EXPERIMENTS / "RESULTS.md").read_text(encoding="utf-8")
    opening = text[: text.index("## The paper's claims")]
    cells = {cell.strip() for line in opening.splitlines() for cell in line.split("|")}
    assert cells & METHODS.keys() == set()
    assert cells & {task for task, name in named_tasks() if name != task} == set()
    assert stream_name("har-ordered") in cells
