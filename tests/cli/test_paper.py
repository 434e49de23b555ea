"""`fedkeep paper`: the paper's experiments by name, and what it says where something is missing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedkeep.config.experiment import expand, read_experiment
from fedkeep.config.shipped import EXPERIMENTS, paper_row, tasks_of

SMALL = ("train.rounds=3", "task.devices=12", "task.smallest=60", "task.largest=80")


def paper(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fedkeep", "paper", *arguments]
    around = {**os.environ, **environment}
    return subprocess.run(
        command, cwd=cwd, env=around, capture_output=True, text=True, timeout=300, check=False
    )


def test_it_lists_every_experiment_with_its_tasks(tmp_path: Path) -> None:
    done = paper(cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in EXPERIMENTS:
        assert f"{name}: " in done.stdout
    assert "ic, st" in done.stdout.replace("ic-grey, ", "").replace("st-all-labels, ", "")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_file_of_the_package_resolves(name: str) -> None:
    for path in tasks_of(name).values():
        assert expand(read_experiment(path))


def test_a_row_runs_and_stands_beside_the_papers(tmp_path: Path) -> None:
    settings = [word for setting in SMALL for word in ("--set", setting)]
    chosen = ["--method", "fifo", "--method", "ode-est", "--seed", "0", "--jobs", "1"]
    done = paper("table2", "--task", "st", *chosen, *settings, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "runs/table2/st").glob("*seed0.jsonl"))) == 2
    assert "ode-exact       87.12  9.52x" in done.stdout


def test_the_papers_row_is_that_of_the_task_whatever_its_form() -> None:
    assert paper_row("har-overlapping") == paper_row("har")
    assert paper_row("har")["high-loss"].speedup is None
    assert paper_row("other") == {}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["tabel2"], "did you mean 'table2'?"),
        (["table2"], "say on which task with --task: har"),
        (["table2", "--task", "icc"], "did you mean 'ic'?"),
        (["table2", "--task", "st", "--method", "ode-ets"], "did you mean 'ode-est'?"),
        (
            ["table2", "--task", "st", "--method", "fifo", "--seed", "9"],
            "has no seed 9: it has 0, 1, 2, 3, 4",
        ),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], says: str, tmp_path: Path) -> None:
    done = paper(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_missing_data_is_one_sentence_that_says_what_to_fetch(tmp_path: Path) -> None:
    nowhere = {"FEDKEEP_DATA": str(tmp_path / "none"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    nowhere |= {"https_proxy": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"}
    done = paper("table2", "--task", "ic", "--seed", "0", cwd=tmp_path, **nowhere)
    assert done.returncode == 2
    (sentence,) = done.stderr.strip().splitlines()
    assert "zalandoresearch/fashion-mnist" in sentence
    assert f"put it at {tmp_path}/cache/fedkeep/fashion-mnist/train-images" in sentence
    harbox = ["--set", "task.dataset=harbox"]
    done = paper("table2", "--task", "har", *harbox, cwd=tmp_path, **nowhere)
    assert done.returncode == 2
    assert "download large_scale_HARBox.zip by the link" in done.stderr
