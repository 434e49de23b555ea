"""A comparison in words, the same for the terminal, Markdown and a README; and every evaluation of runs as one row."""

import csv
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedkeep.core.errors import optional_import
from fedkeep.records.measures import Comparison, MeanOverSeeds, Ratio, Row
from fedkeep.records.runs import Run, read_runs

if TYPE_CHECKING:
    from pandas import DataFrame

_RUN = ("task", "setting", "method", "seed")
EVALUATED = (
    "round", "accuracy", "loss", "samples_valued", "bytes_stored", "bytes_up", "bytes_down", "label_coverage",
    "store_turnover",
)  # fmt: skip
"""What tables and curves have of an evaluation."""
_PERCENT, _POINTS = "{:.2f} %", "{:+.2f}"


def frame(runs: Path | str | Iterable[Run]) -> "DataFrame":
    """The runs, or those of a directory, as a pandas frame: one row an evaluation.

    `frame("runs/mine").pivot_table("accuracy", "round", "method")` has the mean curve of each method.

    >>> frame([]).columns.tolist()[:6]
    ['task', 'setting', 'method', 'seed', 'round', 'accuracy']
    """
    with optional_import("a pandas frame", "frame"):
        import pandas
    found = read_runs(Path(runs)) if isinstance(runs, Path | str) else runs
    return pandas.DataFrame(rows(found), columns=[*_RUN, *EVALUATED, "finished"])


def rows(runs: Iterable[Run]) -> list[dict[str, Any]]:
    return [
        {
            **{name: getattr(run.header, name) for name in _RUN},
            **{name: getattr(evaluation, name) for name in EVALUATED},
            "finished": run.end is not None,
        }
        for run in runs
        for evaluation in run.evaluations
    ]


def as_csv(runs: Iterable[Run]) -> str:
    """The rows as CSV; an accuracy that is no number is left empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, [*_RUN, *EVALUATED, "finished"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows(runs))
    return out.getvalue()


@dataclass(frozen=True)
class ReportTable:
    """One task in one setting: how good the methods are, or how they stand to one of them."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(comparison: Comparison) -> Iterator[ReportTable]:
    """Per task and setting a table of the methods, then one for each base that ran there with another."""
    groups: dict[str, list[Row]] = {}
    for row in comparison.rows:
        groups.setdefault(f"{row.task}, {row.setting}" if row.setting else row.task, []).append(row)
    for title, rows in groups.items():
        names, values = ("final", "best", "mean_accuracy"), []
        for row in rows:
            seeds = (
                str(row.seeds) if row.finished == row.seeds else f"{row.finished} of {row.seeds}"
            )
            values.append(
                (row.method, seeds, *(_figure(row.measures[name], _PERCENT) for name in names))
            )
        yield ReportTable(
            title, ("method", "seeds", "final accuracy", "best", "mean accuracy"), tuple(values)
        )
        for place, base in enumerate(comparison.bases):
            compared = tuple(
                (
                    row.method,
                    found["final"].verdict,
                    *(_figure(found[n], _POINTS) for n in names),
                    _speedup(row.ratios[place]),
                )
                for row in rows
                if (found := row.differences[place]) is not None
            )
            if compared:
                yield ReportTable(
                    f"{title}: against {base}",
                    ("method", "verdict", "final", "best", "mean accuracy", "speedup"),
                    compared,
                )
        gists = []
        for row in (row for row in rows if row.gist):
            trust, likeness, reach = (
                _figure(row.gist[name], _PERCENT) for name in ("trust", "likeness", "reach")
            )
            gists.append((row.method, trust, likeness, f"{row.gist['worth'].mean:.1f}", reach))
        if gists:
            columns = (
                "method",
                "correction weight",
                "gradient correlation",
                "effective samples",
                "correction norm",
            )
            yield ReportTable(f"{title}: what the gist did", columns, tuple(gists))


def _figure(found: MeanOverSeeds, form: str) -> str:
    half = "" if found.half_width is None else f" ± {100 * found.half_width:.2f}"
    return form.format(100 * found.mean) + half


def _speedup(ratio: Ratio) -> str:
    """ "2.4x", with how many seeds got there unless all did; "-" where none did."""
    if ratio.value is None:
        return "-"
    all_reached = ratio.reached == ratio.seeds
    return f"{ratio.value:.2f}x" + ("" if all_reached else f" ({ratio.reached} of {ratio.seeds})")


def sentences(comparison: Comparison) -> list[str]:
    """What the final accuracies say against the first base, a sentence a method."""
    said = []
    for row, differences in (
        (row, row.differences[0]) for row in comparison.rows if row.differences
    ):
        if differences is None:
            continue
        found, base = differences["final"], comparison.bases[0]
        where = f" on {row.task}" + (f", {row.setting}" if row.setting else "")
        points = _figure(found, _POINTS).lstrip("+-") + " points"
        decides = f"about {found.seeds_to_decide} seeds would decide it"
        if found.half_width is None:
            decides = "one seed decides nothing, run three or more"
        elif found.seeds_to_decide is None:
            decides = "no reasonable number of seeds would tell them apart"
        words = {
            "better": f"is better than {base} by {points}{where}",
            "worse": f"is worse than {base} by {points}{where}",
            "equivalent": f"is equivalent to {base} within a point{where}",
            "inconclusive": (
                f"against {base} is inconclusive{where} ({_figure(found, _POINTS)} points): {decides}"
            ),
        }
        said.append(f"{row.method} {words[found.verdict]}.")
    return said


def markdown(comparison: Comparison) -> str:
    """The tables, sentences and notes as Markdown."""
    parts = []
    for table in tables(comparison):
        lines = [table.columns, ("---",) + ("---:",) * (len(table.columns) - 1), *table.rows]
        body = "\n".join("| " + " | ".join(map(_escaped, line)) + " |" for line in lines)
        parts.append(f"### {_escaped(table.title)}\n\n{body}\n")
    for remarks in (sentences(comparison), comparison.notes):
        if remarks:
            parts.append("\n".join(f"- {_escaped(remark)}" for remark in remarks) + "\n")
    return "\n".join([*parts, explanation(comparison) + "\n"])


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is: names come from whoever wrote the record."""
    plain = " ".join(text.split())
    return plain.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "\\`")


def explanation(comparison: Comparison) -> str:
    """How to read the tables that there are."""
    return _METHODS + (_GIST if any(row.gist for row in comparison.rows) else "")


_METHODS = (
    "Seeds: finished, of those begun. Final: the accuracy of the last evaluation. Best: the highest. "
    "Mean accuracy: over all rounds (the area under the curve). ±: 95 % interval over seeds "
    "(Student's t). Against a method: differences in points, paired by seed as far as both got; "
    "better or worse where the interval excludes 0, equivalent where it stays within a point, else "
    "inconclusive. Speedup: how many times fewer rounds the method needs to the mean of the other's "
    "last five evaluations, geometric mean over the seeds that got there, '-' when none did."
)
_GIST = (
    " The gist, means over all participations: the correction weight beta, the correlation rho of a "
    "sample's gradients under the device's old model and the new, and its effective sample size; "
    "the correction norm is relative to the stored samples' gradient, the median over the run."
)
