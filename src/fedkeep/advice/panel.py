"""The methods that are tried, the experiment they are tried in, and the files that an advice leaves."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from fedkeep.agent.assembly import budget_for, parse_config
from fedkeep.config import Table, merged
from fedkeep.data import Federation
from fedkeep.keys import bare, toml

FIFO, BALANCED, LOCAL, SHARED, UNLIMITED = "fifo", "balanced-fifo", "gist-local", "gist-shared", "full-data"
CANDIDATES: dict[str, Table] = {
    FIFO: {"policy": {"name": "fifo"}},
    BALANCED: {
        "policy": {"name": "fifo"},
        "coordinator": {"name": "greedy", "applies_to": "all", "clients_per_label": 1_000_000},
        "weights": {"client_label": 1.0},
    },
    "draw": {"policy": {"name": "draw"}, "gist": {"name": "none"}},
    LOCAL: {"policy": {"name": "draw"}, "gist": {"name": "local"}},
    "ode": {"policy": {"name": "ode"}},
    SHARED: {"policy": {"name": "draw"}, "gist": {"name": "shared"}},
}
"""From the simplest to the most elaborate: among equals the first is advised."""
REFERENCE: Table = {"policy": {"name": "full-data"}}
RATES = (0.01, 0.03, 0.1, 0.3)
"""Learning rates that every method may choose from: none is judged at another's best."""
_EVALUATIONS, _TUNING_SEED = 15, 1000
_CONFIRMING = 5
"""Seeds of the experiment that should confirm an advice."""
_SECTIONS = ("methods", "sweep")


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
        return {name: table for name, table in CANDIDATES.items() if room or name not in (LOCAL, SHARED)}

    @property
    def methods(self) -> dict[str, Table]:
        return {**self.candidates, UNLIMITED: REFERENCE}

    def slots(self, method: str) -> int:
        """The samples that a method's store holds."""
        return self.capacity - (self.gist_samples if method in (LOCAL, SHARED) else 0)

    def table(self, method: str, seed: int, *, rate: float | None = None, capacity: int | None = None) -> Table:
        """The experiment of one run."""
        own = {"label": method, "seed": seed, "train": {"learning_rate": rate or self.rates.get(method, RATES[1])}}
        own["storage"] = {"capacity": capacity or self.slots(method)}
        return merged(merged(self.shared(), self.methods[method]), own)

    def shared(self) -> Table:
        """What all methods have in common."""
        return {
            "task": {**self.task, "rounds_per_pass": self.rounds},
            "storage": {"capacity": self.capacity},
            "train": {"rounds": self.rounds, "participation": self.participation, "epochs": 5, "decay": 1.0},
            "stream": self.stream,
            "record": {"every": max(1, self.rounds // _EVALUATIONS), "checkpoint_every": max(1, self.rounds // 3)},
        }

    def tuning(self) -> dict[tuple[str, float], Table]:
        """Shorter runs of every method at every rate, on a split that the trial itself never uses."""
        shorter = replace(self, rounds=max(10, self.rounds // 2))
        return {
            (method, rate): {**shorter.table(method, _TUNING_SEED, rate=rate), "label": f"{method} at {rate}"}
            for method in self.methods
            for rate in RATES
        }

    def write_files(self, folder: Path, method: str, data: Federation, first_seed: int) -> list[Path]:
        """Writes the experiment that should confirm the advice of a method, and configurations that use it.

        The experiment has seeds that the advice has not seen; the device's file takes as few bytes as hold its samples.
        """
        methods = {}
        for name, table in self.methods.items():
            own = {"train": {"learning_rate": self.rates[name]}, "storage": {"capacity": self.slots(name)}}
            methods[name] = merged(table, own)
        sweep = {"seed": list(range(first_seed, first_seed + _CONFIRMING))}
        samples = {"shape": list(data.sample_shape), "labels": data.labels}
        model = {"name": data.model.name, **data.model.options}
        said = {key: table for key, table in self.methods[method].items() if key in ("policy", "weights", "gist")}
        agent = {"samples": samples, "model": model, **said, "store": {"path": "samples.store"}}
        agent["agent"] = {"socket": "agent.sock"}
        agent["store"]["budget"] = budget_for(parse_config(agent), self.slots(method))
        fleet = {"samples": {**samples, "names": list(data.label_names)}, "model": model, **self.methods[method]}
        fleet["storage"] = {"capacity": self.slots(method)}
        fleet["train"] = {**self.shared()["train"], "learning_rate": self.rates[method]}
        source = '\n[[source]]\nkind = "lines"  # JSON lines on standard input; see docs/agent.md\n'
        texts = {
            "experiment.toml": "# Confirms the advice on seeds that it has not seen: fedkeep run experiment.toml\n"
            + as_toml({**self.shared(), "methods": methods, "sweep": sweep}),
            "agent.toml": "# What a device runs: fedkeep agent run agent.toml\n" + as_toml(agent) + source,
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
    plain = {key: value for key, value in table.items() if key not in _SECTIONS and value != {}}
    spread = {f"{key}.{bare(name)}": value for key in _SECTIONS for name, value in table.get(key, {}).items()}
    return "".join(f"{key} = {toml(value)}\n" for key, value in (plain | spread).items())
