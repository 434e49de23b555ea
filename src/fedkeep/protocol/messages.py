"""The messages between a server, its devices and whoever looks after one: the same on a socket and on Flower.

And a device as a server sees it, wherever it lives: how it answers each of the server's questions.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import UnionType
from typing import Protocol, TypeAlias, TypeVar

import msgspec

from fedkeep.core.errors import RejectedError
from fedkeep.core.types import Profile, Report, TrainOrder, Vector

Answer = TypeVar("Answer", bound=msgspec.Struct)


@dataclass(frozen=True)
class ProfileRequest:
    """To seal a profile to the holder of this key, who gave out the nonce for it."""

    key: bytes
    nonce: bytes
    device: int | None = None
    """Whose profile it is: the node's own word, whatever the server writes here."""


class Participate(msgspec.Struct, frozen=True, tag=True):
    """Take part in a round: train on what is stored and report. Answered by `Reported`, or `Answered` under terms."""

    order: TrainOrder
    terms: bytes | None = None
    """Of a secure sum: the report is held back for masking, and keys are the answer."""


class AskSum(msgspec.Struct, frozen=True, tag=True):
    """A later exchange of a secure sum, whose bytes only its parties read. Answered by `Answered`."""

    question: bytes


class Evaluate(msgspec.Struct, frozen=True, tag=True):
    """Measure a model on the device's own samples. Answered by `Evaluated`."""

    model: Vector


class AskProfile(msgspec.Struct, frozen=True, tag=True):
    """What the device declares to the server. Answered by `Profiled`, or `EncryptedProfiled` if so asked."""

    encrypted: ProfileRequest | None = None


class AskStatus(msgspec.Struct, frozen=True, tag=True):
    """How the agent is doing. Answered by `Status`."""


class AskStored(msgspec.Struct, frozen=True, tag=True):
    """What is stored, by label. Answered by `StoredSummary`."""


class AskRefused(msgspec.Struct, frozen=True, tag=True):
    """The records that were refused last. Answered by `RefusedRecords`."""


class AskWhy(msgspec.Struct, frozen=True, tag=True):
    """Why a sample is stored or is not. Answered by `Reasons`."""

    id: str
    namespace: str | None = None
    """Only an id of this namespace; None: of any."""


class Erase(msgspec.Struct, frozen=True, tag=True):
    """Remove all samples that match every condition given. Answered by `Erased`."""

    id: str | None = None
    label: int | None = None
    source: str | None = None
    since: float | None = None
    until: float | None = None
    namespace: str | None = None
    """Only an `id` of this namespace; None: of any."""


class Reported(msgspec.Struct, frozen=True, tag=True):
    report: Report


class Answered(msgspec.Struct, frozen=True, tag=True):
    """What the device says in a secure sum."""

    answer: bytes


class DeviceStats(msgspec.Struct, frozen=True):
    """A device's store in a few numbers, for whoever watches the fleet."""

    stored: int
    filled: tuple[int, ...]
    """Samples of each label."""
    arrivals: int = 0
    """Since the store was made, as are the next."""
    kept: int = 0
    replaced: int = 0
    refused: int = 0
    epsilon_spent: float | None = None
    epsilon_left: float | None = None
    delta: float | None = None
    gist: tuple[float, float, float, float] | None = None
    """Trust, likeness, worth and reach of the gist when the device last took part."""


class Evaluated(msgspec.Struct, frozen=True, tag=True):
    """A model on a device's own samples: how many, their losses summed, how many labels were right.

    >>> Evaluated(samples=4, total_loss=2.0, correct=3).accuracy
    0.75
    """

    samples: int
    total_loss: float
    correct: int
    data: str = "stored"
    """What it was measured on: "held-out" or "stored"."""
    vitals: DeviceStats | None = None
    """None where the device's privacy leaves them to itself."""

    @property
    def accuracy(self) -> float:
        """NaN without a sample."""
        return self.correct / self.samples if self.samples else math.nan


class Profiled(msgspec.Struct, frozen=True, tag=True):
    profile: Profile
    device: int | None = None
    """The number that the node says it has; an agent does not know it."""
    name: str = ""
    """What people call it."""
    agreement: dict[str, str] | None = None
    """What its method must have like the server's, as far as it is not at its default.

    None of an agent of an earlier release, which sends none.
    """


class EncryptedProfiled(msgspec.Struct, frozen=True, tag=True):
    profile: bytes
    """Sealed to the key-holder."""
    nonce: bytes
    """Of the request that it answers."""
    device: int | None = None
    name: str = ""
    agreement: dict[str, str] | None = None
    """As in `Profiled`."""


class GistStatus(msgspec.Struct, frozen=True):
    """What a device's gist is worth, and what it did when the device last took part: None since it started."""

    name: str
    worth: float
    """n, in samples; 0 while nothing is known."""
    arrivals: int
    """N, those that came since and are not in it yet."""
    bytes: int
    """At rest, with the sums over those arrivals."""
    trust: float | None = None
    likeness: float | None = None
    reach: float | None = None


class Status(msgspec.Struct, frozen=True, tag=True):
    """Numbers for people and monitors."""

    samples: int
    capacity: int
    bytes: int
    budget: int
    round: int
    model_age_seconds: float | None
    counters: dict[str, int]
    stride: int
    """One of this many arrivals is valued: 1 unless the agent cannot keep up."""
    policy: str
    preset: str
    """The set of defaults under which the policy runs."""
    value_quantiles: tuple[float, ...]
    labels_held: int
    labels: int
    epsilon_spent: float | None = None
    """What was spent of the privacy budget; None where nothing is accounted for."""
    epsilon_budget: float | None = None
    sample_bytes: int = 0
    """Of the budget, for one stored sample with what is known of it."""
    gist: GistStatus | None = None
    """None of a device without a gist."""
    waiting: str = ""
    """Why nothing is valued at present; empty while arrivals are."""


class LabelSummary(msgspec.Struct, frozen=True):
    label: int
    count: int
    bytes: int
    lowest: float
    median: float
    highest: float
    oldest_seconds: float
    newest_seconds: float


class StoredSummary(msgspec.Struct, frozen=True, tag=True):
    labels: tuple[LabelSummary, ...]


class RefusedRecord(msgspec.Struct, frozen=True):
    time: float
    source: str
    reason: str
    raw: str
    """How the record began."""


class RefusedRecords(msgspec.Struct, frozen=True, tag=True):
    records: tuple[RefusedRecord, ...]


class Reason(msgspec.Struct, frozen=True):
    """One decision; a score or floor of None is not known or not there."""

    id: int
    verdict: str
    label: int
    score: float | None
    floor: float | None
    displaced: int | None
    model_version: int
    policy: str
    time: float


class Reasons(msgspec.Struct, frozen=True, tag=True):
    id: int
    stored: bool
    decisions: tuple[Reason, ...]
    ids: tuple[int, ...] = ()
    """All numbers that ids written like this have, in every namespace that was asked for."""


class Erased(msgspec.Struct, frozen=True, tag=True):
    count: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The request could not be met; the sentence says why."""

    reason: str
    detail: str


def expect(reply: object, expected: type[Answer] | UnionType, who: str) -> Answer:
    """The reply, if it is of that kind; a refusal is raised."""
    if isinstance(reply, Failed):
        raise RejectedError(reply.reason, reply.detail)
    if not isinstance(reply, expected):
        raise RejectedError("malformed", f"{who} answered with {type(reply).__name__}")
    return reply


DeviceRequest: TypeAlias = Participate | AskSum | Evaluate | AskProfile
"""What a server asks of a device."""
DeviceReply: TypeAlias = Reported | Answered | Evaluated | Profiled | EncryptedProfiled
Request: TypeAlias = DeviceRequest | AskStatus | AskStored | AskRefused | AskWhy | Erase
"""All that an agent answers: the server's questions, and those of whoever looks after the device."""
Reply: TypeAlias = DeviceReply | Status | StoredSummary | RefusedRecords | Reasons | Erased | Failed


class Participant(Protocol):
    """What answers a server: a device in this process, or an agent. It refuses what its privacy excludes."""

    def profile(self) -> Profile: ...
    def encrypted_profile(self, request: ProfileRequest) -> bytes: ...
    def participate(self, order: TrainOrder) -> Report: ...
    def hold(self, order: TrainOrder, terms: bytes) -> bytes: ...
    def answer(self, question: bytes) -> bytes: ...


def reply_of(
    device: Participant, evaluate: Callable[[Vector], Evaluated], request: DeviceRequest
) -> DeviceReply:
    """The device's reply to a question; raises where it refuses.

    >>> import numpy as np
    >>> from types import SimpleNamespace
    >>> pump = SimpleNamespace(profile=lambda: Profile(capacity=4, velocity=np.array([2.0, 0.5])))
    >>> reply_of(pump, evaluate=lambda model: Evaluated(0, 0.0, 0), request=AskProfile()).profile.rate
    2.5
    """
    match request:
        case Participate(order, bytes(terms)):
            return Answered(device.hold(order, terms))
        case Participate(order):
            return Reported(device.participate(order))
        case AskSum(question):
            return Answered(device.answer(question))
        case Evaluate(model):
            return evaluate(model)
        case AskProfile(ProfileRequest() as wanted):
            return EncryptedProfiled(device.encrypted_profile(wanted), wanted.nonce)
        case AskProfile():
            return Profiled(device.profile())
