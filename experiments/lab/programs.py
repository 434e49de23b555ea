"""The parts of the document that come from programs rather than experiment files: cost, claims, theory."""

from collections.abc import Iterator
from typing import Any

from lab.blocks import Block, Picture, heading, sheet
from lab.charts import line_chart
from lab.paper import Paper
from lab.results import Results

_LINES = {
    "one_ms": ("ms a sample, one by one", "milliseconds"),
    "batched_ms": ("ms a sample, in a batch", ""),
    "extra_mb": ("MB above an idle process", "megabytes"),
}
"""What Table 3 measures: its title, and what the paper's table of it is called."""


def programs(results: Results, paper: Paper) -> Iterator[Block]:
    parts = {
        "table3": ("Table 3: memory footprint and evaluation delay", _cost),
        "claims": ("Claims about values", _claims),
        "theory": ("Theory", _theory),
    }
    for name, (title, write) in parts.items():
        yield heading(title)
        figures = results.figures.get(name)
        if figures is None:
            yield f"Not run yet: `experiments/{name}.py`."
            continue
        yield from write(figures, paper)
        yield f"Made by `{figures['command']}`."


def _cost(figures: dict[str, Any], paper: Paper) -> Iterator[Block]:
    yield f"In brackets the paper's phone ({paper.source('table3')}). {figures['how']}"
    columns = paper.tables["table3"]["columns"]
    for quantity, (title, printed) in _LINES.items():

        def cell(task: str, method: str, quantity: str = quantity, printed: str = printed) -> str:
            theirs = paper.of("table3", printed, task, method)
            return f"{figures['tasks'][task][method][quantity]:.3g}" + ("" if theirs is None else f" ({theirs:g})")

        yield f"{title}:"
        yield sheet(("task", *columns), ([task, *(cell(task, m) for m in columns)] for task in figures["tasks"]))


def _claims(figures: dict[str, Any], _: Paper) -> Iterator[Block]:
    tasks = figures["tasks"]
    yield "Correlation (Pearson) between the values of the same samples at two rounds, and the terms' ratio:"
    for task, row in tasks.items():
        rounds = [f"round {r}" for r in row["rounds"]]
        lines = [(name, *map("{:.2f}".format, row["pearson_rounds"][k])) for k, name in enumerate(rounds)]
        lines.append(("last layer against all", *map("{:.2f}".format, row["pearson_last_layer"])))
        lines.append(("term 2 over term 1, weighted", *map("{:.3g}".format, row["term2_over_term1"])))
        lines.append(("term 2 over term 1, bare", *map("{:.3g}".format, row["term2_over_term1_raw"])))
        yield sheet((task, *rounds), lines)
    yield "One-step values of eight samples, their correlation with what they stand for, over 20 draws:"
    ahead = {task: (row["look_ahead"]["leave_one_out"], row["look_ahead"]["shapley"]) for task, row in tasks.items()}
    rows = ([task, *(f"{f['mean']:.3f} (worst {f['worst']:.3f})" for f in found)] for task, found in ahead.items())
    yield sheet(("task", "leave-one-out", "exact Shapley"), rows)
    yield (
        f"The gradient over {figures['subset']} fixed samples, which ODE-Exact takes, against that over all of them, "
        "at the worst of these rounds: its error against the gradient's length, the cosine between the two, and the "
        "correlation of the values that they give:"
    )
    yield sheet(("task", "error", "cosine", "values"), (_subset(task, row) for task, row in tasks.items()))


def _subset(task: str, row: dict[str, Any]) -> tuple[str, ...]:
    found = row["exact_on_a_subset"]
    worst = max(f["error"] for f in found), min(f["cosine"] for f in found), min(f["pearson"] for f in found)
    return (task, *map("{:.3f}".format, worst))


def _theory(figures: dict[str, Any], _: Paper) -> Iterator[Block]:
    distance = figures["theorem2_distance"]
    methods = {name: row for name, row in distance.items() if name != "central"}
    series = {n: list(zip(map(float, r["rounds"]), r["distance"], strict=True)) for n, r in methods.items()}
    chart = line_chart("Distance to the centrally trained model (Theorem 2)", series, "round", "distance")
    yield Picture("theory-distance", chart, "distance of every method's model to the centrally trained one by round")
    rows = [(name, f"{row['distance'][-1]:.3f}", f"{100 * row['accuracy']:.1f}") for name, row in methods.items()]
    rows.append(("central", "0", f"{100 * distance['central']['accuracy']:.1f}"))
    yield sheet(("method", "final distance to the central model", "final accuracy, %"), rows)
