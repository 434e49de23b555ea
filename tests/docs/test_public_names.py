"""The public names of the packages: a change here is a change for users, and belongs in the CHANGELOG."""

import importlib
import pkgutil

import pytest

import fedkeep

PUBLIC = {
    "fedkeep.cli": ["main"],
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
