"""The paper's claims, each with our verdict and the numbers that it rests on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from lab.paper import Paper
from lab.results import LEVEL, Margin, Results, Shown

Word = Literal["reproduced", "partly", "not reproduced", "undecided", "not run yet"]
_TASKS = ("st", "st-converging", "st-all-labels", "ic", "har", "tc")


@dataclass(frozen=True)
class ClaimVerdict:
    """A claim and what became of it."""

    claim: str
    word: Word
    because: str


@dataclass(frozen=True)
class Finding:
    """Whether a claim holds somewhere, and the numbers in words."""

    holds: bool | None
    """None where the interval of a difference holds 0: more seeds have to tell."""
    words: str


def verdicts(results: Results, paper: Paper) -> list[ClaimVerdict]:
    """All claims, in the order of the paper."""
    return [_verdict(claim, check(results, paper)) for claim, check in CLAIMS.items()]


def _verdict(claim: str, findings: Iterable[Finding]) -> ClaimVerdict:
    found = list(findings)
    words = "; ".join(finding.words for finding in found)
    if not found:
        return ClaimVerdict(claim, "not run yet", "")
    told = [finding.holds for finding in found if finding.holds is not None]
    if not told:
        return ClaimVerdict(claim, "undecided", words)
    if not any(told):
        return ClaimVerdict(claim, "not reproduced", words)
    return ClaimVerdict(claim, "reproduced" if all(finding.holds for finding in found) else "partly", words)


Check = Callable[[Results, Paper], Iterable[Finding]]


def _pairs(results: Results, folder: str, one: str, other: str) -> Iterable[tuple[str, Shown, Shown, Margin]]:
    """Two methods side by side, on every task of the folder where both ran, and how far the one is ahead."""
    for name in results.summaries:
        if name.startswith(f"{folder}/"):
            a, b, margin = results.shown(name, one), results.shown(name, other), results.margin(name, one, other)
            if a is not None and b is not None and margin is not None:
                yield name.removeprefix(f"{folder}/"), a, b, margin


def faster(results: Results, paper: Paper) -> Iterable[Finding]:
    for task, ode, _, _ in _pairs(results, "table2", "ode-est", "fifo"):
        ours = "never" if ode.speedup is None else f"{ode.speedup:.2f}x"
        printed = paper.of("table2", "speedup", task, "ode-est")
        holds = ode.speedup is not None and ode.speedup > 1 and 2 * ode.reached > ode.seeds
        yield Finding(holds, f"{task} {ours}" + (f" (paper {printed:.2f}x)" if printed else ""))


def more_accurate(results: Results, paper: Paper) -> Iterable[Finding]:
    yield from _ahead_of_fifo("ode-est", results, paper)


def exact_more_accurate(results: Results, paper: Paper) -> Iterable[Finding]:
    yield from _ahead_of_fifo("ode-exact", results, paper)


def _ahead_of_fifo(method: str, results: Results, paper: Paper) -> Iterable[Finding]:
    for task, _, _, margin in _pairs(results, "table2", method, "fifo"):
        printed, base = (paper.of("table2", "accuracy", task, name) for name in (method, "fifo"))
        theirs = "" if printed is None or base is None else f" (paper {printed - base:+.1f})"
        yield Finding(margin.ahead, f"{task} {margin} points{theirs}")


def storage_costs(results: Results, paper: Paper) -> Iterable[Finding]:
    """Against unlimited storage; where that ran once or not at all, against a larger store too."""
    del paper
    unlimited = [*_pairs(results, "table2", "full-data", "fifo"), *_pairs(results, "motivation", "full-data", "fifo")]
    known = {task for task, _, _, margin in unlimited if margin.half_width is not None}
    larger = [
        (f"{task} with 20 slots", most, fifo, margin)
        for task, most, fifo, margin in _pairs(results, "motivation", "fifo-20", "fifo")
        if task not in known
    ]
    for task, most, _, margin in unlimited + larger:
        speed = 0.0 if most.speedup is None else most.speedup
        yield Finding(margin.ahead if margin.mean >= 5 else False, f"{task} {margin} points")
        yield Finding(speed >= 3, f"{task} {speed:.1f}x")


def filters_between(results: Results, paper: Paper) -> Iterable[Finding]:
    del paper
    for task in _TASKS:
        names = ("fedbalancer", "sld", "high-loss", "gradient-norm", "fifo")
        found = [results.shown(f"table2/{task}", method) for method in names]
        if all(found):
            fb, sld, hl, gn, fifo = (shown.mean for shown in found if shown is not None)
            holds = min(fb, sld) > max(hl, gn) and max(fb, sld) < fifo
            words = f"{task}: FB {fb:.1f}, SLD {sld:.1f}, HL {hl:.1f}, GN {gn:.1f}, FIFO {fifo:.1f}"
            yield Finding(holds, words)


def fifo_is_random(results: Results, paper: Paper) -> Iterable[Finding]:
    del paper
    for task, _, _, margin in _pairs(results, "table2", "reservoir", "fifo"):
        yield Finding(abs(margin.mean) <= LEVEL, f"{task} {margin}")


def importance_fails(results: Results, paper: Paper) -> Iterable[Finding]:
    del paper
    for method in ("high-loss", "gradient-norm"):
        for task, shown, _, _ in _pairs(results, "table2", method, "fifo"):
            yield Finding(shown.reached == 0, f"{method} on {task}: {shown.reached} of {shown.seeds} seeds reach it")


def simplified_is_cheap(results: Results, paper: Paper) -> Iterable[Finding]:
    del paper
    cost = results.figures.get("table3", {}).get("tasks", {}).get("tc")
    if cost:
        full, simple = cost["ode-est"], cost["ode-simplified"]
        time = 1 - simple["one_ms"] / full["one_ms"]
        yield Finding(time >= 0.5, f"TC saves {100 * time:.0f} % of the delay")
        memory = 1 - simple["extra_mb"] / full["extra_mb"]
        yield Finding(memory >= 0.3, f"and {100 * memory:.0f} % of the memory")
    for task, _, _, margin in _pairs(results, "table2", "ode-simplified", "ode-est"):
        yield Finding(margin.keeps_up, f"{task} {margin} points")


def gains_hold(results: Results, paper: Paper) -> Iterable[Finding]:
    del paper
    swept = ("train.participation", "train.epochs", "storage.capacity")
    for task, settings in results.figures.get("helps", {}).items():
        for setting, methods in settings.items():
            if setting.startswith(swept) and "ode-est" in methods:
                margin = Margin(*methods["ode-est"]["over_fifo"])
                yield Finding(margin.ahead, f"{task} {setting.rpartition('.')[2]}: {margin}")


def values_are_stable(results: Results, paper: Paper) -> Iterable[Finding]:
    for task, row in results.figures.get("claims", {}).get("tasks", {}).items():
        rounds, table = row["rounds"], row["pearson_rounds"]
        near = min(table[i][i + 1] for i in range(len(rounds) - 1))
        far = table[0][-1]
        printed = paper.tables["claims"].get(f"pearson_rounds_{task}")
        theirs = f" (paper {printed[0]:.2f} to {printed[1]:.2f})" if printed else ""
        words = (
            f"{task}: at least {near:.2f} between neighbouring rounds measured, {far:.2f} from round 0 to {rounds[-1]}"
        )
        yield Finding(near >= 0.85, words + theirs)


def last_layer_tracks(results: Results, paper: Paper) -> Iterable[Finding]:
    for task, row in results.figures.get("claims", {}).get("tasks", {}).items():
        if task.startswith("st"):
            continue
        low, high = min(row["pearson_last_layer"]), max(row["pearson_last_layer"])
        printed = paper.claim(f"pearson_last_layer_{task}")
        words = f"{task}: {low:.2f} to {high:.2f} (paper {printed[0]:.2f} to {printed[1]:.2f})"
        yield Finding(low >= 0.85, words)


def term_two_rules(results: Results, paper: Paper) -> Iterable[Finding]:
    for task, row in results.figures.get("claims", {}).get("tasks", {}).items():
        low, high = min(row["term2_over_term1"]), max(row["term2_over_term1"])
        theirs = f" (paper about {paper.claim('term2_over_term1_har'):.0f})" if task == "har" else ""
        yield Finding(low >= 10, f"{task}: {low:.1f} to {high:.1f} times{theirs}")


def look_ahead_suffices(results: Results, paper: Paper) -> Iterable[Finding]:
    del paper
    for task, row in results.figures.get("claims", {}).get("tasks", {}).items():
        shapley, left = row["look_ahead"]["shapley"], row["look_ahead"]["leave_one_out"]
        words = f"{task}: correlation {shapley['mean']:.3f} with Shapley, {left['mean']:.3f} with leave-one-out"
        yield Finding(min(shapley["mean"], left["mean"]) >= 0.9, words)


def greedy_is_near(results: Results, paper: Paper) -> Iterable[Finding]:
    figures = results.figures.get("coordination")
    if figures:
        worst, median = figures["ratio_worst"], figures["ratio_median"]
        holds = worst >= paper.claim("greedy_over_optimum")
        yield Finding(holds, f"median {median:.3f}, worst {worst:.3f} of the optimum (`benchmarks/coordination.py`)")


def theorem_one(results: Results, paper: Paper) -> Iterable[Finding]:
    del paper
    figures = results.figures.get("theory")
    if figures:
        part = figures["theorem1"]
        for name, broken in part["broken"].items():
            words = f"with the constant {_CONSTANTS[name]} broken in {broken} of {part['checks']} checks"
            yield Finding(broken == 0, words)


_CONSTANTS = {
    "paper": "printed in the paper",
    "appendix": "printed in its appendix",
    "corrected": "L zeta m eta²/(2|B|)",
}


def divergence_bounds(results: Results, paper: Paper) -> Iterable[Finding]:
    del paper
    figures = results.figures.get("theory")
    if figures:
        part = figures["divergence"]
        for name, title in (("theorem2", "Theorem 2"), ("lemma1", "Lemma 1")):
            ratio = part[f"{name}_bound_over_truth_median"]
            broken, checks = part["broken"][name], part["checks"]
            words = f"{title} broken in {broken} of {checks} checks, the bound {ratio:.1f} times the truth"
            yield Finding(broken == 0, words)


def components_matter(results: Results, paper: Paper) -> Iterable[Finding]:
    del paper
    for part in ("without-valuation", "without-estimator", "without-coordination"):
        for task, _, _, margin in _pairs(results, "ablation", "ode-est", part):
            yield Finding(margin.ahead, f"{task} ahead of itself {part} by {margin}")


CLAIMS: dict[str, Check] = {
    "ODE-Est reaches FIFO's final accuracy sooner (Table 2)": faster,
    "ODE-Est ends more accurate than FIFO (Table 2)": more_accurate,
    "ODE-Exact ends more accurate than FIFO (Table 2)": exact_more_accurate,
    "Limited storage costs up to 4 times the training time and 7 % accuracy": storage_costs,
    "FB and SLD are above HL and GN, but below random": filters_between,
    "FIFO and reservoir sampling are as good as each other": fifo_is_random,
    "HL and GN never reach the accuracy of FIFO": importance_fails,
    "Simplified ODE saves 44 % memory and 83 % delay for at most a point": simplified_is_cheap,
    "Gains hold at low participation, more epochs, smaller storage": gains_hold,
    "Term 2 outweighs term 1": term_two_rules,
    "Values are stable between rounds": values_are_stable,
    "The last layer's gradient tracks the full one": last_layer_tracks,
    "The one-step look-ahead agrees with leave-one-out and Shapley": look_ahead_suffices,
    "Greedy coordination is near the optimum": greedy_is_near,
    "Theorem 1 bounds the loss reduction": theorem_one,
    "Theorem 2 and Lemma 1 bound the divergence": divergence_bounds,
    "Every component matters": components_matter,
}
