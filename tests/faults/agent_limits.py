"""Bytes, times and memory of the agent over long runs."""

import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedkeep.agent.agent import Agent
from fedkeep.agent.arrivals import Arrival
from fedkeep.agent.assembly import assemble, parse_config
from fedkeep.agent.cellfile import FileDisk
from fedkeep.agent.daemon import CpuThrottle
from fedkeep.agent.service import summarise
from fedkeep.agent.store_file import discard_copies
from fedkeep.core.types import Assignment, LocalTraining, TrainOrder

FEATURES, LABELS = 60, 10
_PACKET = 240
"""Numbers of a sample about as large as a packet: 960 bytes."""


def opened(folder: Path, budget: int, features: int = FEATURES) -> tuple[Agent, FileDisk]:
    """An agent with softmax regression, its store made or found."""
    table = {
        "samples": {"shape": [features], "labels": LABELS},
        "store": {"path": str(folder / "a.store"), "budget": budget},
    }
    agent = assemble(parse_config(table))
    return agent, agent.store.file.disk


def make(folder: Path, budget: int, features: int = FEATURES) -> tuple[Agent, FileDisk]:
    """The same with a plan and a direction."""
    agent, disk = opened(folder, budget, features)
    rng = np.random.default_rng(0)
    size = agent.device.learner.size
    model, direction = (rng.standard_normal(size).astype(np.float32) for _ in range(2))
    plan = Assignment(np.full(LABELS, agent.device.capacity // LABELS), np.ones(LABELS), 1.0)
    agent.participate(TrainOrder(0, model, direction, LocalTraining(0.1, 1), None, plan))
    return agent, disk


_RNG = np.random.default_rng(1)
_X = _RNG.standard_normal((4096, FEATURES)).astype(np.float32)
_Y = _RNG.integers(0, LABELS, 4096).tolist()


def feed(agent: Agent, count: int, first: int = 0) -> None:
    """Random samples, each with an id of its own."""
    copies = (agent.device.learner.size // LABELS - 1) // FEATURES
    done = 0
    while done < count:
        for i in range(min(64, count - done)):
            id_ = first + done + i
            k = id_ * 7 % 4096
            agent.intake.offer(
                Arrival(np.tile(_X[k] * (1 + id_ % 997 / 997), copies), _Y[k], id_, "soak"),
                wait=True,
            )
        done += agent.step(0.0)
        while len(agent.intake):
            done += agent.step(0.0)
    agent.commit()


@dataclass
class Budget:
    offers: int
    peak_percent: float
    written_per_accepted: float


def watch_budget(folder: Path, offers: int, budget: int = 300_000) -> Budget:
    """The most that all files of the store ever took, looked at before and after each write."""
    agent, disk = make(folder, budget)
    peak, write = 0, disk.write

    def watched(offset: int, data: bytes) -> None:
        nonlocal peak
        peak = max(peak, _bytes_on_disk(folder))
        write(offset, data)
        peak = max(peak, _bytes_on_disk(folder))

    disk.write = watched  # type: ignore[method-assign]
    before = disk.written
    feed(agent, offers)
    counts = agent.counters.counts()
    accepted = counts.get("kept", 0) + counts.get("replaced", 0)
    disk.close()
    return Budget(offers, 100 * peak / budget, (disk.written - before) / max(1, accepted))


def _bytes_on_disk(folder: Path) -> int:
    """By length or by blocks, whichever is more."""
    files = [entry.stat() for entry in os.scandir(folder)]
    return max(sum(file.st_size for file in files), sum(file.st_blocks * 512 for file in files))


def reopen_p99_ms(folder: Path, times: int, budget: int = 1_000_000) -> tuple[float, float]:
    """The 99th percentile of the time, and the CPU, to open a full store cut off in a commit."""
    agent, disk = make(folder, budget, _PACKET)
    feed(agent, 4 * agent.device.capacity)
    disk.close()
    path = folder / "a.store"
    took, worked = [], []
    for number in range(times):
        with path.open("r+b") as file:
            file.seek(4096 + 4096 * (number % 2) + 8)
            torn = file.read(4)
            file.seek(-4, os.SEEK_CUR)
            file.write(bytes(b ^ 0xFF for b in torn))
        logging.disable(logging.ERROR)
        start, cpu = time.perf_counter(), time.process_time()
        again, disk = opened(folder, budget, _PACKET)
        took.append(time.perf_counter() - start)
        worked.append(time.process_time() - cpu)
        assert len(again.store) > 0
        feed(again, 64, first=10_000_000 + 64 * number)
        disk.close()
        discard_copies(path)
    return float(np.quantile(took, 0.99) * 1000), float(np.quantile(worked, 0.99) * 1000)


@dataclass
class Erasure:
    samples: int
    hits: int
    seconds: float


def erase_all(folder: Path, budget: int = 1_000_000) -> Erasure:
    """Erases every stored sample and looks for its bytes in all files."""
    agent, disk = make(folder, budget)
    feed(agent, 3 * agent.device.capacity)
    held = agent.store.stored().batch
    content = [x.tobytes() for x in held.x]
    start = time.perf_counter()
    agent.erase(held.ids.tolist())
    seconds = time.perf_counter() - start
    image = b"".join(file.read_bytes() for file in folder.iterdir())
    disk.close()
    return Erasure(len(content), sum(x in image for x in content), seconds)


@dataclass
class Soak:
    samples: int
    growth_percent: float
    megabytes: float


def soak(folder: Path, samples: int, budget: int = 1_000_000) -> Soak:
    """Resident memory after `samples`, against that after a fifth of them."""
    agent, disk = make(folder, budget)
    memory = CpuThrottle(1.0)
    feed(agent, samples // 5)
    memory.give_back()
    before = resident_kb()
    feed(agent, samples - samples // 5, first=samples // 5)
    summarise(agent)
    agent.remove_expired()  # as once a minute, which a fast run does not reach
    memory.give_back()
    after = resident_kb()
    disk.close()
    return Soak(samples, 100 * (after - before) / before, after / 1024)


def resident_kb() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))


def acknowledge_p99_ms(folder: Path, seconds: float, rate: int = 500) -> float:
    """How long a sample waits for its answer at a steady rate, 99th percentile."""
    agent, disk = make(folder, 1_000_000)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((256, FEATURES)).astype(np.float32)
    waits: list[float] = []
    start, sent = time.perf_counter(), 0
    while (now := time.perf_counter() - start) < seconds:
        while sent < now * rate:
            at = time.perf_counter()
            arrival = Arrival(x[sent % 256], sent % LABELS, sent, "s")
            arrival.acknowledge = lambda _, at=at: waits.append(time.perf_counter() - at)  # type: ignore[misc]
            agent.intake.offer(arrival, wait=True)
            sent += 1
        agent.step(0.005)
    agent.commit()
    disk.close()
    return float(np.quantile(waits, 0.99) * 1000)
