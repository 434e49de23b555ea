"""What a kept sample costs the flash.

Bytes written to a block device, journal included, over those of the sample.

    python -m benchmarks.flash [--quick] [--json FILE]

Every sample is kept; while the store fills, and once it is full and each one replaces another.
Needs a loop mount, so it mostly means root; elsewhere it says so and measures nothing. Rates are
real: the quick form takes two minutes, the long one half an hour.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import astuple, dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

from benchmarks.block_device import block_device
from fedkeep.core.policy import ScoringContext, SelectionPolicy
from fedkeep.core.types import Batch, Scores

SHAPE, LABELS = (192,), 2
SAMPLE_BYTES = 4 * 192
_BUDGET = 1_500_000
_AT_ONCE = 6
"""Cases that run at the same time, each on a device of its own."""


@dataclass(frozen=True)
class Whatever(SelectionPolicy):
    """Keeps whatever comes, in the place of any sample of the older half."""

    def score(self, batch: Batch, view: ScoringContext) -> Scores:  # noqa: ARG002 - the port's
        """Rank by arrival and chance."""
        return view.arrival + view.capacity * view.uniform


@dataclass(frozen=True)
class Case:
    """One stream into one store."""

    rate: float
    full: bool
    answer_ms: int | None
    """How long senders wait for an answer; None: they await none."""
    sector: int | None

    @property
    def name(self) -> str:
        """What the case is called in tables."""
        state = "full" if self.full else "filling"
        awaited = "no answer" if self.answer_ms is None else f"answer in {self.answer_ms} ms"
        return f"{self.rate:g}/s, {state}, {awaited}, sector {self.sector or '-'}"


def cases(*, quick: bool) -> list[Case]:
    """Every rate with and without answers, with and without sectors."""
    rates = (1.0, 10.0, 100.0)
    return [
        Case(*parts)
        for parts in product(rates, (False, True), (None, 100, 10_000), (None, 512))
        if not quick or parts[2] != 100
    ]


def measure(*, quick: bool) -> dict[str, dict[str, float]] | None:
    """Run all cases, a few at a time; None where no device can be had."""
    found: dict[str, dict[str, float]] = {}
    waiting = cases(quick=quick)
    with tempfile.TemporaryDirectory() as name:
        with block_device(Path(name), "probe") as probe:
            if probe is None:
                print("flash: skipped, since no loop device can be mounted here (it takes root)")
                return None
        while waiting:
            batch, waiting = waiting[:_AT_ONCE], waiting[_AT_ONCE:]
            children = [_child(Path(name), case, quick=quick) for case in batch]
            for case, child in zip(batch, children, strict=True):
                output, _ = child.communicate()
                found[case.name] = json.loads(output.splitlines()[-1])
                print(f"{case.name:44} {_line(found[case.name])}", flush=True)
    return found


def _line(figures: dict[str, float]) -> str:
    parts = [f"{figures['device']:5.2f} x at the device", f"{figures['file']:5.2f} x to the file"]
    parts += [f"{figures['syncs_per_sample']:.3f} syncs", f"{figures['samples']:.0f} samples"]
    if figures["latest_answer"]:
        parts.append(f"latest answer {figures['latest_answer']:.1f} s")
    return ", ".join(parts)


def _child(folder: Path, case: Case, *, quick: bool) -> subprocess.Popen[str]:
    fields = json.dumps(astuple(case))
    command = [sys.executable, "-m", "benchmarks.flash", "--case", fields, "--folder", str(folder)]
    return subprocess.Popen(
        [*command, *(["--quick"] if quick else [])],
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        text=True,
    )


def run_case(folder: Path, case: Case, *, quick: bool) -> dict[str, float]:
    """One stream, at its rate, into an agent on a device of its own."""
    from fedkeep.agent.arrivals import Arrival
    from fedkeep.agent.assembly import assemble, parse_config

    # At one a second statistics are written every ten minutes: the long form sees them once.
    seconds = (40 if quick else 120) if case.rate > 1 else (60 if quick else 660)
    unique = "-".join(map(str, astuple(case)))
    with block_device(folder, unique) as device:
        assert device is not None
        config = parse_config(
            {
                "samples": {"shape": list(SHAPE), "labels": LABELS, "outlier": 0},
                "store": {
                    "path": str(device.mount / "s"),
                    # While it fills it must not become full.
                    "budget": _BUDGET
                    if case.full
                    else max(_BUDGET, int(rate_bytes(case, seconds))),
                    "commit_ms": case.answer_ms or 100,
                    **({"sector": case.sector} if case.sector else {}),
                },
            }
        )
        method = replace(config.method, policy=Whatever())
        agent = assemble(replace(config, method=method))
        agent.device.set_model(agent.device.learner.initial(0))
        rng, number, latest = np.random.default_rng(0), 0, [0.0]

        def offer(awaited: bool) -> None:
            nonlocal number
            number += 1
            came = time.monotonic()

            def answered(fate: str) -> None:
                assert fate in ("kept", "replaced"), fate
                latest[0] = max(latest[0], time.monotonic() - came)

            x = rng.standard_normal(SHAPE).astype(np.float32)
            told = answered if awaited else None
            agent.intake.offer(Arrival(x, number % LABELS, number, "bench", told), wait=True)

        if case.full:
            while len(agent.store) < agent.device.capacity:
                for _ in range(64):
                    offer(awaited=False)
                agent.step(0.0)
            while len(agent.intake):  # what is left of them is not part of what is measured
                agent.step(0.0)
        agent.commit()
        disk = agent.store.file.disk
        latest[0] = 0.0
        before, begun, file, syncs = number, device.written(), disk.block_bytes, disk.syncs
        start = time.monotonic()
        while (elapsed := time.monotonic() - start) < seconds:
            while number - before < elapsed * case.rate:
                offer(awaited=case.answer_ms is not None)
            agent.step(min(0.1, 1 / case.rate))
        agent.commit(whole=False)
        kept = number - before
        figures = {
            "device": (device.written() - begun) / kept / SAMPLE_BYTES,
            "file": (disk.block_bytes - file) / kept / SAMPLE_BYTES,
            "syncs_per_sample": (disk.syncs - syncs) / kept,
            "samples": float(kept),
            "latest_answer": latest[0],
        }
        disk.close()
    return figures


def rate_bytes(case: Case, seconds: float) -> float:
    """Bytes of a store that takes all of a stream."""
    return 600_000 + case.rate * seconds * 1500


def main() -> None:
    """Measure all cases, or one for the process that does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer cases, for less time")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        case = Case(*json.loads(options.case))
        print(json.dumps(run_case(options.folder, case, quick=options.quick)))
        return
    figures = measure(quick=options.quick)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
