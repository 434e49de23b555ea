"""Rules in an agent: what they hold outlives kills and restarts, and `why` names them."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fedkeep.agent.agent import Agent
from fedkeep.agent.arrivals import Arrival
from fedkeep.agent.assembly import assemble, parse_config
from fedkeep.agent.retention import DAY
from fedkeep.core.errors import ConfigError
from fedkeep.core.rules.options import Rule
from fedkeep.core.rules.store import HeldSample, RuledStore
from fedkeep.protocol.framing import receive_frame, send_frame
from tests.agent.builders import AssembledAgent, arrival, make_agent
from tests.agent.test_agent_process import lines, outcome, start, wait_until_ready, write_config
from tests.agent.test_orders_of_events import client
from tests.agent.test_sources import _connect
from tests.faults import agents

RULES: list[dict[str, Any]] = [
    {"name": "alarms", "when": 'speed > 3 and unit == "V"', "slots": 20, "ttl_days": 2.0},
    {"name": "crash", "when": "shock > 9", "slots": 30, "before": 20, "after": 5},
    {"name": "private", "when": "has(secret)", "action": "never"},
    {"name": "rare", "when": "label == 2", "action": "least", "n": 3, "per": "hour", "slots": 9},
    {"name": "calm", "when": "speed < 1", "action": "most", "n": 5, "per": "minute"},
]


def ruled(
    folder: Path, rules: list[dict[str, Any]] = RULES, budget: int = 100_000
) -> AssembledAgent:
    policy = {"name": "balanced-reservoir"}
    return make_agent(folder, policy=policy, rule=rules, store={"budget": budget})


def pour(agent: Agent, numbers: range, **more: Any) -> dict[int, str]:
    """Samples with fields, judged and committed; gives what was acknowledged."""
    fates: dict[int, str] = {}
    rng = np.random.default_rng(numbers.start)
    for i in numbers:
        fields = {"speed": float(rng.integers(0, 6)), "unit": "VA"[i % 2], **more}
        fields |= {"shock": 10} if i % 60 == 40 else {}
        fields |= {"secret": 1} if i % 31 == 0 else {}
        x = rng.standard_normal(6).astype(np.float32)

        def told(fate: str, i: int = i) -> None:
            fates[i] = fate

        agent.intake.offer(Arrival(x, i % 3, f"n{i}", "src", told, fields=fields), wait=True)
        if len(agent.intake) >= 16:
            agent.step(0.0)
    while agent.step(0.0):
        pass
    assert agent.commit()
    return fates


def holding(agent: Agent) -> dict[str, set[int]]:
    found = {rule["name"]: set[int]() for rule in RULES if "slots" in rule}
    for id_ in agent.store.records:
        for name in agent.store.holders(id_):
            if name in found:
                found[name].add(id_)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_what_rules_hold_is_the_same_after_a_kill_between_whole_commits(
    tmp_path: Path, seed: int
) -> None:
    assembly = ruled(tmp_path)
    agent = assembly.agent
    fates = Counter[str]()
    for turn in range(4):
        fates.update(
            pour(agent, range(1000 * seed + 250 * turn, 1000 * seed + 250 * turn + 250)).values()
        )
        agent.commit(whole=turn % 2 == 0)
        held, stored = holding(agent), {*agent.store.records}
        assert stored == {*agent.store.ranks()["ids"].tolist()}
        assert len(held["alarms"]) <= 20
        assert len(held["crash"]) <= 30
        assembly.disk.close()  # as a kill does: nothing more is written
        assembly = ruled(tmp_path)
        agent = assembly.agent
        assert {*agent.store.records} == stored
        assert holding(agent) == held
    assert fates["refused.rule"] == len(
        [i for i in range(1000 * seed, 1000 * seed + 1000) if i % 31 == 0]
    )
    index = agent.store._index
    assert isinstance(index, RuledStore)
    assert len(index.stored().batch) <= agent.device.capacity
    agent.erase([*held["crash"]][:3])
    assert not {*held["crash"]} - {*agent.store.records} - {*[*held["crash"]][:3]}
    assembly.disk.close()


def test_why_names_the_rule(tmp_path: Path) -> None:
    rules = [
        {"name": "alarms-of-the-night-shift", "when": "alarm", "slots": 5},
        {"name": "private", "when": "secret", "action": "never"},
    ]
    assembly = ruled(tmp_path, rules)
    agent = assembly.agent
    agent.store._index.configure(np.zeros(3, dtype=np.int64))
    agent.device.selection.divide = lambda: None  # type: ignore[method-assign]
    for id_, fields in ((1, {"alarm": True}), (2, {"secret": True}), (3, {})):
        x = np.ones(6, np.float32) * id_
        agent.intake.offer(Arrival(x, 0, id_, "src", fields=fields), wait=True)
    while agent.step(0.0):
        pass
    told = [(line.verdict, line.policy) for id_ in (1, 2) for line in agent.store.log.about(id_)]
    assert told == [("kept", "rule alarms-of-the-night-shift"), ("refused", "rule private")]
    assert agent.counters["refused.rule"] == 1
    assembly.disk.close()


def test_a_rule_has_its_own_ttl(tmp_path: Path) -> None:
    assembly = ruled(tmp_path)
    agent = assembly.agent
    pour(agent, range(1, 120))
    alarms = holding(agent)["alarms"] - holding(agent)["crash"]
    clock = agent.store.clock
    begun = clock.now()
    clock.now = lambda: begun + 3 * DAY  # type: ignore[method-assign]
    agent.remove_expired()
    left = {*agent.store.records}
    assert alarms
    assert not alarms & left
    assert holding(agent)["crash"] <= left
    assembly.disk.close()


def test_rules_that_go_leave_their_samples_to_the_policy_and_new_ones_take_slots(
    tmp_path: Path,
) -> None:
    assembly = ruled(tmp_path)
    pour(assembly.agent, range(1500))
    stored = {*assembly.agent.store.records}
    assembly.disk.close()
    plain = ruled(tmp_path, [])
    assert {*plain.agent.store.records} == stored
    pour(plain.agent, range(2000, 3000))
    plain.disk.close()
    with pytest.raises(ConfigError, match="set it to 1"):  # their names take room, too
        ruled(tmp_path)
    again = ruled(tmp_path, budget=140_000)
    pour(again.agent, range(4000, 5000))
    index = again.agent.store._index
    assert isinstance(index, RuledStore)
    assert len(index.stored().batch) <= again.agent.device.capacity
    assert {*again.agent.store.records} == {*index.ranks()["ids"].tolist()}
    again.disk.close()


def test_slots_beyond_the_store_are_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lower their slots"):
        ruled(tmp_path, [{"name": "a", "when": "ok", "slots": 100_000}])


RULED = """
[[source]]
kind = "socket"
address = "unix://{folder}/in"
[[rule]]
name = "alarms"
when = "alarm"
slots = 250
[[rule]]
name = "before"
when = "trigger"
slots = 60
before = 16
after = 4
"""


def test_kills_with_rules_under_way_lose_nothing_acknowledged(tmp_path: Path) -> None:
    write_config(tmp_path, RULED.format(folder=tmp_path))
    rng, number = random.Random(3), 0
    kept: set[str] = set()
    for _ in range(6):
        process = start(tmp_path, "agent.toml")
        wait_until_ready(tmp_path, process)
        with client(tmp_path) as agent:
            assert all(agent.why(name).stored for name in kept)
        sender = _connect(f"unix://{tmp_path}/in")
        sent: list[str] = []
        for _ in range(120):
            alarm = rng.random() < 0.25
            name = f"{'alarm' if alarm else 'calm'}-{number}"
            number += 1
            record = {"x": [rng.random() for _ in range(6)], "y": number % 3, "id": name}
            record |= {"alarm": True} if alarm else {"trigger": rng.random() < 0.05}
            send_frame(sender, msgspec.msgpack.encode(record))
            sent.append(name)
        for name in sent[: rng.randrange(20, 110)]:
            fate = msgspec.msgpack.decode(receive_frame(sender) or b"")["fate"]
            if name.startswith("alarm"):
                assert fate in ("kept", "replaced")
                kept.add(name)
        process.kill()
        process.communicate()
        sender.close()
        assert sum(file.stat().st_size for file in tmp_path.glob("a.store*")) <= 200_000
    assert len(kept) > 30


def test_a_wrong_rule_ends_the_start_with_its_place(tmp_path: Path) -> None:
    wrong = '[[rule]]\nname = "alarms"\nwhen = "speed > and 3"\nslots = 5\n'
    (tmp_path / "in.jsonl").write_text(lines(3))
    write_config(tmp_path, '[[source]]\nkind = "lines"\npath = "in.jsonl"\n' + wrong)
    code, errors = outcome(tmp_path, "agent.toml", "--until-sources-end")
    assert code == 2
    assert errors.endswith(
        "rule 'alarms': expected a field, a number or a text, found 'and'\n"
        "    speed > and 3\n"
        "            ^\n"
    )
    assert "Traceback" not in errors


BEFORE = [{"name": "alarms", "when": "label == 2", "slots": 8, "before": 2}]


def refused_first(assembly: AssembledAgent) -> int:
    """Fills the store until a sample has no place; gives its id. A rule may hold it later."""
    for id_ in range(10_000):
        came, fates = arrival(id_, label=id_ % 2), list[str]()
        came.acknowledge = fates.append
        assembly.agent.judge([came])
        assert assembly.agent.commit()
        if fates == ["refused.score"]:
            return id_
    raise AssertionError("the store is never full")


def test_what_was_erased_is_not_held_by_an_alarm_that_comes_after(tmp_path: Path) -> None:
    assembly = ruled(tmp_path, BEFORE)
    refused = refused_first(assembly)
    assembly.agent.erase([refused])
    assembly.agent.judge([arrival(20_000, label=2)])
    assert assembly.agent.commit()
    assert 20_000 in assembly.agent.store.records
    assert refused not in assembly.agent.store.records
    assembly.disk.close()


def test_what_an_alarm_holds_afterwards_is_as_old_as_when_it_came(tmp_path: Path) -> None:
    policy = {"name": "balanced-reservoir"}
    store = {"budget": 100_000, "ttl_days": 30.0, "clock_tolerance_hours": 0.0}
    assembly = make_agent(tmp_path, policy=policy, rule=BEFORE, store=store)
    refused = refused_first(assembly)
    assembly.agent.store.clock._age_at_start += 20 * DAY
    assembly.agent.judge([arrival(20_000, label=2)])
    assert refused in assembly.agent.store.records
    assembly.agent.store.clock._age_at_start += 11 * DAY
    assert assembly.agent.remove_expired()
    assert [*assembly.agent.store.records] == [20_000]
    assembly.disk.close()


@pytest.mark.parametrize("whole", [True, False])
def test_every_restart_keeps_all_that_policy_and_rules_hold(tmp_path: Path, whole: bool) -> None:
    table, rng = agents.table_of("files under rules", tmp_path), np.random.default_rng(3)
    (tmp_path / "copy").mkdir()
    copy = agents.table_of("files under rules", tmp_path / "copy")
    agent, erased = assemble(parse_config(table)), set[int]()
    for step in range(70):
        agents.take_step(agent, step, rng, erased)
        if whole:
            assert agent.commit()
        (tmp_path / "copy" / "a.store").write_bytes((tmp_path / "a.store").read_bytes())
        again = assemble(parse_config(copy))
        assert agents.held_by(again, erased) == agents.held_by(agent, erased), step
        again.store.file.disk.close()
    agent.store.file.disk.close()


def read_back(slots: int, *held: int) -> RuledStore:
    """A store of four samples in the policy's three slots, of which rules held some when they came.

    Their scores rise.
    """
    rules = [Rule("alarms", "alarm", slots=slots)]
    store = RuledStore(np.array([3]), soft_quotas=True, rules=rules, labels=1)
    scores = np.array([0.1, 0.2, 0.3, 0.4])
    whole = {name: np.arange(4) for name in ("ids", "arrivals")}
    none = {name: np.zeros(4, np.int64) for name in ("regions", "uses", "y")}
    ranks = {"scores": scores, "effective": scores, "tiers": np.ones(4, np.int64)}
    store.restore({**whole, **none, **ranks, "x": np.zeros((4, 1)), "quotas": np.array([4])})
    for id_ in held:
        store.hold_again(HeldSample(id_, np.zeros(1), 0, 0, id_ / 10, id_), [(0, 0)])
    return store


def test_a_sample_leaves_the_policy_for_its_rule_before_another_makes_way() -> None:
    store = read_back(2, 1, 2, 3)
    store.leave_to_rules(np.array([3]))
    assert store.configure(np.array([3])) == []
    assert store.stored().batch.ids.tolist() == [0, 1, 3]
    assert store.held(2) is not None


def test_what_a_rule_alone_holds_does_not_make_way_for_what_the_policy_has_too() -> None:
    store = read_back(2, 2, 3)
    alone = HeldSample(9, np.zeros(1), 0, 0, 0.05, 9)
    store.hold_again(alone, [(0, 0)])
    assert store.held(9) is None
    store.hold_instead(alone, [(0, 0)])
    assert store.held(9) is not None
    assert [store.held(2) is None, store.held(3) is None] == [True, False]
    assert len(store) == 5
