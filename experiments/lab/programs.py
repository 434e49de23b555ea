"""The parts of the document that come from programs rather than experiment files: cost, claims, theory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lab.blocks import Block, Heading, Picture, Sheet, Text
from lab.charts import line_chart
from lab.paper import Paper
from lab.results import Results

_LINES = {
    "one_ms": "ms a sample, one by one",
    "batched_ms": "ms a sample, in a batch",
    "extra_mb": "MB above an idle process",
}


def programs(results: Results, paper: Paper) -> Iterator[Block]:
    parts = {"table3": _cost, "claims": _claims, "theory": _theory}
    titles = {
        "table3": "Table 3: memory footprint and evaluation delay",
        "claims": "Claims about values",
        "theory": "Theory",
    }
    for name, write in parts.items():
        yield Heading(titles[name])
        figures = results.figures.get(name)
        if figures is None:
            yield Text(f"Not run yet: `experiments/{name}.py`.")
            continue
        yield from write(figures, paper)
        yield Text(f"Made by `{figures['command']}`.")


def _cost(figures: dict[str, Any], paper: Paper) -> Iterator[Block]:
    yield Text(f"In brackets the paper's phone ({paper.source('table3')}). {figures['how']}")
    columns = paper.tables["table3"]["columns"]
    for quantity, title in _LINES.items():
        printed = {"extra_mb": "megabytes", "one_ms": "milliseconds"}.get(quantity)
        rows = []
        for task, methods in figures["tasks"].items():
            cells = [task]
            for method in columns:
                value = f"{methods[method][quantity]:.3g}"
                theirs = paper.of("table3", printed, task, method) if printed else None
                cells.append(value + ("" if theirs is None else f" ({theirs:g})"))
            rows.append(tuple(cells))
        yield Text(f"{title}:")
        yield Sheet(("task", *columns), tuple(rows))


def _claims(figures: dict[str, Any], paper: Paper) -> Iterator[Block]:
    del paper
    tasks = figures["tasks"]
    yield Text("Correlation (Pearson) between the values of the same samples at two rounds, and the terms' ratio:")
    for task, row in tasks.items():
        rounds = row["rounds"]
        lines = [(f"round {r}", *(f"{v:.2f}" for v in row["pearson_rounds"][k])) for k, r in enumerate(rounds)]
        lines.append(("last layer against all", *(f"{v:.2f}" for v in row["pearson_last_layer"])))
        lines.append(("term 2 over term 1, weighted", *(f"{v:.3g}" for v in row["term2_over_term1"])))
        lines.append(("term 2 over term 1, bare", *(f"{v:.3g}" for v in row["term2_over_term1_raw"])))
        yield Sheet((task, *(f"round {r}" for r in rounds)), tuple(tuple(line) for line in lines))
    rows = [
        (
            task,
            *(
                f"{row['look_ahead'][name]['mean']:.3f} (worst {row['look_ahead'][name]['worst']:.3f})"
                for name in ("leave_one_out", "shapley")
            ),
        )
        for task, row in tasks.items()
    ]
    yield Text("One-step values of eight samples, their correlation with what they stand for, over 20 draws:")
    yield Sheet(("task", "leave-one-out", "exact Shapley"), tuple(rows))
    yield Text(
        f"The gradient over {figures['subset']} fixed samples, which ODE-Exact takes, against that over all of them, "
        "at the worst of these rounds: its error against the gradient's length, the cosine between the two, and the "
        "correlation of the values that they give:"
    )
    yield Sheet(("task", "error", "cosine", "values"), tuple(_subset(task, row) for task, row in tasks.items()))


def _subset(task: str, row: dict[str, Any]) -> tuple[str, ...]:
    found = row["exact_on_a_subset"]
    worst = {"error": max(f["error"] for f in found)}
    worst |= {key: min(f[key] for f in found) for key in ("cosine", "pearson")}
    return (task, *(f"{value:.3f}" for value in worst.values()))


def _theory(figures: dict[str, Any], paper: Paper) -> Iterator[Block]:
    del paper
    distance = figures["theorem2_distance"]
    methods = {name: row for name, row in distance.items() if name != "central"}
    series = {n: list(zip(map(float, r["rounds"]), r["distance"], strict=True)) for n, r in methods.items()}
    chart = line_chart("Distance to the centrally trained model (Theorem 2)", series, "round", "distance")
    yield Picture("theory-distance", chart, "distance of every method's model to the centrally trained one by round")
    rows = [(name, f"{row['distance'][-1]:.3f}", f"{100 * row['accuracy']:.1f}") for name, row in methods.items()]
    rows.append(("central", "0", f"{100 * distance['central']['accuracy']:.1f}"))
    yield Sheet(("method", "final distance to the central model", "final accuracy, %"), tuple(rows))
