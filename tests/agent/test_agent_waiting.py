"""Samples without labels in an agent: kept once acknowledged, within the budget, and erased."""

import json
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fedkeep.agent.agent import Agent
from fedkeep.agent.arrivals import Arrival
from fedkeep.agent.assembly import assemble, parse_config
from fedkeep.agent.service import Collector, summarise
from fedkeep.core.errors import ConfigError
from fedkeep.protocol.client import AgentClient
from fedkeep.protocol.framing import receive_frame, send_frame
from fedkeep.protocol.messages import Erase
from tests.agent.builders import AssembledAgent, arrival, config_table, make_agent, order
from tests.agent.test_agent_process import running, start, wait_until_ready, write_config
from tests.agent.test_agent_promises import eventually, full_disk
from tests.agent.test_sources import _connect
from tests.faults.power_loss import RecordingDisk, crash_image

WAITING: dict[str, Any] = {"share": 0.5, "rule": "oldest"}
RANDOM: dict[str, Any] = {"policy": {"name": "balanced-reservoir"}, "waiting": WAITING}


def unlabelled(id_: Any, source: str = "test") -> Arrival:
    x = arrival(id_ if isinstance(id_, int) else 1).x
    return Arrival(x, None, id_, source)


def label(id_: Any, y: Any, source: str = "test") -> Arrival:
    return Arrival(None, y, id_, source, label_only=True)


def judged(agent: Agent, *arrivals: Arrival) -> list[str]:
    """Their fates, once they are on the disk."""
    fates: dict[int, str] = {}
    for place, one in enumerate(arrivals):
        one.acknowledge = lambda fate, place=place: fates.__setitem__(place, fate)  # type: ignore[misc]
    agent.judge(list(arrivals))
    assert agent.commit()
    return [fates[place] for place in range(len(arrivals))]


def again(assembly: AssembledAgent, folder: Path, **tables: Any) -> AssembledAgent:
    assembly.disk.close()
    return make_agent(folder, **tables)


def test_a_sample_waits_and_is_stored_once_its_label_comes(tmp_path: Path) -> None:
    made = make_agent(tmp_path, **RANDOM)
    assert judged(made.agent, unlabelled(1), unlabelled(2)) == ["waiting", "waiting"]
    assert (len(made.agent.store), len(made.agent.store.unlabelled)) == (0, 2)
    made = again(made, tmp_path, **RANDOM)
    room = made.agent.device.waiting
    assert room is not None
    assert room.ids.tolist() == [1, 2]
    assert judged(made.agent, label(1, 2), label(1, 2), label(1, 0)) == [
        "kept",
        "known",
        "corrected",
    ]
    made = again(made, tmp_path, **RANDOM)
    store = made.agent.store
    assert (store.stored().batch.ids.tolist(), store.stored().batch.y.tolist()) == ([1], [0])
    np.testing.assert_array_equal(store.stored().batch.x[0], arrival(1).x)
    assert [*store.unlabelled] == [2]
    made.disk.close()


def test_wrong_labels_are_refused_and_those_of_nothing_remembered(tmp_path: Path) -> None:
    made = make_agent(tmp_path, **RANDOM)
    came = [label(1, 3), label(1, "ok"), label(None, 1), label(float("nan"), 1), label(5, 1)]
    assert judged(made.agent, *came) == [
        "refused.label",
        "refused.label",
        "refused.id",
        "refused.id",
        "remembered",
    ]
    made = again(made, tmp_path, **RANDOM)
    assert judged(made.agent, unlabelled(5)) == ["kept"]
    assert made.agent.store.stored().batch.y.tolist() == [1]
    made.disk.close()


def test_without_a_room_samples_need_labels_and_labels_correct(tmp_path: Path) -> None:
    made = make_agent(tmp_path, policy={"name": "balanced-reservoir"})
    assert judged(made.agent, unlabelled(1), arrival(2, label=0), label(2, 1), label(3, 1)) == [
        "refused.label",
        "kept",
        "corrected",
        "refused.no-sample",
    ]
    made.disk.close()


def test_an_early_label_is_answered_once_it_is_on_the_disk(tmp_path: Path) -> None:
    made = make_agent(tmp_path, **RANDOM)
    told: list[str] = []
    made.agent.judge([Arrival(None, 1, 9, "test", told.append, label_only=True)])
    assert made.agent.commit(whole=False)
    assert told == []
    assert made.agent.commit()
    assert told == ["remembered"]
    made.disk.close()


def test_labels_come_by_another_source_of_the_same_namespace(tmp_path: Path) -> None:
    def source(name: str, namespace: str) -> dict[str, Any]:
        return {"kind": "lines", "path": "-", "name": name, "namespace": namespace}

    sources = [source("mill", "mill"), source("lab", "mill"), source("other", "other")]
    made = make_agent(tmp_path, **RANDOM, source=sources)
    assert judged(made.agent, unlabelled("a", "mill"), label("a", 1, "other")) == [
        "waiting",
        "remembered",
    ]
    assert judged(made.agent, label("a", 2, "lab")) == ["kept"]
    assert made.agent.store.stored().batch.y.tolist() == [2]
    assert [note.source for note in made.agent.store.notes()] == ["mill"]
    made.disk.close()


def test_a_store_with_samples_makes_room_only_where_it_has_some(tmp_path: Path) -> None:
    plain = {"policy": {"name": "balanced-reservoir"}, "store": {"budget": 84_000}}
    made = make_agent(tmp_path, **plain)
    capacity = made.agent.device.capacity
    judged(made.agent, *(arrival(id_) for id_ in range(capacity)))
    stored = made.agent.store.stored().batch.ids.tolist()
    made.disk.close()
    with pytest.raises(ConfigError, match=r"holds \d+ samples, and \[waiting\] share = 0.5 leaves"):
        make_agent(tmp_path, **plain, waiting=WAITING)
    more = {**plain, "store": {"budget": 200_000}}
    made = make_agent(tmp_path, **more, waiting=WAITING)
    assert made.agent.store.stored().batch.ids.tolist() == stored
    assert judged(made.agent, unlabelled(9000)) == ["waiting"]
    made = again(made, tmp_path, **more)
    assert made.agent.store.stored().batch.ids.tolist() == stored
    assert made.agent.commit()
    assert not made.agent.store.unlabelled
    made.disk.close()


@pytest.mark.parametrize("rule", ["oldest", "newest", "balanced", "random"])
def test_the_budget_is_kept_however_samples_and_labels_come(tmp_path: Path, rule: str) -> None:
    tables = {**RANDOM, "waiting": {"share": 0.4, "rule": rule}, "store": {"budget": 84_000}}
    made = make_agent(tmp_path, **tables)
    rng, agent = np.random.default_rng(3), made.agent
    room = agent.device.waiting
    assert room is not None
    slots = agent.device.capacity + room.slots
    for step in range(60):
        ids = rng.integers(0, 3 * slots, 8).tolist()
        came = [
            (unlabelled(id_), label(id_, id_ % 3), arrival(id_), label(id_, (id_ + 1) % 3))[kind]
            for id_, kind in zip(ids, rng.integers(0, 4, 8).tolist(), strict=True)
        ]
        agent.judge(came)
        assert agent.commit(whole=bool(step % 3 == 0))
        assert len(agent.store) + len(room) <= slots
        assert not {*agent.store.records} & {*agent.store.unlabelled}
        assert {*agent.store.unlabelled} == {*room.ids.tolist()}
        if step % 20 == 19:
            held = (agent.store.stored().batch, room.ids.tolist())
            made = again(made, tmp_path, **tables)
            agent = made.agent
            room = agent.device.waiting
            assert room is not None
            assert agent.store.stored().batch.ids.tolist() == held[0].ids.tolist()
            assert agent.store.stored().batch.y.tolist() == held[0].y.tolist()
            assert room.ids.tolist() == held[1]
    assert made.disk.size <= 84_000
    made.disk.close()


def test_a_power_cut_loses_no_acknowledged_sample_and_no_acknowledged_label(tmp_path: Path) -> None:
    made = make_agent(tmp_path, **RANDOM)
    agent, file = made.agent, made.agent.store.file
    path = tmp_path / "a.store"
    disk = RecordingDisk(path.read_bytes())
    made.disk.close()
    disk.written = disk.block_bytes = 0
    file.disk = disk
    waiting: list[tuple[int, int]] = []
    labels: list[tuple[int, int, int]] = []
    rng = np.random.default_rng(1)
    for step in range(1, 23):
        agent.judge([unlabelled(id_) for id_ in (2 * step, 2 * step + 1)])
        known = [id_ for _, id_ in waiting if rng.random() < 0.2]
        if known:
            agent.judge([label(id_, id_ % 3 if step < 18 else step % 3) for id_ in known])
        assert agent.commit(whole=step % 7 == 0)
        disk.acknowledge(step)
        waiting += [(step, 2 * step), (step, 2 * step + 1)]
        labels += [(step, id_, id_ % 3 if step < 18 else step % 3) for id_ in known]
    table = config_table(tmp_path, **RANDOM)
    assert len(waiting) <= agent.device.capacity
    for _ in range(120):
        point = int(rng.integers(0, len(disk.events) + 1))
        image, acknowledged = crash_image(disk, point, rng)
        path.write_bytes(image)
        back = assemble(parse_config(table))
        records, unlabelled_ = back.store.records, back.store.unlabelled
        for step, id_ in waiting:
            if step <= acknowledged:
                assert (id_ in records) != (id_ in unlabelled_), (step, acknowledged, id_)
        last = {id_: y for step, id_, y in labels if step <= acknowledged}
        later = {(id_, y) for step, id_, y in labels if step > acknowledged}
        for id_, y in last.items():
            assert id_ in records
            assert records[id_].label == y or (id_, records[id_].label) in later
        back.store.file.disk.close()


def test_erasure_covers_what_waits_and_early_labels(tmp_path: Path) -> None:
    made = make_agent(tmp_path, **RANDOM)
    judged(made.agent, unlabelled(1), unlabelled(2), label(3, 1))
    secret = arrival(1).x.tobytes()
    path = tmp_path / "a.store"
    assert secret in path.read_bytes()
    assert made.agent.erase([1, 3]) == 1
    assert secret not in path.read_bytes()
    room = made.agent.device.waiting
    assert room is not None
    assert (room.ids.tolist(), room.early) == ([2], {})
    assert judged(made.agent, unlabelled(1), label(1, 1)) == ["refused.erased"] * 2
    made.disk.close()


def test_waiting_samples_expire_by_time(tmp_path: Path) -> None:
    tables = {**RANDOM, "store": {"ttl_days": 1.0, "clock_tolerance_hours": 0.0}}
    made = make_agent(tmp_path, **tables)
    judged(made.agent, unlabelled(1), unlabelled(2))
    made.agent.store.clock._age_at_start += 0.6 * 86_400.0
    judged(made.agent, label(2, 1), arrival(4))
    made.agent.store.clock._age_at_start += 0.6 * 86_400.0
    # A stored sample is as old as it was when it came, and not since its label did.
    assert made.agent.remove_expired() == 2
    assert ([*made.agent.store.records], len(made.agent.store.unlabelled)) == ([4], 0)
    made.disk.close()


def test_status_why_and_metrics_tell_of_it(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    made = make_agent(tmp_path, **RANDOM)
    judged(made.agent, unlabelled(1), unlabelled(2), label(9, 1))
    judged(made.agent, label(1, 1))
    told = summarise(made.agent).unlabelled
    assert told is not None
    assert (told.samples, told.early_labels, told.counts["labelled"]) == (1, 1, 1)
    verdicts = [reason.verdict for reason in made.agent.store.log.about(1)]
    assert verdicts == ["waiting", "kept"]
    names = {metric.name for metric in Collector(made.agent).collect()}
    assert {"fedkeep_waiting_samples", "fedkeep_waiting_slots", "fedkeep_waiting"} <= names
    made.disk.close()


def test_the_model_of_then_values_a_sample_whose_label_comes_late(tmp_path: Path) -> None:
    made = make_agent(tmp_path, **RANDOM)
    judged(made.agent, unlabelled(1), arrival(2))
    made.agent.participate(order(made, 0))
    assert made.agent.device.window.count == 0
    judged(made.agent, label(1, 1))
    assert made.agent.device.window.count == 1
    made.disk.close()


def test_under_noise_per_sample_a_sample_costs_one_window_and_a_correction_none(
    tmp_path: Path,
) -> None:
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    privacy = {"epsilon": 50.0, "unit": "sample", "retransmissions": 30}
    tables = {"privacy": privacy, "waiting": WAITING, "store": {"budget": 1_000_000}}
    made = make_agent(tmp_path, **tables)
    agent = made.agent
    seen: list[int] = []
    see = agent.device.entering

    def noted(ids: Any) -> None:
        seen.extend(ids.tolist())
        see(ids)

    agent.device.entering = noted
    agent.participate(order(made, 0))
    judged(agent, *(unlabelled(id_) for id_ in range(1, 31)))
    assert seen == [], "what waits enters no window"
    judged(agent, *(label(id_, id_ % 3) for id_ in range(1, 31)))
    assert sorted(seen) == [*range(1, 31)]
    agent.participate(order(made, 1))
    spent = agent.release_pipeline.spending().spent  # type: ignore[union-attr]
    assert spent > 0
    judged(agent, *(label(id_, (id_ + 1) % 3) for id_ in range(1, 31)))
    judged(agent, *(label(id_, id_ % 3) for id_ in range(1, 31)))
    assert len(seen) == 30
    assert agent.device.window.count == 0
    agent.participate(order(made, 2))
    assert agent.release_pipeline.spending().spent == spent, "a correction costs nothing"  # type: ignore[union-attr]
    made.disk.close()


def send(sender: Any, **record: Any) -> None:
    send_frame(sender, msgspec.msgpack.encode(record))


def fates(sender: Any, count: int) -> list[str]:
    return [str(msgspec.msgpack.decode(receive_frame(sender) or b"")["fate"]) for _ in range(count)]


def socket_config(folder: Path) -> None:
    more = f'[[source]]\nkind = "socket"\naddress = "unix://{folder}/in"\n'
    write_config(folder, more + '[waiting]\nshare = 0.5\nrule = "oldest"\n')


def test_a_kill_loses_no_sample_and_no_label_that_was_acknowledged(tmp_path: Path) -> None:
    socket_config(tmp_path)
    waited: dict[str, str] = {}
    labelled: dict[str, str] = {}
    for attempt in range(3):
        process = start(tmp_path, "agent.toml")
        wait_until_ready(tmp_path, process)
        sender = _connect(f"unix://{tmp_path}/in")
        names = [f"{attempt}-{i}" for i in range(10)]
        for i, name in enumerate(names):
            send(sender, x=[float(i + attempt)] * 6, id=name)
        waited |= dict(zip(names, fates(sender, 10), strict=True))
        chosen = [*names[:5], f"early-{attempt}"]
        for name in chosen:
            send(sender, y=1, id=name)
        labelled |= dict(zip(chosen, fates(sender, 6), strict=True))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=120)
        sender.close()
    assert {*waited.values()} == {"waiting"}
    assert {*labelled.values()} == {"kept", "remembered"}
    with running(tmp_path, "agent.toml"), AgentClient(str(tmp_path / "a.sock")) as client:
        for name in waited:
            found = client.why(name)
            assert (found.stored, found.waits) == (name in labelled, name not in labelled), name
        told = client.status().unlabelled
        assert told is not None
        assert (told.samples, told.early_labels) == (15, 3)
        assert client.erase(Erase(source="socket")) == 30
        told = client.status().unlabelled
        assert told is not None
        assert told.samples == 0


def test_a_full_disk_answers_nobody_and_forgets_nothing(tmp_path: Path) -> None:
    socket_config(tmp_path)
    with (
        running(tmp_path, "agent.toml") as process,
        closing(_connect(f"unix://{tmp_path}/in")) as sender,
    ):
        sender.settimeout(60.0)
        send(sender, x=[1.0] * 6, id="a")
        assert fates(sender, 1) == ["waiting"]
        with full_disk(process):
            send(sender, x=[2.0] * 6, id="b")
            send(sender, y=2, id="a")
            send(sender, y=2, id="later")
            with AgentClient(str(tmp_path / "a.sock")) as client:
                assert eventually(lambda: client.status().waiting)
        assert sorted(fates(sender, 3)) == ["kept", "remembered", "waiting"]


def test_lines_may_lack_their_labels_and_bring_them_later(tmp_path: Path) -> None:
    rows = [{"x": [float(i)] * 6, "id": i} for i in range(6)]
    rows += [{"id": i, "y": i % 3} for i in range(4)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "in.jsonl").write_text(lines + '{"id": 5}\n{"y": 1}\n')
    more = f'[[source]]\nkind = "lines"\npath = "{tmp_path}/in.jsonl"\n'
    write_config(tmp_path, more + "[waiting]\nshare = 0.5\n")
    with running(tmp_path, "agent.toml"), AgentClient(str(tmp_path / "a.sock")) as client:
        assert eventually(lambda: client.status().samples == 4)
        assert eventually(lambda: client.status().counters.get("refused.malformed") == 2)
        told = client.status().unlabelled
        assert told is not None
        assert (told.samples, told.counts["labelled"]) == (2, 4)


def test_a_folder_may_hold_samples_apart_from_their_labels(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    x = np.arange(30, dtype=np.float32).reshape(5, 6)
    ids = np.arange(5)
    np.savez(folder / "samples.npz", x=x, ids=ids)
    more = f'[[source]]\nkind = "folder"\npath = "{folder}"\n[waiting]\nshare = 0.5\n'
    write_config(tmp_path, more)
    with running(tmp_path, "agent.toml"), AgentClient(str(tmp_path / "a.sock")) as client:
        assert eventually(lambda: not (folder / "samples.npz").exists())
        np.savez(folder / "labels.npz", y=ids % 3, ids=ids)
        assert eventually(lambda: client.status().samples == 5)
        assert eventually(lambda: not (folder / "labels.npz").exists())
