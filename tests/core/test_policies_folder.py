"""A policy is one file: whatever lies in the folder is known by its name."""

import os
import subprocess
import sys
from pathlib import Path
from shutil import copytree

import fedkeep

MINE = """
from fedkeep.core.policy import SelectionPolicy, policy


@policy("late-comer")
class LateComer(SelectionPolicy):
    def score(self, batch, view):
        return view.uniform
"""


def test_a_new_file_in_the_folder_is_known_without_being_listed(tmp_path: Path) -> None:
    copytree(
        Path(fedkeep.__file__).parent,
        tmp_path / "fedkeep",
        ignore=lambda _, names: {"__pycache__"} & set(names),
    )
    (tmp_path / "fedkeep/core/policies/late_comer.py").write_text(MINE)
    asked = (
        "import fedkeep.config.components as r; "
        "print(r.find_policy('late-comer').__name__, r.find_policy('ode').__name__)"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", asked], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["LateComer", "Ode"]
