"""Messages as Flower's records: one ArrayRecord and one ConfigRecord each, since each costs Flower a request.

The wire itself is `link.wire`'s; here it is bounded in size before it is read, and what devices say is checked for its
form. Shapes, dtypes and values of arrays are the core's to screen.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedkeep.config.agreement import check_agreement
from fedkeep.core.errors import RejectedError
from fedkeep.core.screening import screen_profile
from fedkeep.core.types import AnyArray, DeviceId, Profile, Report
from fedkeep.protocol.framing import MESSAGE_LIMIT
from fedkeep.protocol.messages import Answered, EncryptedProfiled, Evaluated, Profiled, Reported
from fedkeep.protocol.wire import pack, unpack

TRAIN, EVALUATE, PROFILE = "train", "evaluate", "query.profile"
SHARE, MASK, UNMASK = "train.share", "train.mask", "train.unmask"
"""Flower's message types: what a server asks, and the exchanges of a secure sum, whose first is `TRAIN`."""
ARRAYS, HEAD = "fedkeep.arrays", "fedkeep.head"
_HEAD_BYTES = 4096
"""More than the head of any message whose numbers are arrays."""
_MOST, _MOST_EVER = 10**9, 10**15
"""No device counts further than this in a round, and in its life."""


def encode_all(messages: Iterable[Any]) -> list[RecordDict]:
    """Messages as Flower's content; arrays that they share are serialised, and uploaded, once."""
    encoded: dict[int, tuple[AnyArray, Array]] = {}
    contents = []
    for message in messages:
        head, arrays = pack(message)
        for array in arrays:
            if (
                id(array) not in encoded
            ):  # the array is kept beside it: nothing else has its id meanwhile
                raw = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
                encoded[id(array)] = (
                    array,
                    Array(array.dtype.name, tuple(array.shape), "fedkeep.raw", raw),
                )
        numbered = {str(number): encoded[id(array)][1] for number, array in enumerate(arrays)}
        contents.append(
            RecordDict({ARRAYS: ArrayRecord(numbered), HEAD: ConfigRecord({"head": head})})
        )
    return contents


def encode(message: Any) -> RecordDict:
    """One message as Flower's content; `decode` reads it.

    >>> from fedkeep.protocol.messages import AskProfile
    >>> decode(encode(AskProfile()), AskProfile)
    AskProfile(encrypted=None)
    """
    return encode_all([message])[0]


def decode(content: RecordDict, kind: Any, most: int = MESSAGE_LIMIT) -> Any:
    """The message, if it is of this kind and has at most so many bytes, which are counted before they are read."""
    arrays, values = content.get(ARRAYS), content.get(HEAD)
    if (
        set(content) != {ARRAYS, HEAD}
        or not isinstance(arrays, ArrayRecord)
        or not isinstance(values, ConfigRecord)
    ):
        raise RejectedError(
            "wrong-records", f"expected {ARRAYS} and {HEAD}, got {sorted(content)[:5]}"
        )
    head = values.get("head")
    parts = [arrays[str(number)].data for number in range(len(arrays)) if str(number) in arrays]
    if not isinstance(head, bytes) or len(parts) != len(arrays):
        raise RejectedError("wrong-records", "a record is not of its kind")
    size = len(head) + sum(map(len, parts))
    if size > most:
        raise RejectedError("oversized", f"{size} bytes; at most {most} are expected")
    return unpack(head, parts, kind)


def decode_report(content: RecordDict, parameters: int) -> Report:
    """The report, if it has the form of one; whether its arrays are sound is the server's to say (`receive`).

    `parameters` are those of a model and of an estimator together.
    """
    report: Report = decode(content, Reported, 4 * parameters + _HEAD_BYTES).report
    for count in ("steps", "samples", "gradient_samples"):
        _require_count(count, getattr(report, count))
    if report.local_gradient is None and report.gradient_samples:
        raise RejectedError("missing-array", f"no estimator of {report.gradient_samples} samples")
    return report


def decode_profile(
    content: RecordDict, regions: int, agreement: Mapping[str, str] | None = None
) -> tuple[Profile, DeviceId, str]:
    """The profile, if it is valid, and the number and name its sender claims.

    A sender whose method differs from the fleet's `agreement` is rejected with the difference, before
    the shape of its profile can be wrong for that reason.
    """
    said: Profiled = decode(content, Profiled, 8 * regions + _HEAD_BYTES)
    _require_count("capacity", said.profile.capacity)
    _check(agreement, said)
    return screen_profile(said.profile, regions), _require_count("device", said.device), said.name


def decode_encrypted_profile(
    content: RecordDict, regions: int, agreement: Mapping[str, str] | None = None
) -> tuple[EncryptedProfiled, DeviceId]:
    """The sealed profile and the number claimed with it; one in the clear is refused and not used."""
    said: Profiled | EncryptedProfiled = decode(
        content, Profiled | EncryptedProfiled, 8 * regions + _HEAD_BYTES
    )
    if isinstance(said, Profiled):
        raise RejectedError(
            "profile in the clear", "it was asked to encrypt; its answer is not used"
        )
    _check(agreement, said)
    return said, _require_count("device", said.device)


def decode_answer(content: RecordDict, most: int) -> bytes:
    """What a party of a secure sum says in at most that many bytes; a report in the clear is refused as such."""
    said: Answered | Reported = decode(content, Answered | Reported, most + _HEAD_BYTES)
    if isinstance(said, Reported):
        raise RejectedError(
            "answer in the clear", "it was asked to mask its report; what it sent is dropped"
        )
    return said.answer


def decode_evaluation(content: RecordDict) -> Evaluated:
    said: Evaluated = decode(content, Evaluated, _HEAD_BYTES)
    if not (0 <= said.correct <= said.samples <= _MOST and 0 <= said.total_loss < np.inf):
        raise RejectedError(
            "bad-evaluation", f"{said.correct} of {said.samples} right, loss {said.total_loss:g}"
        )
    if (vitals := said.vitals) is not None:  # what the record of a run could not hold
        counts = (
            vitals.stored,
            *vitals.filled,
            vitals.arrivals,
            vitals.kept,
            vitals.replaced,
            vitals.refused,
        )
        figures = (vitals.epsilon_spent, vitals.epsilon_left, vitals.delta, *(vitals.gist or ()))
        if not all(0 <= count <= _MOST_EVER for count in counts):
            raise RejectedError(
                "bad-evaluation", "a store's counts are not numbers that it can have reached"
            )
        if not all(figure is None or np.isfinite(figure) for figure in figures):
            raise RejectedError(
                "bad-evaluation", "what it says of its budget or gist is not finite"
            )
    return said


def content_of(reply: Message) -> RecordDict:
    """What a reply says; an error of the sender's is refused like anything else that is no answer."""
    if reply.has_error():
        raise RejectedError("error", (reply.error.reason or "the node failed")[:300])
    return reply.content


def _check(agreement: Mapping[str, str] | None, said: Profiled | EncryptedProfiled) -> None:
    """Rejects a device whose method differs from the fleet's, unless there is nothing to compare."""
    if agreement is not None:
        check_agreement(agreement, said.agreement)


def _require_count(name: str, number: int | None) -> int:
    if number is None or not 0 <= number <= _MOST:
        raise RejectedError(f"bad-{name}", f"{number} is not a number from 0 to {_MOST}")
    return number
