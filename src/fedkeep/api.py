"""Experiments from Python: compare methods on arrays, run experiment files, read records.

Examples
--------
>>> import numpy as np
>>> import fedkeep
>>> rng = np.random.default_rng(0)
>>> y = rng.integers(0, 3, 600)
>>> x = rng.normal(size=(600, 4)) + 3 * np.eye(3, 4)[y]
>>> found = fedkeep.compare(
...     x, y, devices=6, methods=["fifo", "default"], seeds=2, rounds=10, jobs=1, progress=False
... )
>>> [run.header.method for run in found.runs]
['default', 'default', 'fifo', 'fifo']
"""

import dataclasses
import os
import sys
import tempfile
import time as clock
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from html import escape
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from fedkeep.config.experiment import RunSpec, expand, read_experiment
from fedkeep.config.methods import METHODS, method_table
from fedkeep.core.bounds import check_whole
from fedkeep.core.errors import ConfigError, DataError
from fedkeep.core.policy import POLICIES, SelectionPolicy
from fedkeep.core.registry import did_you_mean
from fedkeep.core.types import AnyArray
from fedkeep.data.custom import Custom, SampleTable, arrays_of, table_of_columns, target_kind
from fedkeep.files import folder_for_records
from fedkeep.learn.models import SESSION, session_model
from fedkeep.records import Comparison, Run, read_runs
from fedkeep.records import compare as compare_runs
from fedkeep.records.figures import accuracy_figure
from fedkeep.records.tables import as_text, explanation, frame, latex, sentences, tables
from fedkeep.records.tensorboard import write_events
from fedkeep.sim.own_rates import best_rates, rate_experiment
from fedkeep.sim.runner import is_finished, play, record_path
from fedkeep.sim.sweep import run_sweep
from fedkeep.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

MethodLike: TypeAlias = "str | type[SelectionPolicy] | SelectionPolicy | Mapping[str, Any]"
"""A registered method or policy, `module:Class`, a policy, or the tables of a method."""
_EVALUATIONS = 20
_SAMPLES = "samples.npz"


class MethodComparison:
    """Finished runs of several methods, and what they show.

    Its representation is the report: a table of the methods, their differences to the first base,
    a sentence a method, and notes.

    Parameters
    ----------
    runs : sequence of Run
        The runs.
    folder : Path
        Where their records are; `fedkeep report` and `fedkeep watch` read it, too.
    against : sequence of str
        Methods to compare the others with; by default FIFO, or else reservoir sampling.
    notes : sequence of str
        Remarks on how the runs were made.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        folder: Path,
        against: Sequence[str] = (),
        notes: Sequence[str] = (),
    ) -> None:
        self.runs = list(runs)
        self.folder = folder
        self.comparison: Comparison = compare_runs(self.runs, against)
        self.notes = (*notes, *self.comparison.notes)

    @property
    def verdicts(self) -> dict[str, str]:
        """By method: better, worse, equivalent or inconclusive against the first base."""
        return {
            row.method: found["final"].verdict
            for row in self.comparison.rows
            if row.differences and (found := row.differences[0]) is not None
        }

    def frame(self) -> "DataFrame":
        """Return every evaluation as a row of a pandas frame (extra `frame`)."""
        return frame(self.runs)

    def figure(self, title: str | None = None) -> "Figure":
        """Return the accuracy over rounds as a matplotlib figure (extra `plot`).

        Parameters
        ----------
        title : str, optional
            By default the name of the task.

        Examples
        --------
        `found.figure().savefig("accuracy.pdf")` writes a vector graphic for a paper.
        """
        return accuracy_figure(self.runs, title)

    def latex(self) -> str:
        """Return all tables as LaTeX, for the package booktabs."""
        return latex(self.comparison)

    def to_tensorboard(self, directory: Path | str) -> list[Path]:
        """Write every run as event files of TensorBoard (extra `tensorboard`)."""
        return write_events(self.runs, Path(directory))

    def to_html(self, path: Path | str) -> Path:
        """Write the report as one self-contained page."""
        from fedkeep.web.report import html

        target = Path(path)
        target.write_text(html(self.runs, self.comparison, "fedkeep"), encoding="utf-8")
        return target

    def __repr__(self) -> str:
        parts = [as_text(table) for table in tables(self.comparison)]
        lines = [*sentences(self.comparison), *self.notes]
        return "\n\n".join([*parts, "\n".join(lines)])

    def _repr_html_(self) -> str:
        parts = []
        for table in tables(self.comparison):
            head = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
            body = "".join(
                "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
                for row in table.rows
            )
            caption = f"<caption>{escape(table.title)}</caption>"
            parts.append(f"<table>{caption}<tr>{head}</tr>{body}</table>")
        lines = [*sentences(self.comparison), *self.notes, explanation(self.comparison)]
        return "".join([*parts, *(f"<p>{escape(sentence)}</p>" for sentence in lines)])


def compare(
    x: Any,
    y: Any = None,
    device: Any = None,
    *,
    methods: Sequence[MethodLike] | Mapping[str, MethodLike] = ("fifo", "balanced-fifo", "default"),
    seeds: int | Sequence[int] = 3,
    capacity: int = 10,
    rounds: int = 200,
    participation: float = 0.1,
    epochs: int = 5,
    learning_rate: "float | Literal['own'] | None" = None,
    model: Any = "softmax",
    time: Any = None,
    test: Any = None,
    test_fraction: float = 0.2,
    devices: int | None = None,
    shuffle: bool = False,
    target: Literal["class", "number"] | None = None,
    against: Sequence[str] = (),
    jobs: int | None = None,
    progress: bool = True,
    out: Path | str | None = None,
) -> MethodComparison:
    """Compare selection methods on labelled samples, seed by seed.

    Parameters
    ----------
    x : array, pandas.DataFrame, torch tensor or torch data set
        The samples; a data set yields pairs of a sample and its label.
    y : array or str
        The labels, or the column of a frame; left out for a data set.
    device : array or str, optional
        The device that each sample came from, or the column of a frame.
    methods : sequence or mapping
        Names of registered methods (`fedkeep.config.methods.METHODS`) or policies, policy classes
        or instances, or tables of an experiment; a mapping gives each a name of its own.
    seeds : int or sequence of int
        How many seeds, or which; each draws the split, the stream and the first model.
    capacity : int
        Samples that a device can store.
    rounds, participation, epochs : int, float, int
        Rounds of training, the share of devices in each, and local epochs.
    learning_rate : float or "own", optional
        Of local training, for all methods; by default that of the task `custom`. "own" chooses a
        rate for each method by the rule of `fedkeep.sim.own_rates`: a third, one, three or ten
        times that of the task, on two seeds that are not reported.
    model : str, torch.nn.Module or callable
        `softmax`, `mlp`, `module:factory`, a module, or a factory of modules.
    time : array or str, optional
        The time of each sample; without it the rows of a device are in time order.
    test : array or str, optional
        1 for samples that are held out for testing; by default `test_fraction` of each device's.
    test_fraction : float
        Share that is held out at random inside each device.
    devices : int, optional
        Divide the samples among so many devices (Dirichlet, alpha 0.3) where none is named.
    shuffle : bool
        Let the samples of a device arrive in random order.
    target : {"class", "number"}, optional
        Whether `y` is a class, or a number to predict; by default text and at most 20 different
        whole numbers are classes, more with fractions are numbers, and else you are asked.
    against : sequence of str
        Methods to compare the others with; by default FIFO, or else reservoir sampling.
    jobs : int, optional
        Runs at a time; by default one a processor. Policies and models that other processes
        cannot import run one after the other in this process.
    progress : bool
        Show the share that is done and the time left.
    out : Path or str, optional
        Where the records go; by default a new folder. What is finished there is not run again,
        except policies and models that other processes cannot import. A folder belongs to one set
        of samples: others are rejected.

    Returns
    -------
    MethodComparison
        Prints as a table; see its `frame`, `figure` and `latex`.

    Raises
    ------
    ConfigError
        If a method, model or option is not valid.
    DataError
        If the samples are not what a model can be trained on, or leave open what `y` is.

    Examples
    --------
    See the module.
    """
    rounds, against = check_whole("rounds", rounds, least=1), _bases(against)
    chosen = _chosen(methods)
    for base in against:
        if base not in chosen:
            raise ConfigError(f"no method '{base}' to compare with: {did_you_mean(base, chosen)}")
    table = _samples(x, y, device, time, test)
    _check_devices(table, devices)
    folder = _folder(out)
    task = _custom_task(table, folder, target) | {
        "test_fraction": test_fraction,
        "rounds_per_pass": rounds,
        "model": _model_name(model),
    }
    if devices is not None:
        task["partition"] = {"name": "dirichlet", "devices": devices, "alpha": 0.3}
    training: Table = {"rounds": rounds, "participation": participation, "epochs": epochs}
    if learning_rate not in (None, "own"):
        training["learning_rate"] = _rate(learning_rate)
    experiment: Table = {
        "task": task,
        "storage": {"capacity": capacity},
        "train": training,
        "stream": {"shuffle": shuffle},
        "record": {
            "every": max(1, rounds // _EVALUATIONS),
            "checkpoint_every": max(1, rounds // 3),
        },
        "methods": {label: dict(found.table) for label, found in chosen.items()},
        "sweep": {"seed": _seeds(seeds)},
    }
    local = {label for label, found in chosen.items() if found.policy is not None}
    if task["model"] in SESSION:
        local = set(chosen)
    notes = []
    with _registered(chosen):
        if learning_rate == "own":
            rates = _own_rates(experiment, folder, local, jobs, progress=progress)
            notes.append(_rates_note(rates))
            for label, rate in rates.items():
                experiment["methods"][label] |= {"train": {"learning_rate": rate}}
        specs = expand(experiment)
        notes += _play(specs, folder, local, jobs, progress=progress)
    return MethodComparison(_runs_of(specs, folder), folder, against, notes)


def _check_devices(table: SampleTable, devices: int | None) -> None:
    """Check that either the samples say whose they are, or are to be divided."""
    if table.devices is None and devices is None:
        raise DataError(
            "compare needs the device of each sample: pass device=, or devices=20 to divide the "
            "samples among 20"
        )
    if table.devices is not None and devices is not None:
        raise DataError(
            "the samples have a device each, and devices= would divide them anew: leave out "
            "devices=, or the devices of the samples"
        )


def _custom_task(
    table: SampleTable, folder: Path, target: Literal["class", "number"] | None
) -> Table:
    """Write the samples into the folder; return the task that reads them."""
    kind = target_kind(table, target)
    arrays = arrays_of(table, kind)
    path = folder / _SAMPLES
    if path.exists() and not _holds(path, arrays):
        # Its records would be taken for finished runs on these samples.
        raise DataError(f"{folder} has runs on other samples: choose another folder, or empty it")
    np.savez(path, **arrays)  # type: ignore[arg-type]
    task: Table = {"name": "custom", "path": str(path), "label": "y"}
    if kind == "number" or target is not None:
        task["target"] = kind
    if "time" in arrays:
        task["time"] = "time"
    return task


def _holds(path: Path, arrays: Mapping[str, AnyArray]) -> bool:
    """Whether a file has exactly these arrays."""
    try:
        with np.load(path, allow_pickle=False) as found:
            return set(found) == set(arrays) and all(
                found[name].dtype == array.dtype and np.array_equal(found[name], array)
                for name, array in arrays.items()
            )
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is damaged: delete it with its folder's records") from error


def _rate(learning_rate: object) -> object:
    if isinstance(learning_rate, str):
        raise ConfigError(f'learning_rate must be a number or "own", got {learning_rate!r}')
    return learning_rate


def _runs_of(specs: Sequence[RunSpec], folder: Path) -> list[Run]:
    """Return the runs of these specifications; the folder may hold others."""
    paths = [record_path(spec, folder) for spec in specs]
    return [run for run in read_runs(folder) if run.path in paths]


def simulate(
    experiment: Path | str | Mapping[str, Any],
    *,
    out: Path | str | None = None,
    jobs: int | None = None,
    progress: bool = True,
) -> MethodComparison:
    """Run an experiment: every method, setting and seed of it.

    Parameters
    ----------
    experiment : Path, str or mapping
        An experiment file, or its tables.
    out : Path or str, optional
        Where the records go; what is finished there is not run again. By default a new folder.
    jobs : int, optional
        Runs at a time; by default one a processor.
    progress : bool
        Show the share that is done and the time left.

    Examples
    --------
    >>> found = simulate(
    ...     {"task": {"name": "demo", "devices": 4}, "train": {"rounds": 4}}, progress=False
    ... )
    >>> found.runs[0].end.round
    4
    """
    if not isinstance(experiment, str | Path | Mapping):
        raise ConfigError(
            f"simulate takes a TOML file or its tables, got {type(experiment).__name__}"
        )
    table = (
        dict(experiment) if isinstance(experiment, Mapping) else read_experiment(Path(experiment))
    )
    specs = expand(table)
    folder = _folder(out)
    notes = _play(specs, folder, set(), jobs, progress=progress)
    return MethodComparison(_runs_of(specs, folder), folder, (), notes)


def load_records(directory: Path | str) -> MethodComparison:
    """Read the records of a directory, as `fedkeep run` or `compare` wrote them.

    Raises
    ------
    DataError
        If the directory holds no record, or a damaged one.
    """
    if not isinstance(directory, str | Path):
        raise DataError(f"load_records takes a folder, got {directory!r}")
    folder = Path(directory)
    return MethodComparison(read_runs(folder), folder)


@dataclasses.dataclass(frozen=True)
class _Chosen:
    """The tables of a method; `policy` where its class exists in this process only."""

    table: Table
    policy: type[SelectionPolicy] | None = None


def _seeds(seeds: object) -> list[int]:
    if isinstance(seeds, Iterable) and not isinstance(seeds, str):
        found = [check_whole("a seed", seed) for seed in seeds]
        if not found:
            raise ConfigError("seeds must be a number of seeds, or a list with at least one")
        return found
    return list(range(check_whole("seeds", seeds, least=1)))


def _bases(against: object) -> tuple[str, ...]:
    if isinstance(against, str):
        return (against,)
    if not isinstance(against, Iterable):
        raise ConfigError(f"against must be a list of methods, got {against!r}")
    return tuple(map(str, against))


def _folder(out: object) -> Path:
    return folder_for_records(tempfile.mkdtemp(prefix="fedkeep-") if out is None else out)


def _chosen(methods: Sequence[MethodLike] | Mapping[str, MethodLike]) -> dict[str, _Chosen]:
    if isinstance(methods, str) or not isinstance(methods, Mapping | Iterable):
        raise ConfigError(f'methods must be a list, such as ["fifo", "default"], got {methods!r}')
    methods = methods if isinstance(methods, Mapping) else list(methods)
    named = methods if isinstance(methods, Mapping) else {_label(one): one for one in methods}
    if len(named) < len(methods) or not named:
        raise ConfigError(
            "methods must be one or more different ones: name them with a mapping, such as "
            '{"short": MyPolicy(window=5), "long": MyPolicy(window=50)}'
        )
    return {str(label): _method(one) for label, one in named.items()}


def _label(method: MethodLike) -> str:
    if isinstance(method, str):
        return method.rpartition(":")[2]
    if isinstance(method, Mapping):
        raise ConfigError('the tables of a method need a name: methods={"mine": {...}}')
    cls = method if isinstance(method, type) else type(method)
    return cls.__name__


def _method(method: MethodLike) -> _Chosen:
    if isinstance(method, Mapping):
        return _Chosen(dict(method))
    if isinstance(method, str):
        if method == "default" or method in METHODS:
            return _Chosen(method_table(method))
        if method in POLICIES or ":" in method:
            return _Chosen({"policy": {"name": method}})
        known = [*METHODS, "default", *POLICIES]
        raise ConfigError(f"unknown method '{method}': {did_you_mean(method, known)}")
    cls = method if isinstance(method, type) else type(method)
    if not issubclass(cls, SelectionPolicy):
        raise ConfigError(
            f"{cls.__name__} is no method: pass a name, a subclass of fedkeep.SelectionPolicy, or "
            "an instance of one"
        )
    if "__init__" in vars(cls) and not dataclasses.is_dataclass(cls):
        raise ConfigError(
            f"{cls.__name__} has an __init__ of its own: declare its options as dataclass fields"
        )
    where = _import_path(cls)
    if "__dataclass_fields__" not in vars(cls):
        dataclasses.dataclass(frozen=True)(cls)
    options = {} if isinstance(method, type) else _options(method)
    if where is not None:
        return _Chosen({"policy": {"name": where, **options}})
    POLICIES.admit(cls.__name__, cls)
    return _Chosen({"policy": {"name": f"{cls.__name__} of this process", **options}}, cls)


def _options(policy: SelectionPolicy) -> Table:
    """Return the fields of a policy that differ from their defaults, for the table `policy`."""
    found: Table = {}
    for field in dataclasses.fields(policy):  # type: ignore[arg-type]
        value = getattr(policy, field.name)
        if field.init and value != field.default and value is not None:
            found[field.name] = value
    return found


def _import_path(cls: type) -> str | None:
    """Return `module:Class` if another process can import the policy as it is; else None."""
    if "__dataclass_fields__" not in vars(cls):
        return None
    if cls.__module__ == "__main__" or "." in cls.__qualname__:
        return None
    try:
        found = getattr(import_module(cls.__module__), cls.__name__, None)
    except ImportError:
        return None
    return f"{cls.__module__}:{cls.__name__}" if found is cls else None


@contextmanager
def _registered(methods: Mapping[str, _Chosen]) -> Iterator[None]:
    """Make the policies of this process known by their names while runs use them."""
    added = {
        str(found.table["policy"]["name"]): found.policy
        for found in methods.values()
        if found.policy is not None
    }
    POLICIES.update(added)
    try:
        yield
    finally:
        for name in added:
            del POLICIES[name]


def _model_name(model: Any) -> str:
    if isinstance(model, str):
        return model
    if not callable(model):
        raise ConfigError(
            f"model must be a name, a torch.nn.Module or a factory of modules, got {model!r}"
        )
    name = getattr(model, "__name__", type(model).__name__)
    return session_model(model, name)


def _samples(x: Any, y: Any, device: Any, time: Any, test: Any) -> SampleTable:
    """Return arrays, the columns of a frame or the items of a data set as one table."""
    origin = "the samples"
    if hasattr(x, "columns") and hasattr(x, "to_numpy"):
        return _samples_of_frame(x, y, device, time, test)
    if y is None:
        x, y = _items(x)
    features, labels = _array(x), _array(y)
    if features.ndim == 0:
        hint = ": pass x.toarray()" if hasattr(x, "toarray") else ""
        raise DataError(f"x must be an array with a sample a row, got {type(x).__name__}{hint}")
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]  # a column vector, as data frames and scikit-learn have them
    columns = {"y": labels, "device": device, "time": time, "test": test}
    arrays = {name: _array(column) for name, column in columns.items() if column is not None}
    for name, array in arrays.items():
        row = array.ndim == 2 and name == "y"  # several numbers to predict
        if (array.ndim != 1 and not row) or len(array) != len(features):
            raise DataError(
                f"{name} must have one value for each of the {len(features)} samples, got shape "
                f"{array.shape}"
            )
    return SampleTable(
        origin,
        features,
        labels,
        arrays.get("device"),
        arrays.get("test"),
        times=arrays.get("time"),
    )


def _samples_of_frame(x: Any, y: Any, device: Any, time: Any, test: Any) -> SampleTable:
    twice = [name for name, count in Counter(map(str, x.columns)).items() if count > 1]
    if twice:
        raise DataError(f"the frame has several columns called {twice[0]!r}: give each its name")
    columns = {str(name): np.asarray(x[name]) for name in x.columns}
    given = {"label": y, "device": device, "time": time, "test": test}
    names: dict[str, str] = {}
    for key, value in given.items():
        if isinstance(value, str):
            if value not in columns:
                hint = did_you_mean(value, columns)
                raise DataError(f"the frame has no column {value!r} for {key}: {hint}")
            names[key] = value
        elif value is not None:
            names[key] = f"{key} (given apart)"
            columns[names[key]] = _array(value)
    if "label" not in names:
        raise DataError("compare needs the labels: pass y=, an array or the name of a column")
    if "test" in names:
        columns["test"] = columns.pop(names["test"])
    lengths = {len(column) for column in columns.values()}
    if len(lengths) > 1:
        raise DataError(f"columns must be of one length, got {sorted(lengths)}")
    device_name = names.get("device", "device")
    return table_of_columns("the frame", columns, device_name, names["label"], names.get("time"))


def _items(dataset: Any) -> tuple[AnyArray, AnyArray]:
    """Return the samples and labels of a torch data set, or of any sequence of pairs."""
    if isinstance(dataset, Mapping):
        raise DataError(
            f"x must be the samples, got a {type(dataset).__name__}: pass its arrays, such as "
            "compare(found.data, found.target, ...)"
        )
    try:
        pairs = [dataset[index] for index in range(len(dataset))]
        return (
            np.stack([_array(sample) for sample, _ in pairs]),
            np.array([_array(label).item() for _, label in pairs], dtype=object),
        )
    except (TypeError, ValueError, LookupError) as error:
        raise DataError(
            "without y, x must be a data set of pairs (sample, label), all samples of one shape: "
            f"{error}"
        ) from None


def _array(values: Any) -> AnyArray:
    """Return array-likes and torch tensors as arrays; whole numbers and text stay exact."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    try:
        found = np.asarray(values)
    except ValueError:
        raise DataError("the samples differ in shape: all must have the same") from None
    if isinstance(values, list | tuple) and found.ndim == 1:
        exact = np.empty(len(values), dtype=object)
        exact[:] = values
        return exact if found.dtype.kind not in "iub" else found
    return found


def _own_rates(
    experiment: Table, folder: Path, local: set[str], jobs: int | None, *, progress: bool
) -> dict[str, float]:
    """Return the learning rate of each method; the trials' records lie beside the folder."""
    tried = rate_experiment(experiment, Custom.learning_rate, experiment["sweep"]["seed"])
    aside = folder_for_records(folder.with_name(f"{folder.name}-rates"))
    specs = expand(tried)
    _play(specs, aside, local, jobs, progress=progress)
    return best_rates(_runs_of(specs, aside))


def _rates_note(rates: Mapping[str, float]) -> str:
    each = ", ".join(f"{method} {rate:g}" for method, rate in rates.items())
    return f"learning rates, each method's own, chosen on two seeds that are not reported: {each}"


def _play(
    specs: Sequence[RunSpec],
    folder: Path,
    local: set[str],
    jobs: int | None,
    *,
    progress: bool,
) -> list[str]:
    """Run what is not finished; return notes on how.

    A method of `local` has a policy or model that exists in this process only. It is run again
    each time, as its name does not say whether its code is still the same.
    """
    here = [spec for spec in specs if spec.experiment.label in local]
    elsewhere = [
        spec
        for spec in specs
        if spec.experiment.label not in local and not is_finished(spec, folder)
    ]
    rounds = sum(spec.experiment.train.rounds for spec in (*here, *elsewhere))
    shown = _Progress(rounds, shown=progress)
    at_a_time = (os.cpu_count() or 1) if jobs is None else check_whole("jobs", jobs, least=1)
    notes = []
    run_sweep(elsewhere, folder, jobs=at_a_time, resume=True, listen=shown.listener(elsewhere))
    if here and at_a_time > 1:
        labels = ", ".join(sorted({spec.experiment.label for spec in here}))
        notes.append(
            f"{labels}: run one after the other, since the policy or model exists in this process "
            "only; put it into a module (a policy as a frozen dataclass) to run its seeds in "
            "parallel."
        )
    listen = shown.listener(here)
    for place, spec in enumerate(here):
        play(spec, folder, progress=partial(listen, place))
    shown.close()
    return notes


class _Progress:
    """One line on standard error with the share done and the time left, measured so far."""

    def __init__(self, rounds: int, *, shown: bool) -> None:
        self._rounds, self._done, self._began = max(1, rounds), 0, clock.monotonic()
        notebook = "ipykernel" in sys.modules
        self._shown = shown and (notebook or sys.stderr.isatty())
        self._drawn = 0.0

    def listener(self, specs: Sequence[RunSpec]) -> Callable[[int, int, float | None], None]:
        """Return a callback that counts the rounds of these runs."""
        done = [0] * len(specs)

        def listen(place: int, round_: int, _: float | None) -> None:
            self._done += round_ - done[place]
            done[place] = round_
            self._draw()

        return listen

    def _draw(self) -> None:
        now = clock.monotonic()
        if not self._shown or now - self._drawn < 0.2:
            return
        self._drawn = now
        share = self._done / self._rounds
        left = (now - self._began) * (1 - share) / share if share else float("nan")
        sys.stderr.write(f"\r{share:4.0%}, about {left:.0f} s left   ")
        sys.stderr.flush()

    def close(self) -> None:
        """End the line."""
        if self._drawn:
            sys.stderr.write(f"\rdone in {clock.monotonic() - self._began:.0f} s            \n")
