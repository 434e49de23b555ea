"""RESULTS.md and RESULTS.html: the paper's tables with our numbers, and what has not run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedkeep.config.experiment import read_experiment
from fedkeep.core.errors import DataError
from lab.blocks import Block, Picture, html, line_chart, markdown, sheet
from lab.curves import Curves
from lab.findings import Findings, Interval, finals, in_words, pooled_finals
from lab.names import papers_task
from lab.opening import arena_tables, choosing, names_table, opening, sweeps
from lab.results import Paper, Results, mean_curve, verdicts
from lab.suite import read_suite
from lab.verdict_tables import is_outdated

TITLE = "fedkeep: the paper's evidence, run again"
_FOLDERS = {
    "table2": "Table 2: training speedup and final accuracy",
    "authors": "Table 2 as the authors' code runs it",
    "ablation": "Ablations",
    "simplified": "Simplified ODE",
    "robustness": "Robustness: epochs, participation, storage, mini-batches, labels, velocities",
    "motivation": "Motivation",
}
_COSTS = {
    "one_ms": ("ms a sample, one by one", "milliseconds"),
    "batched_ms": ("ms a sample, in a batch", ""),
    "extra_mb": ("MB above an idle process", "megabytes"),
}
"""What Table 3 measures: its title, and what the paper's table of it is called."""
_INTRODUCTION = (
    "Written by `python experiments/reproduce.py report` from `experiments/results/` and "
    "`experiments/paper.toml`; nothing here is typed by hand. Accuracy is the mean over seeds of "
    "the mean of the last five evaluations, in percent, ± half of its 95 % interval (Student's t). "
    "'Over FIFO' is the mean difference seed by seed with its interval: both methods saw the same "
    "data in the same order, so it tells more than the two intervals apart. "
    "Speedup is rounds FIFO needs to its own final accuracy over rounds the method needs to that, "
    "the geometric mean over the seeds that got there ('-': none did). In brackets what the paper "
    "reports. 'Pooled' is over all test samples, where the accuracy is the mean over devices, as "
    "the paper has it. 'Paper' settings and where they come from: docs/deviations.md; what it all "
    "means: docs/findings.md."
)


def write_results(experiments: Path, results: Path, out: Path) -> None:
    """Writes RESULTS.md with its pictures, and RESULTS.html, into `out`."""
    blocks = [*_document(experiments, Results(results, Paper(experiments / "paper.toml")))]
    pictures = results / "plots"
    try:
        pictures.mkdir(parents=True, exist_ok=True)
        for old in pictures.glob("*.svg"):
            old.unlink()
        for block in blocks:
            if isinstance(block, Picture):
                (pictures / f"{block.name}.svg").write_text(block.svg, encoding="utf-8")
        text = markdown(blocks, pictures.relative_to(out).as_posix())
        (out / "RESULTS.md").write_text(text, encoding="utf-8")
        (out / "RESULTS.html").write_text(html(blocks, TITLE), encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot write the results to {out}: {error.strerror}") from error


def _document(experiments: Path, results: Results) -> Iterator[Block]:
    yield f"# {TITLE}"
    arena = Findings(
        read_suite(experiments / "suites" / "arena.toml"), Curves(results.directory / "curves")
    )
    yield from opening(results.figures, arena)
    yield "## When it helps"
    yield "Accuracy and, in brackets, the lead over FIFO; one condition at a time."
    yield from sweeps(results.figures.get("helps", {}))
    yield "## How the default was chosen"
    yield from choosing(results.figures.get("choice", {}))
    yield "## The paper's tasks at their own scale"
    yield from arena_tables(results.figures.get("paper", {}), papers_task)
    yield "## The paper's claims"
    yield _INTRODUCTION
    judged = []
    for claim, (word, because) in verdicts(results).items():
        settled = word in {"reproduced", "not run yet"}
        judged.append(
            (claim, word, because, "" if settled else results.paper.causes.get(claim, ""))
        )
    yield sheet(("claim", "verdict", "numbers", "cause, where found"), judged, numbers=False)
    for folder, title in _FOLDERS.items():
        yield f"## {title}"
        yield from _folder(experiments, folder, results)
    yield from _programs(results)
    yield "## Names"
    yield (
        "Streams as tables call them, and as they are called in `experiments/suites/*.toml` and in "
        "the files of results; methods are in `experiments/methods/arena.toml`."
    )
    yield names_table()
    yield "## Machine and versions"
    versions = [summary.versions for summary in results.summaries.values()]
    versions += [
        figures["versions"] for figures in results.figures.values() if "versions" in figures
    ]
    yield from sorted(
        {", ".join(f"{name} {version}" for name, version in sorted(v.items())) for v in versions}
    )


def _folder(experiments: Path, folder: str, results: Results) -> Iterator[Block]:
    names = [f"{folder}/{path.stem}" for path in sorted((experiments / folder).glob("*.toml"))]
    if folder in results.paper.tables:
        yield f"The paper's numbers: {results.paper.tables[folder]['source']}."
    for name in (name for name in names if name in results.summaries):
        summary, settings = results.summaries[name], results.settings(name)
        yield f"### {name}"
        yield summary.about
        speed: tuple[str, ...] = ("over FIFO", "speedup") if len(settings) == 1 else ()
        speed += ("pooled",) if _has_pooled(name, results) else ()
        yield sheet(
            ("method", *(_short(s) or "accuracy" for s in settings), *speed), _rows(name, results)
        )
        methods = read_experiment(experiments / f"{name}.toml")["methods"]
        left_out = ", ".join(m for m in methods if m not in results.methods(name))
        missing = f"; not run: {left_out}" if left_out else ""
        yield f"Made by `{summary.command}`; {_scale(name, results)}{missing}."
        if is_outdated(summary, experiments):
            yield (
                "**Made before the present data preparation and settings of this experiment; will "
                "be made again.**"
            )
        yield _picture(name, settings, results)
    if absent := ", ".join(
        f"`experiments/{name}.toml`" for name in names if name not in results.summaries
    ):
        yield f"Not run yet: {absent}."


def _picture(name: str, settings: list[str], results: Results) -> Picture:
    """Accuracy by round; of a sweep over one number, the final accuracy by that number."""
    swept = {s: float(s.partition("=")[2]) for s in settings if " " not in s and "=" in s}
    if len(settings) > 1 and len(swept) == len(settings):
        series = {
            method: [
                (x, reached.mean)
                for s, x in swept.items()
                if (reached := finals(results.runs(name, method, s)))
            ]
            for method in results.methods(name)
        }
        across = settings[0].partition("=")[0].rpartition(".")[2].replace("_", " ")
    else:
        series = {
            f"{method} {_short(setting)}".strip(): mean_curve(list(runs.values()))
            for setting in settings
            for method in results.methods(name)
            if (runs := results.runs(name, method, setting))
        }
        across = "round"
    chart = line_chart(f"{name}: accuracy by {across}", series, across, "accuracy, %")
    return Picture(name.replace("/", "-"), chart, f"accuracy by {across} of every method of {name}")


def _rows(name: str, results: Results) -> Iterator[tuple[str, ...]]:
    folder, _, task = name.partition("/")
    table = "table2" if folder == "authors" else folder
    settings = results.settings(name)
    for method in results.methods(name):
        printed = results.paper.of(table, "accuracy", task, method)
        cells = [method]
        for setting in settings:
            swept = results.paper.swept(task, method, setting)
            told = printed if swept is None else swept
            cells.append(_accuracy(finals(results.runs(name, method, setting)), told))
        if len(settings) == 1:
            margin = results.margin(name, method, "fifo") if method != "fifo" else None
            found, printed = (
                results.speedup(name, method),
                results.paper.of(table, "speedup", task, method),
            )
            speed = "-" if found.value is None else f"{found.value:.2f}x"
            if 0 < found.reached < found.seeds:
                speed += f" [{found.reached} of {found.seeds} seeds]"
            if printed is not None:
                speed += f" ({printed:.2f}x)" if printed else " (-)"
            cells += ["" if margin is None else str(margin), speed]
        if _has_pooled(name, results):
            pooled = pooled_finals(results.runs(name, method))
            cells.append("not kept" if pooled is None else in_words(pooled))
        yield tuple(cells)


def _has_pooled(name: str, results: Results) -> bool:
    """Whether a table of one setting has an accuracy over all test samples too."""
    curves = results.summaries[name].curves
    return len(results.settings(name)) == 1 and any(curve.pooled is not None for curve in curves)


def _accuracy(reached: Interval | None, printed: float | None) -> str:
    """A mean with its interval, and the paper's number in brackets."""
    return in_words(reached) + ("" if printed is None or reached is None else f" ({printed:g})")


def _short(setting: str) -> str:
    """`storage.capacity=5` as `capacity 5`."""
    pairs = (part.partition("=") for part in setting.split())
    return " ".join(f"{key.rpartition('.')[2]} {value}".strip() for key, _, value in pairs)


def _scale(name: str, results: Results) -> str:
    """How much was run, so that nobody takes a reduced run for a full one."""
    summary = results.summaries[name]
    seeds = sorted({curve.seed for curve in summary.curves})
    rounds = sorted({curve.planned for curve in summary.curves})
    changed = [s for s in summary.changed if not s.startswith(("seed", "sweep.seed"))]
    reduced = f"; reduced: {', '.join(changed)}" if changed else ""
    unfinished = sum(not curve.finished for curve in summary.curves)
    short = f"; {unfinished} runs unfinished" if unfinished else ""
    fewer = ""
    for method in results.methods(name):
        own = sorted({curve.seed for curve in summary.curves if curve.method == method})
        fewer += f"; {method} only with {', '.join(map(str, own))}" if own != seeds else ""
    played = ", ".join(map(str, rounds))
    return f"seeds {', '.join(map(str, seeds))}{fewer}; {played} rounds{reduced}{short}"


def _programs(results: Results) -> Iterator[Block]:
    """What comes from programs rather than experiment files: cost, claims, theory."""
    parts = {
        "table3": ("Table 3: memory footprint and evaluation delay", _cost),
        "claims": ("Claims about values", _claims),
        "theory": ("Theory", _theory),
    }
    for name, (title, write) in parts.items():
        yield f"## {title}"
        if figures := results.figures.get(name):
            yield from write(figures, results.paper)
            yield f"Made by `{figures['command']}`."
        else:
            yield f"Not run yet: `experiments/{name}.py`."


def _cost(figures: dict[str, Any], paper: Paper) -> Iterator[Block]:
    yield f"In brackets the paper's phone ({paper.tables['table3']['source']}). {figures['how']}"
    columns = paper.tables["table3"]["columns"]
    for quantity, (title, printed) in _COSTS.items():

        def cell(task: str, method: str, quantity: str = quantity, printed: str = printed) -> str:
            theirs = paper.of("table3", printed, task, method)
            return f"{figures['tasks'][task][method][quantity]:.3g}" + (
                "" if theirs is None else f" ({theirs:g})"
            )

        yield f"{title}:"
        yield sheet(
            ("task", *columns),
            ([task, *(cell(task, m) for m in columns)] for task in figures["tasks"]),
        )


def _claims(figures: dict[str, Any], _: Paper) -> Iterator[Block]:
    tasks = figures["tasks"]
    yield (
        "Correlation (Pearson) between the values of the same samples at two rounds, "
        "and the terms' ratio:"
    )
    for task, row in tasks.items():
        rounds = [f"round {r}" for r in row["rounds"]]
        lines = [
            (name, *map("{:.2f}".format, row["pearson_rounds"][k])) for k, name in enumerate(rounds)
        ]
        lines.append(("last layer against all", *map("{:.2f}".format, row["pearson_last_layer"])))
        for key, name in (("term2_over_term1", "weighted"), ("term2_over_term1_raw", "bare")):
            lines.append((f"term 2 over term 1, {name}", *map("{:.3g}".format, row[key])))
        yield sheet((task, *rounds), lines)
    yield (
        "One-step values of eight samples, their correlation with what they stand for, "
        "over 20 draws:"
    )
    ahead = {
        task: (row["look_ahead"]["leave_one_out"], row["look_ahead"]["shapley"])
        for task, row in tasks.items()
    }
    rows = (
        [task, *(f"{f['mean']:.3f} (worst {f['worst']:.3f})" for f in found)]
        for task, found in ahead.items()
    )
    yield sheet(("task", "leave-one-out", "exact Shapley"), rows)
    yield (
        f"The gradient over {figures['subset']} fixed samples, which ODE-Exact takes, "
        "against that over all of them, at the worst of these rounds: its error against "
        "the gradient's length, the cosine between the two, and the correlation of the "
        "values that they give:"
    )
    subsets = []
    for task, found in ((task, row["exact_on_a_subset"]) for task, row in tasks.items()):
        worst = (
            max(f["error"] for f in found),
            min(f["cosine"] for f in found),
            min(f["pearson"] for f in found),
        )
        subsets.append((task, *map("{:.3f}".format, worst)))
    yield sheet(("task", "error", "cosine", "values"), subsets)


def _theory(figures: dict[str, Any], _: Paper) -> Iterator[Block]:
    distance = figures["theorem2_distance"]
    methods = {name: row for name, row in distance.items() if name != "central"}
    series = {
        n: list(zip(map(float, r["rounds"]), r["distance"], strict=True))
        for n, r in methods.items()
    }
    chart = line_chart(
        "Distance to the centrally trained model (Theorem 2)", series, "round", "distance"
    )
    yield Picture(
        "theory-distance",
        chart,
        "distance of every method's model to the centrally trained one by round",
    )
    rows = [
        (name, f"{row['distance'][-1]:.3f}", f"{100 * row['accuracy']:.1f}")
        for name, row in methods.items()
    ]
    rows.append(("central", "0", f"{100 * distance['central']['accuracy']:.1f}"))
    yield sheet(("method", "final distance to the central model", "final accuracy, %"), rows)
