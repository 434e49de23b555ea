"""The one way out of a device: what may leave it, in the clear, under masks or encrypted, is decided here.

Noise comes first, charged to a ledger that is on the disk before anything is sent; then masks or encryption, where
they are set. Whoever was told to hide something refuses to send it in the clear, whatever the server asks.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from msgspec import structs

from fedkeep.core.errors import RejectedError
from fedkeep.core.protocols import Stateful
from fedkeep.core.types import IntArray, Profile, Report, State, TrainOrder
from fedkeep.privacy.accountant import PrivacyLedger
from fedkeep.privacy.gaussian import NormalSource, system_normal
from fedkeep.privacy.mechanism import DPMechanism, Spending
from fedkeep.privacy.options import PrivacyOptions
from fedkeep.protocol.messages import DeviceStats, ProfileRequest

if TYPE_CHECKING:
    from fedkeep.privacy.secagg.client import SecureAggregationClient
    from fedkeep.privacy.secagg.protocol import SecureAggregationConfig


class ReleasePipeline:
    """A device's only way out, as the options describe it; without any it lets everything pass as it is.

    A report takes three steps: `terms` or `require_clear` before the device trains, `release` for the noise, and
    under terms `hold`, of whose answer keys are the first and masked words the last.
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
    ) -> None:
        """`commit` makes the device's state durable, or raises; a `ledger` that lives apart is kept before it."""
        self._commit, self._lock = commit, lock
        self._options, self._ledger = options or PrivacyOptions(), ledger or PrivacyLedger()
        if options is None:
            return

        def charged(spent: State) -> None:
            keep(spent)
            commit()

        self._guard = DPMechanism(options, self._ledger, charged, normal or system_normal)
        if options.secure_aggregation:
            from fedkeep.privacy.secagg.client import SecureAggregationClient

            self._member = SecureAggregationClient(options, gradient_size)
        if options.encrypted_profiles:
            from fedkeep.keyholder.sealing import read_public_key

            self._key_holder = read_public_key(options.public_key)

    def require_clear(self) -> None:
        """Raises where reports leave under masks only."""
        if self._member is not None:
            raise RejectedError(
                "in the clear",
                "privacy.secure_aggregation is set here: this device answers secure orders only",
            )

    def terms(self, payload: bytes) -> "SecureAggregationConfig":
        """The terms of a secure sum, if this device may take part on them."""
        return self._masking().terms(payload)

    def see(self, ids: IntArray) -> None:
        if self._options.counts_samples:
            self._ledger.see(ids)

    def close_estimate(self) -> None:
        self._ledger.close()

    def release(self, report: Report, order: TrainOrder) -> Report:
        """What may be told of a report: with noise, without an estimator, or nothing (BudgetSpentError)."""
        with self._lock:
            return report if self._guard is None else self._guard.release(report, order)

    def hold(self, released: Report, order: TrainOrder, terms: "SecureAggregationConfig") -> bytes:
        """Keeps a released report for masking; the keys leave once that is committed."""
        with self._lock:
            keys = self._masking().hold(released, order, terms)
            self._commit()
        return keys

    def answer(self, question: bytes) -> bytes:
        """The answer to a later exchange of a secure sum."""
        with self._lock:
            return self._masking().answer(question)

    def profile(self, declared: Callable[[], tuple[Profile, float]]) -> Profile:
        """What may be told in the clear of a profile and of the time over which it was counted."""
        if self._key_holder is not None:
            raise RejectedError(
                "profile asked in the clear", "this device encrypts its profile: nothing was sent"
            )
        return self._told(declared)

    def sealed_profile(
        self, request: ProfileRequest, declared: Callable[[], tuple[Profile, float]]
    ) -> bytes:
        """The same for the key-holder alone."""
        if self._key_holder is None:
            raise RejectedError(
                "profile asked encrypted", "this device has no key for it: nothing was sent"
            )
        from fedkeep.keyholder.sealing import seal

        return seal(self._key_holder, request, self._told(declared))

    def vitals(self, vitals: DeviceStats) -> DeviceStats | None:
        """The store in numbers; nothing of it where reports are masked, or profiles encrypted or noised."""
        options = self._options
        if options.secure_aggregation or options.encrypted_profiles or options.protects("profile"):
            return None
        if options.epsilon is None or (spent := self.spending()) is None:
            return vitals
        told = structs.replace(
            vitals, gist=None
        )  # its figures are made of gradients, and nobody would charge for them
        return structs.replace(
            told, epsilon_spent=spent.spent, epsilon_left=spent.left, delta=spent.delta
        )

    def spending(self) -> Spending | None:
        """What the privacy ledger says; None where nothing is accounted for."""
        return None if self._guard is None else self._guard.spending()

    def kept(self, *, under_way: bool) -> dict[str, Stateful]:
        """What must outlive a restart; with `under_way` also a sum that the device is in the middle of.

        A device that forgets such a sum has dropped out of it, which harms nobody.
        """
        kept: dict[str, Stateful] = {} if self._guard is None else {"gate": self._guard}
        if self._member is not None:
            kept["sums"] = self._member if under_way else self._member.differences
        return kept

    def _told(self, declared: Callable[[], tuple[Profile, float]]) -> Profile:
        with self._lock:
            profile, window = declared()
            return profile if self._guard is None else self._guard.release_profile(profile, window)

    def _masking(self) -> "SecureAggregationClient":
        if self._member is None:
            raise RejectedError(
                "not-secure",
                "this device masks nothing: set privacy.secure_aggregation on both sides, or on none",
            )
        return self._member
