"""A round of which the server learns sums only: four exchanges instead of one, and never a report in the clear."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from flwr.app import Message, RecordDict

from fedkeep.core.errors import RefusedError
from fedkeep.core.rounds import Refusal, RoundSummary
from fedkeep.core.server import Server
from fedkeep.core.types import DeviceId
from fedkeep.flower import codec
from fedkeep.flower.exchange import Asked, Exchange
from fedkeep.flower.membership import Roster
from fedkeep.flower.rounds import RoundOptions
from fedkeep.link.messages import AskSum, Participate
from fedkeep.privacy import secure_sum as told
from fedkeep.privacy.sum_book import SumBook

log = logging.getLogger("fedkeep.flower")

TRAIN, SHARE, MASK, UNMASK = "train", "train.share", "train.mask", "train.unmask"
_PAUSE_SECONDS = 0.5
_BYTES_A_DEVICE = 512
"""More than any exchange says about one device, its words apart."""

Answer = TypeVar("Answer", told.Keys, told.Envelopes, told.MaskedWords, told.OpenedShares)


@dataclass(eq=False)
class SecureRounds:
    """Plays rounds by secure sums: who drops out is left out, as long as enough devices stay.

    Each of the four exchanges may take as long as `rounds.deadline`.
    """

    server: Server
    sums: SumBook
    roster: Roster
    options: RoundOptions
    refuse: Callable[[Refusal], None]
    set_aside: Callable[[Iterable[tuple[Asked, Message]]], None]

    def play(self, exchange: Exchange, chosen: tuple[DeviceId, ...]) -> tuple[RoundSummary, bool]:
        """Plays a round over the chosen devices; with too few of them it ends without a quorum and changes nothing.

        In deterministic mode a round in which a node failed is played again: all of them must be in the sum.
        """
        while True:
            failed: set[DeviceId] = set()
            try:
                return self._attempt(exchange, chosen, failed), True
            except RefusedError as error:
                log.warning("round %d: %s", self.server.round, error)
            if not (self.options.deterministic and failed):
                self.server.open_round(chosen)
                return self.server.close_round(), False
            time.sleep(_PAUSE_SECONDS)

    def _attempt(self, exchange: Exchange, chosen: tuple[DeviceId, ...], failed: set[DeviceId]) -> RoundSummary:
        """The four exchanges; raises where too few devices are left, before anything has changed."""
        options, wanted = self.options, self.options.wanted(len(self.roster.nodes()))
        orders = self.server.open_round(chosen)
        opened = self.sums.open(chosen)
        parties = _Parties(self, exchange, opened, self.server.round, self.roster.nodes(), failed)
        encode = codec.Encoder()
        asking = {d: encode(Participate(order, told.encode(opened.terms[d]))) for d, order in orders.items()}
        keys = parties.ask(TRAIN, asking, told.Keys, max(wanted, opened.threshold))
        roster = opened.open({device: answer.keys for device, answer in keys.items()})
        sealed = parties.ask(SHARE, _to_all(keys, roster), told.Envelopes)
        asking = {device: _content(envelopes) for device, envelopes in opened.route(sealed).items()}
        survivors = parties.count(parties.ask(MASK, asking, told.MaskedWords))
        if len(survivors) < options.least(wanted):
            raise RefusedError("too few devices", f"{len(survivors)} of {options.least(wanted)} are in the sum")
        asking = _to_all(survivors, told.Survivors(opened.session, survivors))
        shares = parties.ask(UNMASK, asking, told.OpenedShares, opened.threshold)
        lost = any(answer.lost for answer in keys.values())
        return self.sums.close(opened, survivors, lost=lost, total=opened.total(shares))


@dataclass(eq=False)
class _Parties:
    """The devices of one sum, asked in turn; whoever does not answer as asked is named and out of it."""

    rounds: SecureRounds
    exchange: Exchange
    opened: told.SumServer
    round: int
    nodes: Mapping[DeviceId, int]
    failed: set[DeviceId]

    def ask(
        self, kind: str, contents: Mapping[DeviceId, RecordDict], expected: type[Answer], enough: int | None = None
    ) -> dict[DeviceId, Answer]:
        """The sound answers of the devices asked: of all, or of the first `enough`."""
        messages = [Message(c, self.nodes[d], kind, group_id=str(self.round)) for d, c in contents.items()]
        self.exchange.send(messages, self.round)
        devices = {node: device for device, node in self.nodes.items()}
        answers: dict[DeviceId, Answer] = {}

        def done() -> bool:
            complete = enough is not None and len(answers) >= enough
            return complete or not self.exchange.waiting(self.round, kind)

        for asked, reply in self.exchange.collect(self.rounds.options.patience, done):
            device = devices.get(asked.node)
            if device is None or (asked.round, asked.kind) != (self.round, kind):
                self.rounds.set_aside([(asked, reply)])
                continue
            if reply.has_error():
                self.failed.add(device)
            try:
                answers[device] = self._read(reply, expected)
            except RefusedError as error:
                self.rounds.refuse(Refusal(device, error.reason, error.detail))
        return answers

    def count(self, answers: Mapping[DeviceId, told.MaskedWords]) -> tuple[DeviceId, ...]:
        """Takes masked words into the sum; returns who is in it."""
        for device, answer in answers.items():
            try:
                self.opened.receive(device, answer)
            except RefusedError as error:
                self.rounds.refuse(Refusal(device, error.reason, error.detail))
        return self.opened.survivors()

    def _read(self, reply: Message, expected: type[Answer]) -> Answer:
        most = 8 * self.opened.size + _BYTES_A_DEVICE * (1 + len(self.opened.terms))
        answer: Answer = told.decode(codec.decode_answer(codec.content_of(reply), most), expected)
        if answer.session != self.opened.session:
            raise RefusedError("replayed", "it answers to another sum")
        if isinstance(answer, told.Keys):
            told.usable(answer.keys)
        return answer


def _to_all(devices: Iterable[DeviceId], request: told.Request) -> dict[DeviceId, RecordDict]:
    content = _content(request)
    return dict.fromkeys(devices, content)


def _content(request: told.Request) -> RecordDict:
    return codec.encode(AskSum(told.encode(request)))
