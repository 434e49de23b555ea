"""The tables that programmes end in, as JSON files in experiments/results."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.compute import forward_passes
from lab.curves import Curves
from lab.findings import (
    FIFO,
    GISTS,
    PREQUENTIAL,
    UNLIMITED,
    Findings,
    ahead,
    mean,
    share_closed,
    summed,
)
from lab.programme import Contest, read_programme
from lab.worth import bytes_table

Table = dict[str, Any]


def write_tables(experiments: Path, curves: Curves, out: Path) -> None:
    """Writes what every programme ends in, as far as its runs were made, into the folder `out`."""

    def findings(name: str) -> Findings:
        return Findings(read_programme(experiments / "programmes" / f"{name}.toml"), curves)

    tables: dict[str, Callable[[Findings], Table]] = {
        "arena": arena,
        "paper": arena,
        "bytes": bytes_table,
        "helps": settings_table,
        "choice": settings_table,
    }
    for name, make in tables.items():
        write_table(out / f"{name}.json", make(findings(name)))
    gist = findings("gist")
    for task in gist.tasks():
        write_table(out / "gist" / f"{task}.json", gist_rows(gist, task))
    write_table(out / "gist" / "summary.json", gist_summary(gist))


def write_table(path: Path, table: Table) -> None:
    """One line a row, so that a change shows as a change; nothing where nothing has run."""
    if not table:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_lines(table, "") + "\n", encoding="utf-8")


def _lines(value: Any, indent: str) -> str:
    if not isinstance(value, dict) or not any(isinstance(each, dict) for each in value.values()):
        return json.dumps(value)
    body = ",\n".join(f"{indent} {json.dumps(key)}: {_lines(each, indent + ' ')}" for key, each in value.items())
    return f"{{\n{body}\n{indent}}}"


def arena(found: Findings) -> Table:
    """By task and method: accuracy at the task's rate and at the method's own, and the lead over FIFO at own rates."""
    table: Table = {}
    for task in found.tasks():
        rows = {method: _arena_row(found, Contest(task, method)) for method in found.methods(task)}
        if ran := {method: row for method, row in rows.items() if row is not None}:
            table[task] = ran
    return table


def _arena_row(found: Findings, row: Contest) -> Table | None:
    shared, own = found.runs(row), found.own_runs(row)
    shown = own or shared or found.runs(Contest(row.task, row.method, PREQUENTIAL))
    if not shown:
        return None
    fifo, experiment = Contest(row.task, FIFO), found.experiment(row)
    tested_first = found.runs(Contest(row.task, row.method, PREQUENTIAL))
    return {
        "own_rate": summed(curve.final for curve in own.values()),
        "shared_rate": summed(curve.final for curve in shared.values()),
        "rate": found.own_rate(row),
        "seeds": len(shown),
        "over_fifo": ahead(own, found.own_runs(fifo)),
        "over_fifo_shared": ahead(shared, found.runs(fifo)),
        "rounds": max(curve.planned for curve in shown.values()),
        "worst_tenth": mean((curve.worst_tenth for curve in shown.values()), 100),
        "rare_recall": mean((curve.rare_recall for curve in shown.values()), 100),
        "prequential": mean((curve.prequential for curve in tested_first.values()), 100),
        "forward_passes": mean(forward_passes(experiment, curve) for curve in shown.values()),
    }


def gist_rows(found: Findings, task: str) -> Table:
    """Every method of a task at every rate: the finals of all seeds, and the lead over FIFO at the same rate."""
    table: Table = {}
    for method in found.methods(task):
        for rate in found.programme.choice.rates:
            if runs := found.runs(Contest(task, method), rate):
                table.setdefault(method, {})[f"{rate:.3g}"] = {
                    "accuracy": summed(curve.final for curve in runs.values()),
                    "over_fifo": ahead(runs, found.runs(Contest(task, FIFO), rate)),
                    "rounds": max(curve.planned for curve in runs.values()),
                    "seeds": list(runs),
                    "finals": [round(curve.final, 2) for curve in runs.values()],
                }
    return table


def gist_summary(found: Findings) -> Table:
    """By task, at its rate and in percent; `gap_closed` is the better gist's share of what FIFO lacks."""
    table: Table = {}
    for task in found.tasks():
        fifo, unlimited = found.mean(task, FIFO), found.mean(task, UNLIMITED)
        gists = {method: found.mean(task, method) for method in GISTS}
        best = max((value for value in gists.values() if value is not None), default=None)
        if best is not None:
            table[task] = {
                "fifo": fifo,
                **{method.replace("-", "_"): value for method, value in gists.items()},
                "unlimited": unlimited,
                "gap_closed": share_closed(fifo, best, unlimited),
            }
    return table


def settings_table(found: Findings) -> Table:
    """By task, setting and method: accuracy at the task's rate, and the lead over FIFO."""
    table: Table = {}
    for stage in found.programme.stages:
        for row in found.programme.rows(stage):
            if runs := found.runs(row):
                place = table.setdefault(row.task, {}).setdefault(row.setting_name or "as it is", {})
                place[row.method] = {
                    "accuracy": summed(curve.final for curve in runs.values()),
                    "over_fifo": ahead(runs, found.runs(replace(row, method=FIFO))),
                    "rounds": max(curve.planned for curve in runs.values()),
                    "seeds": len(runs),
                }
    return table
