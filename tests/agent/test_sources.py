"""Every kind of source, reading real files, folders, sockets and a real MQTT broker."""

import json
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fedkeep.agent.arrivals import Arrival, IngestQueue, Source
from fedkeep.agent.record import SampleForm
from fedkeep.agent.sources import make_source, records
from fedkeep.agent.sources.records import _Exchange
from fedkeep.core.errors import ConfigError, FedkeepError
from fedkeep.protocol.client import AgentClient
from fedkeep.protocol.framing import receive_frame, send_frame
from tests.agent.test_agent_process import running, write_config

FORM = SampleForm(np.dtype(np.float32), (2,))


def source(**table: Any) -> Source:
    return make_source(table, 0)


def read(made: Source, count: int) -> tuple[list[Arrival], dict[str, int]]:
    """Runs a source in a thread until `count` samples have come, acknowledging each."""
    intake = IngestQueue(64, FORM)
    made.open()
    thread = threading.Thread(target=made.run, args=(intake,), daemon=True)
    thread.start()
    got: list[Arrival] = []
    deadline = time.monotonic() + 20
    while len(got) < count and time.monotonic() < deadline:
        for arrival in intake.take(count - len(got), 0.1, 0.0):
            got.append(arrival)
            if arrival.acknowledge is not None:
                arrival.acknowledge("kept")
    time.sleep(0.1)
    intake.stop()
    thread.join(5)
    made.close()
    return got, dict(intake.counted())


def test_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    lines = [
        '{"x": [1, 2], "y": 0, "id": "a"}',
        "nonsense",
        '{"y": 1}',
        "",
        '{"x": [3, 4], "y": 2.0}',
        "9" * 50_000,
    ]
    file.write_text("\n".join([*lines, '{"x": [5, 6], "y": 1}\n']))
    got, counted = read(source(kind="lines", path=str(file)), 3)
    assert [(a.x.tolist(), a.y, a.id) for a in got] == [
        ([1, 2], 0, "a"),
        ([3, 4], 2.0, None),
        ([5, 6], 1, None),
    ]
    assert counted == {"refused.malformed": 2, "refused.oversized": 1}


def test_csv(tmp_path: Path) -> None:
    file = tmp_path / "in.csv"
    file.write_text("a,class,id,b\n1,0,p,2\n1,x,q,2\n3,1,r,4\n5\n")
    got, counted = read(source(kind="lines", path=str(file), format="csv", label="class"), 2)
    assert [(a.x.tolist(), a.y, a.id) for a in got] == [([1, 2], 0, "p"), ([3, 4], 1, "r")]
    assert counted == {"refused.malformed": 2}
    made = source(kind="lines", path=str(file), format="csv")
    made.open()
    with pytest.raises(ConfigError, match="no column 'y'"):
        made.run(IngestQueue(8, FORM))
    made.close()


def test_a_folder_of_npz_files(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "a.npz",
        x=np.arange(6.0).reshape(3, 2),
        y=np.array([0, 1, 2]),
        ids=np.array([7, 8, 9]),
    )
    (tmp_path / "b.npz").write_bytes(b"not a zip")
    np.savez(tmp_path / "c.npz", x=np.array([{"a": 1}], dtype=object), y=np.array([0]))
    np.savez(tmp_path / "d.npz", x=np.ones((2, 2)), y=np.ones((3,)))
    np.savez(tmp_path / "e.npz", x=np.ones((1, 2)), y=np.ones((1,)))
    got, counted = read(source(kind="folder", path=str(tmp_path), afterwards="keep"), 4)
    assert [a.id for a in got] == [7, 8, 9, None]
    assert counted == {"refused.malformed": 2, "refused.shape": 3}
    assert sorted(p.name for p in (tmp_path / "refused").iterdir()) == ["b.npz", "c.npz", "d.npz"]
    assert sorted(p.name for p in (tmp_path / "done").iterdir()) == ["a.npz", "e.npz"]
    with pytest.raises(ConfigError, match="no folder"):
        source(kind="folder", path=str(tmp_path / "none")).open()


def test_a_python_iterator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_stream.py").write_text(
        "def samples():\n    yield [1, 2], 0\n    yield [3, 4], 1, 'name'\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    got, _ = read(source(kind="iterator", function="my_stream:samples"), 2)
    assert [(a.x.tolist(), a.y, a.id) for a in got] == [([1, 2], 0, None), ([3, 4], 1, "name")]
    with pytest.raises(ConfigError, match="did you mean 'samples'"):
        source(kind="iterator", function="my_stream:sample").open()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_records_over_a_socket_are_answered_with_their_fate(tmp_path: Path, kind: str) -> None:
    port = free_port()
    address = f"tcp://127.0.0.1:{port}" if kind == "tcp" else f"unix://{tmp_path}/s"
    made = source(kind="socket", address=address, overload="wait")
    result: list[Any] = []
    reader = threading.Thread(target=lambda: result.extend(read(made, 3)))
    reader.start()
    client = _connect(address)
    for payload in (
        {"x": np.array([1, 2], "<f4").tobytes(), "y": 0, "id": 5},
        {"x": [3, 4], "y": 1},
        {"y": 1},
        {"x": [5, 6], "y": 1},
    ):
        send_frame(client, msgspec.msgpack.encode(payload))
    answers = [msgspec.msgpack.decode(receive_frame(client) or b"") for _ in range(4)]
    client.sendall((1 << 30).to_bytes(4, "big"))
    assert client.recv(1) == b"", "an oversized record ends the connection unread"
    reader.join()
    client.close()
    got, counted = result
    assert [a.x.tolist() for a in got] == [[1, 2], [3, 4], [5, 6]]
    fates = {answer["n"]: answer["fate"] for answer in answers}
    assert fates == {0: "kept", 1: "kept", 2: "refused.malformed", 3: "kept"}
    assert counted == {"refused.malformed": 1, "refused.oversized": 1}


def test_a_sender_that_reads_no_answers_does_not_hold_up_the_agent() -> None:
    ours, theirs = socket.socketpair()
    exchange = _Exchange(ours)
    start = time.monotonic()
    for number in range(50_000):
        exchange.answer(number, "kept")
    assert time.monotonic() - start < 10
    assert len(theirs.recv(1 << 20)) > 0
    while theirs.recv(1 << 20):
        pass  # it was cut off
    ours.close()
    theirs.close()


def test_more_senders_than_allowed_cost_the_one_silent_the_longest(tmp_path: Path) -> None:
    made = source(kind="socket", address=f"unix://{tmp_path}/s", connections=2)
    result: list[Any] = []
    reader = threading.Thread(target=lambda: result.extend(read(made, 2)))
    reader.start()
    idle = [_connect(f"unix://{tmp_path}/s") for _ in range(3)]
    assert idle[0].recv(1) == b""
    for one in idle[1:]:
        send_frame(one, msgspec.msgpack.encode({"x": [1, 2], "y": 0}))
        assert receive_frame(one) is not None
    reader.join()
    for one in idle:
        one.close()


def test_a_record_that_never_ends_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_RECORD_SECONDS", 0.2)
    made = source(kind="socket", address=f"unix://{tmp_path}/s")
    result: list[Any] = []
    reader = threading.Thread(target=lambda: result.extend(read(made, 1)))
    reader.start()
    slow = _connect(f"unix://{tmp_path}/s")
    slow.sendall(b"\0\0\0\x20half")
    assert slow.recv(1) == b""
    sender = _connect(f"unix://{tmp_path}/s")
    send_frame(sender, msgspec.msgpack.encode({"x": [1, 2], "y": 0}))
    reader.join()
    assert result[1] == {"refused.too-slow": 1}
    slow.close()
    sender.close()


def _connect(address: str) -> socket.socket:
    deadline = time.monotonic() + 10
    while True:
        unix = address.startswith("unix")
        client = socket.socket(socket.AF_UNIX if unix else socket.AF_INET, socket.SOCK_STREAM)
        try:
            client.connect(
                address.removeprefix("unix://")
                if unix
                else ("127.0.0.1", int(address.rsplit(":", 1)[1]))
            )
            return client
        except OSError:
            client.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def test_a_taken_address_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(FedkeepError, match=f"cannot listen at {address}"):
            source(kind="socket", address=f"tcp://{address}").open()


@contextmanager
def running_broker(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A real mosquitto on the loopback."""
    binary = shutil.which("mosquitto") or shutil.which("/usr/sbin/mosquitto")
    if binary is None:
        pytest.skip("there is no mosquitto broker on this machine")
    pytest.importorskip("paho.mqtt", reason="paho-mqtt is not installed")
    config = folder / "mosquitto.conf"
    config.write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\n")
    process = subprocess.Popen(
        [binary, "-c", str(config)], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    try:
        _connect(f"tcp://127.0.0.1:{port}").close()
        yield process
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[int]:
    port = free_port()
    with running_broker(tmp_path, port):
        yield port


def publish(port: int, payloads: list[bytes], *, retain: bool = False) -> None:
    from paho.mqtt import client as paho

    client = paho.Client(paho.CallbackAPIVersion.VERSION2)
    client.connect("127.0.0.1", port)
    client.loop_start()
    for payload in payloads:
        client.publish("sensors/a", payload, qos=1, retain=retain).wait_for_publish(5)
    client.disconnect()
    client.loop_stop()


def sample(id_: int) -> bytes:
    return json.dumps({"x": [id_, 0], "y": 1, "id": id_}).encode()


def test_mqtt_keeps_what_was_not_acknowledged(broker: int) -> None:
    made = source(kind="mqtt", topic="sensors/#", port=broker)
    intake = IngestQueue(64, FORM)
    made.open()
    thread = threading.Thread(target=made.run, args=(intake,), daemon=True)
    thread.start()
    time.sleep(0.3)
    publish(broker, [sample(1), b"nonsense", sample(2)])
    first: list[Arrival] = []
    deadline = time.monotonic() + 10
    while len(first) < 2 and time.monotonic() < deadline:
        first += intake.take(8, 0.5, 0.0)
    assert [a.id for a in first] == [1, 2]
    assert intake.counted() == {"refused.malformed": 1}
    assert first[0].acknowledge is not None
    first[0].acknowledge("kept")
    time.sleep(0.3)
    intake.stop()
    thread.join()
    made.close()
    again, _ = read(source(kind="mqtt", topic="sensors/#", port=broker), 1)
    assert [a.id for a in again] == [2], "the broker sends again what no commit had answered for"


def test_a_broker_that_is_killed_and_comes_back_is_heard_again(tmp_path: Path) -> None:
    port = free_port()
    made, intake = source(kind="mqtt", topic="sensors/#", port=port), IngestQueue(8, FORM)
    made.open()
    thread = threading.Thread(target=made.run, args=(intake,), daemon=True)
    heard: list[int] = []
    for number in (1, 2):
        with running_broker(tmp_path, port) as process:
            if number == 1:
                thread.start()
            deadline = time.monotonic() + 20
            while number not in heard and time.monotonic() < deadline:
                publish(
                    port, [sample(number)]
                )  # until the agent has found the broker, nobody keeps it
                heard += [arrival.id for arrival in intake.take(8, 0.2, 0.0)]
            process.kill()
    intake.stop()
    thread.join()
    made.close()
    assert {1, 2} <= set(heard)


def test_no_message_is_lost_where_agents_end_in_the_middle_of_bursts(
    tmp_path: Path, broker: int
) -> None:
    write_config(tmp_path, f'[[source]]\nkind = "mqtt"\ntopic = "sensors/#"\nport = {broker}\n')
    publish(broker, [b"\xff garbage"], retain=True)
    for number, end in enumerate((signal.SIGTERM, signal.SIGKILL, signal.SIGTERM)):
        with (
            running(tmp_path, "agent.toml") as process,
            AgentClient(str(tmp_path / "a.sock")) as client,
        ):
            deadline = time.monotonic() + 20
            while (
                "refused.malformed" not in client.status().counters and time.monotonic() < deadline
            ):
                time.sleep(0.05)  # what the broker retains comes with the subscription
            first = 100 * number
            publish(
                broker,
                [
                    json.dumps({"x": [i] * 6, "y": 0, "id": i}).encode()
                    for i in range(first, first + 60)
                ],
            )
            process.send_signal(end)
            process.wait()
    with running(tmp_path, "agent.toml"), AgentClient(str(tmp_path / "a.sock")) as client:
        deadline = time.monotonic() + 20
        while client.status().samples < 180 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert client.status().samples == 180


def test_a_broker_that_comes_late_is_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("paho.mqtt", reason="paho-mqtt is not installed")
    made, intake = source(kind="mqtt", topic="t", port=free_port()), IngestQueue(8, FORM)
    made.open()
    thread = threading.Thread(target=made.run, args=(intake,), daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while "no broker answers" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "no broker answers at 127.0.0.1" in caplog.text
    assert thread.is_alive()
    intake.stop()
    thread.join()
    made.close()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"path": "x"}, "'source\\[0\\].kind' is missing"),
        ({"kind": "line"}, "did you mean 'lines'"),
        ({"kind": "lines", "pth": "x"}, "did you mean 'path'"),
        ({"kind": "lines", "path": "/nowhere"}, "cannot read /nowhere"),
        ({"kind": "socket", "address": "http://x"}, "address must be tcp"),
        ({"kind": "lines", "format": "xml"}, "format"),
        ({"kind": "mqtt", "topic": "a/#/b"}, "topic must be levels apart by /"),
        ({"kind": "mqtt", "topic": ""}, "topic must be levels"),
        ({"kind": "mqtt", "topic": "a", "port": 99999}, "port must be between 1 and 65535"),
    ],
)
def test_wrong_source_tables_are_named(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        source(**table).open()
