"""Every kind of source, reading real files, folders, sockets and a real MQTT broker."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fedkeep.agent.arrivals import Arrival, IngestQueue, Source
from fedkeep.agent.assembly import parse_config
from fedkeep.agent.connections import Listener
from fedkeep.agent.record import SampleForm
from fedkeep.agent.sources import make_source, records
from fedkeep.agent.sources.mqtt import MqttSource
from fedkeep.agent.sources.records import RecordsSource, _Exchange
from fedkeep.core.errors import ConfigError, FedkeepError
from fedkeep.protocol.client import AgentClient
from fedkeep.protocol.framing import receive_frame, send_frame
from tests.agent.test_agent_process import ENVIRONMENT, running, write_config

FORM = SampleForm(np.dtype(np.float32), (2,))


def source(**table: Any) -> Source:
    return make_source(table, 0)


def read(
    made: Source, count: int, refused: int = 0, fate: str = "kept"
) -> tuple[list[Arrival], dict[str, int]]:
    """Runs a source until so many samples and refusals have come, acknowledging each."""
    intake = IngestQueue(64, FORM)
    made.open()
    thread = threading.Thread(target=made.run, args=(intake,), daemon=True)
    thread.start()
    got: list[Arrival] = []
    deadline = time.monotonic() + 120
    counts: Counter[str] = Counter()
    while (len(got) < count or counts.total() < refused) and time.monotonic() < deadline:
        for arrival in intake.take(64, 0.1, 0.0):
            got.append(arrival)
            if arrival.acknowledge is not None:
                arrival.acknowledge(fate)
        counts += intake.counted()
    time.sleep(0.1)
    intake.stop()
    thread.join(5)
    made.close()
    return got, dict(counts + intake.counted())


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
    got, counted = read(source(kind="folder", path=str(tmp_path), afterwards="keep"), 4, 5)
    assert [a.id for a in got] == [7, 8, 9, None]
    assert counted == {"refused.malformed": 2, "refused.shape": 3}
    aside = sorted(p.name for p in (tmp_path / "refused").iterdir())
    assert [name for name in aside if name.endswith(".npz")] == ["b.npz", "c.npz", "d.npz"]
    report = json.loads((tmp_path / "refused" / "d.npz.report.json").read_text())
    assert report["refused"] == {"shape": 3}
    assert "x (2, 2), y (3,)" in report["detail"]
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
    deadline = time.monotonic() + 120
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
        client.publish("sensors/a", payload, qos=1, retain=retain).wait_for_publish(60)
    client.disconnect()
    client.loop_stop()


def subscription_of(made: Source) -> threading.Event:
    """Set once the broker has taken the subscription of an opened MQTT source."""
    assert isinstance(made, MqttSource)
    subscribed = threading.Event()
    made._client.on_subscribe = lambda *_: subscribed.set()
    return subscribed


def sample(id_: int) -> bytes:
    return json.dumps({"x": [id_, 0], "y": 1, "id": id_}).encode()


def test_mqtt_keeps_what_was_not_acknowledged(broker: int) -> None:
    made = source(kind="mqtt", topic="sensors/#", port=broker)
    intake = IngestQueue(64, FORM)
    made.open()
    thread = threading.Thread(target=made.run, args=(intake,), daemon=True)
    subscribed = subscription_of(made)
    thread.start()
    assert subscribed.wait(60)
    publish(broker, [sample(1), b"nonsense", sample(2)])
    first: list[Arrival] = []
    deadline = time.monotonic() + 120
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
            deadline = time.monotonic() + 120
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
            deadline = time.monotonic() + 120
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
        deadline = time.monotonic() + 120
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
    deadline = time.monotonic() + 120
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


def save(folder: Path, name: str, count: int, first: int = 0, label: int = 0) -> None:
    """A file of samples, put into the folder whole."""
    x = np.arange(2.0 * count).reshape(count, 2)
    with (folder / "making.tmp").open("wb") as file:
        np.savez(file, x=x, y=np.full(count, label), ids=np.arange(first, first + count))
    (folder / "making.tmp").rename(folder / name)


def test_a_file_whose_records_are_mostly_refused_is_set_aside_with_a_report(tmp_path: Path) -> None:
    save(tmp_path, "wrong.npz", 5)
    got, _ = read(source(kind="folder", path=str(tmp_path)), 5, fate="refused.label")
    assert len(got) == 5
    assert (tmp_path / "refused" / "wrong.npz").exists()
    report = json.loads((tmp_path / "refused" / "wrong.npz.report.json").read_text())
    assert (report["records"], report["refused"]) == (5, {"label": 5})
    for number, fate in enumerate(("refused.erased", "refused.score", "skipped")):
        save(tmp_path, f"fine-{number}.npz", 5)
        read(source(kind="folder", path=str(tmp_path)), 5, fate=fate)
    assert not list(tmp_path.glob("*.npz")), "these are done with, and erased ones must not stay"
    assert len(list((tmp_path / "refused").iterdir())) == 2


def test_a_report_never_follows_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "refused").mkdir()
    report = tmp_path / "refused" / "wrong.npz.report.json"
    report.symlink_to(victim)
    save(tmp_path, "wrong.npz", 5)
    read(source(kind="folder", path=str(tmp_path)), 5, fate="refused.label")
    assert victim.read_text() == "precious"
    assert not report.is_symlink()
    assert json.loads(report.read_text())["records"] == 5


def test_files_of_other_kinds_are_named_once_and_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a.wav", "b.wav", "c.jpg", "noise", "d.tmp", ".hidden.wav"):
        (tmp_path / name).write_bytes(b"x")
    made, intake = source(kind="folder", path=str(tmp_path)), IngestQueue(8, FORM)
    made.open()
    thread = threading.Thread(target=made.run, args=(intake,), daemon=True)
    thread.start()
    deadline = time.monotonic() + 120
    while len(intake.refused) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1.0)
    intake.stop()
    thread.join()
    kinds = sorted(record.raw.split(" and are")[0].split()[-1] for record in intake.refused)
    assert kinds == [".jpg", ".wav", "suffix"]
    assert caplog.text.count(".wav and are not read") == 1
    assert len(list(tmp_path.iterdir())) == 6


def test_two_sources_of_one_folder_read_each_file_once(tmp_path: Path) -> None:
    for number in range(40):
        save(tmp_path, f"{number}.npz", 5, first=5 * number)
    intake = IngestQueue(1024, FORM)
    made = [source(kind="folder", name=name, path=str(tmp_path)) for name in ("a", "b")]
    threads = []
    for one in made:
        one.open()
        threads.append(threading.Thread(target=one.run, args=(intake,), daemon=True))
        threads[-1].start()
    ids: list[int] = []
    deadline = time.monotonic() + 120
    while list(tmp_path.glob("*.npz")) and time.monotonic() < deadline:
        for arrived in intake.take(64, 0.05, 0.0):
            ids.append(arrived.id)
            arrived.answer("kept")
    intake.stop()
    for thread in threads:
        thread.join()
    assert sorted(ids) == list(range(200))


def test_what_is_written_under_a_files_name_meanwhile_is_read_too(tmp_path: Path) -> None:
    save(tmp_path, "latest.npz", 3)
    intake, made = IngestQueue(64, FORM), source(kind="folder", path=str(tmp_path))
    made.open()
    thread = threading.Thread(target=made.run, args=(intake,), daemon=True)
    thread.start()
    first: list[Arrival] = []
    while len(first) < 3:
        first += intake.take(8, 0.1, 0.0)
    save(tmp_path, "latest.npz", 3, first=3)
    for one in first:
        one.answer("kept")
    again: list[Arrival] = []
    deadline = time.monotonic() + 120
    while len(again) < 3 and time.monotonic() < deadline:
        again += intake.take(8, 0.1, 0.0)
    intake.stop()
    thread.join()
    assert [one.id for one in again] == [3, 4, 5]
    assert (tmp_path / "latest.npz").exists(), "its samples have no fate yet"


def test_a_file_that_is_still_being_written_is_waited_for(tmp_path: Path) -> None:
    save(tmp_path, "whole", 4)
    data = (tmp_path / "whole").read_bytes()
    (tmp_path / "slow.npz").write_bytes(data[: len(data) // 2])

    def finish() -> None:
        time.sleep(1.0)
        with (tmp_path / "slow.npz").open("ab") as file:
            file.write(data[len(data) // 2 :])

    writer = threading.Thread(target=finish)
    writer.start()
    got, counted = read(source(kind="folder", path=str(tmp_path)), 4)
    writer.join()
    assert (len(got), counted) == (4, {})


@pytest.mark.parametrize("address", ["unix://in.sock", "unix://run/in.sock", "unix:in.sock"])
def test_a_relative_socket_is_refused_with_a_sentence(address: str) -> None:
    with pytest.raises(ConfigError, match="address must have an absolute path"):
        source(kind="socket", address=address)


def test_beyond_loopback_records_need_a_token_or_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"tcp://0.0.0.0:{free_port()}"
    with pytest.raises(ConfigError, match="set insecure = true"):
        source(kind="socket", address=address).open()
    allowed = source(kind="socket", address=address, insecure=True)
    allowed.open()
    allowed.close()
    assert "whoever reaches this machine is let in" in caplog.text
    (tmp_path / "token").write_text("a secret\n")
    made = source(kind="socket", address=address, token_file=str(tmp_path / "token"))
    intake = IngestQueue(8, FORM)
    made.open()
    thread = threading.Thread(target=made.run, args=(intake,), daemon=True)
    thread.start()
    record = msgspec.msgpack.encode({"x": [1, 2], "y": 0})
    for token, welcome in ((b"a guess", False), (record, False), (b"a secret", True)):
        client = _connect(f"tcp://127.0.0.1:{address.rpartition(':')[2]}")
        send_frame(client, token)
        send_frame(client, record)
        assert bool(intake.take(1, 60.0 if welcome else 0.3, 0.0)) is welcome
        client.close()
    intake.stop()
    thread.join()
    made.close()
    assert intake.counted() == {"refused.token": 2}
    assert all("secret" not in shown.raw for shown in intake.refused)


def test_a_flood_of_idle_connections_costs_no_sender_its_own(tmp_path: Path) -> None:
    made = source(kind="socket", address=f"unix://{tmp_path}/s", connections=8)
    intake = IngestQueue(64, FORM)
    made.open()
    thread = threading.Thread(target=made.run, args=(intake,), daemon=True)
    thread.start()
    senders = [_connect(f"unix://{tmp_path}/s") for _ in range(3)]
    flood: list[socket.socket] = []
    for turn in range(4):
        for number, sender in enumerate(senders):
            record = {"x": [number, turn], "y": 0, "id": f"{number}-{turn}"}
            send_frame(sender, msgspec.msgpack.encode(record))
        arrived: list[Arrival] = []
        while len(arrived) < 3:
            arrived += intake.take(3, 5.0, 0.0)
        for one in arrived:
            one.answer("kept")
        for sender in senders:
            assert receive_frame(sender) is not None
        flood += [_connect(f"unix://{tmp_path}/s") for _ in range(50)]
        time.sleep(0.1)
    assert isinstance(made, RecordsSource)
    assert len(made._listener._heard) <= 8
    intake.stop()
    thread.join()
    made.close()
    for connection in [*senders, *flood]:
        connection.close()


def test_senders_that_give_up_and_come_again_take_no_more_threads(tmp_path: Path) -> None:
    listener, recovers = Listener(tmp_path / "s", 4), threading.Event()

    def serve(connection: socket.socket) -> None:
        connection.recv(1)
        recovers.wait()  # as on a full disk, on which nobody gets an answer

    listener.start(serve)
    before = threading.active_count()
    came: list[socket.socket] = []
    for _ in range(30):
        sender = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sender.connect(str(tmp_path / "s"))
        sender.send(b"x")
        came.append(sender)
        time.sleep(0.02)
    assert threading.active_count() <= before + 8
    for sender in came:
        sender.close()
    recovers.set()
    last = _connect(f"unix://{tmp_path}/s")
    last.send(b"x")
    last.settimeout(10.0)
    assert last.recv(1) == b"", "it is served: the threads of those before have ended"
    listener.close()
    last.close()


def messages_after(port: int, payloads: list[bytes], **options: Any) -> tuple[IngestQueue, Source]:
    """A source that has subscribed before the messages were published."""
    made = source(kind="mqtt", topic="sensors/#", port=port, **options)
    made.set_device("d1")
    intake = IngestQueue(64, FORM)
    made.open()
    subscribed = subscription_of(made)
    threading.Thread(target=made.run, args=(intake,), daemon=True).start()
    assert subscribed.wait(60)
    publish(port, payloads)
    return intake, made


@pytest.mark.parametrize("protocol", ["5", "3.1.1"])
def test_a_message_of_200_megabytes_costs_no_memory_and_does_not_come_again(
    broker: int, protocol: str
) -> None:
    code = (
        "import resource, sys, threading, time, numpy as np\n"
        "from fedkeep.agent.arrivals import IngestQueue\n"
        "from fedkeep.agent.record import SampleForm\n"
        "from fedkeep.agent.sources import make_source\n"
        "intake = IngestQueue(64, SampleForm(np.dtype(np.float32), (2,)))\n"
        f"table = dict(kind='mqtt', topic='sensors/#', port={broker}, protocol='{protocol}')\n"
        "made = make_source(table, 0); made.open()\n"
        "subscribed = threading.Event()\n"
        "made._client.on_subscribe = lambda *_: subscribed.set()\n"
        "threading.Thread(target=made.run, args=(intake,), daemon=True).start()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "subscribed.wait(60); print('ready', flush=True)\n"
        "ids = []\n"
        "while 'last' not in ids:\n"
        "    for one in intake.take(8, 0.2, 0.0):\n"
        "        ids.append(one.id); one.answer('kept')\n"
        "time.sleep(0.5); intake.stop()\n"
        "grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before\n"
        "print(ids, dict(intake.counted()), grown, flush=True)\n"
        "made.close()\n"
    )
    last = json.dumps({"x": [1, 2], "y": 0, "id": "last"}).encode()
    for life in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        publish(broker, [bytes(200_000_000), last] if life == 0 else [last])
        said = process.stdout.readline()
        process.stdout.close()
        process.wait(120)
        # By MQTT 5 the broker itself lets it go; else it is read past, counted and acknowledged.
        assert ("refused.oversized" in said) is (protocol == "3.1.1" and life == 0), said
        assert int(said.rsplit(" ", 1)[1]) < 30_000, "kilobytes"


def test_two_devices_and_two_sources_have_different_client_ids() -> None:
    names = set()
    for device in ("d1", "d2"):
        for name in ("a", "b"):
            made = source(kind="mqtt", topic="t", name=name)
            assert isinstance(made, MqttSource)
            made.set_device(device)
            names.add(made._name())
    assert len(names) == 4
    mine = source(kind="mqtt", topic="t", client_id="mine")
    assert isinstance(mine, MqttSource)
    assert mine._name() == "mine"


def test_an_unreadable_message_is_shown_and_does_not_come_again(broker: int) -> None:
    intake, made = messages_after(broker, [b"\x1b[2Jnonsense", sample(1)])
    (one,) = intake.take(1, 10.0, 0.0)
    one.answer("kept")
    time.sleep(0.3)
    intake.stop()
    made.close()
    assert intake.counted() == {"refused.malformed": 1}
    intake, made = messages_after(broker, [sample(2)])
    (one,) = intake.take(8, 10.0, 0.5)
    intake.stop()
    made.close()
    assert one.id == 2


def test_an_answer_for_an_earlier_connection_is_not_sent_by_the_next(tmp_path: Path) -> None:
    port = free_port()
    with running_broker(tmp_path, port):
        intake, made = messages_after(port, [sample(1)])
        (first,) = intake.take(1, 10.0, 0.0)
    with running_broker(tmp_path, port):
        deadline = time.monotonic() + 120
        second: list[Arrival] = []
        while not second and time.monotonic() < deadline:
            publish(port, [sample(2)])
            second = intake.take(1, 0.5, 0.0)
        first.answer("kept")  # it has the number that the new broker gave to the second
        time.sleep(0.3)
        intake.stop()
        made.close()
        again, _ = read(_named(port), 1)
        assert 2 in [one.id for one in again]


def _named(port: int) -> Source:
    made = source(kind="mqtt", topic="sensors/#", port=port)
    made.set_device("d1")
    return made


def test_a_named_pipe_is_read_for_writer_after_writer(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    made, intake = source(kind="lines", path=str(pipe)), IngestQueue(64, FORM)
    made.open()
    thread = threading.Thread(target=made.run, args=(intake,), daemon=True)
    thread.start()
    ids: list[int] = []
    for turn in range(5):
        with pipe.open("wb") as writer:
            writer.write(sample(turn) + b"\n")
        deadline = time.monotonic() + 120
        while turn not in ids and time.monotonic() < deadline:
            ids += [one.id for one in intake.take(8, 0.1, 0.0)]
    with pipe.open("wb") as writer:
        writer.write(b'{"x": [1,')  # and is gone
    counted: Counter[str] = Counter()
    deadline = time.monotonic() + 120
    while not counted and time.monotonic() < deadline:
        time.sleep(0.02)
        counted += intake.counted()
    with pipe.open("wb") as writer:
        writer.write(sample(5) + b"\n")
    deadline = time.monotonic() + 120
    while 5 not in ids and time.monotonic() < deadline:
        ids += [one.id for one in intake.take(8, 0.1, 0.0)]
    intake.stop()
    thread.join()
    made.close()
    assert ids == list(range(6))
    assert counted + intake.counted() == {"refused.malformed": 1}


def test_sources_of_one_name_are_a_mistake() -> None:
    twice = [{"kind": "mqtt", "topic": "a"}, {"kind": "mqtt", "topic": "b"}]
    table: dict[str, Any] = {"samples": {"shape": [2], "labels": 2}, "source": twice}
    with pytest.raises(ConfigError, match="two sources are called 'mqtt'"):
        parse_config(table)
    twice[1]["name"] = "other"
    assert [one.name for one in parse_config(table).sources] == ["mqtt", "other"]
    twice[1]["namespace"] = "n" * 129
    with pytest.raises(ConfigError, match="at most 128 bytes"):
        parse_config(table)
