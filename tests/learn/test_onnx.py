"""The exported model: torch's values, new weights without the onnx library, no executable code."""

import sys
from pathlib import Path

import numpy as np
import pytest

from fedkeep.core.errors import ConfigError, DataError
from fedkeep.core.gradients.layout import sketched_layout
from fedkeep.core.protocols import TrainingJob
from fedkeep.core.types import Batch, LocalTraining
from fedkeep.learn.onnx_learner import OnnxLearner
from fedkeep.testing import check_learner

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

import torch

from fedkeep.learn.export import export, load_weights
from fedkeep.learn.torch_learner import TorchLearner


def small() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv1d(2, 4, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(32, 5),
    )


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("onnx") / "small.onnx"
    assert export(small, (2, 8), None, path) <= 1e-5
    return path


def batch(n: int) -> Batch:
    rng = np.random.default_rng(n)
    return Batch(
        rng.standard_normal((n, 2, 8)).astype(np.float32), rng.integers(0, 5, n), np.arange(n)
    )


def test_it_obeys_the_laws_of_learners(exported: Path) -> None:
    assert check_learner(OnnxLearner(exported), batch(12)).passed


@pytest.mark.parametrize("n", [1, 17])
def test_it_measures_what_torch_measures_under_any_model(exported: Path, n: int) -> None:
    ours, theirs = OnnxLearner(exported), TorchLearner(small, last_layers=1)
    assert (ours.size, ours.gradient_size) == (theirs.size, theirs.gradient_size)
    model = theirs.initial(5)
    assert not np.array_equal(model, ours.initial(0))
    direction = np.random.default_rng(1).standard_normal(ours.gradient_size).astype(np.float32)
    for first in ("projections", "losses"):
        mine, other = ours.probe(model).measure(batch(n)), theirs.probe(model).measure(batch(n))
        if first == "losses":
            np.testing.assert_allclose(mine.losses(), other.losses(), atol=1e-5)
        np.testing.assert_allclose(
            mine.projections(direction), other.projections(direction), atol=1e-5
        )
        np.testing.assert_allclose(mine.norms(), other.norms(), atol=1e-5)
        np.testing.assert_allclose(mine.mean_gradient(), other.mean_gradient(), atol=1e-5)
    np.testing.assert_allclose(
        ours.logits(model, batch(n).x), theirs.logits(model, batch(n).x), atol=1e-5
    )


def test_training_moves_the_head_and_nothing_else(exported: Path) -> None:
    learner = OnnxLearner(exported)
    model = learner.initial(0)
    trained = learner.train(model, TrainingJob(batch(20), np.ones(20), 0), LocalTraining(0.1, 3))
    body = learner.size - learner.gradient_size
    assert np.array_equal(trained[:body], model[:body])
    assert not np.array_equal(trained[body:], model[body:])
    before = learner.probe(model).measure(batch(20)).losses().mean()
    assert learner.probe(trained).measure(batch(20)).losses().mean() < before


def test_weights_are_put_in_and_read_back(exported: Path, tmp_path: Path) -> None:
    learner = OnnxLearner(exported)
    model = np.arange(learner.size, dtype=np.float32)
    (tmp_path / "changed.onnx").write_bytes(learner.file_of(model))
    assert np.array_equal(OnnxLearner(tmp_path / "changed.onnx").initial(0), model)


def test_safetensors_are_loaded_and_pickles_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    module = small()
    save_file(module.state_dict(), tmp_path / "w.safetensors")
    other = small()
    load_weights(other, tmp_path / "w.safetensors")
    assert all(
        torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True)
    )
    torch.save(module.state_dict(), tmp_path / "w.pt")
    with pytest.raises(DataError, match="holds a pickle"):
        load_weights(other, tmp_path / "w.pt")
    (tmp_path / "w.bin").write_bytes(b"nothing of the kind")
    with pytest.raises(DataError, match="not a safetensors file"):
        load_weights(other, tmp_path / "w.bin")
    with pytest.raises(DataError, match="cannot read"):
        load_weights(other, tmp_path / "none")
    save_file({"other": torch.zeros(3)}, tmp_path / "o.safetensors")
    with pytest.raises(DataError, match="do not fit the model"):
        load_weights(other, tmp_path / "o.safetensors")


def test_models_that_cannot_be_valued_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give it by --shape"):
        export(small, None, None, tmp_path / "x.onnx")
    with pytest.raises(ConfigError, match="last layer"):
        export(
            lambda: torch.nn.Sequential(torch.nn.Conv1d(2, 4, 3)), (2, 8), None, tmp_path / "x.onnx"
        )


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04zip", b"\x80\x04pickle", b"plain text", bytes(100)]
)
def test_files_that_are_no_models_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.onnx").write_bytes(content)
    with pytest.raises(DataError):
        OnnxLearner(tmp_path / "m.onnx")


def test_the_command_exports_and_checks(tmp_path: Path) -> None:
    from safetensors.torch import save_file
    from typer.testing import CliRunner

    from fedkeep.cli.app import app

    torch.manual_seed(3)
    module = torch.nn.Sequential(torch.nn.Linear(4, 3))
    save_file(module.state_dict(), tmp_path / "w.safetensors")
    (tmp_path / "exported_models.py").write_text(
        "from torch import nn\ndef make():\n    return nn.Sequential(nn.Linear(4, 3))\n"
    )
    sys.path.insert(0, str(tmp_path))
    out = tmp_path / "m.onnx"
    command = [
        "export",
        "exported_models:make",
        "--weights",
        str(tmp_path / "w.safetensors"),
        "--out",
        str(out),
    ]
    done = CliRunner().invoke(app, command)
    sys.path.remove(str(tmp_path))
    assert "agrees with torch" in done.output, done.output
    weights = torch.cat([p.detach().reshape(-1) for p in module.parameters()]).numpy()
    assert np.array_equal(OnnxLearner(out).initial(0), weights)


def test_its_sketch_is_that_of_the_gradient(exported: Path) -> None:
    learner = OnnxLearner(exported)
    layout = sketched_layout(learner.gradient_shapes(None), rank=1)
    assert not layout.whole
    measured = learner.probe(learner.initial(0)).measure(batch(17))
    weights = np.random.default_rng(0).random(17)
    expected = layout.of_gradient(measured.weighted_gradient(weights))
    found = measured.sketched_gradient(layout, weights)
    assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)
