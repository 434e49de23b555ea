"""Inner products of each sample's gradients under two models, against the gradients themselves."""

from pathlib import Path
from typing import cast

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the torch extra")
pytest.importorskip("onnxscript", reason="needs the export extra")

from torch import nn

from fedkeep.core.errors import ConfigError
from fedkeep.core.protocols import FleetLearner
from fedkeep.core.slices import deferred, slice_of
from fedkeep.learn import torch_measurements
from fedkeep.learn.backends import TracedMeasurements
from fedkeep.learn.dense_learner import DenseLearner
from fedkeep.learn.torch_learner import TorchLearner
from tests.learn.written_out import CASES, WrittenOut, batch_of, torch_case


def grouped() -> nn.Module:
    """Convolutions in groups, one without a bias, and a linear layer used at several places."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2, stride=2),
        nn.ReLU(),
        nn.Conv2d(4, 3, 2, bias=False),
        nn.Linear(2, 5),
        nn.Flatten(),
        nn.Linear(30, 4),
    )


MEASURED = {
    **CASES,
    "grouped": torch_case(grouped, (2, 8, 8), 4),
    "mapped-last": torch_case(CASES["mapped"].module, (12,), 4, 2),
}
KINDS = {
    "dense": "TracedMeasurements",
    "chain-pictures": "TorchMeasurements",
    "chain-head": "TorchMeasurements",
    "grouped": "TorchMeasurements",
    "mapped": "AutogradMeasurements",
    "recurrent": "AutogradMeasurements",
    "onnx": "OnnxMeasurements",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inner")


@pytest.mark.parametrize("n", [9, 13])
@pytest.mark.parametrize("name", MEASURED)
def test_inner_products_are_those_of_the_gradients(
    name: str, n: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few samples of a chain share one pass with those of other devices; many get their own."""
    monkeypatch.setattr(torch_measurements, "_BLOCK", 400)
    case = MEASURED[name]
    learner, batch = case.learner(folder), batch_of(case, n)
    rng, start = np.random.default_rng(1), learner.initial(0)
    models = [start + rng.normal(0, 0.05, learner.size).astype("f4") for _ in range(2)]
    old, new = [learner.probe(m).measure(batch) for m in models]
    kind = (
        "TracedMeasurements"
        if n == 9 and name.startswith("chain")
        else KINDS.get(name, type(old).__name__)
    )
    assert type(old).__name__ == kind
    written = WrittenOut(case, learner.gradient_size)
    a, b = (written.gradients(m, batch) for m in models)
    scale = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    np.testing.assert_allclose(old.inner(new) / scale, (a * b).sum(1) / scale, rtol=0, atol=1e-5)
    np.testing.assert_allclose(new.inner(old), old.inner(new), rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(old.norms(), np.linalg.norm(a, axis=1), rtol=1e-4)
    weights = rng.uniform(0.0, 2.0, n)
    np.testing.assert_allclose(new.weighted_gradient(weights), weights @ b / n, rtol=0, atol=1e-5)
    if name == "onnx":
        learner.probe(start)  # the sessions of both models are their own
        np.testing.assert_allclose(
            old.inner(new) / scale, (a * b).sum(1) / scale, rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("name", [name for name in MEASURED if name != "onnx"])
def test_many_devices_measure_inner_products_as_they_would_alone(name: str, folder: Path) -> None:
    """Each under its own old model, and all under one new model."""
    case = MEASURED[name]
    learner = cast("FleetLearner", case.learner(folder))
    batches = [batch_of(case, n, n) for n in (5, 1, 4, 0)]
    old, new = [learner.initial(seed) for seed in range(4)], learner.initial(9)
    before, after = learner.measure_many(old, batches), learner.measure_many([new] * 4, batches)
    for c, batch in enumerate(batches):
        alone = [learner.probe(m).measure(batch) for m in (old[c], new)]
        np.testing.assert_allclose(
            before[c].inner(after[c]), alone[0].inner(alone[1]), rtol=1e-4, atol=1e-6
        )
        weights = np.random.default_rng(c).uniform(0, 2, len(batch))
        for many, one in zip((before[c], after[c]), alone, strict=True):
            np.testing.assert_allclose(
                many.weighted_gradient(weights), one.weighted_gradient(weights), atol=1e-6
            )
            np.testing.assert_allclose(many.norms(), one.norms(), rtol=1e-4, atol=1e-6)
    chained = name.startswith("chain") or isinstance(learner, DenseLearner)
    assert isinstance(before[0], TracedMeasurements) == chained


def test_deferred_measurements_have_the_right_inner_products_and_parts_have_none() -> None:
    learner, batch = DenseLearner((6, 5, 3)), batch_of(CASES["dense"], 8)
    old, new = (learner.probe(learner.initial(seed)).measure(batch) for seed in (0, 1))
    expected = old.inner(new)
    np.testing.assert_array_equal(deferred(lambda: old).inner(deferred(lambda: new)), expected)
    np.testing.assert_array_equal(old.inner(deferred(lambda: new)), expected)
    part = slice_of(new, slice(2, 5))
    for one in (old, part):
        with pytest.raises(TypeError, match="in one way"):
            one.inner(part)


def test_the_tail_is_as_long_as_the_last_layers_are() -> None:
    dense = DenseLearner((6, 5, 4, 3))
    assert [dense.tail(n) for n in (1, 2, 3, None)] == [15, 39, 74, 74]
    assert [DenseLearner((6, 5, 4, 3), 2).tail(n) for n in (1, None)] == [15, 39]
    lenet = CASES["chain-pictures"].learner(Path())
    assert [lenet.tail(n) for n in (1, 2, 4, None)] == [850, 850 + 21588, lenet.size, lenet.size]
    assert TorchLearner(CASES["mapped"].module, 2).tail(2) == 4 * 11 + 20
    with pytest.raises(ConfigError, match="between 1 and 2"):
        DenseLearner((6, 5, 4, 3), 2).tail(3)


def test_a_chain_that_one_pass_would_see_wrongly_is_measured_one_by_one() -> None:
    """A linear layer at several places, and logits that come from no linear layer."""
    along = torch_case(
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Flatten(), nn.Linear(15, 3)), (3, 4), 3
    )
    pooled = torch_case(lambda: nn.Sequential(nn.Conv1d(2, 3, 4), nn.Flatten()), (2, 4), 3)
    for case in (along, pooled):
        learner = cast("FleetLearner", case.learner(Path()))
        batch, model = batch_of(case, 4), learner.initial(0)
        for many in learner.measure_many([model] * 2, [batch] * 2):
            one = learner.probe(model).measure(batch)
            assert type(many) is type(one)
            np.testing.assert_allclose(many.activations(), one.activations())
