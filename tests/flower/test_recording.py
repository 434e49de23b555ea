"""A real fleet's record: the simulator's lines, each round once through any crash, with reports."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedkeep.flower.recording import FleetRecorder
from fedkeep.flower.rounds import RoundOptions, ServerMetrics
from fedkeep.flower.state_store import StateStore
from fedkeep.flower.strategy import FedkeepStrategy
from fedkeep.protocol.messages import DeviceStats, Evaluated
from fedkeep.records import GistLine, Header, HoldingsLine, Members, PlanLine, compare, read_run
from fedkeep.records.runs import versions
from fedkeep.web.feed import DirectoryFeed
from tests.flower.small_fleet import SmallFleet

EVALUATED = RoundOptions(participation=1.0, deterministic=True, evaluate_every=2)


HEADER = Header(
    run="fleet",
    method="ode",
    task="fleet",
    seed=0,
    config={},
    config_hash="0",
    versions=versions(),
    labels=tuple("abcd"),
    devices=0,
    rounds=4,
)


def recorded(fleet: SmallFleet, path: Path, store: StateStore | None = None) -> FedkeepStrategy:
    strategy = fleet.strategy(store)
    strategy.recorder = FleetRecorder(path, HEADER)
    return strategy


def test_a_fleets_record_says_what_a_simulations_does(tmp_path: Path) -> None:
    fleet, path = SmallFleet(devices=3, options=EVALUATED), tmp_path / "fleet.jsonl"
    list(recorded(fleet, path).rounds(fleet.grid(), 4))
    run = read_run(path)
    assert [line.round for line in run.rounds] == [1, 2, 3, 4]
    assert all(line.participants == (0, 1, 2) for line in run.rounds)
    assert [line.round for line in run.evaluations] == [2, 4]
    last = run.evaluations[-1]
    assert last.accuracy is not None
    assert last.accuracy > 0.3
    assert len(last.device_accuracy) == 3
    assert last.bytes_up > 0 < last.bytes_down
    assert last.label_coverage == 1.0
    assert run.of(PlanLine)[0].devices == run.of(HoldingsLine)[-1].devices == (0, 1, 2)
    assert sum(map(sum, run.of(HoldingsLine)[-1].filled)) <= 3 * 6
    assert run.end is not None
    members = run.of(Members)[-1].members
    assert [(m.name, m.online, m.capacity) for m in members] == [
        (f"device {n}", True, 6) for n in range(3)
    ]
    assert all(m.stored and m.labels and m.seen and m.accuracy is not None for m in members)
    assert compare([run]).rows[0].method == "ode"
    update = DirectoryFeed(tmp_path).since(0)
    assert update is not None
    assert [m.device for m in update.views[0]["members"]] == [0, 1, 2]


def test_a_resumed_server_tells_each_round_once(tmp_path: Path) -> None:
    fleet, path, state = (
        SmallFleet(devices=3, options=EVALUATED),
        tmp_path / "fleet.jsonl",
        str(tmp_path / "state.db"),
    )
    rounds = recorded(fleet, path, StateStore(state, "run")).rounds(fleet.grid(), 4)
    next(rounds)
    next(rounds)
    rounds.close()  # type: ignore[attr-defined]
    with path.open("ab") as file:  # a round that was written and never committed, and a torn line
        file.write(
            path.read_bytes().splitlines(keepends=True)[-1].replace(b'"round":2', b'"round":3')
            + b'{"kind":"ro'
        )
    again = recorded(fleet, path, StateStore(state, "run"))
    assert again.resume()
    list(again.rounds(fleet.grid(), 4))
    run = read_run(path)
    assert [line.round for line in run.rounds] == [1, 2, 3, 4]
    assert run.evaluations[1].bytes_up > run.evaluations[0].bytes_up, "bytes count on"
    assert run.end is not None


def test_who_leaves_and_who_is_refused_is_named(tmp_path: Path) -> None:
    options = replace(EVALUATED, deterministic=False, deadline=1.0, quorum=0.1)
    fleet, path = SmallFleet(devices=3, options=options), tmp_path / "fleet.jsonl"
    plain = fleet.apps[1]

    def failing(message, context):  # type: ignore[no-untyped-def]
        if message.metadata.message_type == "train":
            raise ValueError("no")
        return plain(message, context)

    fleet.apps[1] = failing
    grid, strategy = fleet.grid(), recorded(fleet, path)
    strategy.metrics = ServerMetrics()
    rounds = strategy.rounds(grid, 3)
    next(rounds)
    del grid.nodes[1002]
    list(rounds)
    run = read_run(path)
    assert run.rounds[0].refused_devices == {"error": (1,)}
    members = {m.device: m for m in run.of(Members)[-1].members}
    assert (members[2].online, members[0].online) == (False, True)
    assert members[1].refused == "error"
    pytest.importorskip("prometheus_client")
    figures = {m.name: m.samples[0].value for m in strategy.metrics.collect()}
    assert figures["fedkeep_server_round"] == 3
    assert figures["fedkeep_server_refusals"] == 3
    assert figures["fedkeep_server_devices_online"] == 2


@pytest.mark.parametrize("name", ["local", "shared"])
def test_a_fleets_record_says_what_its_gists_did(tmp_path: Path, name: str) -> None:
    table = {"gist": {"mode": name}}
    fleet, path = (
        SmallFleet(devices=3, policy="balanced-reservoir", options=EVALUATED, table=table),
        tmp_path / "fleet.jsonl",
    )
    list(recorded(fleet, path).rounds(fleet.grid(), 4))
    lines = read_run(path).of(GistLine)
    assert [(line.round, line.participations) for line in lines] == [(2, 3), (4, 3)]
    figures = [fleet.device(number)._last["gist"] for number in range(3)]
    trust, likeness, worth, reach = np.mean(figures, axis=0)
    last = lines[-1]
    assert (last.trust, last.likeness, last.worth, last.reach) == pytest.approx(
        (trust, likeness, worth, reach)
    )
    assert 0 < last.trust < 1


def test_gradients_under_a_budget_are_not_told_of_in_figures(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="needs the privacy extra")
    table = {
        "gist": {"mode": "local"},
        "privacy": {"epsilon": 8.0, "protect": ["model"], "planned_participations": 4},
    }
    fleet, path = (
        SmallFleet(devices=3, policy="balanced-reservoir", options=EVALUATED, table=table),
        tmp_path / "fleet.jsonl",
    )
    list(recorded(fleet, path).rounds(fleet.grid(), 2))
    run = read_run(path)
    assert run.of(HoldingsLine)
    assert not run.of(GistLine)


def test_arrivals_before_a_resume_are_not_counted_again(tmp_path: Path) -> None:
    said = {0: Evaluated(1, 0.5, 1, vitals=DeviceStats(1, (1,), arrivals=10, kept=4))}
    recorder = FleetRecorder(tmp_path / "fleet.jsonl", HEADER)
    assert recorder._since_reported(said)["arrivals"] == 10
    again = FleetRecorder(tmp_path / "fleet.jsonl", HEADER)
    again._resumed = True
    assert again._since_reported(said)["arrivals"] == 0
    again._evaluated = said
    more = again._since_reported(
        {0: Evaluated(1, 0.5, 1, vitals=DeviceStats(1, (1,), arrivals=13, kept=5))}
    )
    assert (more["arrivals"], more["kept"]) == (3, 1)


def test_a_device_that_dies_in_a_round_is_away_before_the_round_ends(tmp_path: Path) -> None:
    options = replace(EVALUATED, deterministic=False, deadline=1.0, quorum=0.1)
    fleet, path = SmallFleet(devices=3, options=options), tmp_path / "fleet.jsonl"
    grid, strategy = fleet.grid(), recorded(fleet, path)

    def dying(message, context):  # type: ignore[no-untyped-def]
        if message.metadata.message_type == "train":
            grid.nodes.pop(1001, None)
        return plain(message, context)

    plain, fleet.apps[1] = fleet.apps[1], dying
    grid.nodes[1001].app = dying
    push = grid.push_messages

    def lost(messages):  # type: ignore[no-untyped-def]
        ids = push(messages)
        grid._replies = {
            key: r for key, r in grid._replies.items() if r.metadata.src_node_id in grid.nodes
        }
        return ids

    grid.push_messages = lost  # type: ignore[method-assign]
    rounds = strategy.rounds(grid, 1)
    next(rounds)
    seen = [
        [member.online for member in line.members]
        for line in read_run(path).of(Members)
        if line.round == 0
    ]
    assert [True, False, True] in seen


def test_masked_and_noised_devices_say_nothing_of_their_stores(tmp_path: Path) -> None:
    pytest.importorskip("Crypto", reason="needs the privacy extra")
    fleet, path = (
        SmallFleet(devices=3, options=EVALUATED, table={"privacy": {"secure_aggregation": True}}),
        tmp_path / "f.jsonl",
    )
    strategy = recorded(fleet, path)
    list(strategy.rounds(fleet.grid(), 2))
    run = read_run(path)
    assert not run.of(HoldingsLine)
    assert all(m.stored is None for m in run.of(Members)[-1].members)
    assert np.isfinite(run.evaluations[-1].accuracy or np.nan)
