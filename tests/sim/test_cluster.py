"""A sweep on a real Ray cluster of two nodes: the bytes of one machine, and it resumes."""

import hashlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import fedkeep
from fedkeep.config.experiment import expand
from fedkeep.core.errors import FedkeepError
from fedkeep.sim.sweep import play_on_ray, run_sweep

TABLE = {
    "task": {"name": "demo", "devices": 8},
    "train": {"rounds": 30, "participation": 0.5},
    "record": {"every": 10},
    "methods": {"ode": {"policy": {"name": "ode"}}, "fifo": {"policy": {"name": "fifo"}}},
    "sweep": {"seed": [0, 1]},
}
SCRIPT = """
import json, os, sys
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from fedkeep.config.experiment import expand
from fedkeep.sim.sweep import run_sweep

memory = 80_000_000
cluster = Cluster(
    initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": memory}
)
try:
    cluster.add_node(num_cpus=1, object_store_memory=memory)
    os.environ["RAY_ADDRESS"] = cluster.address
    cells = expand(json.loads(sys.argv[1]))
    out = Path(sys.argv[2])
    rounds = []
    options = {"jobs": 1, "resume": True, "backend": "ray"}
    options["listen"] = lambda cell, round_, _: rounds.append(round_)
    run_sweep(cells[:2], out, **options)
    first = {p.name: p.stat().st_mtime_ns for p in out.glob("*.jsonl")}
    run_sweep(cells, out, **options)
    again = [name for name, when in first.items() if (out / name).stat().st_mtime_ns != when]
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    alive = sum(node["Alive"] for node in ray.nodes())
    print(json.dumps({"nodes": alive, "rounds": rounds, "again": again}))
finally:
    ray.shutdown()
    cluster.shutdown()
"""


def digests(directory: Path) -> dict[str, str]:
    records = [
        path for path in directory.glob("*.jsonl") if not path.name.endswith(".timing.jsonl")
    ]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in records}


@pytest.mark.real
def test_a_cluster_of_two_nodes_gives_the_same_bytes_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    around = {
        **os.environ,
        "PYTHONPATH": str(Path(fedkeep.__file__).parents[1]),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(TABLE), str(tmp_path / "ray")],
        capture_output=True,
        text=True,
        env=around,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    printed = json.loads(done.stdout.splitlines()[-1])
    assert printed == {"nodes": 2, "rounds": [30] * 4, "again": []}
    run_sweep(expand(TABLE), tmp_path / "here", jobs=1, resume=False, listen=lambda *_: None)
    assert len(digests(tmp_path / "here")) == 4
    assert digests(tmp_path / "ray") == digests(tmp_path / "here")
    assert len(list((tmp_path / "ray").glob("*.timing.jsonl"))) == 4


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_without_a_cluster_the_error_explains_how_to_start_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"{scheme}127.0.0.1:{port}")
    with pytest.raises(FedkeepError, match="ray start --head"):
        play_on_ray(expand(TABLE), [0], tmp_path, lambda *_: None)
