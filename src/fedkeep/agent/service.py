"""The agent's side of the local API: answers one message after another on a Unix socket."""

import logging
import socket
from pathlib import Path

from fedkeep.agent.agent import Agent
from fedkeep.agent.arrivals import sample_id
from fedkeep.agent.connections import AddressTakenError, Listener, listen_unix
from fedkeep.agent.record import Note
from fedkeep.agent.summary import Evaluator, stored_summary, summarise
from fedkeep.core.errors import FedkeepError, RefusedError
from fedkeep.link import messages
from fedkeep.link.framing import receive_frame, send_frame
from fedkeep.link.wire import from_bytes, to_bytes

log = logging.getLogger(__name__)
_CONNECTIONS = 32
"""Clients at a time; one more takes the place of the one silent the longest."""
_PATIENCE = 600.0
"""Seconds that a client may be silent, in the middle of a message or between two."""


class Service:
    """Listens until it is closed; every connection has its own thread."""

    def __init__(self, agent: Agent, evaluator: Evaluator, path: Path) -> None:
        self._agent, self._evaluator, self._path = agent, evaluator, path
        try:
            self._listener = Listener(listen_unix(path), _CONNECTIONS)
        except OSError as error:
            raise AddressTakenError(str(path), error.strerror) from error

    def start(self) -> None:
        self._listener.start(self._serve)

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        self._listener.close()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(_PATIENCE)
        try:
            while (payload := receive_frame(connection)) is not None:
                self._listener.touch(connection)
                send_frame(connection, to_bytes(self.answer(payload)))
        except RefusedError as refusal:
            send_frame(connection, to_bytes(messages.Failed(refusal.reason, refusal.detail)))

    def answer(self, payload: bytes) -> messages.Reply:
        """The reply to one request; a request that cannot be met is answered with the reason."""
        try:
            return self._reply(from_bytes(payload, messages.Request))
        except RefusedError as refusal:
            return messages.Failed(refusal.reason, refusal.detail)
        except FedkeepError as error:
            return messages.Failed("error", str(error))
        except Exception as error:
            log.exception("a request could not be answered")
            return messages.Failed("error", f"the agent could not do that ({type(error).__name__}); its log says more")

    def _reply(self, request: messages.Request) -> messages.Reply:
        match request:
            case messages.AskStatus():
                return summarise(self._agent)
            case messages.AskStored():
                return stored_summary(self._agent)
            case messages.AskRefused():
                return messages.RefusedRecords(tuple(self._agent.intake.quarantine.records()))
            case messages.AskWhy():
                return self._why(request.id)
            case messages.Erase():
                return self._erase(request)
            case _:
                return messages.reply_of(self._agent, self._evaluator.evaluate, request)

    def _why(self, name: str) -> messages.Reasons:
        id_ = sample_id(name, b"")
        with self._agent.lock:
            decisions = self._agent.store.log.about(id_)
            stored = id_ in self._agent.store
        return messages.Reasons(id_, stored, tuple(decisions))

    def _erase(self, request: messages.Erase) -> messages.Erased:
        if request == messages.Erase():
            raise RefusedError("erase", "say what to erase: an id, a label, a source or a time")
        with self._agent.lock:
            ids = [note.id for note in self._agent.store.notes() if _matches(note, request)]
            if request.id is not None and not ids:
                ids = [sample_id(request.id, b"")]  # gone already: its tombstone and its traces in the log still count
            return messages.Erased(self._agent.erase(ids))


def _matches(note: Note, request: messages.Erase) -> bool:
    return (
        (request.id is None or note.id == sample_id(request.id, b""))
        and (request.label is None or note.label == request.label)
        and (request.source is None or note.source == request.source)
        and (request.since is None or note.wall >= request.since)
        and (request.until is None or note.wall <= request.until)
    )
