"""Encrypted profiles as Flower records: the question without its keys, which devices have, and the answer."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedkeep.core.errors import RefusedError
from fedkeep.flower.codec import ARRAYS, VALUES
from fedkeep.privacy.encrypted import EncryptedProfile, ProfileRequest

_CIPHERTEXT_BYTES = 16 << 20
"""More than any ciphertext of ours: a fresh one of the full scheme has 8 million."""
_CIPHERTEXTS = 1 << 10
_REQUEST = {"name": bytes, "row": int, "rows": int, "labels": int}
_ANSWER = {"name": bytes, "row": int, "capacity": int, "device": int, "comparisons": list, "velocities": bytes}


def encode_request(request: ProfileRequest) -> RecordDict:
    return RecordDict({VALUES: ConfigRecord(asdict(request))})


def decode_request(values: ConfigRecord) -> ProfileRequest:
    _require(values, _REQUEST)
    return ProfileRequest(**dict(values))  # type: ignore[arg-type]


def encode_profile(profile: EncryptedProfile, device: int) -> RecordDict:
    values = asdict(profile) | {"comparisons": list(profile.comparisons), "device": device}
    return RecordDict({VALUES: ConfigRecord(values)})


def decode_profile(content: RecordDict) -> tuple[EncryptedProfile, int]:
    """The profile and the device number its sender claims; one in the clear is refused and not read."""
    if isinstance(content.get(ARRAYS), ArrayRecord):
        raise RefusedError("profile in the clear", "it was asked to encrypt; its answer is not used")
    values = content.get(VALUES)
    if set(content) != {VALUES} or not isinstance(values, ConfigRecord):
        raise RefusedError("wrong-records", f"expected {VALUES}, got {sorted(content)[:5]}")
    _require(values, _ANSWER)
    answer: dict[str, Any] = dict(values)
    device, parts = answer.pop("device"), tuple(answer.pop("comparisons"))
    if device < 0:
        raise RefusedError("bad-device", f"{device} is not a device's number")
    if len(parts) > _CIPHERTEXTS or not all(isinstance(part, bytes) for part in parts):
        raise RefusedError("wrong-type", "comparisons are not a short list of ciphertexts")
    if max(map(len, (*parts, answer["velocities"]))) > _CIPHERTEXT_BYTES:
        raise RefusedError("ciphertext of the wrong size", f"no ciphertext has more than {_CIPHERTEXT_BYTES} bytes")
    return EncryptedProfile(comparisons=parts, **answer), device


def _require(values: ConfigRecord, kinds: dict[str, type]) -> None:
    if set(values) != set(kinds):
        raise RefusedError("wrong-values", f"expected {sorted(kinds)}, got {sorted(values)[:9]}")
    for name, value in values.items():
        if type(value) is not kinds[name]:
            raise RefusedError("wrong-type", f"{name} is {type(value).__name__}, not {kinds[name].__name__}")
