"""How another process on the device talks to the agent; light, since a Flower client starts anew for every message."""

from __future__ import annotations

import socket
from types import TracebackType, UnionType
from typing import TypeVar

from fedkeep.core.errors import FedkeepError, RefusedError
from fedkeep.core.types import Profile, Report, TrainOrder, Vector
from fedkeep.link.framing import receive_frame, send_frame
from fedkeep.link.messages import (
    AskProfile,
    AskRefused,
    AskStatus,
    AskStored,
    AskWhy,
    EncryptedProfile,
    EncryptedProfiled,
    Erase,
    Erased,
    Evaluate,
    Evaluated,
    Failed,
    Participate,
    Profiled,
    ProfileRequest,
    Reasons,
    RefusedRecord,
    RefusedRecords,
    Reply,
    Reported,
    Request,
    Status,
    StoredSummary,
)
from fedkeep.link.wire import from_bytes, to_bytes

Answer = TypeVar("Answer", bound=Reply)


class AgentUnreachableError(FedkeepError):
    """Nobody answers at the agent's socket."""


class AgentClient:
    """A connection to the agent; use it in a `with` block."""

    def __init__(self, path: str, timeout: float = 600.0) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout)
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise AgentUnreachableError(
                f"no agent answers at {path} ({error.strerror}): start one by `fedkeep agent run CONFIG.toml`"
            ) from error

    def __enter__(self) -> AgentClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def participate(self, order: TrainOrder) -> Report:
        """Has the agent take part in a round (steps 4-6)."""
        return self.ask(Participate(order), Reported).report

    def evaluate(self, model: Vector) -> Evaluated:
        """Loss and accuracy of a model on the agent's held-out samples, or on what it has stored."""
        return self.ask(Evaluate(model), Evaluated)

    def profile(self) -> Profile:
        """What the device declares to the server (step 1)."""
        return self.ask(AskProfile(), Profiled).profile

    def encrypted_profile(self, request: ProfileRequest) -> EncryptedProfile:
        """The same, under the key-holder's key."""
        return self.ask(AskProfile(request), EncryptedProfiled).profile

    def status(self) -> Status:
        return self.ask(AskStatus(), Status)

    def stored(self) -> StoredSummary:
        return self.ask(AskStored(), StoredSummary)

    def refused(self) -> tuple[RefusedRecord, ...]:
        """The records that were refused last, oldest first."""
        return self.ask(AskRefused(), RefusedRecords).records

    def why(self, id_: str) -> Reasons:
        return self.ask(AskWhy(id_), Reasons)

    def erase(self, request: Erase) -> int:
        """How many samples were removed and overwritten."""
        return self.ask(request, Erased).count

    def ask(self, request: Request, expected: type[Answer] | UnionType) -> Answer:
        """The agent's reply, which must be of that kind; its refusal is raised."""
        try:
            send_frame(self._socket, to_bytes(request))
            payload = receive_frame(self._socket)
        except OSError as error:
            raise AgentUnreachableError(f"the agent at {self._path} stopped answering: {error}") from error
        if payload is None:
            raise AgentUnreachableError(f"the agent at {self._path} closed the connection")
        reply = from_bytes(payload, Reply)
        if isinstance(reply, Failed):
            raise RefusedError(reply.reason, reply.detail)
        if not isinstance(reply, expected):
            raise RefusedError("malformed", f"the agent answered with {type(reply).__name__}")
        return reply
