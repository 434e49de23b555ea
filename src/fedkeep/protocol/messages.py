"""The messages between a server, its devices and operators, on a socket and on Flower alike.

`reply_of` maps each request of a server to a call of a `Participant`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import UnionType
from typing import Protocol, TypeAlias, TypeVar

import msgspec

from fedkeep.core.errors import RejectedError
from fedkeep.core.targets import scores_of_sums
from fedkeep.core.types import Assignment, LocalTraining, Profile, Report, TrainOrder, Vector

Answer = TypeVar("Answer", bound=msgspec.Struct)


@dataclass(frozen=True)
class ProfileRequest:
    """Request to encrypt a profile to a key holder."""

    key: bytes
    """Public key of the key holder."""
    nonce: bytes
    """Issued by the key holder for this request."""
    device: int | None = None
    """Number of the device; the node fills it in itself, whatever the server sent."""


class WireOrder(msgspec.Struct, frozen=True, rename={"global_gradient": "direction"}):
    """A `TrainOrder` under the names that its fields have on the wire."""

    round: int
    model: Vector
    global_gradient: Vector | None
    local: LocalTraining
    accepted_round: int | None = None
    assignment: Assignment | None = None


class Participate(msgspec.Struct, frozen=True, tag=True, rename={"wire_order": "order"}):
    """Take part in a round: train on the stored samples and report.

    Answered by `Reported`, or by `Answered` with secure aggregation.
    """

    wire_order: WireOrder
    terms: bytes | None = None
    """Configuration of a secure aggregation: the report is kept for masking, keys are answered."""

    @classmethod
    def of(cls, order: TrainOrder, terms: bytes | None = None) -> "Participate":
        """Make the message of an order."""
        return cls(WireOrder(**vars(order)), terms)

    @property
    def order(self) -> TrainOrder:
        """The order in the message."""
        return TrainOrder(**msgspec.structs.asdict(self.wire_order))


class AskSum(msgspec.Struct, frozen=True, tag=True):
    """A later message of a secure aggregation, opaque here; answered by `Answered`."""

    question: bytes


class Evaluate(msgspec.Struct, frozen=True, tag=True):
    """Evaluate a model on the device's own samples; answered by `Evaluated`."""

    model: Vector


class AskProfile(msgspec.Struct, frozen=True, tag=True):
    """Request the device's profile; answered by `Profiled` or `EncryptedProfiled`."""

    encrypted: ProfileRequest | None = None


class AskStatus(msgspec.Struct, frozen=True, tag=True):
    """Request the agent's status; answered by `Status`."""


class AskStreams(msgspec.Struct, frozen=True, tag=True):
    """Request the names of the agent's streams; answered by `Streams`."""


class ToStream(msgspec.Struct, frozen=True, tag=True):
    """A request to one of an agent's several streams; answered as the request is."""

    stream: str
    request: bytes


class AskStored(msgspec.Struct, frozen=True, tag=True):
    """Request a summary of the stored samples by label; answered by `StoredSummary`."""


class AskRefused(msgspec.Struct, frozen=True, tag=True):
    """Request the records that were rejected last; answered by `RefusedRecords`."""


class AskWhy(msgspec.Struct, frozen=True, tag=True):
    """Request the decisions about one sample; answered by `Reasons`."""

    id: str
    namespace: str | None = None
    """Only an id of this namespace; None: of any."""


class Erase(msgspec.Struct, frozen=True, tag=True):
    """Remove all samples that match every condition given; answered by `Erased`."""

    id: str | None = None
    label: int | str | None = None
    """Its number, or its name."""
    source: str | None = None
    since: float | None = None
    until: float | None = None
    namespace: str | None = None
    """Only an `id` of this namespace; None: of any."""


class SampleFilter(msgspec.Struct, frozen=True):
    """Which stored samples: those that match every condition given."""

    ids: tuple[str, ...] = ()
    """Ids as they are written."""
    labels: tuple[int | str, ...] = ()
    """By number or name; "unlabelled" are those that wait for their labels."""
    sources: tuple[str, ...] = ()
    since: float | None = None
    """Stored then or later, by the device's clock."""
    until: float | None = None
    namespace: str | None = None
    """Only `ids` of this namespace; None: of any."""
    rules: tuple[str, ...] = ()
    """Held by one of these rules."""


class Pull(msgspec.Struct, frozen=True, tag=True):
    """Give stored samples out; answered by `Pulled`, a part at a time."""

    selection: SampleFilter = SampleFilter()
    after: int = -1
    """Only samples that arrived later than this one, as the `last` of the part before says."""


class Upload(msgspec.Struct, frozen=True, tag=True):
    """Queue stored samples to be sent to the device's target; answered by `Queued`."""

    selection: SampleFilter


class Configure(msgspec.Struct, frozen=True, tag=True):
    """Take signed settings on trial; answered by `Configured`."""

    signed: bytes


class Reported(msgspec.Struct, frozen=True, tag=True):
    """The report of a participation."""

    report: Report


class Answered(msgspec.Struct, frozen=True, tag=True):
    """The device's message in a secure aggregation."""

    answer: bytes


class DeviceStats(msgspec.Struct, frozen=True):
    """Statistics of a device's store, for monitoring."""

    stored: int
    filled: tuple[int, ...]
    """Samples of each label."""
    arrivals: int = 0
    """Since the store was created, as are the next three."""
    kept: int = 0
    replaced: int = 0
    refused: int = 0
    epsilon_spent: float | None = None
    epsilon_left: float | None = None
    delta: float | None = None
    gist: tuple[float, float, float, float] | None = None
    """beta, rho, effective sample size and relative correction norm at the last participation."""
    changes: int | None = None
    """How often its stream has changed; None where it does not say."""
    silent: int | None = None
    """How many of its sources have fallen silent."""


class Evaluated(msgspec.Struct, frozen=True, tag=True):
    """The loss and accuracy of a model on a device's own samples.

    Examples
    --------
    >>> Evaluated(samples=4, total_loss=2.0, correct=3).accuracy
    0.75
    """

    samples: int
    total_loss: float
    correct: int
    data: str = "stored"
    """Which samples were evaluated: "held-out" or "stored"."""
    vitals: DeviceStats | None = None
    """None where the device's privacy options withhold them."""
    errors: tuple[float, float, float, float] | None = None
    """Where targets are numbers: squared errors, absolute errors, targets and squared targets,
    summed over the samples. None: targets are labels."""

    @property
    def accuracy(self) -> float:
        """The share of correct labels, or R2 of numbers; NaN without a sample."""
        if self.errors is not None and self.samples:
            return scores_of_sums(self.samples, self.errors)["r2"]
        return self.correct / self.samples if self.samples else math.nan


class Profiled(msgspec.Struct, frozen=True, tag=True):
    """A device's profile in the clear."""

    profile: Profile
    device: int | None = None
    """Number of the device as its node gives it; an agent does not know it."""
    name: str = ""
    """Display name of the device."""
    agreement: dict[str, str] | None = None
    """What its method must have like the server's, as far as it is not at its default.

    None of an agent of an earlier release, which sends none.
    """


class EncryptedProfiled(msgspec.Struct, frozen=True, tag=True):
    """A device's profile, encrypted to the key holder."""

    profile: bytes
    nonce: bytes
    """Of the request that it answers."""
    device: int | None = None
    name: str = ""
    agreement: dict[str, str] | None = None
    """As in `Profiled`."""


class GistStatus(msgspec.Struct, frozen=True):
    """The state of a device's gist; the last three are None until the device takes part."""

    name: str
    worth: float
    """Effective sample size; 0 while nothing is known."""
    arrivals: int
    """Samples that have arrived since and are not part of the gist yet."""
    bytes: int
    """At rest, with the sums over those arrivals."""
    trust: float | None = None
    """Correction weight, beta."""
    likeness: float | None = None
    """Gradient correlation, rho."""
    reach: float | None = None
    """Relative correction norm."""


class WaitingStatus(msgspec.Struct, frozen=True):
    """Samples that wait for their labels."""

    samples: int
    slots: int
    rule: str
    early_labels: int
    """Labels that came before their samples."""
    counts: dict[str, int]
    """Since the store was made: samples that arrived without a label, that were labelled, by the
    model itself, displaced or expired before, and early labels that were forgotten."""


class DriftStatus(msgspec.Struct, frozen=True):
    """Whether a stream has changed, and whether it has stopped."""

    changes: dict[str, int] = {}
    """How often label shares, losses or the gradient correlation changed, since the store was
    made."""
    last: str = ""
    """The last change since the agent's start, in words."""
    last_seconds: float | None = None
    """How long ago that was noticed."""
    silent: dict[str, float] = {}
    """Sources from which nothing comes, each with the seconds for which nothing has."""
    quiet_seconds: dict[str, float] = {}
    """Of every source, the seconds since something came."""


class Status(msgspec.Struct, frozen=True, tag=True):
    """Operating figures of an agent."""

    samples: int
    capacity: int
    bytes: int
    budget: int
    round: int
    model_age_seconds: float | None
    counters: dict[str, int]
    stride: int
    """Subsampling factor: one of this many arrivals is scored; 1 unless the agent is overloaded."""
    policy: str
    preset: str
    """The set of defaults of the policy."""
    value_quantiles: tuple[float, ...]
    labels_held: int
    labels: int
    epsilon_spent: float | None = None
    """Spent of the privacy budget; None without a budget."""
    epsilon_budget: float | None = None
    sample_bytes: int = 0
    """Bytes of the budget for one stored sample and its metadata."""
    gist: GistStatus | None = None
    """None of a device without a gist."""
    waiting: str = ""
    """Why nothing is valued at present; empty while arrivals are."""
    label_names: tuple[str, ...] = ()
    """Of the labels by number, where they have some."""
    settings: str = ""
    """Which settings from afar count; empty where none may come."""
    uploads: str = ""
    """What waits to leave the device; empty where nothing may."""
    unlabelled: WaitingStatus | None = None
    """None of a device without a waiting room."""
    drift: DriftStatus = DriftStatus()
    """Whether the stream has changed, or stopped."""


class LabelSummary(msgspec.Struct, frozen=True):
    """The stored samples of one label: count, bytes, quantiles of the score, ages."""

    label: int
    count: int
    bytes: int
    lowest: float
    median: float
    highest: float
    oldest_seconds: float
    newest_seconds: float
    name: str = ""
    """Of the label, where it has one."""


class StoredSummary(msgspec.Struct, frozen=True, tag=True):
    """The stored samples, by label."""

    labels: tuple[LabelSummary, ...]


class RefusedRecord(msgspec.Struct, frozen=True):
    """One rejected record of a source."""

    time: float
    source: str
    reason: str
    raw: str
    """The beginning of the record."""


class RefusedRecords(msgspec.Struct, frozen=True, tag=True):
    """The rejected records, oldest first."""

    records: tuple[RefusedRecord, ...]


class Reason(msgspec.Struct, frozen=True):
    """One decision about a sample; an unknown score or threshold (`floor`) is None."""

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
    """The decisions about one sample, and whether it is stored."""

    id: int
    stored: bool
    decisions: tuple[Reason, ...]
    ids: tuple[int, ...] = ()
    """All numbers that ids written like this have, in every namespace that was asked for."""
    waits: bool = False
    """Whether it waits for its label."""


class Erased(msgspec.Struct, frozen=True, tag=True):
    """How many samples were removed."""

    count: int


class PulledSample(msgspec.Struct, frozen=True):
    """One stored sample, with what is known of it."""

    id: int
    label: int
    data: bytes
    """Its file, or its numbers as little-endian float32."""
    name: str = ""
    """Its id as it came, where that is not the number itself."""
    source: str = ""
    score: float = math.nan
    stored: float = 0.0
    """When it was stored, by the device's clock."""
    time: float | None = None
    """The record's own time, in seconds since 1970."""
    target: tuple[float, ...] = ()
    """The numbers to predict; its label is then the interval they lie in."""


class Pulled(msgspec.Struct, frozen=True, tag=True):
    """A part of the samples that were asked for, oldest first."""

    samples: tuple[PulledSample, ...]
    shape: tuple[int, ...] | None
    """Of the numbers; None: samples are files."""
    label_names: tuple[str, ...]
    last: int | None
    """What to ask for more with; None: this is the last part."""


class Configured(msgspec.Struct, frozen=True, tag=True):
    """Which settings count, and which are on trial."""

    settings: str


class Streams(msgspec.Struct, frozen=True, tag=True):
    """The names of the agent's streams; of an only one it is empty."""

    names: tuple[str, ...]


class Queued(msgspec.Struct, frozen=True, tag=True):
    """How many samples were queued to be sent, how many wait, and what may leave today."""

    new: int
    waiting: int
    bytes_left: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The request was rejected."""

    reason: str
    """A short name of the kind, for counters."""
    detail: str
    """One sentence."""


def expect(reply: object, expected: type[Answer] | UnionType, who: str) -> Answer:
    """Return the reply if it is of the expected kind.

    Raises
    ------
    RejectedError
        If the other side rejected the request, or answered with another kind of message.
    """
    if isinstance(reply, Failed):
        raise RejectedError(reply.reason, reply.detail)
    if not isinstance(reply, expected):
        raise RejectedError("malformed", f"{who} answered with {type(reply).__name__}")
    return reply


DeviceRequest: TypeAlias = Participate | AskSum | Evaluate | AskProfile
"""The requests of a server."""
DeviceReply: TypeAlias = Reported | Answered | Evaluated | Profiled | EncryptedProfiled
Request: TypeAlias = (
    DeviceRequest | AskStatus | AskStored | AskRefused | AskWhy | Erase | Pull | Upload | Configure
)
"""All requests that an agent answers: those of a server and those of an operator."""
Reply: TypeAlias = (
    DeviceReply
    | Status
    | StoredSummary
    | RefusedRecords
    | Reasons
    | Erased
    | Pulled
    | Queued
    | Configured
    | Streams
    | Failed
)


class Participant(Protocol):
    """A device in this process, or an agent; it rejects what its privacy options exclude."""

    def profile(self) -> Profile:
        """Return the profile in the clear."""

    def encrypted_profile(self, request: ProfileRequest) -> bytes:
        """Return the profile encrypted to a key holder."""

    def participate(self, order: TrainOrder) -> Report:
        """Train on the stored samples and report."""

    def hold(self, order: TrainOrder, terms: bytes) -> bytes:
        """Train, keep the report for masking, and return the keys of a secure aggregation."""

    def answer(self, question: bytes) -> bytes:
        """Answer a later message of a secure aggregation."""


def reply_of(
    device: Participant, evaluate: Callable[[Vector], Evaluated], request: DeviceRequest
) -> DeviceReply:
    """Return the device's reply to a request of a server.

    Parameters
    ----------
    device : Participant
        The device that is asked.
    evaluate : callable
        Evaluates a model vector on the device's samples.
    request : DeviceRequest
        One of the four requests of a server.

    Raises
    ------
    RejectedError
        If the device rejects the request.

    Examples
    --------
    >>> import numpy as np
    >>> from types import SimpleNamespace
    >>> profile = Profile(capacity=4, velocity=np.array([2.0, 0.5]))
    >>> pump = SimpleNamespace(profile=lambda: profile)
    >>> nothing = lambda model: Evaluated(0, 0.0, 0)
    >>> reply_of(pump, evaluate=nothing, request=AskProfile()).profile.rate
    2.5
    """
    match request:
        case Participate(terms=bytes(terms)):
            return Answered(device.hold(request.order, terms))
        case Participate():
            return Reported(device.participate(request.order))
        case AskSum(question):
            return Answered(device.answer(question))
        case Evaluate(model):
            return evaluate(model)
        case AskProfile(ProfileRequest() as wanted):
            return EncryptedProfiled(device.encrypted_profile(wanted), wanted.nonce)
        case AskProfile():
            return Profiled(device.profile())
