"""Engines whose labels come at the end: python examples/engines.py"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

CONFIG = """
samples = { shape = [2], labels = 3, names = ["healthy", "worn", "failing"] }
waiting = { share = 0.5 }
store = { path = "engines.store", budget = 150_000 }
source = [{ kind = "lines", path = "engines.jsonl" }]
"""
RNG = np.random.default_rng(0)


def life(engine: int) -> Iterator[dict[str, object]]:
    """Every cycle of an engine without a label; its failure brings the labels of all of them."""
    length = int(RNG.integers(60, 90))
    for cycle in range(length):
        x = [cycle / length, 0.0] + 0.1 * RNG.standard_normal(2)
        yield {"id": f"{engine}/{cycle}", "x": x.tolist()}
    for cycle in range(length):
        left = length - cycle
        state = "failing" if left <= 10 else "worn" if left <= 30 else "healthy"
        yield {"id": f"{engine}/{cycle}", "y": state}


with tempfile.TemporaryDirectory() as folder:
    records = [json.dumps(record) for engine in range(20) for record in life(engine)]
    Path(folder, "engines.jsonl").write_text("\n".join(records))
    Path(folder, "engines.toml").write_text(CONFIG)
    for words in ("run engines.toml --until-sources-end", "store show engines.store --limit 5"):
        command = [sys.executable, "-m", "fedkeep", "agent", *words.split()]
        subprocess.run(command, cwd=folder, check=True)
