"""The agent's life as a process.

Start everything, value until told to stop, stop everything, and say so.
"""

import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial

from fedkeep.agent.agent import Agent
from fedkeep.agent.arrivals import SOUND_REFUSALS, IngestQueue, Source
from fedkeep.agent.assembly import AgentConfig, assemble, parse_config
from fedkeep.agent.remote import Remote, RestartError, SettingsFile, under_settings
from fedkeep.agent.service import Service, serve_metrics
from fedkeep.agent.uploads import Uploads
from fedkeep.core.errors import ConfigError, FedkeepError

log = logging.getLogger(__name__)
RESTARTED = "FEDKEEP_RESTARTED"
"""Set in the environment of an agent that started itself anew: it yields to others already."""
_LINE_SECONDS = 60.0
"""Between two lines of the log about the same kind of thing."""
_FIRST_SECONDS = 2.0
"""The first refusals are logged sooner: something is probably not as its owner thinks."""
_SETTLING_SECONDS = 2.0
"""How long sources may take to put away what the last commit settled."""
_LIVE_SECONDS, _LONGEST_PAUSE, _BURST = 0.5, 60.0, 256
_JUDGED = ("kept", "replaced", "refreshed", "waiting", "known", "corrected", "remembered")
"""Fates of records that were read, beside those of sound samples that are not kept."""
_UNREAD = ("refused.malformed", "refused.oversized", "refused.too-slow")
"""What never became an arrival."""


class CpuThrottle:
    """Keeps the process to a share of one core, and gives memory back once a burst is over.

    The allocator alone would keep what is free.
    """

    def __init__(self, cap: float) -> None:
        self._cap, self._start = cap, time.process_time()
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._judged = 0

    def after(self, judged: int) -> None:
        """To be called after every step."""
        self._judged += judged
        if not judged and self._judged >= _BURST:
            self.give_back()
        worked = time.process_time() - self._start
        if self._cap < 1 and worked > 0.005:
            time.sleep(worked * (1 / self._cap - 1))
            self._start = time.process_time()

    def give_back(self) -> None:
        """Give free memory back to the system."""
        self._judged = 0
        gc.collect()
        if self._trim is not None:
            self._trim(0)


def _read(intake: IngestQueue, errors: list[FedkeepError], source: Source, *, once: bool) -> None:
    """Read a source in a thread of its own.

    What it cannot foresee it tries again, but for a wrong configuration.
    """
    pause = 1.0
    while not intake.stopped:
        try:
            source.run(intake)
            log.info("source '%s' has ended", source.name)
            return
        except ConfigError as error:
            errors.append(error)
            return
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a source may fail in any way; the others go on
            log.warning("source '%s' failed: %s: %s", source.name, type(error).__name__, error)
            intake.refuse("source-failed", source.name, str(error))
            if once:
                errors.append(FedkeepError(f"source '{source.name}' failed: {error}"))
                return
        intake.wait_stopped(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def run(configs: Sequence[AgentConfig], *, until_sources_end: bool = False) -> None:
    """Run the agent until a signal asks it to stop, or until all sources have ended."""
    if until_sources_end and not all(config.sources for config in configs):
        raise ConfigError(
            "there is no [[source]] that could end: add one, or leave --until-sources-end out"
        )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with ExitStack() as stack:
        agents = [_prepared(config, stack) for config in configs]
        remotes = [agent.remote for agent in agents if agent.remote is not None]
        for remote in remotes:
            remote.stop = stop.set
        stack.callback(serve_metrics(*agents))
        for agent in agents:
            for source in agent.config.sources:
                source.set_device(agent.identity.name)
                source.open()
                stack.callback(source.close)
        if RESTARTED not in os.environ:
            os.nice(configs[0].agent.nice)
        # Last, so that whoever reaches the API finds all else ready.
        stack.enter_context(closing(Service(*agents)))

        def tell_ready() -> None:
            notify("READY=1")
            stack.callback(watch(lambda: all(agent.alive() for agent in agents)).set)

        started = threading.Barrier(len(agents), tell_ready)
        if len(agents) == 1:
            _run_stream(agents[0], stop, started, until_sources_end=until_sources_end)
        else:
            _run_streams(agents, stop, started, until_sources_end=until_sources_end)
    if any(remote.is_due.is_set() for remote in remotes):
        raise RestartError


def _prepared(own: AgentConfig, stack: ExitStack) -> Agent:
    """Return an agent with its store open, which the stack closes.

    Where settings on trial let it not come up, they are taken back, and it starts anew.
    """
    parse = partial(parse_config, stream=own.stream)
    try:
        config = under_settings(own, parse)
        agent = assemble(config)
        if own.remote.key_file is not None:
            agent.remote = Remote(agent, parse, own)
    except FedkeepError as error:
        if own.remote.key_file is not None and (file := SettingsFile(own.store.file)).book.trying:
            file.reject(str(error))
            raise RestartError from error
        if not own.stream or not isinstance(error, ConfigError):
            raise
        raise ConfigError(f"stream '{own.stream}': {error}") from error
    stack.callback(agent.store.file.disk.close)
    agent.remove_expired()
    agent.commit()
    return agent


def _run_streams(
    agents: Sequence[Agent],
    stop: threading.Event,
    started: threading.Barrier,
    *,
    until_sources_end: bool,
) -> None:
    """Run several streams side by side; where one fails, the others end as when told to."""
    errors: list[BaseException] = []

    def run_one(agent: Agent) -> None:
        try:
            _run_stream(agent, stop, started, until_sources_end=until_sources_end)
        except BaseException as error:  # noqa: BLE001 - it is raised again where all are waited for
            errors.append(error)
            stop.set()

    threads = [
        threading.Thread(target=run_one, args=(agent,), name=f"stream {agent.config.stream}")
        for agent in agents
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _run_stream(
    agent: Agent, stop: threading.Event, started: threading.Barrier, *, until_sources_end: bool
) -> None:
    introduce(agent)
    with ExitStack() as stack:
        if agent.uploads is not None:
            stack.enter_context(_uploading(agent.uploads))
        if agent.remote is not None:
            stack.enter_context(agent.remote.watching())
        _value(agent, stop, started, until_sources_end=until_sources_end)


@contextmanager
def _uploading(uploads: Uploads) -> Iterator[None]:
    """Send samples in a thread of its own, for as long as the block lasts."""
    stopped = threading.Event()
    name = threading.current_thread().name
    threading.Thread(target=uploads.run, args=(stopped,), name=name, daemon=True).start()
    try:
        yield
    finally:
        stopped.set()


def _value(
    agent: Agent, stop: threading.Event, started: threading.Barrier, *, until_sources_end: bool
) -> None:
    errors: list[FedkeepError] = []
    agent.intake.ends = until_sources_end
    read = partial(_read, agent.intake, errors, once=until_sources_end)
    readings = [
        threading.Thread(target=read, args=(source,), name=_thread_name(agent), daemon=True)
        for source in agent.config.sources
    ]
    for reading in readings:
        reading.start()

    def commit() -> bool:
        with agent.lock:
            return agent.commit()

    frugality, voice = CpuThrottle(agent.config.agent.cpu_cap), ProgressLogger(agent)
    frugality.give_back()
    started.wait()
    while not stop.is_set():
        reads = any(reading.is_alive() for reading in readings) or agent.disk_error
        done = until_sources_end and not reads
        judged = agent.step(agent.config.store.commit_ms / 1000)
        voice.speak()
        frugality.after(judged)
        if any(isinstance(error, ConfigError) for error in errors):
            break
        # What the sources brought last must be on the disk, however long that takes.
        if done and not judged and not len(agent.intake) and commit():
            break
    notify("STOPPING=1")
    agent.intake.stop()
    while agent.step(0.0):
        pass
    agent.remove_expired()
    written = commit()
    last = time.monotonic() + _SETTLING_SECONDS
    for source, reading in zip(agent.config.sources, readings, strict=True):
        if source.settles:
            reading.join(max(0.0, last - time.monotonic()))
    refused = voice.conclude()
    if errors:
        raise errors[0]
    if not written:
        raise FedkeepError(
            f"the store cannot be written ({agent.disk_error}): what the agent read last is not "
            "stored, and no sender got an answer for it"
        )
    if until_sources_end and refused:
        raise FedkeepError(
            f"not one record was a sample ({refused}): docs/agent.md says what each source reads"
        )


def _thread_name(agent: Agent) -> str | None:
    """Return how threads of a stream are called, by which the log names it."""
    return f"stream {agent.config.stream}" if agent.config.stream else None


def introduce(agent: Agent) -> None:
    """Log what this agent is, how many samples fit, and what it waits for."""
    config, geometry = agent.config, agent.store.file.geometry
    model = config.model.get("path") or config.model.get("name", "softmax")
    shape = " x ".join(map(str, config.samples.shape))
    divided = "labels" if config.samples.numbers is None else "intervals"
    room, waits = agent.device.waiting, ""
    if room is not None:
        waits = f"; {room.slots} more may wait for their labels, {len(room)} do"
    log.info(
        "policy %s (%s), model %s, samples of %s %s and %d %s; "
        "room for %d samples in %d bytes, %d each; %d stored%s",
        config.method.policy_name, config.preset, model, shape, config.samples.dtype,
        config.samples.count, divided, agent.device.capacity, geometry.size, geometry.cell_size,
        len(agent.store), waits,
    )  # fmt: skip
    if agent.model_date.round < 0:
        lent = ", and slots of labels that have not come are lent to the others" * (
            config.method.storage.quotas == "soft"
        )
        valued = agent.device.model is not None and config.method.policy.uses_global_gradient
        if not config.method.policy.needs_model:
            log.info("no server has called yet: policy %s needs none", config.method.policy_name)
        else:
            kept = "what is most like the mean of all that came" if valued else "a random draw"
            log.info(
                "no server has called yet: until one does, %s of each label seen is kept%s",
                kept,
                lent,
            )
    plain = agent.ids.plain
    if config.sources and plain not in {agent.ids.namespace(one.name) for one in config.sources}:
        log.warning(
            "no [[source]] has the namespace '%s' that the store was made with: ids that come now "
            "are of other samples, erased ones too; set namespace = '%s' where they are the same",
            plain,
            plain,
        )
    names = ", ".join(source.name for source in config.sources) or "nothing: there is no [[source]]"
    log.info(
        "ready: reading %s; ask it by `fedkeep agent status --socket %s`",
        names,
        config.agent.socket,
    )


class ProgressLogger:
    """Says what has changed, and no more often than anyone would want to read it."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._told = self._start = Counter(agent.counters)
        self._next, self._next_live = time.monotonic() + _FIRST_SECONDS, 0.0
        # Several streams would write over each other's line.
        self._live = sys.stderr.isatty() and not agent.config.stream

    def speak(self) -> None:
        """Log or show what has changed, if it is time; called often."""
        now = time.monotonic()
        if self._live and now >= self._next_live:
            self._next_live = now + _LIVE_SECONDS
            sys.stderr.write(f"\r\x1b[K{self._summary()}")
            sys.stderr.flush()
        if now < self._next:
            return
        if refused := _refusals(Counter(self._agent.counters) - self._told):
            log.warning("refused: %s; `fedkeep agent refused` shows the last of them", refused)
            self._next = now + _LINE_SECONDS
        self._told = Counter(self._agent.counters)
        notify(f"STATUS={self._summary()}")

    def conclude(self) -> str:
        """Says what came of it all.

        Returns what was wrong with the records, where not one of them was sound.
        """
        if self._live:
            sys.stderr.write("\r\x1b[K")
        log.info("ended: %s", self._summary())
        counts = Counter(self._agent.counters) - self._start
        judged = sum(counts[fate] for fate in (*_JUDGED, *SOUND_REFUSALS))
        return "" if judged else _refusals(counts)

    def _summary(self) -> str:
        counts = Counter(self._agent.counters) - self._start
        arrived = counts["seen"] + sum(counts[name] for name in _UNREAD)
        line = f"{arrived} arrived, {counts['kept'] + counts['replaced']} kept"
        if refused := _refusals(counts):
            line += f", refused {refused}"
        if skipped := counts["skipped.sample"] + counts["skipped.drop"]:
            line += f", {skipped} skipped"
        if self._agent.waiting:
            line += f", waiting ({self._agent.waiting})"
        return f"{line}, {len(self._agent.store)} of {self._agent.device.capacity} stored"


def _refusals(counts: Counter[str]) -> str:
    """Return what was wrong with records, by reason: not that a sample's score was too low."""
    wrong = sorted(
        name for name in counts if name.startswith("refused.") and name not in SOUND_REFUSALS
    )
    return ", ".join(f"{counts[name]} {name.removeprefix('refused.')}" for name in wrong)


def notify(message: str) -> None:
    """Send a line such as `READY=1` to systemd.

    A listener that is gone is no fault of the agent.
    """
    if address := os.environ.get("NOTIFY_SOCKET", ""):
        with (
            suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender,
        ):
            sender.sendto(
                message.encode(), "\0" + address[1:] if address.startswith("@") else address
            )


def watch(alive: Callable[[], bool]) -> threading.Event:
    """Notify systemd, if it watches this process, for as long as the agent is alive."""
    ended, period = threading.Event(), os.environ.get("WATCHDOG_USEC", "")
    meant = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())

    def tell() -> None:
        while not ended.wait(int(period) / 2e6):
            if alive():
                notify("WATCHDOG=1")

    if period.isdecimal() and meant:
        threading.Thread(target=tell, name="watchdog", daemon=True).start()
    return ended
