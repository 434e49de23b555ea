"""The opening of RESULTS: the verdict in tables, figures, and the arena stream by stream."""

from collections.abc import Callable, Iterator, Mapping

from fedkeep.tables import Table
from lab.blocks import Block, Picture, bar_chart, line_chart, sheet
from lab.findings import (
    BALANCED,
    FIFO,
    GISTS,
    SLIGHT,
    UNLIMITED,
    Findings,
    Interval,
    in_words,
)
from lab.names import NOTE, method_name, named_tasks, stream_name
from lab.overview import gap_closed, verdict
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
    yield from verdict(arena, figures.get("bytes", {}))
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
    yield NOTE
    yield from _all_leads(arena)
    yield from arena_tables(arena)


def names_table() -> str:
    """What streams are called in tables, and in suites and files of results."""
    rows = ((name, f"`{task}`") for task, name in named_tasks())
    return sheet(("stream", "task"), rows, numbers=False)


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
                rows.append((method_name(one), method_name(other), rate, tasks, sets, mean, p))
    heads = ("method", "against", "rates", "tasks ahead", "data sets ahead", "mean, points", "p")
    return sheet(heads, rows)


def tail_tables(tails: Table, tasks: Mapping[str, str] | None = None) -> Iterator[str]:
    """A table a task; `tasks` chooses and titles them."""
    titles = {task: stream_name(task) for task in tails} if tasks is None else tasks
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
            rows.append((method_name(method), *spread, *falls))
        yield f"### {title}"
        yield sheet(("method", *heads, "deepest"), rows)


def _all_leads(arena: Table) -> Iterator[Block]:
    """Every task in one table: FIFO's accuracy and the others' leads over it."""
    for key, accuracy, rate in (
        ("over_fifo", "own_rate", "own"),
        ("over_fifo_shared", "shared_rate", "the task's"),
    ):
        methods = [m for m in _COMPARED if any(row.get(m, {}).get(key) for row in arena.values())]
        rows = []
        for task, row in ((task, row) for task, row in arena.items() if FIFO in row):
            rows.append([stream_name(task), _number((row[FIFO][accuracy] or (None,))[0])])
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
        yield sheet(("stream", "FIFO", *map(method_name, methods)), rows)


def _pictures(arena: Table, by_bytes: Table, found: Findings) -> Iterator[Picture]:
    """Accuracy by round, gap closed by task, and accuracy by bytes and by compute."""
    for task in SHOWN_IN_TIME:
        runs = {
            method_name(method): found.runs(Contest(task, method))
            for method in (FIFO, BALANCED, *GISTS, UNLIMITED)
        }
        if series := {m: mean_curve(list(own.values())) for m, own in runs.items() if own}:
            title = f"{stream_name(task)}: accuracy by round"
            name = "by-rounds" if task == SHOWN else f"by-rounds-{task}"
            yield Picture(name, line_chart(title, series, "round", "accuracy, %"), title)
    if percents := {
        stream_name(task): 100 * share
        for task, row in arena.items()
        if (share := gap_closed(row)) is not None
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
            method_name(m): [(p[0] / 1024, p[2]) for p in points]
            for m, points in by_bytes[task].items()
            if m != "worth"
        }
        title = f"{stream_name(task)}: accuracy by kilobytes at rest"
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
            crosses[method_name(method)] = [(row["forward_passes"] / fifo, reached[0])]
    if crosses:
        title = f"{stream_name(SHOWN)}: accuracy by device compute, FIFO's forward passes being 1"
        yield Picture(
            "by-compute",
            line_chart(title, crosses, "times FIFO's forward passes", "accuracy, %"),
            title,
        )


def arena_tables(arena: Table, title: Callable[[str], str] = stream_name) -> Iterator[Block]:
    """A table a task with all its methods; `title` names the tasks."""
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
        yield f"### {title(task)}"
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
            rows.append(
                (method_name(method), *accuracies, compute, f"{row['seeds']} x {row['rounds']}")
            )
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
            yield f"### {stream_name(task)}: {key}"
            yield sheet(
                ("method", *values),
                ((method_name(method), *listed) for method, listed in cells.items()),
            )
            if all(value.replace(".", "", 1).isdigit() for value in values):
                series = {
                    method_name(m): [
                        (float(v), r[m]["accuracy"][0]) for v, r in values.items() if m in r
                    ]
                    for m in cells
                }
                title = f"{stream_name(task)}: accuracy by {key}"
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
                f"under a {stores} gist falls on {method_name(ranked[0][0])}."
            )
            rows = []
            for method, leads, behind in ranked:
                numbers = (*leads.values(), sum(leads.values()) / len(leads))
                rows.append(
                    (
                        method_name(method),
                        *map("{:+.2f}".format, numbers),
                        "; ".join(map(stream_name, behind)) or "nowhere",
                    )
                )
            yield sheet(
                ("candidate", *map(stream_name, complete), "mean", "half a point behind on"), rows
            )
