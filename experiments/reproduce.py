"""Runs experiments, sums them up in experiments/results/, and writes RESULTS and all tables.

    python experiments/reproduce.py gist      the gist against FIFO and unlimited storage
    python experiments/reproduce.py arena     all methods on all tasks, each at its own rate
    python experiments/reproduce.py choice    the stores that the default was chosen from
    python experiments/reproduce.py sketch    the gist as a sketch against the whole one
    python experiments/reproduce.py labels    labels that come later, or never
    python experiments/reproduce.py helps     wrong labels, drift, dropouts, one at a time
    python experiments/reproduce.py bytes     accuracy against bytes at rest
    python experiments/reproduce.py paper     the paper's tasks at their full scale
    python experiments/reproduce.py a         the paper: Table 2, ablations, claims, theory, Table 3
    python experiments/reproduce.py robustness  the paper: epochs, participation, stores and more
    python experiments/reproduce.py rest      the paper: motivation, the authors' settings
    python experiments/reproduce.py report    runs nothing: writes RESULTS and all tables
    python experiments/reproduce.py --quick   everything, tiny, into runs/quick

The first seven are suites (suites/*.toml). Their runs are kept in results/curves by the hash of
their settings, so that none is made twice, whichever suite asks, and a call continues where an
earlier one stopped; each line says how many runs are left and how long they will take.
`--backend ray` spreads them over a Ray cluster. `--minutes` bounds a call, `--estimate` lists what
is lacking, `--tasks` and `--methods` choose, `--again` drops a method's runs.

The paper's tiers run again, at the scale of the committed results, what has been run before.
`--full` takes the files as they are, which is days of work, and `--set` changes them otherwise.
With `--add`, of what the results hold only runs whose settings have changed since are made again.
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from lab.curves import (
    Curves,
    ExperimentSummary,
    curve_of,
    evaluation_labels,
    read_summary,
    write_summary,
)
from lab.document import write_results
from lab.findings import write_tables
from lab.readme import write_pages
from lab.suite import estimated, in_minutes, read_suite, recount, run_suite

from fedkeep.config.experiment import Experiment, expand, override, read_experiment
from fedkeep.core.errors import DataError
from fedkeep.records import Run, read_run
from fedkeep.records.runs import versions
from fedkeep.sim.runner import play, record_path
from fedkeep.sim.sweep import run_sweep
from fedkeep.tables import Table

HERE = Path(__file__).parent
TIERS: dict[str, tuple[str, ...]] = {
    "a": ("table2", "ablation", "simplified"),
    "robustness": ("robustness",),
    "rest": ("motivation", "authors"),
}
SUITES = ("gist", "arena", "choice", "sketch", "helps", "labels", "bytes", "paper")
"""Products of tasks and methods, `suites/NAME.toml`; their runs are kept in results/curves."""
SCRIPTS = ("claims", "theory", "table3", "steps")
"""What is measured by a separate program, in tier A."""
SHORTENED = ("motivation/", "authors/", "robustness/")
"""Folders of which a quick run plays one method a file: their methods run elsewhere too."""
TINY: dict[str, Table] = {
    "synthetic": {"devices": 10, "smallest": 60, "largest": 80},
    "traffic": {"samples": 1000},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "tier", nargs="?", choices=[*TIERS, *SUITES, "report"], help="which experiments"
    )
    parser.add_argument("--quick", action="store_true", help="all tiers, tiny")
    parser.add_argument(
        "--full", action="store_true", help="as the files say, not at the committed results' scale"
    )
    parser.add_argument(
        "--only", default="", help="the paper's experiments whose name has this in it"
    )
    parser.add_argument("--tasks", nargs="*", default=[], help="a suite on these tasks alone")
    parser.add_argument("--methods", nargs="*", default=[], help="these methods alone")
    parser.add_argument("--seeds", nargs="*", type=int, default=[], help="these seeds alone")
    parser.add_argument(
        "--add", action="store_true", help="let stand what results/ has with the same settings"
    )
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument(
        "--minutes", type=float, help="stop a suite after so long; the same command goes on"
    )
    parser.add_argument(
        "--estimate", action="store_true", help="only say what a suite lacks and what it takes"
    )
    parser.add_argument(
        "--again", nargs="*", default=[], help="forget a suite's runs of these methods first"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--backend",
        choices=("local", "ray"),
        default="local",
        help="where the runs are made: here, or on a Ray cluster",
    )
    parser.add_argument("--out", type=Path, default=Path("runs"), help="where the records go")
    options = parser.parse_args()
    if options.quick:
        run_quickly(options.out / "quick", options.only)
        return
    chosen = [options.tier] if options.tier else [*TIERS]
    for path in files([tier for tier in chosen if tier in TIERS], options.only):
        run_one(path, options)
    for name in [name for name in chosen if name in SUITES]:
        run_one_suite(name, options)
    if options.estimate:
        return
    results = HERE / "results"
    if options.tier == "a" and not options.only:
        run_scripts(results, quick=False)
    write_tables(HERE, Curves(results / "curves"), results)
    write_results(HERE, results, HERE)
    write_pages(HERE.parent, HERE, results)


def files(tiers: Sequence[str], only: str) -> list[Path]:
    """The experiment files of these tiers, by name."""
    found = [
        path
        for tier in tiers
        for folder in TIERS[tier]
        for path in sorted((HERE / folder).glob("*.toml"))
    ]
    return [path for path in found if only in name_of(path)]


def name_of(path: Path) -> str:
    return path.relative_to(HERE).with_suffix("").as_posix()


def run_one(path: Path, options: argparse.Namespace) -> None:
    """One experiment: its estimate, its runs, its summary."""
    name = name_of(path)
    print(f"{name}: {about(path)}", flush=True)
    summary_path = HERE / "results" / f"{name}.json"
    before = read_summary(summary_path) if summary_path.exists() else None
    settings: list[str] = options.settings or (
        list(before.changed) if before and not options.full else []
    )
    cells = expand(override(read_experiment(path), settings))
    stands = before.curves if before and options.add and before.versions == versions() else ()
    curves = {curve.config_hash: curve for curve in stands if curve.finished}
    chosen = [
        cell
        for cell in cells
        if cell.experiment.digest() not in curves
        and cell.experiment.label in (options.methods or [cell.experiment.label])
        and cell.experiment.seed in (options.seeds or [cell.experiment.seed])
    ]
    if not chosen:
        return
    by_seed = sorted(
        chosen, key=lambda cell: cell.experiment.seed
    )  # so that runs share the data last loaded
    directory = options.out / name

    began, ended = time.monotonic(), set[int]()

    def tell(cell: int, round_: int, accuracy: float | None) -> None:
        if round_ == by_seed[cell].experiment.train.rounds:
            ended.add(cell)
            left = (time.monotonic() - began) / len(ended) * (len(by_seed) - len(ended))
            progress = f"{len(ended)} of {len(by_seed)}, {in_minutes(left)} left"
            print(f"  [{progress}] {by_seed[cell].name}: {accuracy or 0:.1%}", flush=True)

    run_sweep(
        by_seed, directory, jobs=options.jobs, resume=True, listen=tell, backend=options.backend
    )
    ran = [(read_run(record_path(cell, directory)), cell.experiment) for cell in chosen]
    summary = summarise(path, ran, settings)
    curves |= {curve.config_hash: curve for curve in summary.curves}
    digests = [cell.experiment.digest() for cell in cells]
    ordered = tuple(curves[digest] for digest in digests if digest in curves)
    write_summary(summary_path, msgspec.structs.replace(summary, curves=ordered))


def summarise(
    path: Path, runs: Sequence[tuple[Run, Experiment]], settings: Sequence[str]
) -> ExperimentSummary:
    """The runs of an experiment's file, what was set otherwise than in it, and how to make them."""
    name, header = name_of(path), runs[0][0].header
    by_seed = sorted(runs, key=lambda pair: pair[1].seed)  # so that data is loaded once a seed
    curves = {id(run): curve_of(run, evaluation_labels(experiment)) for run, experiment in by_seed}
    changes = (part for setting in settings for part in ("--set", setting))
    return ExperimentSummary(
        experiment=name,
        about=about(path),
        task=header.task,
        command=shlex.join(["fedkeep", "run", f"experiments/{name}.toml", *changes]),
        versions=header.versions,
        changed=tuple(settings),
        curves=tuple(curves[id(run)] for run, _ in runs),
    )


def run_one_suite(name: str, options: argparse.Namespace) -> None:
    """A suite, as far as the time goes."""
    suite = read_suite(HERE / "suites" / f"{name}.toml").only(options.tasks, options.methods)
    curves = Curves(HERE / "results" / "curves")
    if options.again:
        curves.keep(lambda curve: curve.method not in options.again)
    if options.estimate:
        for line in estimated(suite, curves):
            print(line, flush=True)
        return
    run_suite(
        suite,
        curves,
        options.out / "curves",
        jobs=options.jobs,
        minutes=options.minutes,
        backend=options.backend,
    )
    if name == "bytes":
        print(f"bytes at rest counted anew: {recount(suite, curves)} runs changed", flush=True)


def about(path: Path) -> str:
    """The comment that the file begins with."""
    return path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")


def run_quickly(out: Path, only: str) -> None:
    """Every experiment with two rounds, one seed and the first value of each sweep."""
    results = out / "results"
    absent: set[str] = set()
    for path in files([*TIERS], only):
        table = read_experiment(path)
        if table["task"]["name"] in absent:
            continue
        name, kind = name_of(path), table["task"]["name"]
        settings = ["train.rounds=2", "record.every=2"]
        settings += [f"task.{key}={value}" for key, value in TINY.get(kind, {}).items()]
        table = override(table, settings)
        table["sweep"] = {key: values[:1] for key, values in table["sweep"].items()}
        if name.startswith(SHORTENED):
            shown = next(
                (method for method in table["methods"] if method.startswith("ode")), "fifo"
            )
            table["methods"] = {shown: table["methods"][shown]}
        try:
            runs = [(read_run(play(cell, out / name)), cell.experiment) for cell in expand(table)]
        except DataError as error:
            absent.add(kind)
            print(f"without {kind}: {error}", flush=True)
            continue
        write_summary(results / f"{name}.json", summarise(path, runs, settings))
        print(f"{name}: {len(runs)} runs", flush=True)
    if not only:
        run_scripts(results, quick=True)
    curves = Curves(results / "curves")
    for name in [name for name in SUITES if only in name]:
        suite = read_suite(HERE / "suites" / f"{name}.toml").tiny(TINY, everywhere=name == "arena")
        run_suite(suite, curves, out / "curves", jobs=1, minutes=None)
    write_results(HERE, results, out)


def run_scripts(results: Path, *, quick: bool) -> None:
    """The programs that are no experiment file; each in a separate process."""
    for script in SCRIPTS:
        print(script, flush=True)
        call = [
            sys.executable,
            str(HERE / f"{script}.py"),
            "--out",
            str(results),
            *(["--quick"] if quick else []),
        ]
        subprocess.run(call, check=True)


if __name__ == "__main__":
    main()
