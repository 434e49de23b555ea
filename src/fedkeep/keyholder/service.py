"""The key-holder's port: answers the fleet's server, and nobody else, with its public key and with plans."""

import logging
import secrets
import socket
import ssl
import threading

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedkeep.core.errors import ConfigError, FedkeepError, RefusedError
from fedkeep.core.fleet import Fleet
from fedkeep.core.rounds import Refusal, credible
from fedkeep.core.types import DeviceId, Profile
from fedkeep.keyholder import planner
from fedkeep.keyholder.sealing import NONCE_BYTES, public_half, unseal
from fedkeep.link.addresses import Address, is_loopback
from fedkeep.link.framing import receive_frame, send_frame
from fedkeep.link.messages import Failed
from fedkeep.link.wire import from_bytes, to_bytes

log = logging.getLogger("fedkeep.keyholder")

_HANDSHAKE_SECONDS = 5.0
_PATIENCE_SECONDS = 60.0
"""How long the server may be silent; whoever else connects has less time to show that it is the server."""
_CONNECTIONS = 4
"""At a time: there is one server, and each connection may hold a message of some hundred megabytes."""


class KeyService:
    """Listens until it is closed; it opens profiles only in order to answer with a plan, and keeps none."""

    def __init__(
        self, secret: X25519PrivateKey, address: Address, tls: ssl.SSLContext | None, least_devices: int = 3
    ) -> None:
        if tls is None and not is_loopback(address.host):
            raise ConfigError(f"--insecure is for loopback only, and {address.host} is not: run `fedkeep provision`")
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
        """Answers until `close`; every connection has its own thread."""
        while True:
            self._free.acquire()
            try:
                connection, peer = self._socket.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(connection, peer[0]), daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _serve(self, plain: socket.socket, peer: str) -> None:
        plain.settimeout(_HANDSHAKE_SECONDS)
        try:
            with plain, self._tls.wrap_socket(plain, server_side=True) if self._tls else plain as connection:
                name = planner.peer_name(connection) if isinstance(connection, ssl.SSLSocket) else planner.PLANNER
                if name != planner.PLANNER:
                    raise RefusedError("not the server", f"its certificate is that of '{name}'")
                connection.settimeout(_PATIENCE_SECONDS)
                while (payload := receive_frame(connection)) is not None:
                    send_frame(connection, to_bytes(self.answer(payload, peer)))
        except (OSError, RefusedError) as error:
            log.warning("%s: %s", peer, error)
        finally:
            self._free.release()

    def answer(self, payload: bytes, peer: str) -> planner.KeyReply:
        """The reply to one request; a request that cannot be met is answered with the reason."""
        try:
            request: planner.KeyRequest = from_bytes(payload, planner.KeyRequest)
            with self._planning:
                if isinstance(request, planner.AskPlan):
                    return self._plan(request, peer)
                self._nonce = secrets.token_bytes(NONCE_BYTES)
                return planner.PublishedKey(public_half(self._secret), self._nonce)
        except (FedkeepError, ValueError, OverflowError, OSError) as error:
            refusal = error if isinstance(error, RefusedError) else RefusedError("error", str(error))
        log.warning("%s refused: %s", peer, refusal)
        return Failed(refusal.reason, refusal.detail)

    def _plan(self, request: planner.AskPlan, peer: str) -> planner.Planned:
        """The plan that the server itself would make of the sound profiles, if they are enough to hide each other."""
        if request.nonce != self._nonce:
            raise RefusedError("outdated", "its nonce is not the one given out last: ask for all profiles anew")
        sound: dict[DeviceId, Profile] = {}
        refused: list[Refusal] = []
        for device, sealed in request.profiles.items():
            try:
                sound[device] = unseal(self._secret, self._nonce, device, sealed, request.labels)
            except RefusedError as error:
                refused.append(Refusal(device, error.reason, error.detail))
        named = "".join(f"; device {r.device}: {r.reason}" for r in refused[:10])
        if len(sound) < self._least:
            why = f"a plan for {len(sound)} would tell of each: at least {self._least} are needed{named}"
            raise RefusedError("too few devices", why)
        fleet, _, cut = credible(Fleet.of(sound), np.full(len(sound), np.nan), 1.0)
        for claim in cut:  # for this log alone: it would tell the server who is fast
            log.warning("device %d: %s", claim.device, claim.detail)
        if request.before is None:
            plan = request.greedy.plan(fleet)
        else:
            plan = request.greedy.replan(planner.sound_plan(request.before), fleet)
        log.info("planned for %d devices and %d labels, asked by %s%s", len(fleet), fleet.labels, peer, named)
        return planner.Planned(plan, tuple(refused))
