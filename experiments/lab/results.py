"""The committed results, and the paper's claims with our verdicts and their numbers.

Results are summaries of experiments and figures of programs, each with what the paper reports.
"""

import json
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fedkeep.records.measures import Ratio, ratio
from fedkeep.records.runs import versions
from fedkeep.tables import read_toml
from lab.curves import Curve, read_summary
from lab.findings import LEVEL, Interval, finals, pooled_finals

UNEVEN = ("ic",)
"""Rows of Table 2 whose devices differ so much in size that the accuracy over all test samples,
which the authors' code takes, is another number than the mean over devices, which the paper
names."""
ESTIMATES = {"ode-est": "", "ode-est-participants": " by the participants' mean"}
"""ODE-Est by the paper's Eq. 8 and as the authors' README has it, with what to call it."""


class Paper:
    """The tables of `paper.toml`: no number of the paper is written anywhere else."""

    def __init__(self, path: Path) -> None:
        self.tables = read_toml(path)
        self.causes: dict[str, str] = read_toml(path.with_name("causes.toml"))
        """Why a claim did not come out, as far as we found it out."""
        self.claims: dict[str, Any] = self.tables["claims"]

    def of(self, table: str, quantity: str, row: str, column: str) -> float | None:
        """The paper's number in a table's row and column; None if absent."""
        found = self.tables.get(table, {})
        column = found.get("same_method", {}).get(column, column)
        row = found.get("same_row", {}).get(row, row)
        values = found.get(quantity, {})
        values = values.get(row) if isinstance(values, dict) else values
        if values is None or column not in found.get("columns", ()):
            return None
        return float(values[found["columns"].index(column)])

    def swept(self, row: str, method: str, setting: str) -> float | None:
        """The paper's accuracy of a method where one key was swept; None if absent."""
        values = self.tables.get("robustness", {}).get(method, {}).get(row)
        value = setting.partition("=")[2]
        return None if values is None or value not in values else float(values[value])


def papers_row(task: str) -> str:
    """The row of the paper that a task belongs to, whatever the form of its data.

    >>> papers_row("har-balanced")
    'har'
    """
    return task.partition("-")[0]


def write_figures(script: str, out: Path, figures: dict[str, Any]) -> None:
    """What a program measured, with the command and the versions that it was measured by."""
    header = {
        "command": shlex.join(["python", f"experiments/{script}.py", *sys.argv[1:]]),
        "versions": versions(),
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{script}.json").write_text(json.dumps(header | figures, indent=1) + "\n")


class Results:
    """What has been run so far, and what the paper says of it."""

    def __init__(self, directory: Path, paper: Paper) -> None:
        # The suites have tables of their own.
        paths = sorted(
            p for p in directory.glob("*/*.json") if p.parent.name not in {"curves", "gist"}
        )
        self.summaries = {(summary := read_summary(path)).experiment: summary for path in paths}
        self.directory, self.paper = directory, paper
        self.figures = {p.stem: json.loads(p.read_text()) for p in directory.glob("*.json")}
        self.measured: dict[str, Any] = self.figures.get("claims", {}).get("tasks", {})
        """What `claims.py` found, by task."""

    def methods(self, experiment: str) -> list[str]:
        """The methods in the order of the experiment's file."""
        return list(dict.fromkeys(curve.method for curve in self.summaries[experiment].curves))

    def settings(self, experiment: str) -> list[str]:
        return list(dict.fromkeys(curve.setting for curve in self.summaries[experiment].curves))

    def runs(self, experiment: str, method: str, setting: str | None = None) -> dict[int, Curve]:
        """A method's runs by seed, in the first setting unless one is named; empty if not run."""
        if experiment not in self.summaries:
            return {}
        chosen = self.settings(experiment)[:1] if setting is None else [setting]
        curves = self.summaries[experiment].curves
        return {
            c.seed: c for c in curves if c.method == method and c.setting in chosen and c.rounds
        }

    def speedup(self, experiment: str, method: str) -> Ratio:
        """How much sooner than FIFO a method gets to where FIFO ends."""
        own, fifo = (
            {s: c.evaluations for s, c in self.runs(experiment, m).items()}
            for m in (method, "fifo")
        )
        return ratio(own, "fifo", fifo)

    def margin(
        self, experiment: str, one: str, other: str, setting: str | None = None
    ) -> Interval | None:
        """How far `one` is ahead of `other` over the seeds that ran with both; None if none did."""
        return finals(self.runs(experiment, one, setting), self.runs(experiment, other, setting))

    def pooled_margin(self, experiment: str, method: str) -> Interval | None:
        """A method's lead over FIFO over all test samples; None if no run kept that."""
        return pooled_finals(self.runs(experiment, method), self.runs(experiment, "fifo"))

    def pairs(self, folder: str, one: str, other: str) -> Iterator[tuple[str, Ratio, Interval]]:
        """The tasks of the folder where both ran: the speedup of `one` over FIFO, and its lead."""
        for name in self.summaries:
            if (
                name.startswith(f"{folder}/")
                and (margin := self.margin(name, one, other)) is not None
            ):
                yield name.removeprefix(f"{folder}/"), self.speedup(name, one), margin


def mean_curve(curves: list[Curve]) -> list[tuple[float, float]]:
    """Accuracy by round in percent, the mean over runs, as far as all of them got."""
    heights = zip(*(curve.accuracy for curve in curves), strict=False)
    rounds = min((curve.rounds for curve in curves), key=len)
    return [
        (float(r), 100 * math.fsum(a or 0.0 for a in at) / len(at))
        for r, at in zip(rounds, heights, strict=True)
    ]


Finding = tuple[bool | None, str]
"""Whether a claim holds somewhere (None: more seeds have to tell), and the numbers in words."""
Check = Callable[[Results], Iterator[Finding]]
CLAIMS: dict[str, Check] = {}
"""In the order of the paper."""


def claim(words: str) -> Callable[[Check], Check]:
    """Puts the check below it under the claim that it is of."""
    return partial(CLAIMS.setdefault, words)


def verdicts(results: Results) -> dict[str, tuple[str, str]]:
    """By claim the verdict in a word, and because of which numbers."""
    judged = {}
    for claimed, check in CLAIMS.items():
        found = list(check(results))
        decided = [holds for holds, _ in found if holds is not None]
        word = "partly"
        if not found:
            word = "not run yet"
        elif not decided:
            word = "undecided"
        elif not any(decided):
            word = "not reproduced"
        elif all(holds for holds, _ in found):
            word = "reproduced"
        judged[claimed] = word, "; ".join(words for _, words in found)
    return judged


@claim("ODE-Est reaches FIFO's final accuracy sooner (Table 2)")
def faster(results: Results) -> Iterator[Finding]:
    for method, estimate in ESTIMATES.items():
        for task, ode, _ in results.pairs("table2", method, "fifo"):
            ours = "never" if ode.value is None else f"{ode.value:.2f}x"
            printed = results.paper.of("table2", "speedup", task, method)
            holds = ode.value is not None and ode.value > 1 and 2 * ode.reached > ode.seeds
            theirs = f" (paper {printed:.2f}x)" if printed else ""
            yield (holds, f"{task}{estimate} {ours}{theirs}")


def more_accurate(results: Results, methods: Mapping[str, str]) -> Iterator[Finding]:
    """By the mean over devices, and where these are of very unequal sizes over all samples too."""
    for method, estimate in methods.items():
        for task, _, margin in results.pairs("table2", method, "fifo"):
            printed, base = (
                results.paper.of("table2", "accuracy", task, name) for name in (method, "fifo")
            )
            theirs = "" if printed is None or base is None else f" (paper {printed - base:+.1f})"
            yield (margin.ahead, f"{task}{estimate} {margin} points{theirs}")
            if task in UNEVEN and (pooled := results.pooled_margin(f"table2/{task}", method)):
                yield (pooled.ahead, f"{task}{estimate}, pooled {pooled} points{theirs}")


for _name, _methods in (("ODE-Est", ESTIMATES), ("ODE-Exact", {"ode-exact": ""})):
    claim(f"{_name} ends more accurate than FIFO (Table 2)")(
        partial(more_accurate, methods=_methods)
    )


@claim("Limited storage costs up to 4 times the training time and 7 % accuracy")
def storage_costs(results: Results) -> Iterator[Finding]:
    """Against unlimited storage; where that ran once or not at all, against a larger store too."""
    stores = [
        found
        for folder in ("table2", "motivation")
        for found in results.pairs(folder, "full-data", "fifo")
    ]
    known = {task for task, _, margin in stores if margin.half_width is not None}
    for task, most, margin in results.pairs("motivation", "fifo-20", "fifo"):
        if task not in known:
            stores.append((f"{task} with 20 slots", most, margin))
    for task, most, margin in stores:
        speed = most.value or 0.0
        yield (margin.ahead if margin.mean >= 5 else False, f"{task} {margin} points")
        yield (speed >= 3, f"{task} {speed:.1f}x")


@claim("FB and SLD are above HL and GN, but below random")
def filters_between(results: Results) -> Iterator[Finding]:
    for task in ("st", "st-converging", "st-all-labels", "ic", "har", "har-balanced", "tc"):
        names = ("fedbalancer", "sld", "high-loss", "gradient-norm", "fifo")
        found = [
            reached.mean
            for name in names
            if (reached := finals(results.runs(f"table2/{task}", name)))
        ]
        if len(found) == len(names):
            fb, sld, hl, gn, fifo = found
            holds = min(fb, sld) > max(hl, gn) and max(fb, sld) < fifo
            yield (
                holds,
                f"{task}: FB {fb:.1f}, SLD {sld:.1f}, HL {hl:.1f}, GN {gn:.1f}, FIFO {fifo:.1f}",
            )


@claim("FIFO and reservoir sampling are as good as each other")
def fifo_is_random(results: Results) -> Iterator[Finding]:
    for task, _, margin in results.pairs("table2", "reservoir", "fifo"):
        yield (abs(margin.mean) <= LEVEL, f"{task} {margin}")


@claim("HL and GN never reach the accuracy of FIFO")
def importance_fails(results: Results) -> Iterator[Finding]:
    for method in ("high-loss", "gradient-norm"):
        for task, speed, _ in results.pairs("table2", method, "fifo"):
            yield (
                speed.reached == 0,
                f"{method} on {task}: {speed.reached} of {speed.seeds} seeds reach it",
            )


@claim("Simplified ODE saves 44 % memory and 83 % delay for at most a point")
def simplified_is_cheap(results: Results) -> Iterator[Finding]:
    if cost := results.figures.get("table3", {}).get("tasks", {}).get("tc"):
        full, simple = cost["ode-est"], cost["ode-simplified"]
        time = 1 - simple["one_ms"] / full["one_ms"]
        yield (time >= 0.5, f"TC saves {100 * time:.0f} % of the delay")
        memory = 1 - simple["extra_mb"] / full["extra_mb"]
        yield (memory >= 0.3, f"and {100 * memory:.0f} % of the memory")
    for task, _, margin in results.pairs("table2", "ode-simplified", "ode-est"):
        yield (margin.keeps_up, f"{task} {margin} points")


@claim("Gains hold at low participation, more epochs, smaller storage")
def gains_hold(results: Results) -> Iterator[Finding]:
    swept = ("-participation", "-epochs", "-storage")
    for name in results.summaries:
        if name.startswith("robustness/") and name.endswith(swept):
            for setting in results.settings(name):
                margin = results.margin(name, "ode-est", "fifo", setting)
                if margin is not None:
                    place = f"{name.partition('/')[2]} {setting.rpartition('=')[2]}"
                    yield (margin.ahead, f"{place}: {margin}")


@claim("Term 2 outweighs term 1")
def term_two_rules(results: Results) -> Iterator[Finding]:
    for task, row in results.measured.items():
        low, high = min(row["term2_over_term1"]), max(row["term2_over_term1"])
        theirs = (
            f" (paper about {results.paper.claims['term2_over_term1_har']:.0f})"
            if papers_row(task) == "har"
            else ""
        )
        yield (low >= 10, f"{task}: {low:.1f} to {high:.1f} times{theirs}")


@claim("Values are stable between rounds")
def values_are_stable(results: Results) -> Iterator[Finding]:
    for task, row in results.measured.items():
        rounds, table = row["rounds"], row["pearson_rounds"]
        near = min(table[i][i + 1] for i in range(len(rounds) - 1))
        printed = results.paper.claims.get(f"pearson_rounds_{papers_row(task)}")
        theirs = f" (paper {printed[0]:.2f} to {printed[1]:.2f})" if printed else ""
        far = f"{table[0][-1]:.2f} from round 0 to {rounds[-1]}"
        yield (
            near >= 0.85,
            f"{task}: at least {near:.2f} between neighbouring rounds measured, {far}{theirs}",
        )


@claim("The last layer's gradient tracks the full one")
def last_layer_tracks(results: Results) -> Iterator[Finding]:
    for task, row in results.measured.items():
        if not task.startswith("st"):
            low, high = min(row["pearson_last_layer"]), max(row["pearson_last_layer"])
            printed = results.paper.claims[f"pearson_last_layer_{papers_row(task)}"]
            yield (
                low >= 0.85,
                f"{task}: {low:.2f} to {high:.2f} (paper {printed[0]:.2f} to {printed[1]:.2f})",
            )


@claim("The one-step look-ahead agrees with leave-one-out and Shapley")
def look_ahead_suffices(results: Results) -> Iterator[Finding]:
    for task, row in results.measured.items():
        shapley, left = (row["look_ahead"][name]["mean"] for name in ("shapley", "leave_one_out"))
        words = f"{task}: correlation {shapley:.3f} with Shapley, {left:.3f} with leave-one-out"
        yield (min(shapley, left) >= 0.9, words)


@claim("Greedy coordination is near the optimum")
def greedy_is_near(results: Results) -> Iterator[Finding]:
    if figures := results.figures.get("coordination"):
        worst, median = figures["ratio_worst"], figures["ratio_median"]
        holds = worst >= results.paper.claims["greedy_over_optimum"]
        yield (
            holds,
            f"median {median:.3f}, worst {worst:.3f} of the optimum (`benchmarks/coordination.py`)",
        )


@claim("Theorem 1 bounds the loss reduction")
def theorem_one(results: Results) -> Iterator[Finding]:
    constants = {"paper": "printed in the paper", "appendix": "printed in its appendix"}
    constants["corrected"] = "L zeta m eta²/(2|B|)"
    if part := results.figures.get("theory", {}).get("theorem1"):
        for name, broken in part["broken"].items():
            words = f"broken in {broken} of {part['checks']} checks"
            yield broken == 0, f"with the constant {constants[name]} {words}"


@claim("Theorem 2 and Lemma 1 bound the divergence")
def divergence_bounds(results: Results) -> Iterator[Finding]:
    if part := results.figures.get("theory", {}).get("divergence"):
        for name, title in (("theorem2", "Theorem 2"), ("lemma1", "Lemma 1")):
            ratio, broken = part[f"{name}_bound_over_truth_median"], part["broken"][name]
            words = f"broken in {broken} of {part['checks']} checks"
            yield broken == 0, f"{title} {words}, the bound {ratio:.1f} times the truth"


@claim("Every component matters")
def components_matter(results: Results) -> Iterator[Finding]:
    for part in ("without-valuation", "without-estimator", "without-coordination"):
        for task, _, margin in results.pairs("ablation", "ode-est", part):
            yield (margin.ahead, f"{task} ahead of itself {part} by {margin}")
