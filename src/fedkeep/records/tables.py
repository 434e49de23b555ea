"""A comparison as text, Markdown and LaTeX, and runs as rows of CSV or of a pandas frame."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedkeep.core.errors import optional_import
from fedkeep.records.measures import ERRORS, Comparison, MeanOverSeeds, Ratio, Row
from fedkeep.records.runs import Run, read_runs

if TYPE_CHECKING:
    from pandas import DataFrame

_RUN = ("task", "setting", "method", "seed")
EVALUATED = (
    "round", "accuracy", "loss", "samples_valued", "bytes_stored", "bytes_up", "bytes_down",
    "label_coverage", "store_turnover",
)  # fmt: skip
"""The fields of an evaluation in the curves of the page."""
EXPORTED = (*EVALUATED, "samples_trained", "worst_tenth", "rare_recall", "prequential", *ERRORS)
"""The fields of an evaluation in a frame and in CSV; recall per label follows them."""
_PERCENT, _POINTS = "{:.2f} %", "{:+.2f}"


def frame(runs: Path | str | Iterable[Run]) -> "DataFrame":
    """Return runs as a pandas frame with one row per evaluation.

    Parameters
    ----------
    runs : Path, str or iterable of Run
        The runs, or a directory of records.

    Returns
    -------
    pandas.DataFrame
        Task, setting, method, seed, the fields of `EXPORTED`, and the recall of each label in a
        column `recall:LABEL`.

    Examples
    --------
    `frame("runs/mine").pivot_table("accuracy", "round", "method")` has the mean curve of each
    method.

    >>> frame([]).columns.tolist()[:6]
    ['task', 'setting', 'method', 'seed', 'round', 'accuracy']
    """
    with optional_import("a pandas frame", "frame"):
        import pandas
    found = read_runs(Path(runs)) if isinstance(runs, Path | str) else list(runs)
    return pandas.DataFrame(rows(found), columns=columns(found))


def columns(runs: Iterable[Run]) -> list[str]:
    """Return the columns of `rows`; labels in the order in which runs first name them."""
    labels = dict.fromkeys(label for run in runs for label in run.header.labels)
    return [*_RUN, *EXPORTED, "finished", *(f"recall:{label}" for label in labels)]


def rows(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """Return one row per evaluation, as values by column."""
    found = []
    for run in runs:
        for evaluation in run.evaluations:
            row = {name: getattr(run.header, name) for name in _RUN}
            row |= {name: getattr(evaluation, name) for name in EXPORTED}
            row["finished"] = run.end is not None
            recalls = zip(run.header.labels, evaluation.label_recall, strict=False)
            row |= {f"recall:{label}": recall for label, recall in recalls}
            found.append(row)
    return found


def as_csv(runs: Iterable[Run]) -> str:
    """Return the rows as CSV; a value that is not a number is left empty."""
    found = list(runs)
    out = io.StringIO()
    writer = csv.DictWriter(out, columns(found), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows(found))
    return out.getvalue()


@dataclass(frozen=True)
class ReportTable:
    """A table of text: a title, the names of its columns, and its rows."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


_WORST = ("bottom-decile accuracy", "tail recall")
_NAMES = ("final", "best", "mean_accuracy")


def tables(comparison: Comparison, *, full: bool = False) -> Iterator[ReportTable]:
    """Yield the tables of a comparison, for each task and setting in turn.

    First the methods, then the differences to each base that ran there with another method, then
    the figures of gists.

    Parameters
    ----------
    comparison : Comparison
        What `compare` returned.
    full : bool
        Also the accuracy of the worst devices, the recall of rare labels, and the recall of every
        label.
    """
    groups: dict[str, list[Row]] = {}
    for row in comparison.rows:
        groups.setdefault(f"{row.task}, {row.setting}" if row.setting else row.task, []).append(row)
    for title, rows in groups.items():
        yield _of_methods(title, rows)
        if full:
            yield from _of_devices_and_labels(title, rows)
        for place, base in enumerate(comparison.bases):
            yield from _of_differences(f"{title}: against {base}", rows, place)
        yield from _of_gists(f"{title}: what the gist did", rows)


def _of_methods(title: str, rows: Sequence[Row]) -> ReportTable:
    measure = measure_name(rows)
    errors = [name for name in ERRORS if any(name in row.errors for row in rows)]
    columns = ("method", "seeds", f"final {measure}", "best", f"mean {measure}")
    values = []
    for row in rows:
        seeds = str(row.seeds) if row.finished == row.seeds else f"{row.finished} of {row.seeds}"
        figures = (_figure(row.measures[name], _PERCENT) for name in _NAMES)
        off = (_number(row.errors.get(name)) for name in errors)
        values.append((row.method, seeds, *figures, *off))
    return ReportTable(title, (*columns, *map(str.upper, errors)), tuple(values))


def measure_name(rows: Sequence[Row]) -> str:
    """Return what runs are judged by: accuracy, or R2 where targets are numbers.

    >>> measure_name([])
    'accuracy'
    """
    return "R2" if any(row.measure == "r2" for row in rows) else "accuracy"


def _number(found: MeanOverSeeds | None) -> str:
    """Return a mean in units of its own, with its interval."""
    if found is None:
        return "-"
    half = "" if found.half_width is None else f" ± {found.half_width:.2g}"
    return f"{found.mean:.4g}{half}"


def _of_devices_and_labels(title: str, rows: Sequence[Row]) -> Iterator[ReportTable]:
    if all(row.worst_devices is not None or row.tail_recall is not None for row in rows):
        numbers = measure_name(rows) == "R2"
        named = ("bottom-decile R2", "tail R2") if numbers else _WORST
        columns = ("method", *named)
        values = [(row.method, _known(row.worst_devices), _known(row.tail_recall)) for row in rows]
        rare = "rare intervals" if numbers else "rare labels"
        yield ReportTable(f"{title}: worst devices and {rare}", columns, tuple(values))
    labels = dict.fromkeys(label for row in rows for label in row.recalls)
    if labels:
        found = [(label, *(_known(row.recalls.get(label)) for row in rows)) for label in labels]
        methods = tuple(row.method for row in rows)
        of_each = ("recall", "label") if measure_name(rows) == "accuracy" else ("R2", "interval")
        heading = f"{title}: {of_each[0]} of each {of_each[1]}"
        yield ReportTable(heading, (of_each[1], *methods), tuple(found))


def _of_differences(title: str, rows: Sequence[Row], place: int) -> Iterator[ReportTable]:
    columns = ("method", "verdict", "final", "best", f"mean {measure_name(rows)}", "speedup")
    compared = []
    for row in rows:
        found = row.differences[place]
        if found is not None:
            points = (_figure(found[name], _POINTS) for name in _NAMES)
            speedup = _speedup(row.ratios[place])
            compared.append((row.method, found["final"].verdict, *points, speedup))
    if compared:
        yield ReportTable(title, columns, tuple(compared))


def _of_gists(title: str, rows: Sequence[Row]) -> Iterator[ReportTable]:
    columns = (
        "method",
        "correction weight",
        "gradient correlation",
        "effective samples",
        "correction norm",
    )
    gists = []
    for row in (row for row in rows if row.gist):
        weight, correlation, norm = (
            _figure(row.gist[name], _PERCENT) for name in ("trust", "likeness", "reach")
        )
        samples = f"{row.gist['worth'].mean:.1f}"
        gists.append((row.method, weight, correlation, samples, norm))
    if gists:
        yield ReportTable(title, columns, tuple(gists))


def _known(found: MeanOverSeeds | None) -> str:
    return "-" if found is None else _figure(found, _PERCENT)


def as_text(table: ReportTable, width: int | None = None) -> str:
    """Return a table as plain text that keeps every number, whatever the width.

    Parameters
    ----------
    table : ReportTable
        The table.
    width : int, optional
        Columns of the terminal; None: no limit, as in a file. A table that does not fit has one
        value a line, under the name of its row.

    Examples
    --------
    >>> table = ReportTable("toy", ("method", "final"), (("fifo", "88.12 %"), ("ode", "9.00 %")))
    >>> print(as_text(table))
    toy
    method    final
    fifo    88.12 %
    ode      9.00 %
    >>> print(as_text(table, width=12))
    toy
    fifo
      final  88.12 %
    ode
      final  9.00 %
    """
    lines = [table.columns, *table.rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if width is None or sum(widths) + 2 * (len(widths) - 1) <= width:
        body = [
            "  ".join(
                cell.rjust(size) if place else cell.ljust(size)
                for place, (cell, size) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        return "\n".join([table.title, *body])
    names = table.columns[1:]
    longest = max(map(len, names))
    stacked = [table.title]
    for first, *values in table.rows:
        stacked.append(first)
        pairs = zip(names, values, strict=True)
        stacked += [f"  {name.ljust(longest)}  {value}" for name, value in pairs]
    return "\n".join(stacked)


def latex(comparison: Comparison) -> str:
    """Return all tables with all columns as LaTeX, for the package booktabs."""
    parts = []
    for table in tables(comparison, full=True):
        layout = "l" + "r" * (len(table.columns) - 1)
        lines = [" & ".join(map(_latex, line)) + r" \\" for line in (table.columns, *table.rows)]
        parts.append(
            "\n".join(
                [
                    r"\begin{table}",
                    rf"\caption{{{_latex(table.title)}}}",
                    rf"\begin{{tabular}}{{{layout}}}",
                    r"\toprule",
                    lines[0],
                    r"\midrule",
                    *lines[1:],
                    r"\bottomrule",
                    r"\end{tabular}",
                    r"\end{table}",
                ]
            )
        )
    return "\n\n".join(parts) + "\n"


_LATEX = {
    "\\": r"\textbackslash{}", "±": r"$\pm$", "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}", **{mark: f"\\{mark}" for mark in "&%$#_{}"},
}  # fmt: skip


def _latex(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in " ".join(text.split()))


def _figure(found: MeanOverSeeds, form: str) -> str:
    half = "" if found.half_width is None else f" ± {100 * found.half_width:.2f}"
    return form.format(100 * found.mean) + half


def _speedup(ratio: Ratio) -> str:
    """Return "2.4x", with the number of seeds that got there unless all did; "-" if none did."""
    if ratio.value is None:
        return "-"
    all_reached = ratio.reached == ratio.seeds
    return f"{ratio.value:.2f}x" + ("" if all_reached else f" ({ratio.reached} of {ratio.seeds})")


def sentences(comparison: Comparison) -> list[str]:
    """Return a sentence a method: its final accuracy against the first base."""
    found_sentences = []
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
                f"against {base} is inconclusive{where} "
                f"({_figure(found, _POINTS)} points): {decides}"
            ),
        }
        found_sentences.append(f"{row.method} {words[found.verdict]}.")
    return found_sentences


def markdown(comparison: Comparison) -> str:
    """Return all tables, sentences and notes as Markdown."""
    parts = []
    for table in tables(comparison, full=True):
        lines = [table.columns, ("---",) + ("---:",) * (len(table.columns) - 1), *table.rows]
        body = "\n".join("| " + " | ".join(map(_escaped, line)) + " |" for line in lines)
        parts.append(f"### {_escaped(table.title)}\n\n{body}\n")
    for remarks in (sentences(comparison), comparison.notes):
        if remarks:
            parts.append("\n".join(f"- {_escaped(remark)}" for remark in remarks) + "\n")
    return "\n".join([*parts, explanation(comparison) + "\n"])


def _escaped(text: str) -> str:
    """Escape text for Markdown: names come from the record, which anybody may have written."""
    plain = " ".join(text.split())
    return plain.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "\\`")


def explanation(comparison: Comparison) -> str:
    """Return how to read the tables of a comparison."""
    numbers = measure_name(comparison.rows) == "R2"
    gist = any(row.gist for row in comparison.rows)
    return (_NUMBERS if numbers else "") + _METHODS + (_GIST if gist else "")


_NUMBERS = (
    "Targets are numbers: R2, the share of their variance that is predicted, stands for accuracy "
    "here and is what methods are judged by, higher is better; of one device or interval it is 1 - "
    "its MSE over the variance of all; below -1 it counts as -1. RMSE and MAE are those of the "
    "last evaluation, in the targets' units, lower is better. "
)
_METHODS = (
    "Seeds: finished, of those begun; means are over finished seeds where there are any. Final: "
    "the accuracy of the last evaluation. Best: the highest. Mean accuracy: over all rounds (the "
    "area under the curve). ±: 95 % interval over seeds "
    "(Student's t). Against a method: differences in points, paired by seed as far as both got; "
    "better or worse where the interval excludes 0, equivalent where it stays within a point, else "
    "inconclusive. Speedup: how many times fewer rounds the method needs to the mean of the "
    "other's last five evaluations, geometric mean over the seeds that got there, '-' when none "
    "did."
)
_GIST = (
    " The gist, means over all participations: the correction weight beta, the correlation rho of "
    "a sample's gradients under the device's old model and the new, and its effective sample "
    "size; the correction norm is relative to the stored samples' gradient, the median over the "
    "run."
)
