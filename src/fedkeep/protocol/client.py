"""How another process on the device talks to the agent.

Light, since a Flower client starts anew for every message.
"""

import socket
from contextlib import AbstractContextManager
from types import UnionType

from fedkeep.core.errors import ConfigError, FedkeepError
from fedkeep.core.types import Profile, Report, TrainOrder, Vector
from fedkeep.protocol import messages as told
from fedkeep.protocol.framing import receive_frame, send_frame
from fedkeep.protocol.wire import from_bytes, to_bytes


class AgentUnreachableError(FedkeepError):
    """Nobody answers at the agent's socket."""


class AgentClient(AbstractContextManager["AgentClient"]):
    """A connection to the agent; use it in a `with` block.

    >>> with AgentClient("/run/none.sock") as agent:  # doctest: +ELLIPSIS
    ...     profile = agent.profile()
    Traceback (most recent call last):
    fedkeep.protocol.client.AgentUnreachableError: no agent answers at /run/none.sock ...
    """

    def __init__(self, path: str, timeout: float = 600.0) -> None:
        if path.startswith("unix:"):
            raise ConfigError(f"the agent's socket is a path without a scheme, not '{path}'")
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout)
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            mend = "start one by `fedkeep agent run CONFIG.toml`"
            raise AgentUnreachableError(
                f"no agent answers at {path} ({error.strerror or error}): {mend}"
            ) from error

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def participate(self, order: TrainOrder) -> Report:
        """Has the agent take part in a round (steps 4-6)."""
        return self.ask(told.Participate(order), told.Reported).report

    def evaluate(self, model: Vector) -> told.Evaluated:
        """Return a model's loss and accuracy on held-out samples, or on what is stored."""
        return self.ask(told.Evaluate(model), told.Evaluated)

    def profile(self) -> Profile:
        """Return what the device declares to the server (step 1)."""
        return self.ask(told.AskProfile(), told.Profiled).profile

    def status(self) -> told.Status:
        """Return how the agent is doing."""
        return self.ask(told.AskStatus(), told.Status)

    def stored(self) -> told.StoredSummary:
        """Return what is stored, by label."""
        return self.ask(told.AskStored(), told.StoredSummary)

    def refused(self) -> tuple[told.RefusedRecord, ...]:
        """Return the records that were refused last, oldest first."""
        return self.ask(told.AskRefused(), told.RefusedRecords).records

    def why(self, id_: str, namespace: str | None = None) -> told.Reasons:
        """Return the decisions on samples whose id is written so, of one namespace or of all."""
        return self.ask(told.AskWhy(id_, namespace), told.Reasons)

    def erase(self, request: told.Erase) -> int:
        """Remove samples for good, and return how many there were."""
        return self.ask(request, told.Erased).count

    def ask(self, request: told.Request, expected: type[told.Answer] | UnionType) -> told.Answer:
        """Return the agent's reply, which must be of that kind; its refusal is raised."""
        try:
            send_frame(self._socket, to_bytes(request))
            payload = receive_frame(self._socket)
        except OSError as error:
            raise AgentUnreachableError(
                f"the agent at {self._path} stopped answering: {error}"
            ) from error
        if payload is None:
            raise AgentUnreachableError(f"the agent at {self._path} closed the connection")
        return told.expect(from_bytes(payload, told.Reply), expected, "the agent")
