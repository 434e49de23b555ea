"""What protects the device's reports: noise, with a ledger in a file of its own, and masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedkeep.agent.agent import Agent
from fedkeep.config import Table, build
from fedkeep.core.device import DeviceOptions
from fedkeep.core.errors import ConfigError, RefusedError
from fedkeep.core.gist import GistOptions
from fedkeep.core.types import State

if TYPE_CHECKING:
    from fedkeep.privacy.options import PrivacyOptions

_LEDGER = "gate.ledger."


@dataclass(frozen=True)
class AgentPrivacy:
    """The table `[privacy]`; its libraries are loaded only where there is one, for they are not small."""

    options: PrivacyOptions

    @classmethod
    def configured(cls, table: Table, device: DeviceOptions, gist: GistOptions) -> AgentPrivacy:
        from fedkeep.privacy.options import PrivacyOptions

        options = build(PrivacyOptions, table, "privacy")
        if options.protects("estimator") and options.unit == "sample" and device.gradient_from == "stored":
            raise ConfigError("device.gradient_from 'stored' sends a sample many times: set privacy.unit = 'device'")
        if options.protects("estimator") and options.unit == "sample" and gist.shared:
            raise ConfigError("a shared gist tells of a sample in many rounds: set privacy.unit = 'device'")
        return cls(options)

    @property
    def clip(self) -> float | None:
        """The length to which each sample's gradient is shortened before it is told, as the noise needs it."""
        return self.options.clip if self.options.protects("estimator") else None

    @property
    def counts_samples(self) -> bool:
        """Whether the ledger tells samples apart by their ids."""
        return self.options.counts_samples

    def guard(self, agent: Agent, state: State, *, damaged: bool) -> None:
        """Puts the door before the agent; a ledger that is lost is not an empty one: then nothing starts."""
        from fedkeep.keyholder.parties import ProfileSealer
        from fedkeep.privacy.door import make_door
        from fedkeep.privacy.ledger_file import LedgerFile

        file = LedgerFile(agent.ledger_path)
        said = {n.removeprefix(_LEDGER): array for n, array in state.items() if n.startswith(_LEDGER)}
        try:
            ledger = file.found(said, damaged=damaged and not said)
        except RefusedError as refusal:
            raise ConfigError(str(refusal)) from None

        def keep(spent: State) -> None:
            try:
                file.commit(spent)
            except OSError as error:
                raise RefusedError(
                    "disk", f"the privacy ledger cannot be written ({error.strerror}); nothing was sent"
                ) from error

        size = agent.device.learner.gradient_size
        door = make_door(self.options, size, agent.require_commit, lock=agent.lock, ledger=ledger, keep=keep)
        agent.close_door(door)
        if self.options.encrypted_profiles:
            ProfileSealer(
                self.options.public_context, self.options.context_digest
            ).public()  # a file that is not there, or not the one pinned, is said now
