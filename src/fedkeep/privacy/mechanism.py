"""The Gaussian mechanism of a device: each release is checked, charged, committed and noised."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from fedkeep.core.errors import ConfigError, RejectedError
from fedkeep.core.gradients.codec import Encoding, pack, unpack
from fedkeep.core.state import add_prefix, strip_prefix
from fedkeep.core.types import AnyArray, FloatArray, Profile, Report, State, TrainOrder
from fedkeep.privacy.accountant import BudgetSpentError, Charge, PrivacyLedger
from fedkeep.privacy.gaussian import NormalSource, clipped, system_normal
from fedkeep.privacy.options import PrivacyOptions, Stream, Unit

_ROUNDING = 1e-3
"""By how much a float32 mean of clipped gradients may exceed the clip."""


@dataclass(frozen=True)
class Spending:
    """The privacy ledger of a device in plain numbers."""

    unit: Unit
    """Which of the two epsilons the budget bounds."""
    budget: float | None
    """The epsilon that may be spent; None: no limit."""
    delta: float
    sample_epsilon: float
    """Spent with respect to the most exposed sample."""
    device_epsilon: float
    """Spent with respect to all samples of the device."""

    @property
    def spent(self) -> float:
        """The epsilon that counts against the budget."""
        return self.sample_epsilon if self.unit == "sample" else self.device_epsilon

    @property
    def left(self) -> float | None:
        """The epsilon that is left of the budget; None without a budget."""
        return None if self.budget is None else max(0.0, self.budget - self.spent)


class DPMechanism:
    """Adds noise to what leaves a device, and withholds what exceeds the privacy budget.

    Neighbours are data sets in which one sample, or all samples of a device, are replaced. The
    counts that a report carries in the clear (samples, steps, weight) are public.

    Parameters
    ----------
    options : PrivacyOptions
        Budget, unit, clipping norms and protected streams.
    ledger : PrivacyLedger
        What has been spent so far.
    commit : callable
        Makes a snapshot of the ledger durable; returns only once it is, and raises if it cannot.
    normal : callable, optional
        Source of standard normal numbers; by default the operating system's.
    encoding : {"float32", "float16", "int8", "int4"}
        In which numbers a gradient is sent: it is rounded after the noise, which costs nothing.

    References
    ----------
    docs/privacy.md; Dwork and Roth, The algorithmic foundations of differential privacy, 2014.

    Examples
    --------
    >>> from fedkeep.core.types import LocalTraining
    >>> options = PrivacyOptions(epsilon=2.0, clip=1.0)
    >>> mechanism = DPMechanism(options, PrivacyLedger(), commit=lambda ledger: None)
    >>> training = LocalTraining(learning_rate=0.1, epochs=1)
    >>> order = TrainOrder(0, np.zeros(2, dtype=np.float32), None, training)
    >>> gradient = np.array([0.6, 0.8], dtype=np.float32)
    >>> report = Report(0, order.model, 4.0, 1, 4, gradient, gradient_samples=50)
    >>> released = mechanism.release(report, order)
    >>> np.array_equal(released.local_gradient, gradient)  # it has noise
    False
    >>> round(mechanism.spending().spent, 3)
    2.0
    """

    def __init__(
        self,
        options: PrivacyOptions,
        ledger: PrivacyLedger,
        commit: Callable[[State], None],
        normal: NormalSource = system_normal,
        encoding: Encoding = "float32",
    ) -> None:
        self._encoding = encoding
        self._options, self._ledger, self._commit, self.normal = options, ledger, commit, normal
        self._multiplier = 0.0 if options.epsilon is None else options.noise_multiplier()
        self._sent: State = {}
        """The last estimate, `clean` and `noisy`, and the profile `told`; repeating is free."""

    def release(self, report: Report, order: TrainOrder) -> Report:
        """Return what may be sent of a report: with noise, or without a gradient estimate.

        An estimate that was sent before and whose reply was lost is sent again with the same
        noise, which reveals nothing new and costs nothing.

        Raises
        ------
        BudgetSpentError
            If the budget allows nothing.
        RejectedError
            If a vector is not finite, or a gradient exceeds the clipping norm.
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
            # The whole update is clipped, so one sample can change it as much as all together.
            whole = 2 * options.model_clip
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
            noisy = self._noised(gradient, options.clip, estimator.deviation).astype(np.float32)
            again = unpack(pack(noisy, self._encoding, seed=order.round), len(noisy))
            self._sent |= {"clean": gradient.copy(), "noisy": again}
        if again is None and options.protects("estimator"):
            return replace(report, local_gradient=None, gradient_samples=0)
        return report if again is None else replace(report, local_gradient=again)

    def release_profile(self, profile: Profile, window: float) -> Profile:
        """Return the profile, with noise on its velocities where profiles are protected.

        It is charged once: later requests get the same answer, which reveals nothing new and
        leaves the rest of the budget to the other streams.

        Parameters
        ----------
        profile : Profile
            Capacity and velocities.
        window : float
            Length of the time over which the velocities were counted.

        Raises
        ------
        BudgetSpentError
            If the budget does not allow a first profile.
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
        """Return what has been spent so far."""
        options, delta = self._options, self._options.delta
        sample, device = (
            self._ledger.epsilon("sample", delta),
            self._ledger.epsilon("device", delta),
        )
        return Spending(options.unit, options.epsilon, delta, sample, device)

    def snapshot(self) -> State:
        """Return the ledger and what may be sent again."""
        return add_prefix("ledger", self._ledger.snapshot()) | self._sent

    def restore(self, state: State) -> None:
        """Restore what `snapshot` returned."""
        self._ledger.restore(strip_prefix("ledger", state))
        self._sent = {name: state[name] for name in ("clean", "noisy", "told") if name in state}

    def _affordable(self, charges: list[Charge]) -> list[Charge]:
        """Return the charges that fit into the budget; the estimate is dropped before the model."""
        if self._fits(charges):
            return charges
        without_estimator = [charge for charge in charges if charge.stream != "estimator"]
        if self._options.on_exhausted == "absent" or not self._fits(without_estimator):
            raise BudgetSpentError(
                f"the privacy budget of epsilon {self._options.epsilon} per {self._options.unit} "
                "is spent: nothing was sent; raise privacy.epsilon, or keep this device out"
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
        """Clip, add noise, and clip again: post-processing of noisy values costs nothing."""
        return clipped(clipped(values, bound) + deviation * self.normal(len(values)), bound)


def _require_finite(what: str, values: AnyArray) -> None:
    if not np.isfinite(values).all():
        raise RejectedError(
            f"{what} that is not finite", "it holds NaN or infinity; nothing was sent"
        )
