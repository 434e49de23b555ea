"""The server: plans who stores what, chooses participants, merges what they report (steps 1, 2, 7, 8)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fedkeep.core.aggregation import Aggregation, UpdateSum
from fedkeep.core.claims import ClaimAudit
from fedkeep.core.errors import RejectedError
from fedkeep.core.gradients import Estimate, GivenEstimator, GlobalEstimator
from fedkeep.core.planning.greedy import Coordinator
from fedkeep.core.planning.plan import Plan
from fedkeep.core.planning.profiles import FleetProfiles
from fedkeep.core.protocols import Stateful
from fedkeep.core.rounds import Rejection, RoundSummary, Schedule, credible
from fedkeep.core.screening import Limits, screen_profile, screen_report, screen_sum
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
from fedkeep.core.usual import MIN_OBSERVATIONS, UpdateStatistics, weight_cap

_GRADIENT_RATIO, _ROBUST_RATIO = 10.0, 2.0
"""No g_hat_c is longer than so many times the median, and under a robust mean so many times."""
_FAR = 10.0
"""Updates longer than is plausible are shortened; those so many times as long are refused."""
_SUM_RATIO, _SUMMAND_RATIO = 3.0, 30.0
"""A sum's mean update may be so many times as long as is usual, a single update in it so many times."""


@dataclass(eq=False)
class _OpenRound:
    round: int
    participants: tuple[DeviceId, ...]
    reports: dict[DeviceId, Report] = field(default_factory=dict)
    late: dict[DeviceId, Report] = field(default_factory=dict)
    """Reports of earlier rounds, of which the estimator alone counts."""
    refusals: list[Rejection] = field(default_factory=list)

    def refuse(self, device: DeviceId, reason: str, detail: str) -> Rejection:
        self.refusals.append(Rejection(device, reason, detail))
        return self.refusals[-1]


@dataclass(eq=False, repr=False, kw_only=True)
class Server:
    """The one place where the global model and g_hat change, at the close of a round and nowhere else.

    >>> from fedkeep.core.planning.greedy import Greedy
    >>> from fedkeep.core.gradients import IncrementalEstimator
    >>> server = Server(
    ...     model=np.zeros(2, dtype=np.float32), gradient_size=2, regions=1, schedule=Schedule(0.1, epochs=1),
    ...     coordinator=Greedy(clients_per_label=1), estimator=IncrementalEstimator(),
    ... )
    >>> plan, refused = server.coordinate({d: Profile(capacity=4, velocity=np.ones(1)) for d in (0, 1)})
    >>> orders = server.open_round([0, 1])
    >>> for device, step in ((0, 1.0), (1, 3.0)):
    ...     moved = orders[device].model + np.float32(step)
    ...     _ = server.receive(device, Report(0, moved, weight=4.0, steps=1, samples=4, local_gradient=None))
    >>> server.close_round().accepted
    (0, 1)
    >>> server.model.tolist()
    [2.0, 2.0]
    """

    staleness = 50
    """Rounds after which a late g_hat_c is no news any more."""

    model: Vector
    gradient_size: int
    regions: int
    schedule: Schedule
    coordinator: Coordinator
    estimator: GlobalEstimator
    aggregation: Aggregation = field(default_factory=Aggregation)
    limits: Limits = field(default_factory=Limits)
    seed: int = 0

    def __post_init__(self) -> None:
        self.plan: Plan | None = None
        self.round = 0
        """The next round to open."""
        self._rates: dict[DeviceId, float] = {}
        self._rates_known = True
        """False where the plan came from profiles that this server cannot read."""
        self._usual_rate = np.inf
        """The most that a rate counts for in the fleet's gradient."""
        self._accepted: dict[DeviceId, int] = {}
        self._gradient_norms: dict[DeviceId, float] = {}
        self._usual = UpdateStatistics()
        self._claims = ClaimAudit()
        self._profiles: dict[DeviceId, Profile] = {}
        """As last declared, to plan anew where a claim turns out unfounded; not known after a restart."""
        self._open: _OpenRound | None = None

    def coordinate(
        self, profiles: Mapping[DeviceId, Profile]
    ) -> tuple[Plan, tuple[Rejection, ...]]:
        """Plans for the devices whose profiles are sound (steps 1, 2); an earlier plan is changed as little as can be.

        Devices that are not among the profiles have left: nothing of them counts any more.
        """
        self._profiles, refusals = {}, []
        for device, profile in profiles.items():
            try:
                self._profiles[device] = screen_profile(profile, self.regions)
            except RejectedError as error:
                refusals.append(Rejection(device, error.reason, error.detail))
        founded = {
            device: self._claims.founded(device, profile)
            for device, profile in sorted(self._profiles.items())
        }
        before = np.array([self._rates.get(device, np.nan) for device in founded])
        fleet, rates, cut = credible(FleetProfiles.of(founded), before, self.limits.growth)
        plan = (
            self.coordinator.plan(fleet)
            if self.plan is None
            else self.coordinator.replan(self.plan, fleet)
        )
        self._follow(plan, dict(zip(founded, rates.tolist(), strict=True)))
        return plan, (*refusals, *cut)

    def use_plan(self, plan: Plan) -> None:
        """Follows a plan that was made elsewhere, from profiles this server cannot read (encrypted profiles).

        Of the rates only their mean is known, from the plan: every device's estimator then counts alike. Devices that
        are not in the plan have left.
        """
        devices = plan.devices.tolist()
        mean = plan.mass_per_slot * int(plan.slots.sum()) / len(devices) if devices else 0.0
        self._profiles = {}
        self._follow(plan, dict.fromkeys(devices, mean), known=False)

    def select(self, round_: int, population: Sequence[DeviceId], k: int) -> tuple[DeviceId, ...]:
        """k devices of the population for a round, uniformly and without replacement, by seed and round alone."""
        rng = generator(self.seed, "select", round_)
        chosen = rng.choice(len(population), min(k, len(population)), replace=False)
        return tuple(sorted(population[i] for i in chosen.tolist()))

    def open_round(self, participants: Iterable[DeviceId]) -> Mapping[DeviceId, TrainOrder]:
        """The orders of the next round, one per participant (step 7)."""
        self._open = _OpenRound(self.round, tuple(participants))
        return {device: self.order(device) for device in self._open.participants}

    def order(self, device: DeviceId) -> TrainOrder:
        """What the device is asked to do in the present round."""
        return TrainOrder(
            round=self.round,
            model=self.model,
            direction=self.estimator.direction(),
            local=self.schedule.local(self.round),
            accepted_round=self._accepted.get(device),
            assignment=None if self.plan is None else self.plan.assignment(device),
        )

    def receive(self, device: DeviceId, report: Report) -> Rejection | None:
        """Takes a report into the open round, once per device; says why if it does not count."""
        opened = self._opened()
        try:
            self._screen(opened, device, report)
        except RejectedError as error:
            return opened.refuse(device, error.reason, error.detail)
        return None

    def close_round(self) -> RoundSummary:
        """Merges what came in, in the order of the devices' ids, and moves on to the next round (step 8)."""
        opened = self._opened()
        lengths = self._screen_lengths(opened)
        reports = dict(sorted(opened.reports.items()))
        robust = self.aggregation.name == "robust"
        merged, outvoted = self._usual.tame(self.model, reports) if robust else (reports, [])
        for device, report in reports.items():
            if report.local_gradient is not None and merged[device].local_gradient is None:
                self.estimator.forget(
                    device
                )  # what it told before counts no longer than its word does
        self._usual.learn_lengths(lengths)
        self.model = self.aggregation.aggregate(self.model, list(merged.values()))
        late = {
            d: r
            for d, r in opened.late.items()
            if d not in reports or reports[d].local_gradient is None
        }
        self.estimator.update(self._estimates({**merged, **late}))
        self._accepted.update({d: r.round for d, r in (opened.late | reports).items()})
        self._check_claims(opened, reports)
        self._open, self.round = None, opened.round + 1
        accepted = tuple(d for d, r in reports.items() if r.weight > 0)
        empty = tuple(d for d, r in reports.items() if r.weight == 0)
        missing = tuple(d for d in opened.participants if d not in reports)
        return RoundSummary(
            opened.round,
            opened.participants,
            accepted,
            empty,
            missing,
            tuple(opened.refusals),
            tuple(outvoted),
        )

    def close_sum(
        self, counted: Iterable[DeviceId], total: UpdateSum, direction: Vector | None
    ) -> RoundSummary:
        """Closes a round of which only sums over the devices `counted` are known (Eqs. 2 and 8, step 8).

        Who had nothing to train on cannot be told; all that would refuse a single report was checked on the devices.
        """
        opened = self._opened()
        if not isinstance(self.estimator, GivenEstimator):
            raise TypeError("an estimator that keeps every g_hat_c cannot be given their sum")
        screen_sum(total.updates, total.weight, direction, self.limits)
        if total.weight > 0:
            length, longest = (
                float(np.linalg.norm(total.updates)) / total.weight,
                _SUM_RATIO * self._usual.length(),
            )
            self._usual.learn_lengths(
                [length]
            )  # of refused ones, too: what is usual follows slowly
            if length > longest:
                raise RejectedError(
                    "large-update",
                    f"the mean update is {length:g} long; {longest:.3g} would be usual",
                )
        self.model = self.aggregation.apply(self.model, total)
        if direction is not None:
            self.estimator.given = direction
        devices = tuple(sorted(counted))
        self._accepted.update(dict.fromkeys(devices, opened.round))
        self._open, self.round = None, opened.round + 1
        missing = tuple(device for device in opened.participants if device not in devices)
        return RoundSummary(
            opened.round, opened.participants, devices, (), missing, tuple(opened.refusals)
        )

    def longest_summand(self) -> float:
        """The length to which a device cuts its update before it is masked, by how long sums have turned out."""
        return min(self.limits.update_norm, _SUMMAND_RATIO * self._usual.length())

    def rate(self, device: DeviceId) -> float:
        """What the estimator of a device weighs: its rate, as far as it counts."""
        return self._rates.get(device, 1.0)

    def heaviest(self, device: DeviceId) -> float:
        """The most a report of this device may weigh: all slots lent to its heaviest label, or its share of the stream.

        A share that is not known may be `limits.growth` times the mean.
        """
        if self.plan is None:
            return np.inf
        assignment = self.plan.assignment(device)
        by_label = float(assignment.quotas.sum() * assignment.label_weights.max(initial=0.0))
        rate = self._rates.get(device, 0.0) * (1.0 if self._rates_known else self.limits.growth)
        by_rate = rate / assignment.mass_per_slot if assignment.mass_per_slot > 0 else 0.0
        return 1.001 * max(by_label, by_rate)

    def forget(self, device: DeviceId) -> None:
        """A device has left the fleet for good: nothing of it counts any more."""
        opened = () if self._open is None else (self._open.reports, self._open.late)
        for table in (self._rates, self._accepted, self._gradient_norms, *opened):
            table.pop(device, None)
        self.estimator.forget(device)
        self._usual.forget(device)
        self._claims.forget(device)

    def snapshot(self) -> State:
        """Everything a closed round left behind, as plain arrays; a round that is open is not part of it."""
        state = snapshot_parts(self._parts())
        state |= {
            "model": self.model,
            "round": np.array(self.round),
            "rates.known": np.array(self._rates_known),
        }
        for name, table in (
            ("rates", self._rates),
            ("accepted", self._accepted),
            ("norms", self._gradient_norms),
        ):
            state |= put_table(name, table)
        return state if self.plan is None else state | add_prefix("plan", self.plan.snapshot())

    def restore(self, state: State) -> None:
        """Becomes the server that `snapshot` described."""
        plan = strip_prefix("plan", state)
        rates, known = take_table("rates", state), bool(state["rates.known"])
        self._follow(Plan.from_snapshot(plan) if plan else None, rates, known=known)
        restore_parts(self._parts(), state)
        self.model, self.round, self._open = (
            np.array(state["model"], dtype=np.float32),
            int(state["round"]),
            None,
        )
        self._gradient_norms = take_table("norms", state)
        self._accepted = {
            device: int(round_) for device, round_ in take_table("accepted", state).items()
        }

    def _follow(
        self, plan: Plan | None, rates: dict[DeviceId, float], *, known: bool = True
    ) -> None:
        for device in set(self._rates) - set(rates):
            self.forget(device)
        self.plan, self._rates, self._rates_known = plan, rates, known
        above = np.array([rate for rate in rates.values() if rate > 0])
        self._usual_rate = weight_cap(above) if len(above) else np.inf
        self._usual.replan()

    def _parts(self) -> dict[str, Stateful]:
        return {"estimator": self.estimator, "claims": self._claims, "usual": self._usual}

    def _opened(self) -> _OpenRound:
        if self._open is None:
            raise RuntimeError("no round is open: call open_round first")
        return self._open

    def _screen(self, opened: _OpenRound, device: DeviceId, report: Report) -> None:
        """Puts a sound report into the round; the estimator of a late one may still count, its model never does."""
        if device in opened.reports:
            raise RejectedError(
                "duplicate", f"device {device} has reported in round {opened.round} already"
            )
        if report.round > opened.round or (
            report.round == opened.round and device not in opened.participants
        ):
            raise RejectedError(
                "not-asked", f"device {device} was not asked to take part in round {report.round}"
            )
        if self.plan is not None and device not in self._rates:
            raise RejectedError("left", f"device {device} is no longer part of the fleet")
        if report.round < opened.round:
            known = (
                opened.late[device].round
                if device in opened.late
                else self._accepted.get(device, -1)
            )
            news = (
                report.local_gradient is not None
                and known < report.round >= opened.round - self.staleness
            )
            # A robust mean takes none: it believes a g_hat_c that the device's own update of the round bears out.
            if news and self.aggregation.name != "robust":
                opened.late[device] = screen_report(
                    report, report.model, self.gradient_size, 0.0, self.limits
                )
            raise RejectedError(
                "late", f"round {report.round} is closed; round {opened.round} is open"
            )
        heaviest = self.heaviest(device)
        opened.reports[device] = screen_report(
            report, self.model, self.gradient_size, heaviest, self.limits
        )
        if report.weight > heaviest:
            opened.refuse(
                device, "weight-cut", f"a weight of {report.weight:g} counts as {heaviest:g}"
            )

    def _screen_lengths(self, opened: _OpenRound) -> list[float]:
        """Shortens updates beyond what the fleet has shown to be usual; refuses those that cannot be honest.

        Gives the lengths of all, for the next rounds to learn from.
        """
        model = self.model.astype(np.float64)
        moves = {
            d: float(np.linalg.norm(r.model - model))
            for d, r in sorted(opened.reports.items())
            if r.weight > 0
        }
        lengths = list(moves.values())
        longest = self._usual.longest(lengths, self.limits.update_ratio)
        for device, length in moves.items():
            if length > _FAR * longest:
                del opened.reports[device]
                detail = (
                    f"the model moved by {length:g}; more than {_FAR * longest:.3g} is unheard of"
                )
                opened.refuse(device, "large-update", detail)
            elif length > longest:
                report = opened.reports[device]
                shorter = (model + (report.model - model) * (longest / length)).astype(np.float32)
                opened.reports[device] = replace(report, model=shorter)
                opened.refuse(
                    device,
                    "update-cut",
                    f"the model moved by {length:g}, which counts as {longest:.3g}",
                )
        return lengths

    def _check_claims(self, opened: _OpenRound, reports: Mapping[DeviceId, Report]) -> None:
        """Plans anew where devices have not borne out what they claimed, or are given another chance."""
        if self.plan is None or not self._profiles:
            return
        for device, report in reports.items():
            slots = int(self.plan.assignment(device).quotas.sum())
            self._claims.observe(device, report, slots, self._profiles[device].rate)
        found = self._claims.judge(opened.round)
        for device, share in found.items():
            if share < 1:
                detail = f"its claims count for {share:.0%} of what they say: so much of them has come true"
                opened.refuse(device, "claim-unfounded", detail)
        if found:
            self.coordinate(self._profiles)

    def _estimates(self, reports: Mapping[DeviceId, Report]) -> dict[DeviceId, Estimate]:
        """The g_hat_c of the reports that bring one, cut to a length that others have shown to be usual."""
        robust = self.aggregation.name == "robust"
        told = {
            d: (r, r.local_gradient) for d, r in reports.items() if r.local_gradient is not None
        }
        norms = self._gradient_norms
        norms |= {d: float(np.linalg.norm(g.astype(np.float64))) for d, (_, g) in told.items()}
        usual = float(np.median(list(norms.values()))) if len(norms) >= MIN_OBSERVATIONS else np.inf
        longest = (_ROBUST_RATIO if robust else _GRADIENT_RATIO) * usual
        heaviest = self._usual_rate if robust else np.inf
        found = {}
        for device, (report, gradient) in told.items():
            shorter = gradient * np.float32(min(1.0, longest / max(norms[device], 1e-30)))
            found[device] = Estimate(shorter, min(self.rate(device), heaviest), report.round)
        return found
