"""The gist's page has the options of the code, and its picture is the one that the code draws."""

import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np

DOCS = Path(__file__).parents[2] / "docs"
GENERATOR: dict[str, Any] = runpy.run_path(str(DOCS / "generate_gist.py"))
STALE = "write it again with `python docs/generate_gist.py`"


def test_the_options_are_those_of_the_code() -> None:
    text = (DOCS / "gist.md").read_text(encoding="utf-8")
    assert GENERATOR["OPTIONS"].search(text)
    assert GENERATOR["page"](text) == text, STALE
    assert re.findall(
        r"^\| `(\w+)` \|.*\| ([^|]+) \| [^|]+ \|$", GENERATOR["options"](), re.MULTILINE
    ) == [
        ("mode", '"none"'),
        ("drift_weight", "0.5"),
        ("label_matching", "true"),
        ("max_ess", "100.0"),
        ("encoding", "left out"),
        ("rank", "left out"),
        ("last_layers", "left out"),
    ]


def test_the_picture_is_the_one_that_the_code_draws() -> None:
    drawn = (DOCS / "figures" / "gist.svg").read_text(encoding="utf-8")
    assert drawn == GENERATOR["picture"](), STALE


def test_the_picture_tells_the_truth() -> None:
    worked = GENERATOR["case"]()
    _, store = worked.stored_mean
    truth = worked.new.mean(axis=0)
    assert np.linalg.norm(store + worked.correction - truth) < 0.3 * np.linalg.norm(store - truth)
