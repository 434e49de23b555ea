"""A round of which the server learns sums only: four exchanges instead of one, and never a report in the clear."""

import logging
import time
from collections.abc import Mapping
from typing import TypeVar

from flwr.app import Message, RecordDict

from fedkeep.core.errors import RefusedError
from fedkeep.core.rounds import RoundSummary
from fedkeep.core.server import Server
from fedkeep.core.types import DeviceId
from fedkeep.flower import codec
from fedkeep.flower.codec import MASK, SHARE, TRAIN, UNMASK
from fedkeep.flower.exchange import Aside, Exchange
from fedkeep.flower.rounds import Refusals, RoundOptions
from fedkeep.link.messages import AskSum, Participate
from fedkeep.privacy import secure_sum as told
from fedkeep.privacy.sum_book import SumBook

log = logging.getLogger("fedkeep.flower")

_PAUSE_SECONDS = 0.5
_BYTES_A_DEVICE = 512
"""More than any exchange says about one device, its words apart."""

Answer = TypeVar("Answer", told.Keys, told.Envelopes, told.MaskedWords, told.OpenedShares)


class SecureRounds:
    """Plays rounds by secure sums: who drops out is left out, as long as enough devices stay.

    Each of the four exchanges may take as long as `rounds.deadline`.
    """

    def __init__(self, server: Server, sums: SumBook, options: RoundOptions, refusals: Refusals, aside: Aside) -> None:
        self._server, self._sums, self._options, self._refusals, self._aside = server, sums, options, refusals, aside
        self._failed = False

    def play(
        self, exchange: Exchange, chosen: tuple[DeviceId, ...], nodes: Mapping[DeviceId, int]
    ) -> tuple[RoundSummary, bool]:
        """Plays a round over the chosen devices; with too few of them it ends without a quorum and changes nothing.

        In deterministic mode a round in which a node failed is played again: all of them must be in the sum.
        """
        while True:
            self._failed = False
            try:
                return self._attempt(exchange, chosen, nodes), True
            except RefusedError as error:
                log.warning("round %d: %s", self._server.round, error)
            if not (self._options.deterministic and self._failed):
                self._server.open_round(chosen)
                return self._server.close_round(), False
            time.sleep(_PAUSE_SECONDS)

    def _attempt(self, exchange: Exchange, chosen: tuple[DeviceId, ...], nodes: Mapping[DeviceId, int]) -> RoundSummary:
        """The four exchanges; raises where too few devices are left, before anything has changed."""
        wanted = self._options.wanted(len(nodes))
        orders = self._server.open_round(chosen)
        opened = self._sums.open(chosen)
        asked = exchange, opened, nodes
        contents = codec.encode_all(Participate(order, told.encode(opened.terms[d])) for d, order in orders.items())
        asking = dict(zip(orders, contents, strict=True))
        keys = self._ask(*asked, TRAIN, asking, told.Keys, max(wanted, opened.threshold))
        roster = opened.open({device: answer.keys for device, answer in keys.items()})
        sealed = self._ask(*asked, SHARE, dict.fromkeys(keys, _content(roster)), told.Envelopes)
        asking = {device: _content(envelopes) for device, envelopes in opened.route(sealed).items()}
        for device, words in self._ask(*asked, MASK, asking, told.MaskedWords).items():
            with self._refusals.naming(device):
                opened.receive(device, words)
        survivors, least = opened.survivors(), self._options.least(wanted)
        if len(survivors) < least:
            raise RefusedError("too few devices", f"{len(survivors)} of {least} are in the sum")
        asking = dict.fromkeys(survivors, _content(told.Survivors(opened.session, survivors)))
        shares = self._ask(*asked, UNMASK, asking, told.OpenedShares, opened.threshold)
        lost = any(answer.lost for answer in keys.values())
        return self._sums.close(opened, survivors, lost=lost, total=opened.total(shares))

    def _ask(
        self,
        exchange: Exchange,
        opened: told.SumServer,
        nodes: Mapping[DeviceId, int],
        kind: str,
        contents: Mapping[DeviceId, RecordDict],
        expected: type[Answer],
        enough: int | None = None,
    ) -> dict[DeviceId, Answer]:
        """The sound answers of the devices asked: of all, or of the first `enough`; the others are named, and out."""
        round_, most = self._server.round, 8 * opened.size + _BYTES_A_DEVICE * (1 + len(opened.terms))
        exchange.send([Message(c, nodes[d], kind, group_id=str(round_)) for d, c in contents.items()], round_)
        devices = {node: device for device, node in nodes.items()}
        answers: dict[DeviceId, Answer] = {}
        replies = exchange.answers(
            round_, kind, self._options.patience, self._aside, lambda: enough is not None and len(answers) >= enough
        )
        for node, reply in replies:
            self._failed |= reply.has_error()
            with self._refusals.naming(devices[node]):
                answer: Answer = told.decode(codec.decode_answer(codec.content_of(reply), most), expected)
                if answer.session != opened.session:
                    raise RefusedError("replayed", "it answers to another sum")
                if isinstance(answer, told.Keys):
                    told.require_usable(answer.keys)
                answers[devices[node]] = answer
        return answers


def _content(request: told.Request) -> RecordDict:
    return codec.encode(AskSum(told.encode(request)))
