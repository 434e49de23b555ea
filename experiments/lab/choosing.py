"""How the default is chosen, by the rule of experiments/README.md: first who may be it at all, then who leads most."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lab.blocks import Block, sheet
from lab.findings import BALANCED, FIFO, GISTS, SLIGHT

RIVALS = (FIFO, BALANCED)

Means = Mapping[str, Mapping[str, float]]
"""Final accuracies in percent, by task and method."""


@dataclass(frozen=True)
class Candidate:
    """A setting that could be the default."""

    method: str
    leads: dict[str, float]
    """Points ahead of the better of FIFO and class-balanced FIFO, by task."""

    @property
    def lead(self) -> float:
        """The mean over tasks."""
        return sum(self.leads.values()) / len(self.leads)

    @property
    def falls_behind(self) -> tuple[str, ...]:
        """Tasks on which it is more than half a point behind."""
        return tuple(task for task, lead in self.leads.items() if lead < -SLIGHT)


def candidates(means: Means, form: str) -> list[Candidate]:
    """Those of a form ("gist-local", "gist-shared") that ran on every task, the first of them to be chosen.

    Who falls behind on fewer tasks goes first, among those the greatest mean lead.
    """
    methods = dict.fromkeys(m for row in means.values() for m in row if m.startswith(form))
    everywhere = [m for m in methods if all(m in row for row in means.values())]
    found = [
        Candidate(m, {task: row[m] - max(row[rival] for rival in RIVALS) for task, row in means.items()})
        for m in everywhere
    ]
    return sorted(found, key=lambda candidate: (len(candidate.falls_behind), -candidate.lead))


def choosing(table: Mapping[str, Any]) -> Iterator[Block]:
    """The candidates as tables, and the first of each form in words; `table` is results/choice.json."""
    means = {t: {m: e["accuracy"][0] for m, e in rows["as it is"].items()} for t, rows in table.items()}
    complete = {task: row for task, row in means.items() if all(rival in row for rival in RIVALS)}
    for form in GISTS:
        if ranked := candidates(complete, form):
            yield (
                "Points ahead of the better of FIFO and class-balanced FIFO, on seeds of the choice's own. By the rule "
                f"the choice among the stores under a {form.removeprefix('gist-')} gist falls on `{ranked[0].method}`."
            )
            yield sheet(("candidate", *complete, "mean", "half a point behind on"), map(_row, ranked))


def _row(candidate: Candidate) -> list[str]:
    leads = map("{:+.2f}".format, (*candidate.leads.values(), candidate.lead))
    return [candidate.method, *leads, ", ".join(candidate.falls_behind) or "nowhere"]
