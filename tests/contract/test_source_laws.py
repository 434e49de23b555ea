"""Every kind of source keeps the rule of `fedkeep.testing.check_source`; others are found."""

import json
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fedkeep.agent.arrivals import IngestQueue, Source
from fedkeep.agent.sources import make_source
from fedkeep.protocol.framing import receive_frame, send_frame
from fedkeep.testing import ConformanceError, check_source
from tests.agent.test_sources import free_port, publish, running_broker

Samples = Sequence[tuple[list[float], int, str]]


def as_json(samples: Samples) -> list[bytes]:
    return [json.dumps({"x": x, "y": y, "id": id_}).encode() for x, y, id_ in samples]


class PipeHarness:
    """JSON lines through a named pipe, which has no way back."""

    features = 2

    def __init__(self, folder: Path) -> None:
        self._path = folder / "pipe"
        os.mkfifo(self._path)
        self._writer: int | None = None

    def make(self) -> Source:
        return make_source({"kind": "lines", "path": str(self._path)}, 0)

    def send(self, samples: Samples) -> None:
        self._write(b"".join(line + b"\n" for line in as_json(samples)))

    def send_garbage(self) -> None:
        self._write(b"nonsense\n")

    def _write(self, data: bytes) -> None:
        if self._writer is None:
            self._writer = os.open(self._path, os.O_WRONLY)
        os.write(self._writer, data)

    def outstanding(self) -> int | None:
        return None


class FolderHarness:
    """Files in a folder: what lies there is outstanding."""

    features = 2

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0

    def make(self) -> Source:
        return make_source({"kind": "folder", "path": str(self._folder)}, 0)

    def send(self, samples: Samples) -> None:
        x, y, ids = zip(*samples, strict=True)
        name = self._folder / f"{self._count}"
        self._count += 1
        with name.with_suffix(".tmp").open("wb") as file:
            np.savez(file, x=np.array(x), y=np.array(y), ids=np.array(ids))
        name.with_suffix(".tmp").rename(name.with_suffix(".npz"))

    def send_garbage(self) -> None:
        (self._folder / "garbage.npz").write_bytes(b"not a zip")

    def outstanding(self) -> int | None:
        left = 0
        for file in self._folder.glob("[0-9]*.npz"):
            with np.load(file) as arrays:
                left += len(arrays["y"])
        return left


class SocketHarness:
    """A sender that connects anew, and sends again whatever it had no answer for."""

    features = 2

    def __init__(self, folder: Path, **options: Any) -> None:
        self._address, self._options = folder / "in.sock", options
        self._records: dict[str, bytes] = {}
        self._garbage = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._serve, daemon=True).start()

    def make(self) -> Source:
        table = {"kind": "socket", "address": f"unix://{self._address}", **self._options}
        return make_source(table, 0)

    def send(self, samples: Samples) -> None:
        packed = {id_: msgspec.msgpack.encode({"x": x, "y": y, "id": id_}) for x, y, id_ in samples}
        with self._lock:
            self._records |= packed

    def send_garbage(self) -> None:
        with self._lock:
            self._garbage += 1

    def outstanding(self) -> int | None:
        with self._lock:
            return len(self._records)

    def _serve(self) -> None:
        while True:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                try:
                    connection.connect(str(self._address))
                    self._talk(connection)
                except OSError:
                    time.sleep(0.02)

    def _talk(self, connection: socket.socket) -> None:
        connection.settimeout(0.05)
        sent: list[str] = []
        while True:
            with self._lock:
                fresh = [(id_, raw) for id_, raw in self._records.items() if id_ not in sent]
                garbage, self._garbage = self._garbage, 0
            for id_, raw in fresh:
                send_frame(connection, raw)
                sent.append(id_)
            for _ in range(garbage):
                send_frame(connection, b"\xc1 nonsense")
                sent.append("garbage")
            try:
                answer = receive_frame(connection)
            except TimeoutError:
                continue
            if answer is None:
                raise ConnectionResetError
            with self._lock:
                self._records.pop(sent[msgspec.msgpack.decode(answer)["n"]], None)


class MqttHarness:
    """A real broker; between it and the source a relay that counts acknowledgements on the wire."""

    features = 2

    def __init__(self, broker: int, protocol: str) -> None:
        self._broker, self._protocol = broker, protocol
        self._published = self._acknowledged = self._subscribed = 0
        self._server = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._relay, daemon=True).start()

    def make(self) -> Source:
        self._subscribed = 0
        port = self._server.getsockname()[1]
        table = {"kind": "mqtt", "topic": "sensors/#", "port": port, "protocol": self._protocol}
        return make_source(table, 0)

    def send(self, samples: Samples) -> None:
        self._publish(as_json(samples))

    def send_garbage(self) -> None:
        self._publish([b"nonsense"])

    def _publish(self, payloads: list[bytes]) -> None:
        deadline = time.monotonic() + 120
        while not self._subscribed and time.monotonic() < deadline:
            time.sleep(0.01)
        publish(self._broker, payloads)
        self._published += len(payloads)

    def outstanding(self) -> int | None:
        return self._published - self._acknowledged

    def _relay(self) -> None:
        while True:
            client, _ = self._server.accept()
            broker = socket.create_connection(("127.0.0.1", self._broker))
            for here, there in ((client, broker), (broker, client)):
                threading.Thread(target=self._copy, args=(here, there), daemon=True).start()

    def _copy(self, here: socket.socket, there: socket.socket) -> None:
        came = bytearray()
        try:
            while chunk := here.recv(1 << 16):
                there.sendall(chunk)
                came += chunk
                while (length := _packet_length(came)) and len(came) >= length:
                    self._acknowledged += came[0] >> 4 == 4
                    self._subscribed += came[0] >> 4 == 9
                    del came[:length]
        except OSError:
            pass
        for end in (here, there):
            end.close()


def _packet_length(data: bytes | bytearray) -> int:
    """Of an MQTT packet with its header; 0 while that is not whole."""
    length = 0
    for place, byte in enumerate(data[1:5]):
        length |= (byte & 127) << 7 * place
        if byte < 128:
            return 2 + place + length
    return 0


class IteratorHarness:
    """A generator that ends when nothing has come for a while."""

    features = 2
    records: "queue.Queue[Any]" = queue.Queue()

    def make(self) -> Source:
        return make_source(
            {"kind": "iterator", "function": "tests.contract.test_source_laws:stream"}, 0
        )

    def send(self, samples: Samples) -> None:
        for sample in samples:
            STREAM.put(sample)

    def send_garbage(self) -> None:
        STREAM.put(7)

    def outstanding(self) -> int | None:
        return None


STREAM: "queue.Queue[Any]" = queue.Queue()


def stream() -> Iterator[Any]:
    while True:
        try:
            yield STREAM.get(timeout=1)
        except queue.Empty:
            return


WITHOUT_ANSWER = ["arrival", "refusal", "waiting", "stopping"]
ALL = [*WITHOUT_ANSWER, "fate", "redelivery"]


def test_a_pipe(tmp_path: Path) -> None:
    assert check_source(PipeHarness(tmp_path)) == WITHOUT_ANSWER


def test_an_iterator() -> None:
    assert check_source(IteratorHarness()) == WITHOUT_ANSWER


def test_a_folder(tmp_path: Path) -> None:
    assert check_source(FolderHarness(tmp_path)) == ALL


@pytest.mark.parametrize("overload", ["wait", "sample", "drop"])
def test_a_socket(tmp_path: Path, overload: str) -> None:
    assert check_source(SocketHarness(tmp_path, overload=overload)) == ALL


@pytest.mark.parametrize("protocol", ["5", "3.1.1"])
def test_mqtt(tmp_path: Path, protocol: str) -> None:
    port = free_port()
    with running_broker(tmp_path, port):
        assert check_source(MqttHarness(port, protocol)) == ALL


@dataclass
class Mailbox(Source):
    """A source of somebody else's: records lie in a dict until they are acknowledged."""

    mistake: str = ""

    def run(self, intake: IngestQueue) -> None:
        seen: set[str] = set()
        life = LIVES[0]
        while not intake.stopped or (self.mistake == "stop" and life == LIVES[0]):
            for id_, record in sorted(BOX.items()):
                if id_ in seen and self.mistake != "twice":
                    continue
                seen.add(id_)
                self._hand_over(intake, id_, record)
            time.sleep(0.01)

    def _hand_over(self, intake: IngestQueue, id_: str, record: Any) -> None:
        def acknowledge(_fate: str) -> None:
            if self.mistake != "keep":
                BOX.pop(id_, None)

        if record is None:
            if self.mistake == "garbage":
                raise ValueError("garbage")
            intake.refuse("malformed", self.name)
            BOX.pop(id_)
            return
        if self.mistake == "early":
            acknowledge("")
        x, y = record
        shown = "7" if self.mistake == "id" else id_
        if self.mistake == "impatient" and intake.held and len(intake) == 4:
            acknowledge("")
            return
        self.deliver(intake, x, y, shown, acknowledge)


BOX: dict[str, Any] = {}
LIVES = [0]


class MailboxHarness:
    features = 2

    def __init__(self, mistake: str) -> None:
        BOX.clear()
        LIVES[0] += 1
        self._mistake = mistake

    def make(self) -> Source:
        kind = "tests.contract.test_source_laws:Mailbox"
        return make_source({"kind": kind, "mistake": self._mistake}, 0)

    def send(self, samples: Samples) -> None:
        BOX.update({id_: (x, y) for x, y, id_ in samples})

    def send_garbage(self) -> None:
        BOX["garbage"] = None

    def outstanding(self) -> int | None:
        return len(BOX)


def test_a_source_of_somebody_elses() -> None:
    assert check_source(MailboxHarness("")) == ALL


@pytest.mark.parametrize(
    ("mistake", "law"),
    [
        ("early", "neither deleted nor acknowledged"),
        ("keep", "with a fate leaves the stream"),
        ("id", "under its id as it came"),
        ("twice", "arrives once"),
        ("stop", "returns once the intake is stopped"),
        ("garbage", "whatever the stream brings"),
        ("impatient", "every record waits"),
    ],
)
def test_a_source_that_breaks_the_rule_is_found(mistake: str, law: str) -> None:
    with pytest.raises(ConformanceError, match=law):
        check_source(MailboxHarness(mistake), patience=2.0)
