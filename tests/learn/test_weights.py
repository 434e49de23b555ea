"""Models on disk: safetensors round trips, and everything else is refused with the reason."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("safetensors")

from fedkeep.core.errors import DataError
from fedkeep.learn.dense_learner import DenseLearner
from fedkeep.learn.weights import load_weights, save_weights

LEARNER = DenseLearner((6, 5, 3))


def test_round_trip(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_weights(file, LEARNER.layout, LEARNER.initial(0))
    np.testing.assert_array_equal(load_weights(file, LEARNER.layout), LEARNER.initial(0))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_pickle_is_refused_whatever_its_name(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(pickle.dumps({"0.weight": [1.0]}))
    with pytest.raises(DataError, match="may run code when it is opened"):
        load_weights(file, LEARNER.layout)


def test_a_torch_archive_is_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    file = tmp_path / "model.pt"
    torch.save({"0.weight": torch.zeros(5, 6)}, file)
    with pytest.raises(DataError, match="may run code when it is opened"):
        load_weights(file, LEARNER.layout)


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 64])
def test_damaged_files_are_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(DataError, match="not a readable safetensors file"):
        load_weights(file, LEARNER.layout)


def test_missing_files_and_other_models_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with pytest.raises(DataError, match="cannot be read"):
        load_weights(file, LEARNER.layout)
    save_weights(file, LEARNER.layout, LEARNER.initial(0))
    with pytest.raises(DataError, match=r"'0.bias' is \(5,\) in the file and \(3,\) in the model"):
        load_weights(file, DenseLearner((6, 3)).layout)
