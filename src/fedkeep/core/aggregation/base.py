"""What every aggregation rule is: the frozen options of one, and the method that merges a round."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar, dataclass_transform

import numpy as np

from fedkeep.core.aggregation.robust.statistics import UpdateStatistics
from fedkeep.core.aggregation.rows import UpdateRows
from fedkeep.core.errors import ConfigError
from fedkeep.core.registry import Registry
from fedkeep.core.types import DeviceId, FloatArray, Report, Vector


@dataclass(frozen=True, eq=False)
class UpdateSum:
    """A round's updates as secure aggregation shows them: only what they add up to."""

    updates: FloatArray
    """The updates, each times its weight (`fednova`: its weight per local step), (P,)."""
    weight: float
    steps: float = 0.0
    """The local steps, each times its weight; `fednova` alone reads them."""


@dataclass(frozen=True, eq=False)
class MergedReports:
    """A merged round: the new model, and what of the reports went into it."""

    model: Vector
    reports: Mapping[DeviceId, Report]
    """The reports with the weights by which they counted, and without the local gradients that do
    not; their models are `model_of`."""
    filtered: tuple[DeviceId, ...] = ()
    """Devices whose updates were left out."""
    counted_models: Mapping[DeviceId, Callable[[], Vector]] = field(default_factory=dict)
    """Of devices whose models a rule changed, what makes them: together they are large."""

    def model_of(self, device: DeviceId) -> Vector:
        """Return a device's model as it counted."""
        if device in self.counted_models:
            return self.counted_models[device]()
        return self.reports[device].model


class Aggregator(ABC):
    """A rule that makes a round's local models into the global model.

    A subclass overrides `aggregate`, and is a frozen dataclass whose fields are the keys of its
    `aggregation` table. Class attributes say which checks of reports and local gradients it needs.

    Examples
    --------
    >>> class First(Aggregator):
    ...     def aggregate(self, model, reports):
    ...         return reports[0].model if reports else model
    >>> First().aggregate(np.zeros(1, np.float32), []).tolist(), First.works_on_sums()
    ([0.0], False)
    """

    name: ClassVar[str] = ""
    """The registered name; empty for a custom class."""
    requires_limits: ClassVar[bool] = False
    """Whether it cannot run with `limits.enabled = false`."""
    verifies_gradients: ClassVar[bool] = False
    """Whether a local gradient counts only beside an update of its round that agrees with it."""
    gradient_ratio: float = 10.0
    """Local gradients longer than so many times the median are clipped to that."""
    per_step: ClassVar[bool] = False
    """Whether a sum for it is of updates per local step."""

    @abstractmethod
    def aggregate(self, model: Vector, reports: Sequence[Report]) -> Vector:
        """Merge the local models of one round, with no memory of earlier ones.

        Parameters
        ----------
        model : Vector
            The global model that the round began with.
        reports : Sequence[Report]
            Valid reports, at most one a device; one of weight 0 does not move the model.

        Returns
        -------
        Vector
            The new global model: `model` if no report carries weight.
        """

    def merge(
        self, model: Vector, reports: Mapping[DeviceId, Report], statistics: UpdateStatistics
    ) -> MergedReports:
        """Merge the reports of one round, with what earlier rounds showed.

        Parameters
        ----------
        model : Vector
            The global model that the round began with.
        reports : Mapping[DeviceId, Report]
            Valid reports in the order of their devices' ids.
        statistics : UpdateStatistics
            The fleet's earlier updates; a rule with memory keeps it there.
        """
        del statistics  # rules without memory do not use it
        return MergedReports(self.aggregate(model, list(reports.values())), reports)

    def apply(self, model: Vector, total: UpdateSum) -> Vector:
        """Return the model that `aggregate` would, from the reports' sum alone.

        Raises
        ------
        ConfigError
            If the rule must see single reports.
        """
        del model, total
        raise ConfigError(
            f'aggregation "{self.label()}" must see single reports: it cannot work on their sum'
        )

    @classmethod
    def works_on_sums(cls) -> bool:
        """Say whether the class that defines this rule also defines it for sums."""
        rule = next(c for c in cls.__mro__ if {"aggregate", "step"} & vars(c).keys())
        return rule not in (Aggregator, UpdateRule) and "apply" in vars(rule)

    @classmethod
    def label(cls) -> str:
        """Return the name that messages call the rule by."""
        return str(vars(cls).get("name", cls.__name__))


AGGREGATORS: Registry[type[Aggregator]] = Registry("aggregation", base=Aggregator)
"""The rules by their names in a configuration."""
Rule = TypeVar("Rule", bound=type[Aggregator])


@dataclass_transform(frozen_default=True)
def aggregation(name: str) -> Callable[[Rule], Rule]:
    """Register a class under a name, as a frozen dataclass whose fields are keys of its table.

    Examples
    --------
    >>> AGGREGATORS["trimmed"](trim=0.2)
    Trimmed(trim=0.2)
    """

    def register(rule: Rule) -> Rule:
        rule.name = name
        return AGGREGATORS.register(name)(rule)

    return register


@dataclass(frozen=True, eq=False)
class RoundUpdates:
    """The updates of the n reports that carry weight, side by side."""

    vectors: FloatArray
    """(n, P)."""
    weights: FloatArray
    """(n,), adding up to 1."""
    steps: FloatArray
    """Local steps, (n,)."""


class UpdateRule(Aggregator):
    """A rule that is a function of updates, weights and steps; a subclass overrides `step`."""

    coordinatewise: ClassVar[bool] = False
    """Whether `step` treats each parameter by itself; large models are merged in parts then."""

    @abstractmethod
    def step(self, updates: RoundUpdates) -> FloatArray:
        """Return the step of the global model, (P,), from at least one update."""

    def aggregate(self, model: Vector, reports: Sequence[Report]) -> Vector:
        """Move the model by `step` of the reports that carry weight."""
        counted = [r for r in reports if r.weight > 0]
        if not counted:
            return model
        steps = np.array([r.steps for r in counted], dtype=np.float64)
        weights = np.array([r.weight for r in counted])
        return self.moved(model, UpdateRows.of(model, counted), weights, steps)

    def moved(
        self, model: Vector, updates: UpdateRows, weights: FloatArray, steps: FloatArray
    ) -> Vector:
        """Return the model after `step`, from at least one update of a weight above 0."""
        weights = weights / weights.sum()
        blocks = updates.column_blocks() if self._works_in_parts() else updates.whole()
        new = np.empty(len(model), dtype=np.float32)
        for part, vectors in blocks:
            step = self.step(RoundUpdates(vectors, weights, steps))
            new[part] = model[part].astype(np.float64) + step
        return new

    @classmethod
    def _works_in_parts(cls) -> bool:
        """Say whether the class that defines `step` declares it coordinatewise."""
        rule = next(c for c in cls.__mro__ if "step" in vars(c))
        return bool(vars(rule).get("coordinatewise", False))
