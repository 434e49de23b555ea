"""The `[privacy]` table of a configuration."""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fedkeep.core.aggregation import Aggregator
from fedkeep.core.bounds import check_range
from fedkeep.core.errors import ConfigError
from fedkeep.privacy.gaussian import budget_cost

Unit: TypeAlias = Literal["sample", "device"]
Stream: TypeAlias = Literal["estimator", "model", "profile"]
"""The three things that leave a device."""


@dataclass(frozen=True)
class PrivacyOptions:
    """What is protected, how far, and what happens at the end of the budget.

    Without an `epsilon` there is no noise.
    """

    epsilon: float | None = None
    """The whole budget of a device, over all that `protect` names."""
    delta: float = 1e-5
    """The probability with which the bound `epsilon` may fail."""
    unit: Unit = "sample"
    """What the noise hides: one sample, or all samples of a device."""
    protect: tuple[Stream, ...] = ("estimator",)
    """What leaves a device with noise only: "estimator", "model", "profile"."""
    clip: float = 1.0
    """Clipping norm of the gradient of one sample."""
    model_clip: float = 1.0
    """Clipping norm of a model update."""
    profile_bound: float = 100.0
    """Clipping norm of a velocity vector; used where the unit is a device."""
    planned_participations: int = 1
    """Participations that the budget is planned for.

    Each costs a model update and, where the unit is a device, an estimator.
    """
    retransmissions: int = 0
    """How often an estimator may be sent again after a lost reply; then it is withheld."""
    on_exhausted: Literal["without-estimator", "absent"] = "without-estimator"
    """What a device does with its budget spent: take part without an estimator, or not at all."""
    secure_aggregation: bool = False
    """Whether the server sees only sums of reports."""
    sum_threshold: float = 0.5
    """A sum needs more than this share of the devices asked for it.

    At least half, so that one round cannot have two sums.
    """
    min_cohort: int | None = None
    """The fewest devices in a sum; None: three registered `members`, or else two."""
    members: str = ""
    """On a device: the directory of the fleet's public node keys, which a sum is limited to."""
    member_key: str = ""
    """On a device: its own node key, which signs for it."""
    profiles: Literal["plain", "sealed", "homomorphic"] = "plain"
    """Who reads a device's profile: the server; the key-holder alone, which plans; or nobody, where
    the server ranks ciphertexts for the key-holder (simulated fleets, `fedkeep[homomorphic]`)."""
    encrypted_profiles: bool = False
    """An alias: true is `profiles = "sealed"`."""
    public_key: str = ""
    """On a device: the key holder's public key, as `fedkeep keyholder show` prints it."""

    def __post_init__(self) -> None:
        check_range(
            self,
            "epsilon",
            "clip",
            "model_clip",
            "profile_bound",
            "planned_participations",
            above=0,
            below=math.inf,
        )
        check_range(self, "retransmissions", least=0)
        check_range(self, "sum_threshold", least=0.5, most=1)
        check_range(self, "min_cohort", least=2)
        check_range(self, "delta", above=0, below=1)
        if self.encrypted_profiles and self.profiles == "homomorphic":
            raise ValueError('encrypted_profiles is profiles = "sealed": leave out one of the two')
        if bool(self.members) != bool(self.member_key):
            raise ValueError("members and member_key belong together: name both, or none")
        if self.epsilon is not None and not self.protect:
            raise ValueError(
                'protect must name at least one of "estimator", "model", "profile" '
                "where epsilon is set"
            )
        if len(set(self.protect)) != len(self.protect):
            raise ValueError(f"protect must name each stream once, got {list(self.protect)}")

    @property
    def profile_protection(self) -> Literal["plain", "sealed", "homomorphic"]:
        """What `profiles`, or its alias, says."""
        return "sealed" if self.encrypted_profiles and self.profiles == "plain" else self.profiles

    def protects(self, stream: Stream) -> bool:
        """Whether this stream leaves the device with noise only."""
        return self.epsilon is not None and stream in self.protect

    @property
    def counts_samples(self) -> bool:
        """Whether a sample that enters two estimators must be charged for both."""
        return self.unit == "sample" and self.protects("estimator")

    @property
    def least_in_sum(self) -> int:
        """The fewest devices, this one included, with which it is in a sum."""
        return self.min_cohort or (3 if self.members else 2)

    def threshold(self, asked: int) -> int:
        """How many of the devices asked must stay to the end of a secure sum."""
        return min(asked, int(self.sum_threshold * asked) + 1)

    def noise_multiplier(self) -> float:
        """Return noise over sensitivity, equal for all releases, so that the planned ones fit.

        Planned are, per unit, as many estimators and models as participations, and one profile.
        """
        if self.epsilon is None:
            raise ConfigError("privacy.epsilon is not set, so there is no noise to calibrate")
        estimators = (
            1 + self.retransmissions if self.unit == "sample" else self.planned_participations
        )
        planned = {"estimator": estimators, "model": self.planned_participations, "profile": 1}
        return math.sqrt(
            sum(planned[stream] for stream in self.protect) / budget_cost(self.epsilon, self.delta)
        )


def refuse_conflicts(options: PrivacyOptions, aggregation: Aggregator) -> None:
    """Reject a combination that cannot work: a robust mean over sums that hide their parts."""
    if options.secure_aggregation and not aggregation.works_on_sums():
        raise ConfigError(
            f'privacy.secure_aggregation and aggregation "{aggregation.label()}" '
            "exclude each other: a robust mean must see single reports, "
            "which secure aggregation hides; drop one of the two"
        )
