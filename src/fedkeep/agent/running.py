"""The agent's life as a process: start everything, value until told to stop, stop everything."""

import ctypes
import gc
import logging
import os
import signal
import threading
import time
from contextlib import ExitStack

from fedkeep.agent.agent import Agent
from fedkeep.agent.arrivals import Source
from fedkeep.agent.assembly import assemble
from fedkeep.agent.metrics import serve_metrics
from fedkeep.agent.options import AgentConfig
from fedkeep.agent.service import Service
from fedkeep.agent.voice import Voice, introduce, notify, watch
from fedkeep.core.errors import ConfigError, FedkeepError

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


class Reading(threading.Thread):
    """A source in its own thread: what it cannot foresee it tries again; only a wrong configuration ends the agent."""

    _LONGEST_PAUSE = 60.0

    def __init__(self, source: Source, agent: Agent, *, once: bool) -> None:
        super().__init__(name=f"source {source.name}", daemon=True)
        self._source, self._intake, self._once = source, agent.intake, once
        self.error: FedkeepError | None = None

    def run(self) -> None:
        name, pause = self._source.name, 1.0
        while not self._intake.stopped:
            try:
                self._source.run(self._intake)
                log.info("source '%s' has ended", name)
                return
            except ConfigError as error:
                self.error = error
                return
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a source may fail in any way; the others go on
                log.warning("source '%s' failed: %s: %s", name, type(error).__name__, error)
                self._intake.refuse("source-failed", name, str(error))
                if self._once:
                    self.error = FedkeepError(f"source '{name}' failed: {error}")
                    return
            self._intake.wait_stopped(pause)
            pause = min(2 * pause, self._LONGEST_PAUSE)


def run(config: AgentConfig, *, until_sources_end: bool = False) -> None:
    """Runs the agent until a signal asks it to stop, or until all sources have ended."""
    if until_sources_end and not config.sources:
        raise ConfigError("there is no [[source]] that could end: add one, or leave --until-sources-end out")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with ExitStack() as stack:
        assembly = assemble(config)
        agent = assembly.agent
        stack.callback(assembly.disk.close)
        stack.callback(serve_metrics(agent))
        for source in config.sources:
            source.open()
            stack.callback(source.close)
        # Last, so that whoever reaches the API finds all else ready.
        service = Service(agent)
        stack.callback(service.close)
        agent.commit()
        os.nice(config.agent.nice)
        service.start()
        introduce(assembly)
        readings = [Reading(source, agent, once=until_sources_end) for source in config.sources]
        for reading in readings:
            reading.start()
        _value(agent, readings, stop, until_sources_end=until_sources_end)


def _value(agent: Agent, readings: list[Reading], stop: threading.Event, *, until_sources_end: bool) -> None:
    throttle, memory, voice = Throttle(agent.config.agent.cpu_cap), IdleMemory(), Voice(agent)
    ended = watch(agent.alive)
    memory.give_back()
    notify("READY=1")
    while not stop.is_set():
        done = until_sources_end and not any(reading.is_alive() for reading in readings)
        judged = agent.step(agent.config.store.commit_ms / 1000)
        voice.speak()
        throttle.rest()
        memory.after(judged)
        if any(isinstance(reading.error, ConfigError) for reading in readings) or (done and not judged):
            break
    notify("STOPPING=1")
    agent.intake.stop()
    while agent.step(0.0):
        pass
    agent.commit()
    ended.set()
    voice.conclude()
    for reading in readings:
        if reading.error is not None:
            raise reading.error
    if until_sources_end and (refused := voice.all_refused()):
        raise FedkeepError(f"not one record was a sample ({refused}): docs/agent.md says what each source reads")
