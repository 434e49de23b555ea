"""The task HAR: human activity from motion sensors, each person's device a natural client.

GeoTec are recordings of phones and watches, CC BY 4.0 (Matey-Sanz et al., Data in Brief 2023).
HARBOX are activities of 121 people's phones, for users who download it (Ouyang et al., MobiSys
2021).
"""

import re
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from fedkeep.core.bounds import check_range
from fedkeep.core.errors import DataError
from fedkeep.core.types import AnyArray, BoolArray, FloatArray, IntArray, State
from fedkeep.data.cache import Progress, RemoteFile, find, obtain, remembered
from fedkeep.data.custom import standardised
from fedkeep.data.federation import Federation, ModelSpec, Ownership, hold_out

_MODEL = ModelSpec("mlp", {"hidden": [100]})
_ROUNDS_PER_PASS = 10

GEOTEC_LABELS = ("SEATED", "STANDING_UP", "WALKING", "TURNING", "SITTING_DOWN")
_STEPS, _STRIDE, _AXES = 150, 15, 6
_PURITY = 0.7
"""The share of one activity in a window that `balanced` keeps."""
Windows: TypeAlias = Literal["overlapping", "one-activity", "balanced"]
_TEST_EXECUTIONS = 2
_GRAVITY = 9.80665
_COMMIT = "1408d85a512a53861de7bc4729dee283fff2ea9d"
_RECORDING = re.compile(r"(s\d\d)_(\d\d)_(sp|sw)\.csv$")
GEOTEC = RemoteFile(
    "geotec-har",
    f"sp-sw-har-dataset-{_COMMIT[:7]}.zip",
    f"https://codeload.github.com/GeoTecINIT/sp-sw-har-dataset/zip/{_COMMIT}",
    "a54f19d65c257f6dcc89e52d73e72baae85069c141b0c33166b92c0c736f916e",
    of="zipped CSV files",
)
_PACKED_SUM = "bd536147e660ead8b109c73cb2b8ecaff256bccf637a7fb7ec95486e72ece334"
GEOTEC_PACKED = RemoteFile("geotec-har", "geotec_sp_sw_har_DATA.tar.xz", None, _PACKED_SUM)

HARBOX_LABELS = ("Call", "Hop", "typing", "Walk", "Wave")
ROWS, COLUMNS = 100, 10
LAST_USER = 120
"""The public loaders leave out user 121, and so did the paper."""
_ACTIVITY = re.compile(rf"(?:^|/)(\d+)/({'|'.join(HARBOX_LABELS)})_train\.txt$")
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
    windows: Windows = "overlapping"
    """GeoTec only: `overlapping` are all windows, by the label of most of their steps;
    `one-activity` those of a single activity, as windows of HARBOX are: a quarter of all, of which
    91 % are walking, since the others are shorter than a window; `balanced` those with 70 % of one
    activity at least, of each recording at most as many of an activity as of its median one."""
    labels_per_device: int = 5
    """Activities that a device keeps, one after the other from its own number on; its samples of
    the others are left out, for training and test."""

    def __post_init__(self) -> None:
        check_range(self, "test_fraction", above=0, below=1)
        check_range(self, "labels_per_device", least=1, most=len(GEOTEC_LABELS))

    def load(self, seed: int, progress: Progress | None = None) -> Federation:
        """Read the recordings and cut them into windows.

        Parameters
        ----------
        seed : int
            What HARBOX's split follows from.
        progress : callable, optional
            Called while a file is downloaded.

        Returns
        -------
        Federation
            A device for each person's phone or watch.
        """
        return with_labels(self._recorded(seed, progress), self.labels_per_device)

    def _recorded(self, seed: int, progress: Progress | None) -> Federation:
        if self.dataset == "harbox":
            path = obtain(HARBOX)
            return harbox_federation(
                remembered("harbox-1", lambda: read_harbox(path)), self.test_fraction, seed
            )
        archive = obtain(GEOTEC_PACKED if find(GEOTEC_PACKED) else GEOTEC, progress)
        rows = remembered("geotec-har-1", lambda: read_geotec(archive))
        return geotec_federation(rows, self.windows)


def with_labels(data: Federation, labels: int) -> Federation:
    """Leave to each device a few labels: those from its own number on.

    Parameters
    ----------
    data : Federation
        With the samples of all labels.
    labels : int
        How many labels a device keeps.

    Returns
    -------
    Federation
        The same for as many labels as there are; else without the devices that would have no
        sample for training.
    """
    if labels >= data.labels:
        return data
    kept = [
        own.where((data.y[own.indices] - own.owners) % data.labels < labels)
        for own in (data.train, data.test)
    ]
    able = kept[0].sizes > 0
    train, test = (
        replace(own, sizes=own.sizes[able]) for own in (w.where(able[w.owners]) for w in kept)
    )
    names = data.device_names and tuple(np.array(data.device_names)[able].tolist())
    return replace(data, train=train, test=test, device_names=names)


def geotec_federation(rows: State, windows: Windows = "overlapping") -> Federation:
    """Cut GeoTec into windows of 150 steps of six axes, time-major, one every 15 steps.

    Windows overlap, so the split is by recording: the last two of a device are its test set. Units
    are fixed ones that need no statistics of other people's data: acceleration in g, rotation in
    radians a second.

    Parameters
    ----------
    rows : State
        What `read_geotec` returns.
    windows : {"overlapping", "one-activity", "balanced"}
        Which windows, as in `Har.windows`; devices with none for training are left out.

    Returns
    -------
    Federation
        A device for each phone and watch.
    """
    recorded = [name.rpartition("/")[0] for name in rows["recordings"].tolist()]
    names, device = np.unique(recorded, return_inverse=True)
    later = np.append(device[_TEST_EXECUTIONS:], [-1] * _TEST_EXECUTIONS)
    starts = [np.arange(i, j - _STEPS + 1, _STRIDE) for i, j in pairwise(rows["offsets"])]
    inside = np.concatenate(starts)[:, None] + np.arange(_STEPS)
    x = rows["signals"][inside].reshape(len(inside), _STEPS * _AXES)
    known = rows["labels"][inside]
    steps = np.array([(known == label).sum(axis=1) for label in range(len(GEOTEC_LABELS))])
    y = np.argmax(steps, axis=0)
    counts = list(map(len, starts))
    owner, trained = np.repeat(device, counts), np.repeat(later == device, counts)
    kept = np.ones(len(y), dtype=bool)
    if windows != "overlapping":
        kept = steps.max(axis=0) >= (_STEPS if windows == "one-activity" else _PURITY * _STEPS)
        if windows == "balanced":
            kept = _balanced(kept, y, np.repeat(np.arange(len(counts)), counts))
        able = np.bincount(owner[kept & trained], minlength=len(names)) > 0
        kept &= able[owner]
        names, owner = names[able], (np.cumsum(able) - 1)[owner]
    train, test = (
        Ownership.from_assignment(np.where(kept & own, owner, -1), len(names))
        for own in (trained, ~trained)
    )
    return Federation(
        "har", x, y, train, test, GEOTEC_LABELS, _MODEL, tuple(names.tolist()), _ROUNDS_PER_PASS
    )


def _balanced(kept: BoolArray, y: IntArray, recording: IntArray) -> BoolArray:
    """Thin out each recording: of no activity more windows than of its median one, evenly spaced.

    A person walks most of a recording; without this walking is 62 % of the windows of 70 %
    purity, with it 30 %.
    """
    chosen = np.zeros_like(kept)
    for number in range(int(recording.max()) + 1):
        places = np.flatnonzero(kept & (recording == number))
        counts = np.bincount(y[places], minlength=len(GEOTEC_LABELS))
        if not len(places):
            continue
        most = int(np.median(counts[counts > 0]))
        for label in np.flatnonzero(counts).tolist():
            own = places[y[places] == label]
            evenly = np.linspace(0, len(own) - 1, min(most, len(own))).round().astype(np.int64)
            chosen[own[evenly]] = True
    return chosen


def read_geotec(archive: Path) -> State:
    """Read all recordings end to end, in the order of device and execution.

    Parameters
    ----------
    archive : Path
        GeoTec's zip, or the same files in a tar archive.

    Returns
    -------
    State
        The arrays recordings, offsets, signals and labels.
    """
    found = ((_RECORDING.search(name), content) for name, content in _members(archive))
    recordings = dict(
        sorted((f"{at[1]}_{at[3]}/{at[2]}", content.decode()) for at, content in found if at)
    )
    tables = [_recording(name, text) for name, text in recordings.items()]
    signals = np.concatenate([cells[:, :_AXES] for cells in tables]).astype(np.float32)
    signals[:, :3] /= _GRAVITY
    return {
        "recordings": np.array(list(recordings)),
        "offsets": np.concatenate([[0], np.cumsum([len(cells) for cells in tables])]),
        "signals": signals,
        "labels": np.concatenate([cells[:, -1] for cells in tables]).astype(np.int64),
    }


def _members(archive: Path) -> Iterator[tuple[str, bytes]]:
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as zipped:
            yield from ((name, zipped.read(name)) for name in zipped.namelist())
        return
    with tarfile.open(archive) as tar:
        yield from (
            (member.name, content.read()) for member in tar if (content := tar.extractfile(member))
        )


def _recording(name: str, text: str) -> FloatArray:
    for number, label in enumerate(GEOTEC_LABELS):
        text = text.replace(label, str(number))
    try:
        return np.loadtxt(text.splitlines()[1:], delimiter=",", ndmin=2)
    except ValueError as error:
        raise DataError(f"recording {name} of GeoTec cannot be read: {error}") from None


def harbox_federation(windows: State, test_fraction: float, seed: int) -> Federation:
    """Make the fleet of HARBOX's windows, each axis in standard deviations: their units differ.

    Parameters
    ----------
    windows : State
        What `read_harbox` returns.
    test_fraction : float
        Held out at random in each device.
    seed : int
        What the split follows from.

    Returns
    -------
    Federation
        A device for each user.
    """
    x, names = windows["x"], tuple(windows["names"].tolist())
    train, test = hold_out(
        Ownership.from_assignment(windows["device"], len(names)), test_fraction, seed
    )
    scaled = standardised(x.reshape(len(x), ROWS, -1), train.indices, axes=(0, 1)).reshape(x.shape)
    return Federation(
        "har", scaled, windows["y"], train, test, HARBOX_LABELS, _MODEL, names, _ROUNDS_PER_PASS
    )


def read_harbox(path: Path) -> State:
    """Read the windows in a zip of HARBOX's form: 100 rows of nine axes, time-major.

    Parameters
    ----------
    path : Path
        A zip with files like 1/Walk_train.txt, of ten columns: a clock and nine axes.

    Returns
    -------
    State
        The arrays x, in the axes' own units, y, device and names.

    Raises
    ------
    DataError
        If it is no such file.
    """
    with zipfile.ZipFile(path) as archive:
        found = [
            at
            for name in archive.namelist()
            if (at := _ACTIVITY.search(name)) and int(at[1]) <= LAST_USER
        ]
        members = sorted((int(at[1]), HARBOX_LABELS.index(at[2]), at.string) for at in found)
        windows = [_cut(archive.read(name).decode(), name) for _, _, name in members]
    if not members:
        raise DataError(
            f"{path} has no files like 1/Walk_train.txt for users 1 to {LAST_USER}: "
            "it is not HARBOX"
        )
    counts = [len(own) for own in windows]
    users, device = np.unique(
        np.repeat([user for user, _, _ in members], counts), return_inverse=True
    )
    labels = np.repeat([label for _, label, _ in members], counts)
    return {"x": np.concatenate(windows), "y": labels, "device": device, "names": users.astype(str)}


def _cut(text: str, member: str) -> AnyArray:
    try:
        rows = np.array(
            [line.split() for line in text.splitlines() if line.strip()], dtype=np.float64
        )
    except ValueError:
        raise DataError(f"{member} of HARBOX is not a table of numbers") from None
    if not len(rows):
        return np.empty((0, ROWS * (COLUMNS - 1)), dtype=np.float32)
    if rows.shape[1] != COLUMNS:
        raise DataError(f"{member} of HARBOX has {rows.shape[1]} columns, expected {COLUMNS}")
    whole = len(rows) // ROWS * ROWS
    return rows[:whole, 1:].reshape(-1, ROWS * (COLUMNS - 1)).astype(np.float32)
