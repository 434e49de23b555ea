"""The server: plans, chooses participants and merges their reports (steps 1, 2, 7, 8)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedkeep.core.aggregation import Aggregator, FedAvg, UpdateSum
from fedkeep.core.aggregation.pipeline import UpdatePipeline
from fedkeep.core.claims import ClaimAudit, cap_profiles
from fedkeep.core.errors import RejectedError, RejectionReason
from fedkeep.core.gradients import Estimate, GivenEstimator, GlobalEstimator
from fedkeep.core.gradients.layout import GradientLayout
from fedkeep.core.planning.greedy import Coordinator
from fedkeep.core.planning.plan import Plan
from fedkeep.core.planning.profiles import FleetProfiles
from fedkeep.core.protocols import Stateful
from fedkeep.core.rounds import Rejection, RoundSummary
from fedkeep.core.schedule import Schedule
from fedkeep.core.screening import Limits, screen_profile, screen_sum
from fedkeep.core.seeds import generator
from fedkeep.core.state import (
    add_prefix,
    put_table,
    restore_parts,
    snapshot_parts,
    strip_prefix,
    take_table,
)
from fedkeep.core.types import DeviceId, Profile, Report, State, TrainOrder, Vector

STALENESS = 50
"""Rounds after which a late g_hat_c counts no more, unless a server is given another number."""
_SUM_RATIO, _SUMMAND_RATIO = 3.0, 30.0
"""How many times the usual length a sum's mean update may have, and a single update in it."""
_WEIGHT_SLACK = 1.001
"""For the rounding of a weight that is exactly what the plan allows."""


@dataclass(eq=False)
class _OpenRound:
    round: int
    participants: tuple[DeviceId, ...]
    reports: dict[DeviceId, Report] = field(default_factory=dict)
    late: dict[DeviceId, Report] = field(default_factory=dict)
    """Reports of earlier rounds, of which the local gradient alone counts."""
    rejections: list[Rejection] = field(default_factory=list)

    def reject(self, device: DeviceId, reason: str, detail: str) -> Rejection:
        self.rejections.append(Rejection(device, reason, detail))
        return self.rejections[-1]


class Server:
    """The one place where the global model, g_hat and the plan change; all of them are read-only.

    Parameters
    ----------
    model : Vector
        The first global model, (P,).
    gradient_size : int
        The length of a local gradient.
    regions : int
        Y, how many regions the plan divides.
    schedule : Schedule
        How devices train.
    coordinator : Coordinator
        Makes the plan (Eq. 9).
    estimator : GlobalEstimator
        Makes g_hat of the local gradients (Eq. 8).
    aggregation : Aggregator
        Makes the next model of the local ones (Eq. 2).
    limits : Limits
        How far reports and profiles may stray.
    seed : int
        Of the selection of participants.
    staleness : int
        Rounds after which a late local gradient counts no more.
    gradient_layout : GradientLayout, optional
        How local gradients are represented; None: number by number.
    noisy_gradients : bool
        Whether devices add noise to them.

    Raises
    ------
    ConfigError
        If the aggregation does not run with these limits.

    Examples
    --------
    >>> from fedkeep.core.planning.greedy import Greedy
    >>> from fedkeep.core.gradients import IncrementalEstimator
    >>> server = Server(
    ...     model=np.zeros(2, dtype=np.float32), gradient_size=2, regions=1,
    ...     schedule=Schedule(0.1, epochs=1),
    ...     coordinator=Greedy(clients_per_label=1), estimator=IncrementalEstimator(),
    ... )
    >>> profiles = {device: Profile(capacity=4, velocity=np.ones(1)) for device in (0, 1)}
    >>> plan, rejected = server.coordinate(profiles)
    >>> orders = server.open_round([0, 1])
    >>> for device, step in ((0, 1.0), (1, 3.0)):
    ...     moved = orders[device].model + np.float32(step)
    ...     report = Report(0, moved, weight=4.0, steps=1, samples=4, local_gradient=None)
    ...     _ = server.receive(device, report)
    >>> server.close_round().accepted
    (0, 1)
    >>> server.model.tolist()
    [2.0, 2.0]
    """

    def __init__(
        self,
        *,
        model: Vector,
        gradient_size: int,
        regions: int,
        schedule: Schedule,
        coordinator: Coordinator,
        estimator: GlobalEstimator,
        aggregation: Aggregator = FedAvg(),
        limits: Limits = Limits(),
        seed: int = 0,
        staleness: int = STALENESS,
        gradient_layout: GradientLayout | None = None,
        noisy_gradients: bool = False,
    ) -> None:
        self._model = model
        self._gradient_size, self._regions, self._seed = gradient_size, regions, seed
        self._schedule, self._coordinator, self._estimator = schedule, coordinator, estimator
        self._aggregation, self._limits, self._staleness = aggregation, limits, staleness
        self._plan: Plan | None = None
        self._round = 0
        self._rates: dict[DeviceId, float] = {}
        self._rates_known = True
        """False where the plan came from profiles that this server cannot read."""
        self._accepted: dict[DeviceId, int] = {}
        self._pipeline = UpdatePipeline(aggregation, limits, gradient_layout, noisy=noisy_gradients)
        self._audit = ClaimAudit()
        self._profiles: dict[DeviceId, Profile] = {}
        """As last declared, for a new plan where the audit penalises; unknown after a restart."""
        self._open: _OpenRound | None = None

    @property
    def model(self) -> Vector:
        """The global model w."""
        return self._model

    @property
    def gradient_size(self) -> int:
        """The length of a local gradient."""
        return self._gradient_size

    @property
    def regions(self) -> int:
        """Y, how many regions the plan divides."""
        return self._regions

    @property
    def schedule(self) -> Schedule:
        """How devices train."""
        return self._schedule

    @property
    def coordinator(self) -> Coordinator:
        """What makes the plan."""
        return self._coordinator

    @property
    def estimator(self) -> GlobalEstimator:
        """What makes g_hat of the local gradients."""
        return self._estimator

    @property
    def aggregation(self) -> Aggregator:
        """The rule that makes the next model."""
        return self._aggregation

    @property
    def limits(self) -> Limits:
        """How far reports and profiles may stray."""
        return self._limits

    @property
    def staleness(self) -> int:
        """Rounds after which a late local gradient counts no more."""
        return self._staleness

    @property
    def plan(self) -> Plan | None:
        """The plan in force."""
        return self._plan

    @property
    def round(self) -> int:
        """The number of the next round to open, or of the one that is open."""
        return self._round

    def set_model(self, model: Vector) -> None:
        """Begin from another first model.

        Raises
        ------
        RuntimeError
            If a round was closed already.
        """
        if self._round > 0:
            raise RuntimeError("the first model cannot change after the first round")
        self._model = np.asarray(model, dtype=np.float32)

    def apply_step(self, model: Vector) -> None:
        """Replace the model by one that a correction made of it after the round was closed.

        Raises
        ------
        RuntimeError
            If a round is open: its participants train from the present model.
        """
        if self._open is not None:
            raise RuntimeError("a round is open: close it before its model is corrected")
        self._model = model

    def set_global_gradient(self, gradient: Vector | None) -> None:
        """Set g_hat from outside: an oracle's exact gradient.

        Raises
        ------
        TypeError
            If the server estimates g_hat from reports.
        """
        if type(self._estimator) is not GivenEstimator:
            raise TypeError("this server estimates g_hat from reports: it cannot be set")
        self._estimator.given = gradient

    def warm_start(self, estimates: Mapping[DeviceId, Estimate]) -> None:
        """Take in local gradients as if their devices had reported before the first round."""
        self._estimator.update(estimates)

    def expect_sums(self) -> None:
        """Expect `close_sum` from now on: g_hat is given with each sum, and begins as it is."""
        self._estimator = GivenEstimator(self._estimator.global_gradient())

    def discard_plan(self) -> None:
        """Drop the plan: one made in the clear does not count where profiles are encrypted."""
        self._plan = None

    def coordinate(
        self, profiles: Mapping[DeviceId, Profile]
    ) -> tuple[Plan, tuple[Rejection, ...]]:
        """Plan for the devices whose profiles are valid (steps 1, 2).

        An earlier plan is changed as little as can be. Devices that are not among the profiles have
        left: nothing of them counts any more.

        Returns
        -------
        tuple[Plan, tuple[Rejection, ...]]
            The plan, and whose profiles were rejected or cut.
        """
        self._profiles, rejections = {}, []
        for device, profile in profiles.items():
            try:
                self._profiles[device] = screen_profile(profile, self._regions)
            except RejectedError as error:
                rejections.append(Rejection(device, error.reason, error.detail))
        if self._limits.enabled:
            fleet, rates, cuts = self._capped_fleet()
            rejections += cuts
        else:
            fleet = FleetProfiles.of(dict(sorted(self._profiles.items())))
            rates = {device: profile.rate for device, profile in sorted(self._profiles.items())}
        if self._plan is None:
            plan = self._coordinator.plan(fleet)
        else:
            plan = self._coordinator.replan(self._plan, fleet)
        self._follow(plan, rates)
        return plan, tuple(rejections)

    def use_plan(self, plan: Plan) -> None:
        """Follow a plan made elsewhere, from profiles this server cannot read (encrypted profiles).

        Of the rates only their mean is known, from the plan: every device's local gradient then
        counts alike. Devices that are not in the plan have left.
        """
        devices = plan.devices.tolist()
        mean = plan.mass_per_slot * int(plan.slots.sum()) / len(devices) if devices else 0.0
        self._profiles = {}
        self._follow(plan, dict.fromkeys(devices, mean), known=False)

    def select(self, round_: int, population: Sequence[DeviceId], k: int) -> tuple[DeviceId, ...]:
        """Select k devices uniformly and without replacement, by seed and round alone."""
        rng = generator(self._seed, "select", round_)
        chosen = rng.choice(len(population), min(k, len(population)), replace=False)
        return tuple(sorted(population[i] for i in chosen.tolist()))

    def open_round(self, participants: Iterable[DeviceId]) -> Mapping[DeviceId, TrainOrder]:
        """Open the next round and return its orders, one per participant (step 7)."""
        self._open = _OpenRound(self._round, tuple(participants))
        return {device: self.order(device) for device in self._open.participants}

    def order(self, device: DeviceId) -> TrainOrder:
        """Return what the device is asked to do in the present round."""
        return TrainOrder(
            round=self._round,
            model=self._model,
            global_gradient=self._estimator.global_gradient(),
            local=self._schedule.local(self._round),
            accepted_round=self._accepted.get(device),
            assignment=None if self._plan is None else self._plan.assignment(device),
        )

    def receive(self, device: DeviceId, report: Report) -> Rejection | None:
        """Take a report into the open round, once per device; return why if it does not count."""
        opened = self._opened()
        try:
            self._screen(opened, device, report)
        except RejectedError as error:
            return opened.reject(device, error.reason, error.detail)
        return None

    def close_round(self) -> RoundSummary:
        """Merge the reports in the order of the devices' ids, and move on a round (step 8)."""
        opened = self._opened()
        result = self._pipeline.merge(self._model, opened.reports)
        reports, merged = result.reports, result.merged
        for finding in result.findings:
            opened.reject(*finding)
        self._model = merged.model

        for device in result.dropped_gradients:
            self._estimator.forget(device)
        late = {
            device: report
            for device, report in opened.late.items()
            if device not in reports or reports[device].local_gradient is None
        }
        self._estimator.update(self._estimates({**merged.reports, **late}))

        self._accepted.update({d: r.round for d, r in (opened.late | dict(reports)).items()})
        self._audit_claims(opened, reports)
        self._open, self._round = None, opened.round + 1
        return RoundSummary(
            round=opened.round,
            participants=opened.participants,
            accepted=tuple(d for d, r in reports.items() if r.weight > 0),
            empty=tuple(d for d, r in reports.items() if r.weight == 0),
            missing=tuple(d for d in opened.participants if d not in reports),
            rejections=tuple(opened.rejections),
            filtered=merged.filtered,
        )

    def close_sum(
        self, counted: Iterable[DeviceId], total: UpdateSum, gradient: Vector | None
    ) -> RoundSummary:
        """Close a round of which only sums over the devices `counted` are known (step 8).

        Who had nothing to train on stays unknown; what would reject a single report was checked on
        the devices.

        Raises
        ------
        RejectedError
            If no valid reports add up to these sums, or their mean is far longer than usual;
            nothing has changed then.
        """
        opened = self._opened()
        if not isinstance(self._estimator, GivenEstimator):
            raise TypeError("an estimator that keeps every g_hat_c cannot be given their sum")
        screen_sum(total.updates, total.weight, gradient, self._limits)
        if total.weight > 0:
            self._require_usual_mean(float(np.linalg.norm(total.updates)) / total.weight)
        self._model = self._aggregation.apply(self._model, total)
        if gradient is not None:
            self._estimator.given = gradient
        devices = tuple(sorted(counted))
        self._accepted.update(dict.fromkeys(devices, opened.round))
        self._open, self._round = None, opened.round + 1
        return RoundSummary(
            round=opened.round,
            participants=opened.participants,
            accepted=devices,
            empty=(),
            missing=tuple(device for device in opened.participants if device not in devices),
            rejections=tuple(opened.rejections),
        )

    def max_summand_norm(self) -> float:
        """Return the norm to which a device clips its update before it is masked.

        It follows from how long the means of sums have been.
        """
        usual = self._pipeline.statistics.usual_length()
        return min(self._limits.update_norm, _SUMMAND_RATIO * usual)

    def rate(self, device: DeviceId) -> float:
        """Return what the local gradient of a device weighs: its rate, as far as it counts."""
        return self._rates.get(device, 1.0)

    def max_weight(self, device: DeviceId) -> float:
        """Return the most that a report of this device weighs.

        All its slots borrowed by its heaviest label, or its share of the stream, whichever is more.
        A share that is not known may be `limits.growth` times the mean.
        """
        if self._plan is None or not self._limits.enabled:
            return np.inf
        assignment = self._plan.assignment(device)
        by_label = float(assignment.quotas.sum() * assignment.label_weights.max(initial=0.0))
        headroom = 1.0 if self._rates_known else self._limits.growth
        rate = self._rates.get(device, 0.0) * headroom
        by_rate = rate / assignment.mass_per_slot if assignment.mass_per_slot > 0 else 0.0
        return _WEIGHT_SLACK * max(by_label, by_rate)

    def forget(self, device: DeviceId) -> None:
        """Forget a device that has left the fleet for good: nothing of it counts any more."""
        opened = () if self._open is None else (self._open.reports, self._open.late)
        for table in (self._rates, self._accepted, *opened):
            table.pop(device, None)
        self._estimator.forget(device)
        self._pipeline.forget(device)
        self._audit.forget(device)

    def snapshot(self) -> State:
        """Return all that closed rounds left behind as plain arrays; an open one is no part."""
        state = snapshot_parts(self._parts()) | self._pipeline.snapshot()
        state |= {
            "model": self._model,
            "round": np.array(self._round),
            "rates.known": np.array(self._rates_known),
        }
        state |= put_table("rates", self._rates) | put_table("accepted", self._accepted)
        return state if self._plan is None else state | add_prefix("plan", self._plan.snapshot())

    def restore(self, state: State) -> None:
        """Become the server that `snapshot` described."""
        plan = strip_prefix("plan", state)
        rates, known = take_table("rates", state), bool(state["rates.known"])
        self._follow(Plan.from_snapshot(plan) if plan else None, rates, known=known)
        restore_parts(self._parts(), state)
        self._pipeline.restore(state)
        self._model = np.array(state["model"], dtype=np.float32)
        self._round, self._open = int(state["round"]), None
        self._accepted = {
            device: int(round_) for device, round_ in take_table("accepted", state).items()
        }

    def _capped_fleet(self) -> tuple[FleetProfiles, dict[DeviceId, float], list[Rejection]]:
        """Return the fleet as its claims count: discounted by the audit, capped by the others."""
        discounted = {
            device: self._audit.discount(device, profile)
            for device, profile in sorted(self._profiles.items())
        }
        before = np.array([self._rates.get(device, np.nan) for device in discounted])
        fleet, rates, cuts = cap_profiles(FleetProfiles.of(discounted), before, self._limits.growth)
        return fleet, dict(zip(discounted, rates.tolist(), strict=True)), cuts

    def _follow(
        self, plan: Plan | None, rates: dict[DeviceId, float], *, known: bool = True
    ) -> None:
        for device in set(self._rates) - set(rates):
            self.forget(device)
        self._plan, self._rates, self._rates_known = plan, rates, known
        self._estimator.fleet_weight = sum(rates.values())
        self._pipeline.follow_plan(rates)

    def _parts(self) -> dict[str, Stateful]:
        return {"estimator": self._estimator, "claims": self._audit}

    def _opened(self) -> _OpenRound:
        if self._open is None:
            raise RuntimeError("no round is open: call open_round first")
        return self._open

    def _screen(self, opened: _OpenRound, device: DeviceId, report: Report) -> None:
        """Put a valid report into the round; of a late one the local gradient alone may count."""
        if device in opened.reports:
            raise RejectedError(
                RejectionReason.DUPLICATE,
                f"device {device} has reported in round {opened.round} already",
            )
        asked = report.round < opened.round or device in opened.participants
        if report.round > opened.round or not asked:
            raise RejectedError(
                RejectionReason.NOT_ASKED,
                f"device {device} was not asked to take part in round {report.round}",
            )
        if self._plan is not None and device not in self._rates:
            raise RejectedError(
                RejectionReason.LEFT, f"device {device} is no longer part of the fleet"
            )
        if report.round < opened.round:
            self._take_late_gradient(opened, device, report)
            raise RejectedError(
                RejectionReason.LATE,
                f"round {report.round} is closed; round {opened.round} is open",
            )
        max_weight = self.max_weight(device)
        opened.reports[device] = self._pipeline.validate(
            report, self._model, self._gradient_size, max_weight
        )
        if report.weight > max_weight:
            opened.reject(
                device,
                RejectionReason.WEIGHT_CUT,
                f"a weight of {report.weight:g} counts as {max_weight:g}",
            )

    def _take_late_gradient(self, opened: _OpenRound, device: DeviceId, report: Report) -> None:
        """Keep the gradient of a late report, if it is new and no update has to agree with it."""
        if self._aggregation.verifies_gradients or report.local_gradient is None:
            return
        if device in opened.late:
            known = opened.late[device].round
        else:
            known = self._accepted.get(device, -1)
        if known < report.round >= opened.round - self._staleness:
            opened.late[device] = self._pipeline.validate(
                report, report.model, self._gradient_size, 0.0
            )

    def _require_usual_mean(self, length: float) -> None:
        """Rejects a sum whose mean is far longer than earlier ones; learns its length anyway."""
        statistics = self._pipeline.statistics
        usual = statistics.usual_length()
        statistics.learn_lengths([length])
        if length > _SUM_RATIO * usual:
            raise RejectedError(
                RejectionReason.LARGE_UPDATE,
                f"the mean update is {length:g} long; {_SUM_RATIO * usual:.3g} would be usual",
            )

    def _audit_claims(self, opened: _OpenRound, reports: Mapping[DeviceId, Report]) -> None:
        """Plans anew where reports do not bear out what devices claimed, or a probation is over."""
        if self._plan is None or not self._profiles or not self._limits.enabled:
            return
        for device, report in reports.items():
            slots = int(self._plan.assignment(device).quotas.sum())
            self._audit.observe(device, report, slots, self._profiles[device].rate)
        changed = self._audit.review(opened.round)
        for device, share in changed.items():
            if share < 1:
                detail = f"its reports bear out {share:.0%} of its claims, which count by as much"
                opened.reject(device, RejectionReason.CLAIM_UNFOUNDED, detail)
        if changed:
            self.coordinate(self._profiles)

    def _estimates(self, reports: Mapping[DeviceId, Report]) -> dict[DeviceId, Estimate]:
        """Return the local gradients that count, with their weights and rounds."""
        counted = self._pipeline.clip_gradients(reports, self.rate)
        return {
            device: Estimate(gradient, weight, reports[device].round)
            for device, (gradient, weight) in counted.items()
        }
