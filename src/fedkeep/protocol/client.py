"""The client of the agent's socket; light, since Flower starts a process for every message."""

import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import UnionType

from fedkeep.core.errors import ConfigError, FedkeepError
from fedkeep.core.types import Profile, Report, TrainOrder, Vector
from fedkeep.protocol import messages
from fedkeep.protocol.framing import receive_frame, send_frame
from fedkeep.protocol.wire import from_bytes, to_bytes


class AgentUnreachableError(FedkeepError):
    """Nobody answers at the agent's socket."""


class AgentClient(AbstractContextManager["AgentClient"]):
    """A connection to the agent, to be used in a `with` block.

    Parameters
    ----------
    path : str
        The agent's Unix socket; of an agent with several streams `SOCKET#STREAM`.
    timeout : float
        Seconds after which a call fails.

    Raises
    ------
    AgentUnreachableError
        If no agent answers at the socket.

    Examples
    --------
    >>> with AgentClient("/run/none.sock") as agent:  # doctest: +ELLIPSIS
    ...     profile = agent.profile()
    Traceback (most recent call last):
    fedkeep.protocol.client.AgentUnreachableError: no agent answers at /run/none.sock (No such ...
    """

    def __init__(self, path: str, timeout: float = 600.0) -> None:
        if path.startswith("unix:"):
            raise ConfigError(f"the agent's socket is a path without a scheme, not '{path}'")
        path, _, self._stream = path.partition("#") if not Path(path).exists() else (path, "", "")
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout)
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            advice = "start one by `fedkeep agent run CONFIG.toml`"
            raise AgentUnreachableError(
                f"no agent answers at {path} ({error.strerror or error}): {advice}"
            ) from error

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def participate(self, order: TrainOrder) -> Report:
        """Have the agent take part in a round (steps 4 to 6)."""
        return self.ask(messages.Participate.of(order), messages.Reported).report

    def evaluate(self, model: Vector) -> messages.Evaluated:
        """Evaluate a model on the agent's held-out samples, or on its stored ones."""
        return self.ask(messages.Evaluate(model), messages.Evaluated)

    def profile(self) -> Profile:
        """Return the profile that the device sends to the server (step 1)."""
        return self.ask(messages.AskProfile(), messages.Profiled).profile

    def status(self) -> messages.Status:
        """Return the agent's operating figures."""
        return self.ask(messages.AskStatus(), messages.Status)

    def stored(self) -> messages.StoredSummary:
        """Return a summary of the stored samples by label."""
        return self.ask(messages.AskStored(), messages.StoredSummary)

    def refused(self) -> tuple[messages.RefusedRecord, ...]:
        """Return the records that were rejected last, oldest first."""
        return self.ask(messages.AskRefused(), messages.RefusedRecords).records

    def why(self, id_: str, namespace: str | None = None) -> messages.Reasons:
        """Return the decisions on samples whose id is written so, of one namespace or of all."""
        return self.ask(messages.AskWhy(id_, namespace), messages.Reasons)

    def erase(self, request: messages.Erase) -> int:
        """Remove and overwrite matching samples; return how many."""
        return self.ask(request, messages.Erased).count

    def configure(self, signed: bytes) -> str:
        """Send signed settings; return which count, and which are on trial."""
        return self.ask(messages.Configure(signed), messages.Configured).settings

    def streams(self) -> tuple[str, ...]:
        """Return the names of the agent's streams; of an only one it is empty."""
        return self.ask(messages.AskStreams(), messages.Streams).names

    def pull_samples(
        self, selection: messages.SampleFilter = messages.SampleFilter()
    ) -> Iterator[messages.Pulled]:
        """Yield the samples that match, a part at a time, oldest first."""
        after: int | None = -1
        while after is not None:
            part = self.ask(messages.Pull(selection, after), messages.Pulled)
            yield part
            after = part.last

    def upload(self, selection: messages.SampleFilter) -> messages.Queued:
        """Queue stored samples to be sent to the device's target, if it consents."""
        return self.ask(messages.Upload(selection), messages.Queued)

    def ask(
        self,
        request: messages.Request | messages.AskStreams,
        expected: type[messages.Answer] | UnionType,
    ) -> messages.Answer:
        """Send a request and return the reply.

        Raises
        ------
        RejectedError
            If the agent rejects the request, or the reply is not of the expected kind.
        AgentUnreachableError
            If the connection is lost.
        """
        try:
            payload = to_bytes(request)
            if self._stream:
                payload = to_bytes(messages.ToStream(self._stream, payload))
            send_frame(self._socket, payload)
            answer = receive_frame(self._socket)
        except OSError as error:
            raise AgentUnreachableError(
                f"the agent at {self._path} stopped answering: {error}"
            ) from error
        if answer is None:
            raise AgentUnreachableError(f"the agent at {self._path} closed the connection")
        return messages.expect(from_bytes(answer, messages.Reply), expected, "the agent")
