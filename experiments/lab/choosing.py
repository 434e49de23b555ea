"""How the default is chosen: of the candidates that keep up with everybody, the one with the greatest mean lead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lab.blocks import Block, Grid, Text
from lab.results import Results

RIVALS = ("fifo", "reservoir", "class-balanced-fifo", "incremental-0.0-keep")
"""What a default must not lose to; the last one is the paper's setting."""


@dataclass(frozen=True)
class Candidate:
    """A setting that could be the default."""

    method: str
    leads: dict[str, float]
    """Points ahead of the best rival, by task."""
    falls_behind: tuple[str, ...]
    """Tasks on which a rival may be more than a point ahead, by the interval of their difference."""

    @property
    def lead(self) -> float:
        """The mean over tasks."""
        return sum(self.leads.values()) / len(self.leads)


def candidates(results: Results) -> list[Candidate]:
    """All that ran on every task of the choice: first those that keep up everywhere, each group by its mean lead."""
    tasks = [name for name in results.summaries if name.startswith("choice/")]
    methods = [m for task in tasks[:1] for m in results.methods(task) if m not in RIVALS]
    everywhere = [m for m in methods if all(results.shown(task, m) is not None for task in tasks)]
    found = [_candidate(results, tasks, method) for method in everywhere]
    return sorted(found, key=lambda candidate: (bool(candidate.falls_behind), -candidate.lead))


def _candidate(results: Results, tasks: list[str], method: str) -> Candidate:
    leads, behind = {}, []
    for task in tasks:
        margins = [m for rival in RIVALS if (m := results.margin(task, method, rival)) is not None]
        name = task.removeprefix("choice/")
        leads[name] = min(margin.mean for margin in margins)
        if not all(margin.keeps_up for margin in margins):
            behind.append(name)
    return Candidate(method, leads, tuple(behind))


def choosing(results: Results) -> Iterator[Block]:
    """The candidates as a table, and the first of them in words."""
    ranked = candidates(results)
    if not ranked:
        return
    yield Text(
        "Points ahead of the best of FIFO, reservoir, class-balanced FIFO and the paper's setting on each task of the "
        "choice. The rule: of the candidates that are sure (95 %) to be less than a point behind any of the four "
        f"everywhere, the one with the greatest mean lead. By it the choice falls on `{ranked[0].method}`."
    )
    tasks = list(ranked[0].leads)
    rows = tuple(
        (c.method, *(f"{c.leads[t]:+.2f}" for t in tasks), f"{c.lead:+.2f}", ", ".join(c.falls_behind) or "nowhere")
        for c in ranked
    )
    yield Grid(("candidate", *tasks, "mean", "may be a point behind on"), rows)
