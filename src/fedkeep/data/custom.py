"""The task `custom`: a user's data, from npz, CSV or Parquet files or from a Python iterator.

Some public data sets with devices and a time order are such files, already prepared: voices,
network flows, WiFi scans.
"""

import csv
import math
import re
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

from fedkeep.core.bounds import check_range
from fedkeep.core.errors import ConfigError, DataError, optional_import
from fedkeep.core.targets import NumberTargets, quantile_edges
from fedkeep.core.types import AnyArray, FloatArray, IntArray
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
    """Samples as the user has them: labels and devices of any kind, only shapes are checked."""

    origin: str
    x: AnyArray
    labels: AnyArray
    devices: AnyArray | None
    test: AnyArray | None
    row_name: RowName = "sample {}".format
    times: AnyArray | None = None

    def reject(self, bad: AnyArray, why: str, values: AnyArray | None = None) -> None:
        """Reject the data if any sample is bad, naming the first; `why` may show its value."""
        if bad.any():
            row = int(np.argmax(bad))
            reason = why if values is None else why.format(str(values[row]))
            raise DataError(f"{self.origin}, {self.row_name(row)}: {reason}")

    def take(self, order: IntArray) -> "SampleTable":
        """Return the samples in another order."""
        devices = None if self.devices is None else self.devices[order]
        test = None if self.test is None else self.test[order]
        return SampleTable(
            self.origin,
            self.x[order],
            self.labels[order],
            devices,
            test,
            lambda row: self.row_name(int(order[row])),
        )


@dataclass(frozen=True)
class Custom:
    r"""Samples with labels and devices, from a file (`path`) or a Python function (`source`).

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
    ...     _ = file.write("device,label,heat" + "\npump-1,ok,41.5\npump-2,worn,48.0" * 5)
    ...     file.flush()
    ...     fleet = Custom(path=file.name).load(seed=0)
    >>> fleet.device_names, fleet.label_names
    (('pump-1', 'pump-2'), ('ok', 'worn'))
    """

    learning_rate: ClassVar[float] = 0.05
    """Where `train.learning_rate` is not set."""

    path: str | None = None
    """.npz (arrays x, y, device, test), .csv or .parquet (columns device, label, test, rest)."""
    source: str | None = None
    """`module:function` that returns or yields (device, x, y)."""
    device: str = "device"
    """The column (or array) that says which device a sample came from."""
    label: str = "label"
    """The column (or array) of labels."""
    time: str | None = None
    """The column (or array) of times: samples arrive in its order, and it is no feature."""
    shape: tuple[int, ...] | None = None
    """The shape of a sample for the model, e.g. [1, 28, 28]; None: as it is in the data."""
    standardise: bool = True
    """Each feature in standard deviations of the training samples."""
    test_fraction: float = 0.1
    """Held out at random inside each device, unless the data has a column `test` (1: test)."""
    partition: Mapping[str, Any] = field(default_factory=lambda: {"name": "natural"})
    """How samples are divided among devices; "natural" takes the data's own."""
    model: str = "softmax"
    """A model by its name, or `module:factory`."""
    model_options: Mapping[str, Any] = field(default_factory=dict)
    """The arguments of the model's factory, e.g. { hidden = [64] }."""
    rounds_per_pass: int = 500
    """Rounds in which a device sees each of its samples once."""
    target: Literal["class", "number"] | None = None
    """What the label is: a `class`, or a `number` to predict. None: text is a class, and so are
    at most 20 different whole numbers; more, with fractions, are numbers to predict; what it is
    else nobody can tell, and you are asked."""
    edges: tuple[float, ...] = ()
    """Where one interval of the numbers ends and the next begins: slots are divided among intervals
    as among labels."""
    intervals: int = 4
    """Without `edges`: so many intervals with about equally many of the numbers; 1: not divided."""

    def __post_init__(self) -> None:
        if self.target not in (None, "class", "number"):
            raise ValueError(f'target must be "class" or "number", got {self.target!r}')
        check_range(self, "intervals", least=1, most=1000)
        NumberTargets(self.edges)
        if (self.path is None) == (self.source is None):
            raise ValueError("task 'own' needs either path (a file) or source (module:function)")
        check_range(self, "test_fraction", above=0, below=1)
        check_range(self, "rounds_per_pass", least=1)
        partition_from(self.partition)

    def load(self, seed: int, progress: Progress | None = None) -> Federation:  # noqa: ARG002
        """Read the data and hold out test samples.

        Raises
        ------
        DataError
            If the data cannot be read, is not what a model can be trained on, or leaves open
            what the label is.
        """
        if self.path is not None:
            table = read_table(Path(self.path), self.device, self.label, self.time)
        elif self.time is not None:
            raise ConfigError("time is a column of a file: let the source yield in time order")
        else:
            table = read_iterator(str(self.source))
        x = self._features(table)
        targets, label_names, y = self._targets(table)
        moments = _moments(table)
        if moments is not None:
            order = np.argsort(moments, kind="stable")
            x, y, table = x[order], y[order], table.take(order)
        strata = y if targets is None else targets.assign(y)
        train, test, device_names = self._devices(table, strata, seed)
        for members, purpose in ((train, "training"), (test, "testing")):
            if not len(members.indices):
                raise DataError(
                    f"there is no sample for {purpose} in {table.origin}: give devices more "
                    "samples, change test_fraction, or mark samples in a column test"
                )
        if targets is None and len(label_names) < 2:
            raise DataError(
                f"{table.origin} has a single label, '{label_names[0]}': "
                "there is nothing to tell apart"
            )
        if self.standardise:
            x = standardised(x, train.indices, axes=0)
        options = dict(self.model_options)
        if targets is not None and ":" not in str(options.get("loss", "")):
            options = _scale_of(y[train.indices]) | options
        spec = ModelSpec(self.model, options)
        return Federation(
            "own", x, y, train, test, label_names, spec, device_names, self.rounds_per_pass, targets
        )

    def _targets(self, table: SampleTable) -> tuple[NumberTargets | None, Names, AnyArray]:
        """Return what targets look like, the names of labels or intervals, and the targets."""
        if target_kind(table, self.target) == "class":
            names, numbered = _numbered("label", table.labels, table)
            return None, names, numbered
        y = numbers_of(table)
        width = y.shape[1] if y.ndim == 2 else 1
        edges = self.edges
        if not edges and width == 1:
            edges = quantile_edges(y, self.intervals)
        try:
            targets = NumberTargets(edges, width)
        except ValueError as error:
            raise ConfigError(f"'task': {error}") from None
        return targets, targets.names, y

    def _features(self, table: SampleTable) -> AnyArray:
        x = checked_features(table)
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
                    f"{table.origin} has no {self.device!r} to say whose a sample is: add it, "
                    'set device, or divide the samples with partition = { name = "dirichlet" }'
                )
            names, natural = _numbered("device", table.devices, table)
        members = partition_from(self.partition).divide(y, natural, seed)
        if table.test is None:
            return *hold_out(members, self.test_fraction, seed), names
        tested = _tested(table, table.test)[members.indices]
        return members.where(~tested), members.where(tested), names


def _tested(table: SampleTable, test: AnyArray) -> AnyArray:
    """Return which samples are for testing."""
    flags = np.char.lower(np.asarray(test).astype(str))
    table.reject(
        ~np.isin(flags, ("0", "1", "true", "false", "0.0", "1.0")),
        "test must be 0 or 1, got {!r}",
        flags,
    )
    return np.isin(flags, ("1", "true", "1.0"))


def checked_features(table: SampleTable) -> AnyArray:
    """Return the features in float32.

    Raises
    ------
    DataError
        If there is no sample, or a feature is no finite number.
    """
    if len(table.x) == 0:
        raise DataError(f"there is no sample in {table.origin}")
    if table.x.dtype.kind not in "fiub":
        raise DataError(f"{table.origin}: x must be numbers, got {table.x.dtype}")
    if not all(table.x.shape[1:]):
        raise DataError(f"{table.origin}: a sample has no feature, x has shape {table.x.shape}")
    with np.errstate(over="ignore"):  # beyond float32 is infinite, and named below
        x = np.ascontiguousarray(table.x, dtype=np.float32)
    bad = np.asarray(~np.isfinite(x).reshape(len(x), -1).all(axis=1))
    reason = (
        f"a feature is missing, NaN or infinite ({bad.sum()} such samples; float32 ends at 3e38)"
    )
    table.reject(bad, f"{reason}; fill in or drop them")
    return x


def arrays_of(
    table: SampleTable, target: Literal["class", "number"] = "class"
) -> dict[str, AnyArray]:
    """Return checked samples as plain arrays that `np.savez` stores and `Custom` reads.

    Labels and devices are text, exactly as given; times are numbers or dates. Targets that are
    numbers stay numbers.
    """
    arrays = {"x": checked_features(table)}
    if target == "number":
        arrays["y"] = numbers_of(table)
    else:
        arrays["y"] = exact_names("label", table.labels, table)
        names = np.unique(arrays["y"]).tolist()
        if len(names) < 2:
            raise DataError(
                f"{table.origin} have a single label, {names[0]!r}: nothing to tell apart"
            )
    if table.devices is not None:
        arrays["device"] = exact_names("device", table.devices, table)
    if table.test is not None:
        arrays[_TEST] = _tested(table, table.test)
        for purpose, count in (("training", ~arrays[_TEST]), ("testing", arrays[_TEST])):
            if not count.any():
                raise DataError(f"{table.origin} leave no sample for {purpose}: see test=")
    moments = _moments(table)
    if moments is not None:
        arrays["time"] = moments
    return arrays


def standardised(x: AnyArray, known: IntArray, axes: int | tuple[int, ...]) -> AnyArray:
    """Return the samples in standard deviations of the known ones, taken over these axes."""
    mean, deviation = x[known].mean(axis=axes), x[known].std(axis=axes)
    scaled: AnyArray = (x - mean) / np.where(deviation > 0, deviation, np.float32(1))
    return scaled.astype(np.float32)


def exact_names(what: str, values: AnyArray, table: SampleTable) -> AnyArray:
    """Return devices or labels as text, exactly as they are written in the data.

    `001` and `1` stay different names, and identifiers near 2^60 keep their last digit. Whole
    numbers of any type become their decimal digits.

    Raises
    ------
    DataError
        If an entry is missing, or a number has a fraction or has already lost digits.
    """
    if values.ndim != 1:
        raise DataError(
            f"{table.origin}: {what} must be one value a sample, got shape {values.shape}"
        )
    if values.dtype.kind in "iu":
        return values.astype(str)
    if values.dtype.kind == "b":
        return values.astype(np.int64).astype(str)
    if values.dtype.kind == "f":
        fractions = values != np.round(values)
        if what == "label" and np.isfinite(values).all() and fractions.any():
            return values.astype(str)  # a measurement, to be named as one
        bad = ~np.isfinite(values) | fractions
        table.reject(bad, what + " {!r} is neither a whole number nor a name", values)
        exact = 2 ** (np.finfo(values.dtype).nmant + 1)
        inexact = np.abs(values) > exact
        why = f"{what} {{!r}} is a float above 2^{np.finfo(values.dtype).nmant + 1}"
        table.reject(inexact, f"{why}, so digits are lost: save it as an integer or text", values)
        return values.astype(np.int64).astype(str)
    if values.dtype.kind == "O":
        return _names_of_objects(what, values, table)
    names = values.astype(str)
    table.reject(names == "", what + " {!r} is neither a whole number nor a name", names)
    return names


def _names_of_objects(what: str, values: AnyArray, table: SampleTable) -> AnyArray:
    """Return Python objects as text: strings as they are, whole numbers as their digits."""
    names = []
    for value in values.tolist():
        plain = value.item() if isinstance(value, np.generic) else value
        is_whole = isinstance(plain, float) and plain.is_integer() and abs(plain) <= 2**53
        if isinstance(plain, bool) or is_whole:
            plain = int(plain)
        elif plain is None or isinstance(plain, float):
            plain = "" if plain is None or math.isnan(plain) else plain
        is_name = what == "label" or not isinstance(plain, float)
        names.append(str(plain) if is_name else "")
    found = np.array(names, dtype=str)
    table.reject(found == "", what + " {!r} is neither a whole number nor a name", values)
    return found


_WHOLE = re.compile(r"0|-?[1-9][0-9]*")


def _numbered(what: str, values: AnyArray, table: SampleTable) -> tuple[Names, IntArray]:
    """Return the distinct names in order, and the number of each entry.

    Names that are all whole numbers are in numerical order, so that 10 comes after 9.
    """
    names, places = np.unique(exact_names(what, values, table), return_inverse=True)
    known: list[str] = names.tolist()
    places = places.reshape(-1).astype(np.int64)
    if all(_WHOLE.fullmatch(name) for name in known):
        order = sorted(range(len(known)), key=lambda place: int(known[place]))
        rank = np.empty(len(order), dtype=np.int64)
        rank[order] = np.arange(len(order))
        known, places = [known[place] for place in order], rank[places]
    return tuple(known), places


_MOST_NUMBERED_LABELS = 20
"""Of more labels than this, all whole numbers, nobody can tell whether they are classes."""


def target_kind(
    table: SampleTable, asked: Literal["class", "number"] | None
) -> Literal["class", "number"]:
    """Find out whether labels are classes, or numbers to predict.

    Text is a class, and so are a few different whole numbers; many with fractions are numbers.

    Raises
    ------
    DataError
        If it cannot be told, with what to do.

    Examples
    --------
    >>> readings = np.arange(25) / 4
    >>> target_kind(SampleTable("meters", np.zeros((25, 1)), readings, None, None), None)
    'number'
    """
    if asked is not None:
        return asked
    if table.labels.ndim != 1:
        return "class"  # which is rejected in words that fit
    try:
        numbers = np.unique(table.labels.astype(np.float64))
    except (TypeError, ValueError):
        return "class"
    numbers = numbers[np.isfinite(numbers)]
    fractions = numbers[numbers != np.round(numbers)]
    many = len(numbers) > _MOST_NUMBERED_LABELS
    if many == (len(fractions) > 0):
        return "number" if many else "class"
    found = f"{len(numbers):,} different whole numbers, from {numbers[0]:g} to {numbers[-1]:g}"
    if not many:
        found = f"{len(numbers)} different numbers, such as {fractions[0]:g}"
    raise DataError(
        f"{table.origin}: the label takes {found}: say what they are, "
        'target = "number" to predict them or target = "class" to tell them apart'
    )


def numbers_of(table: SampleTable) -> FloatArray:
    """Return labels as numbers to predict, (n,) or (n, width).

    Raises
    ------
    DataError
        If one of them is no finite number.
    """
    labels = np.asarray(table.labels)
    try:
        found = np.array(labels.tolist(), dtype=np.float64)  # of objects, rows become columns
    except (TypeError, ValueError):
        found = _numbers(table.origin, "label", labels.reshape(-1), table.row_name)
    if found.ndim not in (1, 2) or (found.ndim == 2 and not found.shape[1]):
        raise DataError(
            f"{table.origin}: a label must be a number or a row of them, got shape {labels.shape}"
        )
    targets = NumberTargets(width=found.shape[1] if found.ndim == 2 else 1)
    table.reject(~targets.valid(found), "label {!r} is no finite number", labels)
    return targets.settled(found)


def _scale_of(y: FloatArray) -> dict[str, float]:
    """Return what the model's outputs are measured from and in: mean and deviation, rounded."""
    deviation = float(y.std())
    scale = deviation if deviation > 0 else 1.0
    return {"centre": float(f"{y.mean():.4g}"), "scale": float(f"{scale:.4g}")}


_UNIX_TIMES = tuple((1e9 * unit, 4e9 * unit) for unit in (1, 1e3, 1e6, 1e9))
"""From 2001 to 2096 in seconds, milliseconds, microseconds and nanoseconds."""


def looks_like_time(values: AnyArray) -> bool:
    """Return whether all numbers lie where times since 1970 do, and are not all the same.

    Examples
    --------
    >>> looks_like_time(np.array([1.7e9, 1.7e9 + 60])), looks_like_time(np.array([40.0, 41.5]))
    (True, False)
    """
    if len(values) < 2 or values.dtype.kind not in "fiu":
        return False
    low, high = float(values.min()), float(values.max())
    return low < high and any(first <= low and high <= last for first, last in _UNIX_TIMES)


def _reject_times(columns: Mapping[str, AnyArray], origin: str, cure: str) -> None:
    for name, values in columns.items():
        if looks_like_time(values):
            raise DataError(
                f"{origin}: {name} looks like a time since 1970, and a time is no feature: "
                f"{cure.format(name)}, to have samples arrive in its order; if it is none, "
                "subtract its minimum"
            )


def _moments(table: SampleTable) -> AnyArray | None:
    """Return the time of each sample as a number or a date that can be sorted; None without."""
    if table.times is None:
        return None
    times = np.asarray(table.times)
    if times.ndim != 1:
        raise DataError(f"{table.origin}: time must be one value a sample, got {times.shape}")
    if times.dtype.kind in "iuM":
        return times
    for kind in (np.float64, "datetime64[us]"):
        try:
            found: AnyArray = times.astype(str).astype(kind)
        except ValueError:
            continue
        table.reject(
            np.isnat(found) if found.dtype.kind == "M" else ~np.isfinite(found),
            "time {!r} is missing",
            times,
        )
        return found
    raise DataError(
        f"{table.origin}: time must be numbers or dates such as 2026-01-31T12:00:00, "
        f"got {str(times[0])!r}"
    )


def read_table(path: Path, device: str, label: str, time: str | None = None) -> SampleTable:
    """Read a .npz, .csv or .parquet file, with its names for devices, labels and times."""
    ending, origin = path.suffix.lower(), str(path)
    if ending not in (".npz", ".csv", ".parquet"):
        raise DataError(f"{path} must end in .npz, .csv or .parquet")
    if not path.is_file():
        if path.is_dir():
            raise DataError(f"{path} is a folder: name a file in it")
        raise DataError(
            f"there is no file {path}; a relative path starts at the folder where fedkeep runs"
        )
    if ending == ".npz":
        return _read_npz(path, device, label, time)
    by_name, row_name = _read_csv(path) if ending == ".csv" else _read_parquet(path)
    return table_of_columns(origin, by_name, device, label, time, row_name)


def table_of_columns(
    origin: str,
    by_name: Mapping[str, AnyArray],
    device: str,
    label: str,
    time: str | None = None,
    row_name: RowName = "row {}".format,
) -> SampleTable:
    """Return the samples of named columns; all that are neither of the three are features.

    Raises
    ------
    DataError
        If a named column or the features are missing, or a feature is text or a time.
    """
    _reject_columns(origin, by_name, device, label, time)
    features = [name for name in by_name if name not in (device, label, time, _TEST)]
    if not features:
        raise DataError(f"{origin} has no feature columns besides {', '.join(by_name)}")
    numbers = {name: _numbers(origin, name, by_name[name], row_name) for name in features}
    _reject_times(numbers, origin, "set time = '{}'")
    with np.errstate(over="ignore"):  # `checked_features` names what is beyond float32
        x = np.stack([column.astype(np.float32) for column in numbers.values()], axis=1)
    return SampleTable(
        origin,
        x,
        by_name[label],
        by_name.get(device),
        by_name.get(_TEST),
        row_name,
        None if time is None else by_name[time],
    )


def _other_separator(header: Iterable[str]) -> str:
    """Return what to do about a header whose names are not separated by commas; else nothing."""
    names = list(header)
    for mark in ";\t|":
        if len(names) == 1 and mark in names[0]:
            return f"its cells are separated by {mark!r}: save it with commas"
    return ""


def _reject_columns(
    origin: str, by_name: Mapping[str, AnyArray], device: str, label: str, time: str | None
) -> None:
    """Reject a table that lacks a column that was named, or has one without a name."""
    if not by_name:
        raise DataError(f"{origin} is empty: its first line must name the columns")
    named = {"label": label} | ({"time": time} if time is not None else {})
    if device != Custom.device:  # otherwise samples may be divided among devices later
        named["device"] = device
    for key, name in named.items():
        if name not in by_name:
            hint = _other_separator(by_name) or f"set task.{key}"
            known = ", ".join(by_name)
            raise DataError(f"{origin} has no column {name!r}; it has {known} ({hint})")
    roles = [name for name in (device, label, time) if name is not None]
    if len(set(roles)) < len(roles):
        raise DataError(f"{origin}: device, label and time must be different columns, got {roles}")
    if "" in by_name:
        raise DataError(
            f"{origin}: column {list(by_name).index('') + 1} has no name: if it counts the rows, "
            "leave it out (in pandas index=False), else name it"
        )


def read_iterator(name: str) -> SampleTable:
    """Read the samples that the function `module:function` yields as (device, x, y)."""
    if ":" not in name:
        raise ConfigError(f"source must look like 'module:function', got {name!r}")
    function = load_object(name)
    if not callable(function):
        raise ConfigError(f"source {name!r} is no function")
    try:
        signature(function).bind()
    except TypeError as error:
        raise ConfigError(f"source {name!r} must work without arguments: {error}") from None
    with _named_failure(name):
        samples = function()
    if not isinstance(samples, Iterable):
        raise DataError(
            f"{name} gave {samples!r}, not samples: it must return or yield tuples (device, x, y)"
        )
    rows: list[tuple[Any, AnyArray, Any]] = []
    with _named_failure(name):
        yielded = list(samples)
    for n, sample in enumerate(yielded):
        if not isinstance(sample, tuple) or len(sample) != 3:
            raise DataError(f"{name}: item {n} is not a tuple (device, x, y)")
        try:
            x = np.asarray(sample[1])
        except ValueError:
            raise DataError(f"{name}: sample {n} is no array: its rows differ in length") from None
        first = rows[0][1].shape if rows else x.shape
        if x.shape != first:
            raise DataError(
                f"{name}: sample {n} has shape {x.shape}, but sample 0 has {first}; "
                "all must have the same shape"
            )
        rows.append((sample[0], x, sample[2]))
    if not rows:
        raise DataError(f"{name} yielded no sample")
    devices, xs, labels = zip(*rows, strict=True)
    return SampleTable(name, np.asarray(xs), _objects(labels), _objects(devices), None)


@contextmanager
def _named_failure(name: str) -> Iterator[None]:
    """Turn what a user's function raises into a sentence that says where."""
    try:
        yield
    except Exception as error:  # whatever it does
        trace = traceback.extract_tb(error.__traceback__)[-1]
        raise DataError(
            f"{name} raised {type(error).__name__}: {error} ({trace.filename}, line {trace.lineno})"
        ) from error


def _objects(values: Sequence[Any]) -> AnyArray:
    """Return Python values as they are: an array of numbers would round large integers."""
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found


def _read_npz(path: Path, device: str, label: str, time: str | None) -> SampleTable:
    try:
        with path.open("rb") as file:
            content = np.load(file, allow_pickle=False)
            if not isinstance(content, np.lib.npyio.NpzFile):
                raise DataError(f"{path} is one array (npy): save x, y and device with np.savez")
            arrays = {name: content[name] for name in content.files}
    except ValueError:
        raise DataError(
            f"{path} is no npz file, or holds Python objects: save plain arrays with np.savez"
        ) from None
    except (OSError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read as npz: {error}") from None
    label = label if label in arrays or label != Custom.label else "y"
    named = [name for name in (time, None if device == Custom.device else device) if name]
    for needed in ("x", label, *named):
        if needed not in arrays:
            raise DataError(
                f"{path} has no array {needed!r}; it has {', '.join(sorted(arrays)) or 'none'}"
            )
    for name in sorted({"x", label, device, time or "x", _TEST} & set(arrays)):
        if arrays[name].ndim == 0 or arrays["x"].ndim == 0:
            single = name if arrays[name].ndim == 0 else "x"
            raise DataError(f"{path}: {single} is a single value, not one a sample")
        if len(arrays[name]) != len(arrays["x"]):
            raise DataError(
                f"{path}: {name} has {len(arrays[name])} entries, but x has {len(arrays['x'])}"
            )
    x = arrays["x"]
    if x.ndim == 2:
        columns = {f"column {n} of x": x[:, n] for n in range(x.shape[1])}
        _reject_times(columns, str(path), "save it as an array of its own and name it as time")
    return SampleTable(
        str(path),
        x,
        arrays[label],
        arrays.get(device),
        arrays.get(_TEST),
        times=None if time is None else arrays[time],
    )


def _read_csv(path: Path) -> tuple[dict[str, AnyArray], RowName]:
    rows, numbers = [], []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = csv.reader(file, skipinitialspace=True)
            header = [name.strip() for name in next(lines, [])]
            for cells in filter(None, lines):
                if any("\0" in cell for cell in cells):
                    raise DataError(f"{path}, line {lines.line_num}: a cell holds a zero byte")
                if len(cells) != len(header):
                    here = f"{path}, line {lines.line_num}"
                    hint = _other_separator(header)
                    raise DataError(
                        f"{here}: {len(cells)} cells, but the header has {len(header)}"
                        + (f" ({hint})" if hint else "")
                    )
                rows.append([cell.strip() for cell in cells])
                numbers.append(lines.line_num)
    except UnicodeDecodeError:
        raise DataError(f"{path} is not text in UTF-8: save it as CSV in UTF-8") from None
    except csv.Error as error:
        raise DataError(f"{path} cannot be read as CSV: {error}") from None
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
        return np.asarray(cells).astype(np.float64)
    except (ValueError, TypeError):
        for row, cell in enumerate(map(str, cells)):
            try:
                float(cell)
            except ValueError:
                raise DataError(
                    f"{origin}, {row_name(row)}: {name} is {cell!r}, which is no number: "
                    "leave the column out, or encode it"
                ) from None
        raise


def _prepared(dataset: str, checksum: str, source: str) -> RemoteFile:
    how = (
        f"make it from {source} as docs/own-data.md describes, "
        "or name a folder that has it in FEDKEEP_DATA"
    )
    return RemoteFile(dataset, f"{dataset.replace('-', '_')}.npz", None, checksum, how=how)


@dataclass(frozen=True)
class PreparedSet:
    """A public data set that is prepared as one npz file."""

    learning_rate: ClassVar[float] = 0.05
    """Where `train.learning_rate` is not set."""

    model: str = "mlp"
    """A model by its name, or `module:factory`."""

    file: ClassVar[RemoteFile]

    def load(self, seed: int, progress: Progress | None = None) -> Federation:
        """Read the prepared file, downloaded where it is missing."""
        path, label = str(obtain(self.file, progress)), getattr(self, "label", "y")
        own = Custom(path=path, label=label, model=self.model, rounds_per_pass=100)
        return replace(own.load(seed), name=self.file.dataset)


@dataclass(frozen=True)
class AudioMnist(PreparedSet):
    """Spoken digits of 60 people, log-mel pictures of 32 x 32; each device has one voice."""

    file = _prepared(
        "audio-mnist",
        "66933b39e9cff15875ee2fbd953d029238096459058ad95c267ec53313f52042",
        "github.com/soerenab/AudioMNIST",
    )


@dataclass(frozen=True)
class Westermo(PreparedSet):
    """Flows of an industrial network in time order, 31 source addresses; attacks come in runs."""

    model: str = "softmax"
    label: Literal["y", "y_timing"] = "y"
    """`y`: only the attacker's traffic is an attack; `y_timing`: all traffic of that time."""

    file = _prepared(
        "westermo",
        "bbda1008017bea6983a3ecc8e63f2bf90b845da0b7dcb81d8e1f6c8a7cf1c24f",
        "github.com/westermo/network-traffic-dataset",
    )


@dataclass(frozen=True)
class UjiIndoor(PreparedSet):
    """The floor of a phone, from WiFi scans in time order of 29 people, floor after floor."""

    file = _prepared(
        "uji-indoor",
        "bcfd5277d7404ac3d421a9b69be3b15a88dc1486c3d35837979dccd8c075ec68",
        "archive.ics.uci.edu (UJIIndoorLoc)",
    )
