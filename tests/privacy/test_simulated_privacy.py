"""Privacy in whole simulations: repeatable, resumable, and refused where it would not hold."""

from typing import Any

import numpy as np
import pytest

from fedkeep.config.experiment import resolve
from fedkeep.core.errors import ConfigError
from fedkeep.sim.engine import Simulator

pytest.importorskip("dp_accounting", reason="needs the privacy extra")


def simulator(privacy: dict[str, Any], rounds: int = 8, **tables: Any) -> Simulator:
    train = {"rounds": rounds, "participation": 0.2, "learning_rate": 0.1, "dropout": 0.3}
    return Simulator(
        resolve(
            {
                "task": {"name": "demo"},
                "policy": {"name": "ode"},
                "train": train,
                "privacy": privacy,
                **tables,
            }
        )
    )


def finished(simulation: Simulator) -> Simulator:
    for _ in simulation.run():
        pass
    return simulation


def test_noise_changes_the_run_and_repeats_with_the_seed() -> None:
    plain, noisy, again = (
        finished(simulator(p)).server for p in ({}, {"epsilon": 2.0}, {"epsilon": 2.0})
    )
    directions = [server.estimator.direction() for server in (plain, noisy, again)]
    assert directions[0] is not None
    assert directions[1] is not None
    assert not np.array_equal(directions[0], directions[1])
    np.testing.assert_array_equal(noisy.model, again.model)


def test_a_resumed_run_spends_and_ends_like_an_unbroken_one() -> None:
    privacy = {
        "epsilon": 3.0,
        "protect": ["estimator", "model"],
        "planned_participations": 8,
        "model_clip": 0.5,
    }
    whole, first, second = (simulator(privacy) for _ in range(3))
    finished(whole)
    for _ in first.run(5):
        pass
    second.restore(first.snapshot())
    finished(second)
    np.testing.assert_array_equal(whole.server.model, second.server.model)
    assert whole.parts.guards.most_spent() == second.parts.guards.most_spent()


def test_no_device_exceeds_its_budget_and_those_who_reached_it_stay_away() -> None:
    simulation = simulator(
        {"epsilon": 4.0, "unit": "device", "planned_participations": 2, "on_exhausted": "absent"},
        rounds=30,
    )
    missing = [len(record.summary.missing) for record in simulation.run()]
    spending = simulation.parts.guards.most_spent()
    assert spending is not None
    assert spending.device_epsilon <= 4.0 * (1 + 1e-6)
    assert spending.left == pytest.approx(0.0, abs=1e-5), (
        "both releases that the budget is made for"
    )
    assert sum(missing[-5:]) > sum(missing[:5])


def test_profiles_are_noised_before_the_plan() -> None:
    plans = [simulator(p).server.plan for p in ({}, {"epsilon": 1.0, "protect": ["profile"]})]
    assert plans[0] is not None
    assert plans[1] is not None
    assert not np.array_equal(plans[0].label_weights, plans[1].label_weights)


@pytest.mark.parametrize(
    ("privacy", "tables", "reason"),
    [
        ({"epsilon": 0.0}, {}, "epsilon must be"),
        ({"epsilon": 1.0}, {"estimator": {"name": "exact"}}, "without noise"),
        ({"epsilon": 1.0}, {"estimator": {"cold_start": "exact"}}, "without noise"),
        ({"epsilon": 1.0}, {"estimator": {"name": "stored"}}, "many times"),
        ({"secure_aggregation": True}, {"aggregation": {"name": "trimmed"}}, "exclude each other"),
        ({"secure_aggregation": True}, {}, "deploy"),
    ],
)
def test_options_under_which_the_guarantee_fails_are_refused(
    privacy: dict[str, Any], tables: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        simulator(privacy, **tables)
