"""The lines of a run's JSONL file, one class per `kind`.

Every line depends on the seed alone, so that a repeated or resumed run gives the same bytes;
timings go to a file of their own (`Timing`). A reader skips fields and kinds it does not know, so
both may be added. NaN and infinity are written as null; each line ends in a checksum, so that a
flipped bit is detected.
"""

import re
from typing import Any, TypeAlias, get_args
from zlib import crc32

import msgspec
import numpy as np

from fedkeep.core.errors import DataError


class _Line(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", omit_defaults=True):
    pass


class Header(_Line, frozen=True, kw_only=True, tag="header"):
    """The first line: the identity and the configuration of the run."""

    run: str
    """The run's name, unique in its directory."""
    method: str
    """Its name in tables and legends, e.g. "ode", "fifo"."""
    task: str
    seed: int
    config: dict[str, Any]
    """The resolved configuration, defaults included."""
    config_hash: str
    versions: dict[str, str]
    labels: tuple[str, ...]
    devices: int
    rounds: int = 0
    """Rounds planned; 0 for a run without an end."""
    setting: str = ""
    """The values of a sweep besides method and seed, e.g. "storage.capacity=5"."""
    image: tuple[int, int] | None = None
    """Height and width of the thumbnails, where samples are grey images."""
    measure: str = "accuracy"
    """What stands where accuracy is meant in all lines: "r2" where targets are numbers."""


class Evaluation(_Line, frozen=True, kw_only=True, tag="evaluation"):
    """The quality of the global model on the test data, and the cost since the start."""

    round: int
    accuracy: float | None
    """Pooled over all devices' test samples, or the mean over devices where the configuration says
    `record.accuracy = "devices"`; R2 where the header's `measure` says so."""
    loss: float | None
    rmse: float | None = None
    """Root of the mean squared error in the targets' units, where targets are numbers."""
    mae: float | None = None
    """Mean absolute error in the targets' units, where targets are numbers."""
    device_accuracy: tuple[float | None, ...] = ()
    """One per device, for fleets of at most `LISTED` devices."""
    device_accuracy_quantiles: tuple[float | None, ...] = ()
    """Minimum, quartiles and maximum over the devices."""
    worst_tenth: float | None = None
    """Bottom-decile accuracy: the mean over the worst tenth of the devices."""
    label_recall: tuple[float | None, ...] = ()
    """The recall of each label."""
    rare_recall: float | None = None
    """Tail recall: the mean recall of the rarest quarter of the labels."""
    prequential: float | None = None
    """Accuracy on all arrivals since the last evaluation, each tested before it is trained on."""
    samples_valued: int = 0
    samples_trained: int = 0
    """Stored samples trained on; each counts once an epoch."""
    bytes_stored: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    label_coverage: float | None = None
    """The share of labels of which some device holds a sample."""
    store_turnover: float | None = None
    """The share of stored samples that were not stored at the last evaluation."""


class Round(_Line, frozen=True, kw_only=True, tag="round"):
    """Counts since the previous line of this kind; written every round, or every few."""

    round: int
    participants: tuple[int, ...]
    """The devices that took part; large fleets may list only some."""
    participations: int = 0
    """The number of participations; 0 where `participants` lists each once."""
    arrivals: int = 0
    """Samples that arrived on the participants' streams."""
    kept: int = 0
    """Stored in a free slot."""
    replaced: int = 0
    """Stored in place of another sample."""
    refused: int = 0
    """Not stored."""
    dropouts: int = 0
    """Participants that did not report in time."""
    refused_reports: dict[str, int] = {}
    """Rejected reports, by reason."""
    refused_devices: dict[str, tuple[int, ...]] = {}
    """Devices whose reports were rejected, by reason; real fleets only."""
    staleness: float | None = None
    """The mean age in rounds of the local gradients in the global gradient."""


class GistLine(_Line, frozen=True, kw_only=True, tag="gist"):
    """Figures of the gist since the previous line of this kind, averaged over participations."""

    round: int
    participations: int
    trust: float
    """beta: the correction weight."""
    likeness: float
    """rho: correlation of a sample's gradients under the device's old and new model."""
    worth: float
    """Effective sample size of the gist."""
    reach: float
    """Relative correction norm: its length over that of the stored samples' gradient."""


class PlanLine(_Line, frozen=True, kw_only=True, tag="plan"):
    """The coordination plan: which device stores which label; large fleets may list only some."""

    round: int
    devices: tuple[int, ...]
    quotas: tuple[tuple[int, ...], ...]
    """Slots per listed device and label."""
    holders: tuple[int, ...]
    """Devices of the whole fleet that store each label."""
    wanted: tuple[int, ...]
    """Holders each label should have."""
    regions: tuple[str, ...] = ()
    """Names of the regions, where they are not the labels."""


class HoldingsLine(_Line, frozen=True, kw_only=True, tag="holdings"):
    """Stored samples per listed device and region."""

    round: int
    devices: tuple[int, ...]
    filled: tuple[tuple[int, ...], ...]


class Slot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One stored sample."""

    id: int
    label: int
    """Its label, or the interval of its target."""
    score: float | None
    age: int
    """Samples that have arrived at the device since this one."""
    uses: int = 0
    """Participations that have trained on it."""
    target: float | None = None
    """The number to predict, where targets are numbers."""
    thumbnail: str | None = None
    """Base64 of the rows of an 8-bit grey image of the header's `image` size."""


class Change(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One arrival and the decision about it."""

    id: int
    label: int
    score: float | None
    fate: str
    """"kept", "replaced", "refreshed" or "refused"."""
    displaced: int | None = None
    """The id of the evicted sample."""


class DeviceLine(_Line, frozen=True, kw_only=True, tag="device"):
    """One device's store, and the latest changes to it, newest last."""

    round: int
    device: int
    capacity: int
    slots: tuple[Slot, ...]
    changes: tuple[Change, ...] = ()


class Member(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A device of a real fleet, with what it last reported to the server."""

    device: int
    name: str
    online: bool
    seen: float | None = None
    """When it was last online, in seconds since 1970; None if never since the server started."""
    capacity: int = 0
    stored: int | None = None
    """Samples in its store; None where it did not report it."""
    labels: int | None = None
    """Number of labels with a stored sample."""
    accuracy: float | None = None
    """Of the model last evaluated on its own samples."""
    refused: str | None = None
    """Why its last report or profile was rejected; None since one was accepted."""
    changes: int | None = None
    """How often its stream has changed; None where it did not report it."""
    silent: int = 0
    """How many of its sources have fallen silent."""


class Members(_Line, frozen=True, kw_only=True, tag="members"):
    """The devices of a real fleet; written every round and when one joins or leaves."""

    round: int
    members: tuple[Member, ...]


class PrivacyLine(_Line, frozen=True, kw_only=True, tag="privacy"):
    """The largest privacy loss of any device so far, and the rest of the budget."""

    round: int
    epsilon_spent: float | None
    epsilon_left: float | None
    delta: float


class End(_Line, frozen=True, kw_only=True, tag="end"):
    """The last line of a run that finished."""

    round: int
    digest: str
    """Of the final model."""


class Timing(_Line, frozen=True, kw_only=True, tag="timing"):
    """Elapsed time, in a file of its own because it does not repeat."""

    round: int
    seconds: float
    """Since the start, without the pause before a resumed run."""


Line: TypeAlias = (
    Header
    | Evaluation
    | Round
    | GistLine
    | PlanLine
    | HoldingsLine
    | DeviceLine
    | Members
    | PrivacyLine
    | End
    | Timing
)
KINDS = frozenset(str(kind.__struct_config__.tag) for kind in get_args(Line))


class Stamp(msgspec.Struct, frozen=True):
    """The part of a line that orders it."""

    kind: str
    round: int = -1


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"a record cannot hold {type(value).__name__}")


_encoder = msgspec.json.Encoder(enc_hook=_plain, order="deterministic")
_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)
_stamps = msgspec.json.Decoder(Stamp)
_SUM = re.compile(rb',"sum":"([0-9a-f]{8})"\}\s*$')


def encode(line: Line) -> bytes:
    """Return the line as JSON without its newline; floats read back exactly.

    Examples
    --------
    >>> encode(Timing(round=3, seconds=0.25))
    b'{"kind":"timing","round":3,"seconds":0.25,"sum":"54c38f17"}'
    """
    body = _encoder.encode(line)
    return body[:-1] + b',"sum":"%08x"}' % crc32(body)


def is_intact(raw: bytes) -> bool | None:
    """Return whether the checksum fits; None for a line without one, as by another program."""
    found = _SUM.search(raw)
    return None if found is None else crc32(raw[: found.start()] + b"}") == int(found[1], 16)


def stamp(raw: bytes) -> Stamp | None:
    """Return the line's kind and round, or None if it is torn, damaged or no record at all."""
    if is_intact(raw) is False:
        return None
    try:
        return _stamps.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def decode(raw: bytes) -> Line | None:
    """Return the line, or None for a kind that this version does not know.

    Raises
    ------
    DataError
        If the line is damaged.
    """
    if is_intact(raw) is False:
        raise DataError(
            "damaged: its checksum does not fit; delete the file and run again with --resume"
        )
    try:
        return _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        known = stamp(raw)
        if known is not None and known.kind not in KINDS:
            return None
        raise DataError(f"not a record: {error}") from error
