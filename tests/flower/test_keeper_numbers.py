"""A keeper whose samples have numbers to predict, under the loss of the user's own loop."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from flwr.app import ArrayRecord, Context, RecordDict
from torch import nn

from fedkeep.core.errors import ConfigError
from fedkeep.flower import Keeper

MSE = nn.MSELoss(reduction="none")
EDGES = (-2.0, 2.0)


def new_context() -> Context:
    return Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})


def meter() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))


def readings(round_: int, n: int = 60, drift: float = 0.0) -> tuple[Any, Any]:
    rng = np.random.default_rng(round_)
    x = (rng.normal(size=(n, 5)) + drift).astype(np.float32)
    return x, x.sum(axis=1) + 0.1 * rng.normal(size=n)


def opened(context: Context, folder: Path, **options: Any) -> Keeper:
    return Keeper.open(context, meter, 24, loss=MSE, directory=str(folder), **options)


def trained(keeper: Keeper, model: nn.Module) -> None:
    x, y = zip(*keeper.samples(), strict=True)
    inputs, targets = torch.tensor(np.stack(x)), torch.tensor(y, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    keeper.correct(model, optimizer)
    for _ in range(8):
        optimizer.zero_grad()
        torch.autograd.backward(MSE(model(inputs), targets).mean())
        optimizer.step()
    keeper.records()


def r2(model: nn.Module) -> float:
    x, y = readings(999, 400)
    with torch.no_grad():
        off = model(torch.tensor(x)).numpy() - y
    return float(1 - (off**2).mean() / y.var())


def test_rounds_of_mean_squared_error_learn_and_survive_restarts(tmp_path: Path) -> None:
    context, model = new_context(), meter()
    for round_ in range(12):
        with opened(context, tmp_path, edges=EDGES) as keeper:
            # Each round has other readings: what is stored must be of all of them.
            keeper.offer(*readings(round_, drift=(-1.0, 0.0, 1.0)[round_ % 3]))
            keeper.sync(ArrayRecord(model.state_dict()))
            trained(keeper, model)
    assert r2(model) > 0.8
    kept = opened(context, tmp_path, edges=EDGES)
    samples = kept.samples()
    assert len(samples) == 24
    for x, y in samples:  # the target that stands beside each sample is its own
        assert y == pytest.approx(float(x.sum()), abs=0.6)
    intervals = np.digitize([y for _, y in samples], EDGES)
    assert kept.status().labels == {n: int((intervals == n).sum()) for n in range(3)}
    assert min(kept.status().labels.values()) >= 4, "slots are divided among the intervals"


def test_numbers_that_are_none_are_counted(tmp_path: Path) -> None:
    with opened(new_context(), tmp_path) as keeper:
        keeper.offer(np.zeros((3, 5), np.float32), np.array([1.0, np.nan, np.inf]))
        assert keeper.status().unsound == {"label": 2}
        assert keeper.status().stored == 1


def test_edges_go_with_one_number_and_a_loss(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give the loss= that you train with"):
        Keeper.open(new_context(), meter, 4, edges=EDGES)
    with pytest.raises(ConfigError, match="edges must be finite and ascend"):
        opened(new_context(), tmp_path, edges=(2.0, 1.0))
    with pytest.raises(ConfigError, match="edges divide one number a sample"):
        Keeper.open(new_context(), lambda: nn.Linear(5, 2), 4, loss=MSE, edges=EDGES).offer(
            np.zeros((2, 5), np.float32), np.zeros((2, 2))
        )
    context = new_context()
    with opened(context, tmp_path, edges=EDGES) as keeper:
        keeper.offer(*readings(0))
    with pytest.raises(ConfigError, match="3 intervals or classes, and edges make 2"):
        opened(context, tmp_path, edges=(0.0,))


def test_whole_numbers_are_no_classes_under_a_loss_of_ones_own(tmp_path: Path) -> None:
    with opened(new_context(), tmp_path) as keeper:
        keeper.offer(np.eye(5, dtype=np.float32), np.array([3, 90, 250, 7, 7]))
        assert sorted(y for _, y in keeper.samples()) == [3, 7, 7, 90, 250]
