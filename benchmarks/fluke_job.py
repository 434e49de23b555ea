"""Federated averaging in fluke, on samples from a file: `peers.py` runs it.

    python benchmarks/fluke_job.py SAMPLES.npz ROUNDS

Prints the seconds of each round, processor and wall time, as JSON. It needs fluke-fl and torch
alone, in an environment of their own. Nothing is evaluated.
"""

import json
import sys
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.data import FastDataLoader
from fluke.evaluation import ClassificationEval
from fluke.utils import ServerObserver


class Softmax(torch.nn.Linear):
    """Softmax regression."""


class Given:
    """Hands every device the samples that the file has for it."""

    def __init__(self, given: Any) -> None:
        self._given = given

    def assign(self, devices: int, batch_size: int) -> tuple[Any, None]:
        del batch_size
        loaders = [self._loader(d) for d in range(devices)]
        return (loaders, [None] * devices), None

    def _loader(self, device: int) -> FastDataLoader:
        x, y = (torch.from_numpy(self._given[f"{name}{device}"]) for name in "xy")
        return FastDataLoader(
            x, y, num_labels=int(self._given["classes"]), batch_size=len(y), shuffle=False
        )


class Clock(ServerObserver):  # type: ignore[misc] # fluke is not installed where types are checked
    """Notes when each round ends."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def end_round(self, round: int) -> None:  # noqa: A002, ARG002 - fluke's name
        self.ends.append((process_time(), perf_counter()))


def main(path: str, rounds: int) -> None:
    torch.set_num_threads(1)
    given = np.load(path)
    environment = FlukeENV()
    environment.set_seed(0)
    environment.set_evaluator(ClassificationEval(1, int(given["classes"])))
    environment.set_eval_cfg(server=False, locals=False, pre_fit=False, post_fit=False)
    devices = len(given["devices"])
    options = DDict(
        model=Softmax(given["x0"].shape[1], int(given["classes"])),
        client=DDict(
            batch_size=10,
            local_epochs=int(given["epochs"]),
            loss="CrossEntropyLoss",
            optimizer=DDict(name="SGD", lr=float(given["rate"])),
            scheduler=DDict(name="StepLR", gamma=1.0, step_size=1),
        ),
        server=DDict(weighted=True),
    )
    algorithm = FedAVG(devices, Given(given), options)
    clock = Clock()
    algorithm.set_callbacks(clock)
    algorithm.attach(clock)
    algorithm.run(rounds, int(given["participants"]) / devices)
    spent = np.diff(np.array(clock.ends), axis=0)
    print(json.dumps({"processor": spent[:, 0].tolist(), "wall": spent[:, 1].tolist()}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
