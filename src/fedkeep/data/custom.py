"""The task `custom`: a user's data in one TOML table, from npz, CSV or Parquet files or from any Python iterator.

Some data sets with devices and an order of their own are such files, made ready: voices, network flows, WiFi scans.
"""

import csv
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

from fedkeep.core.bounds import check_range
from fedkeep.core.errors import ConfigError, DataError, optional_import
from fedkeep.core.types import AnyArray, IntArray
from fedkeep.data.cache import Progress, RemoteFile, obtain
from fedkeep.data.federation import Federation, ModelSpec, Ownership, hold_out
from fedkeep.data.partition import partition_from
from fedkeep.loading import load_object

_TEST = "test"
"""The column (or array) that says which samples are for testing."""
Names: TypeAlias = tuple[str, ...]
RowName: TypeAlias = Callable[[int], str]
"""How the user would find a sample, to name it in an error."""


@dataclass(frozen=True, eq=False)
class SampleTable:
    """Samples as the user has them: labels and devices of any kind, nothing checked but the shapes."""

    origin: str
    x: AnyArray
    labels: AnyArray
    devices: AnyArray | None
    test: AnyArray | None
    row_name: RowName = "sample {}".format

    def refuse(self, bad: AnyArray, why: str, values: AnyArray | None = None) -> None:
        """Refuses the data if any sample is bad, by the first of them; `why` may show its value."""
        if bad.any():
            row = int(np.argmax(bad))
            said = why if values is None else why.format(str(values[row]))
            raise DataError(f"{self.origin}, {self.row_name(row)}: {said}")


@dataclass(frozen=True)
class Custom:
    """Samples with labels and devices, from a file (`path`) or a Python function (`source`).

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
    ...     _ = file.write("device,label,heat" + "\\npump-1,ok,41.5\\npump-2,worn,48.0" * 5)
    ...     file.flush()
    ...     fleet = Custom(path=file.name).load(seed=0)
    >>> fleet.device_names, fleet.label_names
    (('pump-1', 'pump-2'), ('ok', 'worn'))
    """

    path: str | None = None
    """.npz (arrays x, y, device, test), .csv or .parquet (columns device, label, test, the rest features)."""
    source: str | None = None
    """`module:function` that returns or yields (device, x, y)."""
    device: str = "device"
    """The column (or array) that says which device a sample came from."""
    label: str = "label"
    """The column (or array) of labels."""
    shape: tuple[int, ...] | None = None
    """The shape of a sample for the model, e.g. [1, 28, 28]; None: as it is in the data."""
    standardise: bool = True
    """Each feature in standard deviations of the training samples."""
    test_fraction: float = 0.1
    """Held out at random inside each device, unless the data has a column `test` (1: for testing)."""
    partition: Mapping[str, Any] = field(default_factory=lambda: {"name": "natural"})
    """How samples are divided among devices; "natural" takes the data's own."""
    model: str = "softmax"
    """A model by its name, or `module:factory`."""
    model_options: Mapping[str, Any] = field(default_factory=dict)
    """The arguments of the model's factory, e.g. { hidden = [64] }."""
    rounds_per_pass: int = 500
    """Rounds in which a device sees each of its samples once."""

    def __post_init__(self) -> None:
        if (self.path is None) == (self.source is None):
            raise ValueError("task 'own' needs either path (a file) or source (module:function)")
        check_range(self, "test_fraction", above=0, below=1)
        check_range(self, "rounds_per_pass", least=1)
        partition_from(self.partition)

    def load(self, seed: int, progress: Progress | None = None) -> Federation:  # noqa: ARG002
        if self.path is not None:
            table = read_table(Path(self.path), self.device, self.label)
        else:
            table = read_iterator(str(self.source))
        x = self._features(table)
        label_names, y = _numbered("label", table.labels, table)
        train, test, device_names = self._devices(table, y, seed)
        for members, purpose in ((train, "training"), (test, "testing")):
            if not len(members.indices):
                raise DataError(
                    f"{table.origin} leaves no sample for {purpose}: the model needs some for either"
                )
        if len(label_names) < 2:
            raise DataError(
                f"{table.origin} has a single label, '{label_names[0]}': there is nothing to tell apart"
            )
        if self.standardise:
            x = standardised(x, train.indices, axes=0)
        spec = ModelSpec(self.model, dict(self.model_options))
        return Federation(
            "own", x, y, train, test, label_names, spec, device_names, self.rounds_per_pass
        )

    def _features(self, table: SampleTable) -> AnyArray:
        if len(table.x) == 0:
            raise DataError(f"{table.origin} holds no sample")
        if table.x.dtype.kind not in "fiub":
            raise DataError(f"{table.origin}: x must be numbers, got {table.x.dtype}")
        x = np.ascontiguousarray(table.x, dtype=np.float32)
        bad = np.asarray(~np.isfinite(x).reshape(len(x), -1).all(axis=1))
        table.refuse(
            bad,
            f"a feature is missing, NaN or infinite ({bad.sum()} such samples); fill in or drop them",
        )
        shape, have = self.shape or x.shape[1:] or (1,), int(np.prod(x.shape[1:]))
        if int(np.prod(shape)) != have:
            raise DataError(
                f"shape {list(shape)} does not fit: a sample of {table.origin} has {have} features"
            )
        return x.reshape(len(x), *shape)

    def _devices(
        self, table: SampleTable, y: IntArray, seed: int
    ) -> tuple[Ownership, Ownership, Names | None]:
        names, natural = None, None
        if self.partition["name"] == "natural":
            if table.devices is None:
                raise DataError(
                    f"{table.origin} has no {self.device!r} to say whose a sample is: add it, set device, "
                    'or divide the samples with partition = { name = "dirichlet" }'
                )
            names, natural = _numbered("device", table.devices, table)
        members = partition_from(self.partition).divide(y, natural, seed)
        if table.test is None:
            return *hold_out(members, self.test_fraction, seed), names
        flags = np.char.lower(np.asarray(table.test).astype(str))
        table.refuse(
            ~np.isin(flags, ("0", "1", "true", "false", "0.0", "1.0")),
            "test must be 0 or 1, got {!r}",
            flags,
        )
        tested = np.isin(flags, ("1", "true", "1.0"))[members.indices]
        return members.where(~tested), members.where(tested), names


def standardised(x: AnyArray, known: IntArray, axes: int | tuple[int, ...]) -> AnyArray:
    """The samples in standard deviations of the known ones, taken over these axes."""
    mean, deviation = x[known].mean(axis=axes), x[known].std(axis=axes)
    scaled: AnyArray = (x - mean) / np.where(deviation > 0, deviation, np.float32(1))
    return scaled.astype(np.float32)


def _numbered(what: str, values: AnyArray, table: SampleTable) -> tuple[Names, IntArray]:
    """The distinct values in order, as names, and the number of each entry; a fraction or a gap is refused."""
    if values.ndim != 1:
        raise DataError(
            f"{table.origin}: {what} must be one value a sample, got shape {values.shape}"
        )
    try:
        numbers = values.astype(np.float64)
        bad, known = ~np.isfinite(numbers) | (numbers != np.round(numbers)), values
    except (ValueError, TypeError):
        known = numbers = np.array(
            [str(value).strip() if value is not None else "" for value in values]
        )
        bad = known == ""
    table.refuse(bad, what + " {!r} is neither a whole number nor a name", known)
    if numbers.dtype.kind == "f":
        numbers = numbers.astype(np.int64)  # so that 10 comes after 9
    names, places = np.unique(numbers, return_inverse=True)
    return tuple(map(str, names.tolist())), places.reshape(-1).astype(np.int64)


def read_table(path: Path, device: str, label: str) -> SampleTable:
    """The samples of a file, by its ending, with what it calls devices and labels: .npz, .csv or .parquet."""
    ending, origin = path.suffix.lower(), str(path)
    if ending not in (".npz", ".csv", ".parquet"):
        raise DataError(f"{path} must end in .npz, .csv or .parquet")
    if not path.is_file():
        raise DataError(
            f"there is no file {path}; a relative path starts at the folder where fedkeep runs"
        )
    if ending == ".npz":
        return _read_npz(path, device, label)
    by_name, row_name = _read_csv(path) if ending == ".csv" else _read_parquet(path)
    if label not in by_name:
        known = ", ".join(by_name) or "none at all"
        raise DataError(f"{origin} has no column {label!r}; it has {known} (set task.label)")
    features = [name for name in by_name if name not in (device, label, _TEST)]
    if not features:
        raise DataError(f"{origin} has no feature columns besides {', '.join(by_name)}")
    x = np.stack([_numbers(origin, name, by_name[name], row_name) for name in features], axis=1)
    return SampleTable(origin, x, by_name[label], by_name.get(device), by_name.get(_TEST), row_name)


def read_iterator(name: str) -> SampleTable:
    """The samples that the function `module:function` yields as (device, x, y)."""
    if ":" not in name:
        raise ConfigError(f"source must look like 'module:function', got {name!r}")
    function = load_object(name)
    if not callable(function):
        raise ConfigError(f"source {name!r} is no function")
    try:
        signature(function).bind()
    except TypeError as error:
        raise ConfigError(f"source {name!r} must work without arguments: {error}") from None
    samples = function()
    if not isinstance(samples, Iterable):
        raise DataError(
            f"{name} gave {samples!r}, not samples: it must return or yield tuples (device, x, y)"
        )
    rows: list[tuple[Any, AnyArray, Any]] = []
    for n, sample in enumerate(samples):
        if not isinstance(sample, tuple) or len(sample) != 3:
            raise DataError(f"{name}: item {n} is not a tuple (device, x, y)")
        x, first = np.asarray(sample[1]), rows[0][1].shape if rows else np.shape(sample[1])
        if x.shape != first:
            raise DataError(
                f"{name}: sample {n} has shape {x.shape}, but sample 0 has {first}; all must be alike"
            )
        rows.append((sample[0], x, sample[2]))
    if not rows:
        raise DataError(f"{name} yielded no sample")
    devices, xs, labels = zip(*rows, strict=True)
    return SampleTable(name, np.asarray(xs), np.asarray(labels), np.asarray(devices), None)


def _read_npz(path: Path, device: str, label: str) -> SampleTable:
    try:
        with np.load(path, allow_pickle=False) as content:
            arrays = {name: content[name] for name in content.files}
    except ValueError:
        raise DataError(
            f"{path} is no npz file, or holds Python objects: save plain arrays with np.savez"
        ) from None
    except (OSError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read as npz: {error}") from None
    label = label if label in arrays else "y"
    for needed in ("x", label):
        if needed not in arrays:
            raise DataError(
                f"{path} has no array {needed!r}; it has {', '.join(sorted(arrays)) or 'none'}"
            )
    for name in sorted({"x", label, device, _TEST} & set(arrays)):
        if arrays[name].ndim == 0:
            raise DataError(f"{path}: {name} is a single value, not one a sample")
        if len(arrays[name]) != len(arrays["x"]):
            raise DataError(
                f"{path}: {name} has {len(arrays[name])} entries, but x has {len(arrays['x'])}"
            )
    return SampleTable(str(path), arrays["x"], arrays[label], arrays.get(device), arrays.get(_TEST))


def _read_csv(path: Path) -> tuple[dict[str, AnyArray], RowName]:
    rows, numbers = [], []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = csv.reader(file)
            header = [name.strip() for name in next(lines, [])]
            for cells in filter(None, lines):
                if len(cells) != len(header):
                    here = f"{path}, line {lines.line_num}"
                    raise DataError(f"{here}: {len(cells)} cells, but the header has {len(header)}")
                rows.append(cells)
                numbers.append(lines.line_num)
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV in UTF-8: {error}") from None
    for name, count in Counter(header).items():
        if count > 1:
            raise DataError(
                f"{path} has {count} columns called {name!r}: give each a name of its own"
            )
    table = np.array(rows, dtype=str).reshape(len(rows), len(header))
    return {name: table[:, n] for n, name in enumerate(header)}, lambda row: f"line {numbers[row]}"


def _read_parquet(path: Path) -> tuple[dict[str, AnyArray], RowName]:
    with optional_import("reading Parquet files", "parquet"):
        import pyarrow as arrow
        from pyarrow import parquet
    try:
        table = parquet.read_table(path)
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from None
    return {name: table.column(name).to_numpy() for name in table.column_names}, "row {}".format


def _numbers(origin: str, name: str, cells: AnyArray, row_name: RowName) -> AnyArray:
    try:
        return np.asarray(cells).astype(np.float32)
    except (ValueError, TypeError):
        for row, cell in enumerate(map(str, cells)):
            try:
                float(cell)
            except ValueError:
                raise DataError(
                    f"{origin}, {row_name(row)}: {name} is {cell!r}, which is no number"
                ) from None
        raise


def _prepared(dataset: str, checksum: str, source: str) -> RemoteFile:
    how = f"make it from {source} as docs/own-data.md tells, or name a folder that has it in FEDKEEP_DATA"
    return RemoteFile(dataset, f"{dataset.replace('-', '_')}.npz", None, checksum, how=how)


@dataclass(frozen=True)
class PreparedSet:
    model: str = "mlp"
    """A model by its name, or `module:factory`."""

    file: ClassVar[RemoteFile]

    def load(self, seed: int, progress: Progress | None = None) -> Federation:
        path, label = str(obtain(self.file, progress)), getattr(self, "label", "y")
        own = Custom(path=path, label=label, model=self.model, rounds_per_pass=100)
        return replace(own.load(seed), name=self.file.dataset)


@dataclass(frozen=True)
class AudioMnist(PreparedSet):
    """Spoken digits of 60 people, log-mel pictures of 32 x 32: devices differ by voice, not by labels."""

    file = _prepared(
        "audio-mnist",
        "66933b39e9cff15875ee2fbd953d029238096459058ad95c267ec53313f52042",
        "github.com/soerenab/AudioMNIST",
    )


@dataclass(frozen=True)
class Westermo(PreparedSet):
    """Flows of an industrial network in the order of time, 31 source addresses: attacks come in bursts."""

    model: str = "softmax"
    label: Literal["y", "y_timing"] = "y"
    """`y`: only traffic from or to the attacker is an attack; `y_timing`: all traffic of that time."""

    file = _prepared(
        "westermo",
        "bbda1008017bea6983a3ecc8e63f2bf90b845da0b7dcb81d8e1f6c8a7cf1c24f",
        "github.com/westermo/network-traffic-dataset",
    )


@dataclass(frozen=True)
class UjiIndoor(PreparedSet):
    """On which floor is the phone? WiFi scans in the order of time of 29 people with a phone, floor after floor."""

    file = _prepared(
        "uji-indoor",
        "bcfd5277d7404ac3d421a9b69be3b15a88dc1486c3d35837979dccd8c075ec68",
        "archive.ics.uci.edu (UJIIndoorLoc)",
    )
