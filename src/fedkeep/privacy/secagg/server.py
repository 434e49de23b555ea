"""The server in secure rounds: what it asks devices to add up, and what it makes of their sums."""

import secrets
from collections.abc import Collection, Sequence

import numpy as np

from fedkeep.core.aggregation import UpdateSum
from fedkeep.core.errors import ConfigError, RejectedError, RejectionReason
from fedkeep.core.gradients import IncrementalEstimator, RoundMeanEstimator
from fedkeep.core.rounds import RoundSummary
from fedkeep.core.server import Server
from fedkeep.core.types import DeviceId, State, Vector
from fedkeep.privacy.options import PrivacyOptions, refuse_conflicts
from fedkeep.privacy.secagg.fixed_point import WIDEST, WORD, Words
from fedkeep.privacy.secagg.protocol import (
    SESSION_BYTES,
    AggregationSession,
    SecureAggregationConfig,
)
from fedkeep.protocol.wire import from_array, to_array

_HEADROOM = 16.0
"""How many times the fastest rate of today a rate may reach before it is capped."""
_REBASE_ROUNDS = 500
"""After so many the running sum begins anew, so that nothing counts in it for ever."""
_DEPARTED = 0.1
"""The share of the running sum, by rate, that may be of devices that have left."""


class SecureAggregationServer:
    """Opens and closes sums, and keeps what the running sum of gradients counts (Eq. 8).

    In integers no rounding ever gathers. Devices that left cannot be taken out of a sum nobody can
    look into: re-basing begins a new one, into which every device sends all it has when it next
    takes part.

    Its state is committed together with the server's: after a crash both are those of the same
    round.
    """

    def __init__(self, server: Server, options: PrivacyOptions, gradient_size: int) -> None:
        refuse_conflicts(options, server.aggregation)
        if not server.limits.enabled:
            raise ConfigError(
                "privacy.secure_aggregation needs limits: devices clip by them before they mask; "
                "remove limits.enabled = false"
            )
        for key in ("update_norm", "gradient_norm"):
            if not getattr(server.limits, key) < WIDEST:
                raise ConfigError(
                    f"privacy.secure_aggregation needs a finite limits.{key}: below {WIDEST:g}"
                )
        self._server, self._options = server, options
        estimator = server.estimator
        self._runs = isinstance(estimator, IncrementalEstimator)
        self._rebase_every = min(
            getattr(estimator, "max_age", None) or _REBASE_ROUNDS, _REBASE_ROUNDS
        )
        estimates = self._runs or isinstance(estimator, RoundMeanEstimator)
        self._gradient_size = gradient_size if estimates else 0
        self.rebase()
        server.expect_sums()

    def rebase(self) -> None:
        """Begin the running sum anew; g_hat stays as it is until the next round closes."""
        self._running: Words = np.zeros(self._gradient_size + 1, WORD)
        self._unit = 0.0
        self._based = self._server.round
        self._counted: dict[DeviceId, tuple[bytes, float]] = {}

    def open(self, participants: Sequence[DeviceId]) -> AggregationSession:
        """Open a new sum over these devices; its session is never used again."""
        server, count = self._server, len(participants)
        session = secrets.token_bytes(SESSION_BYTES)
        heaviest = {device: server.max_weight(device) for device in participants}
        if count < self._options.least_in_sum:
            raise RejectedError(
                RejectionReason.TOO_FEW_DEVICES, f"{count} are asked; privacy.min_cohort wants more"
            )
        if not np.isfinite(max(heaviest.values(), default=0.0)):
            raise RejectedError(
                RejectionReason.NO_PLAN,
                "without one nobody knows how much a report may weigh: coordinate first",
            )
        if not self._unit:
            self._unit = (
                _HEADROOM
                * max(server.rate(device) for device in self._members() | set(participants))
                or 1.0
            )
        terms = {
            device: SecureAggregationConfig(
                session=session,
                device=device,
                threshold=self._options.threshold(count),
                summands=count,
                update_norm=server.max_summand_norm(),
                gradient_norm=server.limits.gradient_norm,
                gradient_size=self._gradient_size,
                heaviest=heaviest[device],
                weight_unit=max(heaviest.values()) or 1.0,
                rate=min(server.rate(device) / self._unit, 1.0),
                counted=self._counted.get(device, (b"", 0.0))[0],
                per_step=server.aggregation.per_step,
            )
            for device in participants
        }
        size = len(server.model) + 2 + (self._gradient_size + 1 if self._gradient_size else 0)
        return AggregationSession(session, self._options.threshold(count), size, terms)

    def close(
        self, opened: AggregationSession, survivors: Collection[DeviceId], lost: bool, total: Words
    ) -> RoundSummary:
        """Close a round by the sum over the survivors, or raise and leave everything as it was.

        Re-basing takes effect with the next round, so that what devices receive is what was
        committed.
        """
        size, terms = len(self._server.model), next(iter(opened.terms.values()))
        numbers = terms.update_grid.decode(total[: size + 2])
        update = UpdateSum(numbers[:size], float(numbers[size]), float(numbers[size + 1]))
        running, round_ = self._running, self._server.round
        direction: Vector | None = None
        if self._gradient_size:
            running = running + total[size + 2 :] if self._runs else total[size + 2 :]
            estimate = terms.estimator_grid.decode(running)
            direction = (
                (estimate[:-1] / estimate[-1]).astype(np.float32) if estimate[-1] > 0 else None
            )
        summary = self._server.close_sum(survivors, update, direction)
        if self._runs:
            self._running = running
            self._counted |= {d: (opened.session, opened.terms[d].rate) for d in survivors}
            present, everybody = self._members(), self._counted.items()
            gone = sum(rate for device, (_, rate) in everybody if device not in present)
            departed = gone / (sum(rate for _, (_, rate) in everybody) or 1.0)
            if lost or departed > _DEPARTED or round_ + 1 - self._based >= self._rebase_every:
                self.rebase()
        return summary

    def snapshot(self) -> State:
        """Return the running sum and whom it counts, as plain arrays."""
        return {"total": self._running, "about": to_array((self._counted, self._unit, self._based))}

    def restore(self, state: State) -> None:
        """Take over what `snapshot` returned."""
        self._running = state["total"].copy()
        kind = tuple[dict[DeviceId, tuple[bytes, float]], float, int]
        self._counted, self._unit, self._based = from_array(state["about"], kind)

    def _members(self) -> set[DeviceId]:
        return set() if self._server.plan is None else set(self._server.plan.devices.tolist())
