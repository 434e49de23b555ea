"""A round of which the server learns sums only: four exchanges instead of one, and never a report in the clear."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import numpy as np
from flwr.app import Message, RecordDict

from fedkeep.core.errors import RefusedError
from fedkeep.core.server import Refusal, RoundSummary, Server
from fedkeep.core.types import DeviceId
from fedkeep.flower import codec
from fedkeep.flower.exchange import Asked, Exchange
from fedkeep.flower.roster import Roster
from fedkeep.flower.rounds import RoundOptions
from fedkeep.link.messages import AskSum, Participate
from fedkeep.privacy import sum_messages as told
from fedkeep.privacy.secure_sum import Masked, Unmasking, usable
from fedkeep.privacy.sum_book import OpenSum, SumBook

log = logging.getLogger("fedkeep.flower")

TRAIN, SHARE, MASK, UNMASK = "train", "train.share", "train.mask", "train.unmask"
_PAUSE_SECONDS = 0.5
_BYTES_A_DEVICE = 512
"""More than any exchange says about one device, its words apart."""

Answer = TypeVar("Answer", told.Keys, told.Envelopes, told.MaskedWords, told.OpenedShares)
Refuse = Callable[[Refusal], None]
SetAside = Callable[[Iterable[tuple[Asked, Message]]], None]


class SecureRounds:
    """Plays rounds by secure sums: who drops out is left out, as long as enough devices stay.

    Each of the four exchanges may take as long as `rounds.deadline`.
    """

    def __init__(
        self,
        server: Server,
        sums: SumBook,
        roster: Roster,
        options: RoundOptions,
        refuse: Refuse,
        set_aside: SetAside,
    ) -> None:
        self._server, self._sums, self._roster, self._options = server, sums, roster, options
        self._refuse, self._set_aside = refuse, set_aside

    def play(self, exchange: Exchange, chosen: tuple[DeviceId, ...]) -> tuple[RoundSummary, bool]:
        """Plays a round over the chosen devices; with too few of them it ends without a quorum and changes nothing.

        In deterministic mode a round in which a node failed is played again: all of them must be in the sum.
        """
        while True:
            failed: set[DeviceId] = set()
            try:
                return self._attempt(exchange, chosen, failed), True
            except RefusedError as error:
                log.warning("round %d: %s", self._server.round, error)
            if not (self._options.deterministic and failed):
                self._server.open_round(chosen)
                return self._server.close_round(), False
            time.sleep(_PAUSE_SECONDS)

    def _attempt(self, exchange: Exchange, chosen: tuple[DeviceId, ...], failed: set[DeviceId]) -> RoundSummary:
        """The four exchanges; raises where too few devices are left, before anything has changed."""
        options, wanted = self._options, self._options.wanted(len(self._roster.nodes()))
        orders = self._server.open_round(chosen)
        opened = self._sums.open(chosen)
        nodes = self._roster.nodes()
        parties = _Parties(
            exchange, opened, self._server.round, nodes, options.patience, self._refuse, self._set_aside, failed
        )
        encode = codec.Encoder()
        asking = {d: encode(Participate(order, told.encode(opened.terms[d]))) for d, order in orders.items()}
        keys = parties.ask(TRAIN, asking, told.Keys, max(wanted, opened.threshold))
        roster = opened.open({device: answer.keys for device, answer in keys.items()})
        asking = _to_all(roster, told.PartyKeys(opened.session, roster))
        sealed = parties.ask(SHARE, asking, told.Envelopes)
        routed = opened.route({device: answer.envelopes for device, answer in sealed.items()})
        asking = {d: _content(told.Envelopes(opened.session, envelopes)) for d, envelopes in routed.items()}
        survivors = parties.count(parties.ask(MASK, asking, told.MaskedWords))
        if len(survivors) < options.least(wanted):
            raise RefusedError("too few devices", f"{len(survivors)} of {options.least(wanted)} are in the sum")
        asking = _to_all(survivors, told.Survivors(opened.session, survivors))
        shares = parties.ask(UNMASK, asking, told.OpenedShares, opened.threshold)
        total = opened.total({d: Unmasking(s.own_masks, s.masking_keys) for d, s in shares.items()})
        return self._sums.close(opened, survivors, lost=any(k.lost for k in keys.values()), total=total)


class _Parties:
    """The devices of one sum, asked in turn; whoever does not answer as asked is named and out of it."""

    def __init__(
        self,
        exchange: Exchange,
        opened: OpenSum,
        round_: int,
        nodes: Mapping[DeviceId, int],
        patience: float,
        refuse: Refuse,
        set_aside: SetAside,
        failed: set[DeviceId],
    ) -> None:
        self._exchange, self._opened, self._round, self._patience = exchange, opened, round_, patience
        self._nodes, self._devices = nodes, {node: device for device, node in nodes.items()}
        self._refuse, self._set_aside, self._failed = refuse, set_aside, failed

    def ask(
        self, kind: str, contents: Mapping[DeviceId, RecordDict], expected: type[Answer], enough: int | None = None
    ) -> dict[DeviceId, Answer]:
        """The sound answers of the devices asked: of all, or of the first `enough`."""
        messages = [Message(c, self._nodes[d], kind, group_id=str(self._round)) for d, c in contents.items()]
        self._exchange.send(messages, self._round)
        answers: dict[DeviceId, Answer] = {}

        def done() -> bool:
            complete = enough is not None and len(answers) >= enough
            return complete or not self._exchange.waiting(self._round, kind)

        for asked, reply in self._exchange.collect(self._patience, done):
            device = self._devices.get(asked.node)
            if device is None or (asked.round, asked.kind) != (self._round, kind):
                self._set_aside([(asked, reply)])
                continue
            if reply.has_error():
                self._failed.add(device)
            try:
                answers[device] = self._read(reply, expected)
            except RefusedError as error:
                self._refuse(Refusal(device, error.reason, error.detail))
        return answers

    def count(self, answers: Mapping[DeviceId, told.MaskedWords]) -> tuple[DeviceId, ...]:
        """Takes masked words into the sum; returns who is in it."""
        for device, answer in answers.items():
            try:
                if len(answer.words) != 8 * self._opened.size:
                    raise RefusedError("answer of the wrong form", f"{len(answer.words)} bytes of words")
                self._opened.receive(device, Masked(answer.session, np.frombuffer(answer.words, dtype="<u8")))
            except RefusedError as error:
                self._refuse(Refusal(device, error.reason, error.detail))
        return self._opened.survivors()

    def _read(self, reply: Message, expected: type[Answer]) -> Answer:
        most = 8 * self._opened.size + _BYTES_A_DEVICE * (1 + len(self._opened.terms))
        answer = told.decode(codec.decode_answer(codec.content_of(reply), most), expected)
        if answer.session != self._opened.session:
            raise RefusedError("replayed", "it answers to another sum")
        if isinstance(answer, told.Keys):
            usable(answer.keys)
        return answer


def _to_all(devices: Iterable[DeviceId], request: told.Request) -> dict[DeviceId, RecordDict]:
    content = _content(request)
    return dict.fromkeys(devices, content)


def _content(request: told.Request) -> RecordDict:
    return codec.encode(AskSum(told.encode(request)))
