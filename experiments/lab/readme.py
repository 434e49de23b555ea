"""The tables that README and `docs` take from the results, between comments that name them.

`python experiments/reproduce.py report` writes them; a test fails when one is stale. No number
of them is typed by hand.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep.core.device import Device
from fedkeep.core.gist import GistOptions
from fedkeep.core.gradients.codec import PackedVector
from fedkeep.core.policies.balanced_reservoir import BalancedReservoir
from fedkeep.core.store import AfterUse
from fedkeep.core.types import Batch, LocalTraining, TrainOrder
from fedkeep.learn.dense_learner import DenseLearner
from lab.blocks import sheet
from lab.findings import Interval, finals, in_words, pooled_finals
from lab.names import STREAMS, method_name, stream_name
from lab.opening import paired_rows, tail_tables
from lab.results import Paper, Results, verdicts
from lab.step_lengths import steps_table
from lab.verdict_tables import (
    PAPER_TASKS,
    bytes_sentence,
    came_back_table,
    columns,
    counted_seeds,
    counts_table,
    har_signs_table,
    is_outdated,
    lead,
    parts_table,
    read,
    reasons_table,
    status_table,
)

NOT_RUN = "not run"
_NO_RUN = "No full run is committed yet: `make reproduce` makes them."
_BUDGETS = (2, 5, 10, 20, 50, 100, 200, 500)
"""Kilobytes of a device beside the model, at which stores are compared."""
MARKED = re.compile(r"(<!-- table: ([a-z0-9-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
"""Where a table stands in a page."""
_LEADS = {
    "**gist-shared** (default)": "gist-shared",
    "gist-local": "gist-local",
    "balanced-fifo": "class-balanced-fifo",
    "ode-paper": "ode-est",
    "full-data (unlimited storage)": "full-data",
}
"""Titles of columns, and what the methods are called in the results.

The default comes first: a phone shows only the first columns.
"""
_OTHERS = {
    "reservoir": "reservoir",
    "balanced-reservoir": "draw",
    "ode": "ode-default",
    "high-loss": "high-loss",
    "fedbalancer": "fedbalancer",
    "SCAFFOLD": "fifo-scaffold",
    "FedVARP": "fifo-fedvarp",
    "server momentum": "fifo-momentum",
}
_CONDITIONS = {
    "stream.label_noise": "share of wrong labels",
    "stream.drift": "strength of label shift",
    "train.dropout": "participants that drop out",
    "train.participation": "participation",
    "train.epochs": "local epochs",
    "storage.capacity": "slots",
}
_PAPER_ROWS = {
    "fifo": "FIFO (the paper's RS)",
    "high-loss": "HL",
    "gradient-norm": "GN",
    "fedbalancer": "FB",
    "sld": "SLD",
    "ode-exact": "ODE-Exact",
    "ode-est": "ODE-Est (Eq. 8)",
    "ode-est-participants": "ODE-Est (participants' mean)",
    "ode-simplified": "ODE, last layer",
    "default": "our default",
    "full-data": "FD (full data)",
}


def write_pages(root: Path, experiments: Path, results: Path) -> None:
    """Writes every table into its place in README and the pages, where there is one."""
    for page in (root / "README.md", *sorted((root / "docs").rglob("*.md"))):
        if page.exists():
            text = page.read_text(encoding="utf-8")
            written = with_tables(text, experiments, results)
            if written != text:
                page.write_text(written, encoding="utf-8")


def with_tables(page: str, experiments: Path, results: Path) -> str:
    """The page with each of its tables as the results have it."""

    def table(found: re.Match[str]) -> str:
        body = TABLES[found[2]](experiments, results)
        return f"{found[1]}\n{body}\n\n{found[3]}"

    return MARKED.sub(table, page)


def lead_in_words(lead: Sequence[float | None] | None) -> str:
    """A paired difference; bold where its interval is above 0, in brackets where it holds 0."""
    if lead is None:
        return NOT_RUN
    words, ahead = in_words(lead, "+"), Interval(lead[0] or 0.0, lead[1]).ahead
    return {True: f"**{words}**", False: words, None: f"({words})"}[ahead]


def arena_table(
    experiments: Path, results: Path, columns: Mapping[str, str], groups: Sequence[str]
) -> str:
    """FIFO's accuracy at its own rate, and the others' leads over it, each at its own rate."""
    del experiments
    arena = read(results / "arena.json")
    rows = []
    for group in groups:
        found = _stream_rows(arena, group, columns)
        if found:
            rows.append([f"*{group}*", *([""] * (len(columns) + 2))])
            rows += found
    if not rows:
        return _NO_RUN
    return sheet(("stream", "FIFO", *columns, "seeds"), rows)


def _stream_rows(
    arena: Mapping[str, Any], group: str, columns: Mapping[str, str]
) -> list[list[str]]:
    """The streams of a group on which any of the methods has run at its own rate."""
    rows = []
    for task, title in STREAMS[group].items():
        methods = arena.get(task, {})
        shown = [methods.get(name, {}) for name in columns.values()]
        if not any(row.get("over_fifo") for row in shown):
            continue
        seeds = {row["seeds"] for row in (methods["fifo"], *shown) if row}
        count = "-".join(map(str, sorted({min(seeds), max(seeds)})))
        fifo = in_words(methods["fifo"]["own_rate"])
        leads = [lead_in_words(row.get("over_fifo")) for row in shown]
        rows.append([title, fifo, *leads, count])
    return rows


def short_results_table(experiments: Path, results: Path) -> str:
    """Streams in time order one by one, and a row for each other kind of stream."""
    del experiments
    arena = read(results / "arena.json")
    first, *others = STREAMS
    rows = _stream_rows(arena, first, _LEADS)
    for group in others:
        leads = {title: leads_of(arena, STREAMS[group], name) for title, name in _LEADS.items()}
        most = max(map(len, leads.values()))
        if most:
            cells = [median_in_words(found, most) for found in leads.values()]
            rows.append([f"*{group}*, median of {most}", "", *cells, ""])
    return sheet(("stream", "FIFO", *_LEADS, "seeds"), rows) if rows else _NO_RUN


def leads_of(
    arena: Mapping[str, Any], tasks: Mapping[str, str], method: str
) -> list[Sequence[float | None]]:
    """The leads of a method over FIFO on those of the tasks where it has run."""
    found = (arena.get(task, {}).get(method, {}).get("over_fifo") for task in tasks)
    return [lead for lead in found if lead is not None]


def median_in_words(leads: Sequence[Sequence[float | None]], streams: int) -> str:
    """The median lead, and on how many streams the interval is above 0 and below it."""
    if not leads:
        return NOT_RUN
    middle = float(np.median([lead[0] or 0.0 for lead in leads]))
    signs = [Interval(lead[0] or 0.0, lead[1]).ahead for lead in leads]
    on = "" if len(leads) == streams else f" of {len(leads)}"
    return f"{middle:+.1f}; better {signs.count(True)}, worse {signs.count(False)}{on}"


def results_table(experiments: Path, results: Path) -> str:
    """All streams at own rates."""
    return arena_table(experiments, results, _LEADS, tuple(STREAMS))


def others_table(experiments: Path, results: Path) -> str:
    """Other methods, and corrections on FIFO's store, at own rates."""
    return arena_table(experiments, results, _OTHERS, ("in time order", "shuffled"))


def shared_rate_table(experiments: Path, results: Path) -> str:
    """FIFO and the leads over it at the task's rate, the same for all methods."""
    del experiments
    arena, rows = read(results / "arena.json"), []
    for group, tasks in STREAMS.items():
        for task, title in ((task, title) for task, title in tasks.items() if task in arena):
            methods = arena[task]
            leads = [
                lead_in_words(methods.get(m, {}).get("over_fifo_shared")) for m in _LEADS.values()
            ]
            rows.append([f"{title}, {group}", in_words(methods["fifo"]["shared_rate"]), *leads])
    return sheet(("stream", "FIFO", *_LEADS), rows)


def fairness_table(experiments: Path, results: Path) -> str:
    """The worst tenth of the devices and the rarest labels."""
    del experiments
    arena, rows = read(results / "arena.json"), []
    methods = ("fifo", "class-balanced-fifo", "gist-local", "gist-shared", "full-data")
    for group in ("in time order", "labels in runs"):
        for task, title in STREAMS[group].items():
            for key, words in (("worst_tenth", "worst devices"), ("rare_recall", "rare labels")):
                values = [arena.get(task, {}).get(m, {}).get(key) for m in methods]
                if any(value is not None for value in values):
                    cells = (NOT_RUN if value is None else f"{value:.1f}" for value in values)
                    rows.append((f"{title}, {group}: {words}", *cells))
    names = ("FIFO", "balanced-fifo", "gist-local", "gist-shared", "full-data")
    return sheet(("stream", *names), rows)


def paired_table(experiments: Path, results: Path) -> str:
    """One method against another over all tasks."""
    del experiments
    return paired_rows(read(results / "arena.json"))


def time_order_table(experiments: Path, results: Path) -> str:
    """Streams in time order, at own rates."""
    return arena_table(experiments, results, _LEADS, ("in time order",))


def tails_table(experiments: Path, results: Path) -> str:
    """Worst devices, rarest labels and changes of label on streams in time order."""
    del experiments
    return "\n\n".join(tail_tables(read(results / "tails.json"), STREAMS["in time order"]))


def conditions_table(experiments: Path, results: Path) -> str:
    """The lead over FIFO of the default and of ODE under one condition at a time."""
    del experiments
    rows = []
    methods = {"gist-local": "gist-local", "gist-shared": "gist-shared", "ode-paper": "ode-est"}
    for task, settings in read(results / "helps.json").items():
        for setting, found in settings.items():
            key, _, value = setting.partition("=")
            if key not in _CONDITIONS or "fifo" not in found:
                continue
            leads = [lead_in_words(found.get(m, {}).get("over_fifo")) for m in methods.values()]
            rows.append(
                (
                    stream_name(task),
                    f"{_CONDITIONS[key]}: {value}",
                    in_words(found["fifo"]["accuracy"]),
                    *leads,
                )
            )
    return sheet(("task", "condition", "FIFO", *methods), rows)


def bytes_table(experiments: Path, results: Path) -> str:
    """By budget: the best store without a gist, and the best one with a gist, all bytes counted.

    Both are the best of what was tried by mean accuracy, and so both a little flattered. A budget
    at which nothing changes has no row.
    """
    del experiments
    rows: list[tuple[str, ...]] = []
    for task, budget, without, with_one in _best_by_budget(results):
        cells = tuple(
            "none fits" if p is None else f"{method_name(p[2])}, {p[3]} slots: {in_words(p[4])}"
            for p in (without, with_one)
        )
        lead = "" if with_one is None else f"{with_one[1] - without[1]:+.1f}"
        if not rows or rows[-1][0] != stream_name(task) or rows[-1][2:4] != cells:
            rows.append((stream_name(task), f"{budget}", *cells, lead))
    columns = ("task", "kB", "best without a gist", "best with one", "lead")
    return sheet(columns, rows)


def bytes_verdict(experiments: Path, results: Path) -> str:
    """Who is ahead in no more bytes, in a sentence."""
    del experiments
    found = {
        (task, without[2:4], with_one[2:4]): (task, with_one[4], without[4])
        for task, _, without, with_one in _best_by_budget(results)
        if with_one is not None
    }
    return bytes_sentence(list(found.values()))


def _best_by_budget(results: Path) -> Iterator[tuple[str, int, Any, Any]]:
    """List task, kilobytes, and the best stores without and with a gist that fit in them.

    A store is (bytes, mean accuracy, method, slots, accuracy); None where none fits.
    """
    for task, methods in read(results / "bytes.json").items():
        points = [
            (size, float(reached[0]), method, slots, reached)
            for method, listed in methods.items()
            if method != "worth"
            for size, slots, *reached in listed
            if reached[1] is not None  # one seed is no evidence
        ]
        for budget in _BUDGETS:
            fitting = [point for point in points if point[0] <= 1000 * budget]
            without, with_one = (
                max(
                    (p for p in fitting if ("gist" in p[2]) is kept),
                    key=lambda p: p[1],
                    default=None,
                )
                for kept in (False, True)
            )
            if without is not None:
                yield task, budget, without, with_one


def stream_counts(experiments: Path, results: Path) -> str:
    """On how many streams each method is better than FIFO."""
    del experiments
    return counts_table(read(results / "arena.json"), STREAMS)


def paper_table(experiments: Path, results: Path) -> str:
    """Table 2: the leads over FIFO, ours and in brackets the paper's."""
    paper = Paper(experiments / "paper.toml")
    ours = Results(results, paper)
    rows = []
    for method, title in _PAPER_ROWS.items():
        cells = [_paper_cell(ours, paper, t, method, pooled=pooled) for t, _, pooled in columns()]
        if any(cell != NOT_RUN for cell in cells):
            rows.append((title, *cells))
    notes = [_scale_of(ours, experiments, task) for task in PAPER_TASKS]
    lines = "\n".join(f"- {note}" for note in notes)
    heads = (title for _, title, _ in columns())
    return sheet(("method", *heads), rows) + f"\n\n{lines}"


def paper_speedups(experiments: Path, results: Path) -> str:
    """Table 2: rounds of FIFO over rounds of a method to FIFO's final accuracy."""
    paper = Paper(experiments / "paper.toml")
    ours = Results(results, paper)
    rows = []
    for method, title in _PAPER_ROWS.items():
        cells = [_speedup_cell(ours, paper, task, method) for task in PAPER_TASKS]
        if method != "fifo" and any(cell != NOT_RUN for cell in cells):
            rows.append((title, *cells))
    return sheet(("method", *PAPER_TASKS.values()), rows)


def _speedup_cell(ours: Results, paper: Paper, task: str, method: str) -> str:
    """`ours (the paper's)`: how much sooner; `never` where no seed got there."""
    name, printed = f"table2/{task}", paper.of("table2", "speedup", task, method)
    theirs = "none" if printed is None else f"{printed:.2f}x" if printed else "never"
    if not ours.runs(name, method):
        return NOT_RUN if printed is None else f"{NOT_RUN} ({theirs})"
    found = ours.speedup(name, method)
    own = "never" if found.value is None else f"{found.value:.2f}x"
    if 0 < found.reached < found.seeds:
        own += f", {found.reached} of {found.seeds} seeds"
    return f"{own} ({theirs})"


def _paper_cell(ours: Results, paper: Paper, task: str, method: str, *, pooled: bool) -> str:
    """`ours (paper's)`: FIFO's accuracy, and the others' distance from it."""
    name = f"table2/{task}"
    printed = paper.of("table2", "accuracy", task, method)
    base = paper.of("table2", "accuracy", task, "fifo")
    if method == "fifo":
        measure = pooled_finals if pooled else finals
        reached = measure(ours.runs(name, method))
        own = "not run" if reached is None else in_words(reached)
        return f"{own} ({printed:.1f})" if printed is not None else own
    margin = lead(ours, name, method, pooled=pooled)
    theirs = "" if printed is None or base is None else f"{printed - base:+.1f}"
    if margin is None and not theirs:
        return NOT_RUN
    own = "not run" if margin is None else in_words(margin, "+")
    decided = margin is not None and margin.ahead is not None
    return (f"**{own}**" if decided else own) + f" ({theirs or 'none'})"


def _scale_of(ours: Results, experiments: Path, task: str) -> str:
    """How the row of a task was run, and whether its experiment file has changed since."""
    name = f"table2/{task}"
    if name not in ours.summaries:
        return f"{PAPER_TASKS[task]}: not run at the paper's scale."
    summary = ours.summaries[name]
    seeds = len({curve.seed for curve in summary.curves})
    rounds = max(curve.planned for curve in summary.curves)
    changed = [setting for setting in summary.changed if not setting.startswith("train.rounds")]
    fewer = {
        title: len(own)
        for method, title in _PAPER_ROWS.items()
        if 0 < len(own := ours.runs(name, method)) < seeds
    }
    words = f"{PAPER_TASKS[task]}: {counted_seeds(seeds)}, {rounds} rounds"
    words += f", {', '.join(f'`{setting}`' for setting in changed)}" if changed else ""
    words += "".join(f"; {title} with {counted_seeds(count)}" for title, count in fewer.items())
    return words + (
        "; **made before the present data preparation and settings, will be made again**."
        if is_outdated(summary, experiments)
        else "."
    )


def claims_table(experiments: Path, results: Path) -> str:
    """Every claim of the paper with its verdict."""
    found = verdicts(Results(results, Paper(experiments / "paper.toml")))
    rows = [(claim, word) for claim, (word, _) in found.items()]
    return sheet(("claim of the paper", "verdict in the runs so far"), rows, numbers=False)


def costs_table(experiments: Path, results: Path) -> str:
    """What a device keeps beside its model and samples, and sends, from the state of a device."""
    del experiments
    arena = read(results / "arena.json")
    forms = {
        "softmax": (DenseLearner((60, 10)), 60, 10),
        "dense net": (DenseLearner((900, 64, 5)), 900, 5),
    }
    methods = {
        "`balanced-reservoir`": (GistOptions(), "draw"),
        "`gist-local`": (GistOptions("local"), "gist-local"),
        "`gist-shared`": (GistOptions("shared"), "gist-shared"),
        '`gist-shared`, `encoding = "int8"`': (GistOptions("shared", encoding="int8"), ""),
        '`gist-shared`, `rank = "auto"`': (GistOptions("shared", rank="auto"), ""),
        '`gist-shared`, `rank = 4`, `encoding = "int4"`': (
            GistOptions("shared", rank=4, encoding="int4"),
            "",
        ),
    }
    sizes = [f"{4 * learner.size:,}" for learner, _, _ in forms.values()]
    samples = [f"{10 * 4 * width:,}" for _, width, _ in forms.values()]
    rows: list[tuple[str, ...]] = [
        ("*for comparison: the model*", *sizes, *sizes, ""),
        ("*ten samples*", *samples, "0", "0", ""),
    ]
    for title, (options, name) in methods.items():
        costs = [kept_and_sent(*form, options) for form in forms.values()]
        passes = [
            row[name]["forward_passes"] / row["fifo"]["forward_passes"]
            for row in arena.values()
            if name in row
        ]
        compute = f"{min(passes):.1f} to {max(passes):.1f}" if passes else NOT_RUN
        kept, sent = ([f"{cost[place]:,}" for cost in costs] for place in (0, 1))
        rows.append((title, *kept, *sent, compute))
    heads = [f"{verb}, {name}" for verb in ("kept", "sent up") for name in forms]
    return sheet(("bytes of", *heads, "compute, FIFO = 1"), rows) + (
        "\n\n- Kept: what a device stores beside its model and samples: the gist, its noise model, "
        "and the sum of the gradients since the last participation.\n"
        "- Sent up: what a participation sends beside the model. The fleet's gist comes down as "
        "four bytes a parameter.\n"
        "- Compute: forward passes of a whole run over FIFO's, the least and the most over all "
        "streams; a backward pass counts as two."
    )


def kept_and_sent(
    learner: DenseLearner, width: int, labels: int, options: GistOptions
) -> tuple[int, int]:
    """Bytes that a device keeps for its gist after two participations, and sends in the second."""
    device = Device(
        learner,
        BalancedReservoir(),
        capacity=10,
        sample_shape=(width,),
        labels=labels,
        after_use=AfterUse("evict_trained_first"),
        gist=options,
    )
    rng = np.random.default_rng(0)
    device.set_model(learner.initial(0))
    sent = None
    for round_ in range(2):
        x = rng.standard_normal((32, width), dtype=np.float32)
        ids = np.arange(32) + 32 * round_
        device.observe(Batch(x, rng.integers(0, labels, 32), ids), float(round_))
        training = LocalTraining(learning_rate=0.01, epochs=5)
        order = TrainOrder(round_, learner.initial(round_), sent, training, round_ - 1)
        found = device.participate(order).local_gradient
        # What comes down is the server's mean: plain numbers.
        sent = None if found is None else np.array(found)
    names = ("window.", "gist.", "direction")
    state = device.snapshot()
    kept = sum(array.nbytes for name, array in state.items() if name.startswith(names))
    packed = found.packed if isinstance(found, PackedVector) else None
    if packed is not None:
        return kept, sum(array.nbytes for array in packed.values())
    return kept, 0 if sent is None else sent.nbytes


def _by_method(results: Path, methods: Sequence[str], key: str) -> list[tuple[str, ...]]:
    """A row for each task and setting of the suite `labels` in which these methods have run."""
    rows = []
    for task, settings in read(results / "labels.json").items():
        for setting, found in settings.items():
            if methods[0] in found:
                cells = (in_words(found[m][key]) if m in found else NOT_RUN for m in methods)
                rows.append((stream_name(task), setting.replace("stream.", ""), *cells))
    return rows


def label_rules_table(experiments: Path, results: Path) -> str:
    """Accuracy by the rule of the waiting room."""
    del experiments
    rules = ("random", "balanced", "uncertain", "balanced-uncertain", "oldest", "newest")
    rows = _by_method(results, [f"rule-{rule}" for rule in rules], "accuracy")
    return sheet(("task", "labels", *rules), rows) if rows else NOT_RUN


def label_delays_table(experiments: Path, results: Path) -> str:
    """Accuracy of three stores against the delay of labels."""
    del experiments
    rows = [
        row
        for row in _by_method(results, ("fifo", "draw", "gist-local"), "accuracy")
        if "label_delay" in row[1] and "labelled" not in row[1]
    ]
    return sheet(("task", "labels", "FIFO", "balanced-reservoir", "gist-local"), rows)


def label_shares_table(experiments: Path, results: Path) -> str:
    """Accuracy of three stores against the share of samples that get a label."""
    del experiments
    methods = ("gist-local-no-room", "gist-local", "draw", "fifo")
    rows = [row for row in _by_method(results, methods, "accuracy") if "delay" not in row[1]]
    names = ("gist-local, all slots stored", "gist-local", "balanced-reservoir", "FIFO")
    return sheet(("task", "labels", *names), rows)


def pseudo_labels_table(experiments: Path, results: Path) -> str:
    """Accuracy with the model's own labels, beside none."""
    del experiments
    methods = ("gist-local-no-room", "gist-local", "pseudo-80", "pseudo-95")
    rows = [row for row in _by_method(results, methods, "accuracy") if NOT_RUN not in row[-2:]]
    names = ("none, all slots stored", "none", "from 0.8", "from 0.95")
    return sheet(("task", "labels", *names), rows)


TABLES: dict[str, Callable[[Path, Path], str]] = {
    "results": results_table,
    "results-short": short_results_table,
    "results-others": others_table,
    "results-shared-rate": shared_rate_table,
    "results-fairness": fairness_table,
    "results-time-order": time_order_table,
    "results-tails": tails_table,
    "results-paired": paired_table,
    "results-conditions": conditions_table,
    "results-bytes": bytes_table,
    "paper-table2": paper_table,
    "paper-speedups": paper_speedups,
    "paper-har-signs": har_signs_table,
    "paper-claims": claims_table,
    "paper-steps": steps_table,
    "costs": costs_table,
    "results-counts": stream_counts,
    "bytes-verdict": bytes_verdict,
    "paper-came-back": came_back_table,
    "paper-status": status_table,
    "paper-parts": parts_table,
    "paper-reasons": reasons_table,
    "labels-rules": label_rules_table,
    "labels-delays": label_delays_table,
    "labels-shares": label_shares_table,
    "labels-pseudo": pseudo_labels_table,
}
"""By the names that the pages use."""
