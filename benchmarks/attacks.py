"""What a fleet loses to Byzantine devices: every attack, against every aggregation.

    python benchmarks/attacks.py --json FILE [--quick] [--jobs N]

Runs are kept in FILE.runs as they end: the same call goes on where an earlier one stopped (after a
change of code, delete it first).

Each figure is a share of the accuracy of the same fleet without its Byzantine devices, under the
same aggregation, on the test samples of the honest devices. Byzantine devices see all honest
reports of a round before they send theirs, and work together. `clean_over_fedavg` compares fleets
without Byzantine devices, the default with FedAvg, the worst task. `honest_rejected` counts
honest reports rejected over all runs, `honest_filtered` is the share of them that the robust mean
left out. `open_*` is what stays open: Byzantine devices that push into one direction, each no
longer than an honest device, with and without a gist in line with it (docs/security.md).
`--tasks` counts instead, without Byzantine devices, what the limits do to honest updates on every
task of experiments/tasks.
"""

import argparse
import json
import sys
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from multiprocessing import Pool
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from fedkeep.config.experiment import Experiment, read_experiment, resolve
from fedkeep.core.aggregation import UpdateSum
from fedkeep.core.errors import RejectedError
from fedkeep.core.rounds import RoundSummary
from fedkeep.core.seeds import generator
from fedkeep.core.types import DeviceId, FloatArray, Profile
from fedkeep.data import Federation
from fedkeep.sim.assembly import load_data
from fedkeep.sim.engine import Simulator, evaluate
from fedkeep.sim.fleet import SimulatedFleet
from fedkeep.tables import merged

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.attack_models import ATTACKS, OPEN, QUICK, Attack, AttackContext, Reports

DEFAULT = "default"
AGGREGATIONS: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    "fedavg": {"name": "fedavg"},
    "fednova": {"name": "fednova"},
    "trimmed": {"name": "trimmed", "trim": 0.2},
    "median": {"name": "median"},
    "norm-bounded": {"name": "norm-bounded"},
}
TASKS: dict[str, dict[str, Any]] = {
    "embedded": {
        "task": {"name": "demo"},
        "train": {"learning_rate": 0.02, "epochs": 5, "rounds": 30},
    },
    "non-iid": {
        "task": {"name": "synthetic", "smallest": 400, "largest": 800, "spread": 3.0},
        "stream": {"rounds_per_pass": 50},
        "train": {"learning_rate": 0.01, "epochs": 5, "rounds": 60},
    },
    "one label": {
        "task": {"name": "synthetic", "smallest": 400, "largest": 800},
        "stream": {"rounds_per_pass": 50},
        "train": {"learning_rate": 0.01, "epochs": 5, "rounds": 60},
    },
}


@dataclass(frozen=True)
class Setting:
    """A fleet: its task, size, Byzantine devices, and who takes part."""

    task: str
    devices: int
    byzantine: int
    participation: float = 1.0

    @property
    def name(self) -> str:
        part = "" if self.participation == 1 else f", {self.participation:.0%} a round"
        return f"{self.task}, {self.byzantine} of {self.devices}{part}"

    def experiment(self, aggregation: dict[str, Any], seed: int) -> Experiment:
        table = TASKS[self.task]
        rounds = round(table["train"]["rounds"] / self.participation**0.5)
        train = {**table["train"], "participation": self.participation, "rounds": rounds}
        task = {**table["task"], "devices": self.devices}
        return resolve(
            {**table, "task": task, "train": train, "aggregation": aggregation, "seed": seed}
        )


SETTINGS = [
    Setting(task, devices, byzantine, part)
    for task in TASKS
    for devices, byzantine in ((10, 1), (20, 3))
    for part in (1.0, 0.5)
]


@dataclass
class Result:
    """How a run ended."""

    accuracy: float = 0.0
    honest: int = 0
    honest_rejected: int = 0
    honest_filtered: int = 0
    honest_clipped: int = 0


class AttackedFleet:
    """A simulated fleet in which some devices attack; without an attack, the fleet without them."""

    def __init__(
        self, setting: Setting, attack: Attack | None, aggregation: dict[str, Any], seed: int
    ) -> None:
        self.experiment = setting.experiment(aggregation, seed)
        everyone = range(setting.devices)
        self.byzantine = set(
            generator(seed, "liars")
            .choice(setting.devices, setting.byzantine, replace=False)
            .tolist()
        )
        self.attack = attack
        self.honest = [d for d in everyone if d not in self.byzantine]
        data = load_data(self.experiment.task, seed)
        flips = attack is not None and attack.flipped_labels
        self.simulator = Simulator(
            self.experiment, _with_flipped(data, self.byzantine) if flips else data
        )
        self.data = data
        self.server = self.simulator.server
        self.share = setting.participation
        self._coordinate(self._members(0))

    def play(self) -> Result:
        result = Result()
        rounds = self.experiment.train.rounds
        for round_ in range(rounds):
            members = self._members(round_)
            if round_ and len(members) != len(self._members(round_ - 1)):
                self._coordinate(members)
            self._play_round(round_, members, result)
        result.accuracy = self._accuracy()
        return result

    def _members(self, round_: int) -> list[DeviceId]:
        joined = (
            self.attack is not None
            and round_ >= self.attack.joins_at * self.experiment.train.rounds
        )
        return sorted([*self.honest, *(self.byzantine if joined else ())])

    def _coordinate(self, members: list[DeviceId]) -> None:
        profiles = {
            d: Profile(int(self.simulator.parts.capacities[d]), self.simulator.parts.velocities[d])
            for d in members
        }
        if self.attack is not None and self.attack.inflated:
            for d in self.byzantine & profiles.keys():
                profiles[d] = Profile(10**9, np.full_like(profiles[d].velocity, 1e15))
        plan, _ = self.server.coordinate(profiles)
        for d in members:
            self.simulator.parts.fleet.device(d).apply_plan(plan.assignment(d))  # type: ignore[union-attr]

    def _play_round(self, round_: int, members: list[DeviceId], result: Result) -> None:
        fleet = self.simulator.parts.fleet
        assert isinstance(fleet, SimulatedFleet)
        chosen = self.server.select(round_, members, max(1, round(self.share * len(members))))
        fleet.catch_up(chosen, round_ + 1)
        orders = self.server.open_round(chosen)
        reports = fleet.take_part(orders, {})
        honest = {d: r for d, r in reports.items() if d not in self.byzantine}
        sent = {
            **honest,
            **self._forged(
                round_, honest, {d: r for d, r in reports.items() if d in self.byzantine}
            ),
        }
        summary = self._close(sent)
        result.honest += len(honest)
        result.honest_filtered += len(set(summary.filtered) - self.byzantine)
        for rejection in summary.rejections:
            if rejection.device not in self.byzantine:
                result.honest_rejected += not rejection.reason.endswith("-cut")
                result.honest_clipped += rejection.reason == "update-cut"

    def _close(self, sent: Reports) -> RoundSummary:
        for device, report in sent.items():
            self.server.receive(device, report)
        return self.server.close_round()

    def _forged(self, round_: int, honest: Reports, own: Reports) -> Reports:
        rounds = self.experiment.train.rounds
        if self.attack is None or not own or round_ < self.attack.honest_until * rounds:
            return own
        malicious = self.attack.reports(
            AttackContext(round_, rounds, self.server.model, honest, own)
        )
        if not self.attack.inflated:
            return malicious
        return {
            d: replace(r, weight=1e15, samples=10**9, gradient_samples=10**18)
            for d, r in malicious.items()
        }

    def _accuracy(self) -> float:
        found = evaluate(self.simulator.parts.learner, self.server.model, self.data)
        tests = self.data.test.sizes[self.honest]
        return float(np.nansum(found.device_accuracy[self.honest] * tests) / tests.sum())


class SummedFleet(AttackedFleet):
    """The same where the server sees sums only; the attacker reverses their mean."""

    def __init__(self, setting: Setting, seed: int) -> None:
        super().__init__(
            setting,
            Attack(lambda context: context.sends(SummedFleet._turning(context))),
            {"name": "fedavg"},
            seed,
        )
        self.server.expect_sums()

    @staticmethod
    def _turning(context: AttackContext) -> FloatArray:
        total, devices = context.updates.sum(axis=0), len(context.honest) + len(context.own)
        turning: FloatArray = -(devices * total / len(context.honest) + total) / len(context.own)
        return turning

    def _close(self, sent: Reports) -> RoundSummary:
        model = self.server.model.astype(np.float64)
        total = UpdateSum(
            np.sum([r.model - model for r in sent.values()], axis=0), float(len(sent))
        )
        try:
            return self.server.close_sum(sent, total, None)
        except RejectedError:
            self.server.open_round(sent)
            return self.server.close_round()


def _with_flipped(data: Federation, byzantine: set[DeviceId]) -> Federation:
    """The data in which Byzantine devices see every label as another."""
    y = data.y.copy()
    for d in byzantine:
        own = data.train.indices[data.train.offsets[d] : data.train.offsets[d + 1]]
        y[own] = data.labels - 1 - y[own]
    return replace(data, y=y)


Run = tuple[Setting, str | None, str, int]
"""Fleet, attack or none, aggregation, seed."""


def play(run: Run) -> Result:
    setting, attack, aggregation, seed = run
    return AttackedFleet(
        setting, None if attack is None else ATTACKS[attack], AGGREGATIONS[aggregation], seed
    ).play()


class Played:
    """Results of runs, in memory and, line by line, in a file that the next call begins with."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._results: dict[str, Result] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                key, result = json.loads(line)
                self._results[key] = Result(**result)

    def play(self, runs: list[Run], jobs: int) -> None:
        missing = [run for run in runs if _key(run) not in self._results]
        with Pool(jobs) as pool:
            for run, result in zip(missing, pool.imap(play, missing), strict=True):
                self._results[_key(run)] = result
                if self._path is not None:
                    with self._path.open("a") as file:
                        file.write(json.dumps([_key(run), asdict(result)]) + "\n")

    def result(self, run: Run) -> Result:
        return self._results[_key(run)]

    def accuracy(self, setting: Setting, attack: str | None, aggregation: str, seeds: int) -> float:
        return mean(
            self.result((setting, attack, aggregation, seed)).accuracy for seed in range(seeds)
        )


def _key(run: Run) -> str:
    setting, attack, aggregation, seed = run
    return f"{setting.name} / {attack} / {aggregation} / {seed}"


def measure(
    settings: list[Setting], attacks: list[str], seeds: int, played: Played, jobs: int
) -> dict[str, Any]:
    """The table and its figures; rules other than the default by one seed and fewer attacks."""
    rows: list[tuple[Setting, str, list[str], int]] = [
        (setting, DEFAULT, attacks, seeds) for setting in settings
    ]
    rows += [
        (s, g, list(QUICK), 1)
        for s in settings
        if s.participation == 1
        for g in AGGREGATIONS
        if g != DEFAULT
    ]
    runs: list[Run] = [(s, None, "fedavg", seed) for s in settings for seed in range(seeds)]
    runs += [
        (s, attack, g, seed)
        for s, g, chosen, n in rows
        for attack in (None, *chosen)
        for seed in range(n)
    ]
    played.play(list(dict.fromkeys(runs)), jobs)
    found = [_row(played, *row) for row in rows]
    defaults = [played.result(run) for run in runs if run[2] == DEFAULT]
    return {
        **_figures(found, played, settings, seeds),
        **_honest(defaults),
        "seeds": seeds,
        "table": found,
    }


def _row(
    played: Played, setting: Setting, aggregation: str, attacks: list[str], seeds: int
) -> dict[str, Any]:
    clean = played.accuracy(setting, None, aggregation, seeds)
    shares = {
        attack: played.accuracy(setting, attack, aggregation, seeds) / clean for attack in attacks
    }
    found = {"setting": setting.name, "aggregation": aggregation, "clean": clean, "shares": shares}
    row = {**asdict(setting), **found}
    print(_line(row), flush=True)
    return row


def _honest(results: list[Result]) -> dict[str, float]:
    reports = max(sum(r.honest for r in results), 1)
    return {
        "honest_rejected": sum(r.honest_rejected for r in results),
        "honest_clipped": sum(r.honest_clipped for r in results) / reports,
        "honest_filtered": sum(r.honest_filtered for r in results) / reports,
    }


def _figures(
    rows: list[dict[str, Any]], played: Played, settings: list[Setting], seeds: int
) -> dict[str, float]:
    defaults = [row for row in rows if row["aggregation"] == DEFAULT]
    clean = {g: [played.accuracy(s, None, g, seeds) for s in settings] for g in (DEFAULT, "fedavg")}
    return {
        "clean_over_fedavg": min(np.divide(clean[DEFAULT], clean["fedavg"]).tolist()),
        "worst_1_of_10": _worst(defaults, 10),
        "worst_3_of_20": _worst(defaults, 20),
        "secure_sum_1_of_10": secure_sum_share(),
        "open_1_of_10": _worst(defaults, 10, OPEN),
        "open_3_of_20": _worst(defaults, 20, OPEN),
    }


def secure_sum_share() -> float:
    """What one Byzantine device of ten leaves of the accuracy where only sums are seen."""
    setting = Setting("embedded", 10, 1)
    return SummedFleet(setting, 0).play().accuracy / play((setting, None, "fedavg", 0)).accuracy


def honest_tasks(rounds: int) -> dict[str, Any]:
    """What the learnt limit does to honest updates, in a short run of each task."""
    found = {}
    for path in sorted((Path(__file__).parents[1] / "experiments" / "tasks").glob("*.toml")):
        table = merged(
            read_experiment(path), {"train": {"rounds": rounds}, "record": {"every": rounds}}
        )
        summaries = [record.summary for record in Simulator(resolve(table)).run()]
        reasons = [rejection.reason for summary in summaries for rejection in summary.rejections]
        refused = sum(not reason.endswith("-cut") for reason in reasons)
        reports = sum(len(summary.accepted) for summary in summaries)
        found[path.stem] = {
            "reports": reports,
            "shortened": reasons.count("update-cut"),
            "refused": refused,
        }
        print(path.stem, found[path.stem], flush=True)
    total = {
        key: sum(row[key] for row in found.values()) for key in ("reports", "shortened", "refused")
    }
    return {
        "total": total,
        "shortened_share": total["shortened"] / max(total["reports"], 1),
        "tasks": found,
    }


def _worst(rows: list[dict[str, Any]], devices: int, attacks: Collection[str] = ()) -> float:
    """The worst share under these attacks, or under all but the open ones."""
    found: list[float] = [
        share
        for row in rows
        if row["devices"] == devices
        for attack, share in row["shares"].items()
        if (attack in attacks if attacks else attack not in OPEN)
    ]
    return min(found)


def _line(row: dict[str, Any]) -> str:
    worst = min((attack for attack in row["shares"] if attack not in OPEN), key=row["shares"].get)
    return (
        f"{row['setting']:34} {row['aggregation']:14} clean {row['clean']:.3f}  "
        f"worst {row['shares'][worst]:.3f} ({worst})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument(
        "--quick", action="store_true", help="a few attacks, two seeds, everybody takes part"
    )
    parser.add_argument(
        "--tasks",
        type=int,
        metavar="ROUNDS",
        help="count what happens to honest updates on all tasks",
    )
    options = parser.parse_args()
    if options.tasks:
        counted = honest_tasks(options.tasks)
        print(counted["total"])
        if options.json:
            options.json.write_text(json.dumps(counted, indent=2) + "\n")
        return
    settings = [s for s in SETTINGS if s.participation == 1] if options.quick else SETTINGS
    attacks = list(QUICK if options.quick else ATTACKS)
    played = Played(options.json.with_name(f"{options.json.name}.runs") if options.json else None)
    result = measure(settings, attacks, 2, played, options.jobs)
    for key in (key for key in result if key not in ("seeds", "table")):
        print(f"{key}: {result[key]:.4g}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
