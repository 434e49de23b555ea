"""Several streams in one process: each by itself, behind one socket and one address of metrics."""

import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from fedkeep.agent.streams import parse_streams
from fedkeep.core.errors import ConfigError, RejectedError
from fedkeep.protocol.client import AgentClient
from tests.agent.test_agent_process import ask, lines, outcome, running
from tests.agent.test_sources import free_port

STREAMS = """
[store]
budget = 200_000
commit_ms = 1
[agent]
socket = "a.sock"
[metrics]
port = {port}
[[stream]]
name = "pump"
[stream.samples]
shape = [6]
labels = 3
[[stream.source]]
kind = "lines"
path = "pump.jsonl"
[[stream]]
name = "hall"
policy = {{ name = "fifo" }}
[stream.samples]
shape = [2, 3]
labels = 4
[stream.store]
budget = 300_000
[[stream.source]]
kind = "lines"
path = "hall.jsonl"
"""


def write(folder: Path, pump: str, hall: str) -> int:
    port = free_port()
    (folder / "agent.toml").write_text(STREAMS.format(port=port))
    (folder / "pump.jsonl").write_text(pump)
    (folder / "hall.jsonl").write_text(hall)
    return port


def test_each_stream_has_its_own_samples_store_and_budget(tmp_path: Path) -> None:
    port = write(tmp_path, lines(30), lines(12, first=100))
    socket = str(tmp_path / "a.sock")
    with running(tmp_path, "agent.toml"):
        with AgentClient(socket) as client:
            assert client.streams() == ("pump", "hall")
            with pytest.raises(RejectedError, match=r"the streams pump, hall: name one"):
                client.status()
        none = AgentClient(f"{socket}#mill")
        with none, pytest.raises(RejectedError, match="streams pump, hall"):
            none.status()
        deadline = time.monotonic() + 120
        with AgentClient(f"{socket}#pump") as pump, AgentClient(f"{socket}#hall") as hall:
            while time.monotonic() < deadline:
                counts = [client.status().counters.get("seen", 0) for client in (pump, hall)]
                if counts == [30, 12]:
                    break
                time.sleep(0.05)
            assert counts == [30, 12]
            assert (pump.status().labels, hall.status().labels) == (3, 4)
            assert (pump.status().policy, hall.status().policy) == ("balanced-reservoir", "fifo")
            assert pump.status().budget <= 200_000 < hall.status().budget <= 300_000
        said = ask(tmp_path, "status")
        assert "stream   pump" in said
        assert "stream   hall" in said
        metrics = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
        assert 'fedkeep_samples{stream="pump"} 30.0' in metrics
        assert 'fedkeep_samples{stream="hall"} 12.0' in metrics
        assert metrics.count("# TYPE fedkeep_samples ") == 1
    assert (tmp_path / "pump.store").stat().st_size <= 200_000
    assert (tmp_path / "hall.store").stat().st_size <= 300_000


def test_a_kill_costs_no_stream_what_was_stored_and_the_log_names_them(tmp_path: Path) -> None:
    write(tmp_path, lines(30), lines(12, first=100))
    with running(tmp_path, "agent.toml") as process:
        socket = str(tmp_path / "a.sock")
        with AgentClient(f"{socket}#hall") as hall:
            deadline = time.monotonic() + 120
            while hall.status().samples < 12 and time.monotonic() < deadline:
                time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 0
        assert process.stderr is not None
        said = process.stderr.read()
    assert "[pump] ready: reading lines" in said
    assert "[hall] ended: 12 arrived, 12 kept" in said
    code, said = outcome(tmp_path, "agent.toml", "--until-sources-end")
    assert code == 0, said
    assert "[pump] ended: 30 arrived" in said
    assert "30 of" in said


def test_one_stream_that_cannot_go_on_ends_all_with_its_sentence(tmp_path: Path) -> None:
    write(tmp_path, lines(30), "no sample\n")
    code, said = outcome(tmp_path, "agent.toml", "--until-sources-end")
    assert code == 1
    assert "fedkeep: source 'lines' failed: no line is JSON" in said
    assert "[pump] ended: 30 arrived, 30 kept" in said


SAMPLES = {"shape": [2], "labels": 2}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"stream": {"name": "a"}}, "two brackets"),
        ({"stream": []}, "no \\[\\[stream\\]\\]"),
        ({"stream": [{"samples": SAMPLES}]}, "'stream\\[0\\].name' must be letters"),
        ({"stream": [{"name": "a/b", "samples": SAMPLES}]}, "not 'a/b'"),
        ({"stream": [{"name": "a", "samples": SAMPLES}] * 2}, "the same name, a"),
        ({"stream": [{"name": "a", "agent": {}}]}, "outside of stream 'a'"),
        ({"stream": [{"name": "a"}], "source": []}, "write it as \\[\\[stream.source\\]\\]"),
        ({"stream": [{"name": "a", "samples": {"shape": [2]}}]}, "stream 'a': .*labels"),
        (
            {
                "store": {"path": "x"},
                "stream": [{"name": name, "samples": SAMPLES} for name in "ab"],
            },
            "the same \\[stream.store\\] path",
        ),
    ],
)
def test_wrong_streams_are_named(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_streams(table)
