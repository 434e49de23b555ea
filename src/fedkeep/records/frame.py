"""Every evaluation of every run as one row: for pandas, and as CSV."""

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedkeep.core.errors import needing
from fedkeep.records.runs import Run, read_runs

if TYPE_CHECKING:
    from pandas import DataFrame

_RUN = ("task", "setting", "method", "seed")
EVALUATED = (
    "round", "accuracy", "loss", "samples_valued", "bytes_stored", "bytes_up", "bytes_down", "label_coverage",
    "store_turnover",
)  # fmt: skip
"""What tables and curves have of an evaluation."""


def frame(runs: Path | str | Iterable[Run]) -> "DataFrame":
    """The runs, or those of a directory, as a pandas frame: one row an evaluation.

    `frame("runs/mine").pivot_table("accuracy", "round", "method")` has the mean curve of each method.

    >>> frame([]).columns.tolist()[:6]
    ['task', 'setting', 'method', 'seed', 'round', 'accuracy']
    """
    with needing("a pandas frame", "frame"):
        import pandas
    found = read_runs(Path(runs)) if isinstance(runs, Path | str) else runs
    return pandas.DataFrame(rows(found), columns=[*_RUN, *EVALUATED, "finished"])


def rows(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """One dictionary an evaluation."""
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
