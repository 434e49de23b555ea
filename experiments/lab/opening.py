"""What RESULTS opens with: the verdict in ten lines, each following paired intervals, and three figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lab.blocks import Block, Heading, Picture, Sheet, Text
from lab.charts import bar_chart, line_chart
from lab.findings import BALANCED, FIFO, GISTS, UNLIMITED, Findings, share_closed
from lab.programme import Contest

Table = Mapping[str, Any]

LEVEL = 0.5
"""Points within which a task counts as level."""
SHOWN = "uji-indoor-ordered"
"""The task of the figure by rounds."""
_IN_TIME = ("-ordered", "-once", "-bursts", "-drift")
_LOSS_BASED = ("high-loss", "fedbalancer")
_CORRECTIONS = ("fifo-scaffold", "fifo-fedvarp", "fifo-momentum")


def opening(figures: Mapping[str, Table], found: Findings) -> Iterator[Block]:
    """`figures` are the tables by name; `found` the runs of the arena."""
    arena = figures.get("arena", {})
    yield Heading("The verdict")
    lines = [f"{number}. {line}" for number, line in enumerate(_verdict(arena, figures.get("bytes", {})), start=1)]
    yield Text("\n".join(lines) or "Nothing of the arena has run yet: `python experiments/reproduce.py gist`.")
    yield from _by_rounds(found)
    closed = {task: share for task, row in arena.items() if (share := _closed(row)) is not None}
    if closed:
        percents = {task: 100 * share for task, share in closed.items()}
        chart = bar_chart("How much of the way from FIFO to unlimited storage the better gist goes", percents, " %")
        yield Picture("gap-closed", chart, "share of the gap closed, per task")
    yield from _by_bytes(figures.get("bytes", {}))
    yield from _by_compute(arena)
    yield Heading("The arena")
    if found.programme.note:
        yield Text(found.programme.note)
    yield from arena_tables(arena)


def _verdict(arena: Table, bytes_: Table) -> Iterator[str]:
    if not arena:
        return
    rounds = sorted({row["rounds"] for methods in arena.values() for row in methods.values()})
    seeds = max(row["seeds"] for methods in arena.values() for row in methods.values())
    span = f"{rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else f"{rounds[0]}"
    yield f"{len(arena)} tasks, up to {seeds} seeds a row, {span} rounds; every difference below is taken seed by seed."
    for method in GISTS:
        yield f"`{method}` against FIFO, {_both_rates(arena, method)}."
    yield f"Of the way to unlimited storage the better gist goes, shuffled: {_shares(arena, ordered=False)}."
    yield f"The same in the order of time and in bursts: {_shares(arena, ordered=True)}."
    yield f"Class-balanced FIFO against FIFO, {_both_rates(arena, BALANCED)}."
    yield f"ODE as the paper has it against FIFO, {_both_rates(arena, 'ode-est')}."
    loss_based = "; ".join(f"{method} {_both_rates(arena, method)}" for method in _LOSS_BASED)
    yield f"What fair rates leave of the lead of those that take larger steps: {loss_based}."
    corrections = "; ".join(f"{m.removeprefix('fifo-')} {_leads(arena, m, 'over_fifo')}" for m in _CORRECTIONS)
    yield f"Corrections that others would use on FIFO's store, at own rates: {corrections}."
    yield f"Where a larger FIFO of no more bytes is the better buy: {_better_buys(bytes_)}."


def _both_rates(arena: Table, method: str) -> str:
    shared, own = _leads(arena, method, "over_fifo_shared"), _leads(arena, method, "over_fifo")
    return f"at the task's rate: {shared}; each at its own: {own}"


def _leads(arena: Table, method: str, key: str) -> str:
    """Who is ahead where, by the interval of the difference; what a single seed says is decided by nothing."""
    groups: dict[str, list[str]] = {"ahead on": [], "behind on": [], "undecided on": []}
    for task, row in arena.items():
        if (found := row.get(method, {}).get(key)) is not None:
            mean, half = found[0], found[1]
            decided = half is not None and abs(mean) > half
            where = "undecided on" if not decided else "ahead on" if mean > 0 else "behind on"
            groups[where].append(f"{task} {mean:+.1f}")
    said = "; ".join(f"{where} {', '.join(tasks)}" for where, tasks in groups.items() if tasks)
    return said or "not run yet"


def _shares(arena: Table, *, ordered: bool) -> str:
    named = {task: _closed(row) for task, row in arena.items() if task.endswith(_IN_TIME) == ordered}
    return (
        ", ".join(f"{task} {100 * share:.0f} %" for task, share in named.items() if share is not None) or "not run yet"
    )


def _closed(row: Table) -> float | None:
    """At the task's rate; None where the gap is below half a point."""
    means = {method: _mean(row, method) for method in (FIFO, UNLIMITED, *GISTS)}
    best = max((means[m] for m in GISTS if means[m] is not None), default=None)  # type: ignore[type-var]
    fifo, unlimited = means[FIFO], means[UNLIMITED]
    if fifo is None or unlimited is None or unlimited - fifo < LEVEL:
        return None
    return share_closed(fifo, best, unlimited)


def _mean(row: Table, method: str) -> float | None:
    shared = row.get(method, {}).get("shared_rate")
    return None if shared is None else float(shared[0])


def _better_buys(table: Table) -> str:
    """Tasks with a FIFO store that takes no more bytes than some gist's store and is more accurate."""
    found = []
    for task, methods in table.items():
        gists = [(m, point) for m, points in methods.items() if m.startswith("gist") for point in points]
        for method, (size, slots, accuracy, _) in gists:
            stores = [p for m, points in methods.items() if m.startswith(FIFO) for p in points]
            rivals = [p for p in stores if p[0] <= size and p[2] > accuracy]
            if rivals:
                best = max(rivals, key=lambda point: float(point[2]))
                ours, theirs = f"{method} with {slots} slots {accuracy:.1f}", f"FIFO with {best[1]} slots {best[2]:.1f}"
                found.append(f"{task} ({ours}, {theirs})")
    return "; ".join(found) or ("nowhere of what ran" if table else "not run yet")


def _by_rounds(found: Findings) -> Iterator[Block]:
    series = {}
    for method in (FIFO, BALANCED, *GISTS, UNLIMITED):
        curves = list(found.runs(Contest(SHOWN, method)).values())
        if curves:
            points = zip(curves[0].rounds, zip(*(c.accuracy for c in curves), strict=True), strict=True)
            series[method] = [(float(r), 100 * sum(a or 0.0 for a in at) / len(at)) for r, at in points]
    if series:
        title = f"{SHOWN}: accuracy by round, in the order of time"
        yield Picture("by-rounds", line_chart(title, series, "round", "accuracy, %"), title)


def _by_bytes(table: Table) -> Iterator[Block]:
    task = next((name for name in ("har-ordered", "uji-indoor-ordered", "embedded") if name in table), None)
    if task is None:
        return
    series = {m: [(p[0] / 1024, p[2]) for p in points] for m, points in table[task].items() if m != "worth"}
    title = f"{task}: accuracy by kilobytes at rest"
    yield Picture("by-bytes", line_chart(title, series, "kB at rest", "accuracy, %"), title)


def _by_compute(arena: Table) -> Iterator[Block]:
    """One cross a method: what it reaches, and what it asks of the devices."""
    methods = arena.get(SHOWN, {})
    fifo = methods.get(FIFO, {}).get("forward_passes")
    crosses = {
        method: [(row["forward_passes"] / fifo, (row["own_rate"] or row["shared_rate"])[0])]
        for method, row in methods.items()
        if fifo and method != UNLIMITED and (row["own_rate"] or row["shared_rate"])
    }
    if crosses:
        title = f"{SHOWN}: accuracy by device compute, FIFO's forward passes being 1"
        yield Picture("by-compute", line_chart(title, crosses, "times FIFO's forward passes", "accuracy, %"), title)


def arena_tables(arena: Table) -> Iterator[Block]:
    """One table a task."""
    accuracies = ("own rate", "over FIFO", "task's rate", "over FIFO", "worst tenth", "rarest labels", "prequential")
    for task, methods in arena.items():
        yield Heading(task, 3)
        fifo_passes = methods.get(FIFO, {}).get("forward_passes")
        rows = tuple(
            (
                method,
                _interval(row["own_rate"]) + (f" ({row['rate']:.3g})" if row["rate"] else ""),
                _interval(row["over_fifo"], sign="+"),
                _interval(row["shared_rate"]),
                _interval(row["over_fifo_shared"], sign="+"),
                _number(row["worst_tenth"]),
                _number(row["rare_recall"]),
                _number(row["prequential"]),
                _number(row["forward_passes"] / fifo_passes if fifo_passes else None),
                f"{row['seeds']} x {row['rounds']}",
            )
            for method, row in methods.items()
        )
        yield Sheet(("method", *accuracies, "compute over FIFO's", "seeds x rounds"), rows)


def _interval(value: list[float | None] | None, sign: str = "") -> str:
    if value is None or value[0] is None:
        return "not run"
    return f"{value[0]:{sign}.1f}" + ("" if value[1] is None else f" ± {value[1]:.1f}")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def sweeps(helps: Table) -> Iterator[Block]:
    """One table and one figure per task and key of the programme `helps`."""
    for task, settings in helps.items():
        by_key: dict[str, dict[str, Table]] = {}
        for setting, methods in settings.items():
            key, _, value = setting.partition("=")
            by_key.setdefault(key, {})[value] = methods
        for key, values in by_key.items():
            yield from _sweep(task, key, values)


def _sweep(task: str, key: str, values: Mapping[str, Table]) -> Iterator[Block]:
    methods = list(dict.fromkeys(method for row in values.values() for method in row))
    yield Heading(f"{task}, {key}", 3)
    rows = tuple((m, *(_swept(row.get(m)) for row in values.values())) for m in methods)
    yield Sheet(("method", *values), rows)
    if all(value.replace(".", "", 1).isdigit() for value in values):
        series = {m: [(float(v), row[m]["accuracy"][0]) for v, row in values.items() if m in row] for m in methods}
        title = f"{task}: accuracy by {key}"
        yield Picture(f"{task}-{key}", line_chart(title, series, key, "accuracy, %"), title)


def _swept(entry: Table | None) -> str:
    if entry is None:
        return "not run"
    return f"{_interval(entry['accuracy'])} ({_interval(entry['over_fifo'], sign='+')})"
