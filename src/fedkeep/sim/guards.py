"""The guards of simulated devices; their ledgers are part of the simulation's state."""

from collections.abc import Mapping
from contextlib import suppress

from fedkeep.core.errors import ConfigError
from fedkeep.core.seeds import generator
from fedkeep.core.state import put_numbered, take_numbered
from fedkeep.core.types import DeviceId, Profile, Report, State, TrainOrder
from fedkeep.privacy.guard import Guard, Spending
from fedkeep.privacy.ledger import BudgetSpentError, Ledger
from fedkeep.privacy.options import refuse_conflicts
from fedkeep.sim.experiment import Experiment


class Guards:
    """Makes a guard for each device that has something to send."""

    def __init__(self, experiment: Experiment) -> None:
        """Options under which the guarantee would not hold are refused."""
        options, estimator = experiment.privacy, experiment.estimator
        refuse_conflicts(options, experiment.aggregation)
        if options.protects("estimator") and "exact" in (estimator.name, estimator.cold_start):
            raise ConfigError("estimator 'exact' shows the server gradients without noise: not with privacy.epsilon")
        if options.protects("estimator") and options.unit == "sample" and estimator.name == "stored":
            raise ConfigError("estimator 'stored' sends a sample many times: use privacy.unit = 'device' with it")
        self._options, self._seed = options, experiment.seed
        self._guards: dict[DeviceId, Guard] = {}

    def release(
        self, orders: Mapping[DeviceId, TrainOrder], reports: Mapping[DeviceId, Report]
    ) -> dict[DeviceId, Report]:
        """What leaves the devices; those whose budget is spent may send nothing at all."""
        if self._options.epsilon is None:
            return dict(reports)
        sent = {}
        for device, report in reports.items():
            with suppress(BudgetSpentError):
                sent[device] = self._guard(device, report.round).release(report, orders[device])
        return sent

    def release_profiles(self, profiles: Mapping[DeviceId, Profile]) -> dict[DeviceId, Profile]:
        """What the devices declare before the first round, as if counted over one."""
        if not self._options.protects("profile"):
            return dict(profiles)
        return {d: self._guard(d, -1).release_profile(profile, window=1.0) for d, profile in profiles.items()}

    def most_spent(self) -> Spending | None:
        """The ledger of the device that has told most; None where nothing is accounted for."""
        return max((guard.spending() for guard in self._guards.values()), key=lambda s: s.spent, default=None)

    def snapshot(self) -> State:
        return put_numbered({device: guard.snapshot() for device, guard in self._guards.items()})

    def restore(self, state: State) -> None:
        self._guards = {}
        for device, own in take_numbered(state).items():
            self._guard(device, -1).restore(own)

    def _guard(self, device: DeviceId, round_: int) -> Guard:
        """The device's guard; its noise depends on the seed, the device and the round alone: simulations repeat."""
        if device not in self._guards:
            self._guards[device] = Guard(self._options, Ledger(), lambda _: None)
        self._guards[device].normal = generator(self._seed, "privacy", device, round_).standard_normal
        return self._guards[device]
