"""Measures of one run's curve, their means over seeds, and the comparison of methods.

Differences between methods are paired by seed and judged by Student's t; the speedup is the ratio
of rounds to the accuracy that another method reaches late.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fedkeep.core.gist import GistFigures
from fedkeep.core.planning.plan import Plan
from fedkeep.core.targets import WORST_R2
from fedkeep.records.lines import Evaluation, GistLine, PlanLine
from fedkeep.records.runs import Run

LISTED = 50
"""Devices that lines list: the first ones, the same in all lines."""
LAST = 5
"""Evaluations that a late accuracy is the mean of."""
LEVEL = 0.01
"""Differences of accuracy that count as none: one point."""
MOST_SEEDS = 200
"""More seeds than this nobody is advised to run."""
BASES = ("fifo", "reservoir")
"""What methods are measured against unless asked otherwise: the first of these that ran."""
ERRORS = ("rmse", "mae")
"""Errors of numbers that are predicted, in evaluations; lower is better, and R2 decides."""
GIST = ("trust", "likeness", "worth", "reach")
"""The names that `GistFigures` has in records, in its order."""


@dataclass(frozen=True)
class MeanOverSeeds:
    """A mean of one value per seed."""

    mean: float
    half_width: float | None
    """Of its 95 % interval by Student's t; None of a single seed."""
    seeds: int


@dataclass(frozen=True)
class Difference(MeanOverSeeds):
    """By how much a method differs from another, paired over the seeds that both ran."""

    verdict: str
    """`better` or `worse` where the interval excludes 0, else `equivalent` or `inconclusive`.

    A difference is equivalent where its interval stays within a point.
    """
    seeds_to_decide: int | None
    """Seeds that would decide it if they differed as these do; None if decided or too many."""


@dataclass(frozen=True)
class Ratio:
    """The speedup: how many times fewer rounds a method needs to the base's late accuracy."""

    base: str
    value: float | None
    """The geometric mean over the seeds that reached it; None where none did."""
    reached: int
    seeds: int
    """Seeds run with both methods."""


@dataclass(frozen=True)
class Row:
    """One method on one task, over its seeds."""

    task: str
    setting: str
    method: str
    seeds: int
    finished: int
    measures: dict[str, MeanOverSeeds]
    """By the names of `MEASURES`."""
    ratios: tuple[Ratio, ...]
    """One per base, in the order asked for."""
    differences: tuple[dict[str, Difference] | None, ...]
    """One per base; None where no seed ran with both, or the base is the method itself."""
    gist: dict[str, MeanOverSeeds]
    """beta, rho, effective sample size and correction norm; empty of a method without a gist."""
    worst_devices: MeanOverSeeds | None = None
    """Bottom-decile accuracy of the last evaluation; None where it was not recorded."""
    tail_recall: MeanOverSeeds | None = None
    """Mean recall of the rarest quarter of the labels."""
    recalls: dict[str, MeanOverSeeds] = field(default_factory=dict)
    """Recall of each label."""
    measure: str = "accuracy"
    """What the accuracies are, as the runs' headers say; "r2" where targets are numbers."""
    errors: dict[str, MeanOverSeeds] = field(default_factory=dict)
    """`rmse` and `mae` of the last evaluation, where targets are numbers."""


@dataclass(frozen=True)
class Comparison:
    """All rows by task and setting, the base methods first, and notes on what was left out."""

    bases: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]


def coverage(t: float, freedom: int) -> float:
    """Return P(|T| <= t) of Student's t for whole degrees of freedom.

    It is a finite series in the cosine of atan(t / sqrt(freedom)).

    References
    ----------
    Abramowitz and Stegun, Handbook of mathematical functions, 26.7.3 and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 + odd, freedom, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    series = math.sin(angle) * total
    return (angle + series) * 2 / math.pi if odd else series


@cache
def quantile(level: float, freedom: int) -> float:
    """Return the t whose two-sided coverage is `level`, found by bisection."""
    low, high = 0.0, 1.0
    while coverage(high, freedom) < level:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if coverage(middle, freedom) < level else (low, middle)
    return high


def interval(values: Sequence[float]) -> float | None:
    """Half the width of the mean's 95 % interval; None of fewer than two values."""
    if len(values) < 2:
        return None
    return quantile(0.95, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def estimate(values: Sequence[float]) -> MeanOverSeeds:
    """Return the mean of one value per seed, with its interval."""
    return MeanOverSeeds(math.fsum(values) / len(values), interval(values), len(values))


def difference(values: Sequence[float]) -> Difference:
    """Return what one difference per seed shows.

    Examples
    --------
    >>> difference([0.030, 0.021, 0.027]).verdict
    'better'
    >>> found = difference([0.030, -0.021, 0.027])
    >>> found.verdict, found.seeds_to_decide
    ('inconclusive', 25)
    """
    found = estimate(values)
    size, half, seeds = abs(found.mean), found.half_width, found.seeds
    verdict, more = "inconclusive", None
    # On few test samples accuracies are coarse, and two seeds may differ alike by chance.
    by_chance = seeds == 2 and len({round(value, 9) for value in values}) == 1
    if half is not None and size > half and not by_chance:
        verdict = "better" if found.mean > 0 else "worse"
    elif half is not None and size + half <= LEVEL:
        verdict = "equivalent"
    elif half is not None:
        deviation = half * math.sqrt(seeds) / quantile(0.95, seeds - 1)
        distance = max(size, LEVEL - size)
        enough = (
            quantile(0.95, n - 1) * deviation / math.sqrt(n) < distance
            for n in range(seeds + 1, MOST_SEEDS + 1)
        )
        more = next((n for n, decides in enumerate(enough, start=seeds + 1) if decides), None)
    return Difference(found.mean, half, seeds, verdict, more)


def final_accuracy(evaluations: Sequence[Evaluation]) -> float:
    """Return the accuracy of the last evaluation, 0 where it diverged."""
    return evaluations[-1].accuracy or 0.0


def late_accuracy(evaluations: Sequence[Evaluation], of: int = 1) -> float:
    """Return the mean accuracy of the last five evaluations, of 1 or of 100.

    The untrained model's counts only where there is no other.
    """
    last = [e.accuracy or 0.0 for e in _trained(evaluations)[-LAST:]]
    return of * math.fsum(last) / len(last)


def best_accuracy(evaluations: Sequence[Evaluation]) -> float:
    """Return the highest accuracy of any evaluation after training began."""
    return max(e.accuracy or 0.0 for e in _trained(evaluations))


def mean_accuracy(evaluations: Sequence[Evaluation]) -> float:
    """Return the mean accuracy over all rounds: the area under the curve by its rounds."""
    pairs = list(pairwise(evaluations))
    rounds = sum(b.round - a.round for a, b in pairs)
    if not rounds:
        return final_accuracy(evaluations)
    halves = (
        ((a.accuracy or 0.0) + (b.accuracy or 0.0)) / 2 * (b.round - a.round) for a, b in pairs
    )
    return math.fsum(halves) / rounds


class Setback(NamedTuple):
    """A time in which a model was worse than it had been."""

    rounds: int
    """From the last evaluation before until the first after it; to the end where none follows."""
    depth: float
    """How far the accuracy fell."""
    recovered: bool


def setbacks(evaluations: Sequence[Evaluation], slack: float = LEVEL) -> list[Setback]:
    """Find when accuracy fell below its best so far, and how long until it was there again.

    Where labels come one after the other, this is what a change of label costs.

    Parameters
    ----------
    evaluations : sequence of Evaluation
        A run's, in order.
    slack : float
        How far below its best the accuracy may be without having fallen.

    Examples
    --------
    >>> reached = {10: 0.5, 20: 0.8, 30: 0.6, 40: 0.7, 50: 0.81, 60: 0.75}
    >>> curve = [Evaluation(round=n, accuracy=a, loss=None) for n, a in reached.items()]
    >>> [(found.rounds, round(found.depth, 2), found.recovered) for found in setbacks(curve)]
    [(30, 0.2, True), (10, 0.06, False)]
    """
    found: list[Setback] = []
    best, since, lowest = 0.0, 0, 1.0
    below = False
    for each in _trained(evaluations):
        accuracy = each.accuracy or 0.0
        if accuracy >= best - slack:
            if below:
                found.append(Setback(each.round - since, best - lowest, recovered=True))
            best, since, below, lowest = max(best, accuracy), each.round, False, 1.0
        else:
            below, lowest = True, min(lowest, accuracy)
    if below:
        found.append(Setback(evaluations[-1].round - since, best - lowest, recovered=False))
    return found


MEASURES: Mapping[str, Callable[[Sequence[Evaluation]], float]] = {
    "final": final_accuracy,
    "best": best_accuracy,
    "mean_accuracy": mean_accuracy,
    "late": late_accuracy,
}
"""What a curve may be judged by; each takes one evaluation or more."""


def _trained(evaluations: Sequence[Evaluation]) -> Sequence[Evaluation]:
    return [e for e in evaluations if e.round > 0] or evaluations


def gist_line(round_: int, figures: Sequence[GistFigures]) -> GistLine:
    """Average what the gists of some participations did."""
    means = dict(zip(GIST, np.mean([astuple(f) for f in figures], axis=0).tolist(), strict=True))
    return GistLine(round=round_, participations=len(figures), **means)


def plan_line(
    round_: int, plan: Plan, clients_per_label: int | None, regions: Iterable[str] = ()
) -> PlanLine:
    """Return a plan as it is recorded: of many devices only the first `LISTED`."""
    return PlanLine(
        round=round_,
        devices=tuple(plan.devices[:LISTED].tolist()),
        quotas=tuple(map(tuple, plan.quotas[:LISTED].tolist())),
        holders=tuple(plan.holders.tolist()),
        wanted=(clients_per_label or 0,) * len(plan.holders),
        regions=tuple(regions),
    )


def pooled(lines: Sequence[GistLine]) -> GistLine:
    """Return one line for several, weighted by participations; the correction norm's median."""
    count = sum(line.participations for line in lines)
    sums = {
        name: math.fsum(getattr(line, name) * line.participations for line in lines)
        for name in GIST
    }
    means = {name: total / max(count, 1) for name, total in sums.items()}
    # A ratio with a heavy tail: where the stored samples' gradient almost vanishes, a single line
    # would dominate a mean.
    means["reach"] = statistics.median(line.reach for line in lines)
    return GistLine(round=lines[-1].round, participations=count, **means)


def rounds_to(evaluations: Iterable[Evaluation], target: float) -> int | None:
    """Return the first round after the start that reaches `target`; None if none does."""
    reached = (
        e.round
        for e in evaluations
        if e.round > 0 and e.accuracy is not None and e.accuracy >= target
    )
    return next(reached, None)


_Key = tuple[str, str, str]
_Curves = Mapping[int, Sequence[Evaluation]]
"""The evaluations of runs that differ in their seed alone, by seed."""


def compare(runs: Iterable[Run], bases: Sequence[str] = ()) -> Comparison:
    """Compare every method on every task with the base methods, seed by seed.

    The target of a speedup is, for each seed, the late accuracy of the base with that seed, since
    data and partition change with it.

    Parameters
    ----------
    runs : iterable of Run
        Runs of any tasks, settings, methods and seeds.
    bases : sequence of str
        Methods to compare the others with; by default the first of `BASES` that ran.

    Examples
    --------
    >>> from pathlib import Path
    >>> from fedkeep.records.lines import Header
    >>> from fedkeep.records.tables import sentences
    >>> plain = {"config": {}, "config_hash": "", "versions": {}, "labels": ("a", "b")}
    >>> def run(method, seed, accuracy):
    ...     name = f"{method}-{seed}"
    ...     header = Header(run=name, method=method, task="toy", seed=seed, devices=1, **plain)
    ...     last = Evaluation(round=10, accuracy=accuracy, loss=0.1)
    ...     return Run(Path(name), header, (header, last))
    >>> reached = {"fifo": (0.70, 0.72), "ode": (0.75, 0.78)}
    >>> runs = [run(m, seed, a) for m, values in reached.items() for seed, a in enumerate(values)]
    >>> print(*sentences(compare(runs)))
    ode against fifo is inconclusive on toy (+5.50 ± 6.35 points): about 3 seeds would decide it.
    """
    groups, notes = _grouped(runs)
    bases = (
        tuple(bases) or tuple(base for base in BASES if any(key[2] == base for key in groups))[:1]
    )
    first = (*bases, *BASES)

    def order(key: _Key) -> tuple[str, str, int, str]:
        task, setting, method = key
        rank = (
            first.index(method) if method in first else len(first) + (not method.startswith("ode"))
        )
        return task, setting, rank, method

    rows = (_row(key, groups, bases) for key in sorted(groups, key=order))
    return Comparison(bases, tuple(rows), tuple(notes))


def _row(key: _Key, groups: Mapping[_Key, Mapping[int, Run]], bases: Sequence[str]) -> Row:
    runs = groups[key]
    curves = {seed: run.evaluations for seed, run in runs.items()}
    ended = {seed: curves[seed] for seed, run in runs.items() if run.end is not None}
    judged = list((ended or curves).values())
    measures = {name: estimate(list(map(of, judged))) for name, of in MEASURES.items()}
    finished = len(ended)
    gists = [pooled(lines) for run in runs.values() if (lines := run.of(GistLine))]
    gist = (
        {name: estimate([getattr(seed, name) for seed in gists]) for name in GIST} if gists else {}
    )
    ratios, differences = [], []
    for base in bases:
        theirs = groups.get((*key[:2], base), {})
        others = {seed: run.evaluations for seed, run in theirs.items()}
        ratios.append(ratio(curves, base, others))
        paired = _paired_curves(runs, theirs) if base != key[2] else []
        differences.append(_differences(paired) if paired else None)
    final = [curve[-1] for curve in judged]
    header = next(iter(runs.values())).header
    labels = header.labels
    errors = {name: _estimate_known([getattr(e, name) for e in final]) for name in ERRORS}
    recalls = {
        label: _estimate_known([(*e.label_recall, *[None] * len(labels))[place] for e in final])
        for place, label in enumerate(labels)
    }
    return Row(
        *key,
        len(runs),
        finished,
        measures,
        tuple(ratios),
        tuple(differences),
        gist,
        _estimate_known([e.worst_tenth for e in final]),
        _estimate_known([e.rare_recall for e in final]),
        {label: found for label, found in recalls.items() if found is not None},
        header.measure,
        {name: found for name, found in errors.items() if found is not None},
    )


def _paired_curves(
    runs: Mapping[int, Run], theirs: Mapping[int, Run]
) -> list[tuple[Sequence[Evaluation], Sequence[Evaluation]]]:
    """Return the curves of two methods by seed, as far as both got."""
    common = sorted(runs.keys() & theirs.keys())
    whole = [seed for seed in common if runs[seed].end and theirs[seed].end]
    pairs = []
    # Unfinished seeds count where no other does.
    for seed in whole or common:
        if has_diverged(runs[seed]) and has_diverged(theirs[seed]):
            continue  # neither has trained: that they are alike says nothing of the methods
        own, other = runs[seed].evaluations, theirs[seed].evaluations
        last = min(own[-1].round, other[-1].round)
        pairs.append((_until(own, last), _until(other, last)))
    return pairs


def _until(curve: Sequence[Evaluation], last: int) -> Sequence[Evaluation]:
    """Return the evaluations up to a round; the first one where none came by then."""
    return [e for e in curve if e.round <= last] or curve[:1]


def _differences(
    pairs: Sequence[tuple[Sequence[Evaluation], Sequence[Evaluation]]],
) -> dict[str, Difference]:
    return {
        name: difference([of(own) - of(other) for own, other in pairs])
        for name, of in MEASURES.items()
    }


def _estimate_known(values: Sequence[float | None]) -> MeanOverSeeds | None:
    """Return the mean over seeds; None where a seed has no value."""
    known = [value for value in values if value is not None]
    return estimate(known) if known and len(known) == len(values) else None


def ratio(curves: _Curves, base: str, base_curves: _Curves) -> Ratio:
    """Return the speedup of runs over those of the base, paired by seed."""
    paired, logs = sorted(curves.keys() & base_curves.keys()), []
    for seed in paired:
        target = late_accuracy(base_curves[seed])
        if target <= WORST_R2:
            continue  # a base that is as bad as can be sets no target
        own, others = rounds_to(curves[seed], target), rounds_to(base_curves[seed], target)
        if own is not None and others is not None:
            logs.append(math.log(others / own))
    value = math.exp(math.fsum(logs) / len(logs)) if logs else None
    return Ratio(base, value, len(logs), len(paired))


def _grouped(runs: Iterable[Run]) -> tuple[dict[_Key, dict[int, Run]], list[str]]:
    """Return the runs by task, setting and method, then by seed, and notes on them."""
    groups: dict[_Key, dict[int, Run]] = {}
    notes: list[str] = []
    unfinished: list[str] = []
    for run in runs:
        header, evaluations = run.header, run.evaluations
        seeds = (
            groups.setdefault((header.task, header.setting, header.method), {})
            if evaluations
            else {}
        )
        if not evaluations:
            notes.append(f"{header.run}: left out, no evaluation yet")
        elif header.seed in seeds:
            notes.append(
                f"{header.run}: left out, {seeds[header.seed].header.run} has the same task, "
                "method and seed"
            )
        else:
            seeds[header.seed] = run
            note = _note_on_rejections(run)
            if note:
                notes.append(f"{header.run}: {note}")
            if run.end is None:
                unfinished.append(f"{header.run} (round {evaluations[-1].round})")
    notes += _unconverged(groups)
    if unfinished:
        notes.append(f"not finished, counted as far as they got: {', '.join(unfinished)}")
    return groups, notes


_DIVERGENCE = ("model-not-finite", "large-update")
"""Reasons for which the reports of a diverging model are rejected."""


def has_diverged(run: Run) -> bool:
    """Return whether a run's model is useless because training diverged.

    Either the last evaluation has no finite loss, or most reports were rejected for what a
    diverging model sends, so that the global model stayed as it was.
    """
    evaluations = run.evaluations
    if evaluations and evaluations[-1].round > 0 and evaluations[-1].loss is None:
        return True
    reasons, reports = _rejections(run)
    return reports > 0 and 2 * sum(reasons[name] for name in _DIVERGENCE) > reports


def _rejections(run: Run) -> tuple[Counter[str], int]:
    """Return the rejected reports by reason, and the number of all reports."""
    reasons: Counter[str] = Counter()
    for line in run.rounds:
        reasons.update(line.refused_reports)
    return reasons, sum(line.participations or len(line.participants) for line in run.rounds)


def _note_on_rejections(run: Run) -> str:
    """Return a note on a run whose accuracy says little of its method; empty for others."""
    reasons, reports = _rejections(run)
    rejected = reasons.total() - reasons["weight-cut"]
    most = max(reasons, key=lambda name: (name != "weight-cut", reasons[name]), default="")
    share = f"{rejected} of {reports} reports were rejected, most of them for '{most}'"
    if has_diverged(run):
        why = share if rejected else "its loss is not finite"
        return f"diverged, {why}: lower train.learning_rate"
    return share if 2 * rejected > reports else ""


def still_rising(evaluations: Sequence[Evaluation]) -> float:
    """Return how much the accuracy of the last fifth of evaluations exceeds the fifth before.

    Examples
    --------
    >>> curve = [Evaluation(round=n, accuracy=n / 10, loss=1.0) for n in range(1, 11)]
    >>> round(still_rising(curve), 3)
    0.2
    """
    trained = _trained(evaluations)
    part = len(trained) // 5
    if part < 1:
        return 0.0
    late = [e.accuracy or 0.0 for e in trained[-part:]]
    before = [e.accuracy or 0.0 for e in trained[-2 * part : -part]]
    return math.fsum(late) / part - math.fsum(before) / part


def _unconverged(groups: Mapping[_Key, Mapping[int, Run]]) -> Iterator[str]:
    """Yield a note for the methods of a task whose accuracy still rises at the end."""
    rising: dict[tuple[str, str], list[str]] = {}
    for (task, setting, method), runs in groups.items():
        ended = [run.evaluations for run in runs.values() if run.end is not None]
        if ended:
            gain = math.fsum(map(still_rising, ended)) / len(ended)
            if gain > LEVEL:
                rising.setdefault((task, setting), []).append(f"{method} (+{100 * gain:.1f})")
    for (task, setting), methods in rising.items():
        where = f"{task}, {setting}" if setting else task
        first = next(run for key, runs in groups.items() if key[0] == task for run in runs.values())
        measure = "R2" if first.header.measure == "r2" else "the accuracy"
        yield (
            f"{where}: not converged, {measure} still rose by more than a point over the last "
            f"fifth of the run: {', '.join(methods)}; train longer or raise train.learning_rate"
        )
