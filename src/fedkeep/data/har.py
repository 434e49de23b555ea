"""The task HAR: human activity from motion sensors, each person's device a natural client.

HARBOX are activities of 121 people's phones, for users who download it (Ouyang et al., MobiSys 2021).
"""

import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np

from fedkeep.core.bounds import within
from fedkeep.core.errors import DataError
from fedkeep.core.types import AnyArray, State
from fedkeep.data import geotec
from fedkeep.data.cache import Progress, RemoteFile, obtain, remembered
from fedkeep.data.federation import Federation, ModelSpec, Ownership, hold_out
from fedkeep.data.own import standardised

_MODEL = ModelSpec("mlp", {"hidden": [100]})
HARBOX_LABELS = ("Call", "Hop", "typing", "Walk", "Wave")
ROWS, COLUMNS = 100, 10
LAST_USER = 120
"""The public loaders leave out user 121, and so did the paper."""
_ENDING = "_train.txt"

HARBOX = RemoteFile(
    "harbox",
    "large_scale_HARBox.zip",
    None,
    "4fdf91e26f698e2b5e349be2af08fb41a5ccd86e2254b4bd3b81eaf77959d12f",
    how="download large_scale_HARBox.zip by the link at github.com/xmouyang/FL-Datasets-for-HAR",
)


@dataclass(frozen=True)
class Har:
    """900 features and five activities: GeoTec's 46 phones and watches, or HARBOX's 120 phones."""

    dataset: Literal["geotec", "harbox"] = "geotec"
    """Which recordings: GeoTec's are downloaded, HARBOX must be fetched by hand."""
    test_fraction: float = 0.1
    """HARBOX only; GeoTec is split by recording, because its windows overlap."""

    def __post_init__(self) -> None:
        within(self, "test_fraction", above=0, below=1)

    def load(self, seed: int, progress: Progress | None = None) -> Federation:
        if self.dataset == "harbox":
            path = obtain(HARBOX)
            windows = remembered("harbox-1", lambda: read_harbox(path))
            return harbox_federation(windows, self.test_fraction, seed)
        x, y, device, tested, names = geotec.load_windows(progress)
        train = Ownership.from_assignment(np.where(tested, -1, device), len(names))
        test = Ownership.from_assignment(np.where(tested, device, -1), len(names))
        return Federation("har", x, y, train, test, geotec.LABELS, _MODEL, names, rounds_per_pass=10)


def harbox_federation(windows: State, test_fraction: float, seed: int) -> Federation:
    """HARBOX, each axis in standard deviations of the training windows: their units differ."""
    x, names = windows["x"], tuple(windows["names"].tolist())
    train, test = hold_out(Ownership.from_assignment(windows["device"], len(names)), test_fraction, seed)
    scaled = standardised(x.reshape(len(x), ROWS, -1), train.indices, axes=(0, 1)).reshape(x.shape)
    return Federation("har", scaled, windows["y"], train, test, HARBOX_LABELS, _MODEL, names, rounds_per_pass=10)


def read_harbox(path: Path) -> State:
    """The windows in a zip of HARBOX's form: 100 rows of nine axes, time-major, in the axes' own units."""
    x, y, users = [], [], []
    with zipfile.ZipFile(path) as archive:
        for user, label, member in _members(archive):
            windows = _windows(archive.read(member).decode(), member)
            x.append(windows)
            y.append(np.full(len(windows), label, dtype=np.int64))
            users.append(np.full(len(windows), user, dtype=np.int64))
    if not x:
        raise DataError(f"{path} has no files like 1/Walk{_ENDING} for users 1 to {LAST_USER}: it is not HARBOX")
    numbers, device = np.unique(np.concatenate(users), return_inverse=True)
    return {
        "x": np.concatenate(x),
        "y": np.concatenate(y),
        "device": device.astype(np.int64),
        "names": numbers.astype(str),
    }


def _members(archive: zipfile.ZipFile) -> Iterator[tuple[int, int, str]]:
    """User, label and name of every file of activity, in the order of users; a user may lack some."""
    found = []
    for member in archive.namelist():
        path = PurePosixPath(member)
        activity = path.name.removesuffix(_ENDING)
        if path.name.endswith(_ENDING) and activity in HARBOX_LABELS and path.parent.name.isdecimal():
            found.append((int(path.parent.name), HARBOX_LABELS.index(activity), member))
    return iter(sorted(entry for entry in found if entry[0] <= LAST_USER))


def _windows(text: str, member: str) -> AnyArray:
    try:
        rows = np.array([line.split() for line in text.splitlines() if line.strip()], dtype=np.float64)
    except ValueError:
        raise DataError(f"{member} of HARBOX is not a table of numbers") from None
    if not len(rows):
        return np.empty((0, ROWS * (COLUMNS - 1)), dtype=np.float32)
    if rows.shape[1] != COLUMNS:
        raise DataError(f"{member} of HARBOX has {rows.shape[1]} columns, expected {COLUMNS}")
    whole = len(rows) // ROWS * ROWS
    return rows[:whole, 1:].reshape(-1, ROWS * (COLUMNS - 1)).astype(np.float32)
