"""docs/agent.md: its tables are those of the code, and a new user's walk through it works."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fedkeep

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "agent.md"


def test_the_tables_of_keys_are_those_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    from generate_agent import page  # type: ignore[import-not-found]

    assert PAGE.read_text(encoding="utf-8") == page(), "run `python docs/generate_agent.py`"


def walk(title: str, folder: Path) -> str:
    """Runs the commands that stand below a title of the page, as a new user would."""
    block = re.search(
        rf"\*\*{title}\*\*.*?```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    assert block is not None
    commands = block[1].replace("fedkeep ", f"{sys.executable} -m fedkeep ")
    paths = os.pathsep.join([str(Path(fedkeep.__file__).parents[1]), str(folder)])
    environment = {**os.environ, "PYTHONPATH": paths, "COLUMNS": "120"}
    command = ["sh", "-ec", commands]
    done = subprocess.run(
        command, check=False, cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_a_new_users_walk(tmp_path: Path) -> None:
    said = walk("A CSV file.", tmp_path)
    assert "3 arrived, 3 kept, 3 of" in said
    assert "label 0: 2, label 1: 1" in said
    assert "3 samples of shape [2] written to kept.npz" in walk("Taking samples out.", tmp_path)
    with np.load(tmp_path / "kept.npz") as kept:
        assert sorted(kept["y"].tolist()) == [0, 0, 1]
    assert len(list((tmp_path / "kept" / "0").iterdir())) == 2


def test_a_new_users_walk_with_a_model_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    walk("A CSV file.", tmp_path)
    said = walk("A model of your own.", tmp_path)
    assert "model model.onnx" in said
    assert "[model] is another than before: samples stay" in said
    assert "3 of" in said.splitlines()[-1]
