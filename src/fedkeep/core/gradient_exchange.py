"""What devices and server tell each other of gradients: nothing, local mean gradients, or gists.

Both halves of each kind stand here: what a device sends, how long it is, how the server merges it,
and what differential privacy may promise for it.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedkeep.core.errors import ConfigError
from fedkeep.core.gist import Gist, GistOptions
from fedkeep.core.gradients import (
    GivenEstimator,
    GlobalEstimator,
    GradientAccumulator,
    LocalGradientEstimator,
    global_estimator,
)
from fedkeep.core.gradients.layout import GradientLayout
from fedkeep.core.policy import SelectionPolicy
from fedkeep.core.protocols import DescribedState, GradientProbe, Learner, PerSampleGradients
from fedkeep.core.types import Batch, IntArray, TrainOrder, Vector

GradientSource = Literal["arrivals", "stored"]


class GradientSender:
    """The device's half of an exchange; this one sends nothing.

    A participation calls `settle`, `prepare` and, once the device has trained, `message`. What is
    sent is read last, so that nothing leaves of a sample that was erased while the device trained.
    """

    sums_arrivals: bool = False
    """Whether the device's own accumulator of arrivals is needed."""

    @property
    def parts(self) -> dict[str, DescribedState]:
        """What must outlive a restart, by the name it has in the device's state."""
        return {}

    def add(self, measurements: PerSampleGradients, regions: IntArray) -> None:
        """Count arrivals, where they are summed in another way than the device sums them."""

    def settle(self, accepted_round: int | None) -> None:
        """Drop what the server has accepted."""

    def prepare(
        self, order: TrainOrder, probe: GradientProbe, batch: Batch, arrivals: GradientAccumulator
    ) -> None:
        """Fix what is to be sent, before the arrivals since the last model are cleared.

        Parameters
        ----------
        order : TrainOrder
            The order that the device follows.
        probe : GradientProbe
            The order's model.
        batch : Batch
            What is stored.
        arrivals : GradientAccumulator
            The gradients of all arrivals under the model that the device had.
        """

    def message(self, gist: Gist | None) -> tuple[Vector | None, int]:  # noqa: ARG002
        """Give the vector to send and the number of samples behind it."""
        return None, 0

    def reset(self) -> None:
        """Drop all that was summed up of samples."""


class LocalGradientSender(GradientSender):
    """Sends g_hat_c, the mean gradient over all arrivals since the last model (Eq. 7).

    Parameters
    ----------
    size : int
        The length of a gradient.
    regions : int
        Y, the number of regions.
    clip : float, optional
        The length to which each sample's gradient is clipped before it counts.
    """

    def __init__(self, size: int, regions: int, clip: float | None) -> None:
        self._estimator = LocalGradientEstimator(size)
        self._clipped = None if clip is None else GradientAccumulator(size, regions, clip)
        self.sums_arrivals = clip is None

    @property
    def parts(self) -> dict[str, DescribedState]:
        """Give the stateful parts."""
        if self._clipped is None:
            return {"estimator": self._estimator}
        return {"estimator": self._estimator, "told": self._clipped}

    def add(self, measurements: PerSampleGradients, regions: IntArray) -> None:
        """Count arrivals in the clipped sum."""
        if self._clipped is not None:
            self._clipped.add(measurements, regions)

    def settle(self, accepted_round: int | None) -> None:
        """Drop the pending estimate if the server has accepted it."""
        self._estimator.settle(accepted_round)

    def prepare(
        self,
        order: TrainOrder,
        probe: GradientProbe,  # noqa: ARG002 - nothing stored is measured
        batch: Batch,  # noqa: ARG002
        arrivals: GradientAccumulator,
    ) -> None:
        """Fix what is to be sent."""
        counted = arrivals if self._clipped is None else self._clipped
        self._estimator.freeze(counted, order.round)
        if self._clipped is not None:
            self._clipped.clear()

    def message(self, gist: Gist | None) -> tuple[Vector | None, int]:  # noqa: ARG002
        """Give the vector to send and the number of samples behind it."""
        return self._estimator.pending

    def reset(self) -> None:
        """Drop what was summed up."""
        self._estimator.drop()
        if self._clipped is not None:
            self._clipped.clear()


class StoredGradientSender(GradientSender):
    """Sends the mean gradient of what is stored: the ablation without a local estimator."""

    def __init__(self) -> None:
        self._message: tuple[Vector | None, int] = (None, 0)

    def prepare(
        self,
        order: TrainOrder,  # noqa: ARG002
        probe: GradientProbe,
        batch: Batch,
        arrivals: GradientAccumulator,  # noqa: ARG002
    ) -> None:
        """Fix what is to be sent."""
        self._message = (
            (probe.measure(batch).mean_gradient(), len(batch)) if len(batch) else (None, 0)
        )

    def message(self, gist: Gist | None) -> tuple[Vector | None, int]:  # noqa: ARG002
        """Give the vector to send and the number of samples behind it."""
        return self._message

    def reset(self) -> None:
        """Drop what was summed up."""
        self._message = (None, 0)


class GistSender(GradientSender):
    """Sends the device's gist, as it stands after the participation.

    Parameters
    ----------
    clip : float, optional
        The length to which the gist as a whole is clipped; it counts as one sample then.
    """

    def __init__(self, clip: float | None) -> None:
        self._clip = clip
        self._count = 0

    def prepare(
        self,
        order: TrainOrder,  # noqa: ARG002
        probe: GradientProbe,  # noqa: ARG002
        batch: Batch,  # noqa: ARG002
        arrivals: GradientAccumulator,
    ) -> None:
        """Fix what is to be sent."""
        self._count = arrivals.count if self._clip is None else 1

    def message(self, gist: Gist | None) -> tuple[Vector | None, int]:
        """Give the vector to send and the number of samples behind it."""
        vector = None if gist is None else gist.vector()
        if vector is None:
            return None, 0
        if self._clip is not None:
            norm = max(float(np.linalg.norm(vector)), 1e-30)
            vector = (vector * min(1.0, self._clip / norm)).astype(np.float32)
        return vector, self._count


class GradientExchange(ABC):
    """What devices and server tell each other of gradients, beside the models."""

    sent: ClassVar[str]
    """What leaves a device beside its profile, in words."""
    corrects_drift: ClassVar[bool] = False
    """Whether the fleet's vector comes back to turn local steps towards the fleet."""

    def size(self, learner: Learner) -> int:
        """Give the length of the vectors that go up and come down."""
        return learner.gradient_size

    def layout(self, learner: Learner) -> GradientLayout | None:  # noqa: ARG002
        """Give the layout of the vectors; None where they are gradients number by number."""
        return None

    @abstractmethod
    def sender(self, learner: Learner, regions: int, clip: float | None) -> GradientSender:
        """Make the device's half.

        Parameters
        ----------
        learner : Learner
            What measures the device's samples.
        regions : int
            Y, the number of regions.
        clip : float, optional
            The sensitivity that the noise of differential privacy is made for; None without noise.
        """

    def estimator(
        self, name: str, max_age: int | None = None, *, normalise: bool = True
    ) -> GlobalEstimator:
        """Make the server's half, which merges what devices send (Eq. 8).

        Parameters
        ----------
        name : str
            `estimator.name` of a configuration; `exact` is given from elsewhere, by an oracle.
        max_age : int, optional
            Rounds after which what a device sent no longer counts.
        normalise : bool
            Whether Eq. 8 is divided by the weight that it covers, or by that of the whole fleet.
        """
        if name == "exact":
            return GivenEstimator()
        return global_estimator(name, max_age, normalise=normalise)

    def fleet_gradient(self, order: TrainOrder) -> Vector | None:  # noqa: ARG002
        """Give the vector of an order towards which local steps turn; None if they do not."""
        return None

    @abstractmethod
    def check_sample_privacy(self) -> None:
        """Refuse noise for single samples where a sample is in the vectors of many rounds.

        Raises
        ------
        ConfigError
            If a sample's gradient may be sent more than once.
        """


@dataclass(frozen=True)
class NoExchange(GradientExchange):
    """Models alone travel, as in federated averaging."""

    sent = "models"

    def sender(self, learner: Learner, regions: int, clip: float | None) -> GradientSender:  # noqa: ARG002
        """Make the device's half."""
        return GradientSender()

    def estimator(
        self,
        name: str,  # noqa: ARG002
        max_age: int | None = None,  # noqa: ARG002
        *,
        normalise: bool = True,  # noqa: ARG002
    ) -> GlobalEstimator:
        """Make the server's half."""
        return GivenEstimator()

    def check_sample_privacy(self) -> None:
        """Refuse nothing: no gradient is sent."""


@dataclass(frozen=True)
class LocalGradients(GradientExchange):
    """ODE's: devices send g_hat_c (Eq. 7), the server sends g_hat (Eq. 8).

    Parameters
    ----------
    source : {"arrivals", "stored"}
        What g_hat_c is a mean over; `stored` is the ablation without a local estimator.

    References
    ----------
    Gong et al., ODE, WWW 2023, Eqs. 7 and 8.
    """

    sent = "models and local gradients"
    source: GradientSource = "arrivals"

    def sender(self, learner: Learner, regions: int, clip: float | None) -> GradientSender:
        """Make the device's half."""
        if self.source == "stored":
            return StoredGradientSender()
        return LocalGradientSender(learner.gradient_size, regions, clip)

    def check_sample_privacy(self) -> None:
        """Refuse noise for single samples."""
        if self.source == "stored":
            raise ConfigError(
                "mean gradients of stored samples send a sample many times:"
                " set privacy.unit = 'device'"
            )


@dataclass(frozen=True)
class SharedGist(GradientExchange):
    """Devices send their gists, and the server sends the fleet's.

    Parameters
    ----------
    options : GistOptions
        Which layers gists cover, and whether they are sketches.

    References
    ----------
    docs/gist.md
    """

    sent = "models and gists"
    corrects_drift = True
    options: GistOptions = GistOptions("shared")

    def size(self, learner: Learner) -> int:
        """Give the length of the vectors."""
        return self.options.layout(learner).size

    def layout(self, learner: Learner) -> GradientLayout | None:
        """Give the layout of the vectors; None where gists are kept whole."""
        layout = self.options.layout(learner)
        return None if layout.whole else layout

    def sender(self, learner: Learner, regions: int, clip: float | None) -> GradientSender:  # noqa: ARG002
        """Make the device's half."""
        return GistSender(clip)

    def fleet_gradient(self, order: TrainOrder) -> Vector | None:
        """Give the order's vector, towards which local steps turn."""
        return order.global_gradient

    def check_sample_privacy(self) -> None:
        """Refuse noise for single samples."""
        raise ConfigError(
            "a shared gist tells of a sample in many rounds:"
            " set privacy.unit = 'device', or gist.mode = 'local'"
        )


def gradient_exchange(
    policy: SelectionPolicy, gist: GistOptions, source: GradientSource = "arrivals"
) -> GradientExchange:
    """Choose what is exchanged, by what the policy and the gist need.

    Parameters
    ----------
    policy : SelectionPolicy
        The policy by which samples are selected.
    gist : GistOptions
        Whether devices keep a gist and send it.
    source : {"arrivals", "stored"}
        What a local mean gradient is taken over.

    Raises
    ------
    ConfigError
        If the fleet's gist would be shorter than the gradient that the policy scores by.

    Examples
    --------
    >>> from fedkeep.core.policies.fifo import Fifo
    >>> from fedkeep.core.policies.ode import Ode
    >>> gradient_exchange(Fifo(), GistOptions()), gradient_exchange(Ode(), GistOptions())
    (NoExchange(), LocalGradients(source='arrivals'))
    """
    if gist.mode == "shared":
        if gist.rank is not None and policy.uses_global_gradient:
            raise ConfigError(
                "gist.rank would make a sketch of the global gradient that the policy scores by:"
                " set gist.mode = 'local'"
            )
        if gist.last_layers is not None and policy.uses_global_gradient:
            raise ConfigError(
                "gist.last_layers would shorten the global gradient that the policy scores by:"
                " set model.last_layers"
            )
        return SharedGist(gist)
    return LocalGradients(source) if policy.uses_global_gradient else NoExchange()
