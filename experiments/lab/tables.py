"""The tables that programmes end in, as JSON files in experiments/results."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.costs import forward_passes
from lab.curves import Curve, Curves
from lab.findings import FIFO, GISTS, PREQUENTIAL, UNLIMITED, Findings, Interval, ahead, finals, share_closed
from lab.programme import Contest, read_programme

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
        "own_rate": _rounded(finals(own)),
        "shared_rate": _rounded(finals(shared)),
        "rate": found.own_rate(row),
        "seeds": len(shown),
        "over_fifo": _rounded(ahead(own, found.own_runs(fifo))),
        "over_fifo_shared": _rounded(ahead(shared, found.runs(fifo))),
        "rounds": max(curve.planned for curve in shown.values()),
        "worst_tenth": _mean((curve.worst_tenth for curve in shown.values()), 100),
        "rare_recall": _mean((curve.rare_recall for curve in shown.values()), 100),
        "prequential": _mean((curve.prequential for curve in tested_first.values()), 100),
        "forward_passes": _mean(forward_passes(experiment, curve) for curve in shown.values()),
    }


def gist_rows(found: Findings, task: str) -> Table:
    """Every method of a task at every rate: the finals of all seeds, and the lead over FIFO at the same rate."""
    table: Table = {}
    for method in found.methods(task):
        for rate in found.programme.choice.rates:
            if runs := found.runs(Contest(task, method), rate):
                finals = [round(curve.final, 2) for curve in runs.values()]
                row = _beside(runs, found.runs(Contest(task, FIFO), rate)) | {"seeds": list(runs), "finals": finals}
                table.setdefault(method, {})[f"{rate:.3g}"] = row
    return table


def _beside(runs: Mapping[int, Curve], fifo: Mapping[int, Curve]) -> Table:
    return {
        "accuracy": _rounded(finals(runs)),
        "over_fifo": _rounded(ahead(runs, fifo)),
        "rounds": max(curve.planned for curve in runs.values()),
    }


def gist_summary(found: Findings) -> Table:
    """By task, at its rate and in percent; `gap_closed` is the better gist's share of what FIFO lacks."""
    table: Table = {}
    for task in found.tasks():
        runs = {method: found.runs(Contest(task, method)).values() for method in (FIFO, UNLIMITED, *GISTS)}
        means = {method: _mean(curve.final for curve in curves) for method, curves in runs.items()}
        fifo, unlimited = means.pop(FIFO), means.pop(UNLIMITED)
        best = max((value for value in means.values() if value is not None), default=None)
        if best is not None:
            table[task] = {
                "fifo": fifo,
                **{method.replace("-", "_"): value for method, value in means.items()},
                "unlimited": unlimited,
                "gap_closed": share_closed(fifo, best, unlimited),
            }
    return table


def settings_table(found: Findings) -> Table:
    """By task, setting and method: accuracy at the task's rate, and the lead over FIFO."""
    table: Table = {}
    for row, runs in found.ran():
        place = table.setdefault(row.task, {}).setdefault(row.setting_name or "as it is", {})
        place[row.method] = _beside(runs, found.runs(replace(row, method=FIFO))) | {"seeds": len(runs)}
    return table


def bytes_table(found: Findings) -> Table:
    """By task and method: [bytes at rest, slots, accuracy, half of its interval], smallest first; and the worth."""
    table: Table = {}
    for row, runs in found.ran():
        at_rest = max(curve.bytes_at_rest for curve in runs.values())
        point = [at_rest, found.experiment(row).storage.capacity, *(_rounded(finals(runs)) or ())]
        table.setdefault(row.task, {}).setdefault(row.method, []).append(point)
    for methods in table.values():
        methods["worth"] = {m: _worth(points, methods.get(FIFO, [])) for m, points in methods.items() if "gist" in m}
    return table


def _worth(points: list[list[Any]], fifo: list[list[Any]]) -> dict[str, int | None]:
    """By slots under a gist: the smallest FIFO store that is as accurate; None where no size that was tried is."""
    return {
        str(slots): min((point[1] for point in fifo if point[2] >= accuracy), default=None)
        for _, slots, accuracy, _ in points
    }


def _rounded(found: Interval | None) -> Interval | None:
    return None if found is None else found.rounded()


def _mean(values: Iterable[float | None], scale: float = 1.0) -> float | None:
    """Of what is known; None of nothing."""
    known = [value for value in values if value is not None]
    return round(scale * math.fsum(known) / len(known), 2) if known else None
