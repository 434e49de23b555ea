"""How the default is chosen: the candidate whose worst lead over the best rival, task by task, is the greatest."""

from __future__ import annotations

from collections.abc import Iterator

from fedkeep.evidence.blocks import Block, Grid, Text
from fedkeep.evidence.results import Results

RIVALS = ("fifo", "reservoir", "class-balanced-fifo", "incremental-0.0-keep")
"""What a default must not lose to; the last one is the paper's setting."""


def ranking(results: Results) -> list[tuple[str, dict[str, float]]]:
    """The candidates with their lead on every task that they were compared on, the safest first."""
    tasks = [name for name in results.summaries if name.startswith("choice/")]
    leads: dict[str, dict[str, float]] = {}
    for task in tasks:
        means = {m: shown.mean for m in results.methods(task) if (shown := results.shown(task, m)) is not None}
        best = max((means[rival] for rival in RIVALS if rival in means), default=0.0)
        for method, mean in means.items():
            if method not in RIVALS:
                leads.setdefault(method, {})[task.removeprefix("choice/")] = mean - best
    complete = {method: found for method, found in leads.items() if len(found) == len(tasks)}
    return sorted(complete.items(), key=lambda item: -min(item[1].values()))


def choosing(results: Results) -> Iterator[Block]:
    """The ranking as a table, and its first line in words."""
    ranked = ranking(results)
    if not ranked:
        return
    yield Text(
        "Points ahead of the best of FIFO, reservoir, class-balanced FIFO and the paper's setting on each task of the "
        "choice. A default has to be safe on data that nobody has seen, so the rule is: the greatest lead where it is "
        f"smallest. By it the choice falls on `{ranked[0][0]}`."
    )
    tasks = list(ranked[0][1])
    rows = tuple((m, *(f"{found[t]:+.1f}" for t in tasks), f"{min(found.values()):+.1f}") for m, found in ranked)
    yield Grid(("candidate", *tasks, "smallest lead"), rows)
