"""What Byzantine devices in a fleet send: every attack of `benchmarks/attacks.py`, by name.

Byzantine devices see all honest reports of a round before they send theirs, and work together.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist

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
    low, high = 0.0, 10 * apart
    for _ in range(40):
        middle = (low + high) / 2
        fits = np.linalg.norm(updates - (centre + middle * against), axis=1).max() <= apart
        low, high = (middle, high) if fits else (low, middle)
    return context.sends(centre + low * against)


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
