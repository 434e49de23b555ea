"""Sealed profiles: who can open them, what tampering ends in, and lost, wrong or damaged keys."""

import errno
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkeep import files
from fedkeep.core.errors import ConfigError, RejectedError
from fedkeep.core.types import Profile
from fedkeep.keyholder.sealing import (
    create_key,
    open_key,
    public_half,
    read_public_key,
    seal,
    unseal,
)
from fedkeep.protocol.messages import ProfileRequest

LABELS, DEVICE = 3, 7
SECRET = X25519PrivateKey.generate()
PUBLIC = SECRET.public_key().public_bytes_raw()
NONCE = bytes(range(16))
ASKED = ProfileRequest(PUBLIC, NONCE, DEVICE)
PROFILE = Profile(5, np.array([1.0, 0.0, 2.5]))


def test_what_was_sealed_is_opened_to_the_last_bit_and_no_two_seals_are_alike() -> None:
    sealed = seal(PUBLIC, ASKED, PROFILE)
    opened = unseal(SECRET, NONCE, DEVICE, sealed, LABELS)
    assert opened.capacity == PROFILE.capacity
    np.testing.assert_array_equal(opened.velocity, PROFILE.velocity)
    assert not {sealed[start : start + 8] for start in range(len(sealed))} & {
        v.tobytes() for v in PROFILE.velocity
    }
    again = seal(PUBLIC, ASKED, PROFILE)
    assert len(again) == len(sealed) < 300
    assert again[:32] != sealed[:32], "a fresh key for every message"


@settings(deadline=None)
@given(st.data())
def test_any_altered_byte_and_any_cut_breaks_the_seal(data: st.DataObject) -> None:
    sealed = bytearray(seal(PUBLIC, ASKED, PROFILE))
    place = data.draw(st.integers(0, len(sealed) - 1))
    if data.draw(st.booleans()):
        sealed[place] ^= data.draw(st.sampled_from([1, 2, 4, 8, 16, 32, 64]))
    else:
        del sealed[place:]
    # The highest bit of an X25519 key means nothing, so it is not flipped; it is bound anyway.
    with pytest.raises(RejectedError, match=r"broken seal|unusable public key"):
        unseal(SECRET, NONCE, DEVICE, bytes(sealed), LABELS)


def test_a_bit_of_the_fresh_key_that_the_curve_ignores_is_bound_as_well() -> None:
    sealed = bytearray(seal(PUBLIC, ASKED, PROFILE))
    sealed[31] ^= 128
    with pytest.raises(RejectedError, match="broken seal"):
        unseal(SECRET, NONCE, DEVICE, bytes(sealed), LABELS)


@pytest.mark.parametrize(
    ("nonce", "device", "secret"),
    [
        (NONCE, DEVICE + 1, SECRET),
        (bytes(16), DEVICE, SECRET),
        (NONCE, DEVICE, X25519PrivateKey.generate()),
    ],
    ids=["another device's", "replayed under a later nonce", "sealed to another key"],
)
def test_a_seal_opens_for_one_device_one_nonce_and_one_key(
    nonce: bytes, device: int, secret: X25519PrivateKey
) -> None:
    with pytest.raises(RejectedError, match="broken seal"):
        unseal(secret, nonce, device, seal(PUBLIC, ASKED, PROFILE), LABELS)


def test_no_split_of_nonce_and_number_passes_for_another() -> None:
    """Device 2 under a nonce that ends in "1" is not device 12."""
    with pytest.raises(RejectedError, match="nothing was sent"):
        seal(PUBLIC, replace(ASKED, nonce=NONCE + b"1", device=2), PROFILE)
    shifted = seal(PUBLIC, replace(ASKED, nonce=NONCE[1:] + b"1", device=2), PROFILE)
    with pytest.raises(RejectedError, match="broken seal"):
        unseal(SECRET, NONCE, 12, shifted, LABELS)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (replace(ASKED, key=bytes(32)), "another key"),
        (replace(ASKED, key=b""), "another key"),
        (replace(ASKED, key=bytes(10 << 20)), "another key"),
        (replace(ASKED, nonce=b""), "profile request"),
        (replace(ASKED, nonce=bytes(10 << 20)), "profile request"),
        (replace(ASKED, device=None), "profile request"),
    ],
)
def test_a_device_seals_for_no_other_key_and_no_other_form_of_request(
    asked: ProfileRequest, reason: str
) -> None:
    with pytest.raises(RejectedError, match=rf"{reason}: .*nothing was sent") as refused:
        seal(PUBLIC, asked, PROFILE)
    assert len(str(refused.value)) < 300


def test_keys_that_agree_on_nothing_secret_are_refused() -> None:
    weak = bytes(32)
    with pytest.raises(RejectedError, match="unusable public key"):
        seal(weak, replace(ASKED, key=weak), PROFILE)
    with pytest.raises(RejectedError, match="unusable public key"):
        unseal(SECRET, NONCE, DEVICE, weak + bytes(100), LABELS)


@pytest.mark.parametrize(
    ("profile", "reason"),
    [
        (Profile(5, np.array([1.0, np.nan, 2.0])), "velocity-not-finite"),
        (Profile(5, np.array([1.0, np.inf, 2.0])), "velocity-not-finite"),
        (Profile(5, np.array([1.0, -1.0, 2.0])), "negative-velocity"),
        (Profile(5, np.array([1.0, 1e31, 2.0])), "velocity-too-large"),
        (Profile(5, np.ones(2)), "velocity-shape"),
        (Profile(5, np.ones((3, 1))), "velocity-shape"),
        (Profile(5, np.ones(3, dtype=np.float32)), "velocity-dtype"),
        (Profile(5, np.ones(1_250_000)), "oversized"),
        (Profile(0, np.ones(3)), "bad-capacity"),
        (Profile(-1, np.ones(3)), "bad-capacity"),
        (Profile(2**40, np.ones(3)), "bad-capacity"),
        (Profile(2**63, np.ones(3)), "bad-capacity"),
        (Profile("five", np.ones(3)), "malformed"),
        (Profile(5, [1.0, 2.0, 3.0]), "malformed"),
        ({"capacity": 5}, "malformed"),
        (b"no profile", "malformed"),
    ],
)
def test_a_malformed_profile_under_a_whole_seal_is_refused(profile: Any, reason: str) -> None:
    with pytest.raises(RejectedError) as refused:
        unseal(SECRET, NONCE, DEVICE, seal(PUBLIC, ASKED, profile), LABELS)
    assert refused.value.reason == reason


@pytest.mark.parametrize(
    "sealed", [b"", b"short", bytes(32), bytes(10 << 20)], ids=["empty", "short", "a key", "huge"]
)
def test_what_is_no_sealed_profile_is_refused(sealed: bytes) -> None:
    with pytest.raises(RejectedError):
        unseal(SECRET, NONCE, DEVICE, sealed, LABELS)


@pytest.mark.parametrize("text", ["", "00", "zz" * 32, "ab" * 33])
def test_a_public_key_that_is_none_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"privacy\.public_key"):
        read_public_key(text)


def test_the_key_is_for_its_owner_kept_and_never_overwritten(tmp_path: Path) -> None:
    public = create_key(tmp_path / "keys")
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "keys" / "secret.key").stat().st_mode) == 0o600
    secret = open_key(tmp_path / "keys")
    assert public_half(secret) == public
    assert (
        unseal(
            secret, NONCE, DEVICE, seal(public, replace(ASKED, key=public), PROFILE), LABELS
        ).capacity
        == 5
    )
    with pytest.raises(ConfigError, match="has a key already"):
        create_key(tmp_path / "keys")
    assert open_key(tmp_path / "keys").private_bytes_raw() == secret.private_bytes_raw()


def test_the_key_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(new: Path, path: Path) -> None:
        assert stat.S_IMODE(new.stat().st_mode) == 0o600, (
            "for its owner's eyes only from the first byte on"
        )
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "put_in_place", full)
    with pytest.raises(OSError, match="No space"):
        create_key(tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    assert create_key(tmp_path) == public_half(open_key(tmp_path))


def test_a_lost_key_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RejectedError, match=r"lost key: .*keyholder create"):
        open_key(tmp_path)


def test_a_damaged_key_is_one_sentence_wherever_the_damage_is(tmp_path: Path) -> None:
    create_key(tmp_path)
    whole = (tmp_path / "secret.key").read_text()
    for place in range(len(whole) - 1):
        other = "1" if whole[place] == "0" else "0"
        damaged = [f"{whole[:place]}{letter}{whole[place + 1 :]}" for letter in (other, "z")] + [
            whole[:place]
        ]
        if place in (1, 62):
            del damaged[0]  # some bits there mean nothing to X25519
        for content in damaged:
            (tmp_path / "secret.key").write_text(content)
            with pytest.raises(
                RejectedError, match=r"^damaged key: .* is not as it was written: put it back$"
            ):
                open_key(tmp_path)
