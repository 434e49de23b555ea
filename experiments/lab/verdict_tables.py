"""Verdicts in README and pages, made from the results: no word of them is typed.

A method of the paper came back on a task where the 95 % interval of its lead over FIFO lies on the
paper's side of 0, and did not where it lies on the other side; else it is undecided.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedkeep.config.experiment import expand, override, read_experiment
from fedkeep.core.errors import FedkeepError
from lab.blocks import sheet
from lab.curves import ExperimentSummary
from lab.findings import LEVEL, SLIGHT, Interval, finals, in_words
from lab.results import UNEVEN, Paper, Results, verdicts

PAPER_TASKS = {
    "st": "ST",
    "ic": "IC",
    "har": "HAR",
    "har-balanced": "HAR, balanced",
    "tc": "TC",
}
"""Rows of Table 2 that pages show, with their titles."""


_PRINTED = {
    "high-loss": "HL",
    "gradient-norm": "GN",
    "fedbalancer": "FB",
    "sld": "SLD",
    "ode-exact": "ODE-Exact",
    "ode-est": "ODE-Est (Eq. 8)",
    "ode-est-participants": "ODE-Est (mean)",
    "full-data": "FD",
}
"""The methods of the paper's Table 2 that are compared with FIFO; of ODE-Est both estimates."""
_PARTS = {
    "global estimator: participants' mean over Eq. 8": (
        "table2",
        "ode-est-participants",
        "ode-est",
    ),
    "weights by client and label, over label weights alone": (
        "table2",
        "ode-est-client-label",
        "ode-est",
    ),
    "exact gradient and present model, over Eq. 8": ("table2", "ode-exact", "ode-est"),
    "last layer alone, over all layers": ("table2", "ode-simplified", "ode-est"),
    "filled devices, over the literal plan": ("table2", "ode-est", "ode-est-idle"),
    "our default, over ODE-Est": ("table2", "default", "ode-est"),
}
"""What a part gives: a folder of experiments, and two methods of it."""


def columns() -> Iterator[tuple[str, str, bool]]:
    """Tasks of the paper's tables with their titles, and whether their accuracy is pooled."""
    for task, title in PAPER_TASKS.items():
        yield task, title, False
        if task in UNEVEN:
            yield task, f"{title}, pooled", True


def lead(ours: Results, name: str, method: str, *, pooled: bool) -> Interval | None:
    """A method's lead over FIFO, by either accuracy; None where it was not run."""
    return ours.pooled_margin(name, method) if pooled else ours.margin(name, method, "fifo")


def is_outdated(summary: ExperimentSummary, experiments: Path) -> bool:
    """Whether no run of a summary is one of its experiment file as that is now."""
    path = experiments / f"{summary.experiment}.toml"
    try:
        cells = expand(override(read_experiment(path), list(summary.changed)))
    except FedkeepError:
        return True
    present = {cell.experiment.digest() for cell in cells}
    return not any(curve.config_hash in present for curve in summary.curves)


def came_back(
    ours: Results, paper: Paper, task: str, *, pooled: bool = False
) -> dict[str, list[str]]:
    """The paper's methods on a task by what became of their sign; empty without runs."""
    found: dict[str, list[str]] = {"came back": [], "undecided": [], "did not": []}
    name, base = f"table2/{task}", paper.of("table2", "accuracy", task, "fifo")
    if name not in ours.summaries or base is None:
        return {}
    for method, title in _PRINTED.items():
        printed = paper.of("table2", "accuracy", task, method)
        margin = lead(ours, name, method, pooled=pooled)
        if printed is not None and margin is not None:
            found[_verdict(margin, printed - base)].append(title)
    return found


def _verdict(margin: Interval, printed: float) -> str:
    """What became of a lead of the paper; one below half a point counts as level."""
    side = margin.ahead
    if abs(printed) < SLIGHT and abs(margin.mean) < LEVEL:
        return "came back"
    if side is None:
        return "undecided"
    return "came back" if abs(printed) >= SLIGHT and side is (printed > 0) else "did not"


def came_back_table(experiments: Path, results: Path) -> str:
    """Which signs of Table 2 came back, by task."""
    paper = Paper(experiments / "paper.toml")
    ours = Results(results, paper)
    rows: list[tuple[str, ...]] = []
    counts = Counter[str]()
    for task, name, pooled in columns():
        found = came_back(ours, paper, task, pooled=pooled)
        if pooled and not any(found.values()):
            continue
        if not found:
            rows.append((name, "not run", "", ""))
            continue
        outdated = is_outdated(ours.summaries[f"table2/{task}"], experiments)
        counts.update({verdict: len(methods) for verdict, methods in found.items()})
        title = name + (" (earlier settings)" if outdated else "")
        rows.append((title, *(", ".join(methods) or "none" for methods in found.values())))
    words = Counter(word for word, _ in verdicts(ours).values())
    signs = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    claims = ", ".join(f"{count} {word}" for word, count in words.most_common())
    table = sheet(("row", "came back", "undecided", "did not"), rows, numbers=False)
    return f"{table}\n\nSigns: {signs or 'none yet'}. Claims of the paper: {claims}."


def status_table(experiments: Path, results: Path) -> str:
    """Which rows of Table 2 are of the present settings."""
    ours = Results(results, Paper(experiments / "paper.toml"))
    groups: dict[str, list[str]] = {"not run": [], "of earlier settings": [], "present": []}
    for task, name in PAPER_TASKS.items():
        summary = ours.summaries.get(f"table2/{task}")
        outdated = summary is not None and is_outdated(summary, experiments)
        key = "not run" if summary is None else "of earlier settings" if outdated else "present"
        groups[key].append(name)
    told = "; ".join(f"{key}: {', '.join(tasks)}" for key, tasks in groups.items() if tasks)
    advice = (
        " Rows of earlier settings are preliminary: the data preparation or an option of the "
        "experiment has changed since they ran."
        if groups["of earlier settings"]
        else ""
    )
    return f"Rows of Table 2 by the experiment files as they are now: {told}.{advice}"


def parts_table(experiments: Path, results: Path) -> str:
    """What the parts of ODE give: differences in final accuracy, paired by seed."""
    ours = Results(results, Paper(experiments / "paper.toml"))
    rows = []
    for title, (folder, one, other) in _PARTS.items():
        cells = [_difference(ours, f"{folder}/{task}", one, other) for task in PAPER_TASKS]
        if any(cell != "not run" for cell in cells):
            rows.append((title, *cells))
    return sheet(("part", *PAPER_TASKS.values()), rows)


def _difference(ours: Results, name: str, one: str, other: str) -> str:
    if name not in ours.summaries:
        return "not run"
    margin = ours.margin(name, one, other)
    if margin is None:
        return "not run"
    words = in_words(margin, "+")
    return {True: f"**{words}**", False: words, None: f"({words})"}[margin.ahead]


def har_signs_table(experiments: Path, results: Path) -> str:
    """Leads over FIFO on HAR at what may explain them: longer steps, and clean labels."""
    ours = Results(results, Paper(experiments / "paper.toml"))
    columns: dict[str, tuple[str, str | None]] = {"as in Table 2": ("table2/har-balanced", None)}
    for name in ("robustness/har-rate", "robustness/har-noise"):
        if name in ours.summaries:
            columns |= {_setting_title(s): (name, s) for s in ours.settings(name)}
    rows = []
    for method, title in {"fifo": "FIFO", **_PRINTED}.items():
        cells = []
        for name, setting in columns.values():
            base = None if method == "fifo" else ours.runs(name, "fifo", setting)
            found = finals(ours.runs(name, method, setting), base)
            cells.append(in_words(found, "" if method == "fifo" else "+"))
        if any(cell != "not run" for cell in cells[1:]) or len(columns) == 1:
            rows.append((title, *cells))
    seeds = (len(ours.runs(name, "fifo", setting)) for name, setting in columns.values())
    heads = (f"{title}, {counted_seeds(n)}" for title, n in zip(columns, seeds, strict=True))
    return sheet(("method", *heads), rows)


def counted_seeds(count: int) -> str:
    """`1 seed`, `5 seeds`."""
    return "1 seed" if count == 1 else f"{count} seeds"


def _setting_title(setting: str) -> str:
    """A swept setting in words, as `learning rate 0.01`."""
    key, _, value = setting.partition("=")
    return f"{key.rpartition('.')[2].replace('_', ' ')} {value}"


def counts_table(arena: Mapping[str, Any], streams: Mapping[str, Mapping[str, str]]) -> str:
    """On how many streams each method is better than FIFO, each at its own rate."""
    methods = {
        "**gist-shared** (default)": "gist-shared",
        "gist-local": "gist-local",
        "balanced-fifo": "class-balanced-fifo",
        "ode-paper": "ode-est",
    }
    rows = []
    for group, tasks in streams.items():
        rows.append((group, *(_counted(arena, tasks, name) for name in methods.values())))
    return sheet(("streams", *methods), rows, numbers=False)


def _counted(arena: Mapping[str, Any], tasks: Mapping[str, str], method: str) -> str:
    found = Counter[bool | None]()
    for task in tasks:
        lead: Sequence[float | None] | None = arena.get(task, {}).get(method, {}).get("over_fifo")
        if lead is not None:
            found[Interval(lead[0] or 0.0, lead[1]).ahead] += 1
    if not found:
        return "not run"
    return f"better {found[True]}, undecided {found[None]}, worse {found[False]}"


def bytes_sentence(rows: Sequence[tuple[str, Sequence[Any], Sequence[Any]]]) -> str:
    """Who is ahead in no more bytes: rows of task, accuracy with a gist, accuracy without."""
    found = Counter(_ahead(gist, plain) for _, gist, plain in rows)
    if not found:
        return "No run by bytes is committed."
    return (
        f"{len(rows)} comparisons on {len({row[0] for row in rows})} tasks, each within the same "
        f"bytes: the best store with a gist is ahead in {found['gist']}, the best without one in "
        f"{found['plain']}, and in {found['level']} the intervals overlap."
    )


def _ahead(gist: Sequence[Any], plain: Sequence[Any]) -> str:
    gap = float(gist[0]) - float(plain[0])
    width = float(gist[1] or 0.0) + float(plain[1] or 0.0)
    if abs(gap) <= width:
        return "level"
    return "gist" if gap > 0 else "plain"


def read(path: Path) -> dict[str, Any]:
    """A file of results; empty where it is not there."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def reasons(experiments: Path, results: Path) -> Iterator[tuple[str, str]]:
    """The claims that came back in part or not at all, each with the cause as far as found."""
    paper = Paper(experiments / "paper.toml")
    for claim, (word, _) in verdicts(Results(results, paper)).items():
        if word in ("partly", "not reproduced"):
            yield f"{claim} ({word})", paper.causes.get(claim, "not examined")


def reasons_table(experiments: Path, results: Path) -> str:
    """What could not be brought back, and why we think so."""
    rows = list(reasons(experiments, results))
    if not rows:
        return "Every claim came back."
    return sheet(("not, or not wholly, brought back", "why we think so"), rows, numbers=False)
