"""One progress display for a whole sweep."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from fedkeep.sim.experiment import Cell
from fedkeep.sim.sweep import Listener


@contextmanager
def sweep_progress(cells: Sequence[Cell], console: Console) -> Iterator[Listener]:
    """A bar for all rounds and a line for the run heard of last; silent where nobody watches a terminal."""
    total = sum(cell.experiment.train.rounds for cell in cells)
    what, rounds = TextColumn("{task.description}"), TextColumn("rounds")
    columns = (what, BarColumn(), MofNCompleteColumn(), rounds, TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(f"{len(cells)} runs", total=total)
        done = [0] * len(cells)

        def listen(cell: int, round_: int, accuracy: float | None) -> None:
            done[cell] = round_
            reached = "" if accuracy is None else f" at {accuracy:.1%}"
            progress.update(bar, completed=sum(done), description=f"{cells[cell].name}{reached}")

        yield listen
        progress.update(bar, completed=total, description=f"{len(cells)} runs")


@contextmanager
def download_progress(console: Console) -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar for each file that is being downloaded."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        bars: dict[str, TaskID] = {}

        def tell(name: str, done: int, total: int | None) -> None:
            if name not in bars:
                bars[name] = progress.add_task(f"downloading {name}", total=total)
            progress.update(bars[name], completed=done, total=total)

        yield tell


def time_in_words(seconds: float) -> str:
    """A span of time as people say it.

    >>> time_in_words(0.2), time_in_words(200), time_in_words(9000)
    ('1 s', '3 min', '2.5 h')
    """
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 5400:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"
