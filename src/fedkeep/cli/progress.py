"""What is shown while something lasts: of a sweep, of downloads, of an advice."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich import progress as bars
from rich.console import Console

from fedkeep.sim.experiment import Cell
from fedkeep.sim.sweep import Listener

_WHAT = bars.TextColumn("{task.description}")


@contextmanager
def sweep_progress(cells: Sequence[Cell], console: Console) -> Iterator[Listener]:
    """A bar for all rounds and a line for the run heard of last; silent where nobody watches a terminal."""
    total = sum(cell.experiment.train.rounds for cell in cells)
    count = (bars.MofNCompleteColumn(), bars.TextColumn("rounds"))
    columns = (_WHAT, bars.BarColumn(), *count, bars.TimeRemainingColumn())
    with bars.Progress(*columns, console=console, disable=not console.is_terminal) as progress:
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
    columns = (_WHAT, bars.BarColumn(), bars.DownloadColumn(), bars.TimeRemainingColumn())
    with bars.Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        known: dict[str, bars.TaskID] = {}

        def tell(name: str, done: int, total: int | None) -> None:
            if name not in known:
                known[name] = progress.add_task(f"downloading {name}", total=total)
            progress.update(known[name], completed=done, total=total)

        yield tell


@contextmanager
def stage_progress() -> Iterator[Callable[[str, float, float], None]]:
    """A bar with the time left in a terminal; elsewhere a line a stage."""
    console = Console(stderr=True)
    columns = (bars.BarColumn(), bars.TextColumn("{task.percentage:3.0f} %"), _WHAT)
    with bars.Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=1.0)
        stages: set[str] = set()

        def tell(stage: str, share: float, seconds_left: float) -> None:
            words = f"{stage}, about {time_in_words(seconds_left)} left"
            progress.update(bar, completed=share, description=words)
            if stage not in stages and not console.is_terminal:
                console.print(words)
            stages.add(stage)

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
