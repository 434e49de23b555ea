"""RESULTS.md and RESULTS.html: every table of the paper with our numbers beside it, and what has not run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from fedkeep.config import read_experiment
from fedkeep.core.errors import DataError
from lab.blocks import Block, Heading, Picture, Sheet, Text, html, markdown
from lab.charts import line_chart
from lab.choosing import choosing
from lab.curves import Curves
from lab.findings import Findings
from lab.opening import arena_tables, opening, sweeps
from lab.paper import Paper, read_paper
from lab.programme import read_programme
from lab.programs import programs
from lab.results import Results, Shown
from lab.verdicts import ClaimVerdict, verdicts

TITLE = "fedkeep: the paper's evidence, run again"
_FOLDERS = {
    "table2": "Table 2: training speedup and final accuracy",
    "authors": "Table 2 as the authors' code runs it",
    "ablation": "Ablations",
    "simplified": "Simplified ODE",
    "motivation": "Motivation",
}
_INTRODUCTION = (
    "Written by `python experiments/reproduce.py report` from `experiments/results/` and `experiments/paper.toml`; "
    "nothing here is typed by hand. Accuracy is the mean over seeds of the mean of the last five evaluations, in "
    "percent, ± half of its 95 % interval (Student's t). 'Over FIFO' is the mean difference seed by seed with its "
    "interval: both methods saw the same data in the same order, so it tells more than the two intervals apart. "
    "Speedup is rounds FIFO needs to its own final accuracy over rounds the method needs to that, the geometric mean "
    "over the seeds that got there ('-': none did). In brackets what the paper reports. 'Paper' settings and where "
    "they come from: docs/deviations.md; what it all means: docs/findings.md."
)


def write_results(experiments: Path, results: Path, out: Path) -> tuple[Path, Path]:
    """Writes RESULTS.md with its pictures, and RESULTS.html, into `out`; returns both paths."""
    paper, found = read_paper(experiments / "paper.toml"), Results(results)
    blocks = [*_document(experiments, found, paper)]
    pictures = results / "plots"
    try:
        pictures.mkdir(parents=True, exist_ok=True)
        for old in pictures.glob("*.svg"):
            old.unlink()
        for block in blocks:
            if isinstance(block, Picture):
                (pictures / f"{block.name}.svg").write_text(block.svg, encoding="utf-8")
        page, text = out / "RESULTS.html", out / "RESULTS.md"
        text.write_text(markdown(blocks, pictures.relative_to(out).as_posix()), encoding="utf-8")
        page.write_text(html(blocks, TITLE), encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot write the results to {out}: {error.strerror}") from error
    return text, page


def _document(experiments: Path, results: Results, paper: Paper) -> Iterator[Block]:
    yield Heading(TITLE, 1)
    arena = Findings(read_programme(experiments / "programmes" / "arena.toml"), Curves(results.directory / "curves"))
    yield from opening(results.figures, arena)
    yield Heading("When it helps")
    yield Text("Accuracy and, in brackets, the lead over FIFO; one condition at a time.")
    yield from sweeps(results.figures.get("helps", {}))
    yield Heading("How the default was chosen")
    yield from choosing(results.figures.get("choice", {}))
    yield Heading("The paper's tasks at their own scale")
    yield from arena_tables(results.figures.get("paper", {}))
    yield Heading("The paper's claims")
    yield Text(_INTRODUCTION)
    rows = tuple((v.claim, v.word, v.because, _cause(v, paper)) for v in verdicts(results, paper))
    yield Sheet(("claim", "verdict", "numbers", "cause, where found"), rows, numbers=False)
    for folder, title in _FOLDERS.items():
        yield Heading(title)
        yield from _folder(experiments, folder, results, paper)
    yield from programs(results, paper)
    yield Heading("Machine and versions")
    yield from _machines(results)


def _cause(verdict: ClaimVerdict, paper: Paper) -> str:
    settled = verdict.word in {"reproduced", "not run yet"}
    return "" if settled else paper.causes.get(verdict.claim, "")


def _folder(experiments: Path, folder: str, results: Results, paper: Paper) -> Iterator[Block]:
    names = [f"{folder}/{path.stem}" for path in sorted((experiments / folder).glob("*.toml"))]
    if folder in paper.tables:
        yield Text(f"The paper's numbers: {paper.source(folder)}.")
    for name in names:
        if results.has(name):
            yield from _experiment(name, results, paper, _left_out(experiments, name, results))
    missing = [name for name in names if not results.has(name)]
    if missing:
        listed = ", ".join(f"`experiments/{name}.toml`" for name in missing)
        yield Text(f"Not run yet: {listed}.")


def _left_out(experiments: Path, name: str, results: Results) -> list[str]:
    """The methods of an experiment's file that did not run."""
    ran = results.methods(name)
    return [method for method in read_experiment(experiments / f"{name}.toml")["methods"] if method not in ran]


def _experiment(name: str, results: Results, paper: Paper, left_out: list[str]) -> Iterator[Block]:
    summary = results.summaries[name]
    settings = results.settings(name)
    yield Heading(name, 3)
    yield Text(summary.about)
    yield Sheet(
        ("method", *(_short(s) or "accuracy" for s in settings), *_speed_columns(settings)), _rows(name, results, paper)
    )
    missing = f"; not run: {', '.join(left_out)}" if left_out else ""
    yield Text(f"Made by `{summary.command}`; {_scale(name, results)}{missing}.")
    yield _picture(name, settings, results)


def _picture(name: str, settings: list[str], results: Results) -> Picture:
    """Accuracy by round; of a sweep over one number, the final accuracy by that number."""
    key = settings[0].partition("=")[0]
    swept = {s: float(s.partition("=")[2]) for s in settings if " " not in s and "=" in s}
    if len(settings) > 1 and len(swept) == len(settings):
        series = {
            method: [(x, shown.mean) for s, x in swept.items() if (shown := results.shown(name, method, s)) is not None]
            for method in results.methods(name)
        }
        across = key.rpartition(".")[2].replace("_", " ")
    else:
        series = {
            f"{method} {_short(setting)}".strip(): points
            for setting in settings
            for method, points in results.curves(name, setting)
        }
        across = "round"
    chart = line_chart(f"{name}: accuracy by {across}", series, across, "accuracy, %")
    return Picture(name.replace("/", "-"), chart, f"accuracy by {across} of every method of {name}")


def _speed_columns(settings: list[str]) -> tuple[str, ...]:
    return ("over FIFO", "speedup") if len(settings) == 1 else ()


def _rows(name: str, results: Results, paper: Paper) -> tuple[tuple[str, ...], ...]:
    folder, _, task = name.partition("/")
    settings = results.settings(name)
    rows = []
    for method in results.methods(name):
        cells = [method]
        printed = _of(paper, folder, "accuracy", task, method)
        cells += [_accuracy(results.shown(name, method, setting), printed) for setting in settings]
        if len(settings) == 1:
            margin = results.margin(name, method, "fifo") if method != "fifo" else None
            cells.append("" if margin is None else str(margin))
            cells.append(_speedup(results.shown(name, method), _of(paper, folder, "speedup", task, method)))
        rows.append(tuple(cells))
    return tuple(rows)


def _of(paper: Paper, folder: str, quantity: str, task: str, method: str) -> float | None:
    table = "table2" if folder in {"table2", "authors"} else folder
    if table == "simplified":
        columns = paper.tables[table]["columns"]
        return paper.tables[table][quantity][columns.index(method)] if method in columns else None
    return paper.of(table, quantity, task, method) if table in paper.tables else None


def _accuracy(shown: Shown | None, printed: float | None) -> str:
    if shown is None:
        return "not run"
    interval = "" if shown.half_width is None else f" ± {shown.half_width:.1f}"
    return f"{shown.mean:.1f}{interval}" + ("" if printed is None else f" ({printed:g})")


def _speedup(shown: Shown | None, printed: float | None) -> str:
    ours = "-" if shown is None or shown.speedup is None else f"{shown.speedup:.2f}x"
    if shown is not None and 0 < shown.reached < shown.seeds:
        ours += f" [{shown.reached} of {shown.seeds} seeds]"
    return ours + ("" if printed is None else f" ({printed:.2f}x)" if printed else " (-)")


def _short(setting: str) -> str:
    """`storage.capacity=5` as `capacity 5`."""
    return " ".join(_shortened(part) for part in setting.split())


def _shortened(part: str) -> str:
    key, _, value = part.partition("=")
    return f"{key.rpartition('.')[2]} {value}".strip()


def _scale(name: str, results: Results) -> str:
    """How much was run, so that nobody takes a reduced run for a full one."""
    summary = results.summaries[name]
    seeds = {curve.seed for curve in summary.curves}
    rounds = sorted({curve.planned for curve in summary.curves})
    changed = [s for s in summary.changed if not s.startswith(("seed", "sweep.seed"))]
    reduced = f"; reduced: {', '.join(changed)}" if changed else ""
    unfinished = sum(not curve.finished for curve in summary.curves)
    short = f"; {unfinished} runs unfinished" if unfinished else ""
    fewer = "".join(
        f"; {method} only with {', '.join(map(str, sorted(own)))}"
        for method, own in results.seeds(name).items()
        if own < seeds
    )
    return f"seeds {', '.join(map(str, sorted(seeds)))}{fewer}; {', '.join(map(str, rounds))} rounds{reduced}{short}"


def _machines(results: Results) -> Iterable[Block]:
    found = {_versions(s.versions) for s in results.summaries.values()}
    found |= {_versions(figures["versions"]) for figures in results.figures.values() if "versions" in figures}
    return [Text(line) for line in sorted(found)]


def _versions(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
