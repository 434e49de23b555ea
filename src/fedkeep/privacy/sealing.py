"""A device's side of encrypted profiles: the one key it encrypts under, and never a profile in the clear."""

from __future__ import annotations

from pathlib import Path

from fedkeep.core.errors import ConfigError
from fedkeep.core.types import Profile
from fedkeep.link.messages import EncryptedProfile, ProfileRequest
from fedkeep.privacy.encrypted import encrypt_profile
from fedkeep.privacy.options import PrivacyOptions
from fedkeep.privacy.public_context import PublicContext, read_public_context


class ProfileSealer:
    """Encrypts under the key-holder's file that this device was given; the server can name a key, not bring one."""

    def __init__(self, options: PrivacyOptions) -> None:
        if not options.public_context:
            raise ConfigError(
                "privacy.encrypted_profiles needs privacy.public_context: the key-holder's devices.context, copied here"
            )
        self._path, self._pinned = Path(options.public_context), options.context_digest

    def public(self) -> PublicContext:
        """The key-holder's public keys, read anew since they are megabytes that are seldom needed."""
        return read_public_context(self._path, self._pinned)

    def seal(self, request: ProfileRequest, profile: Profile) -> EncryptedProfile:
        return encrypt_profile(self.public(), request, profile)
