"""Reads a user's samples from npz, CSV or Parquet files, or from any Python iterator of (device, x, y)."""

import csv
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep.core.errors import ConfigError, DataError, needing
from fedkeep.core.types import AnyArray
from fedkeep.loading import load_object

_TEST = "test"
"""The column (or array) that says which samples are for testing."""


@dataclass(frozen=True, eq=False)
class SampleTable:
    """Samples as the user has them: labels and devices of any kind, nothing checked but the shapes."""

    origin: str
    x: AnyArray
    labels: AnyArray
    devices: AnyArray | None
    test: AnyArray | None
    row_name: Callable[[int], str] = "sample {}".format
    """How the user would find a sample, to name it in an error."""

    def refuse(self, bad: AnyArray, why: str, values: AnyArray | None = None) -> None:
        """Refuses the data if any sample is bad, by the first of them; `why` may show its value."""
        if bad.any():
            row = int(np.argmax(bad))
            said = why if values is None else why.format(str(values[row]))
            raise DataError(f"{self.origin}, {self.row_name(row)}: {said}")


def read_table(path: Path, device: str, label: str) -> SampleTable:
    """The samples of a file, by its ending, with what it calls devices and labels: .npz, .csv or .parquet."""
    readers = {".npz": _read_npz, ".csv": _read_csv, ".parquet": _read_parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path} must end in .npz, .csv or .parquet")
    if not path.is_file():
        raise DataError(f"there is no file {path}; a relative path starts at the folder where fedkeep runs")
    return reader(path, device, label)


def read_iterator(name: str) -> SampleTable:
    """The samples that the function `module:function` yields as (device, x, y)."""
    samples = _function(name)()
    if not isinstance(samples, Iterable):
        raise DataError(f"{name} gave {samples!r}, not samples: it must return or yield tuples (device, x, y)")
    rows: list[tuple[Any, AnyArray, Any]] = []
    for n, sample in enumerate(samples):
        if not isinstance(sample, tuple) or len(sample) != 3:
            raise DataError(f"{name}: item {n} is not a tuple (device, x, y)")
        x, first = np.asarray(sample[1]), rows[0][1].shape if rows else np.shape(sample[1])
        if x.shape != first:
            raise DataError(f"{name}: sample {n} has shape {x.shape}, but sample 0 has {first}; all must be alike")
        rows.append((sample[0], x, sample[2]))
    if not rows:
        raise DataError(f"{name} yielded no sample")
    devices, xs, labels = zip(*rows, strict=True)
    return SampleTable(name, np.asarray(xs), np.asarray(labels), np.asarray(devices), None)


def _function(name: str) -> Callable[[], Iterable[Any]]:
    if ":" not in name:
        raise ConfigError(f"source must look like 'module:function', got {name!r}")
    found: Callable[[], Iterable[Any]] = load_object(name)
    if not callable(found):
        raise ConfigError(f"source {name!r} is no function")
    try:
        signature(found).bind()
    except TypeError as error:
        raise ConfigError(f"source {name!r} must work without arguments: {error}") from None
    return found


def _read_npz(path: Path, device: str, label: str) -> SampleTable:
    try:
        with np.load(path, allow_pickle=False) as content:
            arrays = {name: content[name] for name in content.files}
    except ValueError:
        raise DataError(f"{path} is no npz file, or holds Python objects: save plain arrays with np.savez") from None
    except (OSError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read as npz: {error}") from None
    label = label if label in arrays else "y"
    for needed in ("x", label):
        if needed not in arrays:
            raise DataError(f"{path} has no array {needed!r}; it has {', '.join(sorted(arrays)) or 'none'}")
    for name in sorted({"x", label, device, _TEST} & set(arrays)):
        if arrays[name].ndim == 0:
            raise DataError(f"{path}: {name} is a single value, not one a sample")
        if len(arrays[name]) != len(arrays["x"]):
            raise DataError(f"{path}: {name} has {len(arrays[name])} entries, but x has {len(arrays['x'])}")
    return SampleTable(str(path), arrays["x"], arrays[label], arrays.get(device), arrays.get(_TEST))


def _read_csv(path: Path, device: str, label: str) -> SampleTable:
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
            raise DataError(f"{path} has {count} columns called {name!r}: give each a name of its own")
    table = np.array(rows, dtype=str).reshape(len(rows), len(header))
    by_name = {name: table[:, n] for n, name in enumerate(header)}
    return _from_columns(str(path), by_name, device, label, lambda row: f"line {numbers[row]}")


def _read_parquet(path: Path, device: str, label: str) -> SampleTable:
    with needing("reading Parquet files", "parquet"):
        import pyarrow as arrow
        from pyarrow import parquet
    try:
        table = parquet.read_table(path)
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from None
    by_name = {name: table.column(name).to_numpy() for name in table.column_names}
    return _from_columns(str(path), by_name, device, label, "row {}".format)


def _from_columns(
    origin: str, by_name: Mapping[str, AnyArray], device: str, label: str, row_name: Callable[[int], str]
) -> SampleTable:
    if label not in by_name:
        known = ", ".join(by_name) or "none at all"
        raise DataError(f"{origin} has no column {label!r}; it has {known} (set task.label)")
    features = [name for name in by_name if name not in (device, label, _TEST)]
    if not features:
        raise DataError(f"{origin} has no feature columns besides {', '.join(by_name)}")
    x = np.stack([_numbers(origin, name, by_name[name], row_name) for name in features], axis=1)
    return SampleTable(origin, x, by_name[label], by_name.get(device), by_name.get(_TEST), row_name)


def _numbers(origin: str, name: str, cells: AnyArray, row_name: Callable[[int], str]) -> AnyArray:
    try:
        return np.asarray(cells).astype(np.float32)
    except (ValueError, TypeError):
        for row, cell in enumerate(map(str, cells)):
            try:
                float(cell)
            except ValueError:
                raise DataError(f"{origin}, {row_name(row)}: {name} is {cell!r}, which is no number") from None
        raise
