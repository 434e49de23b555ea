"""The bare wheel, in an environment of its own without any extra, answers."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    around = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    words = [str(word) for word in command]
    return subprocess.run(
        words, capture_output=True, text=True, cwd=cwd, env=around, timeout=600, check=False
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of a fresh environment with the wheel in it."""
    folder = tmp_path_factory.mktemp("wheel")
    built = run(
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        folder,
        ROOT,
        cwd=folder,
    )
    assert built.returncode == 0, built.stderr
    venv.create(folder / "env", with_pip=True)
    programs = folder / "env" / "bin"
    done = run(programs / "pip", "install", "--quiet", *folder.glob("*.whl"), cwd=folder)
    if "No matching distribution" in done.stderr and "connection" in done.stderr.lower():
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr
    return programs


def test_the_bare_install_answers(installed: Path, tmp_path: Path) -> None:
    for arguments, says in (
        (["--help"], "Commands:"),
        (["list"], "reservoir"),
        (["check", "fifo"], "ok       chunking"),
    ):
        done = run(installed / "fedkeep", *arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert says in done.stdout


def test_the_wheel_brings_the_page_and_the_types(installed: Path, tmp_path: Path) -> None:
    code = (
        "import fedkeep, pathlib as p; r = p.Path(fedkeep.__file__).parent; "
        "print(*(f.name for f in r.rglob('*')))"
    )
    names = run(installed / "python", "-c", code, cwd=tmp_path).stdout.split()
    assert {"py.typed", "skeleton.html"} <= set(names)


def test_the_papers_experiments_run_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    small = ("train.rounds=2", "task.devices=12", "task.smallest=60", "task.largest=80")
    done = run(
        *(installed / "fedkeep", "paper", "table2", "--task", "st", "--seed", "0", "--jobs", "1"),
        *(word for setting in small for word in ("--set", setting)),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "ode-est" in done.stdout
    assert "The paper's row" in done.stdout
    for name in ("ablation", "simplified", "motivation", "authors"):
        listed = run(installed / "fedkeep", "paper", cwd=tmp_path).stdout
        assert f"{name}: " in listed


def test_the_exact_plan_names_its_extra(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "exact.toml").write_text(
        'task = { name = "demo" }\npolicy = { name = "ode" }\ncoordinator = { name = "exact" }\n'
    )
    done = run(installed / "fedkeep", "run", "exact.toml", cwd=tmp_path)
    assert done.returncode == 2
    assert "fedkeep[plan]" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_extra_is_named(installed: Path, tmp_path: Path) -> None:
    done = run(installed / "fedkeep", "watch", tmp_path, cwd=tmp_path)
    assert done.returncode == 2
    assert "fedkeep[web]" in done.stderr
    assert "Traceback" not in done.stderr
