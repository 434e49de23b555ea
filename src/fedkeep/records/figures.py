"""Figures of runs for a paper, by matplotlib (extra `plot`)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedkeep.core.errors import DataError, optional_import
from fedkeep.records.measures import estimate
from fedkeep.records.runs import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLES = ("-", "--", "-.", ":")
"""Lines differ by their style too, so that a print without colours stays legible."""


def accuracy_figure(runs: Sequence[Run], title: str | None = None) -> "Figure":
    """Draw the mean accuracy of each method over rounds, with its 95 % interval over seeds.

    Parameters
    ----------
    runs : sequence of Run
        Runs of one task and setting.
    title : str, optional
        By default the name of the task.

    Returns
    -------
    matplotlib.figure.Figure
        `savefig("name.pdf")` and `savefig("name.svg")` write vector graphics.

    Raises
    ------
    DataError
        If there is no evaluation, or the runs are of several tasks or settings.
    """
    with optional_import("a figure", "plot"):
        from matplotlib.figure import Figure
    groups = {(run.header.task, run.header.setting) for run in runs if run.evaluations}
    if len(groups) != 1:
        found = ", ".join(sorted(" ".join(group).strip() for group in groups)) or "none"
        raise DataError(f"a figure shows one task in one setting, the runs are of: {found}")
    ((task, setting),) = groups
    figure = Figure(figsize=(5.0, 3.4), layout="constrained")
    axes = figure.add_subplot()
    methods = dict.fromkeys(run.header.method for run in runs if run.evaluations)
    for place, method in enumerate(methods):
        curves = [
            {e.round: 100 * (e.accuracy or 0.0) for e in run.evaluations}
            for run in runs
            if run.header.method == method
        ]
        rounds = sorted(set.intersection(*map(set, curves)))
        means = [estimate([curve[round_] for curve in curves]) for round_ in rounds]
        centre = [found.mean for found in means]
        half = [found.half_width or 0.0 for found in means]
        low = [mean - width for mean, width in zip(centre, half, strict=True)]
        high = [mean + width for mean, width in zip(centre, half, strict=True)]
        style = _STYLES[place % len(_STYLES)]
        (line,) = axes.plot(rounds, centre, style, label=method, linewidth=1.4)
        axes.fill_between(rounds, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set_title(title if title is not None else " ".join(filter(None, (task, setting))))
    axes.set_xlabel("round")
    measures = {run.header.measure for run in runs}
    axes.set_ylabel("test R2 (%)" if "r2" in measures else "test accuracy (%)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure
