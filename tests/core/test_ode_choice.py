"""ODE's two ways of choosing: the greatest values, or a draw in which they are odds."""

from types import SimpleNamespace

import numpy as np
import pytest

from fedkeep.core.policies.ode import Ode
from fedkeep.core.types import Scores


def keys_of(values: Scores, uniform: Scores, sharpness: float) -> Scores:
    """What a drawn choice makes of samples with these values and random numbers."""
    measured = SimpleNamespace(projections=lambda _: values)
    view = SimpleNamespace(global_gradient=np.ones(1), measurements=measured, uniform=uniform)
    return Ode(choice="drawn", sharpness=sharpness).score(None, view)  # type: ignore[arg-type]


def test_a_draw_favours_values_by_their_power() -> None:
    rng = np.random.default_rng(0)
    keys = keys_of(np.tile([1.0, 4.0], (20_000, 1)), rng.random((20_000, 2)), 0.5)
    share = (keys[:, 1] > keys[:, 0]).mean()
    assert abs(share - 2 / 3) < 0.02


def test_what_opposes_the_fleet_is_drawn_last() -> None:
    keys = keys_of(np.array([-5.0, 1e-6]), np.array([0.999, 1e-9]), 0.5)
    assert keys[0] < keys[1]
    assert np.isfinite(keys).all()


def test_the_sharpest_draw_still_gives_every_sample_a_number() -> None:
    keys = keys_of(np.array([-5.0, 1e-20, 1.0]), np.full(3, 2.0**-53), 10)
    assert np.isfinite(keys).all()
    assert (np.diff(keys) > 0).all()
    with pytest.raises(ValueError, match="sharpness must be between 0 and 10, got 11"):
        Ode(sharpness=11)
