"""Coordination from velocities that the server cannot read: the parties and what passes between them.

The key-holder, which is not the server, makes the keys. Devices encrypt their velocities under its public key; the
server adds the ciphertexts up and turns differences into signs, all without reading any; the key-holder decrypts signs
and totals and answers with the plan. So the server learns capacities, totals per label and the plan; the key-holder
learns who is faster than whom, and the totals; nobody learns another's velocity.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedkeep.core.coordination import Greedy
from fedkeep.core.errors import ConfigError, RefusedError
from fedkeep.core.plan import Plan
from fedkeep.core.types import DeviceId, IntArray, Profile
from fedkeep.privacy import ckks
from fedkeep.privacy.ckks import SUMS, Ciphertext, Scheme
from fedkeep.privacy.order import Comparisons, Grid, OrderedFleet

_DECIMALS = 6
"""Totals are rounded to these, so that the errors of CKKS do not break ties between labels."""


@dataclass(frozen=True)
class PublicContext:
    """What the key-holder publishes; with `multiply` keys it serves the server, without them the devices."""

    comparing: bytes
    summing: bytes
    scheme: Scheme
    grid: Grid
    name: bytes
    """The digest by which ciphertexts say which key they are under."""


@dataclass(frozen=True)
class ProfileRequest:
    """What a device needs to answer: the public keys, its row, and the size of the table."""

    public: PublicContext
    row: int
    devices: int
    labels: int


@dataclass(frozen=True)
class EncryptedProfile:
    """A device's answer: capacity in the clear, velocities under encryption."""

    name: bytes
    capacity: int
    comparisons: tuple[bytes, ...]
    velocities: bytes


@dataclass(frozen=True)
class EncryptedTables:
    """What the server hands to the key-holder: signs and totals under encryption, capacities in the clear."""

    devices: IntArray
    labels: int
    signs: tuple[bytes, ...]
    totals: bytes
    capacities: IntArray
    """One per device; 0 where it has not answered."""


def encrypt_profile(request: ProfileRequest, profile: Profile) -> EncryptedProfile:
    """The device's part: refuses to send anything where it cannot encrypt."""
    public = request.public
    if profile.velocity.shape != (request.labels,) or not 0 <= request.row < request.devices:
        raise RefusedError("profile request", "it does not fit this device's labels: nothing was sent")
    comparing, summing = ckks.read_context(public.comparing), ckks.read_context(public.summing)
    if comparing.has_secret_key() or summing.has_secret_key():
        raise RefusedError("leaked key", "the secret key came with the public one: nothing was sent")
    levels = public.grid.level_of(profile.velocity) / public.grid.levels
    comparisons = Comparisons(request.devices, request.labels)
    parts = _chunks(comparisons.contribution(request.row, levels), public.scheme.slots)
    return EncryptedProfile(
        public.name,
        profile.capacity,
        tuple(ckks.encrypt(comparing, part) for part in parts),
        ckks.encrypt(summing, profile.velocity),
    )


class EncryptedFleet:
    """The server's part: it holds no secret key, and adds every answer up at once."""

    def __init__(self, public: PublicContext, devices: Sequence[DeviceId], labels: int) -> None:
        self._public, self._labels = public, labels
        self._comparing, self._summing = ckks.read_context(public.comparing), ckks.read_context(public.summing)
        self._rows = {device: row for row, device in enumerate(sorted(devices))}
        self._comparisons = Comparisons(len(self._rows), labels)
        self._sizes = [len(c) for c in _chunks(np.zeros(self._comparisons.count), public.scheme.slots)]
        self._capacities = np.zeros(len(self._rows), dtype=np.int64)
        self._differences: list[Ciphertext | None] = [None] * len(self._sizes)
        self._totals: Ciphertext | None = None

    def request(self, device: DeviceId, public: PublicContext) -> ProfileRequest:
        """What to ask a device, with the devices' form of the public context."""
        return ProfileRequest(public, self._rows[device], len(self._rows), self._labels)

    def receive(self, device: DeviceId, answer: object) -> None:
        """Counts one answer; one in the clear, of another key or of another size is refused, and not kept."""
        if not isinstance(answer, EncryptedProfile):
            raise RefusedError("profile in the clear", f"device {device} was asked to encrypt; it is not used")
        if answer.name != self._public.name:
            raise RefusedError("ciphertext of another context", f"device {device} must ask for the present keys")
        if device not in self._rows or self._capacities[self._rows[device]]:
            raise RefusedError("profile not expected", f"device {device} is unknown, or has answered")
        if answer.capacity < 1 or len(answer.comparisons) != len(self._sizes):
            raise RefusedError("profile of the wrong form", f"device {device}")
        read = [
            ckks.read(self._comparing, packed, size)
            for packed, size in zip(answer.comparisons, self._sizes, strict=True)
        ]
        totals = ckks.read(self._summing, answer.velocities, self._labels)
        self._differences = [ckks.add(a, b) for a, b in zip(self._differences, read, strict=True)]
        self._totals = ckks.add(self._totals, totals)
        self._capacities[self._rows[device]] = answer.capacity

    def tables(self) -> EncryptedTables:
        """The signs of all differences and the totals per label, for the key-holder."""
        if self._totals is None:
            raise RefusedError("no profiles", "no device has answered")
        signs = [ckks.sign(vector, self._public.scheme.expansions).serialize() for vector in self._differences]
        devices = np.array(sorted(self._rows), dtype=np.int64)
        return EncryptedTables(devices, self._labels, tuple(signs), self._totals.serialize(), self._capacities.copy())


class KeyHolder:
    """Owns the secret key; decrypts signs and totals, never a velocity, and makes the plan."""

    def __init__(self, scheme: Scheme, grid: Grid, comparing: Ciphertext, summing: Ciphertext) -> None:
        self._scheme, self._grid, self._comparing, self._summing = scheme, grid, comparing, summing

    @staticmethod
    def create(scheme: Scheme = Scheme(), grid: Grid | None = None) -> KeyHolder:  # noqa: B008 - frozen
        """A key-holder with fresh keys; the grid is as fine as the scheme can tell unless given."""
        grid = Grid(scheme.levels) if grid is None else grid
        if grid.levels > scheme.levels:
            raise ConfigError(f"this scheme tells {scheme.levels} levels apart, not {grid.levels}")
        return KeyHolder(scheme, grid, scheme.new_context(), SUMS.new_context())

    def for_devices(self) -> PublicContext:
        """Public keys to encrypt with; a key-holder that was loaded has none, it finishes what is under way."""
        if not self._comparing.has_public_key():
            raise RefusedError("public key not kept", "create new keys to ask for new profiles")
        comparing, summing = ckks.context_bytes(self._comparing), ckks.context_bytes(self._summing)
        return PublicContext(comparing, summing, self._scheme, self._grid, ckks.digest(comparing + summing))

    def for_server(self) -> PublicContext:
        """The same, with the keys to multiply under encryption."""
        return replace(self.for_devices(), comparing=ckks.context_bytes(self._comparing, multiply=True))

    def save(self, directory: Path) -> None:
        """Writes the secret keys for the owner's eyes only; whoever loses them must ask for all profiles anew."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, context in (("comparing", self._comparing), ("summing", self._summing)):
            handle = os.open(directory / f"{name}.key", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(ckks.context_bytes(context, secret=True))

    @staticmethod
    def load(directory: Path, scheme: Scheme = Scheme(), grid: Grid | None = None) -> KeyHolder:  # noqa: B008
        """The key-holder that was saved: it can decrypt what is under way."""
        try:
            packed = [(directory / f"{name}.key").read_bytes() for name in ("comparing", "summing")]
        except FileNotFoundError as error:
            raise RefusedError(
                "lost key", f"{error.filename} is gone: create new keys and ask all devices for new profiles"
            ) from error
        comparing, summing = (ckks.read_context(p) for p in packed)
        return KeyHolder(scheme, Grid(scheme.levels) if grid is None else grid, comparing, summing)

    def plan(self, tables: EncryptedTables, greedy: Greedy) -> Plan:
        """The plan of `greedy` without its local search, which would need the velocities themselves."""
        if greedy.quantities not in ("even", "frequent"):
            raise ConfigError(f'quantities must be "even" or "frequent" under encryption, got "{greedy.quantities}"')
        comparisons = Comparisons(len(tables.devices), tables.labels)
        sizes = [len(c) for c in _chunks(np.zeros(comparisons.count), self._scheme.slots)]
        if len(sizes) != len(tables.signs):
            raise RefusedError("tables of the wrong size", f"{len(tables.signs)} ciphertexts of signs")
        signs = [ckks.decrypt(self._comparing, s, n) for s, n in zip(tables.signs, sizes, strict=True)]
        order = comparisons.table(ckks.rounded_signs(np.concatenate(signs)))
        totals = ckks.decrypt(self._summing, tables.totals, tables.labels)
        rows = tables.capacities > 0
        totals = np.where((order > 0).any(axis=0), np.maximum(totals.round(_DECIMALS), 0.0), 0.0)
        fleet = OrderedFleet(tables.devices[rows], tables.capacities[rows], order[rows].astype(np.float64), totals)
        return replace(greedy, improve_up_to=0).plan(fleet)


def _chunks(values: np.ndarray, size: int) -> list[np.ndarray]:
    return [values[start : start + size] for start in range(0, len(values), size)]
