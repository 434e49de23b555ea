"""The release pipeline of a device: all that leaves it passes here.

Noise comes first, charged to a ledger that is on disk before anything is sent; then masks (secure
aggregation) or encryption (profiles), where they are configured. A device that is configured to
protect something rejects a request for it in the clear, whatever the server asks.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import numpy as np
from msgspec import structs

from fedkeep.core.errors import ConfigError, RejectedError
from fedkeep.core.gradients.codec import Encoding
from fedkeep.core.protocols import Stateful
from fedkeep.core.types import (
    ArraySpec,
    IntArray,
    Profile,
    Report,
    State,
    StateSpec,
    TrainOrder,
)
from fedkeep.privacy.accountant import REMEMBERED, PrivacyLedger
from fedkeep.privacy.gaussian import NormalSource, system_normal
from fedkeep.privacy.mechanism import DPMechanism, Spending
from fedkeep.privacy.options import PrivacyOptions
from fedkeep.protocol.messages import DeviceStats, ProfileRequest

if TYPE_CHECKING:
    from fedkeep.privacy.secagg.client import SecureAggregationClient
    from fedkeep.privacy.secagg.protocol import SecureAggregationConfig


def release_state_spec(options: PrivacyOptions | None, gradient_size: int) -> StateSpec:
    """Describe what a release pipeline with these options commits between two sums.

    Parameters
    ----------
    options : PrivacyOptions or None
        None: everything passes as it is, and nothing is kept.
    gradient_size : int
        The length of a gradient.
    """
    if options is None:
        return {}
    samples = REMEMBERED if options.counts_samples else 0
    sent = ArraySpec((gradient_size,), np.float32, bounded=True, optional=True, learned=True)
    spec = {
        "gate.ledger.sample_ids": ArraySpec((samples,), np.int64, bounded=True),
        "gate.ledger.sample_costs": ArraySpec((samples, 4), np.float64, bounded=True),
        "gate.clean": sent,
        "gate.noisy": sent,
    }
    if options.secure_aggregation:
        words = ArraySpec((gradient_size + 1,), np.uint64, bounded=True, learned=True)
        other = ArraySpec((0,), np.uint8, optional=True, learned=True)
        spec |= {"sums.counted": words, "sums.sent": words, "sums.*": other}
    return spec


class ReleasePipeline:
    """Noise, masks and encryption of one device; without options everything passes unchanged.

    A report takes three steps: `terms` or `require_clear` before the device trains, `release` for
    the noise, and with secure aggregation `hold`, whose first answer are public keys and whose
    last is the masked report.

    Parameters
    ----------
    options : PrivacyOptions, optional
        The `[privacy]` table; None: no protection.
    gradient_size : int
        Length of a gradient estimate, for secure aggregation.
    commit : callable
        Makes the device's state durable, or raises.
    normal : callable, optional
        Source of standard normal numbers.
    lock : context manager
        Held while the state of the pipeline changes.
    ledger : PrivacyLedger, optional
        A ledger that is kept in a file of its own.
    keep : callable
        Makes that ledger durable; called before `commit`.
    encoding : {"float32", "float16", "int8", "int4"}
        In which numbers a gradient with noise is sent.
    """

    _guard: DPMechanism | None = None
    _member: "SecureAggregationClient | None" = None
    _key_holder: bytes | None = None

    def __init__(
        self,
        options: PrivacyOptions | None = None,
        gradient_size: int = 0,
        commit: Callable[[], None] = lambda: None,
        *,
        normal: NormalSource | None = None,
        lock: AbstractContextManager[object] = nullcontext(),
        ledger: PrivacyLedger | None = None,
        keep: Callable[[State], None] = lambda _: None,
        encoding: Encoding = "float32",
    ) -> None:
        self._commit, self._lock = commit, lock
        self._options, self._ledger = options or PrivacyOptions(), ledger or PrivacyLedger()
        if options is None:
            return

        def charged(spent: State) -> None:
            keep(spent)
            commit()

        self._guard = DPMechanism(options, self._ledger, charged, normal or system_normal, encoding)
        if options.secure_aggregation:
            from fedkeep.privacy.secagg.client import SecureAggregationClient

            self._member = SecureAggregationClient(options, gradient_size)
        if options.profile_protection == "homomorphic":
            raise ConfigError(
                "privacy.profiles = 'homomorphic' is for `fedkeep run`: set 'sealed' on a device"
            )
        if options.profile_protection == "sealed":
            from fedkeep.keyholder.sealing import read_public_key

            self._key_holder = read_public_key(options.public_key)

    def require_clear(self) -> None:
        """Raise if reports may leave this device under masks only."""
        if self._member is not None:
            raise RejectedError(
                "in the clear",
                "privacy.secure_aggregation is set here: this device answers secure orders only",
            )

    def terms(self, payload: bytes) -> "SecureAggregationConfig":
        """Decode the configuration of a secure aggregation, if this device may take part in it."""
        return self._masking().terms(payload)

    def see(self, ids: IntArray) -> None:
        """Record that samples have entered the open gradient estimate."""
        if self._options.counts_samples:
            self._ledger.see(ids)

    def close_estimate(self) -> None:
        """Close the open gradient estimate."""
        self._ledger.close()

    def release(self, report: Report, order: TrainOrder) -> Report:
        """Return what may be sent of a report; see `DPMechanism.release`."""
        with self._lock:
            return report if self._guard is None else self._guard.release(report, order)

    def hold(self, released: Report, order: TrainOrder, terms: "SecureAggregationConfig") -> bytes:
        """Keep a released report for masking; return the device's keys once that is committed."""
        with self._lock:
            keys = self._masking().hold(released, order, terms)
            self._commit()
        return keys

    def answer(self, question: bytes) -> bytes:
        """Return the answer to a later message of a secure aggregation."""
        with self._lock:
            return self._masking().answer(question)

    def profile(self, declared: Callable[[], tuple[Profile, float]]) -> Profile:
        """Return the profile that may be sent in the clear.

        Parameters
        ----------
        declared : callable
            Returns the true profile and the length of the time over which it was counted.
        """
        if self._key_holder is not None:
            raise RejectedError(
                "profile asked in the clear", "this device encrypts its profile: nothing was sent"
            )
        return self._released_profile(declared)

    def sealed_profile(
        self, request: ProfileRequest, declared: Callable[[], tuple[Profile, float]]
    ) -> bytes:
        """Return the profile encrypted to the key holder."""
        if self._key_holder is None:
            raise RejectedError(
                "profile asked encrypted", "this device has no key for it: nothing was sent"
            )
        from fedkeep.keyholder.sealing import seal

        return seal(self._key_holder, request, self._released_profile(declared))

    def vitals(self, vitals: DeviceStats) -> DeviceStats | None:
        """Return the store's statistics; None where reports are masked or profiles protected."""
        options = self._options
        if (
            options.secure_aggregation
            or options.profile_protection != "plain"
            or options.protects("profile")
        ):
            return None
        if options.epsilon is None or (spent := self.spending()) is None:
            return vitals
        # These figures are computed from gradients and samples, and no charge covers them.
        return structs.replace(
            vitals,
            gist=None,
            changes=None,
            epsilon_spent=spent.spent,
            epsilon_left=spent.left,
            delta=spent.delta,
        )

    def spending(self) -> Spending | None:
        """Return what has been spent; None where there is no budget to account for."""
        return None if self._guard is None else self._guard.spending()

    def kept(self, *, under_way: bool) -> dict[str, Stateful]:
        """Return the parts whose state must survive a restart.

        With `under_way` a secure aggregation in progress is among them; a device that forgets it
        has dropped out of it, which the protocol tolerates.
        """
        kept: dict[str, Stateful] = {} if self._guard is None else {"gate": self._guard}
        if self._member is not None:
            kept["sums"] = self._member if under_way else self._member.differences
        return kept

    def _released_profile(self, declared: Callable[[], tuple[Profile, float]]) -> Profile:
        with self._lock:
            profile, window = declared()
            return profile if self._guard is None else self._guard.release_profile(profile, window)

    def _masking(self) -> "SecureAggregationClient":
        if self._member is None:
            raise RejectedError(
                "not-secure",
                "this device masks nothing: set privacy.secure_aggregation on both sides, or on "
                "none",
            )
        return self._member
