"""A strategy for Flower over the core's Server: profiles, plan, rounds, transactions.

A round, in the order of its calls. `_await_devices`: `membership` sees who is there, asks newcomers
what they declare, and plans. `_play`: the server opens the round, `codec` makes Flower's records of
its orders, `exchange` sends them. On the device `client_app` hands the order to whatever device is
behind the node, and its report back. `_take` reads and screens each report; when enough are there,
or the time is over, the server merges them. Then the record (`recording`), then the commit
(`state_store`): a round counts once that is done.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedkeep.core.errors import ConfigError, RejectedError, RejectionReason
from fedkeep.core.protocols import Stateful
from fedkeep.core.rounds import RoundSummary, merge_evaluations
from fedkeep.core.server import Server
from fedkeep.core.state import restore_parts, snapshot_parts
from fedkeep.core.types import DeviceId
from fedkeep.flower import codec
from fedkeep.flower.codec import EVALUATE, MASK, PROFILE, SHARE, TRAIN, UNMASK
from fedkeep.flower.exchange import Exchange, PendingRequest, give_back_large_arrays
from fedkeep.flower.membership import Membership
from fedkeep.flower.recording import FleetRecorder
from fedkeep.flower.rounds import Rejections, RoundOptions, RoundOutcome, ServerMetrics
from fedkeep.flower.state_store import StateStore
from fedkeep.keyholder.service import RemotePlanner
from fedkeep.privacy.secagg import protocol
from fedkeep.privacy.secagg.server import SecureAggregationServer
from fedkeep.protocol.messages import AskSum, Evaluate, Evaluated, Participate
from fedkeep.protocol.wire import from_array, to_array

log = logging.getLogger("fedkeep.flower")

_PAUSE_SECONDS = 0.5
_LOOK_SECONDS = 5.0
"""Between two looks at who is online while a round is open, for the record."""
_BYTES_A_DEVICE = 512
"""More than any exchange of a secure sum says about one device, its words apart."""

Answer = TypeVar(
    "Answer", protocol.Keys, protocol.Envelopes, protocol.MaskedWords, protocol.OpenedShares
)


@dataclass(eq=False, repr=False)
class FedkeepStrategy:
    """The server's side of a deployment; `rounds` is an iterator, so nobody copies its loop.

    With `sums`, rounds are secure: the server learns sums only. With a `planner`, devices encrypt
    their profiles, and it makes the plans.

    >>> from fedkeep.config.method import parse_fleet
    >>> spec = parse_fleet({"samples": {"shape": [30], "labels": 10}, "model": {"name": "softmax"}})
    >>> strategy = FedkeepStrategy(spec.server())
    >>> strategy.resume(), strategy.server.round  # then: strategy.rounds(grid, 100)
    (False, 0)
    """

    server: Server
    options: RoundOptions = field(default_factory=RoundOptions)
    store: StateStore | None = None
    sums: SecureAggregationServer | None = None
    planner: RemotePlanner | None = None
    recorder: FleetRecorder | None = None
    metrics: ServerMetrics | None = None
    agreement: Mapping[str, str] | None = None
    """What devices must have configured alike (`config.agreement`); None: it is not checked."""
    specification: Mapping[str, str] | None = None
    """What cannot change while a run goes on; saved with it. None: it is neither."""

    def __post_init__(self) -> None:
        self._rejections, self._tally, self._valid = Rejections(), np.zeros(2, dtype=np.int64), 0
        self._membership = Membership(
            self.server, self.options, self._rejections, self.planner, self.agreement
        )
        self._parts: dict[str, Stateful] = {"server": self.server, "roster": self._membership}
        self._late: list[tuple[PendingRequest, Message]] = []
        """Reports that came between two rounds."""
        if self.sums is not None:
            self._parts["sums"] = self.sums

    def resume(self) -> bool:
        """Resume the run where its state store has it; return False if it has nothing."""
        saved = self.store.load() if self.store is not None else None
        if saved is None:
            return False
        if any(name.startswith("sums.") for name in saved.state) != (self.sums is not None):
            words = "resume it as it was, or begin another"
            raise ConfigError(
                f"this run was saved with another privacy.secure_aggregation: {words}"
            )
        if self.specification is not None and "specification" in saved.state:
            before = from_array(saved.state["specification"], dict[str, str])
            require_same(before, self.specification, "begin another run by --run NAME")
        model = saved.state["server.model"]
        if len(model) != len(self.server.model):
            raise ConfigError(
                f"the saved model has {len(model)} parameters, the configured one "
                f"{len(self.server.model)}: configure it as it was, or begin another run"
            )
        restore_parts(self._parts, saved.state)
        self._tally[:] = saved.state.get("tally.bytes", 0)
        log.info("resumed: round %d is next", self.server.round)
        return True

    def rounds(self, grid: Grid, num_rounds: int) -> Iterator[RoundOutcome]:
        """Play rounds until `num_rounds` are closed, counting those before a resume."""
        give_back_large_arrays()
        next_look = 0.0

        def look() -> None:
            """Record who is there while the server waits, every few seconds."""
            nonlocal next_look
            if self.recorder is not None and time.monotonic() >= next_look:
                next_look = time.monotonic() + _LOOK_SECONDS
                self._membership.watch(node.node_id for node in grid.get_nodes())
                self.recorder.note_members(self.server.round, self._membership)

        exchange = Exchange(grid, tally=self._tally, meanwhile=look)
        with nullcontext() if self.recorder is None else self.recorder.recording(self.server):
            self._await_devices(exchange, self.options.min_devices)
            while self.server.round < num_rounds:
                yield self._next(exchange)

    def _next(self, exchange: Exchange) -> RoundOutcome:
        """Play a round, from seeing who is there to its commit."""
        began = time.monotonic()
        self._await_devices(exchange, least=1)
        summary, quorate = self._play(exchange)
        oldest = summary.round - self.server.staleness  # whose reports still count
        exchange.asked = {
            key: asked for key, asked in exchange.asked.items() if asked.round >= oldest
        }
        evaluated = self._evaluated(exchange, summary.round)
        figures = {
            device: (own.samples, own.total_loss, own.correct) for device, own in evaluated.items()
        }
        errors = {device: own.errors for device, own in evaluated.items() if own.errors is not None}
        evaluation, cuts = merge_evaluations(
            figures, capped=self.server.limits.enabled, errors=errors
        )
        self._rejections.add(*cuts, *summary.rejections)
        rejections = self._rejections.take()
        outcome = RoundOutcome(
            summary, quorate, rejections, time.monotonic() - began, evaluated, evaluation
        )
        if self.recorder is not None:
            self.recorder.note(outcome, self.server, self._membership, self._tally)
        if self.metrics is not None:
            self.metrics.see(outcome, len(self._membership.online), *self._tally.tolist())
        if self.store is not None:
            state = snapshot_parts(self._parts) | {"tally.bytes": self._tally}
            if self.specification is not None:
                state["specification"] = to_array(dict(self.specification))
            self.store.commit(self.server.round, state)
        named = [f"{rejection.device}: {rejection.reason}" for rejection in rejections]
        log.info("round %d: %s %s", summary.round, outcome.metrics() | evaluation, named or "")
        return outcome

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run as Flower's entry point; `server` and `options` say how to train and to wait."""
        if initial_arrays is not None and self.server.round == 0:
            if set(initial_arrays) != {"model"}:
                raise ConfigError(f"expected one array 'model', got {sorted(initial_arrays)[:5]}")
            self.server.set_model(initial_arrays["model"].numpy())
        result = Result()
        result.arrays = self._arrays()
        for outcome in self.rounds(grid, num_rounds):
            number, result.arrays = outcome.summary.round + 1, self._arrays()
            result.train_metrics_clientapp[number] = MetricRecord(outcome.metrics())
            if outcome.evaluation:
                result.evaluate_metrics_clientapp[number] = MetricRecord(dict(outcome.evaluation))
            if (
                evaluate_fn is not None
                and (measured := evaluate_fn(number, result.arrays)) is not None
            ):
                result.evaluate_metrics_serverapp[number] = measured
        return result

    def _arrays(self) -> ArrayRecord:
        return ArrayRecord({"model": Array(np.ascontiguousarray(self.server.model))})

    def _await_devices(self, exchange: Exchange, least: int) -> None:
        """Sees who is online, plans for them, and waits until they are enough."""
        shown = -1
        while True:
            self._membership.poll(exchange)
            for asked, reply in exchange.arrived():
                self._greet(asked, reply)
            self._membership.plan()
            online = len(self._membership.nodes())
            if online >= least:
                return
            if online != shown:
                log.info("waiting for devices: %d of %d are online", online, least)
            shown = online
            for asked, reply in exchange.collect(_PAUSE_SECONDS, lambda: False):
                self._greet(asked, reply)

    def _play(self, exchange: Exchange) -> tuple[RoundSummary, bool]:
        """Plays a round (steps 7 and 8); without a quorum it changes nothing."""
        round_, options, nodes = self.server.round, self.options, self._membership.nodes()
        chosen = self.server.select(round_, sorted(nodes), options.asked(len(nodes)))
        if self.sums is not None:
            return self._play_sum(exchange, self.sums, chosen, nodes)
        orders, wanted, self._valid = self.server.open_round(chosen), options.wanted(len(nodes)), 0
        encoded = codec.encode_all(map(Participate.of, orders.values()))
        contents = dict(zip((nodes[device] for device in orders), encoded, strict=True))

        def order(node: int) -> Message:
            return Message(contents[node], node, TRAIN, group_id=str(round_))

        def enough() -> bool:
            return self._valid >= wanted or not exchange.waiting(round_, TRAIN)

        exchange.send(map(order, contents), round_)
        for late in self._late:
            self._take(*late)
        self._late = []
        for asked, reply in exchange.collect(options.patience, enough):
            if asked.kind != TRAIN:
                self._greet(asked, reply)
            elif options.deterministic and reply.has_error():
                log.warning("node %d: %s; asked again", asked.node, reply.error.reason)
                time.sleep(_PAUSE_SECONDS)
                exchange.send([order(asked.node)], round_)
            else:
                self._take(asked, reply)
        quorate = self._valid >= options.least(wanted)
        if not quorate:
            self.server.open_round(chosen)
        return self.server.close_round(), quorate

    def _evaluated(self, exchange: Exchange, round_: int) -> dict[DeviceId, Evaluated]:
        """How the model does on the devices' own samples, where it is time to ask them."""
        every, evaluated = self.options.evaluate_every, dict[DeviceId, Evaluated]()
        if not every or (round_ + 1) % every:
            return evaluated
        content, nodes = (
            codec.encode(Evaluate(self.server.model)),
            self._membership.nodes().values(),
        )
        exchange.send(
            [Message(content, node, EVALUATE, group_id=str(round_)) for node in nodes], round_
        )
        for node, reply in self._answers(exchange, round_, EVALUATE):
            with self._rejections.attributed_to(device := self._membership.online.get(node, node)):
                evaluated[device] = codec.decode_evaluation(codec.content_of(reply))
        return evaluated

    def _answers(
        self, exchange: Exchange, round_: int, kind: str, enough: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[int, Message]]:
        """Nodes and their replies to a round's messages of a kind, until `enough` or all came."""
        patience = self.options.patience
        for asked, reply in exchange.collect(
            patience, lambda: enough() or not exchange.waiting(round_, kind)
        ):
            if (asked.round, asked.kind) == (round_, kind):
                yield asked.node, reply
            else:
                self._greet(asked, reply)

    def _greet(self, asked: PendingRequest, reply: Message) -> None:
        """Take in a profile; a report that comes between two rounds waits for the next to open."""
        if asked.kind == PROFILE:
            self._membership.register(asked, reply)
        elif asked.kind == TRAIN and self.sums is None:
            self._late.append((asked, reply))
        elif asked.kind == TRAIN:
            with self._rejections.attributed_to(
                self._membership.online.get(asked.node, asked.node)
            ):
                raise RejectedError(
                    RejectionReason.LATE, f"it is not in the sum of round {asked.round}"
                )

    def _take(self, asked: PendingRequest, reply: Message) -> None:
        """Take the reply to an order into the open round, or rejects it by name."""
        device = self._membership.online.get(
            asked.node, asked.node
        )  # the node's own number if it has left since
        with self._rejections.attributed_to(device):
            if device not in self._membership.nodes():
                raise RejectedError(RejectionReason.LEFT, f"node {asked.node} has left the fleet")
            parameters = len(self.server.model) + self.server.gradient_size
            report = codec.decode_report(codec.content_of(reply), parameters)
            if report.round != asked.round:
                raise RejectedError(
                    "replayed", f"a report of round {report.round} to an order of {asked.round}"
                )
            rejection = self.server.receive(device, report)
            if rejection is not None:
                raise RejectedError(rejection.reason, rejection.detail)
            self._valid += 1

    def _play_sum(
        self,
        exchange: Exchange,
        sums: SecureAggregationServer,
        chosen: tuple[DeviceId, ...],
        nodes: Mapping[DeviceId, int],
    ) -> tuple[RoundSummary, bool]:
        """Plays a round by a secure sum; with too few devices it changes nothing.

        Each of its four exchanges may take as long as `rounds.deadline`. In deterministic mode a
        round in which a node failed is played again: all of them must be in the sum.
        """
        while True:
            self._failed = False
            try:
                return self._sum(exchange, sums, chosen, nodes), True
            except RejectedError as error:
                log.warning("round %d: %s", self.server.round, error)
            if not (self.options.deterministic and self._failed):
                self.server.open_round(chosen)
                return self.server.close_round(), False
            time.sleep(_PAUSE_SECONDS)

    def _sum(
        self,
        exchange: Exchange,
        sums: SecureAggregationServer,
        chosen: tuple[DeviceId, ...],
        nodes: Mapping[DeviceId, int],
    ) -> RoundSummary:
        """Play the four exchanges; raise before any change if too few devices are left."""
        wanted = self.options.wanted(len(nodes))
        orders = self.server.open_round(chosen)
        opened = sums.open(chosen)
        asked = exchange, opened, nodes
        contents = codec.encode_all(
            Participate.of(order, protocol.encode(opened.terms[d])) for d, order in orders.items()
        )
        asking = dict(zip(orders, contents, strict=True))
        keys = self._ask(*asked, TRAIN, asking, protocol.Keys, max(wanted, opened.threshold))
        roster = opened.open({device: answer.keys for device, answer in keys.items()})
        sealed = self._ask(*asked, SHARE, dict.fromkeys(keys, _content(roster)), protocol.Envelopes)
        asking = {device: _content(envelopes) for device, envelopes in opened.route(sealed).items()}
        for device, words in self._ask(*asked, MASK, asking, protocol.MaskedWords).items():
            with self._rejections.attributed_to(device):
                opened.receive(device, words)
        survivors, least = opened.survivors(), self.options.least(wanted)
        if len(survivors) < least:
            raise RejectedError(
                RejectionReason.TOO_FEW_DEVICES, f"{len(survivors)} of {least} are in the sum"
            )
        asking = dict.fromkeys(survivors, _content(protocol.Survivors(opened.session, survivors)))
        shares = self._ask(*asked, UNMASK, asking, protocol.OpenedShares, opened.threshold)
        lost = any(answer.lost for answer in keys.values())
        return sums.close(opened, survivors, lost=lost, total=opened.total(shares))

    def _ask(
        self,
        exchange: Exchange,
        opened: protocol.AggregationSession,
        nodes: Mapping[DeviceId, int],
        kind: str,
        contents: Mapping[DeviceId, RecordDict],
        expected: type[Answer],
        enough: float = np.inf,
    ) -> dict[DeviceId, Answer]:
        """Return the valid answers of all devices asked, or of the first `enough`."""
        round_, most = (
            self.server.round,
            8 * opened.size + _BYTES_A_DEVICE * (1 + len(opened.terms)),
        )
        exchange.send(
            [Message(c, nodes[d], kind, group_id=str(round_)) for d, c in contents.items()], round_
        )
        devices = {node: device for device, node in nodes.items()}
        answers: dict[DeviceId, Answer] = {}
        for node, reply in self._answers(exchange, round_, kind, lambda: len(answers) >= enough):
            self._failed |= reply.has_error()
            with self._rejections.attributed_to(devices[node]):
                answer: Answer = protocol.decode(
                    codec.decode_answer(codec.content_of(reply), most), expected
                )
                if answer.session != opened.session:
                    raise RejectedError(RejectionReason.REPLAYED, "it answers to another sum")
                if isinstance(answer, protocol.Keys):
                    protocol.require_usable(answer.keys)
                answers[devices[node]] = answer
        return answers


def require_same(before: Mapping[str, str], now: Mapping[str, str], anew: str) -> None:
    """Raise if what cannot change while a run goes on has changed.

    Parameters
    ----------
    before, now : Mapping of str to str
        The terms with which the run was saved, and those of today.
    anew : str
        What to do to begin anew, as the end of a sentence.

    Raises
    ------
    ConfigError
        With the keys that differ, and both values.

    Examples
    --------
    >>> try:
    ...     require_same({"samples.labels": "10"}, {"samples.labels": "12"}, "run `reset`")
    ... except ConfigError as error:
    ...     print(str(error).partition(":")[0])
    samples.labels was 10 when this run was saved and is 12 now
    """
    differing = [
        f"{key} was {before.get(key, 'not set')} when this run was saved and is "
        f"{now.get(key, 'not set')} now"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    if differing:
        raise ConfigError(f"{'; '.join(differing)}: change it back, or {anew}")


def _content(request: protocol.Request) -> RecordDict:
    return codec.encode(AskSum(protocol.encode(request)))
