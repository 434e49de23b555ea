"""Seeded runs end as recorded in `digests.json`: a change that alters numbers must declare it."""

import json
from importlib.util import find_spec

import numpy as np
import pytest

from tests.golden.runs import DIGESTS, RUNS

KNOWN = json.loads(DIGESTS.read_text())
TOLERANCE = 3e-5
"""Relative to the length of the model's path: BLAS libraries sum in different orders."""
NEEDS = {
    "lenet": "torch",
    "traffic": "torch",
    "torch": "torch",
    "onnx": "onnxscript",
    "private": "dp_accounting",
}


def test_every_run_is_known() -> None:
    assert list(KNOWN) == list(RUNS)


@pytest.mark.parametrize("name", RUNS)
def test_a_seeded_run_ends_where_it_ended(name: str) -> None:
    for part in name.split("-"):
        if part in NEEDS and find_spec(NEEDS[part]) is None:
            pytest.skip(f"needs {NEEDS[part]}")
    found, known = RUNS[name](), KNOWN[name]
    assert found.choices == known["choices"], "other samples are stored, or other devices took part"
    length = float(np.linalg.norm(known["moved"])) / len(known["moved"]) ** 0.5
    np.testing.assert_allclose(found.moved, known["moved"], rtol=0, atol=TOLERANCE * length)
