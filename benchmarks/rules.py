"""What ten rules cost for each sample, by the processor's time of a whole agent.

    python -m benchmarks.rules [--quick] [--json FILE]

Two agents judge the same samples in turns, one with ten rules and one without, whose policy has as
many slots. A turn's ratio is of two neighbours in time; the median of all is told. Records have
four fields of their own, and come 64 at a time, as they do where a stream is fast.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep.agent.agent import Agent
from fedkeep.agent.arrivals import Arrival
from fedkeep.agent.assembly import assemble, parse_config

TARGET = 1.05
SHAPE, LABELS, BATCH = (192,), 5, 64
RULES: list[dict[str, Any]] = [
    {"name": "alarms", "when": "alarm", "slots": 40},
    {"name": "fast", "when": "speed > 95", "slots": 40},
    {"name": "unit", "when": 'unit == "W" and speed > 80', "slots": 20},
    {"name": "night", "when": "hour < 5 and speed > 98", "slots": 20},
    {"name": "rare", "when": "label == 4", "action": "least", "n": 20, "per": "label", "slots": 20},
    {"name": "private", "when": "has(secret)", "action": "never"},
    {"name": "far", "when": "speed - 2 * load > 90", "slots": 20, "ttl_days": 7.0},
    {"name": "both", "when": "alarm and not (speed < 10)", "slots": 20},
    {"name": "kinds", "when": 'unit not in ("V", "A", "W")', "slots": 20},
    {"name": "hourly", "when": "load > 99", "slots": 24, "n": 1, "per": "hour"},
]


def agent_of(folder: Path, name: str, rules: list[dict[str, Any]], budget: int) -> Agent:
    """An agent whose model values what comes."""
    folder.mkdir(exist_ok=True)
    agent = assemble(
        parse_config(
            {
                "samples": {"shape": list(SHAPE), "labels": LABELS},
                "store": {"path": str(folder / name), "budget": budget},
                "rule": rules,
            }
        )
    )
    agent.device.set_model(agent.device.learner.initial(0))
    return agent


def arrivals(first: int, count: int) -> list[Arrival]:
    """Records with fields; one of a hundred is an alarm."""
    rng = np.random.default_rng(first)
    x = rng.standard_normal((count, *SHAPE)).astype(np.float32)
    speed, load = rng.random((2, count)) * 100
    return [
        Arrival(
            x[i],
            (first + i) % LABELS,
            first + i,
            "bench",
            fields={
                "speed": float(speed[i]),
                "load": float(load[i]),
                "unit": "VAW"[i % 3],
                "alarm": i % 100 == 0,
            },
        )
        for i in range(count)
    ]


def turn(agent: Agent, came: list[Arrival]) -> float:
    """Seconds of the processor for judging and committing samples."""
    start = time.process_time()
    for at in range(0, len(came), BATCH):
        for one in came[at : at + BATCH]:
            agent.intake.offer(one, wait=True)
        while len(agent.intake):
            agent.step(0.0)
    agent.commit(whole=False)
    return time.process_time() - start


def measure(*, quick: bool) -> dict[str, float]:
    """The ratio, and microseconds of a sample without and with rules."""
    turns, count = (40, 1280) if quick else (150, 2560)
    with tempfile.TemporaryDirectory() as name:
        ruled = agent_of(Path(name), "ruled", RULES, 3_000_000)
        plain = agent_of(Path(name), "plain", [], 3_000_000)
        ratios, times = [], []
        for number in range(turns + 4):
            seconds = [0.0, 0.0]
            for place in (0, 1) if number % 2 else (1, 0):
                came = arrivals(number * count, count)
                seconds[place] = turn((plain, ruled)[place], came)
            if number >= 4:  # the first fill the stores
                ratios.append(seconds[1] / seconds[0])
                times.append(seconds)
        for agent in (ruled, plain):
            agent.store.file.disk.close()
    one, ten = np.median(np.array(times) / count * 1e6, axis=0).tolist()
    return {"ratio": float(np.median(ratios)), "us_plain": one, "us_ten_rules": ten}


def main() -> None:
    """Measure, print and compare with the target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    figures = measure(quick=options.quick)
    met = "met" if figures["ratio"] <= TARGET else "MISSED"
    print(
        f"ten rules: {figures['ratio']:.3f} of the time without, {met}"
        f" ({figures['us_plain']:.1f} and {figures['us_ten_rules']:.1f} us a sample)"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
