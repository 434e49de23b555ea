"""The agent's life as a process: start everything, value until told to stop, stop everything."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from fedkeep.agent.agent import Agent
from fedkeep.agent.arrivals import Source
from fedkeep.agent.assembly import AgentConfig, assemble
from fedkeep.agent.evaluation import Evaluator
from fedkeep.agent.metrics import serve_metrics
from fedkeep.agent.service import Service
from fedkeep.core.errors import FedkeepError

log = logging.getLogger(__name__)


class Throttle:
    """Keeps the process to a share of one core by resting after work."""

    def __init__(self, cap: float) -> None:
        self._cap = cap
        self._start = time.process_time()

    def rest(self) -> None:
        worked = time.process_time() - self._start
        if self._cap < 1 and worked > 0.005:
            time.sleep(worked * (1 / self._cap - 1))
            self._start = time.process_time()


class IdleMemory:
    """Gives free memory back to the device once a burst of work is over: the allocator alone would keep it."""

    _BURST = 256

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._worked = 0

    def after(self, judged: int) -> None:
        self._worked += judged
        if not judged and self._worked >= self._BURST:
            self.give_back()

    def give_back(self) -> None:
        self._worked = 0
        gc.collect()
        if self._trim is not None:
            self._trim(0)


class Reading:
    """A source in its own thread; its failure ends the agent, its end does not."""

    def __init__(self, source: Source, agent: Agent) -> None:
        self._source, self._agent = source, agent
        self._error: FedkeepError | None = None
        self._ended = False
        self.thread = threading.Thread(target=self._run, name=f"source {source.name}", daemon=True)

    def _run(self) -> None:
        try:
            self._source.run(self._agent.intake)
        except FedkeepError as error:
            self._error = error
        self._ended = True
        log.info("source '%s' has ended", self._source.name)

    def failure(self) -> FedkeepError | None:
        """Why the source cannot go on; what it did not foresee is in the log, by the thread itself."""
        if self._error is None and not self._ended and not self.thread.is_alive():
            return FedkeepError(f"source '{self._source.name}' failed: its traceback is above")
        return self._error


def run(config: AgentConfig, *, until_sources_end: bool = False) -> None:
    """Runs the agent until a signal asks it to stop, or until all sources have ended."""
    with ExitStack() as stack:
        assembly = assemble(config)
        agent = assembly.agent
        stack.callback(assembly.disk.close)
        evaluator = Evaluator(agent, config.agent.held_out, config.samples.shape)
        stop_metrics = serve_metrics(agent, config.metrics)
        if stop_metrics is not None:
            stack.callback(stop_metrics)
        for source in config.sources:
            source.open()
            stack.callback(source.close)
        # Last, so that whoever reaches the API finds all else ready.
        service = Service(agent, evaluator, Path(config.agent.socket))
        stack.callback(service.close)
        agent.commit()
        os.nice(config.agent.nice)
        service.start()
        readings = [Reading(source, agent) for source in config.sources]
        for reading in readings:
            reading.thread.start()
        memory = IdleMemory()
        memory.give_back()
        log.info("ready: room for %d samples in %d bytes", assembly.layout.capacity, assembly.layout.geometry.size)
        stop = _stop_on_signals()
        _value(agent, readings, config, stop, memory, until_sources_end=until_sources_end)


def _value(
    agent: Agent,
    readings: list[Reading],
    config: AgentConfig,
    stop: Callable[[], bool],
    memory: IdleMemory,
    *,
    until_sources_end: bool,
) -> None:
    throttle = Throttle(config.agent.cpu_cap)
    wait = config.store.commit_ms / 1000
    while not stop():
        ended = until_sources_end and not any(reading.thread.is_alive() for reading in readings)
        judged = agent.step(wait)
        throttle.rest()
        memory.after(judged)
        if any(reading.failure() for reading in readings) or (ended and not judged):
            break
    failures = [failure for reading in readings if (failure := reading.failure()) is not None]
    agent.intake.stop()
    while agent.step(0.0):
        pass
    agent.commit()
    if failures:
        raise failures[0]


def _stop_on_signals() -> Callable[[], bool]:
    """True once the process was asked to stop."""
    asked = threading.Event()

    def ask(_signal: int, _frame: FrameType | None) -> None:
        asked.set()

    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, ask)
    return asked.is_set
