"""The only door of a device: what goes out is checked, charged, committed and noised, in this order."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from fedkeep.core.errors import ConfigError, RejectedError
from fedkeep.core.state import add_prefix, strip_prefix
from fedkeep.core.types import AnyArray, FloatArray, Profile, Report, State, TrainOrder
from fedkeep.privacy.accountant import BudgetSpentError, Charge, PrivacyLedger
from fedkeep.privacy.gaussian import NormalSource, clipped, system_normal
from fedkeep.privacy.options import PrivacyOptions, Stream, Unit

_ROUNDING = 1e-3
"""By how much a float32 mean of clipped gradients may exceed the clip."""


@dataclass(frozen=True)
class Spending:
    """A device's ledger in plain numbers; the unit says which epsilon the budget bounds."""

    unit: Unit
    budget: float | None
    delta: float
    sample_epsilon: float
    device_epsilon: float

    @property
    def spent(self) -> float:
        """The epsilon that counts against the budget."""
        return self.sample_epsilon if self.unit == "sample" else self.device_epsilon

    @property
    def left(self) -> float | None:
        """The epsilon that is left of the budget; None without a budget."""
        return None if self.budget is None else max(0.0, self.budget - self.spent)


class DPMechanism:
    """Stands between a device and the outside; what is over budget it withholds and never sends in the clear.

    Neighbours are data sets in which one sample, or all samples of a device, are replaced: the counts that a
    report carries in the clear (samples, steps, weight) are taken as public and are not protected.

    >>> from fedkeep.core.types import LocalTraining
    >>> guard = DPMechanism(PrivacyOptions(epsilon=2.0, clip=1.0), PrivacyLedger(), commit=lambda ledger: None)
    >>> order = TrainOrder(0, np.zeros(2, dtype=np.float32), None, LocalTraining(learning_rate=0.1, epochs=1))
    >>> gradient = np.array([0.6, 0.8], dtype=np.float32)
    >>> told = guard.release(Report(0, order.model, 4.0, 1, 4, gradient, gradient_samples=50), order)
    >>> np.array_equal(told.local_gradient, gradient)  # it has noise
    False
    >>> round(guard.spending().spent, 3)
    2.0
    """

    def __init__(
        self,
        options: PrivacyOptions,
        ledger: PrivacyLedger,
        commit: Callable[[State], None],
        normal: NormalSource = system_normal,
    ) -> None:
        """`commit` makes the ledger's snapshot durable; it returns only once it is, and raises where it cannot be."""
        self._options, self._ledger, self._commit, self.normal = options, ledger, commit, normal
        self._multiplier = 0.0 if options.epsilon is None else options.noise_multiplier()
        self._sent: State = {}
        """The last estimator, `clean` and `noisy`, and the profile `told`: they can go out again for nothing."""

    def release(self, report: Report, order: TrainOrder) -> Report:
        """What may be sent of the report: with noise, without an estimator, or nothing (BudgetSpentError).

        An estimator that was sent before, and whose reply was lost, goes out again with the noise it had: that tells
        nothing new and costs nothing.
        """
        _require_finite("model", report.model)
        options, gradient, again = self._options, report.local_gradient, None
        if (
            gradient is not None
            and "clean" in self._sent
            and np.array_equal(self._sent["clean"], gradient)
        ):
            again = self._sent["noisy"]
        estimator = self._estimator_charge(report, order) if again is None else None
        model = None
        if options.protects("model") and report.weight != 0:
            whole = (
                2 * options.model_clip
            )  # the whole update is clipped: one sample can move it as far as all
            model = self._charge("model", whole, whole)
        allowed = self._affordable([charge for charge in (estimator, model) if charge is not None])
        if allowed:
            self._ledger.charge(*allowed)
            self._commit(self._ledger.snapshot())
        if model is not None:
            noisy = self._noised(
                report.model.astype(np.float64) - order.model, options.model_clip, model.deviation
            )
            report = replace(report, model=(order.model + noisy).astype(np.float32))
        if estimator in allowed and gradient is not None:
            again = self._noised(gradient, options.clip, estimator.deviation).astype(np.float32)
            self._sent |= {"clean": gradient.copy(), "noisy": again}
        if again is None and options.protects("estimator"):
            return replace(report, local_gradient=None, gradient_samples=0)
        return report if again is None else replace(report, local_gradient=again)

    def release_profile(self, profile: Profile, window: float) -> Profile:
        """The profile, with noise on its velocities if so configured, which were counted over `window`.

        It is told once: later questions get the same answer, which tells nothing new and leaves the rest of the budget
        to the other streams.
        """
        _require_finite("velocity", profile.velocity)
        if not self._options.protects("profile"):
            return profile
        if not 0 < window < math.inf:
            raise ConfigError(
                f"the window of a profile must be a finite number above 0, got {window}"
            )
        bounded = clipped(profile.velocity, self._options.profile_bound)
        one_sample, everything = math.sqrt(2) / window, math.sqrt(2) * self._options.profile_bound
        charge = self._charge("profile", min(one_sample, everything), everything)
        if "told" not in self._sent and self._fits([charge]):
            self._ledger.charge(charge)
            self._commit(self._ledger.snapshot())
            self._sent["told"] = np.maximum(
                bounded + charge.deviation * self.normal(len(bounded)), 0.0
            )
        if "told" not in self._sent:
            raise BudgetSpentError(
                "the privacy budget does not allow a profile any more: nothing was sent"
            )
        return replace(profile, velocity=self._sent["told"])

    def spending(self) -> Spending:
        options, delta = self._options, self._options.delta
        sample, device = (
            self._ledger.epsilon("sample", delta),
            self._ledger.epsilon("device", delta),
        )
        return Spending(options.unit, options.epsilon, delta, sample, device)

    def snapshot(self) -> State:
        return add_prefix("ledger", self._ledger.snapshot()) | self._sent

    def restore(self, state: State) -> None:
        self._ledger.restore(strip_prefix("ledger", state))
        self._sent = {name: state[name] for name in ("clean", "noisy", "told") if name in state}

    def _affordable(self, charges: list[Charge]) -> list[Charge]:
        """The charges that fit into the budget; the estimator gives way to the model, not the model to it."""
        if self._fits(charges):
            return charges
        without_estimator = [charge for charge in charges if charge.stream != "estimator"]
        if self._options.on_exhausted == "absent" or not self._fits(without_estimator):
            raise BudgetSpentError(
                f"the privacy budget of epsilon {self._options.epsilon} per {self._options.unit} is spent: "
                "nothing was sent; raise privacy.epsilon, or keep this device out"
            )
        return without_estimator

    def _fits(self, charges: list[Charge]) -> bool:
        unit, epsilon, delta = self._options.unit, self._options.epsilon, self._options.delta
        return (
            not charges
            or epsilon is None
            or self._ledger.affords(*charges, unit=unit, epsilon=epsilon, delta=delta)
        )

    def _estimator_charge(self, report: Report, order: TrainOrder) -> Charge | None:
        if report.local_gradient is None:
            return None
        _require_finite("local gradient", report.local_gradient)
        if not self._options.protects("estimator"):
            return None
        if report.gradient_samples < 1:
            raise RejectedError(
                "local gradient of no samples", f"gradient_samples is {report.gradient_samples}"
            )
        if np.linalg.norm(report.local_gradient.astype(np.float64)) > self._options.clip * (
            1 + _ROUNDING
        ):
            raise RejectedError(
                "unclipped local gradient", f"longer than privacy.clip = {self._options.clip}"
            )
        everything = 2 * self._options.clip
        charge = self._charge("estimator", everything / report.gradient_samples, everything)
        return replace(
            charge, round=order.round, resends=self._ledger.awaits_acceptance(order.accepted_round)
        )

    def _charge(self, stream: Stream, sample: float, device: float) -> Charge:
        deviation = self._multiplier * (sample if self._options.unit == "sample" else device)
        return Charge(stream, (sample / deviation) ** 2, (device / deviation) ** 2, deviation)

    def _noised(self, values: AnyArray, bound: float, deviation: float) -> FloatArray:
        """Values within the bound, with noise, brought back within it: no true vector is longer, and whatever is done
        to noisy ones costs nothing."""
        return clipped(clipped(values, bound) + deviation * self.normal(len(values)), bound)


def _require_finite(what: str, values: AnyArray) -> None:
    if not np.isfinite(values).all():
        raise RejectedError(
            f"{what} that is not finite", "it holds NaN or infinity; nothing was sent"
        )
