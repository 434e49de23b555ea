"""Secure aggregation: the server learns the sum of the devices' integers, and no single one.

Four exchanges, after Bonawitz et al. (CCS'17): (1) devices publish keys; (2) each shares its two
secrets among all, in envelopes the server cannot open; (3) each sends its integers under one mask
of its own and one per peer, which cancel in the sum; (4) the survivors give shares of the own masks
of those who sent, and of the keys of those who dropped out. Up to n - threshold devices may drop
out at any step.

It holds against a server that follows the protocol but looks at everything, even together with
fewer than 2 * threshold - n devices. Devices are identified by the transport's authentication, and
messages are bytes that any transport can carry: msgpack, so that nothing received can run.

Curves, key derivation, ciphers (`cryptography`) and secret sharing (`PyCryptodome`) come from the
libraries that Flower's own secure aggregation rests on: a Flower device has them already, any other
needs no Flower.
"""

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import msgspec
import numpy as np

from fedkeep.core.errors import RejectedError, RejectionReason, optional_import
from fedkeep.core.types import DeviceId
from fedkeep.privacy.secagg.fixed_point import WORD, FixedPoint, Words

with optional_import("secure aggregation", "privacy"):
    from Crypto.Protocol.SecretSharing import Shamir
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

SESSION_BYTES = 16
_SEED_BYTES, _NONCE_BYTES = 16, 12
_fresh_seed = partial(secrets.token_bytes, _SEED_BYTES)
"""A secret from which a mask or a private key is derived, of the length that can be shared."""
_FLEET = 1 << 16
"""Devices whose estimators a running sum can hold."""


@dataclass(frozen=True)
class PublicKeys:
    """What a device publishes first: keys for masks and envelopes, and its mask's digest."""

    masking: bytes
    sealing: bytes
    own_mask: bytes
    """Tells nothing of the mask, but whether the shares given later make it up."""
    member: bytes = b""
    """Whose keys they are, by a node key; empty where devices believe the server."""
    signature: bytes = b""


class _Told(msgspec.Struct, frozen=True, tag=True):
    """A message about one sum, of either side."""

    session: bytes


class SecureAggregationConfig(_Told, frozen=True):
    """The terms of a sum for one device; it answers them with `Keys`."""

    device: DeviceId
    """The number under which the others know this device."""
    threshold: int
    summands: int
    update_norm: float
    gradient_norm: float
    gradient_size: int
    """0: no estimators are summed."""
    heaviest: float
    """The most this device's report may weigh."""
    weight_unit: float
    """Weights count in this unit, which makes them 1 at most."""
    rate: float
    """What this device's estimator weighs, 1 at most."""
    counted: bytes = b""
    """The session in which the running sum last counted this device's estimator; empty: in none."""
    per_step: bool = False
    """Whether updates are divided by their local steps (`fednova`)."""

    @property
    def update_grid(self) -> FixedPoint:
        """Return the grid of a round's updates, as wide as the limits, and of weights up to 1."""
        return FixedPoint(max(self.update_norm, 1.0), self.summands)

    @property
    def estimator_grid(self) -> FixedPoint:
        """For the estimators of a whole fleet, the same in every round."""
        return FixedPoint(max(self.gradient_norm, 1.0), _FLEET)


class Keys(_Told, frozen=True):
    """Exchange 1: a device has its report ready, and publishes its keys."""

    keys: PublicKeys
    lost: bool = False
    """Its memory of what the running sum counts is gone: the sum must begin anew."""


class Declined(_Told, frozen=True):
    """A device's report is not fit to be masked: in a sum it would spoil all others unseen."""

    reason: str
    detail: str


class PartyKeys(_Told, frozen=True):
    """Everybody's keys; answered by `Envelopes`."""

    keys: dict[DeviceId, PublicKeys]


class Envelopes(_Told, frozen=True):
    """Exchange 2: up, by receiver; down, by sender, and answered by `MaskedWords`."""

    envelopes: dict[DeviceId, bytes]


class MaskedWords(_Told, frozen=True):
    """Exchange 3: the report under its masks, little-endian."""

    words: bytes


class Survivors(_Told, frozen=True):
    """Whose words are in the sum; answered by `OpenedShares`."""

    devices: tuple[DeviceId, ...]


class OpenedShares(_Told, frozen=True):
    """Exchange 4: a survivor's shares of the masks that are left."""

    own_masks: dict[DeviceId, bytes]
    masking_keys: dict[DeviceId, bytes]


Request: TypeAlias = PartyKeys | Envelopes | Survivors

encode = msgspec.msgpack.encode


def decode(payload: bytes, expected: Any) -> Any:
    """Return the message if it is of the expected kind; raise what a device declined by."""
    try:
        message = msgspec.msgpack.decode(payload, type=expected | Declined)
    except msgspec.DecodeError as error:
        name = getattr(expected, "__name__", "a question")
        raise RejectedError(
            RejectionReason.MALFORMED, f"expected {name} of a secure sum: {error}"
        ) from error
    if isinstance(message, Declined):
        raise RejectedError(message.reason[:40], message.detail[:300])
    return message


def require_usable(keys: PublicKeys) -> None:
    """Reject keys with which nobody can agree on a mask: all other devices would fail."""
    for key in (keys.masking, keys.sealing):
        _agree(_fresh_seed(), key, b"trial")


def require_threshold(threshold: int, count: int) -> None:
    """Reject thresholds under which a server could unmask twice, or see one device alone."""
    if not count // 2 < threshold <= count:
        raise RejectedError(
            RejectionReason.THRESHOLD,
            f"{threshold} of {count} devices: it must be more than half, at most all",
        )
    if threshold < 2:
        raise RejectedError(
            RejectionReason.THRESHOLD,
            "a sum over one device hides nothing: at least two must take part",
        )


class MaskingDevice(msgspec.Struct):
    """A device's part in one sum; it shares, masks and unmasks once: twice would reveal it.

    As msgpack it outlives a message, secrets included: whoever keeps that keeps it as safe as the
    samples.
    """

    device: DeviceId
    session: bytes
    threshold: int
    words: bytes = b""
    """What is to be summed, little-endian."""
    own_mask: bytes = msgspec.field(default_factory=_fresh_seed)
    masking: bytes = msgspec.field(default_factory=_fresh_seed)
    sealing: bytes = msgspec.field(default_factory=_fresh_seed)
    roster: dict[DeviceId, PublicKeys] = {}
    envelopes: dict[DeviceId, bytes] = {}
    masked: bool = False
    unmasked: bool = False

    def keys(self) -> PublicKeys:
        """Exchange 1."""
        digest = _derive(self.own_mask, b"digest")
        return PublicKeys(_public_key(self.masking), _public_key(self.sealing), digest)

    def share(self, roster: Mapping[DeviceId, PublicKeys]) -> Envelopes:
        """Exchange 2: an envelope for every device of the roster, with a share of both secrets."""
        if self.roster:
            raise RejectedError(
                RejectionReason.SECOND_SHARING,
                "the same secrets may not be shared among others: nothing was sent",
            )
        require_threshold(self.threshold, len(roster))
        if roster.get(self.device) != self.keys():
            raise RejectedError(
                RejectionReason.ROSTER, f"it does not hold the keys of device {self.device}"
            )
        self.roster = dict(sorted(roster.items()))
        own, key = (
            Shamir.split(self.threshold, len(roster), seed, False)
            for seed in (self.own_mask, self.masking)
        )
        sealed = {}
        for peer, (_, own_share), (_, key_share) in zip(self.roster, own, key, strict=True):
            nonce, header = secrets.token_bytes(_NONCE_BYTES), self._header(self.device, peer)
            sealed[peer] = nonce + self._cipher(peer).encrypt(nonce, own_share + key_share, header)
        return Envelopes(self.session, sealed)

    def mask(self, envelopes: Mapping[DeviceId, bytes]) -> MaskedWords:
        """Exchange 3: the integers under masks agreed with all who sent an envelope."""
        if self.masked:
            raise RejectedError(
                RejectionReason.SECOND_MASKING,
                "the same masks may not hide two vectors: nothing was sent",
            )
        if not envelopes.keys() <= self.roster.keys() or self.device not in envelopes:
            raise RejectedError(
                RejectionReason.ENVELOPES, "they are not of the devices of the roster"
            )
        if len(envelopes) < self.threshold:
            raise RejectedError(
                RejectionReason.TOO_FEW_DEVICES, f"{len(envelopes)} of at least {self.threshold}"
            )
        self.masked, self.envelopes = True, dict(envelopes)
        words = np.frombuffer(self.words, dtype=WORD)
        hidden = words + _mask(_derive(self.own_mask, b"own mask" + self.session), len(words))
        for peer in envelopes:
            if peer != self.device:
                key = _agree(self.masking, self.roster[peer].masking, self.session)
                hidden = hidden + _pair_mask(key, self.device, peer, len(words))
        return MaskedWords(self.session, hidden.tobytes())

    def unmask(self, survivors: Iterable[DeviceId]) -> OpenedShares:
        """Exchange 4: one share per device, never both of the same one."""
        if self.unmasked or not self.masked:
            raise RejectedError(
                RejectionReason.UNMASKING, "a device unmasks once, after it has masked"
            )
        sent = set(survivors)
        if (
            len(sent) < self.threshold
            or not sent <= self.envelopes.keys()
            or self.device not in sent
        ):
            raise RejectedError(
                RejectionReason.SURVIVORS,
                f"{len(sent)} devices are named; at least {self.threshold} must be",
            )
        self.unmasked = True
        own, keys = {}, {}
        for peer, envelope in self.envelopes.items():
            cipher, header = self._cipher(peer), self._header(peer, self.device)
            try:
                shares = cipher.decrypt(envelope[:_NONCE_BYTES], envelope[_NONCE_BYTES:], header)
            except (InvalidTag, ValueError) as error:
                raise RejectedError(
                    RejectionReason.UNREADABLE_ENVELOPE, "it was changed, or is for another device"
                ) from error
            if peer in sent:
                own[peer] = shares[:_SEED_BYTES]
            else:
                keys[peer] = shares[_SEED_BYTES:]
        return OpenedShares(self.session, own, keys)

    def _cipher(self, peer: DeviceId) -> ChaCha20Poly1305:
        return ChaCha20Poly1305(
            _agree(self.sealing, self.roster[peer].sealing, b"seal" + self.session)
        )

    def _header(self, sender: DeviceId, receiver: DeviceId) -> bytes:
        return f"{sender}>{receiver}/".encode() + self.session


@dataclass(eq=False)
class AggregationSession:
    """The server's part in one sum: passes envelopes on, adds up, unmasks the sum."""

    session: bytes
    threshold: int
    size: int
    terms: Mapping[DeviceId, SecureAggregationConfig] = field(default_factory=dict)
    """On which each device was asked."""
    _roster: dict[DeviceId, PublicKeys] = field(default_factory=dict, init=False)
    _envelopes: dict[DeviceId, Envelopes] = field(default_factory=dict, init=False)
    _masked: dict[DeviceId, Words] = field(default_factory=dict, init=False)

    def open(self, keys: Mapping[DeviceId, PublicKeys]) -> PartyKeys:
        """After exchange 1: the roster to send to all; `require_usable` comes before."""
        require_threshold(self.threshold, len(keys))
        self._roster = dict(sorted(keys.items()))
        return PartyKeys(self.session, self._roster)

    def route(self, sent: Mapping[DeviceId, Envelopes]) -> dict[DeviceId, Envelopes]:
        """After exchange 2: what every device that is still there gets, by sender."""
        self._envelopes = {
            d: e for d, e in sent.items() if e.envelopes.keys() == self._roster.keys()
        }
        self._require(len(self._envelopes))
        return {
            peer: Envelopes(
                self.session, {d: e.envelopes[peer] for d, e in self._envelopes.items()}
            )
            for peer in self._envelopes
        }

    def receive(self, device: DeviceId, answer: MaskedWords) -> None:
        """Exchange 3: one device's masked integers, in answer to this session."""
        if device not in self._envelopes or device in self._masked:
            raise RejectedError(
                RejectionReason.ANSWER_NOT_EXPECTED,
                f"device {device} is not in this sum, or already counted",
            )
        if len(answer.words) != WORD.itemsize * self.size:
            raise RejectedError(
                RejectionReason.ANSWER_OF_WRONG_FORM,
                f"device {device}: {len(answer.words)} bytes of words",
            )
        self._masked[device] = np.frombuffer(answer.words, dtype=WORD)

    def survivors(self) -> tuple[DeviceId, ...]:
        """After exchange 3: those whose integers are in the sum."""
        self._require(len(self._masked))
        return tuple(sorted(self._masked))

    def total(self, opened: Mapping[DeviceId, OpenedShares]) -> Words:
        """After exchange 4: the sum over the survivors, without any mask."""
        self._require(len(opened))
        total = np.zeros(self.size, WORD)
        for device, words in self._masked.items():
            seed = self._recover({d: shares.own_masks.get(device) for d, shares in opened.items()})
            if _derive(seed, b"digest") != self._roster[device].own_mask:
                raise RejectedError(
                    RejectionReason.SHARES_DO_NOT_FIT,
                    f"the mask of device {device} cannot be recovered",
                )
            total = total + words - _mask(_derive(seed, b"own mask" + self.session), self.size)
        for dropped in self._envelopes.keys() - self._masked.keys():
            seed = self._recover(
                {d: shares.masking_keys.get(dropped) for d, shares in opened.items()}
            )
            if _public_key(seed) != self._roster[dropped].masking:
                raise RejectedError(
                    RejectionReason.SHARES_DO_NOT_FIT,
                    f"the key of device {dropped} cannot be recovered",
                )
            for device in self._masked:
                key = _agree(seed, self._roster[device].masking, self.session)
                total = total - _pair_mask(key, device, dropped, self.size)
        return total

    def _recover(self, shares: Mapping[DeviceId, bytes | None]) -> bytes:
        whole = ((i + 1, shares.get(device)) for i, device in enumerate(self._roster))
        numbered = [
            (i, share) for i, share in whole if share is not None and len(share) == _SEED_BYTES
        ]
        self._require(len(numbered))
        return bytes(Shamir.combine(numbered[: self.threshold], False))

    def _require(self, count: int) -> None:
        if count < self.threshold:
            raise RejectedError(
                RejectionReason.TOO_FEW_DEVICES,
                f"{count} are left, {self.threshold} are needed: no sum this round",
            )


def _derive(secret: bytes, purpose: bytes) -> bytes:
    """Return a key of 32 bytes for one purpose."""
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=purpose).derive(secret)


def _private_key(seed: bytes) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(_derive(seed, b"fedkeep private key"))


def _public_key(seed: bytes) -> bytes:
    return _private_key(seed).public_key().public_bytes_raw()


def _agree(seed: bytes, peer: bytes, purpose: bytes) -> bytes:
    """Return the key that both ends derive, each from its own seed and the other's public key."""
    try:
        shared = _private_key(seed).exchange(X25519PublicKey.from_public_bytes(peer))
    except ValueError as error:
        raise RejectedError(RejectionReason.UNUSABLE_PUBLIC_KEY, str(error)) from error
    return _derive(shared, purpose)


def _mask(key: bytes, size: int) -> Words:
    """Return that many integers, random to all without the key; never twice for one key."""
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(stream.update(bytes(size * WORD.itemsize)), dtype=WORD)


def _pair_mask(key: bytes, device: DeviceId, peer: DeviceId, size: int) -> Words:
    """Return the mask that `device` adds for `peer`: the negative of what `peer` adds for it."""
    shared = _mask(key, size)
    return shared if device < peer else np.zeros_like(shared) - shared
