"""Rules and samples whose labels come later: what is forbidden or wanted counts at once."""

import io
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedkeep.agent.agent import Agent
from fedkeep.agent.arrivals import Arrival
from fedkeep.agent.retention import DAY
from fedkeep.agent.service import StreamApi
from fedkeep.cli.app import app
from fedkeep.core.errors import ConfigError, RejectedError
from fedkeep.core.waiting import UNLABELLED, Departure, WaitingOptions, WaitingRoom
from fedkeep.protocol import messages
from tests.agent.builders import SHAPE, AssembledAgent, make_agent
from tests.agent.test_agent_process import running

RULES: list[dict[str, Any]] = [
    {"name": "alarms", "when": "alarm", "slots": 6, "before": 2, "after": 1, "ttl_days": 9.0},
    {"name": "private", "when": 'zone == "home"', "action": "never"},
    {"name": "no-cars", "when": "label == 2 and not alarm", "action": "never"},
    {"name": "fast", "when": "speed > 5 and label == 1", "slots": 4},
    {"name": "daily", "when": "has(lamp)", "action": "most", "n": 2, "per": "day"},
]
NOON = 1_790_000_000.0 // DAY * DAY + DAY / 2


def made(folder: Path) -> Agent:
    return make_agent(
        folder,
        rule=RULES,
        waiting={"share": 0.5, "rule": "oldest"},
        policy={"name": "balanced-reservoir"},
        store={"extra_bytes": 32, "budget": 100_000},
    ).agent


def again(agent: Agent, folder: Path) -> Agent:
    agent.store.file.disk.close()
    return made(folder)


def come(agent: Agent, *samples: dict[str, Any]) -> list[str]:
    """Samples, or labels where one has `y` alone; gives their fates, on the disk."""
    fates: dict[int, str] = {}
    arrivals = []
    for place, sample in enumerate(samples):
        fields = dict(sample)
        id_, y, source = fields.pop("id"), fields.pop("y", None), fields.pop("source", "gate")
        x = np.random.default_rng(id_).standard_normal(SHAPE).astype(np.float32)
        time = fields.pop("at", float("nan"))

        def told(fate: str, place: int = place) -> None:
            fates[place] = fate

        if y is None:
            arrivals.append(Arrival(x, None, id_, source, told, time=time, fields=fields))
        else:
            arrivals.append(Arrival(None, y, id_, source, told, label_only=True))
    agent.judge(arrivals)
    assert agent.commit()
    return [fates[place] for place in range(len(samples))]


def test_what_is_never_stored_does_not_wait_either(tmp_path: Path) -> None:
    agent = made(tmp_path)
    fates = come(agent, {"id": 1, "zone": "home"}, {"id": 2, "zone": "hall"}, {"id": 3})
    assert fates == ["refused.rule", "waiting", "waiting"]
    assert [*agent.store.unlabelled] == [2, 3]
    [reason] = agent.store.log.about(1)
    assert "private" in str(reason)
    assert 1 not in again(agent, tmp_path).store.unlabelled


def test_a_rule_on_the_label_forbids_when_the_label_comes(tmp_path: Path) -> None:
    agent = made(tmp_path)
    come(agent, {"id": 1}, {"id": 2, "alarm": True}, {"id": 3})
    assert come(agent, {"id": 1, "y": 2}, {"id": 2, "y": 2}, {"id": 3, "y": 0}) == [
        "refused.rule",
        "kept",
        "kept",
    ]
    assert sorted(agent.store.records) == [2, 3]
    assert not agent.store.unlabelled
    assert agent.device.waiting is not None
    assert len(agent.device.waiting) == 0
    found = again(agent, tmp_path)
    assert sorted(found.store.records) == [2, 3]
    assert not found.store.unlabelled


@pytest.mark.parametrize("killed", [False, True])
def test_an_alarm_that_waits_is_held_with_what_came_before_and_after(
    tmp_path: Path, killed: bool
) -> None:
    agent = made(tmp_path)
    samples = [{"id": id_, **({"alarm": True} if id_ == 5 else {})} for id_ in range(1, 9)]
    for sample in samples[:3]:
        come(agent, sample)
    come(agent, *samples[3:])
    wanted = {3: ("alarms",), 4: ("alarms",), 5: ("alarms",), 6: ("alarms",)}
    notes = agent.store.unlabelled
    assert {id_: note.rules for id_, note in notes.items() if note.rules} == wanted
    if killed:
        agent = again(agent, tmp_path)
        notes = agent.store.unlabelled
        assert {id_: note.rules for id_, note in notes.items() if note.rules} == wanted
    come(agent, *({"id": id_, "y": 0} for id_ in range(1, 9)))
    held = {id_ for id_ in agent.store.records if "alarms" in agent.store.holders(id_)}
    assert held == {3, 4, 5, 6}
    assert agent._ttl_of(5, 1.0) == 9.0


def test_the_fields_of_a_record_are_known_when_its_label_comes(tmp_path: Path) -> None:
    agent = made(tmp_path)
    come(agent, {"id": 1, "speed": 9.0}, {"id": 2, "speed": 1.0}, {"id": 3, "speed": 9.0})
    come(agent, {"id": 1, "y": 1}, {"id": 2, "y": 1}, {"id": 3, "y": 0})
    assert {id_: agent.store.holders(id_) for id_ in (1, 2, 3)} == {1: ["fast"], 2: [], 3: []}
    assert agent._fields == {}


def test_a_limit_of_each_day_is_by_the_samples_day_not_the_labels(tmp_path: Path) -> None:
    agent = made(tmp_path)
    day = [{"id": id_, "lamp": 1, "at": NOON + DAY * (id_ // 10)} for id_ in (1, 2, 3, 11, 12, 13)]
    agent.store.clock.wall = lambda: NOON + 2 * DAY
    come(agent, *day)
    come(agent, *({"id": one["id"], "y": 0} for one in day))
    assert len([id_ for id_ in agent.store.records if id_ < 10]) == 2
    assert len([id_ for id_ in agent.store.records if id_ > 10]) == 2


def test_what_a_rule_wants_kept_is_displaced_by_no_other() -> None:
    room = WaitingRoom(WaitingOptions(0.5, "random", max_age=4), slots=4, labels=2, seed=0)
    x = np.zeros((1, 2), np.float32)
    for id_ in range(40):
        room.offer(x, np.array([id_]), None, held=id_ in (3, 20, 30))
    assert {3, 20} <= {*room.ids.tolist()}
    assert 30 not in room  # at most half of the room is held
    state = room.snapshot()
    other = WaitingRoom(WaitingOptions(0.5, "random", max_age=4), slots=4, labels=2, seed=0)
    other.restore(state)
    for id_ in range(40, 80):
        other.offer(x, np.array([id_]), None)
    assert {3, 20} <= {*other.ids.tolist()}
    other.leave(np.array([3]), Departure.LABELLED)
    assert other.hold(int(other.ids[-1]))
    assert not other.hold(99)


def pulled(agent: Agent, **chosen: Any) -> dict[int, int]:
    part = StreamApi(agent)._pull(messages.Pull(messages.SampleFilter(**chosen)))
    for sample in part.samples:
        x = np.random.default_rng(sample.id).standard_normal(SHAPE).astype(np.float32)
        assert sample.data == x.tobytes()
    return {sample.id: sample.label for sample in part.samples}


def test_samples_are_pulled_by_rule_and_before_they_have_labels(tmp_path: Path) -> None:
    agent = made(tmp_path)
    come(agent, *({"id": id_, **({"alarm": True} if id_ in (1, 6) else {})} for id_ in range(1, 8)))
    come(agent, {"id": 1, "y": 0}, {"id": 3, "y": 1})
    assert pulled(agent) == {1: 0, 3: 1}
    assert pulled(agent, rules=("alarms",)) == {1: 0}
    assert pulled(agent, labels=("unlabelled",)) == dict.fromkeys((2, 4, 5, 6, 7), UNLABELLED)
    both = pulled(agent, labels=("unlabelled", "0"), rules=("alarms",))
    assert both == {1: 0, **dict.fromkeys((2, 4, 5, 6, 7), UNLABELLED)}
    assert pulled(agent, labels=("unlabelled",), ids=("5",)) == {5: UNLABELLED}
    with pytest.raises(RejectedError, match="there is no rule 'alarm'"):
        pulled(agent, rules=("alarm",))
    agent.store.file.disk.close()
    for chosen, ids in (
        (["--rule", "alarms", "--label", "0"], [1]),
        (["--label", "unlabelled"], [2, 4, 5, 6, 7]),
    ):
        out = tmp_path / f"{len(ids)}.npz"
        command = ["agent", "store", "export", str(tmp_path / "a.store"), str(out), *chosen]
        assert CliRunner().invoke(app, command).exit_code == 0
        with np.load(out) as arrays:
            assert sorted(arrays["ids"].tolist()) == ids


def test_what_a_rule_holds_may_leave_by_consent(tmp_path: Path) -> None:
    tables = {"rule": RULES, "policy": {"name": "balanced-reservoir"}}
    upload = {"enabled": True, "to": str(tmp_path / "out"), "rules": ["alarms"]}
    agent = make_agent(tmp_path, upload=upload, **tables).agent
    for id_ in range(1, 6):
        x = np.zeros(SHAPE, np.float32) + id_
        agent.judge([Arrival(x, 0, id_, "gate", fields={"alarm": True} if id_ == 4 else {})])
    assert agent.commit()
    assert agent.uploads is not None
    assert [note.id for note in agent.uploads.waiting()] == [2, 3, 4, 5]
    agent.store.file.disk.close()
    with pytest.raises(ConfigError, match="there is no rule 'alarm'"):
        make_agent(tmp_path, upload={**upload, "rules": ["alarm"]}, **tables)


def test_files_that_wait_are_held_and_forbidden_likewise(tmp_path: Path) -> None:
    decoder = {"decoder": "npy", "payload_bytes": 4096}
    assembly: AssembledAgent = make_agent(
        tmp_path,
        samples=decoder,
        rule=RULES[:2],
        waiting={"share": 0.5, "rule": "oldest"},
        policy={"name": "balanced-reservoir"},
        store={"budget": 400_000},
    )
    agent = assembly.agent

    def npy(seed: int) -> bytes:
        file = io.BytesIO()
        np.save(file, np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32))
        return file.getvalue()

    files = {id_: npy(id_) for id_ in range(1, 6)}
    for id_, content in files.items():
        fields: dict[str, Any] = {"alarm": True} if id_ == 3 else {}
        fields |= {"zone": "home"} if id_ == 4 else {}
        agent.judge([Arrival(content, None, id_, "gate", fields=fields)])
    assert agent.commit()
    alarms = ("alarms",)
    found = {id_: note.rules for id_, note in agent.store.unlabelled.items()}
    assert found == {1: alarms, 2: alarms, 3: alarms, 5: ()}
    assert not any(files[4] == found for found in agent.store._files.values())
    agent.judge([Arrival(None, 1, id_, "gate", label_only=True) for id_ in (1, 2, 3)])
    assert agent.commit()
    assert agent.store.payload(2) == files[2]
    assert "alarms" in agent.store.holders(2)


def test_what_a_rule_forbids_is_no_fault_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "agent.toml").write_text(
        """
        [samples]
        shape = [6]
        labels = 3
        decoder = "npy"
        [waiting]
        share = 0.5
        [store]
        path = "a.store"
        [agent]
        socket = "a.sock"
        [[rule]]
        name = "home"
        when = 'zone == "home"'
        action = "never"
        [[source]]
        kind = "folder"
        path = "in"
        """
    )
    (tmp_path / "in").mkdir()
    for number in range(3):
        np.save(tmp_path / "in" / f"{number}.npy", np.full(SHAPE, number, np.float32))
        beside = {"zone": "home" if number < 2 else "hall"}
        (tmp_path / "in" / f"{number}.npy.json").write_text(json.dumps(beside))
    with running(tmp_path, "agent.toml"):
        deadline = time.monotonic() + 30
        while left := [path for path in (tmp_path / "in").rglob("*") if path.is_file()]:
            assert time.monotonic() < deadline, left
            assert not (tmp_path / "in" / "refused").exists()
            time.sleep(0.05)
