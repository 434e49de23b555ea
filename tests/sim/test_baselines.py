"""Corrections of other methods: their formulas in small numbers, and their special cases."""

from collections.abc import Callable

import numpy as np
import pytest

from fedkeep.config.experiment import resolve
from fedkeep.core.errors import ConfigError
from fedkeep.core.types import Report, Vector
from fedkeep.sim.baselines import Baseline, FedVarp, Scaffold, ServerMomentum
from fedkeep.sim.engine import Simulator
from fedkeep.tables import Table

RATES = np.array([1.0, 3.0])


def vector(*values: float) -> Vector:
    return np.array(values, dtype=np.float32)


def report(model: Vector, weight: float, steps: int = 2) -> Report:
    return Report(0, model, weight, steps, 1, None)


def test_momentum_goes_on_in_the_direction_of_earlier_updates() -> None:
    baseline = ServerMomentum(0.5)
    first = baseline.step(vector(0, 0), vector(1, 0), {}, 0.1)
    second = baseline.step(first, first + vector(0, 1), {}, 0.1)
    np.testing.assert_allclose(first, [1, 0])
    np.testing.assert_allclose(second, [1.5, 1], err_msg="0.5 (1, 0) + (0, 1) beyond (1, 0)")


def test_fedvarp_lets_an_absent_device_count_with_its_last_update() -> None:
    """Rates 1/4 and 3/4; device 1 sends (4), then device 0 alone sends (2): 3/4 of 4 and 2."""
    baseline = FedVarp(RATES, 1)
    first = baseline.step(vector(0), vector(4), {1: report(vector(4), 1.0)}, 0.1)
    np.testing.assert_allclose(first, [4], err_msg="nothing known before: plain averaging")
    second = baseline.step(first, first + 2, {0: report(first + 2, 1.0)}, 0.1)
    np.testing.assert_allclose(second - first, [0.75 * 4 + 2])


def test_fedvarp_is_federated_averaging_where_all_take_part() -> None:
    baseline = FedVarp(RATES, 2)
    model = vector(0, 0)
    for update in ([1.0, 2.0], [-1.0, 0.5], [0.2, 0.1]):
        each = {d: report(model + vector(*update) * (d + 1), RATES[d]) for d in (0, 1)}
        after = sum(RATES[d] / 4 * each[d].model for d in (0, 1)).astype(np.float32)
        stepped = baseline.step(model, after, each, 0.1)
        np.testing.assert_allclose(stepped, after, atol=1e-6)
        model = stepped


def test_scaffold_corrects_by_the_difference_between_the_fleets_gradient_and_the_devices_own() -> (
    None
):
    """Two steps of rate 0.1, from 0 to -0.2 and to -0.6: gradients 1 and 3, 1/4 and 3/4: 2.5."""
    baseline = Scaffold(RATES, 1)
    assert all((c == 0).all() for c in baseline.corrections([0, 1]).values())
    after = baseline.step(
        vector(0), vector(-0.5), {0: report(vector(-0.2), 1.0), 1: report(vector(-0.6), 3.0)}, 0.1
    )
    np.testing.assert_allclose(after, [-0.5])
    corrections = baseline.corrections([0, 1])
    np.testing.assert_allclose(corrections[0], [2.5 - 1], rtol=1e-6)
    np.testing.assert_allclose(corrections[1], [2.5 - 3], rtol=1e-6)


@pytest.mark.parametrize(
    "make",
    [lambda: ServerMomentum(0.9), lambda: FedVarp(RATES, 1), lambda: Scaffold(RATES, 1)],
    ids=["momentum", "fedvarp", "scaffold"],
)
def test_a_restored_baseline_continues_as_if_nothing_had_happened(
    make: Callable[[], Baseline],
) -> None:
    one, other = make(), make()
    one.step(vector(0), vector(1), {1: report(vector(1), 1.0)}, 0.1)
    other.restore(one.snapshot())
    given = (vector(1), vector(1.5), {0: report(vector(1.5), 1.0)}, 0.1)
    np.testing.assert_array_equal(one.step(*given), other.step(*given))
    for device, correction in one.corrections([0, 1]).items():
        np.testing.assert_array_equal(correction, other.corrections([device])[device])


def final_model(**tables: Table) -> Vector:
    base: Table = {
        "task": {"name": "demo", "devices": 1},
        "policy": {"name": "fifo"},
        "train": {"rounds": 8},
    }
    simulator = Simulator(resolve(base | tables))
    for _ in simulator.run():
        pass
    return simulator.server.model


def test_scaffold_changes_nothing_in_a_fleet_of_one() -> None:
    corrected = final_model(correction={"name": "scaffold"})
    np.testing.assert_allclose(corrected, final_model(), rtol=1e-4, atol=1e-6)


def test_scaffold_refuses_a_learner_that_values_the_last_layer_alone() -> None:
    with pytest.raises(ConfigError, match=r"leave out model\.last_layers"):
        final_model(correction={"name": "scaffold"}, model={"name": "mlp", "last_layers": 1})
