"""The benchmark of the gist runs, and the bytes it reports, on any machine, are as promised."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMES = {
    "participation_over_plain",
    "participation_sketch_over_plain",
    "arrival_over_forward",
    "arrival_over_ode",
    "arrival_sketch_over_forward",
}
WIRE = {
    "wire_local_over_fedavg",
    "wire_shared_over_ode",
    *(f"wire_{form}_{way}_over_fedavg" for form in ("shared", "sketch") for way in ("down", "up")),
    "wire_smallest_up_over_fedavg",
}
FORMS = ("float32", "float16", "int8", "int4", "sketch", "smallest")
BYTES = {
    *(f"bytes_{form}" for form in FORMS),
    *(f"kept_{form}" for form in FORMS),
    "kept_before",
    "kept_sketch_over_before",
    "ram_window",
    "ram_gist",
    "ram_anchor",
}


def test_the_gist_benchmark_in_its_quick_form(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "benchmarks/gist.py", "--quick", "--json", str(tmp_path / "gist.json")],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "gist.json").read_text())
    assert set(results) == {"softmax", "mlp", "lenet", "traffic-cnn"}
    for figures in results.values():
        assert set(figures) == TIMES | WIRE | BYTES
        assert figures["wire_local_over_fedavg"] == 1.0
        assert figures["wire_shared_over_ode"] == pytest.approx(1.0, abs=0.01)
        unpacked = 16 + 8 * 20  # two counters, and the shares of at most twenty labels
        assert figures["bytes_int8"] < 0.28 * figures["bytes_float32"] + unpacked
        assert figures["ram_window"] == 2 * figures["ram_anchor"]
        assert all(figures[name] > 0 for name in TIMES)
    for large in ("mlp", "traffic-cnn"):
        assert results[large]["kept_sketch_over_before"] < 0.1
        assert results[large]["wire_sketch_up_over_fedavg"] < 1.1
