"""What the runs of a suite show: means with intervals, paired differences, and their tables."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fedkeep.config.experiment import Experiment
from fedkeep.records.measures import interval, setbacks
from fedkeep.tables import Table
from lab.curves import Curve, Curves, forward_passes, mean_of
from lab.suite import Contest, Suite, read_suite

FIFO, BALANCED, UNLIMITED = "fifo", "class-balanced-fifo", "full-data"
GISTS = ("gist-local", "gist-shared")
LEVEL, SLIGHT = 1.0, 0.5
"""Points of accuracy within which two methods count as level, and a gap as none."""


class Interval(NamedTuple):
    """A mean over seeds and half of its 95 % interval (None of one seed); in JSON a pair."""

    mean: float
    half_width: float | None

    @property
    def ahead(self) -> bool | None:
        """Whether a difference is above 0; None where the interval holds 0 (undecided)."""
        return (
            None if self.half_width is None or abs(self.mean) <= self.half_width else self.mean > 0
        )

    @property
    def keeps_up(self) -> bool | None:
        """Whether a difference surely loses less than a point; None where that is undecided."""
        if self.half_width is not None and self.mean - self.half_width > -LEVEL:
            return True
        return False if self.ahead is False else None

    def __str__(self) -> str:
        return in_words(self, "+")


@dataclass(frozen=True)
class Findings:
    """The finished runs of a suite, as far as they were made."""

    suite: Suite
    curves: Curves

    def tasks(self) -> list[str]:
        """Those that a stage names, in the order of the file, which has ordered streams first."""
        named = {task for stage in self.suite.stages for task in stage.tasks}
        return [task for task in self.suite.tasks if task in named]

    def methods(self, task: str) -> list[str]:
        return list(
            dict.fromkeys(
                m for stage in self.suite.stages if task in stage.tasks for m in stage.methods
            )
        )

    def runs(self, row: Contest, rate: float | None = 1.0) -> dict[int, Curve]:
        """By seed, at this many times the task's rate; empty if the suite lacks the row."""
        if rate is None or row.task not in self.suite.tasks or row.method not in self.suite.methods:
            return {}
        seeds = sorted({seed for stage in self.suite.stages for seed in stage.seeds})
        wanted = self.suite.reported(row, rate, seeds)
        return {
            curve.seed: curve
            for run in wanted
            if (curve := self.curves.find(run.digest)) is not None
        }

    def ran(self) -> Iterator[tuple[Contest, dict[int, Curve]]]:
        """Every row of the stages that has runs at the task's rate."""
        rows = (row for stage in self.suite.stages for row in self.suite.rows(stage))
        yield from ((row, runs) for row in rows if (runs := self.runs(row)))

    def experiment(self, row: Contest) -> Experiment:
        """The row's settings, at any seed."""
        return self.suite.reported(row, 1.0, (0,))[0].cell.experiment


def finals(runs: Mapping[int, Curve], others: Mapping[int, Curve] | None = None) -> Interval | None:
    """The mean final accuracy, or the lead over `others` on common seeds; None without runs."""
    if others is None:
        known = [curve.final for curve in runs.values()]
    else:
        known = [
            runs[seed].final - others[seed].final for seed in sorted(runs.keys() & others.keys())
        ]
    return Interval(math.fsum(known) / len(known), interval(known)) if known else None


def pooled_finals(
    runs: Mapping[int, Curve], others: Mapping[int, Curve] | None = None
) -> Interval | None:
    """The same over all test samples, of the seeds whose runs kept that; None of none."""
    own = {seed: 100 * c.pooled for seed, c in runs.items() if c.pooled is not None}
    if others is not None:
        base = {seed: 100 * c.pooled for seed, c in others.items() if c.pooled is not None}
        own = {seed: own[seed] - base[seed] for seed in own.keys() & base.keys()}
    known = list(own.values())
    return Interval(math.fsum(known) / len(known), interval(known)) if known else None


def rounded(
    runs: Mapping[int, Curve], others: Mapping[int, Curve] | None = None
) -> Interval | None:
    """The same to two digits, as tables have it."""
    found = finals(runs, others)
    return found and Interval(round(found.mean, 2), found.half_width and round(found.half_width, 2))


def in_words(value: Sequence[float | None] | None, sign: str = "") -> str:
    """ "61.2 ± 0.8", or that it was not run."""
    if value is None:
        return "not run"
    return f"{value[0]:{sign}.1f}" + ("" if value[1] is None else f" ± {value[1]:.1f}")


def share_closed(fifo: float | None, method: float | None, unlimited: float | None) -> float | None:
    """The share of the distance from FIFO to unlimited storage covered; None without distance."""
    if fifo is None or method is None or unlimited is None or unlimited <= fifo:
        return None
    return round((method - fifo) / (unlimited - fifo), 3)


def write_tables(experiments: Path, curves: Curves, out: Path) -> None:
    """Writes what every suite ends in, as far as its runs were made, into the folder `out`."""
    tables = {
        "arena": arena,
        "paper": arena,
        "bytes": bytes_table,
        "helps": settings_table,
        "labels": settings_table,
        "choice": settings_table,
    }
    files = {name: experiments / "suites" / f"{name}.toml" for name in (*tables, "gist")}
    found = {name: Findings(read_suite(file), curves) for name, file in files.items()}
    for name, make in tables.items():
        write_table(out / f"{name}.json", make(found[name]))
    write_table(out / "tails.json", tails(found["arena"]))
    for task in found["gist"].tasks():
        write_table(out / "gist" / f"{task}.json", gist_rows(found["gist"], task))
    write_table(out / "gist" / "summary.json", gist_summary(found["gist"]))


def write_table(path: Path, table: Table) -> None:
    """One line a row, so that a change shows as a change; nothing where nothing has run."""
    if table:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_lines(table, "") + "\n", encoding="utf-8")


def _lines(value: Any, indent: str) -> str:
    if not isinstance(value, dict) or not any(isinstance(each, dict) for each in value.values()):
        return json.dumps(value)
    body = ",\n".join(
        f"{indent} {json.dumps(key)}: {_lines(each, indent + ' ')}" for key, each in value.items()
    )
    return f"{{\n{body}\n{indent}}}"


def arena(found: Findings) -> Table:
    """By task and method: accuracy at the task's rate and at its own, and the lead over FIFO."""
    table: Table = {}
    for row in (Contest(task, method) for task in found.tasks() for method in found.methods(task)):
        times = found.suite.own_rate(row, found.curves)
        shared, own = found.runs(row), found.runs(row, times)
        tested_first = found.runs(row._replace(setting=(("record.prequential", True),)))
        shown = own or shared or tested_first
        if not shown:
            continue
        fifo, experiment = Contest(row.task, FIFO), found.experiment(row)
        fifos_own = found.runs(fifo, found.suite.own_rate(fifo, found.curves))
        table.setdefault(row.task, {})[row.method] = {
            "own_rate": rounded(own),
            "shared_rate": rounded(shared),
            "rate": None if times is None else experiment.train.learning_rate * times,
            "seeds": len(shown),
            "over_fifo": rounded(own, fifos_own),
            "over_fifo_shared": rounded(shared, found.runs(fifo)),
            "rounds": max(curve.planned for curve in shown.values()),
            "worst_tenth": mean_of((curve.worst_tenth for curve in shown.values()), 2, 100),
            "rare_recall": mean_of((curve.rare_recall for curve in shown.values()), 2, 100),
            "prequential": mean_of((curve.prequential for curve in tested_first.values()), 2, 100),
            "forward_passes": mean_of(
                (forward_passes(experiment, curve) for curve in shown.values()), 2
            ),
        }
    return table


IN_TIME = ("-ordered", "-once", "-bursts", "-drift")
"""How the names of tasks end whose labels do not come evenly mixed."""


def tails(found: Findings) -> Table:
    """What means hide, by ordered task and method, at the task's rate.

    Accuracy of the worst tenth of the devices, recall of the rarest quarter of the labels (both of
    the last five evaluations, with intervals over seeds), and setbacks: the share of the rounds in
    which the model was more than a point worse than it had been, the rounds until it was as good
    again, and the deepest fall.
    """
    table: Table = {}
    for task in (task for task in found.tasks() if task.endswith(IN_TIME)):
        for method in found.methods(task):
            runs = found.runs(Contest(task, method)).values()
            if runs:
                table.setdefault(task, {})[method] = {
                    "worst_tenth": _spread([curve.worst_tenth for curve in runs]),
                    "rare_recall": _spread([curve.rare_recall for curve in runs]),
                    **_setbacks(list(runs)),
                    "seeds": len(runs),
                }
    return table


def _spread(values: Sequence[float | None]) -> Interval | None:
    """The mean in percent and its interval; None where a seed has none."""
    known = [100 * value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    half = interval(known)
    return Interval(round(math.fsum(known) / len(known), 2), half and round(half, 2))


def _setbacks(runs: Sequence[Curve]) -> Table:
    """Setbacks of all runs: how much time, how long each, how deep, and how many never ended."""
    each = [setbacks(curve.evaluations) for curve in runs]
    found = [setback for own in each for setback in own]
    lost = [
        math.fsum(setback.rounds for setback in own) / curve.planned
        for own, curve in zip(each, runs, strict=True)
    ]
    return {
        "below": round(100 * math.fsum(lost) / len(lost), 1),
        "recovery": mean_of([float(setback.rounds) for setback in found if setback.recovered], 1),
        "never": round(sum(not setback.recovered for setback in found) / len(runs), 2),
        "deepest": round(100 * max((setback.depth for setback in found), default=0.0), 1),
    }


def gist_rows(found: Findings, task: str) -> Table:
    """Every method of a task at every rate: finals of all seeds, and the lead over FIFO."""
    table: Table = {}
    for method in found.methods(task):
        for rate in found.suite.rates:
            if runs := found.runs(Contest(task, method), rate):
                row = _beside(runs, found.runs(Contest(task, FIFO), rate)) | {"seeds": list(runs)}
                row["finals"] = [round(curve.final, 2) for curve in runs.values()]
                table.setdefault(method, {})[f"{rate:.3g}"] = row
    return table


def _beside(runs: Mapping[int, Curve], fifo: Mapping[int, Curve]) -> Table:
    return {
        "accuracy": rounded(runs),
        "over_fifo": rounded(runs, fifo),
        "rounds": max(curve.planned for curve in runs.values()),
    }


def gist_summary(found: Findings) -> Table:
    """By task, at its rate and in percent; `gap_closed` is the better gist's share of the gap."""
    table: Table = {}
    for task in found.tasks():
        runs = {
            method: found.runs(Contest(task, method)).values()
            for method in (FIFO, UNLIMITED, *GISTS)
        }
        means = {
            method: mean_of((curve.final for curve in curves), 2) for method, curves in runs.items()
        }
        fifo, unlimited = means.pop(FIFO), means.pop(UNLIMITED)
        best = max((value for value in means.values() if value is not None), default=None)
        if best is not None:
            table[task] = {
                "fifo": fifo,
                **{method.replace("-", "_"): value for method, value in means.items()},
                "unlimited": unlimited,
                "gap_closed": share_closed(fifo, best, unlimited),
            }
    return table


def settings_table(found: Findings) -> Table:
    """By task, setting and method: accuracy at the task's rate, and the lead over FIFO."""
    table: Table = {}
    for row, runs in found.ran():
        place = table.setdefault(row.task, {}).setdefault(row.setting_name or "as it is", {})
        place[row.method] = _beside(runs, found.runs(row._replace(method=FIFO))) | {
            "seeds": len(runs)
        }
    return table


def bytes_table(found: Findings) -> Table:
    """By task and method: [bytes at rest, slots, accuracy, half interval], smallest first.

    Also the equivalent FIFO size: by slots under a gist, the smallest FIFO store that is as
    accurate; None where no size that was tried is.
    """
    table: Table = {}
    for row, runs in found.ran():
        at_rest = max(curve.bytes_at_rest for curve in runs.values())
        point = [at_rest, found.experiment(row).storage.capacity, *(rounded(runs) or ())]
        points = table.setdefault(row.task, {}).setdefault(row.method, [])
        if point not in points:  # two stages may ask for the same run
            points.append(point)
    for methods in table.values():
        equivalent: dict[str, dict[str, int | None]] = {m: {} for m in methods if "gist" in m}
        for method, slots, accuracy in (
            (m, point[1], point[2]) for m in equivalent for point in methods[m]
        ):
            enough = (point[1] for point in methods.get(FIFO, []) if point[2] >= accuracy)
            equivalent[method][str(slots)] = min(enough, default=None)
        methods["worth"] = equivalent
    return table
