"""The methods that are tried, and the experiment they are tried in."""

from dataclasses import dataclass, field, replace

from fedkeep.config import Table, merged

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
_EVALUATIONS = 15
_TUNING_SEED = 1000


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
        shared = self.shared(capacity or self.slots(method))
        return merged(merged(shared, self.methods[method]), own)

    def shared(self, capacity: int | None = None) -> Table:
        """What all methods have in common."""
        return {
            "task": {**self.task, "rounds_per_pass": self.rounds},
            "storage": {"capacity": capacity or self.capacity},
            "train": {"rounds": self.rounds, "participation": self.participation, "epochs": 5, "decay": 1.0},
            "stream": self.stream,
            "record": {"every": max(1, self.rounds // _EVALUATIONS), "checkpoint_every": max(1, self.rounds // 3)},
        }

    def tuning(self) -> list[tuple[str, float, Table]]:
        """Shorter runs of every method at every rate, on a split that the trial itself never uses."""
        shorter = replace(self, rounds=max(10, self.rounds // 2))
        return [
            (method, rate, {**shorter.table(method, _TUNING_SEED, rate=rate), "label": f"{method} at {rate}"})
            for method in self.methods
            for rate in RATES
        ]

    def experiment(self, seeds: int, first: int) -> Table:
        """The full run that should confirm an advice: seeds that it has not seen."""
        own = {
            name: {"train": {"learning_rate": self.rates[name]}, "storage": {"capacity": self.slots(name)}}
            for name in self.methods
        }
        methods = {name: merged(table, own[name]) for name, table in self.methods.items()}
        return {**self.shared(), "methods": methods, "sweep": {"seed": list(range(first, first + seeds))}}
