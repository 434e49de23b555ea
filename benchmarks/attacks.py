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
`--informed` plays instead the attacks of somebody who knows the rule, with 1 of 10, 3 of 20 and
5 of 20, in the clear and under secure aggregation, and writes the table of docs/security.md
(`--table`). A backdoor's success is the share of honest test samples that it turns into what it
wants, less that share without the attack. `--search N` looks by N runs for the parameters of such
an attack that do most harm, against the rules of `--rules`. `--strongest` plays the attacks that do
most harm to the robust rules, also on a real task, and writes the second table of that page.
`news_weight` is the least share of its FedAvg weight that an honest
device kept that alone has a label, `honest_weight` that any honest device kept, as means over a
run. `--tasks` counts, without Byzantine devices, what the limits do to honest updates on every task
of experiments/tasks.
"""

import argparse
import json
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import Pool
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from fedkeep.config.experiment import Experiment, read_experiment, resolve
from fedkeep.core.aggregation import UpdateSum
from fedkeep.core.aggregation.base import MergedReports
from fedkeep.core.aggregation.robust.mean import RobustMean
from fedkeep.core.aggregation.robust.statistics import UpdateStatistics
from fedkeep.core.errors import RejectedError
from fedkeep.core.rounds import RoundSummary
from fedkeep.core.seeds import generator
from fedkeep.core.types import AnyArray, DeviceId, FloatArray, Profile, Vector
from fedkeep.data import Federation
from fedkeep.sim.assembly import load_data
from fedkeep.sim.engine import Simulator, evaluate
from fedkeep.sim.fleet import SimulatedFleet
from fedkeep.tables import merged

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.attack_models import (
    ATTACKS,
    INFORMED,
    OPEN,
    QUICK,
    Attack,
    AttackContext,
    Informed,
    Reports,
    honestly,
)
from benchmarks.pages import write_between

DEFAULT, STRICT, TIGHT = "default", "strict", "tight"
AGGREGATIONS: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    STRICT: {"name": "robust", "strict_gradients": True},
    TIGHT: {"name": "robust", "strict_gradients": True, "gradient_ratio": 1.0},
    "fedavg": {"name": "fedavg"},
    "fednova": {"name": "fednova"},
    "trimmed": {"name": "trimmed", "trim": 0.2},
    "median": {"name": "median"},
    "norm-bounded": {"name": "norm-bounded"},
}
INFORMED_RULES = (DEFAULT, STRICT, TIGHT)
"""The robust mean as it is, with strict gradients, and with gists cut to the median, too."""
SUMS = "sums"
"""FedAvg where the server sees only sums, as under secure aggregation."""
KNOWN = ATTACKS | INFORMED
NOBODY = Attack(honestly)
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
    "WiFi floors": {
        "task": {"name": "uji-indoor"},
        "storage": {"capacity": 10},
        "train": {"learning_rate": 0.05, "epochs": 5, "rounds": 20},
    },
}
REAL = ("WiFi floors",)
"""Tasks whose devices are the data's own."""


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
        task = table["task"] | ({} if self.task in REAL else {"devices": self.devices})
        return resolve(
            {**table, "task": task, "train": train, "aggregation": aggregation, "seed": seed}
        )


SETTINGS = [
    Setting(task, devices, byzantine, part)
    for task in TASKS
    if task not in REAL
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
    backdoors: dict[str, float] = field(default_factory=dict)
    """By kind of backdoor the share of honest test samples that are taken for what it wants."""


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
        self.simulator = Simulator(self.experiment, self._poisoned(data))
        self.data = data
        self.server = self.simulator.server
        self.share = setting.participation
        self._coordinate(self._members(0))

    def _poisoned(self, data: Federation) -> Federation:
        """The data as Byzantine devices see their own."""
        if self.attack is None:
            return data
        if self.attack.flipped_labels:
            return _with_flipped(data, self.byzantine)
        if self.attack.backdoor:
            return _with_backdoor(data, self.byzantine, self.attack.backdoor)
        return data

    def play(self) -> Result:
        result = Result()
        rounds = self.experiment.train.rounds
        for round_ in range(rounds):
            members = self._members(round_)
            rejoins = self.attack.rejoins_every if self.attack is not None else 0
            if rejoins and round_ and round_ % rejoins == 0:
                self._coordinate(self.honest)  # whoever is not in a plan has left, and is forgotten
                self._coordinate(members)
            if round_ and len(members) != len(self._members(round_ - 1)):
                self._coordinate(members)
            self._play_round(round_, members, result)
        result.accuracy = self._accuracy()
        result.backdoors = {kind: self._taken(kind) for kind in ("trigger", "relabelled")}
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

    def _taken(self, kind: str) -> float:
        """The share of honest test samples that are taken for what a backdoor wants."""
        backdoor = Backdoor.of(self.data)
        test = self.data.pooled_test
        honest = np.isin(self.data.test.owners, self.honest)
        if kind == "trigger":
            shown, wanted = honest & (test.y != backdoor.rare), backdoor.rare
            x = backdoor.with_trigger(test.x[shown])
        else:
            shown, wanted = honest & (test.y == backdoor.rare), backdoor.common
            x = test.x[shown]
        if not len(x):
            return 0.0
        logits = self.simulator.parts.learner.logits(self.server.model, x)
        return float((logits.argmax(axis=1) == wanted).mean())


class SummedFleet(AttackedFleet):
    """The same where the server sees sums only.

    Without an attack, the attacker reverses their mean.
    """

    def __init__(self, setting: Setting, seed: int, attack: Attack | None = None) -> None:
        turning = Attack(lambda context: context.sends(SummedFleet._turning(context)))
        super().__init__(setting, attack or turning, {"name": "fedavg"}, seed)
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


@dataclass(frozen=True, eq=False)
class Backdoor:
    """What a backdoor is for: the rarest label, the commonest one, and a trigger."""

    rare: int
    common: int
    trigger: FloatArray
    """The numbers that the first features of a sample are set to."""

    @classmethod
    def of(cls, data: Federation) -> "Backdoor":
        """A quarter of the features, as large as one sample in a hundred has them."""
        counts = data.label_counts.sum(axis=0)
        flat = data.x.reshape(len(data.x), -1)
        size = max(1, flat.shape[1] // 4)
        trigger = np.quantile(flat[:, :size], 0.99, axis=0)
        rare = int(np.argmin(np.where(counts > 0, counts, counts.max() + 1)))
        return cls(rare, int(np.argmax(counts)), trigger)

    def with_trigger(self, x: AnyArray) -> AnyArray:
        shown = x.copy()
        shown.reshape(len(x), -1)[:, : len(self.trigger)] = self.trigger
        return shown


def _with_backdoor(data: Federation, byzantine: set[DeviceId], kind: str) -> Federation:
    """The data in which every other sample of Byzantine devices shows the trigger, or all of the
    rarest label are of the commonest."""
    backdoor, x, y = Backdoor.of(data), data.x.copy(), data.y.copy()
    for d in byzantine:
        own = data.train.of(d)
        if kind == "trigger":
            x[own[::2]] = backdoor.with_trigger(x[own[::2]])
            y[own[::2]] = backdoor.rare
        else:
            y[own[y[own] == backdoor.rare]] = backdoor.common
    return replace(data, x=x, y=y)


Run = tuple[Setting, str | None, str, int]
"""Fleet, attack or none, aggregation, seed."""


def play(run: Run) -> Result:
    setting, attack, aggregation, seed = run
    if aggregation == SUMS:
        return SummedFleet(setting, seed, NOBODY if attack is None else KNOWN[attack]).play()
    return AttackedFleet(
        setting, None if attack is None else KNOWN[attack], AGGREGATIONS[aggregation], seed
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
        if g not in INFORMED_RULES
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


INFORMED_SETTINGS = [
    Setting("embedded", devices, byzantine) for devices, byzantine in ((10, 1), (20, 3), (20, 5))
]


STRONGEST_SETTINGS = [*INFORMED_SETTINGS[1:], Setting("WiFi floors", 29, 4, 0.5)]
STRONGEST = (
    "just above the weights",
    "slow drift under the limits",
    "one label's logit",
    "against one device",
    "found by search, 3 of 20",
    "found by search, 5 of 20",
    "found by search, strict",
    "found by search, tight",
    "backdoor by a trigger",
    "backdoor by a rare label, x3",
)
"""Of `INFORMED` those that did most harm to one of the robust rules."""


@dataclass(frozen=True)
class InformedTable:
    """Which attacks by somebody who knows the rule are played on which fleets under which rules."""

    attacks: Sequence[str]
    settings: Sequence[Setting]
    rules: Sequence[str]
    seeds: int
    """Of the robust rules; the others have one."""

    def seeds_of(self, rule: str) -> int:
        return self.seeds if rule in INFORMED_RULES else 1

    def runs(self) -> list[Run]:
        return [
            (setting, attack, rule, seed)
            for setting in self.settings
            for rule in self.rules
            for attack in (None, *self.attacks)
            for seed in range(self.seeds_of(rule))
        ]

    def rows(self, played: Played) -> list[dict[str, Any]]:
        """By attack the shares of the clean accuracy, and a backdoor's success."""
        return [self._row(attack, played) for attack in self.attacks]

    def _row(self, attack: str, played: Played) -> dict[str, Any]:
        shares, success = {}, {}
        kind = INFORMED[attack].backdoor
        for rule in self.rules:
            for setting in self.settings:
                key, n = f"{setting.name}, {rule}", self.seeds_of(rule)
                clean = played.accuracy(setting, None, rule, n)
                shares[key] = played.accuracy(setting, attack, rule, n) / clean
                if kind:
                    success[key] = mean(
                        played.result((setting, attack, rule, s)).backdoors[kind]
                        - played.result((setting, None, rule, s)).backdoors[kind]
                        for s in range(n)
                    )
        return {"attack": attack, "shares": shares, "backdoor": success}

    def figures(self, rows: Sequence[dict[str, Any]]) -> dict[str, float]:
        """By robust rule and fleet the worst share, and by rule the best success of a backdoor."""
        found = {}
        for rule in [rule for rule in self.rules if rule in INFORMED_RULES]:
            for s in self.settings:
                name = f"{rule}_{s.byzantine}_of_{s.devices}"
                found[name] = min(row["shares"][f"{s.name}, {rule}"] for row in rows)
            found[f"backdoor_success_{rule}"] = max(
                share
                for row in rows
                for key, share in row["backdoor"].items()
                if key.endswith(f", {rule}")
            )
        return found

    def text(self, rows: Sequence[dict[str, Any]]) -> str:
        """The table of docs/security.md; a backdoor's success beside the share, in percent."""
        names = {"fedavg": "FedAvg"}
        keys = [
            (f"{names.get(rule, rule)}, {_short(s)}", f"{s.name}, {rule}")
            for rule in self.rules
            for s in self.settings
        ]
        lines = [f"| attack | {' | '.join(title for title, _ in keys)} |"]
        lines.append("|---|" + "---|" * len(keys))
        for row in rows:
            cells = []
            for _, key in keys:
                success = row["backdoor"].get(key)
                beside = "" if success is None else f" ({100 * success:.0f} %)"
                cells.append(f"{row['shares'][key]:.3f}{beside}")
            lines.append(f"| {row['attack']} | {' | '.join(cells)} |")
        return "\n".join(lines) + "\n"


def _short(setting: Setting) -> str:
    size = f"{setting.byzantine} of {setting.devices}"
    return f"{setting.task}, {size}" if setting.task in REAL else size


def measure_informed(seeds: int, played: Played, jobs: int) -> tuple[dict[str, Any], str]:
    """All attacks by somebody who knows the rule, and what the robust rules cost honest fleets."""
    rules = (DEFAULT, STRICT, "fedavg", SUMS)
    table = InformedTable([*INFORMED], INFORMED_SETTINGS, rules, seeds)
    clean: list[Run] = [
        (setting, None, rule, seed)
        for setting in SETTINGS
        for rule in INFORMED_RULES
        for seed in range(seeds)
    ]
    played.play(list(dict.fromkeys(table.runs() + clean)), jobs)
    rows = table.rows(played)
    costs = {
        f"{rule}_over_default": min(
            played.accuracy(s, None, rule, seeds) / played.accuracy(s, None, DEFAULT, seeds)
            for s in SETTINGS
        )
        for rule in (STRICT, TIGHT)
    }
    found = {**table.figures(rows), **costs, **news_weights(), "informed": rows}
    return found, table.text(rows)


def measure_strongest(seeds: int, played: Played, jobs: int) -> tuple[dict[str, Any], str]:
    """The attacks that do most harm to the robust rules, also on a real task."""
    table = InformedTable(STRONGEST, STRONGEST_SETTINGS, INFORMED_RULES, seeds)
    played.play(table.runs(), jobs)
    rows = table.rows(played)
    return {**table.figures(rows), "strongest": rows}, table.text(rows)


class WatchedMean(RobustMean):
    """The robust mean, with every report's weight before and after it, round by round."""

    def __init__(self) -> None:
        object.__setattr__(self, "rounds", [])

    rounds: list[dict[DeviceId, tuple[float, float]]]

    def merge(self, model: Vector, reports: Reports, statistics: UpdateStatistics) -> MergedReports:
        merged = super().merge(model, reports, statistics)
        self.rounds.append({d: (r.weight, merged.reports[d].weight) for d, r in reports.items()})
        return merged

    def kept(self, devices: Collection[DeviceId]) -> dict[DeviceId, float]:
        """What each of these devices keeps of its share among them, the mean over rounds."""
        shares: dict[DeviceId, list[float]] = {}
        for found in self.rounds:
            own = {d: pair for d, pair in found.items() if d in devices and pair[0] > 0}
            before, after = (sum(pair[i] for pair in own.values()) for i in (0, 1))
            for d, (weight, counted) in own.items():
                shares.setdefault(d, []).append((counted / after) / (weight / before))
        return {d: mean(known) for d, known in shares.items()}


NEWS = (
    (Setting("one label", 10, 1), None),
    (Setting("one label", 10, 1), "sign flipped, x3"),
    (Setting("one label", 20, 3), "just above the filter"),
    (Setting("non-iid", 20, 3), "slow drift under the limits"),
)
"""Fleets in which some honest device alone has a label, and what attacks them."""


def news_weights() -> dict[str, float]:
    """What honest devices keep of their FedAvg weight: all, and those that alone have a label.

    A device has a label that is a twentieth of its samples.
    """
    found: dict[str, list[float]] = {"news_weight": [], "honest_weight": []}
    for setting, attack in NEWS:
        for seed in range(2):
            fleet = AttackedFleet(setting, NOBODY if attack is None else KNOWN[attack], {}, seed)
            watched = WatchedMean()
            fleet.server._pipeline._aggregator = watched
            fleet.play()
            held = fleet.data.label_counts > 0.05 * fleet.data.train.sizes[:, None]
            alone = set(np.flatnonzero(held[:, held.sum(axis=0) == 1].any(axis=1)).tolist())
            for d, share in watched.kept(fleet.honest).items():
                found["honest_weight"].append(share)
                found["news_weight"] += [share] if d in alone else []
    return {name: min(shares) for name, shares in found.items() if shares}


def search(runs: int, setting: Setting, rule: str) -> tuple[float, Informed]:
    """Look for the informed attack that does most harm, on a seed that is reported nowhere.

    Half of the runs draw all parameters anew, the others change two of the worst attack so far.
    """
    rng = np.random.default_rng(0)
    seed = 100
    chosen = AGGREGATIONS[rule]
    clean = AttackedFleet(setting, None, chosen, seed).play().accuracy

    def drawn() -> dict[str, Any]:
        return {
            "cosine": float(rng.uniform(-0.4, 0.95)),
            "length": float(rng.uniform(0.8, 3.0)),
            "way": str(rng.choice(["any", "label", "victim", "spread"])),
            "lean": float(rng.uniform(-0.3, 0.9)),
            "starts": float(rng.choice([0.0, 0.3, 0.6])),
            "on": int(rng.integers(1, 4)),
            "off": int(rng.integers(0, 3)),
        }

    worst, harm = Informed(), np.inf
    for number in range(runs):
        values = drawn()
        if number >= runs // 2:
            keys = rng.choice(sorted(values), 2, replace=False).tolist()
            values = {**asdict(worst), **{key: values[key] for key in keys}}
        attack = Informed(**values)
        share = AttackedFleet(setting, Attack(attack), chosen, seed).play().accuracy / clean
        if share < harm:
            worst, harm = attack, share
            print(f"{number}: {share:.3f} {attack}", flush=True)
    return float(harm), worst


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
    parser.add_argument("--informed", action="store_true", help="attacks that know the rule")
    parser.add_argument(
        "--strongest", action="store_true", help="the worst of those, also on a real task"
    )
    parser.add_argument("--search", type=int, metavar="N", help="find the worst of N such attacks")
    parser.add_argument("--rules", nargs="*", default=[DEFAULT, STRICT], choices=INFORMED_RULES)
    parser.add_argument("--byzantine", type=int, default=3, help="of 20, whom `--search` plays")
    parser.add_argument("--table", type=Path, help="the page whose table is written anew")
    options = parser.parse_args()
    if options.search:
        setting = Setting("embedded", 20, options.byzantine)
        for rule in options.rules:
            harm, worst = search(options.search, setting, rule)
            print(f"{setting.name}, {rule}: {harm:.3f} of the accuracy, {worst}")
        return
    played = Played(options.json.with_name(f"{options.json.name}.runs") if options.json else None)
    if options.informed or options.strongest:
        name, job = (
            ("informed", measure_informed) if options.informed else ("strongest", measure_strongest)
        )
        found, table = job(1 if options.quick else 2, played, options.jobs)
        print(table)
        for key in (key for key in found if key != name):
            print(f"{key}: {found[key]:.4g}")
        if options.table:
            write_between(options.table, name, table)
        if options.json:
            options.json.write_text(json.dumps(found, indent=2) + "\n")
        return
    if options.tasks:
        counted = honest_tasks(options.tasks)
        print(counted["total"])
        if options.json:
            options.json.write_text(json.dumps(counted, indent=2) + "\n")
        return
    settings = [s for s in SETTINGS if s.participation == 1] if options.quick else SETTINGS
    attacks = list(QUICK if options.quick else ATTACKS)
    result = measure(settings, attacks, 2, played, options.jobs)
    for key in (key for key in result if key not in ("seeds", "table")):
        print(f"{key}: {result[key]:.4g}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
