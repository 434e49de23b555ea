"""Federated averaging in pfl-research, on samples from a file: `peers.py` runs it.

    python benchmarks/pfl_job.py SAMPLES.npz ROUNDS

Prints the seconds of each round, processor and wall time, as JSON. It needs pfl and torch alone, in
an environment of their own.
"""

import json
import sys
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import AbstractDataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel


class Softmax(torch.nn.Linear):
    """Softmax regression as pfl wants it, with its loss and what is measured."""

    def loss(self, x: torch.Tensor, y: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor, **_: Any) -> dict[str, Weighted]:
        with torch.no_grad():
            return {"loss": Weighted(self.loss(x, y).item() * len(y), len(y))}


class Clock(TrainingProcessCallback):
    """Notes when each round ends."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def after_central_iteration(
        self,
        aggregate_metrics: Metrics,  # noqa: ARG002
        model: Any,  # noqa: ARG002
        *,
        central_iteration: int,  # noqa: ARG002
    ) -> tuple[bool, Metrics]:
        self.ends.append((process_time(), perf_counter()))
        return False, Metrics()


def main(path: str, rounds: int) -> None:
    torch.set_num_threads(1)
    given = np.load(path)
    samples = {
        d: (torch.from_numpy(given[f"x{d}"]), torch.from_numpy(given[f"y{d}"]))
        for d in given["devices"]
    }

    def dataset_of(device: Any) -> AbstractDataset:
        return PyTorchTensorDataset(samples[device], user_id=str(device))

    users = FederatedDataset(dataset_of, get_user_sampler("random", list(samples)))
    x, _ = next(iter(samples.values()))
    network = Softmax(x.shape[1], int(given["classes"]))
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
    clock = Clock()
    FederatedAveraging().run(
        NNAlgorithmParams(rounds, 10**9, int(given["participants"]), 0),
        SimulatedBackend(users, users),
        model,
        NNTrainHyperParams(
            local_batch_size=None,
            local_num_epochs=int(given["epochs"]),
            local_learning_rate=float(given["rate"]),
        ),
        NNEvalHyperParams(local_batch_size=None),
        [clock],
        send_metrics_to_platform=False,
    )
    spent = np.diff(np.array(clock.ends), axis=0)
    print(json.dumps({"processor": spent[:, 0].tolist(), "wall": spent[:, 1].tolist()}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
