"""Devices without an agent under a privacy budget: charged first, noised, silent at its end."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fedkeep_app.catch_up import CatchUpDevice
from flwr.app import Context, Message, RecordDict
from flwr.app.user_config import UserConfig

from fedkeep.core.errors import ConfigError, DataError, RejectedError
from fedkeep.core.types import LocalTraining, Report, TrainOrder
from fedkeep.flower.codec import decode
from fedkeep.flower.device_memory import DeviceMemory
from fedkeep.flower.rounds import RoundOptions
from fedkeep.flower.server_app import open_strategy
from fedkeep.privacy.accountant import BudgetSpentError, PrivacyLedger
from fedkeep.privacy.options import PrivacyOptions
from fedkeep.protocol.messages import DeviceRequest
from fedkeep.sim.assembly import assemble
from fedkeep.sim.engine import Simulator
from fedkeep.sim.fleet import SimulatedFleet
from tests.flower.in_process import InProcessGrid, make_node
from tests.flower.small_fleet import DictMemory, SmallFleet

pytest.importorskip("dp_accounting", reason="needs the privacy extra")

ALL: dict[str, Any] = {
    "epsilon": 3.0,
    "protect": ["estimator", "model", "profile"],
    "planned_participations": 6,
    "model_clip": 0.5,
}
TWO: dict[str, Any] = {"epsilon": 4.0, "unit": "device", "planned_participations": 2, "clip": 2.0}


def guarded(privacy: dict[str, Any], directory: Path | None = None, **fields: Any) -> SmallFleet:
    return SmallFleet(table={"privacy": privacy}, directory=directory, **fields)


def seeded_like_the_simulator(fleet: SmallFleet) -> InProcessGrid:
    """The fleet's grid, where each device draws the simulator's noise of that round."""

    def begin(
        number: int, app: Callable[[Message, Context], Message]
    ) -> Callable[[Message, Context], Message]:
        def answer(message: Message, context: Context) -> Message:
            is_order = message.metadata.message_type == "train"
            fleet.noises[number].begin(
                decode(message.content, DeviceRequest).order.round if is_order else -1
            )
            return app(message, context)

        return answer

    return InProcessGrid(
        make_node(number, begin(number, app), {}) for number, app in fleet.apps.items()
    )


@pytest.mark.parametrize(
    "privacy", [{"epsilon": 2.0, "clip": 0.5}, TWO, ALL], ids=["sample", "device", "all"]
)
def test_the_same_model_as_a_guarded_simulation(privacy: dict[str, Any], tmp_path: Path) -> None:
    fleet = guarded(privacy, tmp_path, rounds=6)
    strategy = fleet.strategy()
    list(strategy.rounds(seeded_like_the_simulator(fleet), 6))
    simulator = Simulator(fleet.experiment)
    list(simulator.run())
    assert np.abs(strategy.server.model - simulator.server.model).max() < 1e-6
    plain = SmallFleet(rounds=6)
    unguarded = plain.strategy()
    list(unguarded.rounds(plain.grid(), 6))
    assert np.abs(strategy.server.model - unguarded.server.model).max() > 1e-4


def order_for(fleet: SmallFleet, round_: int, accepted: int | None = None) -> TrainOrder:
    model = fleet.strategy().server.model
    return TrainOrder(
        round_, model + np.float32(0.01 * round_), None, LocalTraining(0.1, 1), accepted
    )


def ledger_of(fleet: SmallFleet, number: int = 0) -> PrivacyLedger:
    ledger, prefix = PrivacyLedger(), "gate.ledger."
    state = fleet.memories[number].load()
    ledger.restore({n.removeprefix(prefix): a for n, a in state.items() if n.startswith(prefix)})
    return ledger


def test_the_budget_is_spent_over_restarts_and_then_nothing_more_is_told(tmp_path: Path) -> None:
    fleet = guarded(TWO, tmp_path)
    reports = [
        fleet.restarted(0).participate(order_for(fleet, r, accepted=r - 1 if r else None))
        for r in range(4)
    ]
    assert [report.local_gradient is not None for report in reports] == [True, True, False, False]
    assert reports[3].samples > 0
    assert ledger_of(fleet).epsilon("device", 1e-5) <= 4.0 * (1 + 1e-6)


def test_a_device_that_stays_away_sends_nothing_and_remembers_the_round(tmp_path: Path) -> None:
    fleet = guarded({**TWO, "on_exhausted": "absent"}, tmp_path)
    for round_ in range(2):
        fleet.restarted(0).participate(order_for(fleet, round_))
    for _ in range(2):
        with pytest.raises(BudgetSpentError, match="nothing was sent"):
            fleet.restarted(0).participate(order_for(fleet, 2))
    assert int(fleet.memories[0].load()["seen"]) == 3


def test_a_repeated_order_gets_the_same_answer_without_a_new_charge(tmp_path: Path) -> None:
    fleet = guarded(ALL, tmp_path)
    first = fleet.restarted(0).participate(order_for(fleet, 0))
    charged = ledger_of(fleet).snapshot()
    again = fleet.restarted(0).participate(order_for(fleet, 0))
    assert _bytes(first) == _bytes(again)
    for name, array in ledger_of(fleet).snapshot().items():
        np.testing.assert_array_equal(array, charged[name])


def _bytes(report: Report) -> tuple[bytes, bytes]:
    assert report.local_gradient is not None
    return report.model.tobytes(), report.local_gradient.tobytes()


def test_a_profile_is_told_once_and_repeated(tmp_path: Path) -> None:
    fleet = guarded(ALL, tmp_path)
    first, again = fleet.restarted(0).profile(), fleet.restarted(0).profile()
    np.testing.assert_array_equal(first.velocity, again.velocity)
    assert ledger_of(fleet).snapshot()["releases"][2] == 1
    assert not np.array_equal(first.velocity, SmallFleet().restarted(0).profile().velocity)


class DyingMemory(DictMemory):
    """Is killed at the n-th save from now, before or after the bytes are safe."""

    left: int | None = None
    safe = True

    def save(self, state: Any) -> None:
        if self.left == 0 and not self.safe:
            raise KeyboardInterrupt
        super().save(state)
        if self.left == 0:
            raise KeyboardInterrupt
        if self.left is not None:
            self.left -= 1


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("save", [0, 1, 2])
def test_a_crash_at_any_save_never_leaves_a_release_uncharged(save: int, safe: bool) -> None:
    fleet = guarded({**TWO, "on_exhausted": "absent"})
    memory = DyingMemory()
    fleet.memories[0] = memory
    memory.left, memory.safe = save, safe
    with pytest.raises(KeyboardInterrupt):
        fleet.restarted(0).participate(order_for(fleet, 0))
    memory.left = None
    sent = [fleet.restarted(0).participate(order_for(fleet, 0))]
    while True:
        try:
            sent.append(
                fleet.restarted(0).participate(order_for(fleet, len(sent), accepted=len(sent) - 1))
            )
        except BudgetSpentError:
            break
    assert len(sent) <= ledger_of(fleet).snapshot()["releases"][0] == 2


def test_what_is_not_clipped_is_refused_and_nothing_is_charged() -> None:
    fleet = SmallFleet()
    parts = assemble(fleet.experiment)
    assert isinstance(parts.fleet, SimulatedFleet)
    arrivals, memory, tight = (
        partial(parts.stream.arrivals, 0),
        DictMemory(),
        PrivacyOptions(epsilon=4.0, clip=1e-6),
    )
    device = CatchUpDevice(parts.fleet.device(0), arrivals, parts.data.test_batch(0), memory, tight)
    with pytest.raises(RejectedError, match="unclipped"):
        device.participate(order_for(fleet, 0))
    assert not memory.load()["gate.ledger.releases"].any()


def test_a_ledger_needs_a_memory_that_lasts() -> None:
    fleet = guarded(TWO)
    context = Context(1, 1, {}, RecordDict(), {})
    fleet.memories[0] = DeviceMemory(context)
    with pytest.raises(ConfigError, match="state-dir"):
        fleet.restarted(0)


def test_a_ledger_lost_with_a_damaged_file_is_not_an_empty_one(tmp_path: Path) -> None:
    fleet = guarded(TWO, tmp_path)
    fleet.restarted(0).participate(order_for(fleet, 0))
    path = tmp_path / "0.npz"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="the ledger was lost"):
        fleet.restarted(0)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"privacy.secure-aggregation": True}, "exclude each other"),
        ({"privacy.epsilon": 0.0}, "epsilon must be"),
        ({"privacy.epsilo": 1.0}, "did you mean"),
        (
            {"privacy.epsilon": 1.0, "privacy.when-spent": "absent", "rounds.deterministic": True},
            "for ever",
        ),
    ],
)
def test_the_server_refuses_what_the_devices_privacy_excludes(
    settings: UserConfig, reason: str
) -> None:
    fleet = SmallFleet(
        table={"aggregation": {"name": "trimmed"}}, options=RoundOptions(participation=0.5)
    )
    strategy = fleet.strategy()
    with pytest.raises(ConfigError, match=reason):
        open_strategy(strategy.server, settings)
