"""The committed results, summaries of experiments and figures of programs, and what the paper reports beside them."""

import json
import math
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedkeep.config import read_toml
from fedkeep.records.measures import Ratio, ratio
from fedkeep.records.versions import versions
from lab.curves import Curve, ExperimentSummary, read_summary
from lab.findings import Interval, finals

_TABLES = {"curves", "gist"}
"""Folders of the programmes, which have tables of their own."""


@dataclass(frozen=True)
class Paper:
    """The tables of `paper.toml`: no number of the paper is written anywhere else."""

    tables: dict[str, Any]
    causes: dict[str, str] = field(default_factory=dict)
    """Why a claim did not come out, as far as we found it out."""

    def of(self, table: str, quantity: str, row: str, column: str) -> float | None:
        """The paper's number in a table's row and column; None where it has none. A table may have a single row."""
        found = self.tables.get(table, {})
        values = found.get(quantity, {})
        values = values.get(row) if isinstance(values, dict) else values
        if values is None or column not in found.get("columns", ()):
            return None
        return float(values[found["columns"].index(column)])

    def claim(self, name: str) -> Any:
        return self.tables["claims"][name]


def read_paper(path: Path) -> Paper:
    """The paper's numbers in `path`, and the causes in `causes.toml` beside it."""
    return Paper(read_toml(path), read_toml(path.with_name("causes.toml")))


def write_figures(script: str, out: Path, figures: dict[str, Any]) -> None:
    """What a program measured, with the command and the versions that it was measured by."""
    said = {"command": shlex.join(["python", f"experiments/{script}.py", *sys.argv[1:]]), "versions": versions()}
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{script}.json").write_text(json.dumps(said | figures, indent=1) + "\n")


class Results:
    """What has been run so far, and what the paper says of it."""

    def __init__(self, directory: Path, paper: Paper) -> None:
        paths = sorted(p for p in directory.glob("*/*.json") if p.parent.name not in _TABLES)
        self.summaries: dict[str, ExperimentSummary] = {(s := read_summary(path)).experiment: s for path in paths}
        self.directory, self.paper = directory, paper
        self.figures: dict[str, dict[str, Any]] = {p.stem: json.loads(p.read_text()) for p in directory.glob("*.json")}

    def methods(self, experiment: str) -> list[str]:
        """The methods in the order of the experiment's file."""
        return list(dict.fromkeys(curve.method for curve in self.summaries[experiment].curves))

    def settings(self, experiment: str) -> list[str]:
        return list(dict.fromkeys(curve.setting for curve in self.summaries[experiment].curves))

    def runs(self, experiment: str, method: str, setting: str | None = None) -> dict[int, Curve]:
        """A method's runs by seed, in the first setting unless one is named; none of what did not run."""
        if experiment not in self.summaries:
            return {}
        chosen = self.settings(experiment)[:1] if setting is None else [setting]
        curves = self.summaries[experiment].curves
        return {c.seed: c for c in curves if c.method == method and c.setting in chosen and c.rounds}

    def accuracy(self, experiment: str, method: str, setting: str | None = None) -> Interval | None:
        """A method's final accuracy in percent; None where it did not run."""
        return finals(self.runs(experiment, method, setting))

    def speedup(self, experiment: str, method: str) -> Ratio:
        """How much sooner than FIFO a method gets to where FIFO ends."""
        own, fifo = ({s: c.evaluations for s, c in self.runs(experiment, m).items()} for m in (method, "fifo"))
        return ratio(own, "fifo", fifo)

    def margin(self, experiment: str, one: str, other: str) -> Interval | None:
        """How far `one` is ahead of `other`, over the seeds that ran with both; None where none did."""
        return finals(self.runs(experiment, one), self.runs(experiment, other))

    def pairs(self, folder: str, one: str, other: str) -> Iterator[tuple[str, Ratio, Interval]]:
        """The tasks of the folder where both ran: how much sooner than FIFO the one is, how far ahead of the other."""
        for name in self.summaries:
            if name.startswith(f"{folder}/") and (margin := self.margin(name, one, other)) is not None:
                yield name.removeprefix(f"{folder}/"), self.speedup(name, one), margin

    def measured(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The tasks of `claims.py`."""
        yield from self.figures.get("claims", {}).get("tasks", {}).items()

    def curves(self, experiment: str, setting: str) -> Iterator[tuple[str, list[tuple[float, float]]]]:
        """Every method's accuracy by round, in percent, the mean over its seeds."""
        for method in self.methods(experiment):
            if runs := self.runs(experiment, method, setting):
                yield method, mean_curve(list(runs.values()))


def mean_curve(curves: list[Curve]) -> list[tuple[float, float]]:
    """Accuracy by round in percent, the mean over runs, as far as all of them got."""
    heights = zip(*(curve.accuracy for curve in curves), strict=False)
    rounds = min((curve.rounds for curve in curves), key=len)
    return [(float(r), 100 * math.fsum(a or 0.0 for a in at) / len(at)) for r, at in zip(rounds, heights, strict=True)]
