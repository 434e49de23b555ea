"""The task HAR: human activity from motion sensors, each person's device a natural client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedkeep.core.types import State
from fedkeep.data import geotec, harbox
from fedkeep.data.cache import Progress
from fedkeep.data.federation import Federation, ModelSpec, Ownership
from fedkeep.data.split import hold_out

_MODEL = ModelSpec("mlp", {"hidden": [100]})


@dataclass(frozen=True)
class Har:
    """900 features and five activities: GeoTec's 46 phones and watches, or HARBOX's 120 phones."""

    dataset: Literal["geotec", "harbox"] = "geotec"
    """Which recordings: GeoTec's are downloaded, HARBOX must be fetched by hand."""
    test_fraction: float = 0.1
    """HARBOX only; GeoTec is split by recording, because its windows overlap."""

    def __post_init__(self) -> None:
        if not 0 < self.test_fraction < 1:
            raise ValueError(f"test_fraction must be between 0 and 1, got {self.test_fraction}")

    def load(self, seed: int, progress: Progress | None = None) -> Federation:
        if self.dataset == "harbox":
            return harbox_federation(harbox.load_windows(), self.test_fraction, seed)
        x, y, device, tested, names = geotec.load_windows(progress)
        train = Ownership.from_assignment(np.where(tested, -1, device), len(names))
        test = Ownership.from_assignment(np.where(tested, device, -1), len(names))
        return Federation("har", x, y, train, test, geotec.LABELS, _MODEL, names, rounds_per_pass=10)


def harbox_federation(windows: State, test_fraction: float, seed: int) -> Federation:
    """HARBOX, each axis in standard deviations of the training windows: their units differ."""
    x, names = windows["x"], tuple(windows["names"].tolist())
    train, test = hold_out(Ownership.from_assignment(windows["device"], len(names)), test_fraction, seed)
    by_axis = x.reshape(len(x), harbox.ROWS, -1)
    known = by_axis[train.indices]
    centre, scale = known.mean(axis=(0, 1)), known.std(axis=(0, 1))
    scaled = ((by_axis - centre) / np.where(scale > 0, scale, 1)).astype(np.float32).reshape(x.shape)
    return Federation("har", scaled, windows["y"], train, test, harbox.LABELS, _MODEL, names, rounds_per_pass=10)
