"""The tasks on their real files (FEDKEEP_DATA).

And on small files of the same form that the tests make.
"""

import gzip
import os
import zipfile
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedkeep.config.experiment import resolve
from fedkeep.core.errors import DataError
from fedkeep.core.types import AnyArray
from fedkeep.data import TASKS, Federation, Ownership, Stream, StreamOptions, fashion_mnist, har
from fedkeep.data.cache import RemoteFile, find, read_idx
from fedkeep.data.custom import AudioMnist, UjiIndoor, Westermo
from fedkeep.data.engines import C_MAPSS
from fedkeep.data.federation import ModelSpec
from fedkeep.data.har import (
    GEOTEC_PACKED,
    HARBOX,
    geotec_federation,
    harbox_federation,
    read_geotec,
    read_harbox,
    with_labels,
)
from fedkeep.data.shakespeare import SHAKESPEARE, Shakespeare
from fedkeep.data.traffic import IMAGES, LABEL_FILE, Traffic, mask_sessions
from fedkeep.sim.engine import Simulator


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def need(*files: RemoteFile) -> None:
    for file in files:
        if find(file) is None:
            where = os.environ.get("FEDKEEP_DATA", "unset")
            pytest.skip(f"{file.dataset}/{file.name} is not here (FEDKEEP_DATA is {where})")


def assert_whole(fleet: Federation) -> None:
    """What every federation must keep.

    Each sample with one owner and one purpose, all labels known.
    """
    used = np.concatenate([fleet.train.indices, fleet.test.indices])
    assert len(np.unique(used)) == len(used)
    assert fleet.x.dtype == np.float32
    assert np.isfinite(fleet.x).all()
    assert fleet.y.min() >= 0
    assert fleet.y.max() == fleet.labels - 1
    assert len(fleet.pooled_test) == fleet.test.offsets[-1]


def test_fashion_mnist_in_full() -> None:
    need(*fashion_mnist.FILES.values())
    fleet = TASKS["fashion-mnist"]().load(seed=0)
    assert_whole(fleet)
    assert (fleet.devices, fleet.labels, fleet.sample_shape) == (50, 10, (1, 28, 28))
    assert (len(fleet.train.indices), len(fleet.test.indices)) == (60_000, 10_000)
    assert fleet.train.indices.max() < 60_000 <= fleet.test.indices.min()
    for device in range(50):
        trained, tested = fleet.train_batch(device).y, fleet.test_batch(device).y
        assert set(trained) == set(tested)
        assert len(set(trained)) == 5
    assert 0 <= fleet.x.min() < fleet.x.max() == 1


def test_fashion_mnist_standardised_per_pixel() -> None:
    need(*fashion_mnist.FILES.values())
    fleet = TASKS["fashion-mnist"](pixels="standardised").load(seed=0)  # type: ignore[call-arg]
    plain = TASKS["fashion-mnist"]().load(seed=0)
    assert_whole(fleet)
    trained = fleet.x[:60_000].astype(np.float64)
    np.testing.assert_allclose(trained.mean(axis=0), 0, atol=1e-3)
    spread = trained.std(axis=0)
    assert spread.max() < 1
    assert np.median(spread) > 0.9999
    np.testing.assert_array_equal(fleet.train.indices, plain.train.indices)
    corner = fleet.x[:, 0, 14, 14].astype(np.float64)
    assert np.corrcoef(corner, plain.x[:, 0, 14, 14])[0, 1] == pytest.approx(1)


def test_test_samples_follow_the_labels_of_the_training_samples() -> None:
    y_train, y_test = np.arange(900) % 3, np.arange(90) % 3
    train = Ownership.from_assignment(np.where(y_train == 2, 1, (np.arange(900) % 9 < 6) * 1), 2)
    test = fashion_mnist.follow_labels(train, y_train, y_test, labels=3, seed=0)
    counts = [np.bincount(y_test[test.of(device)], minlength=3).tolist() for device in (0, 1)]
    assert counts == [[10, 10, 0], [20, 20, 30]]
    assert len(np.unique(test.indices)) == 90


def test_fashion_mnist_has_no_devices_of_its_own() -> None:
    with pytest.raises(ValueError, match="no devices of its own"):
        fashion_mnist.FashionMnist(partition={"name": "natural"})


def test_geotec_in_full() -> None:
    need(GEOTEC_PACKED)
    fleet = TASKS["har"]().load(seed=0)
    assert_whole(fleet)
    assert (fleet.devices, fleet.labels, fleet.sample_shape) == (46, 5, (900,))
    assert (len(fleet.train.indices), len(fleet.test.indices)) == (24_382, 6_182)
    assert fleet.device_name(0) == "s01_sp"
    gravity = np.linalg.norm(fleet.x.reshape(-1, 150, 6)[:, :, :3], axis=2).mean()
    assert 0.9 < gravity < 1.2
    again = TASKS["har"]().load(seed=1)
    np.testing.assert_array_equal(fleet.x, again.x)


def test_geotec_in_windows_of_one_activity() -> None:
    need(GEOTEC_PACKED)
    fleet, all_windows = (
        TASKS["har"](windows=windows).load(seed=0)  # type: ignore[call-arg]
        for windows in ("one-activity", "overlapping")
    )
    assert_whole(fleet)
    assert (fleet.devices, fleet.labels) == (46, 5)
    used = np.concatenate([fleet.train.indices, fleet.test.indices])
    assert len(used) == 7_297
    assert set(fleet.train.of(3)) < set(all_windows.train.of(3))
    assert set(fleet.test.of(3)) < set(all_windows.test.of(3))


def test_geotec_in_balanced_windows() -> None:
    need(GEOTEC_PACKED)
    fleet = TASKS["har"](windows="balanced").load(seed=0)  # type: ignore[call-arg]
    assert_whole(fleet)
    used = np.concatenate([fleet.train.indices, fleet.test.indices])
    assert (fleet.devices, len(used)) == (46, 9_501)
    shares = np.bincount(fleet.y[used], minlength=5) / len(used)
    np.testing.assert_allclose(shares, [0.058, 0.174, 0.305, 0.258, 0.205], atol=0.001)


def test_balanced_windows_of_a_recording_are_spread_and_no_more_than_of_its_median_activity() -> (
    None
):
    """600 steps of walking, then 165 of turning and 180 of sitting down, in three recordings."""
    labels = np.repeat([2, 3, 4], [600, 165, 180])
    rows = {
        "recordings": np.array([f"s01_sp/0{e}" for e in (1, 2, 3)]),
        "offsets": len(labels) * np.arange(4),
        "signals": np.zeros((3 * len(labels), 6), dtype=np.float32),
        "labels": np.tile(labels, 3),
    }
    fleet = geotec_federation(rows, "balanced")
    first = fleet.train.of(0)
    starts = 15 * first
    pure = np.array([max(np.bincount(labels[s : s + 150])) / 150 for s in starts])
    assert (pure >= 0.7).all()
    counts = np.bincount(fleet.y[first], minlength=5)
    possible = [
        sum(
            np.bincount(labels[s : s + 150], minlength=5)[label] >= 105
            for s in range(0, len(labels) - 149, 15)
        )
        for label in (2, 3, 4)
    ]
    assert counts[2:].tolist() == [min(n, int(np.median(possible))) for n in possible]
    walked = np.sort(starts[fleet.y[first] == 2])
    assert walked[0] == 0, "evenly over the whole walk"
    assert walked[-1] >= 450


def test_a_window_of_two_activities_is_left_out_and_so_is_a_device_without_any() -> None:
    """Two devices of three executions: one changes its activity in the middle of each."""
    steps = 151
    half = np.repeat([2, 3], [75, 76])
    rows = {
        "recordings": np.array([f"s0{d}_sp/0{e}" for d in (1, 2) for e in (1, 2, 3)]),
        "offsets": steps * np.arange(7),
        "signals": np.zeros((6 * steps, 6), dtype=np.float32),
        "labels": np.concatenate([np.full(3 * steps, 4), half, half, half]),
    }
    whole, pure = geotec_federation(rows), geotec_federation(rows, "one-activity")
    assert (whole.devices, whole.train.sizes.tolist()) == (2, [1, 1])
    assert pure.device_names == ("s01_sp",)
    assert (pure.train.sizes.tolist(), pure.test.sizes.tolist()) == ([1], [2])
    assert set(pure.y[pure.train.indices]) == {4}


def test_geotec_is_read_from_the_official_zip_as_from_the_packed_file(tmp_path: Path) -> None:
    text = (
        "x_acc,y_acc,z_acc,x_gyro,y_gyro,z_gyro,timestamp,label\n"
        + "9.80665,0,0,1,2,3,5,TURNING\n" * 165
    )
    with zipfile.ZipFile(tmp_path / "geo.zip", "w") as archive:
        for execution in (3, 2, 1):
            archive.writestr(f"top/DATA/s01/s01_0{execution}_sw.csv", text)
        archive.writestr("top/DATA/subjects_info.csv", "a,b\n")
    rows = read_geotec(tmp_path / "geo.zip")
    assert rows["recordings"].tolist() == ["s01_sw/01", "s01_sw/02", "s01_sw/03"]
    assert rows["offsets"].tolist() == [0, 165, 330, 495]
    np.testing.assert_allclose(rows["signals"][0], [1, 0, 0, 1, 2, 3])
    fleet = geotec_federation(rows)
    assert fleet.x.shape == (6, 900)
    assert fleet.y.tolist() == [3] * 6
    assert (fleet.train.of(0).tolist(), fleet.test.of(0).tolist()) == ([0, 1], [2, 3, 4, 5])


def harbox_zip(path: Path, rows: int = 250, columns: int = 10) -> Path:
    rng = np.random.default_rng(0)
    with zipfile.ZipFile(path, "w") as archive:
        for user, activity in [
            (1, "Call"),
            (1, "Walk"),
            (2, "typing"),
            (10, "Hop"),
            (10, "Wave"),
            (121, "Walk"),
        ]:
            table = np.column_stack(
                [np.arange(rows) + 1.5e12, rng.normal(user, 1, (rows, columns - 1))]
            )
            text = "\n".join(" ".join(map(repr, row)) for row in table.tolist())
            archive.writestr(f"large_scale_HARBox/{user}/{activity}_train.txt", text)
        archive.writestr("large_scale_HARBox/readme.txt", "hello")
    return path


def test_harbox_from_a_file_of_its_form(tmp_path: Path) -> None:
    windows = read_harbox(harbox_zip(tmp_path / "h.zip"))
    assert windows["x"].shape == (10, 900)
    assert windows["names"].tolist() == ["1", "2", "10"]
    assert windows["y"].tolist() == [0, 0, 3, 3, 2, 2, 1, 1, 4, 4]
    assert windows["device"].tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 2, 2]
    fleet = harbox_federation(windows, 0.1, seed=0)
    assert fleet.devices == 3
    assert fleet.test.sizes.tolist() == [1, 1, 1]
    known = fleet.x[fleet.train.indices].reshape(-1, 100, 9)
    np.testing.assert_allclose(known.mean(axis=(0, 1)), 0, atol=1e-5)
    np.testing.assert_allclose(known.std(axis=(0, 1)), 1, atol=1e-5)


def test_harbox_trains_from_a_file_of_its_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name in an experiment: 120 phones, each without one activity."""
    rng = np.random.default_rng(1)
    path = tmp_path / HARBOX.name
    with zipfile.ZipFile(path, "w") as archive:
        for user in range(1, 122):
            for label, activity in enumerate(har.HARBOX_LABELS):
                if (user + label) % 5 == 0:
                    continue
                clock = 1.5e12 + 20 * np.arange(330)
                axes = np.round(
                    rng.normal(label, 1, (330, 9)) * [9.8, 9.8, 9.8, *[1] * 3, *[50] * 3], 4
                )
                lines = (
                    f"{int(at)} " + " ".join(map(str, row))
                    for at, row in zip(clock, axes.tolist(), strict=True)
                )
                archive.writestr(
                    f"large_scale_HARBox/{user}/{activity}_train.txt", "\n".join(lines)
                )
    known = replace(HARBOX, checksum=sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(har, "HARBOX", known)
    monkeypatch.setenv("FEDKEEP_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    table = {
        "task": {"name": "har", "dataset": "harbox"},
        "preset": "paper",
        "policy": {"name": "ode"},
        "coordinator": {"unassigned": "fill"},
        "stream": {"rounds_per_pass": 50},
        "storage": {"capacity": 5},
        "train": {"rounds": 40, "participation": 0.2, "learning_rate": 0.05},
        "record": {"every": 40},
    }
    simulator = Simulator(resolve(table))
    (*_, last) = simulator.run()
    data = simulator.parts.data
    assert (data.devices, data.labels, data.sample_shape) == (120, 5, (900,))
    assert len(data.y) == 120 * 4 * 3
    assert last.evaluation is not None
    assert last.evaluation.accuracy > 0.5


def test_harbox_windows_are_consecutive_rows_without_the_clock(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "h.zip", "w") as archive:
        rows = [" ".join(map(str, [1500000000000 + n, *range(n, n + 9)])) for n in range(199)]
        archive.writestr("7/Hop_train.txt", "\n".join(rows) + "\n\n")
    x = read_harbox(tmp_path / "h.zip")["x"]
    assert x.shape == (1, 900)
    np.testing.assert_array_equal(x.reshape(100, 9), np.arange(100)[:, None] + np.arange(9))


@pytest.mark.parametrize(("columns", "message"), [(9, "has 9 columns, expected 10")])
def test_a_damaged_harbox_is_refused(columns: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        read_harbox(harbox_zip(tmp_path / "h.zip", columns=columns))
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(DataError, match="is not HARBOX"):
        read_harbox(tmp_path / "other.zip")


def test_harbox_must_be_fetched_by_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find(HARBOX) is not None:
        pytest.skip("HARBOX is here")
    with pytest.raises(DataError, match="xmouyang/FL-Datasets-for-HAR"):
        TASKS["har"](dataset="harbox").load(seed=0)  # type: ignore[call-arg]
    monkeypatch.setenv("FEDKEEP_DATA", str(tmp_path))
    harbox_zip(tmp_path / HARBOX.name)
    with pytest.raises(DataError, match=f"expected {HARBOX.checksum}"):
        TASKS["har"](dataset="harbox").load(seed=0)  # type: ignore[call-arg]


def in_whole_numbers(flows: AnyArray) -> AnyArray:
    """Bytes, directions and hundredths of a gap: the same on every processor."""
    whole: AnyArray = np.rint(flows * np.array([[400], [1], [85]])).astype(np.int16)
    return whole


def test_the_generated_traffic_is_frozen() -> None:
    fleet = TASKS["traffic"]().load(seed=0)
    assert_whole(fleet)
    assert (fleet.devices, fleet.labels, fleet.sample_shape) == (30, 20, (3, 64))
    assert len(fleet.y) == 37_853
    assert sha256(fleet.y.astype(np.uint8).tobytes()).hexdigest()[:16] == "1988f71bd10bb869"
    assert sha256(in_whole_numbers(fleet.x).tobytes()).hexdigest()[:16] == "fdc233e2bc1ff3af"


def test_the_generated_traffic_is_what_it_claims() -> None:
    fleet = Traffic().load(seed=0)
    counts = np.bincount(fleet.y)
    assert counts.max() > 8 * counts.min()
    assert (fleet.label_counts > 0).sum(axis=1).tolist() == [15] * 30
    size, direction, gap = fleet.x[:, 0], fleet.x[:, 1], fleet.x[:, 2]
    assert set(np.unique(direction)) == {-1.0, 1.0}
    for channel in (size, direction, gap):
        assert abs(channel.mean()) < 0.3
        assert 0.8 < channel.std() < 1.3
    np.testing.assert_allclose((size + 1).min() * 400, 40, rtol=1e-5)
    np.testing.assert_allclose((size + 1).max() * 400, 1500, rtol=1e-5)
    assert 0.15 < (direction == 1).mean() < 0.85
    bytes_down, bytes_up = ((size + 1) * (direction == d) for d in (-1, 1))
    assert bytes_down.sum() > 1.4 * bytes_up.sum()
    assert fleet.label_names[:5] == ("video-1", "game-1", "download-1", "messaging-1", "video-2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"applications_per_device": 21},
            "applications_per_device must be between 1 and 20, got 21",
        ),
        ({"samples": 10}, "samples must be 900 or more"),
        ({"test_fraction": 0.0}, "test_fraction"),
        ({"partition": {"name": "natural"}}, "no devices of its own"),
    ],
)
def test_wrong_options_of_traffic_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Traffic(**options)


def test_ustc_in_full() -> None:
    need(IMAGES, LABEL_FILE)
    fleet = Traffic(dataset="ustc").load(seed=0)
    assert_whole(fleet)
    assert (fleet.devices, fleet.labels, fleet.sample_shape) == (30, 10, (1, 28, 28))
    assert len(fleet.y) == 7_100
    assert fleet.model.name == "lenet"
    raw = read_idx(find(IMAGES) or Path()).reshape(-1, 784)
    masked = (fleet.x.reshape(-1, 784) * 255).round().astype(np.uint8)
    assert (masked[:, :32] == 0).all()
    assert ((masked == raw) | (masked == 0)).all()
    assert (masked[:, 40:52] == 0).all()
    kept = (masked == raw).mean()
    assert 0.8 < kept < 0.97


def ipv4(protocol: int, segment: list[int]) -> list[int]:
    header = [
        0x45,
        9,
        *divmod(20 + len(segment), 256),
        1,
        2,
        0x40,
        0,
        64,
        protocol,
        3,
        4,
        10,
        0,
        0,
        1,
        10,
        0,
        0,
        2,
    ]
    return [9] * 12 + [8, 0] + header + segment


def session(*frames: list[int]) -> AnyArray:
    """Frames as the first 784 bytes of a big-endian pcap file."""
    content = [0xA1, 0xB2, 0xC3, 0xD4] + [5] * 20
    for frame in frames:
        content += [7] * 8 + [0, 0, *divmod(len(frame), 256)] * 2 + frame
    return np.array(content + [0] * (784 - len(content)), dtype=np.uint8)[:784]


def test_masking_of_tcp_and_udp_byte_by_byte() -> None:
    options = [1, 1, 8, 10, *[6] * 8]
    tcp = ipv4(6, [*range(1, 13), 0x80, 0x18, 50, 51, 60, 61, 0, 0, *options, 77, 78])
    udp = ipv4(17, [1, 2, 3, 4, 0, 10, 5, 6, 88, 89])
    masked = mask_sessions(session(tcp, udp)[None])[0].tolist()
    assert masked[:24] == [0] * 24
    assert masked[24:32] == [0] * 8
    frame = masked[40 : 40 + len(tcp)]
    assert frame[:14] == [0] * 12 + [8, 0]
    assert frame[14:34] == [0x45, 9, 0, tcp[17], 0, 0, 0x40, 0, 64, 6, *[0] * 10]
    assert frame[34:54] == [*[0] * 12, 0x80, 0x18, 50, 51, 0, 0, 0, 0]
    assert frame[54:] == [1, 1, 8, 10, *[0] * 8, 77, 78]
    second = masked[40 + len(tcp) + 16 :][: len(udp)]
    assert second[34:] == [0, 0, 0, 0, 0, 10, 0, 0, 88, 89]


@pytest.mark.parametrize("length", [24, 29, 33, 41, 52, 54, 60, 76, 90, 93, 95, 100])
def test_masking_survives_sessions_that_end_anywhere(length: int) -> None:
    options = [8, 10, *[6] * 8, 0, 0]
    full = session(ipv4(6, [*[1] * 12, 0x80, 0x18, *[1] * 6, *options, *[1] * 700]))
    whole, cut = (mask_sessions(part[None])[0] for part in (full, full[:length]))
    known = slice(0, min(length, 74))
    np.testing.assert_array_equal(cut[known], whole[known])


@pytest.mark.parametrize(
    "content", [b"", b"\0\0\x0d\x01" + b"\0" * 8, b"\0\0\x08\x01\0\0\0\x09abc"]
)
def test_a_file_that_is_no_idx_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(content))
    with pytest.raises(DataError):
        read_idx(tmp_path / "a.gz")


@pytest.mark.parametrize(
    ("file", "devices", "labels", "train", "test"),
    [
        (AudioMnist.file, 60, 10, 24_000, 6_000),
        (Westermo.file, 31, 8, 37_336, 11_321),
        (UjiIndoor.file, 29, 13, 16_291, 4_120),
    ],
    ids=lambda value: value.dataset if isinstance(value, RemoteFile) else None,
)
def test_prepared_sets_in_full(
    file: RemoteFile, devices: int, labels: int, train: int, test: int
) -> None:
    need(file)
    fleet = TASKS[file.dataset]().load(seed=0)
    assert_whole(fleet)
    assert (fleet.devices, fleet.labels) == (devices, labels)
    assert (len(fleet.train.indices), len(fleet.test.indices)) == (train, test)


def test_engines_go_through_their_states_one_after_the_other() -> None:
    need(C_MAPSS)
    fleet = TASKS["c-mapss"]().load(seed=0)
    assert_whole(fleet)
    assert (fleet.devices, fleet.labels, fleet.sample_shape) == (100, 4, (21,))
    assert (len(fleet.train.indices), len(fleet.test.indices)) == (20_631, 13_096)
    for device in range(100):
        states = fleet.y[fleet.train.of(device)]
        assert (np.diff(states) >= 0).all()
        assert states[-1] == 3
    stream = Stream(fleet, StreamOptions(shuffle=False), seed=0)
    assert set(stream.arrivals(0, 290, 300).y) == {3}
    np.testing.assert_allclose(fleet.x[fleet.train.indices].mean(axis=0), 0, atol=1e-3)


def test_shakespeare_labels_are_the_next_character() -> None:
    need(SHAKESPEARE)
    fleet = Shakespeare(most=50).load(seed=0)
    assert_whole(fleet)
    assert (fleet.devices, fleet.labels, fleet.sample_shape) == (82, 36, (16,))
    assert fleet.train.sizes.tolist() == [50] * 82
    assert fleet.test.sizes.tolist() == [5] * 82
    first, second = fleet.train_batch(7).x[:2]
    np.testing.assert_array_equal(first[1:], second[:-1])
    assert fleet.train_batch(7).y[0] == second[-1]
    hot = Shakespeare(most=50, form="one-hot").load(seed=0)
    np.testing.assert_array_equal(hot.x.argmax(axis=-1), fleet.x)
    assert (hot.x.sum(axis=-1) == 1).all()
    np.testing.assert_array_equal(hot.y, fleet.y)
    whole = Shakespeare(most=None).load(seed=0)
    assert len(whole.y) == 808_564


@pytest.mark.parametrize("file", [Westermo.file, UjiIndoor.file], ids=lambda file: file.dataset)
def test_an_unshuffled_stream_of_a_prepared_set_follows_the_clock(file: RemoteFile) -> None:
    need(file)
    path = find(file)
    assert path is not None
    with np.load(path) as arrays:
        time = arrays["time"]
    fleet = TASKS[file.dataset]().load(seed=0)
    stream = Stream(fleet, StreamOptions(shuffle=False), seed=0)
    for device in range(fleet.devices):
        assert (np.diff(time[stream.arrivals(device, 0, 100).ids]) >= 0).all()


def test_a_prepared_set_that_is_absent_is_reported_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDKEEP_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"westermo\.npz is not here .* FEDKEEP_DATA"):
        TASKS["westermo"]().load(seed=0)


def test_a_device_keeps_labels_from_its_own_number_on_and_none_is_left_empty() -> None:
    y = np.array([0, 1, 2, 0, 1, 2, 0, 0, 1])
    owners = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2])
    everything = Ownership.from_assignment(owners, 3)
    fleet = Federation(
        "har",
        np.zeros((9, 1), dtype=np.float32),
        y,
        everything,
        everything,
        ("a", "b", "c"),
        ModelSpec("softmax"),
        ("left", "middle", "right"),
    )
    assert with_labels(fleet, 3) is fleet
    one = with_labels(fleet, 1)
    assert one.device_names == ("left", "middle"), "the last one has no sample of label 2"
    assert [one.train.of(d).tolist() for d in range(one.devices)] == [[0], [4]]
    assert [one.test.of(d).tolist() for d in range(one.devices)] == [[0], [4]]
    two = with_labels(fleet, 2)
    assert [two.train.of(d).tolist() for d in range(two.devices)] == [[0, 1], [4, 5], [6, 7]]
