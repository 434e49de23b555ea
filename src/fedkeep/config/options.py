"""The tables that experiments, fleets and agents share, and those of an experiment alone."""

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import numpy as np

from fedkeep.core.bounds import check_range
from fedkeep.core.device import DeviceOptions, StoreRules
from fedkeep.core.errors import ConfigError
from fedkeep.core.protocols import Learner
from fedkeep.core.schedule import Schedule
from fedkeep.core.seeds import generator
from fedkeep.core.store import AfterUse
from fedkeep.core.targets import NumberTargets
from fedkeep.core.types import IntArray
from fedkeep.learn.losses import NumberLoss
from fedkeep.learn.models import learner_for
from fedkeep.tables import Table

_LARGEST = 2**31 - 1
"""Of counts: a slip of the pen beyond it would end in hours without an answer."""


@dataclass(frozen=True)
class StorageOptions(StoreRules):
    """`storage`: how much a device can keep, and what becomes of it."""

    capacity: int | tuple[int, ...] = 10
    """|B_c| of the paper: how many samples a device can keep; a list has a number for each device
    of a simulated fleet."""
    capacity_spread: float = 0.0
    """Simulated only: standard deviation of the logarithm of a device's capacity around
    `capacity`."""
    after_use: Literal["keep", "discount", "evict_trained_first"] = "keep"
    """What becomes of samples that were trained on: `keep` is the paper, their score is all that
    counts; `discount` lowers their rank with each use; `evict_trained_first` lets any later arrival
    of the region displace them."""
    discount: int = 1
    """Places within its region that a sample loses with each use, where `after_use` is
    "discount"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.capacity, int):
            check_range(self, "capacity", least=1)
            check_range(self, "capacity", most=_LARGEST)
        elif not self.capacity or min(self.capacity) < 1:
            raise ValueError(f"capacity must be 1 or more for each device, got {self.capacity}")
        check_range(self, "capacity_spread", least=0, below=math.inf)
        if self.capacity_spread and not isinstance(self.capacity, int):
            raise ValueError(
                "capacity_spread goes with one capacity for all: leave one of them out"
            )
        self.rule()

    def capacities(self, devices: int, seed: int) -> IntArray:
        """Give the capacity of every device of a simulated fleet.

        Parameters
        ----------
        devices : int
            How many devices there are.
        seed : int
            The experiment's, from which a spread is drawn.

        Returns
        -------
        ndarray of int, shape (C,)
            |B_c|, at least 1.

        Raises
        ------
        ConfigError
            If a list of capacities does not have one for each device.
        """
        if isinstance(self.capacity, int):
            exponents = generator(seed, "capacity").normal(0.0, 1.0, devices)
            spread = self.capacity * np.exp(self.capacity_spread * exponents)
            return np.asarray(np.maximum(1, np.rint(spread)), dtype=np.int64)
        if len(self.capacity) != devices:
            raise ConfigError(
                f"'storage.capacity' has {len(self.capacity)} numbers for {devices} devices: "
                "give one for each, or a single one for all"
            )
        return np.array(self.capacity, dtype=np.int64)

    def rule(self) -> AfterUse:
        """Return what the store does with a sample after its use."""
        return AfterUse(self.after_use, self.discount)

    def device(self, estimator: "EstimatorOptions") -> DeviceOptions:
        """Return the options of a device that these tables describe."""
        rules = {rule.name: getattr(self, rule.name) for rule in fields(StoreRules)}
        return DeviceOptions(
            **rules, gradient_from="stored" if estimator.name == "stored" else "arrivals"
        )


@dataclass(frozen=True)
class EstimatorOptions:
    """`estimator`: how the server comes to g_hat.

    `incremental` is Eq. 8, `round-mean` the mean over those that took part this round, `exact` the
    oracle: every device has the current model and the exact global gradient in every round.
    """

    name: Literal["incremental", "round-mean", "exact", "stored"] = "incremental"
    """`stored` is the ablation without estimators: participants' gradients over their stored
    samples only."""
    cold_start: Literal["none", "exact"] = "none"
    """Before the first g_hat: `none` keeps random samples; `exact` begins with every device's
    exact gradient."""
    max_age: int | None = None
    """Rounds after which a device's g_hat_c no longer counts (`incremental`); None: never."""
    exact_samples: int | None = None
    """Take exact gradients over this many samples, drawn once by the seed; None: over all."""
    normalise: bool = True
    """`incremental`: divide by the weight of the devices that have reported; false is Eq. 8 as
    printed, where those that have not yet count as zeros."""

    def __post_init__(self) -> None:
        check_range(self, "max_age", "exact_samples", least=1)


@dataclass(frozen=True)
class TrainOptions(Schedule):
    """`train`: rounds, participation and the schedule of local training."""

    learning_rate: float = 1e-3
    epochs: int = 5
    rounds: int = 100
    """Rounds of training, T of the paper."""
    participation: float = 0.1
    """|C_t| / |C|: the share of devices that takes part in a round, at least one."""
    dropout: float = 0.0
    """The share of reports that never arrive."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "rounds", least=1)
        check_range(self, "rounds", most=_LARGEST)
        check_range(self, "participation", above=0, most=1)
        check_range(self, "dropout", least=0, below=1)


@dataclass(frozen=True)
class ProfileOptions:
    """`profile`: what devices declare of their streams, and from what they know it."""

    measured: bool = False
    """Devices declare what they have counted so far, not what the data set will bring; unlimited
    storage excepted."""
    every: int = 20
    """Rounds between two declarations of what was measured; the first is in the first round."""
    window: float = 1000.0
    """Rounds over which a device counts; what came before is forgotten."""
    velocity_error: float = 0.0
    """Standard deviation of the error in each declared velocity, as a share of it; not with
    `measured`, which has errors of its own."""

    def __post_init__(self) -> None:
        check_range(self, "every", least=1)
        check_range(self, "window", above=0)
        check_range(self, "velocity_error", least=0, below=math.inf)
        if self.measured and self.velocity_error:
            raise ValueError(
                "velocity_error is an error of known velocities: leave it out with measured = true"
            )


@dataclass(frozen=True)
class CorrectionOptions:
    """`correction`: published corrections of client drift, as baselines; simulated only."""

    name: Literal["none", "momentum", "fedvarp", "scaffold"] = "none"
    """Which one: momentum on the server, FedVARP's memory of updates, SCAFFOLD's control variates;
    or none."""


@dataclass(frozen=True)
class RegionOptions:
    """`regions`: how the distribution is divided among the devices of a coordinated fleet."""

    name: Literal["label"] = "label"
    """What a region is: `label` is the paper; `k-means` and `hierarchical` cluster them
    (`pip install 'fedkeep[plan]'`); or `module:Class` with a `count` and an `assign` of your own,
    and an `agree` where they depend on the data."""


@dataclass(frozen=True)
class RecordOptions:
    """`record`: what is measured along the way, and how often the run's state is saved."""

    every: int = 20
    """Rounds between evaluations."""
    devices: int = 1
    """How many devices' stores are recorded at each evaluation, to be looked at."""
    accuracy: Literal["pooled", "devices"] = "pooled"
    """`pooled` is over all test samples, so that a device counts by how many it has; `devices` is
    the paper's mean over the devices."""
    checkpoint_every: int = 100
    """Rounds after which a run's state is saved, at the next evaluation; `--resume` goes on from
    there."""
    prequential: bool = False
    """Also test, then train: the global model of each round on all that arrives in it, before
    anybody trains on it."""

    def __post_init__(self) -> None:
        check_range(self, "every", "checkpoint_every", least=1)
        check_range(self, "devices", least=0)


@dataclass(frozen=True)
class MetricsOptions:
    """`metrics`: where Prometheus finds the numbers of an agent, or of a fleet's server."""

    port: int = 0
    """0: no endpoint."""
    host: str = "127.0.0.1"
    insecure: bool = False
    """Whether an agent may serve them beyond this machine, without encryption or a password."""

    def __post_init__(self) -> None:
        check_range(self, "port", least=0, most=65535)


def learner_of(
    model: Table, shape: tuple[int, ...], labels: int, targets: NumberTargets | None = None
) -> Learner:
    """Build the model of `[model]`: an exported file by `path`, else by `name` ours or torch's.

    On real devices the last layer alone is valued unless `last_layers` differs; 0 is all of them.

    >>> learner_of({"name": "softmax"}, shape=(30,), labels=10).size
    310
    """
    options = dict(model)
    path, sha256 = options.pop("path", None), options.pop("sha256", None)
    options.pop("load_seconds", None)
    name = str(options.pop("name", "softmax"))
    if path is None:
        options["last_layers"] = options.get("last_layers", 1) or None
        return learner_for(name, shape, labels, targets, **options)
    if options:
        raise ConfigError(
            f"a model from a file has no option '{min(options)}': remove it from [model]"
        )
    from fedkeep.learn.onnx_learner import OnnxLearner

    learner = OnnxLearner(Path(str(path)), None if sha256 is None else str(sha256))
    if isinstance(learner.loss, NumberLoss) != (targets is not None):
        made = "for classes" if targets is not None else "for numbers"
        meant = "classes" if targets is None else "numbers"
        raise ConfigError(
            f"the model {path} was exported {made}, and the targets are {meant}: set targets as "
            "it was made for, or write it by `fedkeep export --loss`"
        )
    return learner
