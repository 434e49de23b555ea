"""How a server comes to plans that it cannot make: from the key-holder, which alone can open the profiles they need."""

import logging
import socket
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fedkeep.core.coordination import Coordinator, Greedy
from fedkeep.core.errors import ConfigError, FedkeepError, RefusedError
from fedkeep.core.plan import Plan
from fedkeep.core.types import DeviceId
from fedkeep.keyholder import port
from fedkeep.link.addresses import Address, is_loopback
from fedkeep.link.framing import receive_frame, send_frame
from fedkeep.link.messages import Answer, ProfileRequest, expect
from fedkeep.link.wire import from_bytes, to_bytes

log = logging.getLogger("fedkeep.keyholder")

_CONNECT_SECONDS = 5.0
_HANDSHAKE_SECONDS = 30.0
"""Longer than the key-holder gives to whoever is silent: it may have to see some of them off first."""
_ANSWER_SECONDS = 300.0
_RETRY_SECONDS = 5.0
"""Between two attempts to reach the key-holder, or to have a plan made."""


class KeyHolderUnreachableError(FedkeepError):
    """Nobody answers at the key-holder's address, or not as the key-holder."""


class KeyHolderClient:
    """The key-holder at an address; without TLS on loopback only."""

    def __init__(self, address: Address, tls: ssl.SSLContext | None) -> None:
        if tls is None and not is_loopback(address.host):
            raise ConfigError(f"without TLS the key-holder must be on loopback, and {address} is not")
        self.address, self._tls = address, tls

    def ask(self, request: port.KeyRequest, expected: type[Answer]) -> Answer:
        """The key-holder's reply, which must be of that kind; its refusal is raised."""
        where = (self.address.host, self.address.port)
        try:
            with socket.create_connection(where, _CONNECT_SECONDS) as plain, self._secured(plain) as connection:
                connection.settimeout(_ANSWER_SECONDS)
                send_frame(connection, to_bytes(request))
                answer = receive_frame(connection)
            if answer is None:
                raise EOFError("it closed the connection")
        except (OSError, EOFError) as error:
            why = getattr(error, "strerror", None) or error
            raise KeyHolderUnreachableError(f"the key-holder at {self.address} does not answer ({why})") from error
        return expect(from_bytes(answer, port.KeyReply), expected, "the key-holder")

    def _secured(self, plain: socket.socket) -> socket.socket:
        """The connection, once TLS has shown that the key-holder is at its other end."""
        if self._tls is None:
            return plain
        plain.settimeout(_HANDSHAKE_SECONDS)
        connection = self._tls.wrap_socket(plain, server_hostname=self.address.host)
        if port.peer_name(connection) != port.KEYHOLDER:
            connection.close()
            raise ssl.SSLError(0, f"its certificate is not the {port.KEYHOLDER}'s")
        return connection


@dataclass(frozen=True)
class KeyHolderOptions:
    """`keyholder`: where the key-holder of encrypted profiles answers."""

    address: str = ""
    """HOST:PORT of `fedkeep keyholder serve`."""
    credentials: str = ""
    """A directory with ca.crt, planner.crt and planner.key, made by `fedkeep provision --key-holder HOST`."""
    insecure: bool = False
    """No TLS: loopback only."""

    def client(self) -> KeyHolderClient:
        if not self.address:
            raise ConfigError(
                "privacy.encrypted-profiles needs keyholder.address: where `fedkeep keyholder serve` runs"
            )
        if self.insecure == bool(self.credentials):
            raise ConfigError("set keyholder.credentials, or keyholder.insecure=true on loopback, and not both")
        tls = None if self.insecure else port.secured(Path(self.credentials), "planner")
        return KeyHolderClient(Address.parse(self.address), tls)


class RemotePlanner:
    """Greedy plans, made by the key-holder of sealed profiles; what fails is said once, and tried again later."""

    def __init__(self, client: KeyHolderClient, coordinator: Coordinator) -> None:
        if type(coordinator) is not Greedy:  # one derived from it would be planned as if it were not
            raise ConfigError("encrypted profiles are planned by coordinator 'greedy' only")
        self._client, self._greedy = client, coordinator
        self._request: ProfileRequest | None = None
        self._next_attempt, self._last_trouble = 0.0, ""
        self.profiles: dict[DeviceId, bytes] = {}
        """What devices sealed for the present request."""

    def request(self, now: float) -> ProfileRequest | None:
        """What every device is asked; None while the key-holder does not answer. A new one needs all answers anew."""
        if self._request is None and (issued := self._ask(now, port.AskKey(), port.PublishedKey)) is not None:
            self._request, self.profiles = ProfileRequest(issued.key, issued.nonce), {}
        return self._request

    def plan(self, now: float, present: Iterable[DeviceId], before: Plan | None, labels: int) -> port.Planned | None:
        """The key-holder's plan for these devices, and whose profiles it could not use; None if it makes none now."""
        if self._request is None:
            return None
        profiles = {device: self.profiles[device] for device in sorted(present)}
        asked = port.AskPlan(self._request.nonce, labels, profiles, self._greedy, before)
        return self._ask(now, asked, port.Planned)

    def _ask(self, now: float, request: port.KeyRequest, expected: type[Answer]) -> Answer | None:
        """The sound answer; else why there is none is said once, and it is tried again later."""
        if now < self._next_attempt:
            return None
        try:
            answer = self._client.ask(request, expected)
            if isinstance(request, port.AskPlan) and isinstance(answer, port.Planned):
                _require_asked_for(answer, request)
        except FedkeepError as error:
            self._next_attempt = now + _RETRY_SECONDS
            if str(error) != self._last_trouble:
                log.warning("no plan from encrypted profiles yet: %s; trying again, and nothing in the clear", error)
            self._last_trouble = str(error)
            if isinstance(error, RefusedError) and error.reason == "outdated":
                self._request = None
            return None
        self._last_trouble = ""
        return answer


def _require_asked_for(planned: port.Planned, asked: port.AskPlan) -> None:
    """Refuses a plan for other devices or labels than it was asked for."""
    plan, refused = port.sound_plan(planned.plan), {refusal.device for refusal in planned.refused}
    everybody = sorted([*plan.devices.tolist(), *refused])
    if everybody != sorted(asked.profiles) or plan.quotas.shape[1] != asked.labels:
        raise RefusedError("malformed plan", "it is not for the devices and labels it was asked for")
