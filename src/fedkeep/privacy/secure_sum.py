"""Secure aggregation: the server learns the sum of the devices' integers and nothing of any single one.

Four exchanges, after Bonawitz et al. (CCS'17): (1) devices publish keys; (2) each shares its two secrets
among all, in envelopes the server cannot open; (3) each sends its integers under one mask of its own and one
per peer, which cancel in the sum; (4) the survivors give shares of the own masks of those who sent, and of
the keys of those who dropped out. Up to n - threshold devices may drop out at any step.

It holds against a server that follows the protocol but looks at everything, even together with fewer than
2 * threshold - n devices. Devices are told apart by the transport's authentication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from fedkeep.core.errors import RefusedError
from fedkeep.core.types import DeviceId, State
from fedkeep.privacy import masks
from fedkeep.privacy.fixed_point import Words


@dataclass(frozen=True)
class PublicKeys:
    """What a device publishes first: keys to agree on masks and on envelopes, and its own mask's digest."""

    masking: bytes
    sealing: bytes
    own_mask: bytes
    """Tells nothing of the mask, but whether the shares given later make it up."""
    member: bytes = b""
    """Whose keys they are, by a node key; empty where devices believe the server."""
    signature: bytes = b""


@dataclass(frozen=True, eq=False)
class Masked:
    """A device's integers under its masks; the session says which sum they belong to."""

    session: bytes
    words: Words


@dataclass(frozen=True)
class Unmasking:
    """A survivor's shares: of the own mask of those who sent, of the masking key of those who did not."""

    own_masks: Mapping[DeviceId, bytes]
    masking_keys: Mapping[DeviceId, bytes]


def usable(keys: PublicKeys) -> PublicKeys:
    """The keys, if devices can agree on something with their owner; else every other device would fail at them."""
    for key in (keys.masking, keys.sealing):
        masks.agree(masks.fresh_seed(), key, b"trial")
    return keys


def require_threshold(threshold: int, count: int) -> None:
    """Refuses thresholds under which a server could unmask twice, with two halves of the devices, or see one alone."""
    if not count // 2 < threshold <= count:
        raise RefusedError("threshold", f"{threshold} of {count} devices: it must be more than half, at most all")
    if threshold < 2:
        raise RefusedError("threshold", "a sum over one device hides nothing: at least two must take part")


class _Kept(msgspec.Struct, frozen=True):
    """What a device must remember of a sum between two messages."""

    device: DeviceId
    session: bytes
    threshold: int
    own_mask: bytes
    masking: bytes
    sealing: bytes
    roster: dict[DeviceId, PublicKeys]
    envelopes: dict[DeviceId, bytes]
    masked: bool
    unmasked: bool


class MaskingDevice:
    """A device's part in one sum; it shares, masks and unmasks once, since twice would tell what once hides."""

    def __init__(self, device: DeviceId, session: bytes, threshold: int) -> None:
        self._device, self._session, self._threshold = device, session, threshold
        self._own_mask, self._masking, self._sealing = (masks.fresh_seed() for _ in range(3))
        self._roster: dict[DeviceId, PublicKeys] = {}
        self._envelopes: dict[DeviceId, bytes] = {}
        self._masked = self._unmasked = False

    def keys(self) -> PublicKeys:
        """Exchange 1."""
        digest = masks.derive(self._own_mask, b"digest")
        return PublicKeys(masks.public_key(self._masking), masks.public_key(self._sealing), digest)

    def share(self, roster: Mapping[DeviceId, PublicKeys]) -> dict[DeviceId, bytes]:
        """Exchange 2: an envelope for every device of the roster, with a share of both secrets."""
        if self._roster:
            raise RefusedError("second sharing", "the same secrets may not be shared among others: nothing was sent")
        require_threshold(self._threshold, len(roster))
        if roster.get(self._device) != self.keys():
            raise RefusedError("roster", f"it does not hold the keys of device {self._device}")
        self._roster = dict(sorted(roster.items()))
        own = masks.split(self._own_mask, self._threshold, len(roster))
        key = masks.split(self._masking, self._threshold, len(roster))
        return {
            peer: masks.seal(self._sealing_key(peer), own[i] + key[i], self._header(self._device, peer))
            for i, peer in enumerate(self._roster)
        }

    def mask(self, words: Words, envelopes: Mapping[DeviceId, bytes]) -> Masked:
        """Exchange 3: the integers under masks agreed with all who sent an envelope."""
        if self._masked:
            raise RefusedError("second masking", "the same masks may not hide two vectors: nothing was sent")
        if not envelopes.keys() <= self._roster.keys() or self._device not in envelopes:
            raise RefusedError("envelopes", "they are not of the devices of the roster")
        if len(envelopes) < self._threshold:
            raise RefusedError("too few devices", f"{len(envelopes)} of at least {self._threshold}")
        self._masked, self._envelopes = True, dict(envelopes)
        hidden = words + _own_mask(self._own_mask, self._session, words)
        for peer in envelopes:
            if peer != self._device:
                key = masks.agree(self._masking, self._roster[peer].masking, self._session)
                hidden = hidden + _pair_mask(key, self._device, peer, words)
        return Masked(self._session, hidden)

    def unmask(self, survivors: Sequence[DeviceId]) -> Unmasking:
        """Exchange 4: one share per device, never both of the same one."""
        if self._unmasked or not self._masked:
            raise RefusedError("unmasking", "a device unmasks once, after it has masked")
        sent = set(survivors)
        if len(sent) < self._threshold or not sent <= self._envelopes.keys() or self._device not in sent:
            raise RefusedError("survivors", f"{len(sent)} devices are named; at least {self._threshold} must be")
        self._unmasked = True
        own, keys = {}, {}
        for peer, envelope in self._envelopes.items():
            shares = masks.unseal(self._sealing_key(peer), envelope, self._header(peer, self._device))
            if peer in sent:
                own[peer] = shares[: masks.SHARE_BYTES]
            else:
                keys[peer] = shares[masks.SHARE_BYTES :]
        return Unmasking(own, keys)

    def snapshot(self) -> State:
        """All of it, secrets included: whoever keeps this between two messages keeps it as safe as the samples."""
        kept = _Kept(
            self._device, self._session, self._threshold, self._own_mask, self._masking, self._sealing,
            self._roster, self._envelopes, self._masked, self._unmasked,
        )  # fmt: skip
        return {"masking": np.frombuffer(msgspec.msgpack.encode(kept), dtype=np.uint8)}

    @classmethod
    def restored(cls, state: State) -> MaskingDevice:
        """The device that `snapshot` described: what it has done once it does not do again."""
        kept = msgspec.msgpack.decode(state["masking"].tobytes(), type=_Kept)
        device = cls(kept.device, kept.session, kept.threshold)
        device._own_mask, device._masking, device._sealing = kept.own_mask, kept.masking, kept.sealing
        device._roster, device._envelopes = kept.roster, kept.envelopes
        device._masked, device._unmasked = kept.masked, kept.unmasked
        return device

    def _sealing_key(self, peer: DeviceId) -> bytes:
        return masks.agree(self._sealing, self._roster[peer].sealing, b"seal" + self._session)

    def _header(self, sender: DeviceId, receiver: DeviceId) -> bytes:
        return f"{sender}>{receiver}/".encode() + self._session


class SumServer:
    """The server's part in one sum: it passes envelopes on, adds up, and takes the masks off the sum."""

    def __init__(self, session: bytes, threshold: int, size: int, dtype: np.dtype[np.unsignedinteger]) -> None:
        self._session, self._threshold, self._size, self._dtype = session, threshold, size, dtype
        self._roster: dict[DeviceId, PublicKeys] = {}
        self._envelopes: dict[DeviceId, Mapping[DeviceId, bytes]] = {}
        self._masked: dict[DeviceId, Words] = {}

    def open(self, keys: Mapping[DeviceId, PublicKeys]) -> dict[DeviceId, PublicKeys]:
        """After exchange 1: the roster to send to all; keys must be `usable`."""
        require_threshold(self._threshold, len(keys))
        self._roster = dict(sorted(keys.items()))
        return self._roster

    def route(self, sent: Mapping[DeviceId, Mapping[DeviceId, bytes]]) -> dict[DeviceId, dict[DeviceId, bytes]]:
        """After exchange 2: what every device that is still there gets, by sender."""
        self._envelopes = {d: e for d, e in sent.items() if e.keys() == self._roster.keys()}
        self._require(len(self._envelopes))
        return {peer: {d: e[peer] for d, e in self._envelopes.items()} for peer in self._envelopes}

    def receive(self, device: DeviceId, answer: object) -> None:
        """Exchange 3: one device's masked integers; an answer in the clear, say, is refused."""
        if not isinstance(answer, Masked):
            raise RefusedError("answer in the clear", f"device {device} was asked to mask; its answer is dropped")
        if device not in self._envelopes or device in self._masked:
            raise RefusedError("answer not expected", f"device {device} is not in this sum, or already counted")
        if answer.session != self._session:
            raise RefusedError("answer of another sum", f"device {device}")
        if answer.words.shape != (self._size,) or answer.words.dtype != self._dtype:
            raise RefusedError(
                "answer of the wrong form", f"device {device}: expected ({self._size},) of {self._dtype}"
            )
        self._masked[device] = answer.words

    def survivors(self) -> tuple[DeviceId, ...]:
        """After exchange 3: those whose integers are in the sum."""
        self._require(len(self._masked))
        return tuple(sorted(self._masked))

    def total(self, unmaskings: Mapping[DeviceId, Unmasking]) -> Words:
        """After exchange 4: the sum over the survivors, without any mask."""
        self._require(len(unmaskings))
        total = np.zeros(self._size, self._dtype)
        for words in self._masked.values():
            total = total + words
        for device in self._masked:
            seed = self._recover({d: u.own_masks.get(device) for d, u in unmaskings.items()})
            if masks.derive(seed, b"digest") != self._roster[device].own_mask:
                raise RefusedError("shares that do not fit", f"the mask of device {device} cannot be recovered")
            total = total - _own_mask(seed, self._session, total)
        for dropped in self._envelopes.keys() - self._masked.keys():
            seed = self._recover({d: u.masking_keys.get(dropped) for d, u in unmaskings.items()})
            total = total - self._left_over(dropped, seed)
        return total

    def _left_over(self, dropped: DeviceId, seed: bytes) -> Words:
        """The masks that the survivors agreed with a device that then dropped out."""
        if masks.public_key(seed) != self._roster[dropped].masking:
            raise RefusedError("shares that do not fit", f"the key of device {dropped} cannot be recovered")
        left = np.zeros(self._size, self._dtype)
        for device in self._masked:
            key = masks.agree(seed, self._roster[device].masking, self._session)
            left = left + _pair_mask(key, device, dropped, left)
        return left

    def _recover(self, shares: Mapping[DeviceId, bytes | None]) -> bytes:
        whole = ((i + 1, shares.get(device)) for i, device in enumerate(self._roster))
        numbered = [(i, share) for i, share in whole if share is not None and len(share) == masks.SHARE_BYTES]
        self._require(len(numbered))
        return masks.combine(numbered[: self._threshold])

    def _require(self, count: int) -> None:
        if count < self._threshold:
            raise RefusedError("too few devices", f"{count} are left, {self._threshold} are needed: no sum this round")


def _own_mask(seed: bytes, session: bytes, like: Words) -> Words:
    return masks.mask(masks.derive(seed, b"own mask" + session), len(like), like.dtype)


def _pair_mask(key: bytes, device: DeviceId, peer: DeviceId, like: Words) -> Words:
    """The mask that `device` adds for `peer`: the negative of what `peer` adds for it."""
    shared = masks.mask(key, len(like), like.dtype)
    return shared if device < peer else np.zeros_like(shared) - shared
