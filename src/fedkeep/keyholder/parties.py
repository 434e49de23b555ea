"""Coordination from velocities that the server cannot read: the parties and what passes between them.

The key-holder, which is not the server, makes the keys. Devices encrypt their velocities under its public key; the
server adds the ciphertexts up and turns differences into signs, all without reading any; the key-holder decrypts signs
and totals and answers with the plan. So the server learns capacities, totals per label and the plan; the key-holder
learns who is faster than whom, and the totals; nobody learns another's velocity.
"""

import shutil
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile

import msgspec
import numpy as np

from fedkeep.core.coordination import Greedy
from fedkeep.core.errors import ConfigError, RefusedError
from fedkeep.core.plan import Plan
from fedkeep.core.types import DeviceId, Profile
from fedkeep.files import beside, put_in_place, writing
from fedkeep.keyholder import ckks
from fedkeep.keyholder.ckks import SUMS, Ciphertext, Scheme
from fedkeep.keyholder.order import Comparisons, Grid, OrderedFleet
from fedkeep.keyholder.port import EncryptedTables
from fedkeep.link.messages import EncryptedProfile, ProfileRequest

_DECIMALS = 6
"""Totals are rounded to these, so that the errors of CKKS do not break ties between labels."""
_MOST_ROWS = 1000
"""Comparisons grow with the square of the rows: no table of more is asked for, nor answered."""
_NOBODY = -1


@dataclass(frozen=True)
class PublicContext:
    """What the key-holder publishes; with keys to multiply it serves the server, without them the devices."""

    comparing: bytes
    summing: bytes
    scheme: Scheme
    grid: Grid
    name: bytes = b""
    """The digest of the devices' form, by which ciphertexts say which key they are under."""

    def named(self) -> "PublicContext":
        """The devices' form, under its name: a digest of all that a device relies on."""
        lengths = (len(self.comparing), len(self.summing), astuple(self.scheme), astuple(self.grid))
        return replace(self, name=ckks.digest(repr(lengths).encode() + self.comparing + self.summing))

    def pack(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def unpack(packed: bytes) -> "PublicContext":
        try:
            return msgspec.msgpack.decode(packed, type=PublicContext)
        except (msgspec.DecodeError, ValueError) as error:
            raise RefusedError("unreadable public keys", f"{error}") from error


def read_public_context(path: Path, pinned: str = "") -> PublicContext:
    """The devices' form of a key-holder's public keys; its digest is computed, and must be the one pinned, if any."""
    if not path.exists():
        raise ConfigError(f"the key-holder's public keys {path} are not there: copy its devices.context to this device")
    public = PublicContext.unpack(path.read_bytes())
    if public != public.named():
        raise RefusedError("damaged public keys", f"{path} does not have the digest it names")
    if pinned and public.name.hex() != pinned.lower():
        raise RefusedError("public keys of another key-holder", f"{path} has digest {public.name.hex()}, not {pinned}")
    return public


def encrypt_profile(public: PublicContext, request: ProfileRequest, profile: Profile) -> EncryptedProfile:
    """The device's part: encrypts under the context it was given and no other, or sends nothing."""
    if request.name != public.name:
        raise RefusedError(
            "another key",
            f"asked for {request.name.hex()[:64]}, given {public.name.hex()} by the key-holder: nothing was sent",
        )
    if profile.velocity.shape != (request.labels,) or not 0 <= request.row < request.rows <= _MOST_ROWS:
        raise RefusedError("profile request", "it does not fit this device's labels: nothing was sent")
    comparing, summing = ckks.read_context(public.comparing), ckks.read_context(public.summing)
    if comparing.has_secret_key() or summing.has_secret_key():
        raise RefusedError("leaked key", "the secret key came with the public one: nothing was sent")
    levels = public.grid.level_of(profile.velocity) / public.grid.levels
    comparisons = Comparisons(request.rows, request.labels)
    parts = _chunks(comparisons.contribution(request.row, levels), public.scheme.slots)
    return EncryptedProfile(
        public.name,
        request.row,
        profile.capacity,
        tuple(ckks.encrypt(comparing, part) for part in parts),
        ckks.encrypt(summing, profile.velocity),
    )


class ProfileSealer:
    """A device's side: encrypts under the file that it was given; the server can name a key, not bring one."""

    def __init__(self, public_context: str, digest: str) -> None:
        if not public_context:
            raise ConfigError(
                "privacy.encrypted_profiles needs privacy.public_context: the key-holder's devices.context, copied here"
            )
        self._path, self._pinned = Path(public_context), digest

    def public(self) -> PublicContext:
        """The key-holder's public keys, read anew since they are megabytes that are seldom needed."""
        return read_public_context(self._path, self._pinned)

    def seal(self, request: ProfileRequest, profile: Profile) -> EncryptedProfile:
        return encrypt_profile(self.public(), request, profile)


class _Spool:
    """What each device sent, in a file without a name: too large for memory, and gone with the process."""

    def __init__(self) -> None:
        self._file = TemporaryFile()  # noqa: SIM115 - open as long as this is, see the next line
        weakref.finalize(self, self._file.close)
        self._places: dict[DeviceId, list[tuple[int, int]]] = {}

    def keep(self, device: DeviceId, parts: Iterable[bytes]) -> None:
        self._places[device] = [self._append(part) for part in parts]

    def kept(self, device: DeviceId) -> Iterator[bytes]:
        for start, length in self._places[device]:
            self._file.seek(start)
            yield self._file.read(length)

    def _append(self, part: bytes) -> tuple[int, int]:
        start = self._file.seek(0, 2)
        self._file.write(part)
        return start, len(part)


class EncryptedFleet:
    """The server's part: it holds no secret key, keeps every answer, and adds up those of the devices present.

    A row belongs to one device for as long as the table lives, so that devices come and go without asking the
    others again; rows that fit into the same ciphertexts cost nothing and are kept for newcomers.
    """

    def __init__(self, public: PublicContext, devices: int, labels: int) -> None:
        self._public, self._labels = public, labels
        self._comparing, self._summing = ckks.read_context(public.comparing), ckks.read_context(public.summing)
        self.rows = rows_that_fit(devices, labels, public.scheme.slots)
        count = Comparisons(self.rows, labels).count
        self._sizes = [len(c) for c in _chunks(np.zeros(count), public.scheme.slots)]
        self._answers: dict[DeviceId, EncryptedProfile] = {}
        """Without their comparisons, which are megabytes each and lie in a file."""
        self._spool = _Spool()

    @property
    def name(self) -> bytes:
        return self._public.name

    @property
    def answered(self) -> dict[DeviceId, int]:
        """The row of every device that has answered."""
        return {device: answer.row for device, answer in self._answers.items()}

    def request(self, row: int) -> ProfileRequest:
        """What to ask of the device that is to have this row."""
        return ProfileRequest(self._public.name, row, self.rows, self._labels)

    def receive(self, device: DeviceId, row: int, answer: object) -> None:
        """Keeps one answer; one in the clear, of another key or of another size is refused."""
        if not isinstance(answer, EncryptedProfile):
            raise RefusedError("profile in the clear", f"device {device} was asked to encrypt; it is not used")
        if answer.name != self._public.name:
            raise RefusedError("ciphertext of another context", f"device {device} must ask for the present keys")
        if answer.row != row or device in self._answers or row in self.answered.values():
            raise RefusedError("profile not expected", f"device {device} is not the row it was asked for, or answered")
        if answer.capacity < 1 or len(answer.comparisons) != len(self._sizes):
            raise RefusedError("profile of the wrong form", f"device {device}")
        for packed, size in zip(answer.comparisons, self._sizes, strict=True):
            ckks.read(self._comparing, packed, size)
        ckks.read(self._summing, answer.velocities, self._labels)
        self._spool.keep(device, answer.comparisons)
        self._answers[device] = replace(answer, comparisons=())

    def tables(self, present: Iterable[DeviceId]) -> EncryptedTables:
        """The signs of all differences and the totals per label over the devices present, for the key-holder."""
        answers = {device: self._answers[device] for device in sorted(present)}
        if not answers:
            raise RefusedError("no profiles", "no device has answered")
        devices, capacities = np.full(self.rows, _NOBODY), np.zeros(self.rows, dtype=np.int64)
        differences: list[Ciphertext | None] = [None] * len(self._sizes)
        totals: Ciphertext | None = None
        for device, answer in answers.items():
            devices[answer.row], capacities[answer.row] = device, answer.capacity
            read = map(partial(ckks.read, self._comparing), self._spool.kept(device), self._sizes)
            differences = [ckks.add(a, b) for a, b in zip(differences, read, strict=True)]
            totals = ckks.add(totals, ckks.read(self._summing, answer.velocities, self._labels))
        signs = tuple(ckks.sign(vector, self._public.scheme.expansions).serialize() for vector in differences)
        assert totals is not None
        return EncryptedTables(self._public.name, devices, self._labels, signs, totals.serialize(), capacities)


def rows_that_fit(devices: int, labels: int, slots: int) -> int:
    """The most rows whose comparisons need no more ciphertexts than those of so many devices."""
    room = slots * -(-Comparisons(devices, labels).count // slots)
    rows = devices
    while rows < _MOST_ROWS and Comparisons(rows + 1, labels).count <= room:
        rows += 1
    return rows


class KeyHolder:
    """Owns the secret key; decrypts signs and totals, never a velocity, and makes the plan."""

    def __init__(self, scheme: Scheme, grid: Grid, comparing: Ciphertext, summing: Ciphertext) -> None:
        self._scheme, self._grid, self._comparing, self._summing = scheme, grid, comparing, summing

    @staticmethod
    def create(scheme: Scheme = Scheme(), grid: Grid | None = None) -> "KeyHolder":
        """A key-holder with fresh keys; the grid is as fine as the scheme can tell unless given."""
        grid = Grid(scheme.levels) if grid is None else grid
        if grid.levels > scheme.levels:
            raise ConfigError(f"this scheme tells {scheme.levels} levels apart, not {grid.levels}")
        return KeyHolder(scheme, grid, scheme.new_context(), SUMS.new_context())

    def for_devices(self) -> PublicContext:
        """Public keys to encrypt with; a key-holder that was loaded has none, they are in the files it published."""
        if not self._comparing.has_public_key():
            raise RefusedError("public key not kept", "create new keys to ask for new profiles")
        comparing, summing = ckks.context_bytes(self._comparing), ckks.context_bytes(self._summing)
        return PublicContext(comparing, summing, self._scheme, self._grid).named()

    def for_server(self) -> PublicContext:
        """The same, with the keys to multiply under encryption."""
        return replace(self.for_devices(), comparing=ckks.context_bytes(self._comparing, multiply=True))

    def secrets(self) -> dict[str, bytes]:
        """The secret keys by the names of their files; whoever loses them must ask for all profiles anew."""
        held = {"comparing.key": self._comparing, "summing.key": self._summing}
        return {name: ckks.context_bytes(context, secret=True) for name, context in held.items()}

    def plan(self, tables: EncryptedTables, greedy: Greedy, before: Plan | None = None) -> Plan:
        """The plan of `greedy` without its local search, which would need the velocities themselves.

        After an earlier plan it is the one that changes it least, as in the clear.
        """
        if greedy.quantities not in ("even", "frequent"):
            raise ConfigError(f'quantities must be "even" or "frequent" under encryption, got "{greedy.quantities}"')
        comparisons = Comparisons(len(tables.devices), tables.labels)
        sizes = [len(c) for c in _chunks(np.zeros(comparisons.count), self._scheme.slots)]
        if len(sizes) != len(tables.signs):
            raise RefusedError("tables of the wrong size", f"{len(tables.signs)} ciphertexts of signs")
        signs = [ckks.decrypt(self._comparing, s, n) for s, n in zip(tables.signs, sizes, strict=True)]
        order = comparisons.table(ckks.rounded_signs(np.concatenate(signs)))
        totals = ckks.decrypt(self._summing, tables.totals, tables.labels)
        totals = np.where((order > 0).any(axis=0), np.maximum(totals.round(_DECIMALS), 0.0), 0.0)
        rows = np.flatnonzero(tables.capacities > 0)
        rows = rows[np.argsort(tables.devices[rows])]
        fleet = OrderedFleet(tables.devices[rows], tables.capacities[rows], order[rows].astype(np.float64), totals)
        plain = replace(greedy, improve_up_to=0)
        return plain.plan(fleet) if before is None else plain.replan(before, fleet)


class KeyDirectory:
    """A directory with `comparing.key`, `summing.key`, `devices.context` and `server.context`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def for_devices(self) -> Path:
        """The file that every device is given."""
        return self.root / "devices.context"

    @property
    def for_server(self) -> Path:
        return self.root / "server.context"

    def create(self, scheme: Scheme) -> PublicContext:
        """Makes fresh keys, all files or none; keys that exist are never overwritten, for nothing replaces them."""
        if self.root.exists() and any(self.root.iterdir()):
            raise ConfigError(f"{self.root} is not empty: keep the keys that are there, or name another directory")
        holder, partial = KeyHolder.create(scheme), beside(self.root)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700, parents=True)
        for name, secret in holder.secrets().items():
            with writing(partial / name, 0o600) as file:
                file.write(secret)
        for path, public in ((self.for_server, holder.for_server()), (self.for_devices, holder.for_devices())):
            with writing(partial / path.name) as file:
                file.write(public.pack())
        put_in_place(partial, self.root)
        return public

    def public(self) -> PublicContext:
        """The devices' form of the public keys."""
        if not self.for_devices.exists():
            raise ConfigError(f"there are no keys in {self.root}: run `fedkeep keyholder create {self.root}` first")
        return read_public_context(self.for_devices)

    def open(self) -> KeyHolder:
        """The key-holder with its secret keys, which can decrypt what is under way; a lost one is one sentence."""
        public = self.public()
        try:
            packed = [(self.root / f"{name}.key").read_bytes() for name in ("comparing", "summing")]
        except FileNotFoundError as error:
            raise RefusedError(
                "lost key", f"{error.filename} is gone: create new keys and ask all devices for new profiles"
            ) from error
        comparing, summing = map(ckks.read_context, packed)
        return KeyHolder(public.scheme, public.grid, comparing, summing)


def _chunks(values: np.ndarray, size: int) -> list[np.ndarray]:
    return [values[start : start + size] for start in range(0, len(values), size)]
