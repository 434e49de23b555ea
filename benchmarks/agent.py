"""The device agent against its targets: speed, the price of a value, memory, and wear of the flash.

    python benchmarks/agent.py [--quick] [--json FILE] [--flash]

Needs torch, onnx and onnxscript to export the traffic model once. What is measured runs in
processes without torch.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import flash
from fedkeep.agent.agent import Agent
from fedkeep.agent.cellfile import FileDisk

TARGETS = {
    "samples_per_s": (">=", 5000.0),
    "value_over_inference_1": ("<=", 1.3),
    "value_over_inference_64": ("<=", 1.1),
    "rss_mb_onnx": ("<=", 70.0),
    "rss_mb_numpy": ("<=", 45.0),
    "rss_mb_full": ("", 0.0),
    "rss_mb_full_restarted": ("", 0.0),
    "samples_per_s_tenth_kept": ("", 0.0),
    "written_over_sample_full_speed": ("<=", 2.0),
    "written_over_sample_100_per_s": ("<=", 2.0),
    "pages_over_sample_100_per_s": ("", 0.0),
}
SHAPE, LABELS = (3, 64), 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--flash", action="store_true", help="only what a sample costs the flash")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        print(json.dumps(PARTS[options.part](options.folder, quick=options.quick)))
        return
    if options.flash:
        worn = flash.measure(quick=options.quick)
        if options.json is not None:
            options.json.write_text(json.dumps(worn, indent=2) + "\n")
        return
    figures = measure(quick=options.quick)
    for name, (sign, target) in TARGETS.items():
        met = "" if not sign else "met" if _meets(figures[name], sign, target) else "MISSED"
        print(
            f"{name:28} {figures[name]:12.2f}   {sign} {target:g} {met}"
            if sign
            else f"{name:28} {figures[name]:12.2f}"
        )
    if options.json is not None:
        options.json.write_text(
            json.dumps({name: figures[name] for name in TARGETS}, indent=2) + "\n"
        )


def _meets(value: float, sign: str, target: float) -> bool:
    return value >= target if sign == ">=" else value <= target


def measure(*, quick: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        export_traffic(folder / "traffic.onnx")
        figures = {
            name: value
            for part in PARTS
            for name, value in _in_child(part, folder, quick=quick).items()
        }
        count = 2000 if quick else 20_000
        figures["rss_mb_onnx"] = resident_mb(folder, "onnx", count)
        figures["rss_mb_numpy"] = resident_mb(folder, "numpy", count)
        figures["rss_mb_full"] = resident_mb(folder, "full", _FULL)
        figures["rss_mb_full_restarted"] = resident_mb(folder, "full", 1)
        return figures


def export_traffic(path: Path) -> None:
    """The model with what valuation needs, and beside it the plain one to compare with."""
    import torch

    from fedkeep.learn.export import export
    from fedkeep.learn.torch_models import traffic_cnn

    module = traffic_cnn(LABELS)
    export(lambda: module, SHAPE, None, path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            (torch.randn(2, *SHAPE),),
            path.with_name("plain.onnx"),
            input_names=["x"],
            external_data=False,
            dynamic_shapes={"input": {0: torch.export.Dim("n", min=1)}},
            verbose=False,
            dynamo=True,
        )


def _in_child(part: str, folder: Path, *, quick: bool) -> dict[str, float]:
    """Runs one part in a separate process, on one core and without torch."""
    command = [
        sys.executable,
        __file__,
        "--part",
        part,
        "--folder",
        str(folder),
        *(["--quick"] if quick else []),
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=_one_thread())
    print("\n".join(done.stdout.splitlines()[:-1]), end="\n" if "\n" in done.stdout.strip() else "")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _one_thread() -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "1",
    }


def traffic(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Random flows; what they hold does not matter for speed."""
    return rng.standard_normal((n, *SHAPE)).astype(np.float32), rng.integers(0, LABELS, n)


def ratios(folder: Path, *, quick: bool) -> dict[str, float]:
    """The time to value samples over the time of plain inference.

    Both are run in turn many times; the best time of each counts.
    """
    from fedkeep.core.types import Batch
    from fedkeep.learn.onnx_learner import OnnxLearner, session

    learner = OnnxLearner(folder / "traffic.onnx")
    probe = learner.probe(learner.initial(0))
    plain = session((folder / "plain.onnx").read_bytes())
    rng = np.random.default_rng(0)
    direction = rng.standard_normal(learner.gradient_size).astype(np.float32)
    figures = {}
    for n in (1, 64):
        x, y = traffic(rng, n)
        batch = Batch(x, y, np.arange(n))
        repeats = 100 if n == 1 else 4

        def infer(x: np.ndarray = x) -> object:
            return plain.run(None, {"x": x})

        def value(batch: Batch = batch) -> object:
            return probe.measure(batch).projections(direction)

        pairs = [
            (_seconds(value, repeats), _seconds(infer, repeats))
            for _ in range(40 if quick else 150)
        ]
        valued, inferred = (min(times) for times in zip(*pairs, strict=True))
        figures[f"value_over_inference_{n}"] = valued / inferred
    return figures


def _seconds(call: Callable[[], object], repeats: int) -> float:
    start = time.process_time()
    for _ in range(repeats):
        call()
    return time.process_time() - start


def throughput(folder: Path, *, quick: bool) -> dict[str, float]:
    """Samples a second through the whole agent, of which hardly any is accepted.

    The path is queue, screening, value, store, commits. A second is one of this process's CPU or
    of waiting for the disk, so that other programs on the machine do not count. On a quiet machine
    it is a second of the clock.
    """
    agent, disk = _filled(folder, "speed", accepted=0.022)
    waited = _watch_syncs(disk)
    before = agent.counters.counts()
    count = 6_400 if quick else 32_000
    start, cpu = time.perf_counter(), time.process_time()
    judged = _pour(agent, count)
    seconds, clock = time.process_time() - cpu + sum(waited), time.perf_counter() - start
    accepted = _accepted(agent, before) / judged
    per_second = judged / clock
    print(
        f"accepted {accepted:.2%}; {per_second:.0f} samples a second by the clock, machine shared"
    )
    return {"samples_per_s": judged / seconds}


def keeping(folder: Path, *, quick: bool) -> dict[str, float]:
    """What is written to the disk where a tenth of the arrivals is kept.

    Measured at full speed and at 100 samples a second. Bytes are those handed to the file, state
    and roots included, over those of one sample. Pages are those of 4 kB that a sync makes dirty,
    which is the least that a flash below a file system writes.
    """
    figures, size = {}, 4 * SHAPE[0] * SHAPE[1]
    agent, disk = _filled(folder, "full", 0.105, _GREATEST)
    waited = _watch_syncs(disk)
    before, written, cpu = agent.counters.counts(), disk.written, time.process_time()
    judged = _pour(agent, 3_200 if quick else 16_000)
    figures["samples_per_s_tenth_kept"] = judged / (time.process_time() - cpu + sum(waited))
    kept = _accepted(agent, before)
    figures["written_over_sample_full_speed"] = (disk.written - written) / max(1, kept) / size
    print(f"full speed: {kept / judged:.1%} kept")
    agent, disk = _filled(folder, "steady", 0.105, _GREATEST)
    pages = _watch_pages(disk)
    before, written = agent.counters.counts(), disk.written
    judged = _pour(agent, 2_000 if quick else 12_500, rate=100.0)
    kept = _accepted(agent, before)
    print(f"100 a second: {kept / judged:.1%} kept")
    figures["written_over_sample_100_per_s"] = (disk.written - written) / max(1, kept) / size
    figures["pages_over_sample_100_per_s"] = sum(pages) * 4096 / max(1, kept) / size
    return figures


_GREATEST = {"name": "ode", "choice": "greatest", "value": "projection"}
"""Keeps what `_fill` counts on; the default draws, and accepts hardly any of these."""


def _filled(
    folder: Path, name: str, accepted: float, policy: dict[str, str] | None = None
) -> tuple[Agent, FileDisk]:
    """An agent whose store is full and accepts about this share of the arrivals."""
    from fedkeep.agent.assembly import assemble, parse_config
    from fedkeep.core.types import Assignment, LocalTraining, TrainOrder

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    table = {
        "samples": {"shape": list(SHAPE), "labels": LABELS},
        "model": {"path": str(folder / "traffic.onnx")},
        "store": {"path": str(folder / f"{name}.store"), "budget": 9_000_000},
        "policy": policy or {"name": "ode"},
    }
    agent = assemble(parse_config(table))
    rng = np.random.default_rng(1)
    learner = agent.device.learner
    direction = rng.standard_normal(learner.gradient_size).astype(np.float32)
    quotas = np.full(LABELS, agent.device.capacity // LABELS)
    plan = Assignment(quotas, np.ones(LABELS), 1.0)
    agent.participate(
        TrainOrder(0, learner.initial(0), direction, LocalTraining(0.01, 1), None, plan)
    )
    _fill(agent, rng, direction, accepted)
    return agent, agent.store.file.disk


def _pour(agent: Agent, count: int, rate: float | None = None) -> int:
    """Offers samples as fast as they are taken or at a steady rate, and commits at the end."""
    from fedkeep.agent.arrivals import Arrival

    x, y = traffic(np.random.default_rng(2), 4096)
    start, offered, judged = time.monotonic(), 0, 0
    while judged < count:
        due = count if rate is None else min(count, int((time.monotonic() - start) * rate))
        for i in range(offered, min(due, offered + 64)):
            k = i % len(y)
            agent.intake.offer(Arrival(x[k], int(y[k]), i + 1_000_000, "bench"), wait=True)
            offered = i + 1
        judged += agent.step(0.0 if rate is None else 0.02)
    agent.commit()
    return judged


def _accepted(agent: Agent, before: dict[str, int]) -> int:
    after = agent.counters.counts()
    return sum(after.get(name, 0) - before.get(name, 0) for name in ("kept", "replaced"))


def _watch_syncs(disk: FileDisk) -> list[float]:
    """Record the seconds spent in each sync, and in each write past the page cache, from now on."""
    waited: list[float] = []
    sync, write = disk.sync, disk.write

    def timed_sync() -> None:
        start, cpu = time.perf_counter(), time.process_time()
        sync()
        waited.append(max(0.0, time.perf_counter() - start - (time.process_time() - cpu)))

    def timed_write(offset: int, data: bytes) -> None:
        start, cpu = time.perf_counter(), time.process_time()
        write(offset, data)
        waited.append(max(0.0, time.perf_counter() - start - (time.process_time() - cpu)))

    disk.sync, disk.write = timed_sync, timed_write  # type: ignore[method-assign]
    return waited


def _watch_pages(disk: FileDisk) -> list[int]:
    """How many pages each sync from now on finds dirty."""
    counts: list[int] = []
    dirty: set[int] = set()
    write, sync = disk.write, disk.sync

    def watched(offset: int, data: bytes) -> None:
        dirty.update(range(offset // 4096, (offset + len(data) - 1) // 4096 + 1))
        write(offset, data)

    def counted() -> None:
        sync()
        counts.append(len(dirty))
        dirty.clear()

    disk.write, disk.sync = watched, counted  # type: ignore[method-assign]
    return counts


def _fill(agent: Agent, rng: np.random.Generator, direction: np.ndarray, accepted: float) -> None:
    """Fills the store with values among the best `accepted` of what comes."""
    from fedkeep.core.types import Batch

    x, y = traffic(rng, 3000)
    measured = agent.device.measure(Batch(x, y, np.arange(len(y))))
    assert measured is not None
    scores = measured.projections(direction)
    for label in range(LABELS):
        own = scores[y == label]
        best = np.sort(own)[int((1 - accepted) * len(own)) :]
        n = agent.device.capacity // LABELS
        xs, _ = traffic(rng, n)
        ids = label * n + np.arange(n)
        batch = Batch(xs, np.full(n, label), ids)
        spread = rng.choice(best, n) + rng.random(n) * 1e-6
        for start in range(0, n, 64):
            part = slice(start, start + 64)
            agent.store.offer(batch.take(part), batch.y[part], spread[part], ids[part])
            agent.commit()


_FULL = 9_000
"""Arrivals after which the default budget of samples of 192 numbers is full."""
_RESIDENT = {
    "onnx": (SHAPE, LABELS, 2_000_000, 'path = "{}"'),
    "numpy": ((900,), 5, 2_000_000, 'name = "mlp"'),
    "full": ((192,), 2, 9_000_000, 'name = "softmax"'),
}
"""Shape, labels, budget and model of each kind of agent whose memory is measured."""


def resident_mb(folder: Path, kind: str, count: int) -> float:
    """Resident megabytes of a running agent after it has read a stream, and what it stored."""
    shape, labels, budget, model = _RESIDENT[kind]
    model = model.format(folder / "traffic.onnx")
    stream, socket = folder / f"{kind}.jsonl", folder / f"{kind}.sock"
    rng = np.random.default_rng(0)
    with stream.open("w") as file:
        for i in range(count):
            x = rng.standard_normal(shape).round(3).ravel().tolist()
            file.write(json.dumps({"x": x, "y": int(rng.integers(labels)), "id": i}) + "\n")
    config = folder / f"{kind}.toml"
    config.write_text(
        f"[samples]\nshape = {list(shape)}\nlabels = {labels}\n"
        f'[model]\n{model}\n[agent]\nsocket = "{socket}"\n'
        f'[store]\npath = "{folder / kind}.store"\nbudget = {budget}\n'
        f'[[source]]\nkind = "lines"\npath = "{stream}"\n'
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "fedkeep.agent", str(config)], env=_one_thread()
    )
    try:
        return _resident_after(process, socket, count)
    finally:
        process.terminate()
        process.wait()


def _resident_after(process: subprocess.Popen[bytes], socket: Path, count: int) -> float:
    from fedkeep.protocol.client import AgentClient, AgentUnreachableError

    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        time.sleep(0.2)
        try:
            with AgentClient(str(socket), timeout=30) as client:
                seen = client.status().counters.get("seen", 0)
        except AgentUnreachableError:
            continue
        if seen >= count:
            time.sleep(1)  # memory of a peak is released once it is over
            status = Path(f"/proc/{process.pid}/status").read_text()
            kilobytes = next(
                line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")
            )
            return int(kilobytes) / 1024
    raise TimeoutError("the agent did not read its stream")


PARTS: dict[str, Callable[..., dict[str, float]]] = {
    "ratios": ratios,
    "throughput": throughput,
    "keeping": keeping,
}


if __name__ == "__main__":
    main()
