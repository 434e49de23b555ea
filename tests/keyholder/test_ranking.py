"""A plan from velocities that stay encrypted.

The order that homomorphic encryption can tell is enough for greedy.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedkeep.config.experiment import resolve
from fedkeep.core.errors import ConfigError, RejectedError
from fedkeep.core.planning.greedy import Coordinator, Greedy, PaperGreedy, Uncoordinated
from fedkeep.core.planning.profiles import FleetProfiles
from fedkeep.core.types import Profile
from fedkeep.privacy.options import PrivacyOptions
from fedkeep.sim.engine import Simulator

pytest.importorskip("tenseal", reason="needs the homomorphic extra")

from fedkeep.keyholder.ranking import (
    COARSE,
    Comparisons,
    Contexts,
    OrderedFleet,
    Scheme,
    plan_ranked,
)

tables = hnp.arrays(
    np.int64, st.tuples(st.integers(1, 7), st.integers(1, 5)), elements=st.integers(0, 6)
)
CAPACITIES = np.array([3, 7, 1, 5, 2])
ROWS = (np.arange(5), CAPACITIES)
COMPARISONS = Comparisons(devices=5, labels=3)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def holder() -> Contexts:
    return Contexts(COARSE)


def velocities() -> np.ndarray:
    """Velocities with many zeros and exact ties.

    And differences down to one level of the coarse grid.
    """
    return np.random.default_rng(0).choice([0.0, 0.02, 1.0, 2.0, 4.0, 300.0], size=(5, 3))


def encrypted(public: Contexts) -> list[list[bytes]]:
    return [public.encrypt(COMPARISONS, row, velocity) for row, velocity in enumerate(velocities())]


def signs_of(values: np.ndarray) -> np.ndarray:
    comparisons = Comparisons(*values.shape)
    differences = sum(comparisons.contribution(row, values[row]) for row in range(len(values)))
    return np.sign(differences).astype(np.int64)


@pytest.mark.parametrize("quantities", ["even", "frequent"])
def test_the_plan_equals_the_plain_greedy_plan_without_local_search(
    holder: Contexts, quantities: str
) -> None:
    greedy = Greedy(
        clients_per_label=2, labels_per_client=2, quantities=quantities, improve_up_to=0
    )
    public = holder.public()
    plan = holder.plan(COMPARISONS, public.compare(encrypted(public)), ROWS, greedy)
    plain = greedy.plan(FleetProfiles.numbered(CAPACITIES, velocities()))
    np.testing.assert_array_equal(plan.quotas, plain.quotas)
    np.testing.assert_allclose(plan.label_weights, plain.label_weights, rtol=1e-6)


def test_only_the_key_holder_reads_anything_and_what_is_damaged_is_refused(
    holder: Contexts,
) -> None:
    public = holder.public()
    compared = public.compare(encrypted(public)[:2])
    with pytest.raises(ValueError, match="secret_key"):
        public.plan(COMPARISONS, compared, ROWS, Greedy())
    with pytest.raises(RejectedError, match="unclear comparison"):
        Contexts(COARSE).plan(COMPARISONS, compared, ROWS, Greedy())
    with pytest.raises(RejectedError, match="unreadable ciphertext"):
        public.compare([[compared[0][:-50], compared[1]]])


def test_the_full_scheme_tells_two_thousand_levels_apart_and_the_coarse_one_thirty() -> None:
    assert Scheme().levels > 2000
    assert COARSE.levels > 30


@settings(deadline=None)
@given(tables)
def test_a_table_made_from_signs_has_the_same_signs(values: np.ndarray) -> None:
    table = Comparisons(*values.shape).table(signs_of(values))
    np.testing.assert_array_equal(signs_of(table), signs_of(values))
    np.testing.assert_array_equal(table == 0, values == 0)


@settings(deadline=None, max_examples=50)
@given(
    tables, st.integers(1, 3), st.sampled_from([None, 1, 2]), st.sampled_from(["even", "frequent"])
)
def test_such_a_table_gives_the_same_plan(
    values: np.ndarray, clients: int, labels: int | None, quantities: str
) -> None:
    greedy = Greedy(clients, labels, quantities=quantities, improve_up_to=0)
    capacities = np.arange(1, len(values) + 1)
    table = Comparisons(*values.shape).table(signs_of(values))
    plain = greedy.plan(FleetProfiles.numbered(capacities, values.astype(float)))
    totals = values.sum(axis=0).astype(float)
    plan = greedy.plan(
        OrderedFleet(np.arange(len(values)), capacities, table.astype(float), totals)
    )
    np.testing.assert_allclose(plan.label_weights, plain.label_weights)
    np.testing.assert_array_equal(plan.quotas, plain.quotas)


def test_comparisons_that_contradict_each_other_are_refused() -> None:
    signs = signs_of(np.array([[1], [2], [3]]))
    signs[:3] = [1, -1, 1]
    for comparisons, results in ((Comparisons(3, 1), signs), (Comparisons(1, 1), np.array([-1]))):
        with pytest.raises(RejectedError, match="contradict"):
            comparisons.table(results)


@settings(deadline=None)
@given(st.lists(st.floats(1e-3, 1e4), min_size=2, max_size=2))
def test_levels_keep_the_order_and_tell_the_seen_from_the_unseen(pair: list[float]) -> None:
    slow, fast = sorted(pair)
    none, lower, upper = COARSE.level_of(np.array([0.0, slow, fast])).tolist()
    assert none == 0 < lower <= upper <= COARSE.levels
    if fast > slow * 10 ** (7 / (COARSE.levels - 1)) * (1 + 1e-9):
        assert lower < upper


def test_the_benchmark_of_both_ways_in_its_quick_form(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "benchmarks/encrypted_plan.py",
        "--quick",
        "--json",
        str(tmp_path / "plans.json"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=300, check=True)
    runs = json.loads((tmp_path / "plans.json").read_text())
    assert {run["way"] for run in runs} == {"sealed", "CKKS, coarse"}
    assert all(run["equal"] for run in runs), "each plan is the plain one of its kind"
    assert all(run["device_bytes"] < 200 for run in runs if run["way"] == "sealed")


@pytest.mark.parametrize("coordinator", [Greedy(2, 2, improve_up_to=0), PaperGreedy(2, 2)])
def test_all_parts_in_one_process_give_the_plan_on_the_grid(coordinator: Coordinator) -> None:
    profiles = {3 * d: Profile(int(CAPACITIES[d]), row) for d, row in enumerate(velocities())}
    plan = plan_ranked(profiles, coordinator, COARSE)
    plain = coordinator.plan(FleetProfiles.of(profiles))
    np.testing.assert_array_equal(plan.devices, [0, 3, 6, 9, 12])
    np.testing.assert_array_equal(plan.quotas, plain.quotas)
    np.testing.assert_allclose(plan.label_weights, plain.label_weights, rtol=1e-6)
    with pytest.raises(ConfigError, match="greedy or paper-greedy"):
        plan_ranked(profiles, Uncoordinated(), COARSE)


def test_a_simulated_fleet_plans_from_ranked_profiles() -> None:
    table = {
        "task": {"name": "demo", "devices": 6, "labels": 4},
        "policy": {"name": "ode"},
        "coordinator": {"clients_per_label": 2, "labels_per_client": 2, "improve_up_to": 0},
        "train": {"rounds": 3, "participation": 0.5},
    }
    ranked, plain = (
        Simulator(resolve({**table, "privacy": {"profiles": form}}))
        for form in ("homomorphic", "plain")
    )
    assert ranked.server.plan is not None
    assert plain.server.plan is not None
    held = ranked.server.plan.quotas > 0
    assert (held == (plain.server.plan.quotas > 0)).mean() > 0.8
    assert [record.round for record in ranked.run()] == [1, 2, 3]
    assert len({ranked.server.rate(device) for device in range(6)}) == 1, "rates stay unknown"
    with pytest.raises(ConfigError, match="hide nothing in one process"):
        Simulator(resolve({**table, "privacy": {"profiles": "sealed"}}))


def test_the_former_word_is_an_alias() -> None:
    assert PrivacyOptions(encrypted_profiles=True).profile_protection == "sealed"
    assert PrivacyOptions(profiles="sealed").profile_protection == "sealed"
    assert PrivacyOptions().profile_protection == "plain"
    with pytest.raises(ValueError, match="leave out one of the two"):
        PrivacyOptions(profiles="homomorphic", encrypted_profiles=True)
