"""Numbers to predict in an agent: stored as they came, through kills and restarts."""

import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fedkeep.agent.agent import Agent
from fedkeep.agent.arrivals import Arrival
from fedkeep.agent.assembly import assemble, parse_config
from fedkeep.core.errors import ConfigError
from fedkeep.core.types import LocalTraining, TrainOrder
from fedkeep.learn.dense_learner import DenseLearner
from fedkeep.learn.evaluation import number_scores, predict
from fedkeep.protocol.client import AgentClient
from fedkeep.protocol.framing import receive_frame, send_frame
from tests.agent.test_agent_process import ENVIRONMENT, running

BASE = """
[samples]
shape = [6]
targets = "number"
edges = [-1.0, 1.0]
[model]
name = "softmax"
loss = "huber"
centre = 0.25
scale = 2.0
[store]
path = "a.store"
budget = 200_000
[agent]
socket = "a.sock"
"""


def x_of(id_: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(id_).standard_normal(6).astype("<f4")


def y_of(id_: int) -> float:
    """A number that float32 and decimal text would both change."""
    return float(x_of(id_).astype(np.float64).sum() / 3)


def exported(folder: Path) -> dict[int, float]:
    out = folder / "out.npz"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "fedkeep", "agent", "store", "export", "a.store", str(out)]
    subprocess.run(command, cwd=folder, env=ENVIRONMENT, check=True, capture_output=True)
    with np.load(out, allow_pickle=False) as arrays:
        assert np.array_equal(arrays["x"], np.stack([x_of(id_) for id_ in arrays["ids"].tolist()]))
        return dict(zip(arrays["ids"].tolist(), arrays["y"].tolist(), strict=True))


def test_a_kill_loses_no_number_that_was_acknowledged(tmp_path: Path) -> None:
    source = f'kind = "socket"\naddress = "unix://{tmp_path}/in.sock"\noverload = "wait"\n'
    (tmp_path / "agent.toml").write_text(f"{BASE}[[source]]\n{source}")
    kept: set[int] = set()
    for life in range(3):
        with running(tmp_path, "agent.toml") as process:
            with AgentClient(str(tmp_path / "a.sock")) as client:
                held = {d for d in kept if client.why(str(d)).stored}
            assert held == kept
            sender = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sender.connect(str(tmp_path / "in.sock"))
            for id_ in range(life * 100, life * 100 + 60):
                record = {"x": x_of(id_).tobytes(), "y": y_of(id_), "id": id_}
                send_frame(sender, msgspec.msgpack.encode(record))
            for _ in range(40):
                answer = msgspec.msgpack.decode(receive_frame(sender) or b"")
                if answer["fate"] == "kept":
                    kept.add(life * 100 + answer["n"])
            process.send_signal(signal.SIGKILL)
            process.wait()
            sender.close()
    assert len(kept) == 120
    found = exported(tmp_path)
    assert kept <= found.keys()
    assert {id_: found[id_] for id_ in kept} == {id_: y_of(id_) for id_ in kept}


def table(folder: Path, **samples: Any) -> dict[str, Any]:
    return {
        "policy": {"name": "balanced-reservoir"},
        "samples": {"shape": [6], "targets": "number", "edges": [-1.0, 1.0], **samples},
        "model": {"name": "softmax", "scale": 2.0},
        "store": {"path": str(folder / "a.store"), "budget": 200_000, "log_length": 64},
        "agent": {"socket": str(folder / "a.sock"), "nice": 0, "seed": 3},
    }


def made(folder: Path, **samples: Any) -> Agent:
    return assemble(parse_config(table(folder, **samples)))


def feed(agent: Agent, ids: range) -> None:
    for id_ in ids:
        agent.intake.offer(Arrival(x_of(id_), y_of(id_), id_, "meter"), wait=True)
        agent.step(0.0)
    while agent.step(0.0):
        pass
    assert agent.commit()


def test_slots_are_divided_among_intervals_and_survive_other_edges(tmp_path: Path) -> None:
    agent = made(tmp_path)
    feed(agent, range(40))
    before = agent.store.stored()
    assert before.batch.y.dtype == np.float64
    assert before.batch.y.tolist() == [y_of(id_) for id_ in before.batch.ids.tolist()]
    assert before.regions.tolist() == np.digitize(before.batch.y, [-1.0, 1.0]).tolist()
    agent.store.file.disk.close()
    again = made(tmp_path, edges=[0.0])
    after = again.store.stored()
    assert after.batch.ids.tolist() == before.batch.ids.tolist()
    assert after.batch.y.tolist() == before.batch.y.tolist()
    assert after.regions.tolist() == (after.batch.y >= 0).astype(int).tolist()
    assert {note.label for note in again.store.records.values()} == {0, 1}
    again.store.file.disk.close()


def test_a_store_of_numbers_is_none_of_labels_and_the_other_way_round(tmp_path: Path) -> None:
    made(tmp_path).store.file.disk.close()
    labels = table(tmp_path) | {"samples": {"shape": [6], "labels": 3}, "model": {}}
    with pytest.raises(ConfigError, match="holds samples with 1 numbers to predict, not labels"):
        assemble(parse_config(labels))
    (tmp_path / "a.store").unlink()
    assemble(parse_config(labels)).store.file.disk.close()
    with pytest.raises(ConfigError, match="holds samples with labels, not 1 numbers to predict"):
        made(tmp_path)


@pytest.mark.parametrize("y", [None, "12", True, float("nan"), float("inf"), [1.0, 2.0], {}, 1e13])
def test_what_is_no_number_is_refused_and_counted(tmp_path: Path, y: Any) -> None:
    agent = made(tmp_path)
    agent.intake.offer(Arrival(x_of(0), y, 0, "meter"), wait=True)
    while agent.step(0.0):
        pass
    assert agent.counters["refused.label"] == 1
    assert not len(agent.store)
    agent.store.file.disk.close()


def test_it_trains_and_reports_the_sums_that_scores_follow_from(tmp_path: Path) -> None:
    from fedkeep.agent.service import StreamApi

    agent = made(tmp_path)
    feed(agent, range(60))
    learner = agent.device.learner
    assert isinstance(learner, DenseLearner)
    model = learner.initial(0)
    agent.participate(TrainOrder(0, model, None, LocalTraining(0.1, 5)))
    report = agent.participate(TrainOrder(1, model, None, LocalTraining(0.1, 50)))
    batch = agent.store.stored().batch
    evaluated = StreamApi(agent)._evaluate(report.model)
    losses, predicted = predict(learner, report.model, batch.x, batch.y)
    scores = number_scores(predicted, batch.y)
    assert evaluated.samples == len(batch)
    assert evaluated.total_loss == pytest.approx(losses.sum())
    assert evaluated.accuracy == pytest.approx(scores.r2)
    assert evaluated.errors is not None
    assert (evaluated.errors[0] / len(batch)) ** 0.5 == pytest.approx(scores.rmse)
    assert scores.r2 > 0.5, "the sum of the features is linear, and it was learned"
    agent.store.file.disk.close()


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ({"labels": 3}, "leave labels out"),
        ({"names": ["low", "high", "top"]}, "leave names out"),
        ({"edges": [1.0, 0.0]}, "edges must be finite and ascend"),
        ({"targets": "class"}, "edges is for numbers to predict"),
        ({"targets": "class", "edges": []}, "labels is missing"),
        ({"targets": "regression"}, "targets"),
        ({"width": 2}, "edges divide one number"),
    ],
)
def test_settings_that_contradict_each_other_are_named(
    tmp_path: Path, samples: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config(table(tmp_path, **samples))


def late(folder: Path) -> Agent:
    own = table(folder) | {"waiting": {"share": 0.5, "rule": "oldest"}}
    return assemble(parse_config(own))


def fates(agent: Agent, *arrivals: Arrival) -> list[str]:
    told: dict[int, str] = {}
    for place, one in enumerate(arrivals):
        one.acknowledge = lambda fate, place=place: told.__setitem__(place, fate)  # type: ignore[misc]
    agent.judge(list(arrivals))
    assert agent.commit()
    return [told[place] for place in range(len(arrivals))]


def number(id_: int, y: Any) -> Arrival:
    return Arrival(None, y, id_, "meter", label_only=True)


def test_numbers_may_come_later_are_corrected_and_outlive_a_restart(tmp_path: Path) -> None:
    agent = late(tmp_path)
    assert (
        fates(agent, *(Arrival(x_of(id_), None, id_, "meter") for id_ in range(6)))
        == ["waiting"] * 6
    )
    agent.store.file.disk.close()
    agent = late(tmp_path)
    assert agent.device.waiting is not None
    assert agent.device.waiting.ids.tolist() == [*range(6)]
    given = fates(agent, number(1, 0.37), number(2, -3.0), number(2, -3.0), number(2, 7.25))
    assert given == ["kept", "kept", "known", "corrected"]
    wrong = fates(agent, number(3, "much"), number(3, float("nan")), number(3, 1e13))
    assert wrong == ["refused.label"] * 3
    assert fates(agent, number(77, 0.5)) == ["remembered"]
    assert fates(agent, Arrival(x_of(77), None, 77, "meter")) == ["kept"]
    agent.store.file.disk.close()
    agent = late(tmp_path)
    stored = agent.store.stored().batch
    found = dict(zip(stored.ids.tolist(), stored.y.tolist(), strict=True))
    assert found == {1: 0.37, 2: 7.25, 77: 0.5}
    assert {id_: note.label for id_, note in agent.store.records.items()} == {1: 1, 2: 2, 77: 1}
    assert sorted(agent.store.unlabelled) == [0, 3, 4, 5]
    np.testing.assert_array_equal(stored.x[stored.ids.tolist().index(2)], x_of(2))
    agent.store.file.disk.close()
    assert exported(tmp_path)[2] == 7.25


def test_numbers_later_have_their_limits_in_a_sentence(tmp_path: Path) -> None:
    own = table(tmp_path) | {"waiting": {"share": 0.5}}
    with pytest.raises(ConfigError, match="one number a sample"):
        parse_config({**own, "samples": {**own["samples"], "width": 2, "edges": []}})
    with pytest.raises(ConfigError, match="pseudo_labels is for labels"):
        parse_config(own | {"waiting": {"share": 0.5, "pseudo_labels": 0.9}})


def test_several_numbers_a_sample_are_kept(tmp_path: Path) -> None:
    agent = made(tmp_path, width=2, edges=[])
    for id_ in range(5):
        y = [y_of(id_), -y_of(id_)]
        agent.intake.offer(Arrival(x_of(id_), y, id_, "meter"), wait=True)
    while agent.step(0.0):
        pass
    assert agent.commit()
    agent.store.file.disk.close()
    again = made(tmp_path, width=2, edges=[])
    assert again.store.stored().batch.y.tolist() == [[y_of(id_), -y_of(id_)] for id_ in range(5)]
    again.store.file.disk.close()
