"""Client and service of the key-holder.

The service answers only the federated server, which asks it for plans that it cannot make itself.

The key-holder alone can open the profiles that plans need. Both show a certificate of the fleet's
CA, and their messages go over the wire of all messages.
"""

import logging
import secrets
import socket
import ssl
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedkeep.core.claims import cap_profiles
from fedkeep.core.errors import ConfigError, FedkeepError, RejectedError
from fedkeep.core.planning.greedy import Coordinator, Greedy
from fedkeep.core.planning.plan import Plan
from fedkeep.core.planning.profiles import FleetProfiles
from fedkeep.core.rounds import Rejection
from fedkeep.core.types import DeviceId, Profile
from fedkeep.keyholder.sealing import NONCE_BYTES, public_half, unseal
from fedkeep.protocol.addresses import Address, is_loopback
from fedkeep.protocol.framing import receive_frame, send_frame
from fedkeep.protocol.messages import Answer, Failed, ProfileRequest, expect
from fedkeep.protocol.wire import from_bytes, to_bytes

log = logging.getLogger("fedkeep.keyholder")

_CONNECT_SECONDS = 5.0
_HANDSHAKE_SECONDS = 5.0
_PATIENCE_SECONDS = 60.0
"""How long the server may be silent; before its certificate is verified a peer has less time."""
_WELCOME_SECONDS = 30.0
"""Longer than the handshake time: silent peers may have to be dropped first."""
_ANSWER_SECONDS = 300.0
_RETRY_SECONDS = 5.0
_CONNECTIONS = 4
"""At a time: there is one server, and a message may have some hundred megabytes."""
KEYHOLDER, PLANNER = "fedkeep key-holder", "fedkeep planner"
"""The names in the certificates of the two sides; `fedkeep provision --key-holder` makes both."""


class AskKey(msgspec.Struct, frozen=True, tag=True):
    """The public key, and a fresh nonce for which devices are to seal their profiles.

    Answered by `PublishedKey`.
    """


class AskPlan(msgspec.Struct, frozen=True, tag=True):
    """Plan from these profiles, which only the key-holder can read. Answered by `Planned`."""

    nonce: bytes
    labels: int
    profiles: dict[DeviceId, bytes]
    greedy: Greedy
    before: Plan | None = None


class PublishedKey(msgspec.Struct, frozen=True, tag=True):
    """The key-holder's public key and the nonce to seal for."""

    key: bytes
    nonce: bytes
    """The only one that counts from now on."""


class Planned(msgspec.Struct, frozen=True, tag=True):
    """A plan from sealed profiles."""

    plan: Plan
    refused: tuple[Rejection, ...]
    """Whose profiles could not be used, and why: they are not in the plan."""


KeyRequest: TypeAlias = AskKey | AskPlan
KeyReply: TypeAlias = PublishedKey | Planned | Failed


class KeyHolderClient:
    """The key-holder at an address; without TLS on loopback only."""

    def __init__(self, address: Address, tls: ssl.SSLContext | None) -> None:
        if tls is None and not is_loopback(address.host):
            raise ConfigError(
                f"without TLS the key-holder must be on loopback, and {address} is not"
            )
        self.address, self._tls = address, tls

    def ask(self, request: KeyRequest, expected: type[Answer]) -> Answer:
        """Return the key-holder's reply, which must be of that kind; raise its rejection."""
        where = (self.address.host, self.address.port)
        try:
            with (
                socket.create_connection(where, _CONNECT_SECONDS) as plain,
                self._secured(plain) as connection,
            ):
                connection.settimeout(_ANSWER_SECONDS)
                send_frame(connection, to_bytes(request))
                answer = receive_frame(connection)
            if answer is None:
                raise EOFError("it closed the connection")
        except (OSError, EOFError) as error:
            why = getattr(error, "strerror", None) or error
            raise FedkeepError(
                f"the key-holder at {self.address} does not answer ({why})"
            ) from error
        return expect(from_bytes(answer, KeyReply), expected, "the key-holder")

    def _secured(self, plain: socket.socket) -> socket.socket:
        """Return the connection once TLS has verified the key-holder."""
        if self._tls is None:
            return plain
        plain.settimeout(_WELCOME_SECONDS)
        connection = self._tls.wrap_socket(plain, server_hostname=self.address.host)
        if peer_name(connection) != KEYHOLDER:
            connection.close()
            raise ssl.SSLError(0, f"its certificate is not the {KEYHOLDER}'s")
        return connection


@dataclass(frozen=True)
class KeyHolderOptions:
    """`keyholder`: where the key-holder of encrypted profiles answers."""

    address: str = ""
    """HOST:PORT of `fedkeep keyholder serve`."""
    credentials: str = ""
    """A directory with ca.crt, planner.crt and planner.key, made by `fedkeep provision --key-holder
    HOST`."""
    insecure: bool = False
    """No TLS: loopback only."""

    def client(self) -> KeyHolderClient:
        """Return a client of this key-holder."""
        if not self.address:
            raise ConfigError(
                "privacy.encrypted-profiles needs keyholder.address: where "
                "`fedkeep keyholder serve` runs"
            )
        if self.insecure == bool(self.credentials):
            raise ConfigError(
                "set keyholder.credentials, or keyholder.insecure=true on loopback, and not both"
            )
        tls = None if self.insecure else secured(Path(self.credentials), "planner")
        return KeyHolderClient(Address.parse(self.address), tls)


class RemotePlanner:
    """Greedy plans, made by the key-holder of sealed profiles.

    A failure is logged once, and tried again later.
    """

    def __init__(self, client: KeyHolderClient, coordinator: Coordinator) -> None:
        # A subclass would be planned as if it were Greedy.
        if type(coordinator) is not Greedy:
            raise ConfigError("encrypted profiles are planned by coordinator 'greedy' only")
        self._client, self._greedy = client, coordinator
        self._request: ProfileRequest | None = None
        self._next_attempt, self._last_trouble = 0.0, ""
        self.profiles: dict[DeviceId, bytes] = {}
        """What devices sealed for the present request."""

    def request(self, now: float) -> ProfileRequest | None:
        """Return what every device is asked; None while the key-holder does not answer.

        A new request needs all answers again.
        """
        if self._request is None and (issued := self._ask(now, AskKey(), PublishedKey)) is not None:
            self._request, self.profiles = ProfileRequest(issued.key, issued.nonce), {}
        return self._request

    def plan(
        self, now: float, present: Iterable[DeviceId], before: Plan | None, labels: int
    ) -> Planned | None:
        """Return the key-holder's plan for these devices, and the rejected profiles.

        None if it makes none now.
        """
        if self._request is None:
            return None
        profiles = {device: self.profiles[device] for device in sorted(present)}
        asked = AskPlan(self._request.nonce, labels, profiles, self._greedy, before)
        return self._ask(now, asked, Planned)

    def _ask(self, now: float, request: KeyRequest, expected: type[Answer]) -> Answer | None:
        """Return a valid answer; otherwise log the reason once and try again later."""
        if now < self._next_attempt:
            return None
        try:
            answer = self._client.ask(request, expected)
            if isinstance(request, AskPlan) and isinstance(answer, Planned):
                planned = [
                    *checked_plan(answer.plan).devices.tolist(),
                    *{refusal.device for refusal in answer.refused},
                ]
                if (
                    sorted(planned) != sorted(request.profiles)
                    or answer.plan.quotas.shape[1] != request.labels
                ):
                    raise RejectedError(
                        "malformed plan", "it is not for the devices and labels it was asked for"
                    )
        except FedkeepError as error:
            self._next_attempt = now + _RETRY_SECONDS
            if str(error) != self._last_trouble:
                log.warning(
                    "no plan from encrypted profiles yet: %s; "
                    "trying again, and nothing in the clear",
                    error,
                )
            self._last_trouble = str(error)
            if isinstance(error, RejectedError) and error.reason == "outdated":
                self._request = None
            return None
        self._last_trouble = ""
        return answer


class KeyService:
    """The key-holder's service, which listens until it is closed.

    It opens profiles only in order to answer with a plan, and keeps none.
    """

    def __init__(
        self,
        secret: X25519PrivateKey,
        address: Address,
        tls: ssl.SSLContext | None,
        least_devices: int = 3,
    ) -> None:
        if tls is None and not is_loopback(address.host):
            raise ConfigError(
                f"--insecure is for loopback only, and {address.host} is not: "
                "run `fedkeep provision`"
            )
        self._secret, self._nonce = secret, secrets.token_bytes(NONCE_BYTES)
        self._tls, self._least = tls, least_devices
        self._planning, self._free = threading.Lock(), threading.Semaphore(_CONNECTIONS)
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        try:
            self._socket = socket.create_server((address.host, address.port), family=family)
        except OSError as error:
            raise ConfigError(f"cannot listen on {address}: {error.strerror}") from error
        self.address = Address(address.host, self._socket.getsockname()[1])

    def run(self) -> None:
        """Answer until `close`; every connection has its own thread."""
        while True:
            self._free.acquire()
            try:
                connection, peer = self._socket.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(connection, peer[0]), daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()

    def _serve(self, plain: socket.socket, peer: str) -> None:
        plain.settimeout(_HANDSHAKE_SECONDS)
        try:
            with (
                plain,
                self._tls.wrap_socket(plain, server_side=True)
                if self._tls
                else plain as connection,
            ):
                name = peer_name(connection) if isinstance(connection, ssl.SSLSocket) else PLANNER
                if name != PLANNER:
                    raise RejectedError("not the server", f"its certificate is that of '{name}'")
                connection.settimeout(_PATIENCE_SECONDS)
                while (payload := receive_frame(connection)) is not None:
                    send_frame(connection, to_bytes(self.answer(payload, peer)))
        except (OSError, RejectedError) as error:
            log.warning("%s: %s", peer, error)
        finally:
            self._free.release()

    def answer(self, payload: bytes, peer: str) -> KeyReply:
        """Answer one request; one that cannot be met is answered with the reason."""
        try:
            request: KeyRequest = from_bytes(payload, KeyRequest)
            with self._planning:
                if isinstance(request, AskPlan):
                    return self._plan(request, peer)
                self._nonce = secrets.token_bytes(NONCE_BYTES)
                return PublishedKey(public_half(self._secret), self._nonce)
        except (FedkeepError, ValueError, OverflowError, OSError) as error:
            refusal = (
                error if isinstance(error, RejectedError) else RejectedError("error", str(error))
            )
        log.warning("%s refused: %s", peer, refusal)
        return Failed(refusal.reason, refusal.detail)

    def _plan(self, request: AskPlan, peer: str) -> Planned:
        """Make the plan that the server itself would make of the valid profiles.

        There must be enough of them that a plan reveals none.
        """
        if request.nonce != self._nonce:
            raise RejectedError(
                "outdated", "its nonce is not the one given out last: ask for all profiles anew"
            )
        valid: dict[DeviceId, Profile] = {}
        refused: list[Rejection] = []
        for device, sealed in request.profiles.items():
            try:
                valid[device] = unseal(self._secret, self._nonce, device, sealed, request.labels)
            except RejectedError as error:
                refused.append(Rejection(device, error.reason, error.detail))
        named = "".join(f"; device {r.device}: {r.reason}" for r in refused[:10])
        if len(valid) < self._least:
            few = f"a plan for {len(valid)} would tell of each"
            why = f"{few}: at least {self._least} are needed{named}"
            raise RejectedError("too few devices", why)
        fleet, _, cut = cap_profiles(FleetProfiles.of(valid), np.full(len(valid), np.nan), 1.0)
        for claim in cut:  # for this log only: it would reveal to the server which device is fast
            log.warning("device %d: %s", claim.device, claim.detail)
        if request.before is None:
            plan = request.greedy.plan(fleet)
        else:
            plan = request.greedy.replan(checked_plan(request.before), fleet)
        log.info(
            "planned for %d devices and %d labels, asked by %s%s",
            len(fleet),
            fleet.labels,
            peer,
            named,
        )
        return Planned(plan, tuple(refused))


def checked_plan(plan: Plan) -> Plan:
    """Return the received plan, if its parts fit each other.

    Raises
    ------
    RejectedError
        If they do not, or if a weight is not finite.
    """
    devices, quotas, weights = plan.devices, plan.quotas, plan.label_weights
    fits = devices.ndim == weights.ndim == 1 and quotas.shape == (len(devices), len(weights))
    kinds = devices.dtype == np.int64 and quotas.dtype.kind in "iu" and weights.dtype == np.float64
    if not (fits and kinds) or (np.diff(devices) <= 0).any() or (quotas < 0).any():
        raise RejectedError(
            "malformed plan", "its devices, quotas and weights do not fit each other"
        )
    if not (
        np.isfinite(weights).all() and (weights >= 0).all() and 0 <= plan.mass_per_slot < np.inf
    ):
        raise RejectedError("malformed plan", "its weights are not finite numbers of at least 0")
    return plan


def secured(credentials: Path, name: str) -> ssl.SSLContext:
    """Return the TLS context for the side of this name, "keyholder" or "planner".

    Each asks for the other's certificate.
    """
    serves = name == "keyholder"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if serves else ssl.PROTOCOL_TLS_CLIENT)
    context.verify_mode, context.minimum_version = ssl.CERT_REQUIRED, ssl.TLSVersion.TLSv1_3
    authority, certificate, key = (
        credentials / file for file in ("ca.crt", f"{name}.crt", f"{name}.key")
    )
    for path in (authority, certificate, key):
        if not path.exists():
            raise ConfigError(
                f"{path} is not there: run `fedkeep provision DIR --key-holder HOST` "
                "and copy it here"
            )
    try:
        context.load_verify_locations(authority)
        context.load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        raise ConfigError(
            f"the certificates in {credentials} do not fit each other: {error.reason}"
        ) from error
    return context


def peer_name(connection: ssl.SSLSocket) -> str:
    """Return the common name in the peer's certificate, which TLS has verified."""
    certificate: Any = connection.getpeercert() or {}
    names = [
        value
        for part in certificate.get("subject", ())
        for key, value in part
        if key == "commonName"
    ]
    return str(names[0]) if names else ""
