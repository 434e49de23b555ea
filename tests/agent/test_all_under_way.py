"""Files, rules, late labels and hostile records together, through kills and a failing disk."""

import http.client
import json
import random
import signal
import threading
import time
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fedkeep.agent.arrivals import Arrival
from fedkeep.protocol.client import AgentClient
from fedkeep.protocol.messages import SampleFilter
from tests.agent.builders import AssembledAgent, assembled
from tests.agent.test_agent_process import running
from tests.agent.test_failing_disk import failing, settle
from tests.agent.test_payloads import picture, post, said_by
from tests.agent.test_sources import free_port

BUDGET = 2_000_000
CONFIG = """
[samples]
shape = [3, 8, 8]
labels = 2
names = ["empty", "person"]
decoder = "image"
payload_bytes = 4096
[store]
path = "a.store"
budget = 2_000_000
commit_ms = 1
[agent]
socket = "a.sock"
[waiting]
share = 0.5
rule = "oldest"
[[rule]]
name = "alarms"
when = "alarm"
slots = 30
before = 2
[[rule]]
name = "home"
when = 'zone == "home"'
action = "never"
[[source]]
kind = "http"
name = "camera"
namespace = "yard"
overload = "wait"
port = %d
[[source]]
kind = "http"
name = "operator"
namespace = "yard"
overload = "wait"
port = %d
"""
HOSTILE = [b"", b"\xff\xd8" * 700, b"x" * 100_000, b'{"x": [', b"\x89PNG\r\n\x1a\n" + bytes(90)]


class Sent:
    """What was answered, by name."""

    def __init__(self) -> None:
        self.waiting: dict[str, bytes] = {}
        self.labelled: dict[str, str] = {}
        self.alarms: set[str] = set()
        self.forbidden: dict[str, bytes] = {}
        self.stop = threading.Event()

    def camera(self, port: int, life: int, sender: int) -> None:
        rng = random.Random(10 * life + sender)
        for number in range(400):
            if self.stop.is_set():
                return
            name, payload = (
                f"{life}-{sender}-{number}",
                picture(1000 * life + 500 * sender + number),
            )
            said = rng.choice(["", "", "&alarm=1", "&zone=home"])
            try:
                if not number % 9:
                    status, fate = post(port, rng.choice(HOSTILE), f"id=h{name}")
                    assert status >= 400, fate
                    continue
                status, fate = post(port, payload, f"id={name}{said}")
            except (OSError, http.client.HTTPException, ValueError):
                return
            if "home" in said:
                assert (status, fate) == (200, "refused.rule")
                self.forbidden[name] = payload
            elif fate == "waiting":
                self.waiting[name] = payload
                if "alarm" in said:
                    self.alarms.add(name)

    def operator(self, port: int) -> None:
        while not self.stop.is_set():
            todo = [name for name in [*self.waiting] if name not in self.labelled]
            for name in todo[::2]:
                y = "person" if int(name.rpartition("-")[2]) % 2 else "empty"
                body = json.dumps({"id": name, "y": y}).encode()
                try:
                    _, fate = post(port, body, kind="application/json")
                except (OSError, http.client.HTTPException, ValueError):
                    return
                if fate in ("kept", "known"):
                    self.labelled[name] = y
            time.sleep(0.01)


def test_kills_with_files_rules_and_labels_under_way_lose_nothing(tmp_path: Path) -> None:
    ports = free_port(), free_port()
    (tmp_path / "agent.toml").write_text(CONFIG % ports)
    sent = Sent()
    for life in range(2):
        sent.stop = threading.Event()
        before = len(sent.waiting)
        with running(tmp_path, "agent.toml") as process:
            threads = [
                threading.Thread(target=sent.camera, args=(ports[0], life, n)) for n in range(2)
            ]
            threads.append(threading.Thread(target=sent.operator, args=(ports[1],)))
            for thread in threads:
                thread.start()
            deadline = time.monotonic() + 30
            while len(sent.waiting) < before + 12 and time.monotonic() < deadline:
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
            process.wait()
            sent.stop.set()
            for thread in threads:
                thread.join()
        assert (tmp_path / "a.store").stat().st_size <= BUDGET
    assert len(sent.waiting) >= 24
    assert sent.labelled
    assert sent.alarms
    said_by("export", str(tmp_path / "a.store"), str(tmp_path / "out"))
    found = {file.stem: file.read_bytes() for file in (tmp_path / "out").rglob("*.jpg")}
    assert sent.waiting.items() <= found.items()
    for name, y in sent.labelled.items():
        assert (tmp_path / "out" / y / f"{name}.jpg").exists()
    raw = (tmp_path / "a.store").read_bytes()
    assert not any(payload in raw for payload in sent.forbidden.values())
    with running(tmp_path, "agent.toml"), AgentClient(str(tmp_path / "a.sock")) as client:
        chosen = SampleFilter(labels=("unlabelled", "empty", "person"), rules=("alarms",))
        held = {one.name for part in client.pull_samples(chosen) for one in part.samples}
        assert sent.alarms <= held
        status = client.status()
        assert status.unlabelled is not None
        assert status.unlabelled.samples + status.samples == len(found)


def agent_of(folder: Path) -> AssembledAgent:
    return assembled(tomllib.loads(CONFIG % (1, 2)) | {"store": store_table(folder), "source": []})


def store_table(folder: Path) -> dict[str, Any]:
    return {"path": str(folder / "a.store"), "budget": BUDGET}


@pytest.mark.parametrize("after", [0, 2, 5, 9])
def test_a_disk_that_is_full_answers_nobody_and_loses_nothing(tmp_path: Path, after: int) -> None:
    assembly = agent_of(tmp_path)
    agent, fates = assembly.agent, dict[str, str]()

    def came(name: str, x: bytes | None, y: Any, **fields: Any) -> None:
        label_only = x is None
        told = partial(fates.__setitem__, f"{name} {y}")
        one = Arrival(x, y, name, "yard", told, fields=fields, label_only=label_only)
        agent.intake.offer(one, wait=True)
        agent.step(0.0)

    for number in range(8):
        came(f"f{number}", picture(number), None, alarm=number == 3)
    assert agent.commit()
    failing(assembly, after, 4)
    for number in range(8, 24):
        fields = {"zone": "home"} if number % 5 == 0 else {"alarm": number == 12}
        came(f"f{number}", picture(number), None, **fields)
        came(f"f{number - 6}", None, "person")
    settle(assembly)
    assert len(fates) == 40
    assert set(fates.values()) <= {"waiting", "kept", "refused.rule", "remembered"}
    assembly.disk.close()
    again = agent_of(tmp_path)
    store = again.agent.store
    notes = {note.name: note for note in [*store.records.values(), *store.unlabelled.values()]}
    for name, fate in ((said.split()[0], fate) for said, fate in fates.items()):
        number = int(name[1:])
        if fate in ("waiting", "kept"):
            assert store.payload(notes[name].id) == picture(number)
            labelled = fates.get(f"{name} person") == "kept"
            assert (notes[name].label == 1) == labelled
    for name in ("f1", "f2", "f3", "f12"):
        assert "alarms" in (store.holders(notes[name].id) or notes[name].rules)
    assert {f"f{number}" for number in (10, 15, 20)}.isdisjoint(notes)
    assert (tmp_path / "a.store").stat().st_size <= BUDGET
    again.disk.close()
