"""The methods that are tried, and the experiment they are tried in."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fedkeep.config import Table, merged

FIFO, BALANCED, UNLIMITED = "fifo", "balanced fifo", "unlimited"
CANDIDATES: dict[str, Table] = {
    FIFO: {"policy": {"name": "fifo"}},
    BALANCED: {
        "policy": {"name": "fifo"},
        "coordinator": {"name": "greedy", "applies_to": "all", "clients_per_label": 1_000_000},
        "weights": {"client_label": 1.0},
    },
    "ode": {"policy": {"name": "ode"}},
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

    @property
    def methods(self) -> dict[str, Table]:
        return {**CANDIDATES, UNLIMITED: REFERENCE}

    def table(self, method: str, seed: int, *, rate: float | None = None, capacity: int | None = None) -> Table:
        """The experiment of one run."""
        own = {"label": method, "seed": seed, "train": {"learning_rate": rate or self.rates.get(method, RATES[1])}}
        shared = self.shared(capacity)
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
        found = []
        for method in self.methods:
            for rate in RATES:
                table = shorter.table(method, _TUNING_SEED, rate=rate)
                found.append((method, rate, {**table, "label": f"{method} at {rate}"}))
        return found

    def experiment(self, seeds: int, first: int) -> Table:
        """The full run that should confirm an advice: seeds that it has not seen."""
        methods = {
            name: merged(table, {"train": {"learning_rate": self.rates[name]}}) for name, table in self.methods.items()
        }
        return {**self.shared(), "methods": methods, "sweep": {"seed": list(range(first, first + seeds))}}
