"""Hostile records for every kind of source: the agent goes on and keeps the sound ones."""

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from fedkeep.agent.arrivals import Source
from fedkeep.agent.sources import IteratorSource, make_source
from fedkeep.agent.sources.mqtt import MqttSource
from tests.agent.builders import LABELS, SHAPE, make_agent

SOUND = 20
"""Samples that come after all the others, and must be kept."""
_FIRST_ID = 10**9


@dataclass
class Siege:
    records: int = 0
    refused: int = 0
    failures: int = 0
    """Sources that ended or lost sound samples, loops that raised."""


def numbers(rng: np.random.Generator) -> str:
    digits = int(rng.choice([1, 20, 308, 401, 4300, 4400]))
    return str(rng.choice(["", "-"])) + "9" * digits + str(rng.choice(["", ".5", "e999", "e-999"]))


def json_line(rng: np.random.Generator) -> bytes:
    deep = int(rng.choice([5, 70, 1100, 3500]))
    x = json.dumps(rng.standard_normal(SHAPE).round(3).tolist())
    made: list[Callable[[], str]] = [
        lambda: f'{{"x": {x}, "y": {numbers(rng)}, "id": 1}}',
        lambda: f'{{"x": {x}, "y": 1, "id": {numbers(rng)}}}',
        lambda: f'{{"x": {x}, "y": 1, "id": "{"7" * 4300}"}}',
        lambda: f'{{"x": {"[" * deep}{"]" * deep}, "y": 1}}',
        lambda: f'{{"x": {x}, "y": {"[" * deep}{"]" * deep}}}',
        lambda: f'{{"x": {x}, "y": 1, "id": {{"a": [{x}]}}}}',
        lambda: f'{{"x": [{numbers(rng)}], "y": 0}}',
        lambda: '{"x": ' + "[" * deep,
        lambda: f'{{"x": {x}, "y": null}}',
        lambda: f'{{"x": "{x}", "y": 1}}',
        lambda: f'{{"x": [1, "a", null, true, {{}}, 1e400], "y": {int(rng.integers(-3, 9))}}}',
        lambda: "[" * deep,
        lambda: '{"x": ' + x[: int(rng.integers(len(x)))],
    ]
    if rng.random() < 0.3:
        return rng.bytes(int(rng.integers(1, 200))).replace(b"\n", b" ")
    return made[int(rng.integers(len(made)))]().encode()


def csv_line(rng: np.random.Generator) -> bytes:
    row = ",".join(str(v) for v in rng.standard_normal(SHAPE[0]).round(3))
    made = [
        f'"{row},1',
        f'{row},"',
        numbers(rng) + "," + row,
        row + ",1,2,3",
        '"' * 50,
        row + "," + numbers(rng),
        "\0" * 9,
    ]
    if rng.random() < 0.3:
        return rng.bytes(int(rng.integers(1, 200))).replace(b"\n", b" ").replace(b"\r", b" ")
    return str(made[int(rng.integers(len(made)))]).encode()


def frame(rng: np.random.Generator) -> bytes:
    x = rng.standard_normal(SHAPE).astype("<f4").tobytes()
    deep = b"\x91" * int(rng.choice([5, 1500, 9000])) + b"\x00"
    made = [
        msgspec.msgpack.encode({"x": x[:-1], "y": 1}),
        msgspec.msgpack.encode({"x": x, "y": "1" * 500, "id": {"a": 1}}),
        msgspec.msgpack.encode({"x": [1, "b", None] * 9, "y": 2**63}),
        b"\x82\xa1x" + deep + b"\xa1y\x01",
        rng.bytes(int(rng.integers(1, 100))),
        b"",
    ]
    payload = made[int(rng.integers(len(made)))][:4000]
    return struct.pack(">I", len(payload)) + payload


def damaged_npz(rng: np.random.Generator, path: Path) -> None:
    np.savez_compressed(path, x=rng.standard_normal((3, *SHAPE)), y=np.array([0, 1, 2]))
    image = bytearray(path.read_bytes())
    for _ in range(int(rng.integers(1, 30))):
        image[int(rng.integers(len(image)))] = int(rng.integers(256))
    path.write_bytes(
        bytes(image[: int(rng.integers(len(image)))]) if rng.random() < 0.2 else bytes(image)
    )


def sound_json(id_: int) -> bytes:
    x = np.random.default_rng(id_).standard_normal(SHAPE).round(4).tolist()
    return json.dumps({"x": x, "y": id_ % LABELS, "id": id_}).encode()


def write_lines(path: Path, count: int, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.writelines(json_line(rng) + b"\n" for _ in range(count))
        file.writelines(sound_json(_FIRST_ID + i) + b"\n" for i in range(SOUND))


def write_csv(path: Path, count: int, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(",".join([*(f"f{i}" for i in range(SHAPE[0])), "y", "id"]).encode() + b"\n")
        file.writelines(csv_line(rng) + b"\n" for _ in range(count))
        for i in range(SOUND):
            row = np.random.default_rng(i).standard_normal(SHAPE[0]).round(4).tolist()
            file.write(",".join(map(str, [*row, i % LABELS, _FIRST_ID + i])).encode() + b"\n")


def _lines(folder: Path, count: int) -> Source:
    write_lines(folder / "in.jsonl", count)
    return make_source({"kind": "lines", "path": str(folder / "in.jsonl")}, 0)


def _csv(folder: Path, count: int) -> Source:
    write_csv(folder / "in.csv", count)
    return make_source({"kind": "lines", "path": str(folder / "in.csv")}, 0)


def _folder(folder: Path, count: int) -> Source:
    rng, inbox = np.random.default_rng(0), folder / "inbox"
    inbox.mkdir()
    for i in range(count):
        damaged_npz(rng, inbox / f"{i:06}.npz")
    x = np.stack([np.random.default_rng(i).standard_normal(SHAPE) for i in range(SOUND)])
    np.savez(inbox / "zz.npz", x=x, y=np.arange(SOUND) % LABELS, ids=_FIRST_ID + np.arange(SOUND))
    return make_source({"kind": "folder", "path": str(inbox)}, 0)


def _socket(folder: Path, count: int) -> Source:
    address = folder / "in.sock"
    made = make_source({"kind": "socket", "address": f"unix://{address}", "overload": "wait"}, 0)

    def send() -> None:
        rng = np.random.default_rng(0)
        for start in range(0, count, 50):
            _send(address, [frame(rng) for _ in range(start, min(count, start + 50))])
        payloads = [
            msgspec.msgpack.encode(msgspec.json.decode(sound_json(_FIRST_ID + i)))
            for i in range(SOUND)
        ]
        _send(address, [struct.pack(">I", len(p)) + p for p in payloads])

    threading.Thread(target=send, daemon=True).start()
    return made


def _send(address: Path, frames: list[bytes]) -> None:
    with socket.socket(socket.AF_UNIX) as sender:
        while sender.connect_ex(str(address)):
            time.sleep(0.01)
        sender.sendall(b"".join(frames))
        sender.settimeout(0.05)
        answers = 0
        try:
            while answers < len(frames) and sender.recv(1 << 16):
                answers += 1
        except (TimeoutError, ConnectionError):
            return


class _Broken:
    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("hostile")

    def __repr__(self) -> str:
        raise RuntimeError("hostile")


class _Iterator:
    """The source of kind `iterator`, over objects no program should yield."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._source = IteratorSource("iterator", "tests.faults.hostile:Siege")
        self._source._items = self._items  # the function of a user's module
        self.name = "iterator"

    def _items(self) -> Iterator[Any]:
        rng = np.random.default_rng(0)
        made: list[Any] = [
            None, (1,), ([1] * 6,), (_Broken(), 1), ([1] * 6, _Broken()), ([1] * 6, 1, _Broken()),
            (np.ones(7), 1),
            (np.full(6, np.nan), 1), (np.full(6, 1e300), 1), (np.ones(6, complex), 1),
            ([10**400] * 6, 10**400, 10**5000),
        ]  # fmt: skip
        yield from (made[int(rng.integers(len(made)))] for _ in range(self._count))
        for i in range(SOUND):
            yield np.random.default_rng(i).standard_normal(SHAPE), i % LABELS, _FIRST_ID + i

    def open(self) -> None: ...

    def close(self) -> None: ...

    def run(self, sink: Any) -> None:
        self._source.run(sink)


class _Mqtt:
    """The source of kind `mqtt` without its broker: messages as its client hands them over."""

    def __init__(self, count: int) -> None:
        self._source = MqttSource("mqtt", "t", overload="wait")
        self._count = count
        self.name = "mqtt"

    def open(self) -> None: ...

    def close(self) -> None: ...

    def run(self, sink: Any) -> None:
        self._source._intake = sink
        self._source._longest = sink.form.longest_json
        self._source._client = SimpleNamespace(ack=lambda *_: None)
        rng = np.random.default_rng(0)
        for payload in (json_line(rng) for _ in range(self._count)):
            self._source._take(0, SimpleNamespace(payload=payload, mid=1, qos=1))
        for i in range(SOUND):
            message = SimpleNamespace(payload=sound_json(_FIRST_ID + i), mid=1, qos=1)
            self._source._take(0, message)


KINDS: dict[str, Callable[[Path, int], Any]] = {
    "lines": _lines,
    "csv": _csv,
    "folder": _folder,
    "socket": _socket,
    "mqtt": lambda _, count: _Mqtt(count),
    "iterator": lambda _, count: _Iterator(count),
}


def besiege(kind: str, folder: Path, count: int) -> Siege:
    """Runs a whole agent with one source over `count` hostile records and then sound ones."""
    siege = Siege(records=count)
    assembly = make_agent(folder, store={"budget": 400_000})
    agent, source = assembly.agent, KINDS[kind](folder, count)
    source.open()
    errors: list[BaseException] = []

    def read() -> None:
        try:
            source.run(agent.intake)
        except BaseException as error:  # noqa: BLE001 - this is what is counted
            errors.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    wanted = {_FIRST_ID + i for i in range(SOUND)}
    deadline = time.monotonic() + 60 + count / 20
    while time.monotonic() < deadline and not errors:
        agent.step(0.05)
        left = len(agent.intake) or any((folder / "inbox").glob("*.npz"))
        if not left and wanted <= set(agent.store.stored().batch.ids.tolist()):
            break
    agent.intake.stop()
    agent.commit()
    held = set(agent.store.stored().batch.ids.tolist())
    siege.failures += len(errors) + (not wanted <= held)
    siege.refused = sum(
        n for name, n in agent.counters.counts().items() if name.startswith("refused.")
    )
    source.close()
    assembly.disk.close()
    return siege
