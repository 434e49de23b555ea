"""What the server remembers between secure rounds, and when it begins its running sum anew."""

import numpy as np
import pytest

from fedkeep.core.errors import ConfigError, RejectedError
from fedkeep.core.gradients import IncrementalEstimator
from fedkeep.core.planning.greedy import Greedy
from fedkeep.core.schedule import Schedule
from fedkeep.core.screening import Limits
from fedkeep.core.server import Server
from fedkeep.core.types import Profile, Report

pytest.importorskip("Crypto", reason="needs the privacy extra")

from fedkeep.privacy.options import PrivacyOptions
from fedkeep.privacy.secagg import protocol
from fedkeep.privacy.secagg.client import SecureAggregationClient
from fedkeep.privacy.secagg.server import SecureAggregationServer

P, G, DEVICES = 6, 4, 4
OPTIONS = PrivacyOptions(secure_aggregation=True)


def server_of(estimator: IncrementalEstimator, limits: Limits = Limits()) -> Server:
    server = Server(
        model=np.zeros(P, dtype=np.float32),
        gradient_size=G,
        regions=2,
        schedule=Schedule(learning_rate=0.1, epochs=1),
        coordinator=Greedy(clients_per_label=2, labels_per_client=2),
        estimator=estimator,
        limits=limits,
    )
    server.coordinate(profiles(range(DEVICES)))
    return server


def profiles(devices: range) -> dict[int, Profile]:
    return {d: Profile(4, np.array([1.0, 2.0]) * (d + 1)) for d in devices}


class FleetProfiles:
    """Members and a book, and the gradients each device sent last."""

    def __init__(self, options: PrivacyOptions = OPTIONS, max_age: int | None = None) -> None:
        self.options = options
        self.server = server_of(IncrementalEstimator(max_age))
        self.book = SecureAggregationServer(self.server, options, G)
        self.members = {d: SecureAggregationClient(options, G) for d in range(DEVICES)}
        self.latest: dict[int, np.ndarray] = {}
        self._rng = np.random.default_rng(0)

    def round(self, participants: list[int], *, silent: bool = False) -> None:
        orders = self.server.open_round(participants)
        opened = self.book.open(participants)
        keys = {}
        for d in participants:
            gradient = self._rng.normal(size=G).astype(np.float32)
            report = Report(
                self.server.round, orders[d].model, 0.0, 0, 0, None if silent else gradient, 5
            )
            held = self.members[d].hold(
                report, orders[d], self.members[d].terms(protocol.encode(opened.terms[d]))
            )
            keys[d] = protocol.decode(held, protocol.Keys)
            self.latest[d] = gradient
        self._close(opened, keys)

    def restart(self) -> None:
        """The server dies and comes back with what was committed."""
        before, sums = self.server.snapshot(), self.book.snapshot()
        self.server = server_of(IncrementalEstimator())
        self.book = SecureAggregationServer(self.server, self.options, G)
        self.server.restore(before)
        self.book.restore(sums)

    def _close(self, opened: protocol.AggregationSession, keys: dict[int, protocol.Keys]) -> None:
        def ask(device: int, question: protocol.Request) -> bytes:
            self.members[device].restore(self.members[device].snapshot())
            return self.members[device].answer(protocol.encode(question))

        roster = opened.open({d: k.keys for d, k in keys.items()})
        sealed = {d: protocol.decode(ask(d, roster), protocol.Envelopes) for d in keys}
        for d, envelopes in opened.route(sealed).items():
            masked = protocol.decode(ask(d, envelopes), protocol.MaskedWords)
            opened.receive(d, masked)
        survivors = opened.survivors()
        shares = {
            d: protocol.decode(
                ask(d, protocol.Survivors(opened.session, survivors)), protocol.OpenedShares
            )
            for d in keys
        }
        total = opened.total(shares)
        self.book.close(opened, survivors, lost=any(k.lost for k in keys.values()), total=total)

    def expect(self, devices: list[int]) -> None:
        """The direction is the mean of these devices' latest gradients, weighted by their rates."""
        weights = np.array([3.0 * (d + 1) for d in devices])
        mean = weights @ np.stack([self.latest[d] for d in devices]) / weights.sum()
        np.testing.assert_allclose(self.server.estimator.direction(), mean, atol=1e-6)  # type: ignore[arg-type]


def test_the_latest_of_every_device_counts_across_rounds_and_restarts() -> None:
    fleet = FleetProfiles()
    fleet.round([0, 1])
    fleet.round([1, 2])
    fleet.restart()
    fleet.expect([0, 1, 2])
    fleet.round([2, 3])
    fleet.expect([0, 1, 2, 3])


def test_without_an_estimator_there_is_no_direction() -> None:
    fleet = FleetProfiles()
    fleet.round([0, 1], silent=True)
    assert fleet.server.estimator.direction() is None
    fleet.round([0, 1])
    fleet.expect([0, 1])


@pytest.mark.parametrize("max_age", [None, 2])
def test_the_sum_begins_anew_after_some_rounds(
    max_age: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if max_age is None:
        monkeypatch.setattr("fedkeep.privacy.secagg.server._REBASE_ROUNDS", 2)
    fleet = FleetProfiles(max_age=max_age)
    fleet.round([0, 1])
    fleet.round([1, 2])
    fleet.expect([0, 1, 2])
    fleet.round([2, 3])
    fleet.expect([2, 3])


def test_it_begins_anew_when_too_much_of_it_is_of_devices_that_left() -> None:
    fleet = FleetProfiles()
    fleet.round([0, 1, 2, 3])
    fleet.server.coordinate(profiles(range(3)))
    fleet.round([0, 1])
    fleet.round([1, 2])
    fleet.expect([1, 2])


def test_a_session_is_never_used_again_and_needs_a_plan() -> None:
    fleet = FleetProfiles()
    assert fleet.book.open([0, 1, 2]).session != fleet.book.open([0, 1, 2]).session
    fleet.server.discard_plan()
    with pytest.raises(RejectedError, match="no plan"):
        fleet.book.open([0, 1, 2])


def test_limits_without_an_end_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"finite limits\.gradient_norm"):
        SecureAggregationServer(
            server_of(IncrementalEstimator(), Limits(gradient_norm=np.inf)), OPTIONS, G
        )
