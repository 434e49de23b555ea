"""What a fleet loses to liars among its devices: every attack, against the default and every other aggregation.

    python benchmarks/attacks.py --json FILE [--quick]

Each figure is a share of the accuracy of the same fleet without its liars, under the same aggregation, on the test
samples of the honest devices. Liars see all honest reports of a round before they send theirs, and work together.
`clean_over_fedavg` compares fleets without liars, the default with FedAvg, the worst task. `honest_refused` counts
honest reports refused over all runs, `honest_outvoted` is the share of them that the robust mean left out. `open_*` is
what stays open: three liars that push into one direction, each no longer than an honest device (docs/security.md).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import NormalDist, mean
from typing import Any

import numpy as np

from fedkeep.core.aggregation import UpdateSum
from fedkeep.core.errors import RefusedError
from fedkeep.core.estimators import GivenEstimator
from fedkeep.core.seeds import generator
from fedkeep.core.server import RoundSummary
from fedkeep.core.types import DeviceId, FloatArray, Profile, Report, Vector
from fedkeep.data import Federation
from fedkeep.sim.assembly import load_data
from fedkeep.sim.engine import Simulator
from fedkeep.sim.evaluation import evaluate
from fedkeep.sim.experiment import Experiment, resolve
from fedkeep.sim.fleet import SimulatedFleet

Reports = Mapping[DeviceId, Report]


@dataclass(frozen=True)
class Scene:
    """What liars know when they send: the round, the model, all honest reports, and what they would have sent."""

    round: int
    rounds: int
    model: Vector
    honest: Reports
    own: Reports

    @property
    def updates(self) -> FloatArray:
        """The honest updates, (devices, P)."""
        found = [r.model.astype(np.float64) - self.model for r in self.honest.values() if r.weight > 0]
        return np.array(found) if found else np.zeros((1, len(self.model)))

    def sends(self, update: FloatArray) -> dict[DeviceId, Report]:
        """The same update from every liar."""
        return {d: _moved(r, self.model, update) for d, r in self.own.items()}


Forge = Callable[[Scene], Mapping[DeviceId, Report]]


@dataclass(frozen=True)
class Attack:
    """What liars send, what they declare, and from when on."""

    forge: Forge
    inflated: bool = False
    flipped_labels: bool = False
    honest_until: float = 0.0
    """The share of the rounds in which liars behave."""
    joins_at: float = 0.0
    """The share of the rounds after which liars join."""


def _moved(report: Report, model: Vector, update: FloatArray) -> Report:
    return replace(report, model=(model + update).astype(np.float32), weight=max(report.weight, 1.0))


def honestly(scene: Scene) -> Reports:
    return scene.own


def scaled(factor: float) -> Forge:
    def forge(scene: Scene) -> Reports:
        return {
            d: _moved(r, scene.model, factor * (r.model.astype(np.float64) - scene.model)) for d, r in scene.own.items()
        }

    return forge


def inner_product(factor: float) -> Forge:
    """Fall of Empires (Xie et al. 2019): against the mean of the honest."""
    return lambda scene: scene.sends(-factor * scene.updates.mean(axis=0))


def any_direction(length: float) -> Forge:
    def forge(scene: Scene) -> Reports:
        direction = generator(7, "direction").standard_normal(len(scene.model))
        return scene.sends(length * direction / np.linalg.norm(direction))

    return forge


def as_long_as_honest(forge: Forge) -> Forge:
    """The same, cut to the longest honest update, as somebody would who knows the limits."""

    def cut(scene: Scene) -> Reports:
        longest = float(np.linalg.norm(scene.updates, axis=1).max())
        lies = {d: r.model.astype(np.float64) - scene.model for d, r in forge(scene).items()}
        return {
            d: _moved(scene.own[d], scene.model, update * longest / max(float(np.linalg.norm(update)), 1e-12))
            for d, update in lies.items()
        }

    return cut


def alie(z: float | None) -> Forge:
    """A Little Is Enough (Baruch et al. 2019): as many deviations off the mean as a majority hides; or `z`."""

    def forge(scene: Scene) -> Reports:
        n, liars = len(scene.honest) + len(scene.own), len(scene.own)
        needed = n // 2 + 1 - liars
        hidden = NormalDist().inv_cdf(min(max((n - liars - needed) / (n - liars), 0.01), 0.99)) if z is None else z
        updates = scene.updates
        return scene.sends(updates.mean(axis=0) - hidden * updates.std(axis=0))

    return forge


def min_max(scene: Scene) -> Reports:
    """Shejwalkar and Houmansadr (2021): as far against the mean as honest updates lie from each other."""
    updates = scene.updates
    centre = updates.mean(axis=0)
    against = -centre / max(np.linalg.norm(centre), 1e-12)
    apart = max(float(np.linalg.norm(updates - u, axis=1).max()) for u in updates)
    low, high = 0.0, 10 * apart
    for _ in range(40):
        middle = (low + high) / 2
        fits = np.linalg.norm(updates - (centre + middle * against), axis=1).max() <= apart
        low, high = (middle, high) if fits else (low, middle)
    return scene.sends(centre + low * against)


def turned_estimators(factor: float) -> Forge:
    def forge(scene: Scene) -> Reports:
        return {d: _turned(r, factor) for d, r in scene.own.items()}

    return forge


def _turned(report: Report, factor: float) -> Report:
    gradient = report.local_gradient
    return report if gradient is None else replace(report, local_gradient=(-factor * gradient).astype(np.float32))


def all_at_once(scene: Scene) -> Reports:
    """Turned updates and estimators, weights and counts out of all proportion."""
    turned = inner_product(3.0)(scene)
    return {d: replace(_turned(r, 10.0), weight=1e9, gradient_samples=10**9) for d, r in turned.items()}


def taking_turns(scene: Scene) -> Reports:
    """Another attack every round."""
    forges = (scaled(-3.0), inner_product(3.0), any_direction(999.0), min_max, alie(1.5), scaled(-10.0))
    return forges[scene.round % len(forges)](scene)


PLAIN: dict[str, Attack] = {
    "sign flipped": Attack(scaled(-1.0)),
    "sign flipped, x3": Attack(scaled(-3.0)),
    "sign flipped, x10": Attack(scaled(-10.0)),
    "scaled, x10": Attack(scaled(10.0)),
    "any direction, length 999": Attack(any_direction(999.0)),
    "inner product, x1": Attack(inner_product(1.0)),
    "inner product, x3": Attack(inner_product(3.0)),
    "inner product, as long as honest": Attack(as_long_as_honest(inner_product(1.0))),
    "a little is enough": Attack(alie(None)),
    "a little more, z = 1.5": Attack(alie(1.5)),
    "min-max": Attack(min_max),
    "labels flipped": Attack(honestly, flipped_labels=True),
    "estimator turned, x1": Attack(turned_estimators(1.0)),
    "estimator turned, x10": Attack(turned_estimators(10.0)),
    "all at once": Attack(all_at_once),
    "taking turns": Attack(taking_turns),
    "sleepers: inner product, x3": Attack(inner_product(3.0), honest_until=0.5),
    "late joiners: sign flipped, x3": Attack(scaled(-3.0), joins_at=0.5),
}
INFLATED = {f"inflated profile, {name}": replace(attack, inflated=True) for name, attack in PLAIN.items()}
OPEN = "any direction, as long as honest"
ATTACKS = {
    OPEN: Attack(as_long_as_honest(any_direction(1.0))),
    **PLAIN,
    "inflated profile": Attack(honestly, inflated=True),
    **INFLATED,
}
QUICK = (
    OPEN,
    "sign flipped, x3",
    "any direction, length 999",
    "min-max",
    "labels flipped",
    "all at once",
    "inflated profile, sign flipped",
    "inflated profile, estimator turned, x10",
)
DEFAULT = "default"
AGGREGATIONS: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    "fedavg": {"name": "fedavg"},
    "fednova": {"name": "fednova"},
    "trimmed": {"name": "trimmed", "trim": 0.2},
    "norm-bounded": {"name": "norm-bounded"},
}
TASKS: dict[str, dict[str, Any]] = {
    "embedded": {"task": {"name": "embedded"}, "train": {"learning_rate": 0.02, "epochs": 5, "rounds": 30}},
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
    """A fleet: its task, size, liars, and who takes part."""

    task: str
    devices: int
    liars: int
    participation: float = 1.0

    @property
    def name(self) -> str:
        part = "" if self.participation == 1 else f", {self.participation:.0%} a round"
        return f"{self.task}, {self.liars} of {self.devices}{part}"

    def experiment(self, aggregation: dict[str, Any], seed: int) -> Experiment:
        said = TASKS[self.task]
        rounds = round(said["train"]["rounds"] / self.participation**0.5)
        train = {**said["train"], "participation": self.participation, "rounds": rounds}
        task = {**said["task"], "devices": self.devices}
        return resolve({**said, "task": task, "train": train, "aggregation": aggregation, "seed": seed})


SETTINGS = [
    Setting(task, devices, liars, part)
    for task in TASKS
    for devices, liars in ((10, 1), (20, 3))
    for part in (1.0, 0.5)
]


@dataclass
class Result:
    """How a run ended."""

    accuracy: float = 0.0
    honest: int = 0
    honest_refused: int = 0
    honest_outvoted: int = 0
    named: set[DeviceId] = field(default_factory=set)


class Battle:
    """A simulated fleet in which some devices lie; without an attack, the fleet without them."""

    def __init__(self, setting: Setting, attack: Attack | None, aggregation: dict[str, Any], seed: int) -> None:
        self.experiment = setting.experiment(aggregation, seed)
        everyone = range(setting.devices)
        self.liars = set(generator(seed, "liars").choice(setting.devices, setting.liars, replace=False).tolist())
        self.attack = attack
        self.honest = [d for d in everyone if d not in self.liars]
        data = load_data(self.experiment.task, seed)
        flips = attack is not None and attack.flipped_labels
        self.simulator = Simulator(self.experiment, _with_flipped(data, self.liars) if flips else data)
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
        joined = self.attack is not None and round_ >= self.attack.joins_at * self.experiment.train.rounds
        return sorted([*self.honest, *(self.liars if joined else ())])

    def _coordinate(self, members: list[DeviceId]) -> None:
        profiles = {d: Profile(self.experiment.storage.capacity, self.simulator.parts.velocities[d]) for d in members}
        if self.attack is not None and self.attack.inflated:
            for d in self.liars & profiles.keys():
                profiles[d] = Profile(10**9, np.full_like(profiles[d].velocity, 1e15))
        plan, _ = self.server.coordinate(profiles)
        for d in members:
            self.simulator.parts.fleet.device(d).assign(plan.assignment(d))  # type: ignore[union-attr]

    def _play_round(self, round_: int, members: list[DeviceId], result: Result) -> None:
        fleet = self.simulator.parts.fleet
        assert isinstance(fleet, SimulatedFleet)
        chosen = self.server.select(round_, members, max(1, round(self.share * len(members))))
        fleet.catch_up(chosen, round_ + 1)
        orders = self.server.open_round(chosen)
        reports = fleet.take_part(orders, {})
        honest = {d: r for d, r in reports.items() if d not in self.liars}
        sent = {**honest, **self._lies(round_, honest, {d: r for d, r in reports.items() if d in self.liars})}
        summary = self._close(sent)
        result.honest += len(honest)
        result.honest_outvoted += len(set(summary.outvoted) - self.liars)
        for refusal in summary.refusals:
            if refusal.device in self.liars:
                result.named.add(refusal.device)
            elif not refusal.reason.endswith("-cut"):
                result.honest_refused += 1

    def _close(self, sent: Reports) -> RoundSummary:
        for device, report in sent.items():
            self.server.receive(device, report)
        return self.server.close_round()

    def _lies(self, round_: int, honest: Reports, own: Reports) -> Reports:
        rounds = self.experiment.train.rounds
        if self.attack is None or not own or round_ < self.attack.honest_until * rounds:
            return own
        lies = self.attack.forge(Scene(round_, rounds, self.server.model, honest, own))
        if not self.attack.inflated:
            return lies
        return {d: replace(r, weight=1e15, samples=10**9, gradient_samples=10**18) for d, r in lies.items()}

    def _accuracy(self) -> float:
        found = evaluate(self.simulator.parts.learner, self.server.model, self.data)
        tests = np.diff(self.data.test.offsets)[self.honest]
        return float(np.nansum(found.device_accuracy[self.honest] * tests) / tests.sum())


class SummedBattle(Battle):
    """The same where the server sees sums only; the liar turns their mean round, as long as it was."""

    def __init__(self, setting: Setting, seed: int) -> None:
        super().__init__(
            setting, Attack(lambda scene: scene.sends(SummedBattle._turning(scene))), {"name": "fedavg"}, seed
        )
        self.server.estimator = GivenEstimator()

    @staticmethod
    def _turning(scene: Scene) -> FloatArray:
        total, devices = scene.updates.sum(axis=0), len(scene.honest) + len(scene.own)
        turning: FloatArray = -(devices * total / len(scene.honest) + total) / len(scene.own)
        return turning

    def _close(self, sent: Reports) -> RoundSummary:
        model = self.server.model.astype(np.float64)
        total = UpdateSum(np.sum([r.model - model for r in sent.values()], axis=0), float(len(sent)))
        try:
            return self.server.close_sum(sent, total, None)
        except RefusedError:
            self.server.open_round(sent)
            return self.server.close_round()


def _with_flipped(data: Federation, liars: set[DeviceId]) -> Federation:
    """The data in which liars see every label as another."""
    y = data.y.copy()
    for d in liars:
        own = data.train.indices[data.train.offsets[d] : data.train.offsets[d + 1]]
        y[own] = data.labels - 1 - y[own]
    return replace(data, y=y)


@cache
def _played(setting: Setting, attack: str | None, aggregation: str, seed: int) -> Result:
    return Battle(setting, None if attack is None else ATTACKS[attack], AGGREGATIONS[aggregation], seed).play()


def accuracy(setting: Setting, attack: str | None, aggregation: str, seeds: int) -> float:
    return mean(_played(setting, attack, aggregation, seed).accuracy for seed in range(seeds))


def measure(settings: list[Setting], attacks: list[str], seeds: int) -> dict[str, Any]:
    """The whole table, and the figures it comes down to; the others than the default by one seed and fewer attacks."""
    rows = []
    for setting in settings:
        rows.append(_row(setting, DEFAULT, attacks, seeds))
        if setting.participation == 1:
            rows += [_row(setting, other, list(QUICK), 1) for other in AGGREGATIONS if other != DEFAULT]
    return {**_figures(rows, settings, seeds), "seeds": seeds, "table": rows}


def _row(setting: Setting, aggregation: str, attacks: list[str], seeds: int) -> dict[str, Any]:
    clean = accuracy(setting, None, aggregation, seeds)
    shares = {attack: accuracy(setting, attack, aggregation, seeds) / clean for attack in attacks}
    told = {"setting": setting.name, "aggregation": aggregation, "clean": clean, "shares": shares}
    row = {**asdict(setting), **told}
    print(_line(row), flush=True)
    return row


def _figures(rows: list[dict[str, Any]], settings: list[Setting], count: int) -> dict[str, Any]:
    defaults = [row for row in rows if row["aggregation"] == DEFAULT]
    attacks = (None, *defaults[0]["shares"])
    played = [_played(s, a, DEFAULT, seed) for s in settings for a in attacks for seed in range(count)]
    over = [accuracy(s, None, DEFAULT, count) / accuracy(s, None, "fedavg", count) for s in settings]
    return {
        "clean_over_fedavg": min(over),
        "worst_1_of_10": _worst(defaults, 10),
        "worst_3_of_20": _worst(defaults, 20),
        "honest_refused": sum(result.honest_refused for result in played),
        "honest_outvoted": sum(r.honest_outvoted for r in played) / max(sum(r.honest for r in played), 1),
        "secure_sum_1_of_10": secure_sum_share(),
        "open_1_of_10": _worst(defaults, 10, [OPEN]),
        "open_3_of_20": _worst(defaults, 20, [OPEN]),
    }


def secure_sum_share() -> float:
    """What one liar of ten leaves of the accuracy where only sums are seen."""
    setting = Setting("embedded", 10, 1)
    return SummedBattle(setting, 0).play().accuracy / accuracy(setting, None, "fedavg", 1)


def _worst(rows: list[dict[str, Any]], devices: int, attacks: Collection[str] = ()) -> float:
    """The worst share under these attacks, or under all but the open one."""
    found: list[float] = [
        share
        for row in rows
        if row["devices"] == devices
        for attack, share in row["shares"].items()
        if (attack in attacks if attacks else attack != OPEN)
    ]
    return min(found)


def _line(row: dict[str, Any]) -> str:
    worst = min((attack for attack in row["shares"] if attack != OPEN), key=row["shares"].get)
    return (
        f"{row['setting']:34} {row['aggregation']:14} clean {row['clean']:.3f}  "
        f"worst {row['shares'][worst]:.3f} ({worst})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="a few attacks, two seeds, everybody takes part")
    options = parser.parse_args()
    settings = [s for s in SETTINGS if s.participation == 1] if options.quick else SETTINGS
    attacks = list(QUICK if options.quick else ATTACKS)
    result = measure(settings, attacks, seeds=2)
    for key in (key for key in result if key not in ("seeds", "table")):
        print(f"{key}: {result[key]:.4g}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
