"""Flower's Strategy over the core's Server: profiles, plan, rounds that close, one transaction each.

A round, in the order of its calls. `_await_devices`: `membership` sees who is there, asks newcomers what they declare,
and plans. `configure_train`: the server opens the round, `codec` makes Flower's records of its orders, `exchange` sends
them. On the device `client_app` hands the order to whatever device is behind the node, and its report back. `_take`
reads and screens each report; when enough are there, or the time is over, the server merges them. Then the record
(`recording`), then the commit (`state_store`): a round counts once that is done.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedkeep.core.errors import ConfigError, RefusedError
from fedkeep.core.evaluations import merge_evaluations
from fedkeep.core.ports import Kept
from fedkeep.core.rounds import Refusal, RoundSummary
from fedkeep.core.server import Server
from fedkeep.core.state import restore_parts, snapshot_parts
from fedkeep.core.types import DeviceId
from fedkeep.flower import codec
from fedkeep.flower.codec import EVALUATE, PROFILE, TRAIN
from fedkeep.flower.exchange import Asked, Exchange, WireTraffic
from fedkeep.flower.membership import EncryptedMembership, Membership, Roster
from fedkeep.flower.recording import FleetRecorder
from fedkeep.flower.rounds import Refusals, RoundOptions, RoundOutcome, ServerMetrics
from fedkeep.flower.secure_rounds import SecureRounds
from fedkeep.flower.state_store import StateStore
from fedkeep.keyholder.planner import RemotePlanner
from fedkeep.link.messages import Evaluate, Evaluated, Participate
from fedkeep.privacy.sum_book import SumBook

log = logging.getLogger("fedkeep.flower")

_PAUSE_SECONDS = 0.5
_LOOK_SECONDS = 5.0
"""Between two looks at who is there while a round is open: the record tells of a device that died in it."""


class FedkeepStrategy(Strategy):
    """The server's side of a deployment; `rounds` is an iterator, so nobody copies the loop to log or to save.

    With `sums`, rounds are secure: the server learns sums only. With a `planner`, devices encrypt their profiles, and
    it makes the plans.

    >>> from fedkeep.fleet.specification import parse_fleet
    >>> spec = parse_fleet({"samples": {"shape": [30], "labels": 10}, "model": {"name": "softmax"}})
    >>> strategy = FedkeepStrategy(spec.server(), codec.Sizes(model=310, gradient=310, regions=10))
    >>> strategy.resume(), strategy.server.round  # then: for outcome in strategy.rounds(grid, 100): ...
    (False, 0)
    """

    def __init__(
        self,
        server: Server,
        sizes: codec.Sizes,
        options: RoundOptions = RoundOptions(),
        store: StateStore | None = None,
        sums: SumBook | None = None,
        planner: RemotePlanner | None = None,
        recorder: FleetRecorder | None = None,
        metrics: ServerMetrics | None = None,
    ) -> None:
        self.server, self.options, self.store = server, options, store
        self.sizes, self.recorder, self.metrics = sizes, recorder, metrics
        self._roster, self._tally = Roster(options.identity), WireTraffic()
        self._parts: dict[str, Kept] = {"server": server, "roster": self._roster, "tally": self._tally}
        self._evaluated: dict[DeviceId, Evaluated] = {}
        self._refusals = Refusals()
        known = (server, self._roster, sizes, self._refusals)
        self._membership = (
            Membership(*known) if planner is None else EncryptedMembership(*known, planner, options.min_devices)
        )
        self._sound, self._next_look = 0, 0.0
        self._late: list[tuple[Asked, Message]] = []
        """Reports that came between two rounds."""
        self._secure: SecureRounds | None = None
        if sums is not None:
            self._parts["sums"] = sums
            self._secure = SecureRounds(server, sums, options, self._refusals, self._greet)

    def resume(self) -> bool:
        """Takes up the run where its state store has it; False if it has nothing."""
        saved = self.store.load() if self.store is not None else None
        if saved is None:
            return False
        if any(name.startswith("sums.") for name in saved.state) != (self._secure is not None):
            raise ConfigError(
                "this run was saved with another privacy.secure_sum: resume it as it was, or begin another"
            )
        restore_parts(self._parts, saved.state)
        log.info("resumed: round %d is next", self.server.round)
        return True

    def rounds(self, grid: Grid, num_rounds: int) -> Iterator[RoundOutcome]:
        """Plays rounds until `num_rounds` are closed, counting those before a resume."""
        exchange = Exchange(grid, tally=self._tally, meanwhile=partial(self._look, grid))
        with nullcontext() if self.recorder is None else self.recorder.recording(self.server.round):
            self._await_devices(exchange, self.options.min_devices)
            while self.server.round < num_rounds:
                yield self._next(exchange)
            if self.recorder is not None:
                self.recorder.finish(self.server.round, self.server.model)

    def _next(self, exchange: Exchange) -> RoundOutcome:
        """A round, from seeing who is there to its commit."""
        began = time.monotonic()
        self._await_devices(exchange, least=1)
        summary, quorate = self._play(exchange)
        exchange.abandon(summary.round - self.server.staleness)
        evaluation = self._evaluate(exchange, summary.round)
        self._refusals.add(*summary.refusals)
        refused = self._refusals.taken()
        outcome = RoundOutcome(summary, quorate, refused, time.monotonic() - began, evaluation)
        if self.recorder is not None:
            self.recorder.note(outcome, self.server, self._roster, self._tally, self._evaluated)
        if self.metrics is not None:
            self.metrics.see(outcome, len(self._roster.online()), self._tally.down, self._tally.up)
        if self.store is not None:
            self.store.commit(self.server.round, snapshot_parts(self._parts))
        named = [f"{refusal.device}: {refusal.reason}" for refusal in refused]
        log.info("round %d: %s %s", summary.round, outcome.metrics() | dict(evaluation), named or "")
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
        """Flower's entry point, over `rounds`; how to train and to wait is `server`'s and `options`' to say."""
        if initial_arrays is not None and self.server.round == 0:
            if set(initial_arrays) != {"model"}:
                raise ConfigError(f"expected one array 'model', got {sorted(initial_arrays)[:5]}")
            self.server.model = initial_arrays["model"].numpy().astype(np.float32)
        self.summary()
        result = Result()
        result.arrays = codec.arrays_of(self.server.model)
        for outcome in self.rounds(grid, num_rounds):
            number = outcome.summary.round + 1
            result.arrays = codec.arrays_of(self.server.model)
            result.train_metrics_clientapp[number] = MetricRecord(outcome.metrics())
            if outcome.evaluation:
                result.evaluate_metrics_clientapp[number] = MetricRecord(dict(outcome.evaluation))
            if evaluate_fn is not None and (measured := evaluate_fn(number, result.arrays)) is not None:
                result.evaluate_metrics_serverapp[number] = measured
        return result

    def summary(self) -> None:
        """Logs how rounds are played."""
        log.info("%s; round %d is next", self.options, self.server.round)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Opens a round: one order per device chosen (step 7)."""
        nodes, group = self._membership.nodes(), str(self.server.round)
        orders = self.server.open_round(self._chosen())
        self._sound = 0
        contents = zip(orders, codec.encode_all(map(Participate, orders.values())), strict=True)
        return [Message(content, nodes[device], TRAIN, group_id=group) for device, content in contents]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Closes the round over the replies taken so far and these (step 8)."""
        for reply in replies:
            self._take(Asked(reply.metadata.src_node_id, self.server.round, TRAIN), reply)
        summary = self.server.close_round()
        return codec.arrays_of(self.server.model), MetricRecord({"accepted": len(summary.accepted)})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Asks every device online how the model does on samples of its own."""
        content, group = codec.encode(Evaluate(self.server.model)), str(server_round)
        return [Message(content, node, EVALUATE, group_id=group) for node in self._membership.nodes().values()]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Loss and accuracy over all devices that answered, weighted by their samples, and a robust accuracy."""
        for reply in replies:
            device = self._number(reply.metadata.src_node_id)
            with self._refusals.naming(device):
                self._evaluated[device] = codec.decode_evaluation(codec.content_of(reply))
        told = {device: (said.samples, said.total_loss, said.correct) for device, said in self._evaluated.items()}
        merged, cut = merge_evaluations(told, self.server.limits)
        self._refusals.add(*cut)
        return MetricRecord(dict(merged)) if merged else None

    def _chosen(self) -> tuple[DeviceId, ...]:
        devices = sorted(self._membership.nodes())
        return self.server.select(self.server.round, devices, self.options.asked(len(devices)))

    def _await_devices(self, exchange: Exchange, least: int) -> None:
        """Sees who is online, plans for them, and waits until they are enough."""
        told = -1
        while True:
            self._membership.meet(exchange, time.monotonic())
            for asked, reply in exchange.arrived():
                self._greet(asked, reply)
            self._membership.plan()
            online = len(self._membership.nodes())
            if online >= least:
                return
            if online != told:
                log.info("waiting for devices: %d of %d are online", online, least)
            told = online
            for asked, reply in exchange.collect(_PAUSE_SECONDS, lambda: False):
                self._greet(asked, reply)

    def _look(self, grid: Grid) -> None:
        """Records who is there while the server waits, every few seconds."""
        if self.recorder is not None and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_SECONDS
            self._roster.watch(grid.get_nodes())
            self.recorder.note_members(self.server.round, self._roster)

    def _play(self, exchange: Exchange) -> tuple[RoundSummary, bool]:
        """Opens a round, waits for its reports and closes it; without a quorum it changes nothing."""
        if self._secure is not None:
            return self._secure.play(exchange, self._chosen(), self._membership.nodes())
        round_, options = self.server.round, self.options
        orders = {m.metadata.dst_node_id: m for m in self.configure_train(round_, *_UNUSED, exchange.grid)}
        participants = sorted(self._number(node) for node in orders)
        wanted = options.wanted(len(self._membership.nodes()))
        exchange.send(orders.values(), round_)
        for late in self._late:
            self._take(*late)
        self._late = []

        def enough() -> bool:
            return self._sound >= wanted or not exchange.waiting(round_, TRAIN)

        for asked, reply in exchange.collect(options.patience, enough):
            if asked.kind != TRAIN:
                self._greet(asked, reply)
            elif options.deterministic and reply.has_error():
                log.warning("node %d: %s; asked again", asked.node, reply.error.reason)
                time.sleep(_PAUSE_SECONDS)
                again = Message(orders[asked.node].content, asked.node, TRAIN, group_id=str(asked.round))
                exchange.send([again], asked.round)
            else:
                self._take(asked, reply)
        quorate = self._sound >= options.least(wanted)
        if not quorate:
            self.server.open_round(participants)
        return self.server.close_round(), quorate

    def _evaluate(self, exchange: Exchange, round_: int) -> Mapping[str, float]:
        self._evaluated, every = {}, self.options.evaluate_every
        if not every or (round_ + 1) % every:
            return {}
        exchange.send(self.configure_evaluate(round_, *_UNUSED, exchange.grid), round_)
        replies = exchange.answers(round_, EVALUATE, self.options.patience, self._greet)
        record = self.aggregate_evaluate(round_, (reply for _, reply in replies))
        return {} if record is None else {k: v for k, v in record.items() if not isinstance(v, list)}

    def _greet(self, asked: Asked, reply: Message) -> None:
        """Takes in a profile; a report that comes between two rounds waits for the next to open."""
        if asked.kind == PROFILE:
            self._membership.introduce(asked, reply)
        elif asked.kind == TRAIN and self._secure is None:
            self._late.append((asked, reply))
        elif asked.kind == TRAIN:
            words = f"it is not in the sum of round {asked.round}"
            self._refusals.add(Refusal(self._number(asked.node), "late", words))

    def _take(self, asked: Asked, reply: Message) -> None:
        """Takes the reply to an order into the open round; what is not sound is refused and its sender named."""
        device = self._number(asked.node)
        with self._refusals.naming(device):
            if device not in self._membership.nodes():
                raise RefusedError("left", f"node {asked.node} has left the fleet")
            report = codec.decode_report(codec.content_of(reply), self.sizes)
            if report.round != asked.round:
                raise RefusedError("replayed", f"a report of round {report.round} to an order of {asked.round}")
            refusal = self.server.receive(device, report)
            if refusal is not None:
                raise RefusedError(refusal.reason, refusal.detail)
            self._sound += 1

    def _number(self, node: int) -> int:
        """The device at a node; the node's own number if it has left since."""
        device = self._roster.device(node)
        return node if device is None else device


_UNUSED = (ArrayRecord(), ConfigRecord())
"""What Flower's own loop hands to `configure_...`; here the server has the model, and the options the rest."""
