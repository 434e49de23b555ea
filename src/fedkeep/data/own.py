"""The task `own`: a user's data, in one TOML table."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep.core.bounds import within
from fedkeep.core.errors import DataError
from fedkeep.core.types import AnyArray, IntArray
from fedkeep.data.cache import Progress
from fedkeep.data.federation import Federation, ModelSpec, Ownership, hold_out
from fedkeep.data.partition import partition_from
from fedkeep.data.tables import SampleTable, read_iterator, read_table


@dataclass(frozen=True)
class Own:
    """Samples with labels and devices, from a file (`path`) or a Python function (`source`).

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
    ...     _ = file.write("device,label,heat" + "\\npump-1,ok,41.5\\npump-2,worn,48.0" * 5)
    ...     file.flush()
    ...     fleet = Own(path=file.name).load(seed=0)
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
        within(self, "test_fraction", above=0, below=1)
        within(self, "rounds_per_pass", least=1)
        partition_from(self.partition)

    def load(self, seed: int, progress: Progress | None = None) -> Federation:  # noqa: ARG002
        if self.path is not None:
            table = read_table(Path(self.path), self.device, self.label)
        else:
            table = read_iterator(str(self.source))
        x = self._shaped(_finite(table), table)
        label_names, y = _numbered("label", table.labels, table)
        train, test, device_names = self._devices(table, y, seed)
        for members, purpose in ((train, "training"), (test, "testing")):
            if not len(members.indices):
                raise DataError(f"{table.origin} leaves no sample for {purpose}: the model needs some for either")
        if len(label_names) < 2:
            raise DataError(f"{table.origin} has a single label, '{label_names[0]}': there is nothing to tell apart")
        if self.standardise:
            x = standardised(x, train.indices, axes=0)
        spec = ModelSpec(self.model, dict(self.model_options))
        return Federation("own", x, y, train, test, label_names, spec, device_names, self.rounds_per_pass)

    def _shaped(self, x: AnyArray, table: SampleTable) -> AnyArray:
        if self.shape is None:
            return x
        have = int(np.prod(x.shape[1:]))
        if int(np.prod(self.shape)) != have:
            raise DataError(f"shape {list(self.shape)} does not fit: a sample of {table.origin} has {have} features")
        return x.reshape(len(x), *self.shape)

    def _devices(
        self, table: SampleTable, y: IntArray, seed: int
    ) -> tuple[Ownership, Ownership, tuple[str, ...] | None]:
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
        table.refuse(~np.isin(flags, ("0", "1", "true", "false", "0.0", "1.0")), "test must be 0 or 1, got {!r}", flags)
        tested = np.isin(flags, ("1", "true", "1.0"))[members.indices]
        return members.where(~tested), members.where(tested), names


def standardised(x: AnyArray, known: IntArray, axes: int | tuple[int, ...]) -> AnyArray:
    """The samples in standard deviations of the known ones, taken over these axes."""
    mean, deviation = x[known].mean(axis=axes), x[known].std(axis=axes)
    scaled: AnyArray = (x - mean) / np.where(deviation > 0, deviation, np.float32(1))
    return scaled.astype(np.float32)


def _finite(table: SampleTable) -> AnyArray:
    if len(table.x) == 0:
        raise DataError(f"{table.origin} holds no sample")
    if table.x.dtype.kind not in "fiub":
        raise DataError(f"{table.origin}: x must be numbers, got {table.x.dtype}")
    x = np.ascontiguousarray(table.x, dtype=np.float32)
    x = x[:, None] if x.ndim == 1 else x
    bad = np.asarray(~np.isfinite(x).reshape(len(x), -1).all(axis=1))
    table.refuse(bad, f"a feature is missing, NaN or infinite ({bad.sum()} such samples); fill in or drop them")
    return x


def _numbered(what: str, values: AnyArray, table: SampleTable) -> tuple[tuple[str, ...], IntArray]:
    """The distinct values in order, as names, and the number of each entry; a fraction or a gap is refused."""
    if values.ndim != 1:
        raise DataError(f"{table.origin}: {what} must be one value a sample, got shape {values.shape}")
    try:
        numbers = values.astype(np.float64)
        bad, known = ~np.isfinite(numbers) | (numbers != np.round(numbers)), values
    except (ValueError, TypeError):
        known = numbers = np.array([str(value).strip() if value is not None else "" for value in values])
        bad = known == ""
    table.refuse(bad, what + " {!r} is neither a whole number nor a name", known)
    if numbers.dtype.kind == "f":
        numbers = numbers.astype(np.int64)  # so that 10 comes after 9
    names, places = np.unique(numbers, return_inverse=True)
    return tuple(map(str, names.tolist())), places.reshape(-1).astype(np.int64)
