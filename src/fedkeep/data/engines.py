"""The task c-mapss: jet engines run to failure, whose labels come strictly in order.

Turbofan Engine Degradation Simulation Data Set, FD001 (Saxena and Goebel, NASA Ames, 2008), public
domain. An engine is a device; a sample is a cycle with its settings and sensors.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fedkeep.core.bounds import check_range
from fedkeep.core.targets import NumberTargets
from fedkeep.core.types import AnyArray, IntArray
from fedkeep.data.cache import Progress, RemoteFile, obtain
from fedkeep.data.federation import Federation, ModelSpec, Ownership

_STILL = 1e-6
"""A sensor that varies by less than this share of its value does not change at all."""
_ARRAYS = ("x", "y", "rul", "device", "test", "cycle")
STATES = ("more than 125 cycles left", "76 to 125", "31 to 75", "30 or fewer")
"""Health states, in the order in which every engine goes through them."""
C_MAPSS = RemoteFile(
    "c-mapss",
    "c_mapss_fd001.npz",
    None,
    "fe0278bcb4c10be0f31ea9136dd847074fabbc125814ab6c7ce1cea30f219c02",
    how="make it from FD001 of NASA's CMAPSSData.zip as docs/paper-map.md says, or name a folder "
    "that has it in FEDKEEP_DATA",
)


@dataclass(frozen=True)
class CMapss:
    """A hundred engines, 21 features, four states of health, in time order from healthy to failure.

    Keep the order with `stream = { shuffle = false }`. The test set is other engines, which stop
    before they fail. With `target = "number"` the cycles that are left are predicted, at most `cap`
    of them, as is usual since Heimes.

    References
    ----------
    Heimes, Recurrent Neural Networks for Remaining Useful Life Estimation, PHM 2008.
    Saxena, Goebel, Turbofan Engine Degradation Simulation Data Set, NASA Ames, 2008.
    """

    rounds_per_pass: int = 300
    """Rounds that the life of an engine takes."""
    target: Literal["class", "number"] = "class"
    """What is predicted: `class` is the state of health, `number` the cycles that are left."""
    cap: float = 125.0
    """The most cycles that a target says are left: before an engine wears, nothing tells."""
    edges: tuple[float, ...] = (31.0, 76.0, 125.0)
    """Where one region of the cycles left ends and the next begins; empty: one region."""

    def __post_init__(self) -> None:
        check_range(self, "rounds_per_pass", least=1)
        check_range(self, "cap", above=0)
        if self.target not in ("class", "number"):
            raise ValueError(f'target must be "class" or "number", got {self.target!r}')
        NumberTargets(self.edges)

    def load(self, seed: int, progress: Progress | None = None) -> Federation:  # noqa: ARG002
        """Read the engines, features in standard deviations of the training cycles.

        Parameters
        ----------
        seed : int
            Not used: devices and split are the data's own.
        progress : callable, optional
            Called while a file is downloaded.

        Returns
        -------
        Federation
            With softmax regression as its model; with a small network for the cycles left.
        """
        with np.load(obtain(C_MAPSS, progress), allow_pickle=False) as file:
            content = {name: file[name] for name in _ARRAYS}
        order = np.lexsort((content["cycle"], content["device"], content["test"]))
        x, y, left, device, test = (content[name][order] for name in _ARRAYS[:5])
        engines = int(device.max())
        train, tested = (
            Ownership.from_assignment(
                np.where(test == part, device - 1, -1).astype(np.int64), engines
            )
            for part in (0, 1)
        )
        names = tuple(f"engine {number + 1}" for number in range(engines))
        found = Federation(
            "c-mapss", _standardised(x, train.indices), y.astype(np.int64), train, tested, STATES,
            ModelSpec("softmax"), names, self.rounds_per_pass,
        )  # fmt: skip
        if self.target == "class":
            return found
        targets = NumberTargets(self.edges)
        cycles = np.minimum(left.astype(np.float64), self.cap)
        # The middle and a third of the range: known without data, so that every fleet has the same.
        model = ModelSpec("mlp", {"centre": self.cap / 2, "scale": self.cap / 3})
        return replace(found, y=cycles, label_names=targets.names, model=model, targets=targets)


def _standardised(x: AnyArray, known: IntArray) -> AnyArray:
    """Each feature in standard deviations of the known cycles; sensors that never change are 0."""
    exact = x.astype(np.float64)
    mean, deviation = exact[known].mean(axis=0), exact[known].std(axis=0)
    changes = deviation > _STILL * (1 + np.abs(mean))
    scaled: AnyArray = np.where(changes, (exact - mean) / np.where(changes, deviation, 1), 0)
    return scaled.astype(np.float32)
