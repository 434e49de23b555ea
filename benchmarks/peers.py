"""Rounds of one task here, in Flower's simulation, pfl-research and fluke, in one run, in turns.

    python benchmarks/peers.py [--quick] [--pfl PYTHON] [--fluke PYTHON] [--table FILE]

All play the synthetic task with softmax regression, 20 devices, 10 of them a round, ten samples
each and the same epochs and rate, on one thread. Flower's simulation runs the same devices and
server (`flower_job.py`): the same arrivals, selection and training, with messages between them;
`lean` pulls replies every few milliseconds, `stock` uses Flower's own loop. pfl-research runs its
federated averaging (`pfl_job.py`) on ten samples a device that never change: less work than any row
of ours, which takes in the stream and selects besides. So does fluke's
(`fluke_job.py`). `PYTHON` is the interpreter of an environment with pfl, or fluke-fl, and torch.
Without them or Flower their rows are left out.

Times are medians of a round's. Processor time, where all runs in one process; wall time besides, as
Flower's actors are processes of their own. `--table` writes the rows into the page that has the
marks for them.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any

import numpy as np

from fedkeep.config.experiment import resolve
from fedkeep.sim.engine import Simulator

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.pages import write_between

DEVICES, PARTICIPANTS, CAPACITY = 20, 10, 10
OURS = {"fedkeep, FIFO": "fifo", "fedkeep, ODE": "ode", "fedkeep, default": None}
SCRIPTS = {"pfl-research": "pfl_job.py", "fluke": "fluke_job.py"}
Times = dict[str, list[float]]
"""Seconds of rounds, `processor` (if known) and `wall`."""


def table_of(policy: str | None) -> dict[str, Any]:
    """The experiment."""
    chosen = {} if policy is None else {"policy": {"name": policy}}
    return chosen | {
        "task": {"name": "synthetic", "devices": DEVICES},
        "storage": {"capacity": CAPACITY},
        "train": {"participation": PARTICIPANTS / DEVICES},
    }


def ours(simulator: Simulator, rounds: int) -> Times:
    """Rounds of ours."""
    times: Times = {"processor": [], "wall": []}
    for _ in range(rounds):
        worked, began = process_time(), perf_counter()
        simulator.play_round(evaluated=False)
        times["processor"].append(process_time() - worked)
        times["wall"].append(perf_counter() - began)
    return times


def elsewhere(script: str, python: str, rounds: int) -> Times:
    """Rounds of federated averaging by another framework, after a first one."""
    simulator = Simulator(resolve(table_of("fifo")))
    local, data = simulator.server.schedule.local(0), simulator.parts.data
    given: dict[str, Any] = {"devices": np.arange(DEVICES), "classes": data.labels}
    given |= {"participants": PARTICIPANTS, "epochs": local.epochs, "rate": local.learning_rate}
    for device in range(DEVICES):
        stored = data.train_batch(device).take(slice(CAPACITY))
        given |= {f"x{device}": stored.x, f"y{device}": stored.y}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "samples.npz"
        np.savez(path, **given)
        command = [python, str(Path(__file__).with_name(script)), str(path), str(rounds + 1)]
        plain = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(command, env=plain, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{script} failed under {python}: {done.stderr.strip()[-500:]}")
    times: Times = json.loads(done.stdout.splitlines()[-1])
    return times


def jobs(pythons: dict[str, str | None], *, quick: bool) -> dict[str, Callable[[], Times]]:
    """What can be measured here, by the name of its row."""
    rounds = 20 if quick else 60
    found: dict[str, Callable[[], Times]] = {}
    for name, policy in OURS.items():
        simulator = Simulator(resolve(table_of(policy)))
        ours(simulator, rounds)
        found[name] = lambda simulator=simulator: ours(simulator, rounds)  # type: ignore[misc]
    for name, python in pythons.items():
        if python is None:
            print(f"{name}: left out, as no interpreter that has it is given")
        else:
            found[f"{name}, federated averaging"] = partial(
                elsewhere, SCRIPTS[name], python, rounds
            )
    try:
        import flower_job  # type: ignore[import-not-found] # beside this script
    except ImportError as error:
        print(f"Flower: left out, {error}")
    else:
        lean, stock = 10 if quick else 30, 2 if quick else 3
        found["Flower's simulation, ODE, lean"] = lambda: {
            "wall": flower_job.flower(lean, stock=False)
        }
        found["Flower's simulation, ODE, stock"] = lambda: {
            "wall": flower_job.flower(stock, stock=True)
        }
    return found


def measure(pythons: dict[str, str | None], *, quick: bool) -> dict[str, dict[str, float]]:
    """The medians of all rows, in milliseconds, measured in turns."""
    seconds: dict[str, Times] = defaultdict(lambda: defaultdict(list))
    turns = 1 if quick else 3
    for turn in range(turns):
        for name, job in jobs(pythons, quick=quick).items():
            try:
                found = job()
            except RuntimeError as error:  # such as a simulation whose actors did not start in time
                print(f"{name}: left out, {error}", flush=True)
                continue
            for kind, times in found.items():
                seconds[name][kind] += times
            last = {kind: f"{1e3 * median(all_):.1f} ms" for kind, all_ in seconds[name].items()}
            print(f"turn {turn + 1} of {turns}  {name:36} {last}", flush=True)
    return {
        name: {kind: 1e3 * median(all_) for kind, all_ in times.items()}
        for name, times in seconds.items()
    }


def markdown(rows: dict[str, dict[str, float]]) -> str:
    """The table, each row beside our ODE."""
    base = rows["fedkeep, ODE"]
    lines = [
        "| | processor, ms a round | wall, ms a round | wall, over fedkeep with ODE |",
        "|---|---|---|---|",
    ]
    for name, times in rows.items():
        worked = f"{times['processor']:.1f}" if "processor" in times else "several processes"
        wall = times["wall"]
        lines.append(f"| {name} | {worked} | {wall:.1f} | {wall / base['wall']:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--quick", action="store_true", help="one turn of fewer rounds")
    parser.add_argument("--pfl", metavar="PYTHON", help="an interpreter that has pfl and torch")
    parser.add_argument("--fluke", metavar="PYTHON", help="an interpreter that has fluke and torch")
    parser.add_argument("--table", type=Path, help="put the table into this page")
    options = parser.parse_args()
    pythons = {"pfl-research": options.pfl, "fluke": options.fluke}
    rows = measure(pythons, quick=options.quick)
    print(markdown(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    if options.table:
        write_between(options.table, "peers", markdown(rows))


if __name__ == "__main__":
    main()
