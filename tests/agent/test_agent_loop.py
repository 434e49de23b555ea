"""The agent without its process: restarts, retention, full disks, taking part, explaining."""

import errno
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedkeep.agent.agent import Agent
from fedkeep.agent.assembly import parse_config
from fedkeep.agent.retention import DAY
from fedkeep.agent.service import Service, summarise
from fedkeep.core.errors import ConfigError, RejectedError
from fedkeep.core.types import Assignment, TrainOrder
from fedkeep.protocol.client import AgentClient, AgentUnreachableError
from fedkeep.protocol.messages import Erase, Evaluate, Evaluated
from fedkeep.protocol.wire import to_bytes
from tests.agent.builders import (
    LABELS,
    SHAPE,
    AssembledAgent,
    arrival,
    config_table,
    feed,
    make_agent,
    order,
)


def held(agent: Agent) -> dict[str, Any]:
    stored = agent.store.stored()
    return {
        "ids": stored.batch.ids.tolist(),
        "scores": stored.scores.tolist(),
        "x": stored.batch.x.tolist(),
    }


def test_a_restart_changes_nothing(tmp_path: Path) -> None:
    first = make_agent(tmp_path)
    feed(first.agent, 0, 40)
    first.agent.participate(order(first, 3))
    feed(first.agent, 40, 40)
    before, counts, state = (
        held(first.agent),
        first.agent.counters.counts(),
        first.agent.device.snapshot(),
    )
    profile = first.agent.device.profile()
    first.disk.close()
    second = make_agent(tmp_path)
    assert held(second.agent) == before
    assert second.agent.counters.counts() == counts
    assert second.agent.store.model_version == 3
    assert summarise(second.agent).model_age_seconds is not None
    for name, array in second.agent.device.snapshot().items():
        np.testing.assert_array_equal(array, state[name], err_msg=name)
    np.testing.assert_array_equal(second.agent.device.profile().velocity, profile.velocity)
    assert second.agent.store.log.about(before["ids"][-1])
    second.disk.close()


def test_taking_part_revalues_and_reports(tmp_path: Path) -> None:
    assembly = make_agent(tmp_path)
    agent = assembly.agent
    feed(agent, 0, 30)
    agent.participate(order(assembly, 0))
    first = held(agent)
    feed(agent, 30, 30)
    report = agent.participate(order(assembly, 1))
    assert report.gradient_samples == 30
    assert report.samples == 3 * 4
    assert not np.array_equal(report.model, order(assembly, 1).model)
    assert held(agent)["scores"] != first["scores"]
    assert agent.store.model_version == 1
    assembly.disk.close()


@pytest.mark.parametrize(
    "broken",
    [
        {"model": np.zeros(3, np.float32)},
        {"model": np.full(21, np.nan, np.float32)},
        {"global_gradient": np.zeros(2, np.float32)},
        {"assignment": Assignment(np.full(LABELS, 10_000), np.ones(LABELS), 1.0)},
        {"assignment": Assignment(np.full(LABELS, -1), np.ones(LABELS), 1.0)},
        {"assignment": Assignment(np.full(1, 4), np.ones(1), 1.0)},
    ],
    ids=["short-model", "nan-model", "short-direction", "too-many", "negative", "one-region"],
)
def test_an_unsound_order_is_refused_and_changes_nothing(
    tmp_path: Path, broken: dict[str, Any]
) -> None:
    assembly = make_agent(tmp_path)
    feed(assembly.agent, 0, 20)
    before = held(assembly.agent)
    with pytest.raises(RejectedError):
        assembly.agent.participate(TrainOrder(**{**vars(order(assembly)), **broken}))
    assert held(assembly.agent) == before
    assembly.disk.close()


def test_valuation_goes_on_during_training_if_so_configured(tmp_path: Path) -> None:
    for mode in ("continue", "pause"):
        folder = tmp_path / mode
        folder.mkdir()
        assembly = make_agent(folder, agent={"during_training": mode})
        agent, training, go_on = assembly.agent, threading.Event(), threading.Event()
        feed(agent, 0, 20)
        train = agent.device.learner.train

        def slow(
            *args: Any, train: Any = train, training: Any = training, go_on: Any = go_on
        ) -> Any:
            training.set()
            assert go_on.wait(10)
            return train(*args)

        agent.device.learner.train = slow  # type: ignore[method-assign,assignment]
        thread = threading.Thread(target=agent.participate, args=(order(assembly, 1),))
        thread.start()
        assert training.wait(10)
        assert agent.lock.acquire(timeout=5), "nobody waits for training"
        agent.lock.release()
        agent.intake.offer(arrival(20), wait=True)
        assert agent.step(0.0) == (1 if mode == "continue" else 0)
        go_on.set()
        thread.join()
        assert agent.store.model_version == 1
        assembly.disk.close()


def test_samples_past_their_time_are_removed_and_overwritten(tmp_path: Path) -> None:
    assembly = make_agent(tmp_path, store={"ttl_days": 2})
    agent, now = assembly.agent, [0.0]
    agent.store.clock._boot = lambda: now[0]
    agent.store.clock._start = 0.0
    feed(agent, 0, 12)
    old = [x.tobytes() for x in agent.store.stored().batch.x]
    now[0] = 1.5 * DAY
    feed(agent, 100, 12)
    agent.store.clock.wall = lambda: 1e12
    assert agent.remove_expired() == 0, "a wall clock cannot make a sample old"
    now[0] = 2.5 * DAY
    assert agent.remove_expired() == 12
    assert sorted(agent.store.stored().batch.ids.tolist()) == list(range(100, 112))
    image = (tmp_path / "a.store").read_bytes()
    assert not any(x in image for x in old)
    assert agent.counters.counts()["expired"] == 12
    assembly.disk.close()


def test_a_full_disk_holds_everything_back_and_loses_nothing(tmp_path: Path) -> None:
    assembly = make_agent(tmp_path)
    agent = assembly.agent
    feed(agent, 0, 20)
    before, write = held(agent), assembly.disk.write
    fates: list[str] = []

    def full(offset: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    assembly.disk.write = full  # type: ignore[method-assign]
    for id_ in range(20, 28):
        one = arrival(id_)
        one.acknowledge = fates.append
        agent.intake.offer(one, wait=True)
    agent.step(0.0)
    assert not agent.commit()
    assert fates == []
    judged = held(agent)
    assert judged != before
    for refused in (lambda: agent.participate(order(assembly)), lambda: agent.erase([1])):
        with pytest.raises(RejectedError, match="the store cannot be written; nothing was"):
            refused()
    assert held(agent) == judged
    assert agent.intake.held
    agent.intake.offer(arrival(40), wait=True)
    assert agent.step(0.0) == 0, "nothing is valued that could not be kept"
    assembly.disk.write = write  # type: ignore[method-assign]
    agent._pacer._retry = 0.0
    agent.step(0.0)
    assert (fates, agent.intake.held, agent.disk_error) == (["kept"] * 8, False, "")
    feed(agent, 28, 8)
    assert set(range(28, 36)) <= set(held(agent)["ids"])
    assert not any(name.startswith("dropped") for name in agent.counters.counts())
    after = held(agent)
    assembly.disk.close()
    again = make_agent(tmp_path)
    assert held(again.agent) == after
    again.disk.close()


def test_a_device_whose_state_is_damaged_keeps_its_samples(tmp_path: Path) -> None:
    assembly = make_agent(tmp_path)
    agent = assembly.agent
    feed(agent, 0, 40)
    agent.participate(order(assembly, 2))
    before = held(agent)
    for lost in (
        "device.counters",
        "device.store.quotas",
        "device.estimator.counts",
        "device.window.sum",
        "device.model",
        "device.shares.counts",
    ):
        state = agent.store.load(agent.store.file.reload())
        assert state.pop(lost) is not None
        agent.restore(state)
        assert held(agent) == before, lost
    assembly.disk.close()
    again = make_agent(tmp_path)
    again.agent.restore(
        {
            name: a
            for name, a in again.agent.store.load(again.agent.store.file.reload()).items()
            if name.startswith("log.")
        }
    )
    assert held(again.agent) == before
    feed(again.agent, 100, 12)
    assert len(again.agent.store) == 24
    again.disk.close()


@pytest.fixture
def served(tmp_path: Path) -> Any:
    assembly = make_agent(tmp_path)
    service = Service(assembly.agent)
    yield assembly, tmp_path / "a.sock"
    service.close()
    assembly.disk.close()


def test_the_local_api(served: tuple[AssembledAgent, Path]) -> None:
    assembly, path = served
    assert path.stat().st_mode & 0o777 == 0o600
    feed(assembly.agent, 0, 30)
    with AgentClient(str(path)) as client:
        assert client.profile().capacity == assembly.agent.device.capacity
        assert client.profile().velocity.sum() > 0
        report = client.participate(order(assembly, 4))
        assert report.samples == 12
        assert client.evaluate(report.model).samples == 12
        status = client.status()
        assert (status.round, status.samples, status.labels_held) == (4, 12, 3)
        assert [row.count for row in client.stored().labels] == [4, 4, 4]
        with pytest.raises(RejectedError, match="model-shape"):
            client.participate(
                TrainOrder(**{**vars(order(assembly)), "model": np.zeros(3, np.float32)})
            )
        with pytest.raises(RejectedError, match="model-shape"):
            client.evaluate(np.zeros(3, np.float32))
        assert client.status().round == 4


def test_why(served: tuple[AssembledAgent, Path]) -> None:
    assembly, path = served
    agent = assembly.agent
    feed(agent, 0, 12)
    agent.participate(order(assembly, 4))
    feed(agent, 100, 40)
    decisions = {
        row.id: row for row in (d for i in range(100, 140) for d in agent.store.log.about(i))
    }
    replaced = next(d for d in decisions.values() if d.verdict == "replaced")
    refused = next(d for d in decisions.values() if d.verdict == "refused")
    with AgentClient(str(path)) as client:
        kept = client.why(str(replaced.id)).decisions[0]
        assert (kept.verdict, kept.displaced, kept.model_version, kept.policy) == (
            "replaced", replaced.displaced, 4, "ode",
        )  # fmt: skip
        assert kept.score is not None
        assert kept.floor is not None
        assert kept.score >= kept.floor
        no = client.why(str(refused.id))
        assert not no.stored
        assert no.decisions[0].verdict == "refused"
        assert no.decisions[0].score < no.decisions[0].floor  # type: ignore[operator]
        displaced = client.why(str(replaced.displaced))
        assert displaced.decisions[-1].id == replaced.id
        assert client.why("987654321").decisions == ()


def test_erasing_by_id_label_source_and_time(
    served: tuple[AssembledAgent, Path], tmp_path: Path
) -> None:
    assembly, path = served
    agent = assembly.agent
    feed(agent, 0, 12, "one")
    feed(agent, 20, 12, "two")
    content = {
        note.id: x.tobytes()
        for note, x in zip(agent.store.notes(), agent.store.stored().batch.x, strict=True)
    }
    (tmp_path / "a.store.damaged-3").write_bytes((tmp_path / "a.store").read_bytes())
    with AgentClient(str(path)) as client:
        with pytest.raises(RejectedError, match="say what to erase"):
            client.erase(Erase())
        assert client.erase(Erase(id="3")) == 1
        assert client.erase(Erase(label=1, source="one")) == 4
        assert client.erase(Erase(source="one")) == 7
        assert client.erase(Erase(until=1.0)) == 0
        assert client.erase(Erase(since=1.0)) == 12
        assert not (tmp_path / "a.store.damaged-3").exists(), (
            "a copy set aside would outlive the erasure"
        )
        image = b"".join(file.read_bytes() for file in tmp_path.glob("a.store*"))
        assert not any(x in image for x in content.values())
        (line,) = client.why("3").decisions
        assert (line.verdict, line.label, line.score) == ("erased", -1, None)
    fates: list[str] = []
    back = arrival(3, source="one")
    back.acknowledge = fates.append
    agent.intake.offer(back, wait=True)
    agent.step(0.0)
    agent.commit()
    assert fates == ["refused.erased"], "a tombstone keeps an erased sample out"


def test_garbage_on_the_api_is_refused_and_the_next_client_served(
    served: tuple[AssembledAgent, Path],
) -> None:
    import socket

    _, path = served
    for garbage in (b"\x00\x00\x00\x05hello", b"\xff\xff\xff\xff", b"\x00\x00\x00\x02\x81\xa1"):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(path))
            raw.sendall(garbage)
            assert b"malformed" in (answer := raw.recv(1000)) or b"oversized" in answer
    with AgentClient(str(path)) as client:
        assert client.status().samples == 0


def test_no_agent_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(AgentUnreachableError, match="fedkeep agent run"):
        AgentClient(str(tmp_path / "nobody"))


def test_held_out_samples_are_used_where_given(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", x=np.zeros((5, *SHAPE), np.float32), y=np.zeros(5, np.int64))
    assembly = make_agent(tmp_path, agent={"held_out": str(tmp_path / "t.npz")})
    service = Service(assembly.agent)
    result = service.answer(
        to_bytes(Evaluate(np.zeros(assembly.agent.device.learner.size, np.float32)))
    )
    service.close()
    assert isinstance(result, Evaluated)
    assert (result.samples, result.accuracy, result.data) == (5, 1.0, "held-out")
    assert result.total_loss == pytest.approx(5 * np.log(LABELS))
    assert summarise(assembly.agent).samples == 0
    assembly.disk.close()
    (tmp_path / "bad.npz").write_bytes(b"x")
    assembly = make_agent(tmp_path, agent={"held_out": str(tmp_path / "bad.npz")})
    with pytest.raises(ConfigError, match="held_out must be an npz file"):
        Service(assembly.agent)
    assembly.disk.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stor": {}}, "unknown table 'stor': did you mean 'store'"),
        ({"agent": {"nise": 3}}, "unknown key 'agent.nise': did you mean 'nice'"),
        ({"agent": {"nice": 20}}, "nice must be between 0 and 19, got 20"),
        ({"agent": {"cpu_cap": 2.0}}, "cpu_cap must be above 0 and at most 1"),
        ({"store": {"budget": 10}}, "budget must be 32768 or more"),
        ({"policy": {"name": "od"}}, "did you mean 'ode'"),
        ({"policy": {"name": "full-data"}}, "keeps everything"),
        ({"samples": {"labels": 0}}, "labels must be between 1 and"),
        ({"samples": {"dtype": "complex"}}, "'samples.dtype' cannot be 'complex'"),
        ({"source": {"kind": "lines"}}, "two brackets"),
    ],
)
def test_a_wrong_configuration_names_key_and_value(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(config_table(tmp_path, **changes))


def test_looking_at_the_store_and_after_its_age_copies_no_sample(tmp_path: Path) -> None:
    assembly = make_agent(tmp_path)
    agent = assembly.agent
    feed(agent, 0, 30)
    feed(agent, 0, 3)  # renewed: their ranks are written
    agent.remove_expired()
    assert summarise(agent).samples == 30
    assert agent.store._index._samples is None
    assembly.disk.close()
