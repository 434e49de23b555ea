"""The tables that README and `docs` take from the results, between comments that name them.

`python experiments/reproduce.py report` writes them; a test fails when one is stale. No number
of them is typed by hand.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep.config.experiment import expand, override, read_experiment
from fedkeep.core.device import Device
from fedkeep.core.errors import FedkeepError
from fedkeep.core.gist import GistOptions
from fedkeep.core.gist.codec import PackedVector
from fedkeep.core.policies.balanced_reservoir import BalancedReservoir
from fedkeep.core.store import AfterUse
from fedkeep.core.types import Batch, LocalTraining, TrainOrder
from fedkeep.learn.dense_learner import DenseLearner
from lab.blocks import sheet
from lab.curves import ExperimentSummary
from lab.findings import Interval, finals, in_words
from lab.results import Paper, Results, verdicts
from lab.step_lengths import steps_table

NOT_RUN = "not run"
MARKED = re.compile(r"(<!-- table: ([a-z0-9-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
"""Where a table stands in a page."""
STREAMS: dict[str, dict[str, str]] = {
    "in time order": {
        "c-mapss-ordered": "engines to failure",
        "uji-indoor-ordered": "WiFi floors",
        "uji-indoor-once": "WiFi floors, each sample once",
        "har-ordered": "activities",
        "westermo-ordered": "industrial network",
        "westermo-once": "industrial network, each sample once",
        "shakespeare-ordered": "next character, by speaker",
    },
    "labels in runs": {
        "embedded-bursts": "demo",
        "st-all-labels-bursts": "synthetic, all labels everywhere",
        "ic-bursts": "Fashion-MNIST",
    },
    "shuffled": {
        "embedded": "demo",
        "st-all-labels": "synthetic, all labels everywhere",
        "st-converging": "synthetic, few labels a device",
        "har-converging": "activities",
        "ic": "Fashion-MNIST",
        "tc": "traffic, generated",
        "tc-real": "traffic, real",
        "audio-mnist": "spoken digits",
        "uji-indoor": "WiFi floors",
        "westermo": "industrial network",
    },
    "fewer slots than labels": {
        "uji-indoor-5-ordered": "WiFi floors in time order, 5 of 13",
        "har-3-ordered": "activities in time order, 3 of 5",
        "audio-mnist-5": "spoken digits, 5 of 10",
        "embedded-5": "demo, 5 of 10",
        "ic-3": "Fashion-MNIST, 3 of 10",
    },
}
"""Tasks of the arena by what their streams are like, those in time order first."""
_LEADS = {
    "balanced-fifo": "class-balanced-fifo",
    "ode-paper": "ode-est",
    "gist-local": "gist-local",
    "**gist-shared** (default)": "gist-shared",
    "unlimited storage": "full-data",
}
"""Titles of columns, and what the methods are called in the results."""
_OTHERS = {
    "reservoir": "reservoir",
    "balanced-reservoir": "draw",
    "ode (default options)": "ode-default",
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
_PAPER_TASKS = ("st", "ic", "har", "tc")


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


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


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
    arena = _read(results / "arena.json")
    rows = []
    for group in groups:
        found = {task: title for task, title in STREAMS[group].items() if task in arena}
        if found:
            rows.append([f"*{group}*", *([""] * (len(columns) + 2))])
        for task, title in found.items():
            methods = arena[task]
            shown = [methods.get(name, {}) for name in columns.values()]
            if not any(row.get("over_fifo") for row in shown):
                continue
            seeds = {row["seeds"] for row in (methods["fifo"], *shown) if row}
            count = "-".join(map(str, sorted({min(seeds), max(seeds)})))
            fifo = in_words(methods["fifo"]["own_rate"])
            leads = [lead_in_words(row.get("over_fifo")) for row in shown]
            rows.append([title, fifo, *leads, count])
    if not any(row[1] for row in rows):
        return "No full run is committed yet: `make reproduce` makes them."
    return sheet(("stream", "FIFO", *columns, "seeds"), rows)


def results_table(experiments: Path, results: Path) -> str:
    """All streams at own rates."""
    return arena_table(experiments, results, _LEADS, tuple(STREAMS))


def others_table(experiments: Path, results: Path) -> str:
    """Other methods, and corrections on FIFO's store, at own rates."""
    return arena_table(experiments, results, _OTHERS, ("in time order", "shuffled"))


def shared_rate_table(experiments: Path, results: Path) -> str:
    """FIFO and the leads over it at the task's rate, the same for all methods."""
    del experiments
    arena, rows = _read(results / "arena.json"), []
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
    arena, rows = _read(results / "arena.json"), []
    methods = ("fifo", "class-balanced-fifo", "gist-local", "gist-shared", "full-data")
    for group in ("in time order", "labels in runs"):
        for task, title in STREAMS[group].items():
            for key, words in (("worst_tenth", "worst devices"), ("rare_recall", "rare labels")):
                values = [arena.get(task, {}).get(m, {}).get(key) for m in methods]
                if any(value is not None for value in values):
                    cells = (NOT_RUN if value is None else f"{value:.1f}" for value in values)
                    rows.append((f"{title}, {group}: {words}", *cells))
    names = ("FIFO", "balanced-fifo", "gist-local", "gist-shared", "unlimited storage")
    return sheet(("stream", *names), rows)


def conditions_table(experiments: Path, results: Path) -> str:
    """The lead over FIFO of the default and of ODE under one condition at a time."""
    del experiments
    rows = []
    methods = {"gist-local": "gist-local", "gist-shared": "gist-shared", "ode-paper": "ode-est"}
    for task, settings in _read(results / "helps.json").items():
        for setting, found in settings.items():
            key, _, value = setting.partition("=")
            if key not in _CONDITIONS or "fifo" not in found:
                continue
            leads = [lead_in_words(found.get(m, {}).get("over_fifo")) for m in methods.values()]
            rows.append(
                (task, f"{_CONDITIONS[key]}: {value}", in_words(found["fifo"]["accuracy"]), *leads)
            )
    return sheet(("task", "condition", "FIFO", *methods), rows)


def bytes_table(experiments: Path, results: Path) -> str:
    """A gist beside the best FIFO store of no more bytes, m and window counted.

    The runs counted the samples and m; the window is 8 bytes a parameter more, and P is known
    from what a gist in float32 takes beyond the samples.
    """
    del experiments
    rows = []
    for task, methods in _read(results / "bytes.json").items():
        stores, gists = methods.get("fifo", []), methods.get("gist-local", [])
        samples = {slots: size for size, slots, *_ in stores}
        known = [(size - samples[slots]) / 4 for size, slots, *_ in gists if slots in samples]
        for method in (name for name in ("gist-local", "gist-local-int8") if known):
            for size, slots, *reached in methods.get(method, []):
                whole = size + 8 * known[0]
                fitting = [store for store in stores if store[0] <= whole]
                most = max(fitting, key=lambda store: float(store[2]))
                beside = f"{most[1]} slots: {in_words(most[2:])}"
                rows.append(
                    (task, method, f"{slots}", f"{whole / 1024:.1f}", in_words(reached), beside)
                )
    columns = ("task", "method", "slots", "kB", "accuracy", "FIFO in no more bytes")
    return sheet(columns, rows)


def paper_table(experiments: Path, results: Path) -> str:
    """Table 2: the leads over FIFO, ours and in brackets the paper's."""
    paper = Paper(experiments / "paper.toml")
    ours = Results(results, paper)
    rows = []
    for method, title in _PAPER_ROWS.items():
        cells = [_paper_cell(ours, paper, task, method) for task in _PAPER_TASKS]
        if any(cell != NOT_RUN for cell in cells):
            rows.append((title, *cells))
    notes = [_scale_of(ours, experiments, task) for task in _PAPER_TASKS]
    lines = "\n".join(f"- {note}" for note in notes)
    return sheet(("method", *(task.upper() for task in _PAPER_TASKS)), rows) + f"\n\n{lines}"


def _paper_cell(ours: Results, paper: Paper, task: str, method: str) -> str:
    """`ours (paper's)`: FIFO's accuracy, and the others' distance from it."""
    name = f"table2/{task}"
    printed = paper.of("table2", "accuracy", task, method)
    base = paper.of("table2", "accuracy", task, "fifo")
    if method == "fifo":
        reached = finals(ours.runs(name, method)) if name in ours.summaries else None
        own = "not run" if reached is None else in_words(reached)
        return f"{own} ({printed:.1f})" if printed is not None else own
    margin = ours.margin(name, method, "fifo") if name in ours.summaries else None
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
        return f"{task.upper()}: not run at the paper's scale."
    summary = ours.summaries[name]
    seeds = len({curve.seed for curve in summary.curves})
    rounds = max(curve.planned for curve in summary.curves)
    changed = [setting for setting in summary.changed if not setting.startswith("train.rounds")]
    words = f"{task.upper()}: {seeds} seeds, {rounds} rounds"
    words += f", {', '.join(f'`{setting}`' for setting in changed)}" if changed else ""
    return words + (
        "; **made before the present data preparation and settings, will be made again**."
        if is_outdated(summary, experiments)
        else "."
    )


def is_outdated(summary: ExperimentSummary, experiments: Path) -> bool:
    """Whether no run of a summary is one of its experiment file as that is now."""
    path = experiments / f"{summary.experiment}.toml"
    try:
        cells = expand(override(read_experiment(path), list(summary.changed)))
    except FedkeepError:
        return True
    present = {cell.experiment.digest() for cell in cells}
    return not any(curve.config_hash in present for curve in summary.curves)


def claims_table(experiments: Path, results: Path) -> str:
    """Every claim of the paper with its verdict."""
    found = verdicts(Results(results, Paper(experiments / "paper.toml")))
    rows = [(claim, word) for claim, (word, _) in found.items()]
    return sheet(("claim of the paper", "verdict in the runs so far"), rows, numbers=False)


def costs_table(experiments: Path, results: Path) -> str:
    """What a device keeps beside its model and samples, and sends, from the state of a device."""
    del experiments
    arena = _read(results / "arena.json")
    forms = {
        "softmax": (DenseLearner((60, 10)), 60, 10),
        "dense net": (DenseLearner((900, 64, 5)), 900, 5),
    }
    methods = {
        "`balanced-reservoir`": (GistOptions(), "draw"),
        "`gist-local`": (GistOptions("local"), "gist-local"),
        "`gist-shared`": (GistOptions("shared"), "gist-shared"),
        '`gist-shared`, `rank = "auto"`': (GistOptions("shared", rank="auto"), ""),
        '`gist-shared`, `rank = "auto"`, `encoding = "int8"`': (
            GistOptions("shared", rank="auto", encoding="int8"),
            "",
        ),
    }
    rows = []
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
    sizes = ", ".join(
        f"{name} {learner.size:,} parameters and {4 * learner.size:,} bytes, ten samples "
        f"{10 * 4 * width:,} bytes"
        for name, (learner, width, _) in forms.items()
    )
    return (
        sheet(("method", *heads, "compute, FIFO = 1"), rows)
        + f"\n\nIn bytes, beside the model and the samples: {sizes}. Kept: m, its noise model, and "
        "the sum of the window. Sent up, beside the model, in a participation; what comes down is "
        "four bytes a number. "
        "Compute: forward passes of a whole run over FIFO's, least and most over all streams (a "
        "backward pass counts as two)."
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


TABLES: dict[str, Callable[[Path, Path], str]] = {
    "results": results_table,
    "results-others": others_table,
    "results-shared-rate": shared_rate_table,
    "results-fairness": fairness_table,
    "results-conditions": conditions_table,
    "results-bytes": bytes_table,
    "paper-table2": paper_table,
    "paper-claims": claims_table,
    "paper-steps": steps_table,
    "costs": costs_table,
}
"""By the names that the pages use."""
