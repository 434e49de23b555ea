"""How the command line behaves: one-screen help, quiet pipes, no colour, one-sentence errors."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import fedkeep

EXPERIMENT = (
    'task = { name = "demo", devices = 5 }\npolicy = { name = "ode" }\n'
    "train = { rounds = 4, participation = 0.5 }\n"
)


def run(
    *arguments: str, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    source = Path(fedkeep.__file__).parents[1]
    around = {**os.environ, "PYTHONPATH": str(source), "COLUMNS": "80", **environment}
    command = [sys.executable, "-m", "fedkeep", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=around, cwd=cwd, timeout=300, check=False
    )


def test_help_fits_a_screen_and_no_sentence_is_cut() -> None:
    lines = run("--help").stdout.splitlines()
    assert len(lines) <= 28
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line.endswith("...")] == [lines[0]]


def test_help_of_a_verb_is_plain_text() -> None:
    shown = run("run", "--help").stdout
    assert "An experiment (TOML)" in shown
    assert "\\[" not in shown


def test_the_version() -> None:
    assert run("--version").stdout == f"{fedkeep.__version__}\n"


def test_no_arguments_show_the_help() -> None:
    assert "Commands:" in (shown := run()).stdout + shown.stderr


@pytest.mark.parametrize(
    ("words", "at", "offered"),
    [("fedkeep re", "1", "report"), ("fedkeep report --ma", "2", "--markdown")],
)
def test_the_shell_completes(words: str, at: str, offered: str) -> None:
    asked = {"_FEDKEEP_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": at}
    code = "import sys; sys.argv = ['fedkeep']; from fedkeep.cli import main; main()"
    around = {**os.environ, "PYTHONPATH": str(Path(fedkeep.__file__).parents[1]), **asked}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=around,
        timeout=300,
        check=False,
    )
    assert offered in done.stdout.split()


def test_a_pipe_gets_the_result_alone(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(EXPERIMENT)
    done = run("run", "tiny.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "final accuracy" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(
    not Path("/usr/bin/script").exists(), reason="no `script` to make a terminal with"
)
def test_no_color_is_respected(tmp_path: Path) -> None:
    source = Path(fedkeep.__file__).parents[1]
    around = {**os.environ, "PYTHONPATH": str(source), "TERM": "xterm-256color"}
    around.pop("NO_COLOR", None)
    command = ["script", "-qec", f"{sys.executable} -m fedkeep list", "/dev/null"]
    coloured = subprocess.run(
        command, capture_output=True, text=True, env=around, timeout=300, check=True
    )
    plain = subprocess.run(
        command, capture_output=True, text=True, env={**around, "NO_COLOR": "1"}, check=True
    )
    assert "\x1b[1m" in coloured.stdout
    assert "\x1b[3" not in plain.stdout


def test_a_mistake_is_one_sentence_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text("storage = { capcity = 3 }\n" + EXPERIMENT)
    done = run("run", "tiny.toml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("fedkeep: ")
    assert "capacity" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_fleet_cannot_be_below_a_file() -> None:
    with tempfile.TemporaryDirectory() as short:  # the sockets of its agents need short paths
        Path(short, "file").touch()
        done = run("fleet", "init", "file/below", cwd=Path(short))
    assert done.returncode == 2
    assert done.stderr.startswith("fedkeep: ")
    assert "file/below/nodes: Not a directory" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ("run", "tiny.toml", "--out", "tiny.toml"),
            "cannot keep records in tiny.toml: File exists",
        ),
        (
            ("run", "tiny.toml", "--out", "tiny.toml/below"),
            "Not a directory; choose another folder",
        ),
        (("demo", "--out", "tiny.toml"), "cannot keep records in tiny.toml"),
        (("report", "."), "no runs in ."),
        (
            ("run", "tiny.toml", "--set", "sweep.seed=[0,0]"),
            "two runs would both be called 'ode-seed0'",
        ),
        (("run", "nowhere.toml"), "there is no file nowhere.toml"),
    ],
    ids=str,
)
def test_a_place_that_cannot_be_used_is_reported_in_one_sentence(
    tmp_path: Path, arguments: tuple[str, ...], expected: str
) -> None:
    (tmp_path / "tiny.toml").write_text(EXPERIMENT)
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("fedkeep: ")
    assert expected in done.stderr
    assert len(done.stderr.splitlines()) == 1
