"""A user's own data: every form, and a helpful sentence for every way to get it wrong."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedkeep.core.errors import ConfigError, DataError, FedkeepError, MissingExtraError
from fedkeep.data.custom import Custom

HEADER = "device,label,height,weight\n"
ROWS = [
    ("kitchen", "cat", 1.0, 2.0),
    ("kitchen", "dog", 3.0, 4.0),
    ("hall", "cat", 5.0, 6.0),
    ("hall", "ant", 7.0, 9.0),
]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def write_csv(rows: list[str], header: str = HEADER) -> str:
    Path("mine.csv").write_text(header + "\n".join(rows) + "\n")
    return "mine.csv"


def write_npz(**arrays: Any) -> str:
    np.savez("mine.npz", **arrays)
    return "mine.npz"


def plain_rows() -> list[str]:
    return [",".join(map(str, row)) for row in ROWS]


def as_csv() -> Custom:
    return Custom(path=write_csv(plain_rows()), standardise=False)


def as_npz() -> Custom:
    devices, labels, *x = zip(*ROWS, strict=True)
    path = write_npz(x=np.array(x, dtype=float).T, y=np.array(labels), device=np.array(devices))
    return Custom(path=path, standardise=False)


def as_parquet() -> Custom:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")

    columns = dict(
        zip(
            ("device", "label", "height", "weight"), map(list, zip(*ROWS, strict=True)), strict=True
        )
    )
    parquet.write_table(arrow.table(columns), "mine.parquet")
    return Custom(path="mine.parquet", standardise=False)


def as_iterator() -> Custom:
    Path("my_samples.py").write_text(
        f"ROWS = {ROWS!r}\ndef read():\n    for d, y, *x in ROWS:\n        yield d, x, y\n"
    )
    sys.modules.pop("my_samples", None)
    return Custom(source="my_samples:read", standardise=False)


@pytest.mark.parametrize(
    "make", [as_csv, as_npz, as_parquet, as_iterator], ids=lambda f: f.__name__
)
def test_every_form_gives_the_same_federation(make: Callable[[], Custom]) -> None:
    fleet = make().load(seed=0)
    assert fleet.label_names == ("ant", "cat", "dog")
    assert fleet.device_names == ("hall", "kitchen")
    assert fleet.y.tolist() == [1, 2, 1, 0]
    assert fleet.x.tolist() == [[1, 2], [3, 4], [5, 6], [7, 9]]
    assert fleet.x.dtype == np.float32
    assert sorted([*fleet.train.of(0), *fleet.test.of(0)]) == [2, 3]
    assert fleet.test.sizes.tolist() == [1, 1]
    assert fleet.model.name == "softmax"


def test_whole_numbers_sort_as_numbers() -> None:
    path = write_csv(
        [f"{device},{label},1,2" for device, label in [(10, 2), (10, 10), (9, 2), (9, 10)]]
    )
    fleet = Custom(path=path).load(seed=0)
    assert fleet.label_names == ("2", "10")
    assert fleet.device_names == ("9", "10")


def test_columns_may_have_other_names_and_test_samples_a_column() -> None:
    rows = ["a,0,1,0", "a,1,2,1", "b,0,3,0", "b,1,4,1"]
    path = write_csv(rows, header="who,what,x1,test\n")
    fleet = Custom(path=path, device="who", label="what", standardise=False).load(seed=0)
    assert fleet.sample_shape == (1,)
    assert fleet.train.indices.tolist() == [0, 2]
    assert fleet.test.indices.tolist() == [1, 3]


def test_features_are_standardised_by_the_training_samples() -> None:
    rows = ["a,0,0,5,0", "a,1,2,5,0", "a,1,100,5,1"]
    fleet = Custom(path=write_csv(rows, header="device,label,x1,x2,test\n")).load(seed=0)
    assert fleet.x.tolist() == [[-1, 0], [1, 0], [99, 0]]


def test_shape_model_and_partition_are_taken_from_the_table() -> None:
    path = write_npz(x=np.zeros((40, 12), dtype=np.uint8), y=np.arange(40) % 4)
    own = Custom(
        path=path,
        shape=(3, 2, 2),
        partition={"name": "iid", "devices": 5},
        model="my_models:net",
        model_options={"width": 3},
        rounds_per_pass=7,
    )
    fleet = own.load(seed=0)
    assert fleet.sample_shape == (3, 2, 2)
    assert fleet.devices == 5
    assert (fleet.model.name, fleet.model.options, fleet.rounds_per_pass) == (
        "my_models:net",
        {"width": 3},
        7,
    )


GOOD = {"x": np.zeros((4, 2)), "y": np.array([0, 1, 0, 1]), "device": np.array([0, 0, 1, 1])}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": None}, "has no array 'x'; it has device, y"),
        ({"y": None}, "has no array 'y'; it has device, x"),
        ({"y": np.array(1)}, "y is a single value"),
        ({"device": None}, "has no 'device' to say whose a sample is"),
        ({"y": np.array([0, 1])}, "y has 2 entries, but x has 4"),
        (
            {"x": np.array([[0, 1], [np.nan, 1], [0, 0], [0, 0]])},
            "sample 1: a feature is missing, NaN or infinite",
        ),
        ({"x": np.array([["a", "b"]] * 4)}, "x must be numbers"),
        (
            {"y": np.array([0, 1, 2.5, 1])},
            r"the label takes 3 different numbers, such as 2.5: say what they are",
        ),
        (
            {"device": np.array([0, 1.5, 2, 1])},
            "sample 1: device '1.5' is neither a whole number nor a name",
        ),
        (
            {"device": np.array([2.0**60, 1, 2, 1])},
            r"device '1.15\d*e\+18' is a float above 2\^53, so digits are lost",
        ),
        (
            {"x": np.array([[1.7e9, 1], [1.7e9 + 60, 1], [1.7e9 + 90, 0], [1.7e9 + 99, 0]])},
            "column 0 of x looks like a time .* save it as an array of its own",
        ),
        ({"y": np.array([0, 1, np.nan, 1])}, "sample 2: label 'nan' is neither"),
        ({"y": np.zeros((4, 2))}, "label must be one value a sample"),
        ({"y": np.array(["a", "b", "", "c"])}, "sample 2: label '' is neither"),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0), "device": np.zeros(0)}, "there is no sample in"),
        ({"test": np.array([0, 1, 0, 7])}, "sample 3: test must be 0 or 1, got '7'"),
        ({"test": np.array([1, 1, 0, 0])}, "device 0 has no training sample"),
        ({"y": np.array([0, {}, 1, 1], dtype=object)}, "Python objects"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_wrong_npz_is_refused(change: dict[str, Any], message: str) -> None:
    arrays = {name: array for name, array in {**GOOD, **change}.items() if array is not None}
    with pytest.raises(DataError, match=message):
        Custom(path=write_npz(**arrays)).load(seed=0)


@pytest.mark.parametrize(
    ("header", "rows", "message"),
    [
        ("device,class,a\n", ["1,1,1"], "has no column 'label'; it has device, class, a"),
        ("device,label\n", ["1,1"], "has no feature columns"),
        (HEADER, ["k,1,1,1", "k,1,1"], "line 3: 3 cells, but the header has 4"),
        (HEADER, ["k,1,1,1", "", "k,1,tall,1"], "line 4: height is 'tall', which is no number"),
        (HEADER, ["k,1,1,1", "k,1,,1"], "line 3: height is '', which is no number"),
        (HEADER, ["k,1,nan,1", "k,1,1,1"], "line 2: a feature is missing, NaN or infinite"),
        (HEADER, ["k,0.5,1,1"], r"the label takes 1 different numbers, such as 0.5: say what"),
        (
            HEADER,
            [f"k,{100 + 7 * n},1,{n}" for n in range(60)],
            r"the label takes 60 different whole numbers, from .*: say what they are",
        ),
        (
            "device,label,at,heat\n",
            [f"k,{n % 2},{1_700_000_000 + n},{n}" for n in range(9)],
            "at looks like a time since 1970, .*: set time = 'at'",
        ),
        (
            "device,label,at,heat\n",
            [f"k,{n % 2},{1_700_000_000_000 + n},{n}" for n in range(9)],
            "at looks like a time since 1970, .*: set time = 'at'",
        ),
        (HEADER, [",1,1,1", "k,1,1,1"], "line 2: device '' is neither"),
        (HEADER, [], "there is no sample in"),
        ("device,label,a, a\n", ["k,1,1,1"], "2 columns called 'a'"),
        ("device,label,a,test\n", ["k,1,1,0", "k,0,1,0"], "there is no sample for testing in"),
        ("device,label,a,test\n", ["k,1,1,1", "k,0,1,1"], "there is no sample for training in"),
        ("", [], "is empty: its first line must name the columns"),
    ],
    ids=lambda v: v if isinstance(v, str) and " " in v else "",
)
def test_a_wrong_csv_is_refused_with_its_line(header: str, rows: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Custom(path=write_csv(rows, header)).load(seed=0)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def read(): return []", "yielded no sample"),
        ("def read(): return [(1, 2)]", r"item 0 is not a tuple \(device, x, y\)"),
        (
            "def read(): return [(1, [1, 2], 0), (1, [1], 0)]",
            r"sample 1 has shape \(1,\), but sample 0 has \(2,\)",
        ),
        ("reed = 1", "'my_samples' has no 'read': did you mean 'reed'"),
        ("read = 1", "is no function"),
        (
            "def read(path): return []",
            "must work without arguments: missing a required argument: 'path'",
        ),
        ("def read(): pass", "gave None, not samples"),
    ],
)
def test_a_wrong_iterator_is_refused(code: str, message: str) -> None:
    Path("my_samples.py").write_text(code)
    sys.modules.pop("my_samples", None)
    with pytest.raises(FedkeepError, match=message):
        Custom(source="my_samples:read").load(seed=0)


def test_a_source_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot import 'no_such_module'"):
        Custom(source="no_such_module:read").load(seed=0)
    with pytest.raises(ConfigError, match="must look like 'module:function'"):
        Custom(source="no_such_module").load(seed=0)


def test_a_file_that_is_not_there_or_not_known_is_refused() -> None:
    with pytest.raises(DataError, match=r"there is no file nothing\.csv"):
        Custom(path="nothing.csv").load(seed=0)
    with pytest.raises(DataError, match="must end in"):
        Custom(path="mine.xlsx").load(seed=0)
    Path("mine.npz").write_bytes(b"not a zip")
    with pytest.raises(DataError, match=r"mine\.npz"):
        Custom(path="mine.npz").load(seed=0)


def test_a_csv_in_another_encoding_is_refused() -> None:
    Path("mine.csv").write_bytes("device,label,a\nküche,1,1\n".encode("latin-1"))
    with pytest.raises(DataError, match="is not text in UTF-8"):
        Custom(path="mine.csv").load(seed=0)


def test_a_wrong_shape_is_refused() -> None:
    with pytest.raises(
        DataError, match=r"shape \[3\] does not fit: a sample of mine.npz has 2 features"
    ):
        Custom(path=write_npz(**GOOD), shape=(3,)).load(seed=0)


def test_a_damaged_parquet_is_refused() -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    Path("mine.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        Custom(path="mine.parquet").load(seed=0)


def test_parquet_without_its_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    Path("mine.parquet").touch()
    with pytest.raises(MissingExtraError, match=r"fedkeep\[parquet\]"):
        Custom(path="mine.parquet").load(seed=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs either path"),
        ({"path": "a.csv", "source": "a:b"}, "needs either path"),
        ({"path": "a.csv", "test_fraction": 1.0}, "test_fraction"),
        ({"path": "a.csv", "rounds_per_pass": 0}, "rounds_per_pass"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Custom(**options)


DIGITS = ["001", "1", "01", "1.0", "1e0", "+1"]


def test_devices_and_labels_are_the_text_they_are_written_as() -> None:
    rows = [f"{device},{label},{n},2" for n, device in enumerate(DIGITS) for label in DIGITS[:3]]
    fleet = Custom(path=write_csv(rows)).load(seed=0)
    assert fleet.device_names == tuple(sorted(DIGITS))
    assert fleet.label_names == ("001", "01", "1")


@pytest.mark.parametrize("kind", [np.int64, np.uint64, object])
def test_identifiers_near_2_to_the_60_keep_their_last_digit(kind: type) -> None:
    ids = [2**60 + n for n in range(6)]
    device: Any = np.repeat(np.array(ids, dtype=kind), 4)
    text = write_csv([f"{one},{n % 2},{n},1" for n, one in enumerate(device)])
    names = tuple(map(str, ids))
    assert Custom(path=text).load(seed=0).device_names == names
    if kind is not object:
        y, x = np.arange(24) % 2, np.zeros((24, 2))
        fleet = Custom(path=write_npz(x=x, y=y, device=device)).load(seed=0)
        assert fleet.device_names == names


def test_a_source_may_yield_any_whole_number_and_text_as_devices() -> None:
    Path("my_samples.py").write_text(
        "def read():\n"
        "    for n in range(8):\n"
        "        yield (2**64 + 1, 2**64, -1, 'hall')[n % 4], [1.0, n], n // 4\n"
    )
    sys.modules.pop("my_samples", None)
    fleet = Custom(source="my_samples:read").load(seed=0)
    assert fleet.device_names == ("-1", str(2**64), str(2**64 + 1), "hall")


@pytest.mark.parametrize(
    "times",
    [["30", "5", "100", "20"], ["2026-01-03", "2026-01-01T10:00", "2026-01-04", "2026-01-02"]],
)
def test_samples_arrive_in_the_order_of_the_named_time(times: list[str]) -> None:
    rows = [f"k,{n % 2},{time},{n}" for n, time in enumerate(times)]
    path = write_csv(rows, header="device,label,at,heat\n")
    fleet = Custom(path=path, time="at", standardise=False, test_fraction=0.25).load(seed=0)
    assert fleet.x.tolist() == [[1], [3], [0], [2]]
    assert fleet.y.tolist() == [1, 1, 0, 0]


def test_a_time_that_is_missing_or_no_time_is_refused_with_its_line() -> None:
    header = "device,label,at,heat\n"
    path = write_csv(["k,0,1,1", "k,1,,2"], header=header)
    with pytest.raises(DataError, match="line 3: time '' is missing"):
        Custom(path=path, time="at").load(seed=0)
    path = write_csv(["k,0,1,1", "k,1,soon,2"], header=header)
    with pytest.raises(DataError, match="time must be numbers or dates such as"):
        Custom(path=path, time="at").load(seed=0)
    path = write_csv(["k,0,1,1", "k,1,nan,2"], header=header)
    with pytest.raises(DataError, match="line 3: time 'nan' is missing"):
        Custom(path=path, time="at").load(seed=0)
    with pytest.raises(DataError, match=r"has no column 'when'; .* \(set task.time\)"):
        Custom(path=path, time="when").load(seed=0)


def test_many_labels_with_names_or_that_are_said_to_be_classes_are_classes() -> None:
    rows = [f"k{n % 3},class {n % 30},1,{n}" for n in range(120)]
    assert len(Custom(path=write_csv(rows)).load(seed=0).label_names) == 30
    rows = [f"k{n % 3},{n % 30},1,{n}" for n in range(300)]
    assert len(Custom(path=write_csv(rows), target="class").load(seed=0).label_names) == 30
