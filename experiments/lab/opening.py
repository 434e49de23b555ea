"""The opening of RESULTS: the verdict in ten lines by paired intervals, and three figures."""

from collections.abc import Iterator, Mapping
from statistics import median

from fedkeep.tables import Table
from lab.blocks import Block, Picture, bar_chart, line_chart, sheet
from lab.findings import (
    BALANCED,
    FIFO,
    GISTS,
    IN_TIME,
    SLIGHT,
    UNLIMITED,
    Findings,
    Interval,
    in_words,
    share_closed,
)
from lab.paired import differences, paired_test
from lab.results import mean_curve
from lab.suite import Contest

SHOWN = "uji-indoor-ordered"
"""The task of the figures by rounds and by compute."""
SHOWN_IN_TIME = ("c-mapss-ordered", SHOWN, "har-ordered")
"""The tasks of the figures by rounds, the hardest first."""
PAIRS = (
    ("gist-shared", FIFO),
    ("gist-shared", BALANCED),
    ("gist-shared", "ode-est"),
    ("gist-shared", "draw"),
    ("gist-shared", "reservoir"),
    ("gist-shared", "gist-local"),
    ("gist-local", FIFO),
    (BALANCED, FIFO),
    ("ode-est", FIFO),
    ("draw", FIFO),
    ("reservoir", FIFO),
)
"""Methods that are compared over all tasks."""
_LOSS_BASED = ("high-loss", "fedbalancer")
_CORRECTIONS = ("fifo-scaffold", "fifo-fedvarp", "fifo-momentum")
_COMPARED = (
    *GISTS,
    BALANCED,
    "ode-est",
    "ode-default",
    "draw",
    "reservoir",
    *_LOSS_BASED,
    *_CORRECTIONS,
    UNLIMITED,
)
_BASELINES = (FIFO, BALANCED)


def opening(figures: Mapping[str, Table], found: Findings) -> Iterator[Block]:
    """`figures` are the tables by name; `found` the runs of the arena."""
    arena = figures.get("arena", {})
    yield "## The verdict"
    lines = [
        f"{number}. {line}"
        for number, line in enumerate(_verdict(arena, figures.get("bytes", {})), start=1)
    ]
    yield (
        "\n".join(lines)
        or "Nothing of the arena has run yet: `python experiments/reproduce.py gist`."
    )
    yield from _pictures(arena, figures.get("bytes", {}), found)
    yield "## Over all tasks"
    yield PAIRED_WORDS
    yield paired_rows(arena)
    yield "## What means hide"
    yield TAILS_WORDS
    yield from tail_tables(figures.get("tails", {}))
    yield "## The arena"
    if found.suite.note:
        yield found.suite.note
    yield from _all_leads(arena)
    yield from arena_tables(arena)


PAIRED_WORDS = (
    "One method against another over all tasks on which both ran, with the mean difference of "
    "their common seeds. Variants of one data set are not independent of each other: mean and test "
    "take each data set once, with the mean of its tasks. The mean has the bootstrap's 95 % "
    "interval (data sets drawn with replacement); p is of the Wilcoxon signed-rank test over data "
    "sets, two-sided: how likely differences this lopsided would be if neither were better."
)
TAILS_WORDS = (
    "Streams in time order, at the task's rate, in percent: the worst tenth of the devices, the "
    "rarest quarter of the labels, and what a change of label costs. The model is *below* where it "
    "is more than a point less accurate than it had been; *recovery* is how many rounds such a "
    "time lasted on average where it ended (at the distance of evaluations, a twentieth of the "
    "run), *never* how many a run did not end, *deepest* the largest fall in points."
)


def paired_rows(arena: Table) -> str:
    """How often one method is ahead of another over all tasks, and by how much."""
    rows = []
    for one, other in PAIRS:
        for key, rate in (("own_rate", "own"), ("shared_rate", "the task's")):
            found = paired_test(differences(arena, one, other, key))
            if found is not None:
                mean = f"{found.mean:+.1f} ({found.low:+.1f} to {found.high:+.1f})"
                p = "< 0.001" if found.p < 0.001 else f"{found.p:.3f}"
                tasks = f"{found.ahead} of {found.tasks}"
                sets = f"{found.data_sets_ahead} of {found.data_sets}"
                rows.append((one, other, rate, tasks, sets, mean, p))
    heads = ("method", "against", "rates", "tasks ahead", "data sets ahead", "mean, points", "p")
    return sheet(heads, rows)


def tail_tables(tails: Table, tasks: Mapping[str, str] | None = None) -> Iterator[str]:
    """A table a task; `tasks` chooses and titles them."""
    titles = {task: task for task in tails} if tasks is None else tasks
    heads = ("worst tenth", "rarest labels", "below, % of rounds", "recovery, rounds", "never")
    for task, title in ((task, title) for task, title in titles.items() if task in tails):
        rows = []
        for method, row in tails[task].items():
            spread = [
                "" if row[key] is None else in_words(row[key])
                for key in ("worst_tenth", "rare_recall")
            ]
            recovery = "-" if row["recovery"] is None else f"{row['recovery']:.0f}"
            falls = (
                f"{row['below']:.0f}",
                recovery,
                f"{row['never']:.1f}",
                f"{row['deepest']:.1f}",
            )
            rows.append((method, *spread, *falls))
        yield f"### {title}"
        yield sheet(("method", *heads, "deepest"), rows)


def _verdict(arena: Table, bytes_: Table) -> Iterator[str]:
    if not arena:
        return
    rounds = sorted({row["rounds"] for methods in arena.values() for row in methods.values()})
    seeds = max(row["seeds"] for methods in arena.values() for row in methods.values())
    span = f"{rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else f"{rounds[0]}"
    yield (
        f"{len(arena)} tasks, up to {seeds} seeds a row, {span} rounds; "
        "every difference below is taken seed by seed."
    )
    for method in GISTS:
        yield f"`{method}` against FIFO, {_both_rates(arena, method)}."
    shuffled = _shares(arena, ordered=False)
    yield f"Of the way to unlimited storage the better gist goes, shuffled: {shuffled}."
    yield f"The same in time order and with label runs: {_shares(arena, ordered=True)}."
    yield f"Class-balanced FIFO against FIFO, {_both_rates(arena, BALANCED)}."
    yield f"ODE as the paper has it against FIFO, {_both_rates(arena, 'ode-est')}."
    loss_based = "; ".join(f"{method} {_both_rates(arena, method)}" for method in _LOSS_BASED)
    yield f"What fair rates leave of the lead of those that take larger steps: {loss_based}."
    corrections = "; ".join(
        f"{m.removeprefix('fifo-')} {_leads(arena, m, 'over_fifo')}" for m in _CORRECTIONS
    )
    yield f"Corrections that others would use on FIFO's store, at own rates: {corrections}."
    yield f"A larger FIFO of no more bytes is the better buy on {_better_buys(bytes_)}."


def _both_rates(arena: Table, method: str) -> str:
    shared, own = (_leads(arena, method, key) for key in ("over_fifo_shared", "over_fifo"))
    return f"at the task's rate: {shared}; each at its own: {own}"


def _leads(arena: Table, method: str, key: str) -> str:
    """Who is ahead where, by the interval of the difference; up to three tasks are named."""
    found = {
        task: Interval(*lead)
        for task, row in arena.items()
        if (lead := row.get(method, {}).get(key))
    }
    if not found:
        return "not run yet"
    words = []
    for word, ahead in {"ahead": True, "behind": False, "undecided": None}.items():
        leads = {task: lead.mean for task, lead in found.items() if lead.ahead is ahead}
        where = f"{len(leads)}"
        if len(leads) <= 3:
            where = " and ".join(f"{task} ({lead:+.1f})" for task, lead in leads.items()) or "none"
        elif word != "undecided":
            low, high = sorted((min(leads.values()), max(leads.values())), key=abs)
            middle = median(leads.values())
            where += f" of {len(found)} tasks ({low:+.1f} to {high:+.1f}, median {middle:+.1f})"
        words.append(f"{word} on {where}")
    return ", ".join(words)


def _all_leads(arena: Table) -> Iterator[Block]:
    """Every task in one table: FIFO's accuracy and the others' leads over it."""
    for key, accuracy, rate in (
        ("over_fifo", "own_rate", "own"),
        ("over_fifo_shared", "shared_rate", "the task's"),
    ):
        methods = [m for m in _COMPARED if any(row.get(m, {}).get(key) for row in arena.values())]
        rows = []
        for task, row in ((task, row) for task, row in arena.items() if FIFO in row):
            rows.append([task, _number((row[FIFO][accuracy] or (None,))[0])])
            for lead in (row.get(m, {}).get(key) for m in methods):
                words = "" if lead is None else f"{lead[0] or 0.0:+.1f}"
                rows[-1].append(
                    f"({words})" if lead is not None and Interval(*lead).ahead is None else words
                )
        yield f"### Every task, at {rate} rate"
        yield (
            "FIFO's accuracy, and how far the others are from it; "
            "in brackets where the interval holds 0."
        )
        yield sheet(("task", "FIFO", *methods), rows)


def _shares(arena: Table, *, ordered: bool) -> str:
    named = {task: _closed(row) for task, row in arena.items() if task.endswith(IN_TIME) == ordered}
    listed = ", ".join(
        f"{task} {100 * share:.0f} %" for task, share in named.items() if share is not None
    )
    return listed or "not run yet"


def _closed(row: Table) -> float | None:
    """At the task's rate; None where the gap is below half a point."""
    means = {
        m: float(found["shared_rate"][0])
        for m, found in row.items()
        if found["shared_rate"] is not None
    }
    best = max((means[m] for m in GISTS if m in means), default=None)
    if FIFO not in means or UNLIMITED not in means or means[UNLIMITED] - means[FIFO] < SLIGHT:
        return None
    return share_closed(means[FIFO], best, means[UNLIMITED])


def _better_buys(table: Table) -> str:
    """Tasks where a FIFO store of no more bytes than a gist's is more accurate, and by how much."""
    found = {}
    for task, methods in table.items():
        stores = [point for m, points in methods.items() if m.startswith(FIFO) for point in points]
        buys = []
        for method in (m for m in methods if m.startswith("gist")):
            for size, slots, accuracy, _ in methods[method]:
                best = max(
                    (p for p in stores if p[0] <= size),
                    key=lambda point: float(point[2]),
                    default=None,
                )
                if best is not None and best[2] > accuracy:
                    words = (
                        f"FIFO with {best[1]} slots {best[2]:.1f}, "
                        f"{method} with {slots} {accuracy:.1f}"
                    )
                    buys.append((best[2] - accuracy, words))
        if buys:
            found[task] = f"{task} ({max(buys)[1]})"
    listed, rest = (
        ", ".join(found.values()) or "none of what ran",
        ", ".join(task for task in table if task not in found),
    )
    return f"{listed}; on none of {rest}" if found and rest else listed if table else "not run yet"


def _pictures(arena: Table, by_bytes: Table, found: Findings) -> Iterator[Picture]:
    """Accuracy by round, gap closed by task, and accuracy by bytes and by compute."""
    for task in SHOWN_IN_TIME:
        runs = {
            method: found.runs(Contest(task, method))
            for method in (FIFO, BALANCED, *GISTS, UNLIMITED)
        }
        if series := {m: mean_curve(list(own.values())) for m, own in runs.items() if own}:
            title = f"{task}: accuracy by round, in time order"
            name = "by-rounds" if task == SHOWN else f"by-rounds-{task}"
            yield Picture(name, line_chart(title, series, "round", "accuracy, %"), title)
    if percents := {
        task: 100 * share for task, row in arena.items() if (share := _closed(row)) is not None
    }:
        chart = bar_chart(
            "How much of the way from FIFO to unlimited storage the better gist goes",
            percents,
            " %",
        )
        yield Picture("gap-closed", chart, "share of the gap closed, per task")
    for task in [
        name for name in ("har-ordered", "uji-indoor-ordered", "embedded") if name in by_bytes
    ][:1]:
        series = {
            m: [(p[0] / 1024, p[2]) for p in points]
            for m, points in by_bytes[task].items()
            if m != "worth"
        }
        title = f"{task}: accuracy by kilobytes at rest"
        yield Picture("by-bytes", line_chart(title, series, "kB at rest", "accuracy, %"), title)
    methods = arena.get(SHOWN, {})
    fifo = methods.get(FIFO, {}).get("forward_passes")
    crosses = {}
    for method, row in methods.items():
        if (
            fifo
            and not method.startswith(UNLIMITED)
            and (reached := row["own_rate"] or row["shared_rate"])
        ):
            crosses[method] = [(row["forward_passes"] / fifo, reached[0])]
    if crosses:
        title = f"{SHOWN}: accuracy by device compute, FIFO's forward passes being 1"
        yield Picture(
            "by-compute",
            line_chart(title, crosses, "times FIFO's forward passes", "accuracy, %"),
            title,
        )


def arena_tables(arena: Table) -> Iterator[Block]:
    titles = (
        "own rate",
        "over FIFO",
        "task's rate",
        "over FIFO",
        "worst tenth",
        "rarest labels",
        "prequential",
    )
    for task, methods in arena.items():
        yield f"### {task}"
        fifo_passes = methods.get(FIFO, {}).get("forward_passes")
        rows = []
        for method, row in methods.items():
            own = in_words(row["own_rate"]) + (f" ({row['rate']:.3g})" if row["rate"] else "")
            lead, shared_lead = (
                in_words(row[key], "+") for key in ("over_fifo", "over_fifo_shared")
            )
            numbers = [_number(row[key]) for key in ("worst_tenth", "rare_recall", "prequential")]
            compute = _number(row["forward_passes"] / fifo_passes if fifo_passes else None)
            accuracies = (own, lead, in_words(row["shared_rate"]), shared_lead, *numbers)
            rows.append((method, *accuracies, compute, f"{row['seeds']} x {row['rounds']}"))
        yield sheet(("method", *titles, "compute over FIFO's", "seeds x rounds"), rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def sweeps(helps: Table) -> Iterator[Block]:
    """One table and one figure per task and key of the suite `helps`."""
    for task, settings in helps.items():
        by_key: dict[str, dict[str, Table]] = {}
        for setting, methods in settings.items():
            key, _, value = setting.partition("=")
            by_key.setdefault(key, {})[value] = methods
        for key, values in by_key.items():
            cells: dict[str, list[str]] = {method: [] for row in values.values() for method in row}
            for method, row in ((method, row) for method in cells for row in values.values()):
                known = row.get(method)
                lead = f" ({in_words(known['over_fifo'], sign='+')})" if known else ""
                cells[method].append(in_words(known and known["accuracy"]) + lead)
            yield f"### {task}, {key}"
            yield sheet(
                ("method", *values), ((method, *listed) for method, listed in cells.items())
            )
            if all(value.replace(".", "", 1).isdigit() for value in values):
                series = {
                    m: [(float(v), r[m]["accuracy"][0]) for v, r in values.items() if m in r]
                    for m in cells
                }
                title = f"{task}: accuracy by {key}"
                yield Picture(f"{task}-{key}", line_chart(title, series, key, "accuracy, %"), title)


def candidates(
    means: Mapping[str, Mapping[str, float]], form: str
) -> list[tuple[str, dict[str, float], list[str]]]:
    """The methods of a form ("gist-local", "gist-shared") that ran on every task, best first.

    By the rule of experiments/README.md: fewest tasks more than half a point behind the better of
    FIFO and class-balanced FIFO, then the greatest mean lead. `means` are final accuracies in
    percent, by task and method. Returned are the method, its leads by task, and the tasks where it
    falls behind.
    """
    found = []
    for method in dict.fromkeys(m for row in means.values() for m in row if m.startswith(form)):
        if all(method in row for row in means.values()):
            leads = {
                task: row[method] - max(row[baseline] for baseline in _BASELINES)
                for task, row in means.items()
            }
            found.append((method, leads, [task for task, lead in leads.items() if lead < -SLIGHT]))
    return sorted(found, key=lambda each: (len(each[2]), -sum(each[1].values())))


def choosing(table: Table) -> Iterator[Block]:
    """The candidates as tables, and the first of each form; `table` is results/choice.json."""
    means = {
        t: {m: e["accuracy"][0] for m, e in rows["as it is"].items()} for t, rows in table.items()
    }
    complete = {
        task: row for task, row in means.items() if all(baseline in row for baseline in _BASELINES)
    }
    for form in GISTS:
        if ranked := candidates(complete, form):
            stores = form.removeprefix("gist-")
            yield (
                "Points ahead of the better of FIFO and class-balanced FIFO, "
                "on seeds of the choice's own. By the rule the choice among the stores "
                f"under a {stores} gist falls on `{ranked[0][0]}`."
            )
            rows = []
            for method, leads, behind in ranked:
                numbers = (*leads.values(), sum(leads.values()) / len(leads))
                rows.append(
                    (method, *map("{:+.2f}".format, numbers), ", ".join(behind) or "nowhere")
                )
            yield sheet(("candidate", *complete, "mean", "half a point behind on"), rows)
