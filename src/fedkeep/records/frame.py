"""Every evaluation of every run as one row: for pandas, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedkeep.core.errors import MissingExtraError
from fedkeep.records.reader import Run, read_runs

if TYPE_CHECKING:
    from pandas import DataFrame

_RUN = ("task", "setting", "method", "seed")
_EVALUATION = (
    "round", "accuracy", "loss", "samples_valued", "bytes_stored", "bytes_up", "bytes_down", "label_coverage",
    "store_turnover",
)  # fmt: skip


def frame(runs: Path | str | Iterable[Run]) -> DataFrame:
    """The runs, or those of a directory, as a pandas frame: one row an evaluation.

    `frame("runs/mine").pivot_table("accuracy", "round", "method")` has the mean curve of each method.
    """
    try:
        import pandas
    except ImportError:
        raise MissingExtraError("a pandas frame", "frame") from None
    found = read_runs(Path(runs)) if isinstance(runs, Path | str) else runs
    return pandas.DataFrame(rows(found), columns=[*_RUN, *_EVALUATION, "finished"])


def rows(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """One dictionary an evaluation."""
    return [
        {
            **{name: getattr(run.header, name) for name in _RUN},
            **{name: getattr(evaluation, name) for name in _EVALUATION},
            "finished": run.end is not None,
        }
        for run in runs
        for evaluation in run.evaluations
    ]


def as_csv(runs: Iterable[Run]) -> str:
    """The rows as CSV; an accuracy that is no number is left empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, [*_RUN, *_EVALUATION, "finished"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows(runs))
    return out.getvalue()
