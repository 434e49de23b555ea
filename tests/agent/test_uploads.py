"""What leaves the device: by consent, once, within the day's bytes, and written down before."""

import json
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedkeep.agent.agent import Agent
from fedkeep.agent.assembly import parse_config
from fedkeep.agent.service import Service
from fedkeep.agent.uploads import Journal, Uploads
from fedkeep.core.errors import ConfigError, FedkeepError, RejectedError
from fedkeep.protocol.client import AgentClient
from fedkeep.protocol.messages import SampleFilter
from tests.agent.builders import arrival, config_table, make_agent
from tests.agent.test_agent_process import ask, lines, running, write_config
from tests.agent.test_sources import free_port


def feed(agent: Agent, first: int, count: int, source: str = "test") -> None:
    """Offers samples with their labels by name, and has them judged and committed."""
    for id_ in range(first, first + count):
        one = arrival(id_, source=source)
        one.y = "abc"[id_ % 3]
        agent.intake.offer(one, wait=True)
        agent.step(0.0)
    while agent.step(0.0):
        pass
    assert agent.commit()


def uploads_of(agent: Agent) -> Uploads:
    assert agent.uploads is not None
    return agent.uploads


def sending(folder: Path, **options: Any) -> dict[str, Any]:
    upload = {"enabled": True, "to": str(folder / "out"), **options}
    return {"upload": upload, "policy": {"name": "fifo"}, "samples": {"names": ["a", "b", "c"]}}


def sent(folder: Path) -> dict[str, dict[str, Any]]:
    """What the target got, by id: what is said of each sample."""
    found = [json.loads(file.read_text()) for file in (folder / "out").rglob("*.json")]
    return {said["id"]: said for said in found}


def test_nothing_leaves_without_consent(tmp_path: Path) -> None:
    names, upload = {"names": ["a", "b", "c"]}, {"to": str(tmp_path / "out"), "labels": ["a"]}
    assembly = make_agent(tmp_path, upload=upload, samples=names)
    feed(assembly.agent, 0, 4)
    assert assembly.agent.uploads is None
    service = Service(assembly.agent)
    with AgentClient(str(tmp_path / "a.sock")) as client:
        with pytest.raises(RejectedError, match="no sample leaves this device"):
            client.upload(SampleFilter(labels=(0,)))
        assert client.status().uploads == ""
    service.close()
    assembly.disk.close()
    assert not (tmp_path / "out").exists()


def test_samples_of_chosen_labels_are_sent_once(tmp_path: Path) -> None:
    table = sending(tmp_path, labels=["b"])
    assembly = make_agent(tmp_path, **table)
    feed(assembly.agent, 0, 9)
    while uploads_of(assembly.agent).send_next():
        pass
    assert sorted(sent(tmp_path)) == ["1", "4", "7"]
    place = next((tmp_path / "out" / "b").glob("4-*.npy"))
    x = assembly.agent.store.numbers(4)
    np.testing.assert_array_equal(np.load(place), x)
    assert place.stat().st_mode & 0o777 == 0o600
    assembly.disk.close()
    for file in (tmp_path / "out" / "b").iterdir():
        file.unlink()
    again = make_agent(tmp_path, **table)
    assert not uploads_of(again.agent).send_next()
    feed(again.agent, 10, 1)
    assert uploads_of(again.agent).send_next()
    assert sorted(sent(tmp_path)) == ["10"]
    again.disk.close()


def test_a_days_bytes_bound_what_leaves_also_over_restarts(tmp_path: Path) -> None:
    table = sending(tmp_path, labels=["a", "b", "c"], daily_bytes=500)
    for _ in range(3):
        assembly = make_agent(tmp_path, **table)
        feed(assembly.agent, 0, 9)
        while uploads_of(assembly.agent).send_next():
            pass
        assert len(sent(tmp_path)) == 3
        assert "daily_bytes allows" in uploads_of(assembly.agent).summary()
        assembly.disk.close()
    assembly = make_agent(tmp_path, **table)
    clock = assembly.agent.store.clock
    clock._start -= 86_400 + 1
    while uploads_of(assembly.agent).send_next():
        pass
    assert len(sent(tmp_path)) == 6
    assembly.disk.close()


def test_what_is_asked_for_waits_over_a_restart_and_an_erased_one_never_leaves(
    tmp_path: Path,
) -> None:
    table = sending(tmp_path, queue=4)
    assembly = make_agent(tmp_path, **table)
    feed(assembly.agent, 0, 9)
    assert uploads_of(assembly.agent).ask([2, 5]) == 2
    assert uploads_of(assembly.agent).ask([5]) == 0
    with pytest.raises(RejectedError, match="more than the 2 for which"):
        uploads_of(assembly.agent).ask([1, 3, 4])
    assembly.agent.erase([2])
    assembly.disk.close()
    again = make_agent(tmp_path, **table)
    while uploads_of(again.agent).send_next():
        pass
    assert sorted(sent(tmp_path)) == ["5"]
    assert again.agent.counters["upload.gone"] == 1
    again.disk.close()


def test_what_cannot_be_written_down_does_not_leave(tmp_path: Path) -> None:
    assembly = make_agent(tmp_path, **sending(tmp_path, labels=["a"]))
    feed(assembly.agent, 0, 3)
    journal = uploads_of(assembly.agent).journal
    journal.path.mkdir()
    with pytest.raises(OSError):  # noqa: PT011 - whichever the system has for it
        uploads_of(assembly.agent).send_next()
    assert not sent(tmp_path)
    journal.path.rmdir()
    assert uploads_of(assembly.agent).send_next()
    assert len(sent(tmp_path)) == 1
    assembly.disk.close()


def test_a_journal_cut_by_a_crash_goes_on_and_a_long_one_is_shortened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "j"
    journal = Journal(path)
    journal.write({"state": "asked", "id": 1}, {"state": "asked", "id": 2})
    journal.write({"state": "begun", "id": 1, "age": 5.0, "bytes": 70})
    path.write_bytes(path.read_bytes() + b'{"state": "sent", "id": 1, "arr')
    again = Journal(path)
    assert list(again.asked) == [1, 2]
    assert again.spent(10.0) == 70
    again.write({"state": "sent", "id": 1, "arrival": 0})
    assert list(Journal(path).asked) == [2]
    assert Journal(path).sent == {1: 0}
    monkeypatch.setattr("fedkeep.agent.uploads._JOURNAL_BYTES", 10)
    again.shorten({})
    shortened = Journal(path)
    assert (list(shortened.asked), shortened.sent, shortened.spent(10.0)) == ([2], {}, 70)
    assert "begun" in (tmp_path / "j.1").read_text()


class Target(BaseHTTPRequestHandler):
    """Answers with the statuses of its server, one after the other, and then 200."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server: Any = self.server
        server.came.append((self.path, self.headers.get("Authorization"), body))
        self.send_response(server.statuses.pop(0) if server.statuses else 200)
        self.send_header("Location", "http://127.0.0.1:1/elsewhere")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def target() -> Any:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Target)
    server.came, server.statuses = [], []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_target_that_fails_is_tried_again_and_one_that_refuses_is_not(
    tmp_path: Path, target: Any
) -> None:
    (tmp_path / "token").write_text("tell\n")
    to = f"http://127.0.0.1:{target.server_port}/in?key=1"
    table = sending(tmp_path, to=to, labels=["a"], token_file=str(tmp_path / "token"))
    assembly = make_agent(tmp_path, **table)
    feed(assembly.agent, 0, 6)
    uploads, target.statuses = uploads_of(assembly.agent), [503, 302, 400]
    for _ in range(2):
        with pytest.raises(ConnectionError, match="answered"):
            uploads.send_next()
    assert uploads.send_next()
    assert uploads.send_next()
    assert not uploads.send_next()
    assert assembly.agent.counters["upload.refused"] == 1
    assert assembly.agent.counters["upload.sent"] == 1
    assert len(target.came) == 4
    path, token, body = target.came[-1]
    assert token == "Bearer tell"
    assert path.startswith("/in?key=1&y=a&id=3&")
    assert body == target.came[-1][2]
    assert body[:6] == b"\x93NUMPY"
    assembly.disk.close()


@pytest.mark.parametrize(
    ("upload", "message"),
    [
        ({"enabled": True}, "needs 'to'"),
        ({"enabled": True, "to": "ftp://x/y"}, "https://host/path or a folder"),
        ({"enabled": True, "to": "http://example.org/"}, "insecure"),
        ({"enabled": True, "to": "https:///x"}, "must be https"),
        ({"enabled": True, "to": "out", "labels": ["zz"]}, "no label 'zz'"),
    ],
)
def test_a_wrong_target_is_said(tmp_path: Path, upload: dict[str, Any], message: str) -> None:
    with pytest.raises(FedkeepError, match=message):
        make_agent(tmp_path, upload=upload)


FILES = 'labels = 3\ndecoder = "npy"\npayload_bytes = 1024'


def test_a_kill_amid_uploads_loses_none_and_one_agent_feeds_another(tmp_path: Path) -> None:
    port = free_port()
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    (here / "in.jsonl").write_text(lines(60))
    more = '[policy]\nname = "fifo"\n[[source]]\nkind = "lines"\npath = "in.jsonl"\n'
    more += f'[upload]\nenabled = true\nto = "http://127.0.0.1:{port}/"\nsources = ["lines"]\n'
    write_config(here, more)
    config = write_config(there, f'[[source]]\nkind = "http"\nport = {port}\noverload = "wait"\n')
    config.write_text(config.read_text().replace("labels = 3", FILES))
    with running(there, "agent.toml"), AgentClient(str(there / "a.sock")) as receiver:

        def came() -> int:
            counts = receiver.status().counters
            return (
                counts.get("kept", 0) + counts.get("replaced", 0) + counts.get("refused.score", 0)
            )

        def wait_for(count: int) -> None:
            deadline = time.monotonic() + 120
            while came() < count and time.monotonic() < deadline:
                time.sleep(0.02)

        with running(here, "agent.toml") as process:
            wait_for(10)
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert 10 <= came() < 60
        with running(here, "agent.toml"):
            wait_for(60)
            with AgentClient(str(here / "a.sock")) as sender:
                deadline = time.monotonic() + 120
                while not (said := sender.status().uploads).startswith("0 samples wait"):
                    assert time.monotonic() < deadline, said
                    time.sleep(0.05)
        assert came() == 60
        assert receiver.status().counters.get("refreshed", 0) <= 1


def test_pulling_by_id_label_source_and_time(tmp_path: Path) -> None:
    table = config_table(tmp_path, samples={"names": ["a", "b", "c"]}, policy={"name": "fifo"})
    table["source"] = [{"kind": "http", "name": "left", "port": free_port()}]
    parse_config(table)
    assembly = make_agent(tmp_path, **table)
    feed(assembly.agent, 0, 6, "left")
    feed(assembly.agent, 10, 6, "right")
    service = Service(assembly.agent)

    def pulled(**conditions: Any) -> list[str]:
        with AgentClient(str(tmp_path / "a.sock")) as client:
            parts = list(client.pull_samples(SampleFilter(**conditions)))
        return [one.name or str(one.id) for part in parts for one in part.samples]

    try:
        assert len(pulled()) == 12
        assert pulled(ids=("4", "10")) == ["4", "10"]
        assert pulled(labels=("b",), sources=("left",)) == ["1", "4"]
        assert pulled(labels=(0, "c"), sources=("right",)) == ["11", "12", "14", "15"]
        assert pulled(since=time.time() + 60) == []
        assert len(pulled(until=time.time() + 60)) == 12
        with pytest.raises(RejectedError, match="no label 'worn'"):
            pulled(labels=("worn",))
        with pytest.raises(RejectedError, match="a namespace says which id"):
            pulled(namespace="left")
        out = tmp_path / "pulled.npz"
        said = ask(tmp_path, "pull", str(out), "--label", "b", "--id", "13")
        assert "1 samples written" in said
        assert out.stat().st_mode & 0o777 == 0o600
        with np.load(out) as found:
            np.testing.assert_array_equal(
                found["x"][0],
                assembly.agent.store.numbers(
                    next(n.id for n in assembly.agent.store.notes() if n.name == "13")
                ),
            )
            assert found["labels"].tolist() == ["b"]
    finally:
        service.close()
        assembly.disk.close()


def test_many_samples_are_given_out_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedkeep.agent.service._PULLED", 5)
    assembly = make_agent(tmp_path, policy={"name": "fifo"}, samples={"names": ["a", "b", "c"]})
    feed(assembly.agent, 0, 13)
    service = Service(assembly.agent)
    with AgentClient(str(tmp_path / "a.sock")) as client:
        parts = [len(part.samples) for part in client.pull_samples()]
    service.close()
    assembly.disk.close()
    assert parts == [5, 5, 3]


def test_consent_is_off_by_default() -> None:
    table = {"samples": {"shape": [2], "labels": 2}}
    assert not parse_config(table).upload.enabled
    with pytest.raises(ConfigError, match="did you mean 'enabled'"):
        parse_config({**table, "upload": {"enable": True}})
