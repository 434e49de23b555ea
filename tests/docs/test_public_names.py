"""The public names of the packages: a change here changes them for users; note it in CHANGELOG."""

import importlib
import pkgutil
import subprocess
import sys

import pytest

import fedkeep

PUBLIC = {
    "fedkeep": [
        "Device",
        "Experiment",
        "Keeper",
        "KeeperStrategy",
        "SelectionPolicy",
        "Server",
        "Simulator",
        "advise",
        "compare",
        "errors",
        "load_records",
        "simulate",
    ],
    "fedkeep.advice": [
        "Advice",
        "BytePlan",
        "KeptBytes",
        "StorePlan",
        "advise",
        "kept_bytes",
        "spend_bytes",
    ],
    "fedkeep.cli": ["main"],
    "fedkeep.core.gist": [
        "Correction",
        "Encoding",
        "Gist",
        "GistFigures",
        "GistOptions",
        "LinearEstimate",
        "NoiseCovariance",
        "NoiseModel",
        "StoreSummary",
        "StoredGradients",
        "best_linear_estimate",
        "pack",
        "packed_bytes",
        "pooled_mean",
        "unpack",
    ],
    "fedkeep.core.gradients": [
        "Estimate",
        "GivenEstimator",
        "GlobalEstimator",
        "GradientAccumulator",
        "IncrementalEstimator",
        "LocalGradientEstimator",
        "RoundMeanEstimator",
        "clip_weights",
        "global_estimator",
        "mean_gradient",
    ],
    "fedkeep.data": [
        "Federation",
        "ModelSpec",
        "Ownership",
        "PARTITIONS",
        "Partition",
        "Progress",
        "Stream",
        "StreamOptions",
        "TASKS",
        "Task",
        "partition",
        "partition_from",
    ],
    "fedkeep.core.aggregation": [
        "AGGREGATORS",
        "Aggregator",
        "FedAvg",
        "FedNova",
        "Median",
        "MergedReports",
        "NormBounded",
        "RobustMean",
        "Trimmed",
        "UpdateSum",
        "aggregation",
    ],
    "fedkeep.flower": ["FedkeepStrategy", "Keeper", "KeeperStrategy", "make_client_app"],
    "fedkeep.records": [
        "Change",
        "Comparison",
        "DeviceLine",
        "End",
        "Evaluation",
        "GistLine",
        "Header",
        "HoldingsLine",
        "Line",
        "Member",
        "Members",
        "PlanLine",
        "PrivacyLine",
        "Recorder",
        "Round",
        "Run",
        "Slot",
        "Timing",
        "compare",
        "frame",
        "read_run",
        "read_runs",
    ],
    "fedkeep.solvers": ["Clusters", "Exact", "Hierarchical", "KMeans"],
}


def packages() -> list[str]:
    return [
        "fedkeep",
        *(m.name for m in pkgutil.walk_packages(fedkeep.__path__, "fedkeep.") if m.ispkg),
    ]


@pytest.mark.parametrize("name", packages())
def test_the_public_names_of_a_package_are_these(name: str) -> None:
    assert sorted(getattr(importlib.import_module(name), "__all__", [])) == PUBLIC.get(name, [])


def test_no_package_is_pinned_that_is_gone() -> None:
    assert set(PUBLIC) <= set(packages())


IMPORTED = """
import sys, time
began = time.perf_counter()
import fedkeep
assert time.perf_counter() - began < 0.5
assert not {"numpy", "torch", "flwr", "msgspec"} & set(sys.modules)
assert set(fedkeep.__all__) <= set(dir(fedkeep))
from fedkeep import *
assert Simulator.__module__ == "fedkeep.sim.engine"
assert compare.__doc__ and advise.__doc__ and simulate.__doc__ and load_records.__doc__
assert errors.FedkeepError.__module__ == "fedkeep.core.errors"
assert "torch" not in sys.modules
"""


def test_importing_fedkeep_loads_nothing_until_a_name_is_used() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'fedkeep' has no attribute 'Simulater'"):
        _ = fedkeep.Simulater
