"""The benchmark's residual net, in small: in the simulator and in a Keeper, gists as sketches."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

pytest.importorskip("torch")

from fedkeep.core.gist import GistOptions
from fedkeep.core.types import Batch
from fedkeep.learn.torch_learner import TorchLearner

WIDTH = 64


@pytest.fixture(scope="module")
def large() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "large_model.py"
    spec = importlib.util.spec_from_file_location("large_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["large_model"] = module
    spec.loader.exec_module(module)
    return module


def test_a_net_with_normalisation_is_sketched_as_autograd_sees_it(large: ModuleType) -> None:
    learner = TorchLearner(lambda: large.residual_net(WIDTH))
    layout = GistOptions("local", rank=4).layout(learner)
    assert layout.size < learner.size / 3
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, large.FEATURES), dtype=np.float32)
    batch = Batch(x, rng.integers(0, large.LABELS, 6), np.arange(6))
    measured = learner.probe(learner.initial(0)).measure(batch)
    weights = rng.random(6)
    expected = layout.of_gradient(measured.weighted_gradient(weights))
    found = measured.sketched_gradient(layout, weights)
    assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)


def test_it_runs_in_the_simulator_and_in_a_keeper(large: ModuleType) -> None:
    sketch = large.GISTS["sketch"] | {"rank": 4}
    simulated = large.simulated(sketch, WIDTH, 2)  # raises where a report does not count
    kept = large.kept(sketch, WIDTH, 2)
    assert kept["model_bytes"] == 4 * simulated["parameters"]
    assert 0 < kept["up_bytes"] < 0.1 * kept["model_bytes"]
    whole, small = (large.device_bytes(g, WIDTH) for g in (large.GISTS["whole"], sketch))
    assert small["gist_bytes"] + small["window_bytes"] < 0.2 * sum(whole.values())
