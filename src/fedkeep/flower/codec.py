"""Messages as Flower's records: one ArrayRecord and one ConfigRecord each.

The wire itself is `link.wire`'s; here it is bounded in size before it is read, and what devices say
is checked for its form. Shapes, dtypes and values of arrays are the core's to screen.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedkeep.config.agreement import check_agreement
from fedkeep.core.errors import RejectedError, RejectionReason
from fedkeep.core.screening import screen_profile
from fedkeep.core.types import AnyArray, DeviceId, Profile, Report
from fedkeep.protocol.framing import MESSAGE_LIMIT
from fedkeep.protocol.messages import Answered, EncryptedProfiled, Evaluated, Profiled, Reported
from fedkeep.protocol.wire import pack, unpack

TRAIN, EVALUATE, PROFILE = "train", "evaluate", "query.profile"
SHARE, MASK, UNMASK = "train.share", "train.mask", "train.unmask"
"""Flower's message types: the first exchange of a secure sum is `TRAIN`, too."""
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
    """Return the message, if it is of this kind and at most so many bytes long."""
    arrays, values = content.get(ARRAYS), content.get(HEAD)
    if (
        set(content) != {ARRAYS, HEAD}
        or not isinstance(arrays, ArrayRecord)
        or not isinstance(values, ConfigRecord)
    ):
        raise RejectedError(
            RejectionReason.WRONG_RECORDS,
            f"expected {ARRAYS} and {HEAD}, got {sorted(content)[:5]}",
        )
    head = values.get("head")
    parts = [arrays[str(number)].data for number in range(len(arrays)) if str(number) in arrays]
    if not isinstance(head, bytes) or len(parts) != len(arrays):
        raise RejectedError(RejectionReason.WRONG_RECORDS, "a record is not of its kind")
    size = len(head) + sum(map(len, parts))
    if size > most:
        raise RejectedError(RejectionReason.OVERSIZED, f"{size} bytes; at most {most} are expected")
    return unpack(head, parts, kind)


def decode_report(content: RecordDict, parameters: int) -> Report:
    """Return the report, if it has the form of one; the server checks its arrays.

    `parameters` are those of a model and of an estimator together.
    """
    report: Report = decode(content, Reported, 4 * parameters + _HEAD_BYTES).report
    for count in ("steps", "samples", "gradient_samples"):
        _require_count(count, getattr(report, count))
    if report.local_gradient is None and report.gradient_samples:
        raise RejectedError(
            RejectionReason.MISSING_ARRAY, f"no estimator of {report.gradient_samples} samples"
        )
    return report


def decode_profile(
    content: RecordDict, regions: int, agreement: Mapping[str, str] | None = None
) -> tuple[Profile, DeviceId, str]:
    """Return the profile, if it is valid, and the number and name its sender claims.

    A sender whose method differs from the fleet's `agreement` is rejected with the difference,
    before the shape of its profile can be wrong for that reason.
    """
    message: Profiled = decode(content, Profiled, 8 * regions + _HEAD_BYTES)
    _require_count("capacity", message.profile.capacity)
    _check(agreement, message)
    return (
        screen_profile(message.profile, regions),
        _require_count("device", message.device),
        message.name,
    )


def decode_encrypted_profile(
    content: RecordDict, regions: int, agreement: Mapping[str, str] | None = None
) -> tuple[EncryptedProfiled, DeviceId]:
    """Return the sealed profile and the number claimed with it; one in the clear is rejected."""
    message: Profiled | EncryptedProfiled = decode(
        content, Profiled | EncryptedProfiled, 8 * regions + _HEAD_BYTES
    )
    if isinstance(message, Profiled):
        raise RejectedError(
            RejectionReason.PROFILE_IN_THE_CLEAR, "it was asked to encrypt; its answer is not used"
        )
    _check(agreement, message)
    return message, _require_count("device", message.device)


def decode_answer(content: RecordDict, most: int) -> bytes:
    """Return a party's answer in a secure sum; a report in the clear is rejected as such."""
    message: Answered | Reported = decode(content, Answered | Reported, most + _HEAD_BYTES)
    if isinstance(message, Reported):
        raise RejectedError(
            RejectionReason.ANSWER_IN_THE_CLEAR,
            "it was asked to mask its report; what it sent is dropped",
        )
    return message.answer


def decode_evaluation(content: RecordDict) -> Evaluated:
    """Return a device's evaluation, if its numbers are possible."""
    message: Evaluated = decode(content, Evaluated, _HEAD_BYTES)
    if not (0 <= message.correct <= message.samples <= _MOST and 0 <= message.total_loss < np.inf):
        raise RejectedError(
            RejectionReason.BAD_EVALUATION,
            f"{message.correct} of {message.samples} right, loss {message.total_loss:g}",
        )
    if (errors := message.errors) is not None and not (
        np.isfinite(errors).all() and min(errors[0], errors[1], errors[3]) >= 0
    ):
        raise RejectedError(RejectionReason.BAD_EVALUATION, f"errors of {errors}")
    if (vitals := message.vitals) is not None:  # what the record of a run could not hold
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
                RejectionReason.BAD_EVALUATION,
                "a store's counts are not numbers that it can have reached",
            )
        if not all(figure is None or np.isfinite(figure) for figure in figures):
            raise RejectedError(
                RejectionReason.BAD_EVALUATION, "what it says of its budget or gist is not finite"
            )
    return message


def content_of(reply: Message) -> RecordDict:
    """Return the content of a reply; an error of its sender is a rejection."""
    if reply.has_error():
        raise RejectedError(RejectionReason.ERROR, (reply.error.reason or "the node failed")[:300])
    return reply.content


def _check(agreement: Mapping[str, str] | None, message: Profiled | EncryptedProfiled) -> None:
    """Reject a device whose method differs from the fleet's, unless there is nothing to compare."""
    if agreement is not None:
        check_agreement(agreement, message.agreement)


def _require_count(name: str, number: int | None) -> int:
    if number is None or not 0 <= number <= _MOST:
        raise RejectedError(
            RejectionReason(f"bad-{name}"), f"{number} is not a number from 0 to {_MOST}"
        )
    return number
