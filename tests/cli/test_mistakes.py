"""What a new user gets wrong, answered in one sentence that says what to do."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedkeep.cli.app import app
from fedkeep.core.errors import FedkeepError

POLICY = """
import numpy as np

from fedkeep.core.policy import SelectionPolicy, policy


@policy("mine")
class Mine(SelectionPolicy):
    def score(self, batch, view):
        {}
"""
MODELS = """
from torch import nn


def wrong_input():
    return nn.Sequential(nn.Linear(7, 10))


def few_outputs():
    return nn.Sequential(nn.Linear(30, 4))


def no_module():
    return [1, 2]


def broken():
    return {}["width"]


def relu():
    net = nn.Sequential(nn.Linear(8, 3), nn.ReLU())
    nn.init.constant_(net[0].bias, 100.0)  # all it says is positive: no sample shows the ReLU
    return net


def conv():
    return nn.Sequential(nn.Conv1d(3, 4, 3), nn.Flatten(), nn.Linear(8, 3))
"""
EXPERIMENT = (
    'task = {{ name = "demo", devices = 4 }}\ntrain = {{ rounds = 3, participation = 1.0 }}\n{}\n'
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def mistake(*arguments: str) -> str:
    """The one sentence that the command ends in."""
    error = CliRunner().invoke(app, [*arguments]).exception
    assert isinstance(error, FedkeepError), error
    assert "\n" not in str(error)
    return str(error)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return 0.5", "the policy Mine must give one number a sample, an array of"),
        ("return np.float64(1.0)", "it gave float64"),
        ("return np.zeros((len(batch), 2))", "it gave shape ("),
        (
            "return np.full(len(batch), np.nan)",
            "gave NaN as a score: give a number, or -inf to refuse a sample",
        ),
        ("return [] / 0", "the policy Mine raised TypeError: unsupported operand"),
        ("return None", "it gave NoneType"),
    ],
)
def test_a_policy_that_gives_no_scores_is_refused_by_run_and_check(
    folder: Path, body: str, expected: str
) -> None:
    (folder / "mine.py").write_text(POLICY.format(body))
    (folder / "try.toml").write_text(EXPERIMENT.format('policy = { name = "mine.py:Mine" }'))
    assert expected in mistake("run", "try.toml", "--jobs", "1")
    assert expected in mistake("check", "mine.py:Mine")


def test_where_a_policy_raised_is_reported(folder: Path) -> None:
    (folder / "mine.py").write_text(POLICY.format('raise KeyError("size")'))
    assert mistake("check", "mine.py:Mine").endswith(
        "raised KeyError: 'size' (" + str(folder / "mine.py") + ", line 10)"
    )


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("lenet", "model 'lenet' cannot take samples of shape [30]: "),
        (
            "nets.py:wrong_input",
            "cannot take samples of shape [30]: mat1 and mat2 shapes cannot be multiplied",
        ),
        ("nets.py:few_outputs", "has 4 outputs, and the data has 10 labels"),
        ("nets.py:no_module", "must make a torch.nn.Module, it made list"),
        ("nets.py:broken", "raised KeyError: 'width'"),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_reported(
    folder: Path, model: str, expected: str
) -> None:
    pytest.importorskip("torch")
    (folder / "nets.py").write_text(MODELS)
    (folder / "try.toml").write_text(EXPERIMENT.format(f'model = {{ name = "{model}" }}'))
    assert expected in mistake("run", "try.toml", "--jobs", "1")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ("nets.py:no_module",),
            "the factory of the model must make a torch.nn.Module, it made list",
        ),
        (("nets.py:broken",), "the factory of the model raised KeyError: 'width'"),
        (("nets.py:relu",), "take out what comes after it, such as a ReLU"),
        (("nets.py:conv", "--shape", "5,64"), "cannot take samples of shape [5, 64] (--shape): "),
        (("nets.py:conv", "--shape", "5,x"), "--shape takes whole numbers"),
        (("nets.py:conv", "--shape", "0,-4"), "--shape takes whole numbers above 0"),
        (("nets.py:conv",), "give it by --shape"),
        (("nets.py:nothing",), "'nets.py' has no 'nothing'"),
    ],
)
def test_a_model_that_cannot_be_exported_is_reported(
    folder: Path, arguments: tuple[str, ...], expected: str
) -> None:
    pytest.importorskip("onnxscript")
    (folder / "nets.py").write_text(MODELS)
    assert expected in mistake("export", *arguments, "--out", "out.onnx")
    assert not (folder / "out.onnx").exists()


def test_data_with_a_single_label_is_reported(folder: Path) -> None:
    (folder / "one.csv").write_text("device,label,a\n" + "p,ok,1.5\nq,ok,2.5\n" * 5)
    (folder / "try.toml").write_text('task = { name = "custom", path = "one.csv" }\n')
    assert (
        mistake("run", "try.toml")
        == "one.csv has a single label, 'ok': there is nothing to tell apart"
    )
