"""ODE's two ways of choosing: the greatest values, or a draw in which they are odds."""

from __future__ import annotations

import numpy as np

from fedkeep.core.policies.ode import _keys


def test_a_draw_favours_values_by_their_power() -> None:
    rng = np.random.default_rng(0)
    keys = _keys(np.tile([1.0, 4.0], (20_000, 1)), rng.random((20_000, 2)), 0.5)
    share = (keys[:, 1] > keys[:, 0]).mean()
    assert abs(share - 2 / 3) < 0.02


def test_what_opposes_the_fleet_is_drawn_last() -> None:
    keys = _keys(np.array([-5.0, 1e-6]), np.array([0.999, 1e-9]), 0.5)
    assert keys[0] < keys[1]
    assert np.isfinite(keys).all()
