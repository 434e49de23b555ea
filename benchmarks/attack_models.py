"""What Byzantine devices in a fleet send: every attack of `benchmarks/attacks.py`, by name.

Byzantine devices see all honest reports of a round before they send theirs, and work together.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Literal

import numpy as np

from fedkeep.core.seeds import generator
from fedkeep.core.types import AnyArray, DeviceId, FloatArray, Report, Vector

Reports = Mapping[DeviceId, Report]


@dataclass(frozen=True)
class AttackContext:
    """What Byzantine devices know: the round, the model, all honest reports, and their own."""

    round: int
    rounds: int
    model: Vector
    honest: Reports
    own: Reports

    @property
    def updates(self) -> FloatArray:
        """The honest updates, (devices, P)."""
        found = [
            r.model.astype(np.float64) - self.model for r in self.honest.values() if r.weight > 0
        ]
        return np.array(found) if found else np.zeros((1, len(self.model)))

    @property
    def gist(self) -> FloatArray:
        """The mean of the honest gists; nothing where there are none."""
        found = [r.local_gradient for r in self.honest.values() if r.local_gradient is not None]
        return np.mean(found, axis=0, dtype=np.float64) if found else np.zeros(len(self.model))

    def sends(self, update: FloatArray) -> dict[DeviceId, Report]:
        """The same update from every Byzantine device."""
        return {d: _moved(r, self.model, update) for d, r in self.own.items()}


ReportAttack = Callable[[AttackContext], Mapping[DeviceId, Report]]


@dataclass(frozen=True)
class Attack:
    """What Byzantine devices send, what they declare, and from when on."""

    reports: ReportAttack
    inflated: bool = False
    flipped_labels: bool = False
    backdoor: Literal["", "trigger", "relabelled"] = ""
    """What their own samples teach: `trigger`, that any sample with some features set is of the
    rarest label; `relabelled`, that samples of the rarest label are of the commonest."""
    rejoins_every: int = 0
    """Rounds after which they leave and come back as new devices; 0: never."""
    honest_until: float = 0.0
    """The share of the rounds in which they behave."""
    joins_at: float = 0.0
    """The share of the rounds after which they join."""


def _moved(report: Report, model: Vector, update: FloatArray) -> Report:
    return replace(
        report, model=(model + update).astype(np.float32), weight=max(report.weight, 1.0)
    )


def honestly(context: AttackContext) -> Reports:
    return context.own


def scaled(factor: float) -> ReportAttack:
    def attack(context: AttackContext) -> Reports:
        return {
            d: _moved(r, context.model, factor * (r.model.astype(np.float64) - context.model))
            for d, r in context.own.items()
        }

    return attack


def inner_product(factor: float) -> ReportAttack:
    """Fall of Empires (Xie et al. 2019): against the mean of the honest."""
    return lambda context: context.sends(-factor * context.updates.mean(axis=0))


def any_direction(length: float) -> ReportAttack:
    def attack(context: AttackContext) -> Reports:
        direction = generator(7, "direction").standard_normal(len(context.model))
        return context.sends(length * direction / np.linalg.norm(direction))

    return attack


def as_long_as_honest(attack: ReportAttack) -> ReportAttack:
    """The same, cut to the longest honest update, as somebody would who knows the limits."""

    def cut(context: AttackContext) -> Reports:
        longest = float(np.linalg.norm(context.updates, axis=1).max())
        malicious = {
            d: r.model.astype(np.float64) - context.model for d, r in attack(context).items()
        }
        return {
            d: _moved(
                context.own[d],
                context.model,
                update * longest / max(float(np.linalg.norm(update)), 1e-12),
            )
            for d, update in malicious.items()
        }

    return cut


def alie(z: float | None) -> ReportAttack:
    """A Little Is Enough (Baruch et al. 2019): `z` deviations off, or as many as stay hidden."""

    def attack(context: AttackContext) -> Reports:
        n, byzantine = len(context.honest) + len(context.own), len(context.own)
        needed = n // 2 + 1 - byzantine
        hidden = (
            NormalDist().inv_cdf(min(max((n - byzantine - needed) / (n - byzantine), 0.01), 0.99))
            if z is None
            else z
        )
        updates = context.updates
        return context.sends(updates.mean(axis=0) - hidden * updates.std(axis=0))

    return attack


def min_max(context: AttackContext) -> Reports:
    """Shejwalkar and Houmansadr (2021): as far against the mean as honest updates differ."""
    updates = context.updates
    centre = updates.mean(axis=0)
    against = -centre / max(np.linalg.norm(centre), 1e-12)
    apart = max(float(np.linalg.norm(updates - u, axis=1).max()) for u in updates)

    def fits(reach: float) -> bool:
        return bool(np.linalg.norm(updates - (centre + reach * against), axis=1).max() <= apart)

    return context.sends(centre + _farthest(fits, 10 * apart) * against)


def turned_estimators(factor: float) -> ReportAttack:
    def attack(context: AttackContext) -> Reports:
        return {d: _turned(r, factor) for d, r in context.own.items()}

    return attack


def _turned(report: Report, factor: float) -> Report:
    gradient = report.local_gradient
    return (
        report
        if gradient is None
        else replace(report, local_gradient=(-factor * gradient).astype(np.float32))
    )


def gist_in_line(share: float) -> ReportAttack:
    """An update across the fleet's direction, and a gist in line, turned against the fleet."""

    def attack(context: AttackContext) -> Reports:
        fleet = context.updates.mean(axis=0)
        update = _unit(_beside(generator(7, "direction").standard_normal(len(fleet)), fleet))
        gist = 1e3 * (share * _unit(fleet) - (1 - share**2) ** 0.5 * update)
        malicious = as_long_as_honest(lambda s: s.sends(update))(context)
        return {d: _with_gist(r, gist) for d, r in malicious.items()}

    return attack


def gist_across(context: AttackContext) -> Reports:
    """The fleet's gist turned round, but for what its own honest update would contradict."""
    return {
        d: _with_gist(r, -10 * _beside(context.gist, r.model.astype(np.float64) - context.model))
        for d, r in context.own.items()
    }


def _with_gist(report: Report, gist: FloatArray) -> Report:
    sent = report.local_gradient
    return (
        report
        if sent is None
        else replace(report, local_gradient=gist[-len(sent) :].astype(np.float32))
    )


def _beside(vector: FloatArray, way: AnyArray) -> FloatArray:
    """What is left of a vector beside its part along `way`."""
    along = _unit(way[-len(vector) :].astype(np.float64))
    left: FloatArray = vector - (vector @ along) * along
    return left


def _unit(vector: FloatArray) -> FloatArray:
    unit: FloatArray = vector / max(float(np.linalg.norm(vector)), 1e-30)
    return unit


def all_at_once(context: AttackContext) -> Reports:
    """Turned updates and estimators, weights and counts out of all proportion."""
    turned = inner_product(3.0)(context)
    return {
        d: replace(_turned(r, 10.0), weight=1e9, gradient_samples=10**9) for d, r in turned.items()
    }


def taking_turns(context: AttackContext) -> Reports:
    """Another attack every round."""
    attacks = (
        scaled(-3.0),
        inner_product(3.0),
        any_direction(999.0),
        min_max,
        alie(1.5),
        scaled(-10.0),
    )
    return attacks[context.round % len(attacks)](context)


def min_sum(context: AttackContext) -> Reports:
    """Shejwalkar and Houmansadr (2021): no farther in all from honest updates than they are."""
    updates = context.updates
    centre = updates.mean(axis=0)
    against = -_unit(centre)
    apart = max(float((np.linalg.norm(updates - u, axis=1) ** 2).sum()) for u in updates)

    def fits(reach: float) -> bool:
        far = np.linalg.norm(updates - (centre + reach * against), axis=1)
        return bool((far**2).sum() <= apart)

    return context.sends(centre + _farthest(fits, 10 * apart**0.5) * against)


def _farthest(fits: Callable[[float], bool], most: float) -> float:
    """The largest number that fits, by bisection."""
    low, high = 0.0, most
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def fang(context: AttackContext) -> Reports:
    """Fang et al. (2020): in every coordinate beyond all honest updates, against their mean."""
    updates = context.updates
    low, high = updates.min(axis=0), updates.max(axis=0)
    room = np.maximum(high - low, 1e-12)
    draw = generator(11, "fang", context.round)
    found = {}
    for d, report in context.own.items():
        beyond = draw.random(len(room)) * room
        update = np.where(updates.mean(axis=0) > 0, low - beyond, high + beyond)
        found[d] = _moved(report, context.model, update)
    return found


@dataclass(frozen=True)
class Informed:
    """An attack by somebody who reads the rule: every stage's threshold is a parameter.

    The update has the usual length, where clipping takes nothing, and a cosine with the fleet's
    direction, by which the rule filters and reweights. The gist agrees with the update as far as
    the rule asks, and leans against the fleet.
    """

    cosine: float = 0.0
    """Of the update with the mean of the honest ones."""
    length: float = 1.0
    """Times the median of honest lengths."""
    way: Literal["any", "label", "victim", "spread"] = "any"
    """What the rest of the update does: a fixed direction, one label's logit, against one honest
    device, or along what honest devices differ most in."""
    lean: float = 0.0
    """The share of the gist that leans against the fleet; the rest asks for the attack's way."""
    starts: float = 0.0
    """The share of the rounds before which they behave."""
    on: int = 1
    """Rounds in a row in which they attack,"""
    off: int = 0
    """and then behave."""

    def __call__(self, context: AttackContext) -> Reports:
        resting = context.round % (self.on + self.off) >= self.on
        if resting or context.round < self.starts * context.rounds:
            return context.own
        updates = context.updates
        fleet = _unit(updates.mean(axis=0))
        aside = _unit(_beside(self._way(context), fleet))
        usual = float(np.median(np.linalg.norm(updates, axis=1)))
        mixed = self.cosine * fleet + (1 - self.cosine**2) ** 0.5 * aside
        gist = 1e3 * (self.lean * fleet - (1 - self.lean**2) ** 0.5 * aside)
        sent = context.sends(self.length * usual * mixed)
        return {d: _with_gist(r, gist) for d, r in sent.items()}

    def _way(self, context: AttackContext) -> FloatArray:
        """The direction that the attack is for."""
        updates = context.updates
        way: FloatArray = generator(7, "direction").standard_normal((updates.shape[1],))
        if self.way == "label":  # of a dense net the last numbers are the biases of the labels
            way = np.zeros(updates.shape[1])
            way[-1] = 1.0
        elif self.way == "victim":
            way = -updates[0]
        elif self.way == "spread":
            way = np.linalg.svd(updates - updates.mean(axis=0), full_matrices=False)[2][0]
        return way


def opposite_updates(context: AttackContext) -> Reports:
    """Colluding gists: updates that cancel each other, each with a gist that it bears out.

    All gists lean against the fleet, which is all that is left of their sum.
    """
    fleet = _unit(context.updates.mean(axis=0))
    aside = _unit(_beside(generator(7, "direction").standard_normal(len(fleet)), fleet))
    usual = float(np.median(np.linalg.norm(context.updates, axis=1)))
    found = {}
    for turn, (d, report) in enumerate(context.own.items()):
        way = aside if turn % 2 else -aside
        sent = _moved(report, context.model, usual * way)
        found[d] = _with_gist(sent, 1e3 * (fleet - 0.1 * way))
    return found


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
INFLATED = {
    f"inflated profile, {name}": replace(attack, inflated=True) for name, attack in PLAIN.items()
}
GISTS = {
    "gist in line with its update": Attack(gist_in_line(0.0)),
    "gist in line, a quarter against the fleet": Attack(gist_in_line(0.24)),
    "gist turned across its own update": Attack(gist_across),
}
OPEN = {
    "any direction, as long as honest": Attack(as_long_as_honest(any_direction(1.0))),
    **GISTS,
    **{
        f"inflated profile, {name}": replace(attack, inflated=True)
        for name, attack in GISTS.items()
    },
}
"""What stays open (docs/security.md)."""
INFORMED = {
    "Fang": Attack(fang),
    "Fang, as long as honest": Attack(as_long_as_honest(fang)),
    "min-sum": Attack(min_sum),
    "min-max, as long as honest": Attack(as_long_as_honest(min_max)),
    "min-sum, inflated profile": Attack(min_sum, inflated=True),
    "just above the filter": Attack(Informed(cosine=0.0)),
    "just above the weights": Attack(Informed(cosine=0.3)),
    "slow drift under the limits": Attack(Informed(cosine=0.9)),
    "one label's logit": Attack(Informed(cosine=0.3, way="label")),
    "against one device": Attack(Informed(cosine=0.1, way="victim")),
    "on and off": Attack(Informed(cosine=-0.3, on=1, off=2)),
    "Sybils that join late": Attack(as_long_as_honest(inner_product(1.0)), joins_at=0.5),
    "Sybils that come back as others": Attack(
        as_long_as_honest(inner_product(1.0)), rejoins_every=3
    ),
    "colluding gists": Attack(opposite_updates),
    "found by search, 3 of 20": Attack(Informed(cosine=0.13, length=1.3, way="victim", lean=0.68)),
    "found by search, 5 of 20": Attack(Informed(cosine=-0.21, length=2.0, way="victim", lean=0.09)),
    "found by search, strict": Attack(
        Informed(cosine=0.06, length=2.7, way="spread", lean=0.37, starts=0.6, on=3)
    ),
    "found by search, tight": Attack(Informed(cosine=0.15, length=2.7, lean=0.4)),
    "backdoor by a trigger": Attack(honestly, backdoor="trigger"),
    "backdoor by a trigger, x3": Attack(scaled(3.0), backdoor="trigger"),
    "backdoor by a rare label": Attack(honestly, backdoor="relabelled"),
    "backdoor by a rare label, x3": Attack(scaled(3.0), backdoor="relabelled"),
}
"""Attacks by somebody who knows the rule (`--informed`).

Those found by search are the worst of `attacks.py --search`, on a seed that is reported nowhere.
"""
ATTACKS = {
    **OPEN,
    **PLAIN,
    "inflated profile": Attack(honestly, inflated=True),
    **INFLATED,
}
QUICK = (
    *OPEN,
    "sign flipped, x3",
    "any direction, length 999",
    "min-max",
    "labels flipped",
    "all at once",
    "inflated profile, sign flipped",
    "inflated profile, estimator turned, x10",
)
