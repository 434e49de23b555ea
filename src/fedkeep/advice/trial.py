"""The trial behind an advice: methods on a user's data, seed by seed, until they are settled."""

import itertools
import json
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from fedkeep.advice.rule import LOOKS, Lead, best_of, lead, open_methods, recommend
from fedkeep.agent.assembly import AgentConfig, budget_for, parse_config
from fedkeep.agent.store_file import LEAST_BUDGET
from fedkeep.config.experiment import RunSpec
from fedkeep.config.method import fleet_tables
from fedkeep.config.methods import method_table
from fedkeep.config.reference import bare, toml
from fedkeep.core.errors import ConfigError, DataError
from fedkeep.data import Federation
from fedkeep.records import read_run
from fedkeep.records.measures import final_accuracy, late_accuracy
from fedkeep.sim.runner import is_finished, record_path
from fedkeep.sim.sweep import Backend, estimate_seconds, run_sweep
from fedkeep.tables import Table, merged

FIFO, BALANCED, LOCAL, SHARED, UNLIMITED = (
    "fifo",
    "balanced-fifo",
    "gist-local",
    "gist-shared",
    "full-data",
)
CANDIDATES = (FIFO, BALANCED, "balanced-reservoir", LOCAL, "ode", SHARED)
"""From the simplest to the most elaborate, by their names in `config.methods`."""
RATES = (0.01, 0.03, 0.1, 0.3)
"""Learning rates that every method may choose from: none is judged at another's best."""
LARGER = 4
"""How many times larger the store is whose benefit is measured."""
_EVALUATIONS, _TUNING_SEED = 15, 1000
_CONFIRMING = 5
"""Seeds of the experiment that should confirm an advice."""
_FEWEST_ROUNDS, _MOST_ROUNDS = 40, 300


@dataclass(frozen=True)
class TrialSettings:
    """One trial of all methods: what they share, and the store and learning rate of each."""

    task: Table
    capacity: int
    """Samples in the store of a method that `capacities` does not name."""
    participation: float
    rounds: int
    stream: Table = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    capacities: dict[str, int] = field(default_factory=dict)
    """Samples that each method's store holds within the same bytes; 0: none."""
    budget: int | None = None
    """Bytes of the store; None where samples are counted."""

    @property
    def candidates(self) -> tuple[str, ...]:
        """The methods to choose from: those whose store holds a sample."""
        return tuple(method for method in CANDIDATES if self.slots(method) > 0)

    @property
    def methods(self) -> tuple[str, ...]:
        """The candidates, and unlimited storage as a bound."""
        return (*self.candidates, UNLIMITED)

    def slots(self, method: str) -> int:
        """Return how many samples a method's store holds."""
        return self.capacities.get(method, self.capacity)

    def table(
        self, method: str, seed: int, *, rate: float | None = None, capacity: int | None = None
    ) -> Table:
        """Return the tables of one run."""
        own: Table = {
            "label": method,
            "seed": seed,
            "train": {"learning_rate": rate or self.rates.get(method, RATES[1])},
        }
        own["storage"] = {"capacity": capacity or self.slots(method)}
        return merged(merged(self.shared(), method_table(method)), own)

    def shared(self) -> Table:
        """Return the tables that all runs share."""
        return {
            "task": {**self.task, "rounds_per_pass": self.rounds},
            "storage": {"capacity": self.capacity},
            "train": {
                "rounds": self.rounds,
                "participation": self.participation,
                "epochs": 5,
                "decay": 1.0,
            },
            "stream": self.stream,
            "record": {
                "every": max(1, self.rounds // _EVALUATIONS),
                "checkpoint_every": max(1, self.rounds // 3),
            },
        }

    def write_files(
        self, folder: Path, method: str, data: Federation, first_seed: int
    ) -> list[Path]:
        """Write the experiment that should confirm an advice, and configurations that use it.

        Parameters
        ----------
        folder : Path
            Where the files go.
        method : str
            The method that is advised.
        data : Federation
            The user's data, for the form of its samples and the names of its labels.
        first_seed : int
            The first seed that the trial has not used.
        """
        own = {
            m: {"train": {"learning_rate": self.rates[m]}, "storage": {"capacity": self.slots(m)}}
            for m in self.rates
        }
        methods = {name: merged(method_table(name), own[name]) for name in own}
        sweep = {"seed": list(range(first_seed, first_seed + _CONFIRMING))}
        model = {"name": data.model.name, **data.model.options}
        served = fleet_tables(method_table(method))
        fleet: Table = {"samples": samples_of(data), "model": model, **served}
        fleet["train"] = self.shared()["train"] | own[method]["train"]
        agent = agent_table(method, data)
        agent["store"]["budget"] = self.budget or budget_for(
            parse_config(agent), self.slots(method)
        )
        source = '\n[[source]]\nkind = "lines"  # JSON lines on standard input; see docs/agent.md\n'
        purposes = {
            "experiment.toml": "Confirms the advice on unused seeds: fedkeep run experiment.toml",
            "agent.toml": "The configuration of a device: fedkeep agent run agent.toml",
            "fleet.toml": "The configuration of the server: fedkeep serve fleet.toml",
        }
        bodies = {
            "experiment.toml": as_toml({**self.shared(), "methods": methods, "sweep": sweep}),
            "agent.toml": as_toml(agent) + source,
            "fleet.toml": as_toml(fleet),
        }
        for name, purpose in purposes.items():
            (folder / name).write_text(f"# {purpose}\n{bodies[name]}", encoding="utf-8")
        return [folder / name for name in purposes]


def samples_of(data: Federation) -> Table:
    """Return the table `samples` of a fleet or an agent."""
    if data.targets is not None:
        edges, width = list(data.targets.edges), data.targets.width
        divided = {"edges": edges} if edges else {}
        several = {"width": width} if width > 1 else {}
        return {"shape": list(data.sample_shape), "targets": "number", **divided, **several}
    return {
        "shape": list(data.sample_shape),
        "labels": data.labels,
        "names": list(data.label_names),
    }


def agent_table(method: str, data: Federation) -> Table:
    """Return the tables of an agent that runs a method on such data, without a budget."""
    table = method_table(method)
    agent: Table = {
        "samples": samples_of(data),
        "model": {"name": data.model.name, **data.model.options},
        **{key: table[key] for key in ("policy", "storage", "weights", "gist") if key in table},
        "store": {"path": "samples.store"},
        "agent": {"socket": "agent.sock"},
    }
    return agent


def capacities_within(budget: int, data: Federation) -> dict[str, int]:
    """Return how many samples each candidate's store holds in a budget of bytes.

    The budget is that of an agent's `store.budget`: the whole file, with the model, the gist and
    all metadata.

    Raises
    ------
    ConfigError
        If not even FIFO's store holds a sample.
    """
    found = {}
    for method in CANDIDATES:
        config = _config_within(budget, method, data)
        found[method] = _capacity_within(config, budget)
    if found[FIFO] == 0:
        least = budget_for(_config_within(budget, FIFO, data), 1)
        raise ConfigError(
            f"{budget:,} bytes are too few: a device that stores one sample of this data, with "
            f"the model and its metadata, needs {least:,}"
        )
    return found


def _config_within(budget: int, method: str, data: Federation) -> AgentConfig:
    """Return an agent's configuration with this budget, on which some of its metadata depends."""
    agent = agent_table(method, data)
    agent["store"]["budget"] = max(budget, LEAST_BUDGET)
    return parse_config(agent)


def _capacity_within(config: AgentConfig, budget: int) -> int:
    """Return the most samples that a store of this many bytes holds; 0 where it holds none."""
    sample_bytes = math.prod(config.samples.shape) * np.dtype(config.samples.dtype).itemsize
    counts = range(1, budget // sample_bytes + 2)
    return bisect_right(counts, budget, key=lambda count: budget_for(config, count))


def as_toml(table: Table) -> str:
    """Return a table of tables as TOML, one line a table, and one for each method.

    Examples
    --------
    >>> print(as_toml({"train": {"rounds": 9}, "stream": {}, "sweep": {"seed": [3, 4]}}), end="")
    train = { rounds = 9 }
    sweep.seed = [3, 4]
    """
    sections = ("methods", "sweep")
    plain = {key: value for key, value in table.items() if key not in sections and value != {}}
    spread = {
        f"{key}.{bare(name)}": value
        for key in sections
        for name, value in table.get(key, {}).items()
    }
    return "".join(f"{key} = {toml(value)}\n" for key, value in (plain | spread).items())


@dataclass
class Trial:
    """A trial in a folder; what an earlier call finished on the same data is not done again."""

    settings: TrialSettings
    folder: Path
    seconds: float
    """The limit of all that may pass."""
    jobs: int
    on_progress: Callable[[str, float, float], None]
    """Called with the stage, the share of the work done, and the estimated seconds left."""
    backend: Backend = "local"
    data_digest: str = ""
    """Of the data file; empty where the data is no file."""
    finals: dict[str, dict[int, float]] = field(default_factory=dict)
    """The final accuracy of every finished run, by method, then by seed."""
    _began: float = field(default_factory=time.monotonic)
    _done: float = 0.0
    _planned: float = 1.0

    def run(self) -> bool:
        """Run the trial; return whether it came to its end.

        The time limit and Ctrl-C end it early; what is finished counts.
        """
        try:
            self._run()
        except KeyboardInterrupt:
            return False
        return True

    def recommended(self) -> str:
        """Return the method to use, by the rule."""
        return recommend(self.finals, self.settings.candidates)

    def leader(self) -> str:
        """Return the candidate with the best mean so far."""
        return best_of(self.finals, self.settings.candidates)

    def lead(self, method: str, other: str) -> Lead | None:
        """Return a method's lead over another with the bounds of the rule."""
        return lead(self.finals, method, other, len(self.settings.candidates) - 1)

    def open(self) -> list[str]:
        """Return the candidates that more seeds may still make the recommended one."""
        return open_methods(self.finals, self.settings.candidates)

    def _run(self) -> None:
        """Choose rounds and rates, then run seeds until nothing is open."""
        self._choose_rounds()
        first = LOOKS[0]
        methods = self.settings.methods
        runs = len(methods) * len(RATES) / 2 + first * (len(methods) + 1)
        self._planned = runs * self.settings.rounds
        if not self.settings.rates:
            self._tune()
        table, seeds = self.settings.table, range(first)
        wanted = {(method, seed): table(method, seed) for seed in seeds for method in methods}
        self._play(f"seeds 0 to {first - 1}", wanted)
        self._try_larger_store(seeds)
        for before, look in itertools.pairwise(LOOKS):
            open_ = self.open()
            if not open_:
                return
            judged = dict.fromkeys((FIFO, self.recommended(), *open_))
            seeds = range(before, look)
            self._planned += len(judged) * len(seeds) * self.settings.rounds
            wanted = {(method, seed): table(method, seed) for seed in seeds for method in judged}
            self._play(f"{look} seeds, open: {', '.join(open_)}", wanted)

    def _try_larger_store(self, seeds: Sequence[int]) -> None:
        method = self.leader()
        capacity = LARGER * self.settings.slots(method)
        name = f"{method}, {capacity} samples"
        wanted = {
            (name, seed): {**self.settings.table(method, seed, capacity=capacity), "label": name}
            for seed in seeds
        }
        self._play(f"a store of {capacity} samples", wanted)

    def _choose_rounds(self) -> None:
        """Choose as many rounds as fit the time, or those that an earlier call chose."""
        self._inputs = json.dumps({**self.settings.table(FIFO, 0), "rounds": 0}, sort_keys=True)
        noted = self.folder / "panel.json"
        known = json.loads(noted.read_text(encoding="utf-8")) if noted.is_file() else {}
        if known.get("data", self.data_digest) != self.data_digest:
            # Its runs would be taken for runs on the data as it is now.
            raise DataError(
                f"the data has changed since {self.folder} was made: delete that folder, or "
                "choose another with --out"
            )
        if known.get("inputs") == self._inputs:
            self.settings = replace(self.settings, rounds=known["rounds"], rates=known["rates"])
            return
        cells = [RunSpec(self.settings.table(method, 0), "") for method in self.settings.methods]
        self.on_progress("measuring how long a round takes", 0.0, self.seconds)
        each = estimate_seconds(cells, 1) / len(cells) / self.settings.rounds
        runs = len(cells) * (len(RATES) / 2 + LOOKS[0] + 2) + LOOKS[0]
        rounds = int(0.7 * self.seconds * self.jobs / (runs * each))
        rounds = min(_MOST_ROUNDS, max(_FEWEST_ROUNDS, rounds)) // 10 * 10
        self.settings = replace(self.settings, rounds=rounds)
        self._note()

    def _note(self) -> None:
        noted = {
            "inputs": self._inputs,
            "data": self.data_digest,
            "rounds": self.settings.rounds,
            "rates": self.settings.rates,
        }
        text = json.dumps(noted, indent=1) + "\n"
        (self.folder / "panel.json").write_text(text, encoding="utf-8")

    def _tune(self) -> None:
        """Choose each method's learning rate, by the late accuracy of shorter runs.

        They have a seed, and so a split of the data, that the trial itself never uses.
        """
        shorter = replace(self.settings, rounds=max(10, self.settings.rounds // 2))
        folder = self.folder / "rates"
        cells = {}
        for method, rate in itertools.product(self.settings.methods, RATES):
            table = shorter.table(method, _TUNING_SEED, rate=rate)
            cells[method, rate] = RunSpec({**table, "label": f"{method} at {rate}"}, "")
        self._sweep("finding each method's learning rate", list(cells.values()), folder)
        best: dict[str, tuple[float, float]] = {}
        for (method, rate), cell in cells.items():
            reached = late_accuracy(read_run(record_path(cell, folder)).evaluations)
            best[method] = max(best.get(method, (-1.0, 0.0)), (reached, rate))
        self.settings = replace(
            self.settings, rates={method: rate for method, (_, rate) in best.items()}
        )
        self._note()

    def _play(self, stage: str, wanted: Mapping[tuple[str, int], Table]) -> None:
        """Run methods and seeds; what is finished counts, however this ends."""
        cells = {key: RunSpec(table, "") for key, table in wanted.items()}
        folder = self.folder / "runs"
        try:
            self._sweep(stage, list(cells.values()), folder)
        finally:
            for (method, seed), cell in cells.items():
                if is_finished(cell, folder):
                    run = read_run(record_path(cell, folder))
                    self.finals.setdefault(method, {})[seed] = final_accuracy(run.evaluations)

    def _sweep(self, stage: str, cells: Sequence[RunSpec], folder: Path) -> None:
        progress = [0] * len(cells)

        def listen(cell: int, round_: int, _: float | None) -> None:
            progress[cell] = round_
            self._report(stage, sum(progress))

        self._report(stage, 0)
        folder.mkdir(parents=True, exist_ok=True)
        run_sweep(cells, folder, jobs=self.jobs, resume=True, listen=listen, backend=self.backend)
        self._done += sum(cell.experiment.train.rounds for cell in cells)

    def _report(self, stage: str, rounds: int) -> None:
        passed = time.monotonic() - self._began
        share = min(1.0, (self._done + rounds) / self._planned)
        left = passed * (1 - share) / share if share > 0.02 else self.seconds
        self.on_progress(stage, share, min(left, max(0.0, self.seconds - passed)))
        if passed > self.seconds:
            raise KeyboardInterrupt  # the time limit ends a trial as Ctrl-C does
