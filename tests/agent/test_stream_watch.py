"""An agent notices that its stream has changed or stopped, and tells it everywhere."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedkeep.agent.agent import Agent
from fedkeep.agent.arrivals import Arrival
from fedkeep.agent.assembly import parse_config
from fedkeep.agent.service import Collector, summarise, vitals
from fedkeep.agent.stream_watch import DriftOptions, StreamWatch
from fedkeep.cli.agent import _show_status
from fedkeep.core.errors import ConfigError
from fedkeep.core.types import FloatArray, IntArray
from fedkeep.privacy.options import PrivacyOptions
from fedkeep.privacy.release import ReleasePipeline
from tests.agent.builders import SHAPE, config_table, make_agent, order

NAMES = ("idle", "person", "car")


def watching(folder: Path, **tables: Any) -> Agent:
    samples = {"names": list(NAMES)}
    source = [{"kind": "lines", "name": "hall"}, {"kind": "socket", "name": "gate"}]
    policy = {"name": "balanced-reservoir"}
    return make_agent(folder, policy=policy, samples=samples, source=source, **tables).agent


def come(agent: Agent, first: int, labels: list[int], shift: float = 0.0) -> None:
    """Samples of these labels, whose numbers lie around them."""
    rng = np.random.default_rng(first)
    for i, label in enumerate(labels):
        x = rng.standard_normal(SHAPE).astype(np.float32) + np.float32(3 * label + shift)
        y = NAMES[label] if agent.config.samples.names else label
        agent.intake.offer(Arrival(x, y, first + i, "hall"), wait=True)
        if len(agent.intake) >= 16:
            agent.step(0.0)
    while agent.step(0.0):
        pass
    assert agent.commit()


def metrics(agent: Agent) -> dict[tuple[str, ...], float]:
    return {
        (one.name, *one.labels.values()): one.value
        for family in Collector(agent).collect()
        for one in family.samples
    }


def test_a_change_of_labels_is_told_everywhere_and_counted_over_restarts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    agent = watching(tmp_path)
    rng = np.random.default_rng(0)
    come(agent, 0, rng.integers(0, 2, 600).tolist())
    assert summarise(agent).drift.changes == {"labels": 0, "losses": 0, "gradients": 0}
    come(agent, 1000, [2] * 300)
    status = summarise(agent)
    assert status.drift.changes["labels"] >= 1
    assert "'car' from 0 %" in status.drift.last
    assert status.drift.last_seconds is not None
    assert "the stream has changed: labels" in caplog.text
    count = status.drift.changes["labels"]
    assert metrics(agent)["fedkeep_stream_changes_total", "labels"] == count
    assert not any("drift" in name for name in metrics(agent))
    assert vitals(agent).changes == count
    _show_status(status)
    assert f"changes  {count} of the stream (labels {count})" in capsys.readouterr().out
    agent.store.file.disk.close()
    again = watching(tmp_path)
    assert summarise(again).drift.changes["labels"] == count
    assert summarise(again).drift.last_seconds is None


def test_losses_that_rise_under_the_same_model_are_a_change_and_a_new_model_is_none(
    tmp_path: Path,
) -> None:
    assembly = make_agent(tmp_path, gist={"mode": "local"})
    agent = assembly.agent
    agent.participate(order(assembly))
    rng = np.random.default_rng(0)
    come(agent, 0, rng.integers(0, 3, 500).tolist())
    for round_ in (1, 2, 3):
        agent.participate(order(assembly, round_))
        come(agent, 1000 * round_, rng.integers(0, 3, 300).tolist())
    assert agent.counters["drift.losses"] == 0
    come(agent, 9000, rng.integers(0, 3, 500).tolist(), shift=60.0)
    assert agent.counters["drift.losses"] >= 1
    assert "under the same model" in agent.watch.last


def test_labels_that_come_later_count_when_they_come(tmp_path: Path) -> None:
    agent = watching(tmp_path, waiting={"share": 0.5, "rule": "oldest"})
    came: list[int] = []

    def observe(y: IntArray, losses: FloatArray | None, now: float) -> str:
        came.extend(y.tolist())
        return ""

    agent.watch.observe = observe  # type: ignore[method-assign]
    x = np.zeros(SHAPE, np.float32)
    for id_ in range(4):
        agent.intake.offer(Arrival(x + np.float32(id_), None, id_, "hall"), wait=True)
    agent.step(0.0)
    assert came == []
    for id_ in (2, 0):
        agent.intake.offer(Arrival(None, "person", id_, "hall", label_only=True), wait=True)
    agent.step(0.0)
    assert came == [1, 1]


def test_a_source_that_stops_is_told_and_one_that_is_held_back_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    agent = watching(tmp_path, drift={"silence_minutes": 5.0})
    come(agent, 0, [0, 1, 2])
    assert summarise(agent).drift.silent == {}
    clock = agent.store.clock
    boot = clock._boot
    clock._boot = lambda: boot() + 400
    agent.disk_error = "no space left"
    agent._look_for_silence()
    agent.disk_error = ""
    assert summarise(agent).drift.silent == {}
    clock._boot = lambda: boot() + 800
    agent._look_for_silence()
    status = summarise(agent)
    assert sorted(status.drift.silent) == ["gate", "hall"]
    assert caplog.text.count("source 'hall' is silent") == 1
    assert metrics(agent)["fedkeep_source_silent", "hall"] == 1
    assert metrics(agent)["fedkeep_source_quiet_seconds", "gate"] >= 400
    assert vitals(agent).silent == 2
    _show_status(status)
    assert "silent   source 'gate': nothing has come for" in capsys.readouterr().out
    come(agent, 20, [0, 1, 2])
    assert [*summarise(agent).drift.silent] == ["gate"]
    assert "source 'hall' is heard again" in caplog.text


def test_without_a_setting_the_longest_gap_says_what_silence_is() -> None:
    watch = StreamWatch(DriftOptions(), 2, (), ["a", "b"], now=0.0)
    for now in (0.0, 100.0, 1000.0):  # 900 seconds are usual
        watch.arrived("a", now)
    assert [*watch.silent(3600.0)] == []
    assert [*watch.silent(3601.0)] == ["b"]  # nothing ever came
    assert [*watch.silent(1000.0 + 2701.0)] == ["a", "b"]


def test_what_leaves_under_noise_says_nothing_of_the_samples(tmp_path: Path) -> None:
    agent = watching(tmp_path)
    told = vitals(agent)
    assert told.changes == 0
    guarded = ReleasePipeline(PrivacyOptions(secure_aggregation=True)).vitals(told)
    assert guarded is None


def test_it_is_switched_off_and_wrong_settings_are_said(tmp_path: Path) -> None:
    agent = watching(tmp_path, drift={"enabled": False})
    come(agent, 0, [0] * 300 + [1] * 300)
    assert summarise(agent).drift.changes["labels"] == 0
    with pytest.raises(ConfigError, match="drift"):
        parse_config(config_table(tmp_path, drift={"delta": 2.0}))
    with pytest.raises(ConfigError, match="silence_minutes"):
        parse_config(config_table(tmp_path, drift={"silence_minutes": 0}))


def test_of_a_fast_stream_a_part_is_looked_at_and_many_labels_in_groups() -> None:
    watch = StreamWatch(DriftOptions(), 1000, (), (), now=0.0)
    assert [watch.wants(300, 0.5), watch.wants(300, 0.9), watch.wants(300, 2.0)] == [
        True,
        False,
        True,
    ]
    for place in range(40):
        watch.observe(np.full(32, 3 if place < 20 else 990), None, float(place))
    assert watch.last.startswith("labels: labels 985 to 999 from 0 % to 100 %")
