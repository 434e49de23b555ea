"""The methods that are tried and the trial of them: seed by seed, until they are decided or the time is over."""

import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedkeep.agent.assembly import budget_for, parse_config
from fedkeep.config.experiment import RunSpec
from fedkeep.config.method import fleet_tables
from fedkeep.config.presets import BALANCED_FIFO
from fedkeep.config.reference import bare, toml
from fedkeep.data import Federation
from fedkeep.records import read_run
from fedkeep.records.measures import Difference, difference, final_accuracy, late_accuracy
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
CANDIDATES: dict[str, Table] = {
    FIFO: {"policy": {"name": "fifo"}},
    BALANCED: BALANCED_FIFO,
    "balanced-reservoir": {"policy": {"name": "balanced-reservoir"}, "gist": {"mode": "none"}},
    LOCAL: {"policy": {"name": "balanced-reservoir"}, "gist": {"mode": "local"}},
    "ode": {"policy": {"name": "ode"}},
    SHARED: {"policy": {"name": "balanced-reservoir"}, "gist": {"mode": "shared"}},
}
"""From the simplest to the most elaborate: among equals the first is advised."""
RATES = (0.01, 0.03, 0.1, 0.3)
"""Learning rates that every method may choose from: none is judged at another's best."""
_EVALUATIONS, _TUNING_SEED = 15, 1000
_CONFIRMING = 5
"""Seeds of the experiment that should confirm an advice."""
FIRST_SEEDS, MOST_SEEDS = 3, 16
LARGER = 4
"""How many times the store is, of which it is asked what it would buy."""
_FEWEST_ROUNDS, _MOST_ROUNDS = 40, 300


@dataclass(frozen=True)
class Panel:
    """One trial of all methods: what they share, and the learning rate of each."""

    task: Table
    capacity: int
    participation: float
    rounds: int
    stream: Table = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    gist_samples: int = 0
    """How many samples fewer a store holds that shares its bytes with a gist; 0 where samples are counted."""

    @property
    def candidates(self) -> dict[str, Table]:
        """The methods to choose from: a gist only where it leaves room for a sample."""
        room = self.capacity > self.gist_samples
        return {
            name: table for name, table in CANDIDATES.items() if room or name not in (LOCAL, SHARED)
        }

    @property
    def methods(self) -> dict[str, Table]:
        return {**self.candidates, UNLIMITED: {"policy": {"name": UNLIMITED}}}

    def slots(self, method: str) -> int:
        return self.capacity - (self.gist_samples if method in (LOCAL, SHARED) else 0)

    def table(
        self, method: str, seed: int, *, rate: float | None = None, capacity: int | None = None
    ) -> Table:
        own = {
            "label": method,
            "seed": seed,
            "train": {"learning_rate": rate or self.rates.get(method, RATES[1])},
        }
        own["storage"] = {"capacity": capacity or self.slots(method)}
        return merged(merged(self.shared(), self.methods[method]), own)

    def shared(self) -> Table:
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
        """Writes the experiment that should confirm the advice of a method, and configurations that use it.

        The experiment has seeds that the advice has not seen; the device's file takes as few bytes as hold its samples.
        """
        own = {
            m: {"train": {"learning_rate": self.rates[m]}, "storage": {"capacity": self.slots(m)}}
            for m in self.rates
        }
        methods = {name: merged(table, own[name]) for name, table in self.methods.items()}
        sweep = {"seed": list(range(first_seed, first_seed + _CONFIRMING))}
        samples = {"shape": list(data.sample_shape), "labels": data.labels}
        model = {"name": data.model.name, **data.model.options}
        said = {
            key: table
            for key, table in self.methods[method].items()
            if key in ("policy", "storage", "weights", "gist")
        }
        files = {"store": {"path": "samples.store"}, "agent": {"socket": "agent.sock"}}
        agent = {"samples": samples, "model": model, **said, **files}
        agent["store"]["budget"] = budget_for(parse_config(agent), self.slots(method))
        fleet = {
            "samples": {**samples, "names": list(data.label_names)},
            "model": model,
            **fleet_tables(self.methods[method]),
            "train": self.shared()["train"] | own[method]["train"],
        }
        source = '\n[[source]]\nkind = "lines"  # JSON lines on standard input; see docs/agent.md\n'
        texts = {
            "experiment.toml": "# Confirms the advice on seeds that it has not seen: fedkeep run experiment.toml\n"
            + as_toml({**self.shared(), "methods": methods, "sweep": sweep}),
            "agent.toml": "# What a device runs: fedkeep agent run agent.toml\n"
            + as_toml(agent)
            + source,
            "fleet.toml": "# What the server runs: fedkeep serve fleet.toml\n" + as_toml(fleet),
        }
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        return [folder / name for name in texts]


def as_toml(table: Table) -> str:
    """A table of tables as a TOML file, one line a table; methods and what is swept have a line each.

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
    """A panel being tried into a folder; what an earlier call finished there is not done again."""

    panel: Panel
    folder: Path
    seconds: float
    """All that may pass."""
    jobs: int
    tell: Callable[[str, float, float], None]
    """Called with what is being done, the share of the work done, and the seconds that the rest may take."""
    backend: Backend = "local"
    finals: dict[str, dict[int, float]] = field(default_factory=dict)
    """The final accuracy of every finished run, by method, then by seed."""
    _began: float = field(default_factory=time.monotonic)
    _done: float = 0.0
    _planned: float = 1.0

    def run(self) -> bool:
        """Whether it came to its end: time and Ctrl-C end it early, and what is finished counts."""
        try:
            self._run()
        except KeyboardInterrupt:
            return False
        return True

    def _run(self) -> None:
        """Rounds and rates are chosen, then seeds run until nothing is open."""
        self._choose_rounds()
        runs = len(self.panel.methods) * len(RATES) / 2 + FIRST_SEEDS * (
            len(self.panel.methods) + 1
        )
        self._planned = runs * self.panel.rounds
        if not self.panel.rates:
            self._tune()
        table, first = self.panel.table, range(FIRST_SEEDS)
        self._play("seeds 0 to 2", {(m, s): table(m, s) for s in first for m in self.panel.methods})
        method = self.leader()
        capacity = LARGER * self.panel.slots(method)
        name = f"{method}, {capacity} samples"
        larger = {(name, s): {**table(method, s, capacity=capacity), "label": name} for s in first}
        self._play(f"a store of {capacity} samples", larger)
        for seed in range(FIRST_SEEDS, MOST_SEEDS):
            if not (inconclusive := self.open()):
                return
            self._planned += len(inconclusive) * self.panel.rounds
            wanted = {
                (method, seed): table(method, seed) for method in (self.leader(), *inconclusive)
            }
            self._play(f"seed {seed}: {', '.join(inconclusive)} inconclusive", wanted)

    def leader(self) -> str:
        return self.best_of(list(self.panel.candidates))

    def best_of(self, methods: Sequence[str]) -> str:
        """The one of these with the best mean over the seeds that all of them ran; the first where none did."""
        common = set.intersection(*(set(self.finals.get(m, {})) for m in methods))
        return max(methods, key=lambda m: sum(self.finals[m][seed] for seed in common))

    def against(self, method: str, other: str) -> Difference | None:
        """By how much a method differs from another, over the seeds both finished."""
        own, others = self.finals.get(method, {}), self.finals.get(other, {})
        paired = [own[seed] - others[seed] for seed in sorted(own.keys() & others.keys())]
        return difference(paired) if paired else None

    def open(self) -> list[str]:
        """Candidates of which it is not decided how they stand to the leader; the others need no more seeds."""
        leader = self.leader()
        found = {m: self.against(m, leader) for m in self.panel.candidates if m != leader}
        return [
            m for m, stands in found.items() if stands is None or stands.verdict == "inconclusive"
        ]

    def _choose_rounds(self) -> None:
        """As many rounds as fit the time, or those that an earlier call chose; noted for the next."""
        self._inputs = json.dumps({**self.panel.table(FIFO, 0), "rounds": 0}, sort_keys=True)
        noted = self.folder / "panel.json"
        known = json.loads(noted.read_text(encoding="utf-8")) if noted.is_file() else {}
        if known.get("inputs") == self._inputs:
            self.panel = replace(self.panel, rounds=known["rounds"], rates=known["rates"])
            return
        cells = [RunSpec(self.panel.table(method, 0), "") for method in self.panel.methods]
        self.tell("measuring how long a round takes", 0.0, self.seconds)
        each = estimate_seconds(cells, 1) / len(cells) / self.panel.rounds
        runs = len(cells) * (len(RATES) / 2 + FIRST_SEEDS + 2) + FIRST_SEEDS
        rounds = int(0.7 * self.seconds * self.jobs / (runs * each))
        rounds = min(_MOST_ROUNDS, max(_FEWEST_ROUNDS, rounds)) // 10 * 10
        self.panel = replace(self.panel, rounds=rounds)
        self._note()

    def _note(self) -> None:
        said = {"inputs": self._inputs, "rounds": self.panel.rounds, "rates": self.panel.rates}
        (self.folder / "panel.json").write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")

    def _tune(self) -> None:
        """The learning rate of each method, by the late accuracy of a shorter run apart from the others."""
        shorter, folder = (
            replace(self.panel, rounds=max(10, self.panel.rounds // 2)),
            self.folder / "rates",
        )
        cells = {}
        for method, rate in itertools.product(
            self.panel.methods, RATES
        ):  # on a split that the trial itself never uses
            table = shorter.table(method, _TUNING_SEED, rate=rate)
            cells[method, rate] = RunSpec({**table, "label": f"{method} at {rate}"}, "")
        self._sweep("finding each method's learning rate", list(cells.values()), folder)
        best: dict[str, tuple[float, float]] = {}
        for (method, rate), cell in cells.items():
            reached = late_accuracy(read_run(record_path(cell, folder)).evaluations)
            best[method] = max(best.get(method, (-1.0, 0.0)), (reached, rate))
        self.panel = replace(self.panel, rates={method: rate for method, (_, rate) in best.items()})
        self._note()

    def _play(self, stage: str, wanted: Mapping[tuple[str, int], Table]) -> None:
        """Plays runs by method and seed; what is finished counts, however this ends."""
        cells, folder = (
            {key: RunSpec(table, "") for key, table in wanted.items()},
            self.folder / "runs",
        )
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
            self._tell(stage, sum(progress))

        self._tell(stage, 0)
        folder.mkdir(parents=True, exist_ok=True)
        run_sweep(cells, folder, jobs=self.jobs, resume=True, listen=listen, backend=self.backend)
        self._done += sum(cell.experiment.train.rounds for cell in cells)

    def _tell(self, stage: str, rounds: int) -> None:
        passed = time.monotonic() - self._began
        share = min(1.0, (self._done + rounds) / self._planned)
        left = passed * (1 - share) / share if share > 0.02 else self.seconds
        self.tell(stage, share, min(left, max(0.0, self.seconds - passed)))
        if passed > self.seconds:
            raise KeyboardInterrupt  # the time is over: it ends as Ctrl-C ends it
