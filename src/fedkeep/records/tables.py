"""A comparison as a table of words: the same for the terminal, Markdown and a README."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedkeep.records.metrics import Comparison, Ratio, Row


@dataclass(frozen=True)
class Table:
    """One task in one setting."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(comparison: Comparison) -> list[Table]:
    """One table per task and setting, a row per method, a column per base that ran there."""
    found: dict[str, list[Row]] = {}
    for row in comparison.rows:
        found.setdefault(f"{row.task}, {row.setting}" if row.setting else row.task, []).append(row)
    return [_table(title, comparison.bases, rows) for title, rows in found.items()]


def _table(title: str, bases: Sequence[str], rows: Sequence[Row]) -> Table:
    ran = [place for place in range(len(bases)) if any(row.ratios[place].seeds for row in rows)]
    columns = ("method", "seeds", "final accuracy", *(f"vs {bases[place]}" for place in ran))
    return Table(title, columns, tuple(_cells(row, [row.ratios[place] for place in ran]) for row in rows))


def _cells(row: Row, ratios: Sequence[Ratio]) -> tuple[str, ...]:
    seeds = str(row.seeds) if row.finished == row.seeds else f"{row.finished} of {row.seeds}"
    return (row.method, seeds, _percent(row), *map(_speedup, ratios))


def _percent(row: Row) -> str:
    mean = f"{100 * row.accuracy:.2f} %"
    return mean if row.half_width is None else f"{mean} ± {100 * row.half_width:.2f}"


def _speedup(ratio: Ratio) -> str:
    """ "2.4x", with how many seeds got there unless all did; "-" where none did."""
    if ratio.value is None:
        return "-"
    all_reached = ratio.reached == ratio.seeds
    return f"{ratio.value:.2f}x" + ("" if all_reached else f" ({ratio.reached} of {ratio.seeds} seeds)")


def markdown(comparison: Comparison) -> str:
    """The tables and notes as Markdown."""
    parts = [_markdown_table(table) for table in tables(comparison)]
    if comparison.notes:
        parts.append("\n".join(f"- {_escaped(note)}" for note in comparison.notes) + "\n")
    return "\n".join([*parts, EXPLANATION + "\n"])


def _markdown_table(table: Table) -> str:
    lines = [table.columns, ("---",) + ("---:",) * (len(table.columns) - 1), *table.rows]
    body = "\n".join("| " + " | ".join(map(_escaped, line)) + " |" for line in lines)
    return f"### {_escaped(table.title)}\n\n{body}\n"


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is: names come from whoever wrote the record."""
    plain = " ".join(text.split())
    return plain.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "\\`")


EXPLANATION = (
    "Seeds: finished, of those begun. Final accuracy: mean of the last five evaluations, with its 95 % interval "
    "(Student's t) over seeds. vs a base: rounds it needs to its own final accuracy, over rounds the method needs to "
    "that; geometric mean over the seeds that got there, '-' when none did."
)
