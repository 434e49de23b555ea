"""What the agent answers.

Its local API, one message after another on a Unix socket, and its metrics.
"""

import logging
import math
import socket
from collections import ChainMap, Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec
import numpy as np
from msgspec import structs

from fedkeep.agent.agent import Agent
from fedkeep.agent.assembly import SampleOptions
from fedkeep.agent.connections import Listener
from fedkeep.agent.record import SampleMetadata
from fedkeep.agent.stream_watch import WATCHED
from fedkeep.config.agreement import agreement_of
from fedkeep.core.errors import ConfigError, FedkeepError, RejectedError, optional_import
from fedkeep.core.regions import region_term
from fedkeep.core.registry import did_you_mean
from fedkeep.core.screening import screen_parameters, screen_samples
from fedkeep.core.targets import error_sums
from fedkeep.core.types import AnyArray, Vector
from fedkeep.core.waiting import UNLABELLED
from fedkeep.learn.evaluation import judge, predict
from fedkeep.protocol import messages
from fedkeep.protocol.addresses import require_loopback
from fedkeep.protocol.framing import receive_frame, send_frame
from fedkeep.protocol.wire import from_bytes, to_bytes

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

log = logging.getLogger(__name__)
_CONNECTIONS = 32
"""Clients at a time; one more takes the place of the one silent the longest."""
_PATIENCE = 600.0
"""Seconds that a client may be silent, in the middle of a message or between two."""
_CHUNK = 256
_PULLED, _PULLED_BYTES = 256, 4 << 20
_UNLABELLED, _BEHIND = "unlabelled", 1 << 62
"""Samples and bytes that are given out at a time."""
_QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
_METRICS_PATIENCE, _METRICS_CLIENTS = 5.0, 8
_GIST = {
    "worth": "Samples that the gist is worth",
    "arrivals": "Arrivals since the device last took part, not yet in the gist",
    "bytes": "Bytes of the gist at rest, with the sums over those arrivals",
    "trust": "How much of the gist was used when the device last took part",
    "likeness": "How alike a sample's gradients were then under the old model and the new one",
    "reach": "The correction's length then over that of the stored samples' gradient",
}


class Service:
    """The local API of one or several streams on one Unix socket."""

    def __init__(self, *agents: Agent) -> None:
        self._streams = {agent.config.stream: StreamApi(agent) for agent in agents}
        self._path = Path(agents[0].config.agent.socket)
        self._listener = Listener(self._path, _CONNECTIONS)
        self._listener.start(self._serve)

    def close(self) -> None:
        """Answer nobody any more."""
        self._path.unlink(missing_ok=True)
        self._listener.close()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(_PATIENCE)
        try:
            while (payload := receive_frame(connection)) is not None:
                self._listener.touch(connection)
                send_frame(connection, to_bytes(self.answer(payload)))
        except RejectedError as refusal:
            send_frame(connection, to_bytes(messages.Failed(refusal.reason, refusal.detail)))

    def answer(self, payload: bytes) -> messages.Reply:
        """Return the reply to one request, or the reason why it cannot be met."""
        try:
            request = from_bytes(
                payload, messages.Request | messages.ToStream | messages.AskStreams
            )
            name = ""
            if isinstance(request, messages.ToStream):
                name, request = request.stream, from_bytes(request.request, messages.Request)
            if isinstance(request, messages.AskStreams):
                return messages.Streams(tuple(self._streams))
        except RejectedError as refusal:
            return messages.Failed(refusal.reason, refusal.detail)
        if name not in self._streams:
            names = ", ".join(self._streams) or "none"
            if "" in self._streams:
                detail = "this agent has one stream, which has no name: leave it out"
            else:
                example = f"{self._path}#{next(iter(self._streams))}"
                detail = f"this agent has the streams {names}: name one of them, as in {example}"
            return messages.Failed("stream", detail)
        return self._streams[name].answer(request)


class StreamApi:
    """What one stream's agent answers."""

    def __init__(self, agent: Agent) -> None:
        self._agent, self._held_out = agent, _held_out(agent)

    def answer(self, request: messages.Request) -> messages.Reply:
        """Return the reply to one request, or the reason why it cannot be met."""
        agent = self._agent
        try:
            match request:
                case messages.AskStatus():
                    return summarise(agent)
                case messages.AskStored():
                    return stored_summary(agent)
                case messages.AskRefused():
                    return messages.RefusedRecords(tuple(agent.intake.refused))
                case messages.AskWhy(name, namespace):
                    with agent.lock:
                        return self._reasons(name, namespace)
                case messages.Erase():
                    return self._erase(request)
                case messages.Pull() | messages.Upload() | messages.Configure():
                    return self._operate(request)
            reply = messages.reply_of(agent, self._evaluate, request)
            if isinstance(reply, messages.Profiled | messages.EncryptedProfiled):
                terms = agreement_of(
                    agent.config.method,
                    region_term(agent.device.regions),
                    agent.config.samples.numbers,
                )
                return structs.replace(reply, agreement=terms)
            return reply
        except RejectedError as refusal:
            return messages.Failed(refusal.reason, refusal.detail)
        except FedkeepError as error:
            return messages.Failed("error", str(error))
        except Exception as error:
            log.exception("a request could not be answered")
            return messages.Failed(
                "error", f"the agent could not do that ({type(error).__name__}); its log says more"
            )

    def _operate(
        self, request: messages.Pull | messages.Upload | messages.Configure
    ) -> messages.Reply:
        """Return the reply to a request that takes samples out, or brings settings in."""
        match request:
            case messages.Pull():
                return self._pull(request)
            case messages.Upload(selection):
                return self._upload(selection)
            case messages.Configure(signed):
                if self._agent.remote is None:
                    raise RejectedError(
                        "settings",
                        "this device takes no settings from afar: it has no [remote] key_file",
                    )
                return messages.Configured(self._agent.remote.configure(signed))

    def _erase(self, asked: messages.Erase) -> messages.Erased:
        if asked == messages.Erase():
            raise RejectedError("erase", "say what to erase: an id, a label, a source or a time")
        label = label_number(self._agent.config.samples, asked.label)
        with self._agent.lock:
            store = self._agent.store
            notes = [*store.notes(), *store.unlabelled.values()]
            named = None if asked.id is None else self._numbers(asked.id, asked.namespace)
            ids = [
                note.id
                for note in notes
                if (named is None or note.id in named)
                and label in (None, note.label)
                and asked.source in (None, note.source)
                and (asked.since is None or note.wall >= asked.since)
                and (asked.until is None or note.wall <= asked.until)
            ]
            stored = {note.id for note in notes}
            if named is not None and (ids or not named & stored):
                # Those that are gone already: their tombstones and traces in the log still count.
                ids += sorted(self._gone(asked) - stored)
            return messages.Erased(self._agent.erase(ids))

    def _selected(self, asked: messages.SampleFilter) -> list[SampleMetadata]:
        """Return what is known of the samples that match, oldest first; the lock must be held."""
        samples, store = self._agent.config.samples, self._agent.store
        wanted = [label for label in asked.labels if label != _UNLABELLED]
        labels = {label_number(samples, label) for label in wanted}
        notes = store.notes() if wanted or not asked.labels else []
        if _UNLABELLED in asked.labels:
            labels.add(UNLABELLED)
            notes += sorted(store.unlabelled.values(), key=attrgetter("arrival"))
        own = [rule.name for rule in self._agent.config.method.rules]
        for name in asked.rules:
            if name not in own:
                raise RejectedError(
                    "select", f"there is no rule '{name}': {did_you_mean(name, own)}"
                )
        named = {n for id_ in asked.ids for n in self._numbers(id_, asked.namespace)}
        if asked.namespace is not None and not asked.ids:
            raise RejectedError("select", "a namespace says which id is meant: give that, too")
        return [
            note
            for note in notes
            if (not asked.ids or note.id in named)
            and (not labels or note.label in labels)
            and (not asked.sources or note.source in asked.sources)
            and (asked.since is None or note.wall >= asked.since)
            and (asked.until is None or note.wall <= asked.until)
            and (not asked.rules or not {*asked.rules}.isdisjoint(self._held_by(note)))
        ]

    def _held_by(self, note: SampleMetadata) -> Sequence[str]:
        """Return the rules that hold a sample, or want it kept until its label comes."""
        waits = note.label == UNLABELLED
        return note.rules if waits else self._agent.store.holders(note.id)

    def _pull(self, asked: messages.Pull) -> messages.Pulled:
        agent, size, found, last = self._agent, 0, list[messages.PulledSample](), None
        is_file = agent.config.samples.decoder is not None
        with agent.lock:
            arrivals = agent.store.arrivals()
            for id_, note in agent.store.unlabelled.items():  # they come behind what is stored
                arrivals[id_] = _BEHIND + note.arrival
            notes = [n for n in self._selected(asked.selection) if arrivals[n.id] > asked.after]
            for note in notes:
                if found and (size > _PULLED_BYTES or len(found) == _PULLED):
                    last = arrivals[found[-1].id]
                    break
                data = self._content(note)
                size += len(data)
                time = None if math.isnan(note.time) else note.time
                found.append(
                    messages.PulledSample(
                        note.id,
                        note.label,
                        data,
                        note.name,
                        note.source,
                        note.score,
                        note.wall,
                        time,
                        note.target,
                    )
                )
        shape = None if is_file else agent.config.samples.shape
        return messages.Pulled(tuple(found), shape, agent.config.samples.names, last)

    def _content(self, note: SampleMetadata) -> bytes:
        """Return the file of a sample, or its numbers as little-endian float32."""
        room, store = self._agent.device.waiting, self._agent.store
        if note.label != UNLABELLED or room is None or store.payload(note.id) is not None:
            return store.content(note.id)
        return bytes(room.x([note.id])[0].astype("<f4").tobytes())

    def _upload(self, asked: messages.SampleFilter) -> messages.Queued:
        uploads = self._agent.uploads
        if uploads is None:
            raise RejectedError(
                "upload",
                "no sample leaves this device: its configuration has no [upload] enabled = true",
            )
        if asked == messages.SampleFilter():
            raise RejectedError("upload", "say what to send: ids, labels, sources, rules or a time")
        with self._agent.lock:
            chosen = [one.id for one in self._selected(asked) if one.label != UNLABELLED]
            new = uploads.ask(chosen)
            return messages.Queued(new, len(uploads.waiting()), uploads.left_today())

    def _gone(self, asked: messages.Erase) -> set[int]:
        """Return the numbers that are to be refused from now on, stored or not.

        Where a source is named, those of its namespace alone.
        """
        assert asked.id is not None
        namespace = asked.namespace
        if namespace is None and asked.source is not None:
            namespace = self._agent.ids.namespace(asked.source)
        return self._numbers(asked.id, namespace)

    def _reasons(self, name: str, namespace: str | None) -> messages.Reasons:
        """Return the decisions on every sample whose id is written like this, oldest first."""
        store = self._agent.store
        known = ChainMap(store.records, store.unlabelled)
        numbers = sorted(self._numbers(name, namespace), key=lambda id_: id_ not in known)
        found = {reason for id_ in numbers for reason in store.log.about(id_)}
        decisions = sorted(found, key=lambda reason: reason.time)
        stored = any(id_ in store.records for id_ in numbers)
        waits = any(id_ in store.unlabelled for id_ in numbers)
        return messages.Reasons(numbers[0], stored, tuple(decisions), tuple(numbers), waits)

    def _numbers(self, name: str, namespace: str | None) -> set[int]:
        """Return the numbers of all ids that are written like this, here or in one namespace."""
        known = ChainMap(self._agent.store.records, self._agent.store.unlabelled)
        sources = {note.source for note in known.values() if note.source}
        return self._agent.ids.matches(name, sources, namespace)

    def _evaluate(self, model: Vector) -> messages.Evaluated:
        """Losses summed and labels right.

        On held-out samples where the operator gave some, else on what is stored.
        """
        agent, learner = self._agent, self._agent.device.learner
        screen_parameters(model, learner.size, "model")
        if self._held_out is not None:
            where, (x, y) = "held-out", self._held_out
        else:
            with agent.lock:
                batch = agent.store.stored().batch
            where, x, y = "stored", batch.x, batch.y
        loss, right, errors = 0.0, 0, None
        for start in range(0, len(y), _CHUNK):
            part = slice(start, start + _CHUNK)
            if agent.config.samples.numbers is None:
                losses, found = judge(learner, model, x[part], y[part])
                right += int(found.sum())
            else:
                losses, predicted = predict(learner, model, x[part], y[part])
                own = error_sums(predicted, y[part])
                errors = own if errors is None else errors + own
            loss += float(losses.sum())
        stats = agent.release_pipeline.vitals(vitals(agent))
        sums = None if errors is None else tuple(errors.tolist())
        return messages.Evaluated(len(y), loss, right, where, stats, sums)


def _held_out(agent: Agent) -> tuple[AnyArray, AnyArray] | None:
    """Return the samples of the file that `held_out` names, all of them sound."""
    path, form = agent.config.agent.held_out, agent.config.samples
    if not path:
        return None
    try:
        with np.load(path, allow_pickle=False) as arrays:
            x, y = arrays["x"], arrays["y"]
    except Exception as error:
        raise ConfigError(
            f"held_out must be an npz file with x and y, {path} is not: {error}"
        ) from error
    _, refused = screen_samples(x, y, form.shape, form.count, form.numbers)
    if refused:
        raise ConfigError(f"held_out file {path} holds unsound samples: {dict(refused)}")
    return x, y.astype(np.int64) if form.numbers is None else form.numbers.settled(y)


def summarise(agent: Agent) -> messages.Status:
    """Return the numbers that people and monitors ask for."""
    with agent.lock:
        device, store, gist = agent.device, agent.store, agent.device.gist
        scores, received, spending = (
            store.ranks()["scores"],
            agent.model_date.received,
            agent.release_pipeline.spending(),
        )
        known = None
        if gist is not None:
            taken = gist.nbytes + device.window.nbytes
            known = messages.GistStatus(gist.options.mode, gist.ess, device.window.count, taken)
            if (did := gist.latest) is not None:
                known = msgspec.structs.replace(
                    known, trust=did.beta, likeness=did.rho, reach=did.relative_norm
                )
        return messages.Status(
            samples=len(scores),
            capacity=device.capacity,
            bytes=store.file.bytes_used,
            budget=store.file.geometry.size,
            round=store.model_version,
            model_age_seconds=None if received is None else store.clock.now() - received,
            counters=agent.counters.counts(),
            stride=agent.intake.stride,
            policy=store.log.policy,
            preset=agent.config.preset,
            value_quantiles=tuple(np.quantile(scores, _QUANTILES).tolist()) if len(scores) else (),
            labels_held=len({note.label for note in store.records.values()}),
            labels=agent.config.samples.count,
            epsilon_spent=None if spending is None else spending.spent,
            epsilon_budget=None if spending is None else spending.budget,
            sample_bytes=store.sample_bytes,
            gist=known,
            waiting=agent.waiting,
            label_names=agent.config.samples.names,
            settings="" if agent.remote is None else agent.remote.file.summary(),
            uploads="" if agent.uploads is None else agent.uploads.summary(),
            unlabelled=_waiting(agent),
            drift=agent.watch.status(_changes(agent), store.clock.now()),
        )


def label_number(samples: SampleOptions, label: int | str | None) -> int | None:
    """Return the number of a label that is given by number or name.

    >>> label_number(SampleOptions((2,), 2, names=("ok", "worn")), "worn")
    1
    """
    if not isinstance(label, str):
        return label
    if label in samples.names:
        return samples.names.index(label)
    if label.isdecimal() and len(label) < 10:
        return int(label)
    known = did_you_mean(label, samples.names) if samples.names else "labels have numbers here"
    raise RejectedError("label", f"there is no label '{label}': {known}")


def _changes(agent: Agent) -> dict[str, int]:
    """Return how often the stream has changed, by what showed it."""
    return {name: agent.counters[f"drift.{name}"] for name in WATCHED}


def _waiting(agent: Agent) -> messages.WaitingStatus | None:
    """Return the figures of the waiting room; None without one."""
    room = agent.device.waiting
    if room is None:
        return None
    early = len(room.early)
    return messages.WaitingStatus(
        len(room), room.slots, room.options.rule, early, dict(room.counts)
    )


def vitals(agent: Agent) -> messages.DeviceStats:
    """Return the store in the few numbers that a fleet's page shows."""
    with agent.lock:
        labels = Counter(note.label for note in agent.store.records.values())
        counts = Counter(agent.counters.counts())
        changes = sum(_changes(agent).values())
        silent = len(agent.watch.silent(agent.store.clock.now()))
        figures = None if agent.device.gist is None else agent.device.gist.figures
        gist = None if figures is None else astuple(figures)
    kept, replaced = counts["kept"], counts["replaced"]
    refused = sum(count for name, count in counts.items() if name.startswith("refused."))
    filled = tuple(labels[label] for label in range(agent.config.samples.count))
    arrivals = kept + replaced + refused + counts["refreshed"]
    return messages.DeviceStats(
        labels.total(),
        filled,
        arrivals,
        kept,
        replaced,
        refused,
        gist=gist,
        changes=changes,
        silent=silent,
    )


def stored_summary(agent: Agent) -> messages.StoredSummary:
    """Return what is stored, by label."""
    with agent.lock:
        notes, now = agent.store.notes(), agent.store.clock.now()
        bytes_of = agent.store.bytes_of
    rows, label_of, names = [], attrgetter("label"), agent.config.samples.names
    for label, same in groupby(sorted(notes, key=label_of), label_of):
        found = list(same)
        low, middle, high = np.quantile([note.score for note in found], (0.0, 0.5, 1.0)).tolist()
        ages, size = [now - note.taken for note in found], sum(map(bytes_of, found))
        rows.append(
            messages.LabelSummary(
                label,
                len(found),
                size,
                low,
                middle,
                high,
                max(ages),
                min(ages),
                names[label] if names else "",
            )
        )
    return messages.StoredSummary(tuple(rows))


@dataclass(frozen=True)
class Collector:
    """Turns the agent's status into metrics."""

    agent: Agent

    def collect(self) -> "Iterator[Metric]":
        """Yield every metric as it is now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        status = summarise(self.agent)
        for name, text, value in (
            ("bytes_used", "Bytes of the store that hold samples and state", status.bytes),
            ("bytes_budget", "Bytes that the store may take", status.budget),
            ("samples", "Samples stored", status.samples),
            ("capacity", "Samples that the budget holds", status.capacity),
            ("labels_held", "Labels of which at least one sample is stored", status.labels_held),
            ("labels", "Labels of the task", status.labels),
            ("stride", "One of this many arrivals is valued", status.stride),
            (
                "writes_spent",
                "1 while daily_writes allows no more for now and nothing is valued",
                int(self.agent.writes_spent),
            ),
            (
                "disk_waiting",
                "1 while the disk takes no writes and every source is held back",
                int(bool(self.agent.disk_error)),
            ),
            (
                "model_round",
                "The round of the model last received, -1 before the first",
                status.round,
            ),
            (
                "sample_bytes",
                "Bytes of the budget that one stored sample takes",
                status.sample_bytes,
            ),
            (
                "seconds_per_sample",
                "Time to value and judge one sample",
                self.agent.seconds_per_sample,
            ),
            ("epsilon_spent", "Epsilon spent of the privacy budget", status.epsilon_spent),
            ("epsilon_budget", "Epsilon that may be spent", status.epsilon_budget),
            (
                "model_age_seconds",
                "Seconds since the model and g_hat were received",
                status.model_age_seconds,
            ),
        ):
            if value is not None:
                yield GaugeMetricFamily(f"fedkeep_{name}", text, value)
        if status.gist is not None:
            for field, value in msgspec.structs.asdict(status.gist).items():
                if isinstance(value, float | int):
                    gauge = GaugeMetricFamily(
                        f"fedkeep_gist_{field}", _GIST[field], labels=["form"]
                    )
                    gauge.add_metric([status.gist.name], value)
                    yield gauge
        if (room := status.unlabelled) is not None:
            yield GaugeMetricFamily(
                "fedkeep_waiting_samples", "Samples that wait for their label", room.samples
            )
            yield GaugeMetricFamily("fedkeep_waiting_slots", "Slots for them", room.slots)
            yield GaugeMetricFamily(
                "fedkeep_early_labels", "Labels that came before their samples", room.early_labels
            )
            left = CounterMetricFamily(
                "fedkeep_waiting", "Samples without a label by what became of them", labels=["fate"]
            )
            for name, count in room.counts.items():
                left.add_metric([name], count)
            yield left
        yield from _drift_metrics(status.drift)
        disk = self.agent.store.file.disk
        for name, text, count in (
            ("written_bytes", "Bytes handed to the store's file since the start", disk.written),
            ("block_bytes", "Bytes of the sectors or pages that they touch", disk.block_bytes),
            ("syncs", "Syncs of the store's file since the start", disk.syncs),
        ):
            yield CounterMetricFamily(f"fedkeep_store_{name}", text, count)
        values = GaugeMetricFamily(
            "fedkeep_value", "Values of the samples stored", labels=["quantile"]
        )
        for quantile, value in zip(_QUANTILES, status.value_quantiles, strict=False):
            values.add_metric([f"{quantile:g}"], value)
        yield values
        fates = CounterMetricFamily(
            "fedkeep_arrivals", "Arrivals by what became of them", labels=["fate", "reason"]
        )
        for name, count in status.counters.items():
            fate, _, reason = name.partition(".")
            if fate == "drift":
                continue
            fates.add_metric([fate, reason], count)
        yield fates


def _drift_metrics(drift: messages.DriftStatus) -> "Iterator[Metric]":
    """Yield whether the stream has changed, or stopped."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    changes = CounterMetricFamily(
        "fedkeep_stream_changes", "Changes of the stream, by what showed them", labels=["of"]
    )
    for name, count in drift.changes.items():
        changes.add_metric([name], count)
    yield changes
    quiet = GaugeMetricFamily(
        "fedkeep_source_quiet_seconds", "Seconds since something came", labels=["source"]
    )
    silent = GaugeMetricFamily(
        "fedkeep_source_silent", "1 while a source is silent", labels=["source"]
    )
    for source, seconds in drift.quiet_seconds.items():
        quiet.add_metric([source], seconds)
        silent.add_metric([source], int(source in drift.silent))
    yield quiet
    yield silent


@dataclass(frozen=True)
class StreamsCollector:
    """Turns the status of several streams into metrics, each labelled with its stream."""

    agents: tuple[Agent, ...]

    def collect(self) -> "Iterator[Metric]":
        """Yield every metric of every stream as it is now."""
        from prometheus_client.core import Metric

        families: dict[str, Metric] = {}
        for agent in self.agents:
            for found in Collector(agent).collect():
                family = families.setdefault(
                    found.name, Metric(found.name, found.documentation, found.type)
                )
                family.samples += [
                    one._replace(labels={"stream": agent.config.stream, **one.labels})
                    for one in found.samples
                ]
        yield from families.values()


def serve_metrics(*agents: Agent) -> Callable[[], None]:
    """Start the endpoint and returns what stops it; without a port there is none.

    Not by the client library's own server: it would take as many connections as come, and
    descriptors are few.
    """
    options = agents[0].config.metrics
    if not options.port:
        return lambda: None
    require_loopback(options.host, "[metrics] host", insecure=options.insecure)
    with optional_import("the metrics endpoint", "agent"):
        from prometheus_client import CollectorRegistry, MetricsHandler
    registry = CollectorRegistry()
    registry.register(StreamsCollector(agents) if agents[0].config.stream else Collector(agents[0]))

    class Handler(MetricsHandler.factory(registry)):  # type: ignore[misc]
        def do_GET(self) -> None:  # noqa: N802 - the name that http.server calls
            # A query would choose metrics by name, and `?name[]=` none of them.
            self.path: str = urlsplit(self.path).path
            super().do_GET()

    listener = Listener((options.host, options.port), _METRICS_CLIENTS)

    def answer(connection: socket.socket) -> None:
        connection.settimeout(_METRICS_PATIENCE)
        Handler(connection, connection.getpeername(), None)

    listener.start(answer)
    return listener.close
