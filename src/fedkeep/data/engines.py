"""The task c-mapss: jet engines run to failure, whose labels come strictly one after the other.

Turbofan Engine Degradation Simulation Data Set, FD001 (Saxena and Goebel, NASA Ames, 2008), public
domain. An engine is a device; a sample is a cycle with its settings and sensors.
"""

from dataclasses import dataclass

import numpy as np

from fedkeep.core.bounds import check_range
from fedkeep.core.types import AnyArray, IntArray
from fedkeep.data.cache import Progress, RemoteFile, obtain
from fedkeep.data.federation import Federation, ModelSpec, Ownership

_STILL = 1e-6
"""A sensor that varies by less than this share of its value does not change at all."""
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
    before they fail.

    References
    ----------
    Saxena, Goebel, Turbofan Engine Degradation Simulation Data Set, NASA Ames, 2008.
    """

    rounds_per_pass: int = 300
    """Rounds that the life of an engine takes."""

    def __post_init__(self) -> None:
        check_range(self, "rounds_per_pass", least=1)

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
            With softmax regression as its model.
        """
        with np.load(obtain(C_MAPSS, progress), allow_pickle=False) as file:
            content = {name: file[name] for name in ("x", "y", "device", "cycle", "test")}
        order = np.lexsort((content["cycle"], content["device"], content["test"]))
        x, y, device, test = (content[name][order] for name in ("x", "y", "device", "test"))
        engines = int(device.max())
        train, tested = (
            Ownership.from_assignment(
                np.where(test == part, device - 1, -1).astype(np.int64), engines
            )
            for part in (0, 1)
        )
        return Federation(
            "c-mapss",
            _standardised(x, train.indices),
            y.astype(np.int64),
            train,
            tested,
            STATES,
            ModelSpec("softmax"),
            tuple(f"engine {number + 1}" for number in range(engines)),
            self.rounds_per_pass,
        )


def _standardised(x: AnyArray, known: IntArray) -> AnyArray:
    """Each feature in standard deviations of the known cycles; sensors that never change are 0."""
    exact = x.astype(np.float64)
    mean, deviation = exact[known].mean(axis=0), exact[known].std(axis=0)
    changes = deviation > _STILL * (1 + np.abs(mean))
    scaled: AnyArray = np.where(changes, (exact - mean) / np.where(changes, deviation, 1), 0)
    return scaled.astype(np.float32)
