"""GeoTec's recordings of phones and watches, CC BY 4.0 (Matey-Sanz et al., Data in Brief 2023)."""

import re
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fedkeep.core.errors import DataError
from fedkeep.core.types import AnyArray, IntArray, State
from fedkeep.data.cache import Progress, RemoteFile, check, find, obtain, remembered

LABELS = ("SEATED", "STANDING_UP", "WALKING", "TURNING", "SITTING_DOWN")
STEPS, STRIDE, AXES = 150, 15, 6
_TEST_EXECUTIONS = 2
_GRAVITY = 9.80665
_COMMIT = "1408d85a512a53861de7bc4729dee283fff2ea9d"
_RECORDING = re.compile(r"(s\d\d)_(\d\d)_(sp|sw)\.csv$")

OFFICIAL = RemoteFile(
    "geotec-har",
    f"sp-sw-har-dataset-{_COMMIT[:7]}.zip",
    f"https://codeload.github.com/GeoTecINIT/sp-sw-har-dataset/zip/{_COMMIT}",
    "a54f19d65c257f6dcc89e52d73e72baae85069c141b0c33166b92c0c736f916e",
    of="zipped CSV files",
)
PACKED = RemoteFile(
    "geotec-har",
    "geotec_sp_sw_har_DATA.tar.xz",
    None,
    "bd536147e660ead8b109c73cb2b8ecaff256bccf637a7fb7ec95486e72ece334",
)


def load_windows(
    progress: Progress | None = None,
) -> tuple[AnyArray, IntArray, IntArray, IntArray, tuple[str, ...]]:
    """Windows (n, 900) with their labels, devices and whether they are for testing, and the devices' names.

    A window is 150 steps of six axes, time-major, every 15 steps, and has the label of most of its steps.
    Windows overlap, so the split is by recording: the last two of a device are its test set. Units are fixed
    ones that need no statistics of other people's data: acceleration in g, rotation in radians a second.
    """
    archive = _archive(progress)
    rows = remembered("geotec-har-1", lambda: _rows(archive))
    devices = [name.rpartition("/")[0] for name in rows["recordings"].tolist()]
    names = tuple(sorted(set(devices)))
    last = {name: sorted(n for n, d in enumerate(devices) if d == name)[-_TEST_EXECUTIONS:] for name in names}
    x, y, owner, tested = [], [], [], []
    for n, device in enumerate(devices):
        here = slice(rows["offsets"][n], rows["offsets"][n + 1])
        windows, labels = _windows(rows["signals"][here], rows["labels"][here])
        x.append(windows)
        y.append(labels)
        owner.append(np.full(len(labels), names.index(device)))
        tested.append(np.full(len(labels), int(n in last[device])))
    return np.concatenate(x), np.concatenate(y), np.concatenate(owner), np.concatenate(tested), names


def _archive(progress: Progress | None) -> Path:
    packed = find(PACKED)
    if packed is None:
        return obtain(OFFICIAL, progress)
    check(packed, PACKED)
    return packed


def _rows(archive: Path) -> State:
    """All recordings end to end, in the order of device and execution."""
    recordings = dict(sorted(_recordings(archive)))
    tables = [_table(name, text) for name, text in recordings.items()]
    return {
        "recordings": np.array(list(recordings)),
        "offsets": np.concatenate([[0], np.cumsum([len(labels) for _, labels in tables])]),
        "signals": np.concatenate([signals for signals, _ in tables]),
        "labels": np.concatenate([labels for _, labels in tables]),
    }


def _recordings(archive: Path) -> Iterator[tuple[str, str]]:
    """Every recording as "subject_kind/execution" and its CSV text."""
    for name, content in _members(archive):
        match = _RECORDING.search(name)
        if match:
            subject, execution, kind = match.groups()
            yield f"{subject}_{kind}/{execution}", content.decode()


def _members(archive: Path) -> Iterator[tuple[str, bytes]]:
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as zipped:
            for name in zipped.namelist():
                yield name, zipped.read(name)
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            content = tar.extractfile(member)
            if content is not None:
                yield member.name, content.read()


def _table(name: str, text: str) -> tuple[AnyArray, IntArray]:
    for number, label in enumerate(LABELS):
        text = text.replace(label, str(number))
    try:
        cells = np.loadtxt(text.splitlines()[1:], delimiter=",", ndmin=2)
    except ValueError as error:
        raise DataError(f"recording {name} of GeoTec cannot be read: {error}") from None
    signals = cells[:, :AXES].astype(np.float32)
    signals[:, :3] /= _GRAVITY
    return signals, cells[:, -1].astype(np.int64)


def _windows(signals: AnyArray, labels: IntArray) -> tuple[AnyArray, IntArray]:
    starts = np.arange(0, len(labels) - STEPS + 1, STRIDE)
    inside = starts[:, None] + np.arange(STEPS)
    counts = np.stack([(labels[inside] == label).sum(axis=1) for label in range(len(LABELS))], axis=1)
    return signals[inside].reshape(len(starts), STEPS * AXES), np.argmax(counts, axis=1)
