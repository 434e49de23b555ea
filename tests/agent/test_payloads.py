"""Samples that are files: decoded under bounds, stored as they came, whatever happens meanwhile."""

import base64
import http.client
import io
import json
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import threading
import time
import wave
import zlib
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedkeep.agent.arrivals import Arrival
from fedkeep.agent.payloads import PayloadDecoder, PayloadError, looks_whole
from fedkeep.agent.record_fields import FieldNames
from fedkeep.agent.sources import make_source
from fedkeep.core.errors import ConfigError, FedkeepError, RejectedError
from fedkeep.protocol.client import AgentClient
from tests.agent.builders import AssembledAgent, make_agent
from tests.agent.test_agent_process import outcome, running
from tests.agent.test_failing_disk import failing, settle
from tests.agent.test_sources import broker, free_port
from tests.agent.test_store_commands import ask

pytest.importorskip("PIL", reason="Pillow is not installed")
from PIL import Image

assert broker  # a fixture

PICTURES: dict[str, Any] = {
    "samples": {"shape": [3, 8, 8], "labels": 3, "decoder": "image", "payload_bytes": 4096},
    "store": {"budget": 300_000},
    "policy": {"name": "fifo"},
}


def said_by(*arguments: object) -> str:
    code, said = ask(*arguments)
    assert code == 0, said
    return said


def picture(seed: int, size: int = 16, kind: str = "JPEG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (size, size, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def array(values: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.asarray(values))
    return buffer.getvalue()


def offer(agent: Any, *payloads: Any, label: Any = 1) -> list[str]:
    """Has files judged; returns the fate of each."""
    fates = ["none"] * len(payloads)
    for number, payload in enumerate(payloads):
        name = f"p{number}-{zlib.crc32(bytes(payload)):x}"
        answer = partial(fates.__setitem__, number)
        agent.intake.offer(Arrival(payload, label, name, "camera", answer), wait=True)
    while agent.step(0.0):
        pass
    assert agent.commit()
    return fates


def files_of(assembly: AssembledAgent) -> dict[str, bytes]:
    store = assembly.agent.store
    return {n.name: store.payload(n.id) or b"" for n in store.records.values()}


def test_the_bytes_come_back_as_they_came(tmp_path: Path) -> None:
    assembly = make_agent(tmp_path, **PICTURES)
    pictures = [picture(i, kind=kind) for i, kind in enumerate(["JPEG", "PNG"] * 4)]
    assert offer(assembly.agent, *pictures) == ["kept"] * 8
    x, found = assembly.agent.store.stored().batch.x, files_of(assembly)
    assert x.shape == (8, 3, 8, 8)
    assert sorted(found.values()) == sorted(pictures)
    assembly.disk.close()
    again = make_agent(tmp_path, **PICTURES)
    assert files_of(again) == found
    np.testing.assert_array_equal(again.agent.store.stored().batch.x, x)
    again.disk.close()


def test_more_small_files_fit_than_large_ones_and_the_budget_holds(tmp_path: Path) -> None:
    table = {**PICTURES, "store": {"budget": 300_000, "typical_bytes": 700}}
    assembly = make_agent(tmp_path, **table)
    agent, store = assembly.agent, assembly.agent.store
    for turn in range(60):
        size = 8 if turn < 30 else 40
        offer(agent, *(picture(100 * turn + i, size) for i in range(4)), label=turn % 3)
        assert store._used_cells <= store._sample_cells
    small = agent.device.capacity
    assert len(store) < small, "large pictures leave room for fewer"
    held = store.file.bytes_used
    assert held <= store.file.geometry.size == (tmp_path / "a.store").stat().st_size <= 300_000
    found = files_of(assembly)
    assembly.disk.close()
    again = make_agent(tmp_path, **table)
    assert files_of(again) == found
    again.disk.close()


def test_another_shape_only_makes_other_numbers_of_the_same_files(tmp_path: Path) -> None:
    assembly = make_agent(tmp_path, **PICTURES)
    offer(assembly.agent, picture(0), picture(1))
    found = files_of(assembly)
    assembly.disk.close()
    grey = {**PICTURES, "samples": {**PICTURES["samples"], "shape": [5, 4]}}
    again = make_agent(tmp_path, **grey)
    assert again.agent.store.stored().batch.x.shape == (2, 5, 4)
    assert files_of(again) == found
    again.disk.close()


def test_a_longer_limit_keeps_the_files_and_a_shorter_one_is_refused(tmp_path: Path) -> None:
    assembly = make_agent(tmp_path, **PICTURES)
    offer(assembly.agent, picture(0, 40))
    found = files_of(assembly)
    assembly.disk.close()
    longer = {**PICTURES, "samples": {**PICTURES["samples"], "payload_bytes": 8192}}
    again = make_agent(tmp_path, **longer)
    assert files_of(again) == found
    again.disk.close()
    shorter = {**PICTURES, "samples": {**PICTURES["samples"], "payload_bytes": 256}}
    with pytest.raises(ConfigError, match="payload_bytes = 256: set it as it was"):
        make_agent(tmp_path, **shorter)


def test_a_store_of_numbers_is_not_one_of_files(tmp_path: Path) -> None:
    make_agent(tmp_path).disk.close()
    with pytest.raises(ConfigError, match="holds samples of dtype float32, not payload"):
        make_agent(tmp_path, **PICTURES)


def huge_png(width: int, height: int) -> bytes:
    """A few bytes that unpack to `width` x `height` black pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    pixels = zlib.compress(bytes((width + 1) * min(height, 64)), 9)
    ends = chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + ends


def text_bomb() -> bytes:
    """A picture whose comment unpacks to 40 megabytes."""
    whole = picture(0, kind="PNG")
    data = b"k\0\0" + zlib.compress(bytes(40 << 20), 9)
    text = struct.pack(">I", len(data)) + b"zTXt" + data
    text += struct.pack(">I", zlib.crc32(b"zTXt" + data))
    return whole[:33] + text + whole[33:]


def lying_array() -> bytes:
    """A header that claims a terabyte, and no numbers."""
    return array(np.zeros(4)).replace(b"(4,), ", b"(137438953472,), ")[:128]


HOSTILE = {
    "pixels": (huge_png(30_000, 30_000), "oversized"),
    "scans": (picture(0)[:-2] + b"\xff\xda\x00\x08" * 100 + b"\xff\xd9", "oversized"),
    "cut": (picture(0)[:200], "payload"),
    "empty": (b"", "payload"),
    "text": (b"<svg/>", "payload"),
    "gif": (picture(0, kind="GIF"), "payload"),
    "noise": (np.random.default_rng(0).bytes(2000), "payload"),
    "long": (picture(0, 64) + bytes(5000), "oversized"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_refused_counted_and_shown(tmp_path: Path, kind: str) -> None:
    payload, reason = HOSTILE[kind]
    assembly = make_agent(tmp_path, **PICTURES)
    start = time.process_time()
    assert offer(assembly.agent, picture(1), payload) == ["kept", f"refused.{reason}"]
    assert time.process_time() - start < 5
    assert assembly.agent.counters[f"refused.{reason}"] == 1
    assert assembly.agent.intake.refused[-1].reason == reason
    assert offer(assembly.agent, picture(2)) == ["kept"]
    assembly.disk.close()


def test_a_comment_that_unpacks_to_megabytes_is_not_unpacked() -> None:
    decoder, before = PayloadDecoder("image", (3, 8, 8), 1 << 20), peak()
    with pytest.raises(PayloadError):
        decoder(text_bomb())
    assert peak() - before < 8000


def peak() -> int:
    """Kilobytes that this process has taken at most."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize(
    "payload",
    [
        lying_array(),
        array(np.array(["text"])),
        array(np.zeros((3, 3))),
        b"\x93NUMPY",
        array(0)[:-1],
    ],
)
def test_an_array_that_lies_or_does_not_fit_is_refused(payload: bytes) -> None:
    with pytest.raises(PayloadError):
        PayloadDecoder("npy", (4,), 1000)(payload)


def test_arrays_of_any_order_and_number_type() -> None:
    values = np.arange(6, dtype=">i2").reshape(2, 3)
    decoder = PayloadDecoder("npy", (2, 3), 6)
    np.testing.assert_array_equal(decoder(array(np.asfortranarray(values))), values)
    np.testing.assert_array_equal(decoder(array(values.ravel())), values)


def sound(frames: int, channels: int = 1) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(np.full(frames * channels, 16384, "<i2").tobytes())
    return buffer.getvalue()


def test_sound_is_cut_or_filled_up() -> None:
    pytest.importorskip("soundfile", reason="soundfile is not installed")
    decoder = PayloadDecoder("audio", (100,), 10_000)
    np.testing.assert_allclose(decoder(sound(150, 2)), 0.5)
    short = decoder(sound(40))
    np.testing.assert_allclose(short[:40], 0.5)
    assert not short[40:].any()
    assert PayloadDecoder("audio", (2, 10), 100)(sound(10, 2)).shape == (2, 10)
    for wrong in (b"RIFF", sound(10)[:20], picture(0)):
        with pytest.raises(PayloadError):
            decoder(wrong)


OWN = """
import numpy as np
def hexes(payload):
    if payload == b"loop":
        raise RecursionError
    return np.frombuffer(bytes.fromhex(payload.decode()), np.uint8)
"""


def test_a_decoder_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_decoder.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    samples = {"shape": [2], "labels": 3, "decoder": "own_decoder:hexes", "payload_bytes": 64}
    assembly = make_agent(tmp_path, samples=samples, policy={"name": "fifo"})
    fates = offer(assembly.agent, b"01ff", b"loop", b"010203", b"zz")
    assert fates == ["kept", "refused.payload", "refused.shape", "refused.payload"]
    assert assembly.agent.store.stored().batch.x.tolist() == [[1, 255]]
    (tmp_path / "own_decoder.py").write_text("def hexes(payload):\n    raise ValueError('other')\n")
    assembly.agent.decode = None
    assembly.agent.store._decode = lambda payload: (_ for _ in ()).throw(PayloadError("x", "gone"))
    with pytest.raises(RejectedError, match="the decoder no longer reads the stored sample p0"):
        assembly.agent.store.stored()
    assembly.disk.close()


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ({"decoder": "video"}, "no decoder 'video'"),
        ({"decoder": "image", "shape": [4, 8, 8]}, "1 or 3 channels"),
        ({"decoder": "image", "dtype": "uint8"}, "leave it out"),
        ({"decoder": "audio", "shape": [1, 2, 3]}, "shape of sound"),
        ({"payload_bytes": 1}, "payload_bytes must be"),
    ],
)
def test_a_wrong_decoder_is_said(tmp_path: Path, samples: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_agent(tmp_path, samples={**PICTURES["samples"], **samples})


@pytest.mark.parametrize("after", range(0, 14, 3))
def test_a_disk_that_fails_loses_no_file_that_was_acknowledged(tmp_path: Path, after: int) -> None:
    assembly = make_agent(tmp_path, **PICTURES)
    offer(assembly.agent, *(picture(i) for i in range(6)))
    failing(assembly, after, 3)
    fates: list[str] = []
    for i in range(20, 60):
        one = Arrival(picture(i), i % 3, f"q{i}", "camera", fates.append)
        assembly.agent.intake.offer(one, wait=True)
        assembly.agent.step(0.0)
    settle(assembly)
    assert len(fates) == 40
    found = files_of(assembly)
    assembly.disk.close()
    again = make_agent(tmp_path, **PICTURES)
    assert files_of(again) == found
    again.disk.close()


CAMERA = """
[samples]
shape = [3, 8, 8]
labels = 2
names = ["empty", "person"]
decoder = "image"
payload_bytes = 4096
[store]
path = "a.store"
budget = 400_000
commit_ms = 1
[agent]
socket = "a.sock"
[[source]]
"""


def write_camera(folder: Path, source: str) -> None:
    (folder / "agent.toml").write_text(CAMERA + source)


def test_a_folder_of_pictures_in_folders_by_label(tmp_path: Path) -> None:
    write_camera(tmp_path, 'kind = "folder"\npath = "in"\n')
    folder = tmp_path / "in"
    (folder / "person").mkdir(parents=True)
    (folder / "person" / "a.jpg").write_bytes(picture(1))
    (folder / "b.png").write_bytes(picture(2, kind="PNG"))
    (folder / "b.png.json").write_text('{"y": "empty", "id": "B", "time": 1790000000, "lux": 3}')
    (folder / "c.jpg").write_bytes(b"\xff\xd8\xff nothing \xff\xd9")
    (folder / "c.jpg.json").write_text('{"y": 0}')
    with running(tmp_path, "agent.toml"):
        deadline = time.monotonic() + 120
        while any(folder.rglob("?.*g")) and time.monotonic() < deadline:
            if {p.name for p in folder.rglob("?.*g")} == {"c.jpg"}:
                break
            time.sleep(0.05)
    assert (folder / "refused" / "c.jpg").exists()
    assert [file.name for file in folder.rglob("*.json")] == ["c.jpg.json", "c.jpg.report.json"]
    said = said_by("show", str(tmp_path / "a.store"))
    assert "label empty: 1, label person: 1" in said
    said_by("export", str(tmp_path / "a.store"), str(tmp_path / "out"))
    assert (tmp_path / "out" / "person" / "a.jpg").read_bytes() == picture(1)
    assert (tmp_path / "out" / "empty" / "B.png").read_bytes() == picture(2, kind="PNG")
    assert (tmp_path / "out" / "person" / "a.jpg").stat().st_mode & 0o777 == 0o600


def test_files_in_json_are_base64(tmp_path: Path) -> None:
    write_camera(
        tmp_path,
        'kind = "lines"\npath = "in.jsonl"\n'
        'fields = { x = "image.data", y = "state", id = "seq", time = "ts" }\n',
    )
    rows = [
        {"image": {"data": base64.b64encode(picture(i)).decode(), "w": 16}, "state": "person"}
        | {"seq": i, "ts": 1_790_000_000_000 + i}
        for i in range(5)
    ]
    rows += [{"image": {"data": "no base64!"}, "state": "person", "seq": 9}]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    code, said = outcome(tmp_path, "agent.toml", "--until-sources-end")
    assert code == 0, said
    assert "6 arrived, 5 kept, refused 1 shape" in said
    said_by("export", str(tmp_path / "a.store"), str(tmp_path / "out.npz"))
    with np.load(tmp_path / "out.npz") as found:
        ends = found["ends"].tolist()
        joined = found["payloads"].tobytes()
        files = [joined[a:b] for a, b in zip([0, *ends], ends, strict=False)]
        assert found["own_times"].min() == pytest.approx(1.79e9)
        assert set(found["labels"].tolist()) == {"person"}
    assert sorted(files) == sorted(picture(i) for i in range(5))


def post(
    port: int, body: bytes, query: str = "", kind: str = "image/jpeg", **headers: str
) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    sent = {"Content-Type": kind, **{k.replace("_", "-"): v for k, v in headers.items()}}
    with closing(connection):
        connection.request("POST", f"/?{query}", body, sent)
        with connection.getresponse() as answer:
            return answer.status, json.loads(answer.read())["fate"]


def test_http_answers_with_the_fate_once_it_is_on_the_disk(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "token").write_text("s3cret\n")
    write_camera(tmp_path, f'kind = "http"\nport = {port}\ntoken_file = "token"\n')
    key = {"Authorization": "Bearer s3cret"}
    with running(tmp_path, "agent.toml") as process:
        assert post(port, picture(0), "y=person&id=a&lux=3.5", **key) == (200, "kept")
        assert post(port, picture(0), "y=person&id=a", **key) == (200, "refreshed")
        assert post(port, picture(1), "y=dog", **key) == (422, "refused.label")
        assert post(port, b"?", "y=0", **key) == (422, "refused.payload")
        assert post(port, picture(0), "y=0") == (401, "refused.token")
        assert post(port, bytes(100_000), "y=0", **key) == (413, "refused.oversized")
        assert post(port, b"[1]", kind="application/json", **key) == (400, "refused.malformed")
        encoded = base64.b64encode(picture(2)).decode()
        body = json.dumps({"x": encoded, "y": "empty", "id": "b"}).encode()
        assert post(port, body, kind="application/json", **key) == (200, "kept")
        process.send_signal(signal.SIGKILL)
        process.wait()
    with running(tmp_path, "agent.toml"), AgentClient(str(tmp_path / "a.sock")) as client:
        assert [(row.name, row.count) for row in client.stored().labels] == [
            ("empty", 1),
            ("person", 1),
        ]


def test_a_kill_amid_posts_loses_nothing_that_was_answered(tmp_path: Path) -> None:
    port = free_port()
    roomy = CAMERA.replace("400_000", "4_000_000")  # nothing makes way for what comes after it
    source = f'kind = "http"\nport = {port}\noverload = "wait"\n'
    (tmp_path / "agent.toml").write_text(roomy + source)
    kept: dict[str, bytes] = {}

    def send(sender: int) -> None:
        for number in range(200):
            name, payload = f"{sender}-{number}", picture(1000 * sender + number)
            try:
                status, fate = post(port, payload, f"y=person&id={name}")
            except (OSError, http.client.HTTPException, ValueError):
                return
            if (status, fate) == (200, "kept"):
                kept[name] = payload

    with running(tmp_path, "agent.toml") as process:
        senders = [threading.Thread(target=send, args=(n,)) for n in range(3)]
        for sender in senders:
            sender.start()
        deadline = time.monotonic() + 120
        while len(kept) < 20 and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        for sender in senders:
            sender.join()
    answered = dict(kept)
    assert len(answered) >= 20
    assert (tmp_path / "a.store").stat().st_size <= 4_000_000
    said_by("export", str(tmp_path / "a.store"), str(tmp_path / "out"))
    found = {file.stem: file.read_bytes() for file in (tmp_path / "out").rglob("*.jpg")}
    assert answered.items() <= found.items()


@pytest.mark.parametrize(
    ("raw", "whole"),
    [(picture(0), True), (picture(0)[:-9], False), (picture(0, kind="PNG")[:-20], False)],
)
def test_a_file_that_has_not_come_to_its_end_is_seen(raw: bytes, whole: bool) -> None:
    assert looks_whole(raw) is whole


def test_records_name_their_fields_in_bounded_number() -> None:
    names = FieldNames({"x": "a.0.v", "y": "k"})
    record = names.take({"a": [{"v": [1]}], "k": 1, "b": {"c": {"d": True}}, "n": None, "l": [1]})
    assert record is not None
    assert (record.x, record.y, record.fields) == ([1], 1, {"b.c.d": True})
    many = names.take({"a": [{"v": [1]}], "k": 1, **{f"f{i}": "v" * i * 10 for i in range(99)}})
    assert many is not None
    assert len(many.fields) == 26
    assert names.take({"a": {"0": {"v": [1]}}, "k": 1}) is not None
    assert names.take({"a": [], "k": 1}) is None
    for wrong in ({"z": "q"}, {"x": ""}, {"x": "y"}):
        with pytest.raises(ValueError, match="fields"):
            FieldNames(wrong)


def test_own_times_make_older_and_never_younger_and_wrong_clocks_nothing(tmp_path: Path) -> None:
    table = {**PICTURES, "store": {"budget": 300_000, "ttl_days": 3, "clock_tolerance_hours": 0}}
    assembly = make_agent(tmp_path, **table)
    agent, now = assembly.agent, time.time()
    days = {"fresh": 0.0, "old": 4.0, "of 1970": now / 86_400 - 1, "ahead": -400.0}
    for number, (name, behind) in enumerate(days.items()):
        one = Arrival(picture(number), 1, name, "camera", time=now - behind * 86_400)
        agent.intake.offer(one, wait=True)
    while agent.step(0.0):
        pass
    assert agent.commit()
    assert agent.counters["time.doubted"] == 2
    agent.remove_expired()
    assert {note.name for note in agent.store.records.values()} == {"fresh", "of 1970", "ahead"}
    assembly.disk.close()


def test_files_wait_for_their_labels_as_numbers_do(tmp_path: Path) -> None:
    table = {**PICTURES, "waiting": {"share": 0.5}, "store": {"budget": 800_000}}
    assembly = make_agent(tmp_path, **table)
    fates = offer(assembly.agent, *(picture(i) for i in range(6)), label=None)
    assert fates == ["waiting"] * 6
    waiting = {n.name: n.id for n in assembly.agent.store.unlabelled.values()}
    assembly.disk.close()
    again = make_agent(tmp_path, **table)
    fates = []
    for name in list(waiting)[:4]:
        label = Arrival(None, 2, name, "camera", fates.append, label_only=True)
        again.agent.intake.offer(label, wait=True)
    while again.agent.step(0.0):
        pass
    assert again.agent.commit()
    assert fates == ["kept"] * 4
    store = again.agent.store
    assert len(store.unlabelled) == 2
    assert sorted(files_of(again).values()) == sorted(picture(i) for i in range(4))
    correction = Arrival(None, 0, next(iter(waiting)), "camera", fates.append, label_only=True)
    again.agent.intake.offer(correction, wait=True)
    again.agent.step(0.0)
    assert again.agent.commit()
    assert store._used_cells == sum(map(store._cells, store._files.values()))
    found = files_of(again)
    again.disk.close()
    last = make_agent(tmp_path, **table)
    assert files_of(last) == found
    assert sorted(n.label for n in last.agent.store.records.values()) == [0, 2, 2, 2]
    last.disk.close()


def make_certificate(folder: Path) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-keyout", "key.pem", "-out", "cert.pem", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_http_by_tls_and_senders_that_say_nothing_cost_no_other(tmp_path: Path) -> None:
    make_certificate(tmp_path)
    port = free_port()
    write_camera(
        tmp_path,
        f'kind = "http"\nport = {port}\ncert_file = "cert.pem"\nkey_file = "key.pem"\n'
        "connections = 4\nseconds = 2\n",
    )
    context = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
    with running(tmp_path, "agent.toml"), ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(6)
        ]
        for number in range(3):
            connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=60, context=context)
            connection.request("POST", f"/?y=person&id={number}", picture(number))
            answer = connection.getresponse()
            assert (answer.status, json.loads(answer.read())) == (200, {"fate": "kept"})
            connection.close()
        with pytest.raises((OSError, http.client.HTTPException)):
            post(port, picture(9), "y=person&id=9")
        assert len(silent) == 6


def test_a_body_that_never_ends_and_requests_that_are_none(tmp_path: Path) -> None:
    port = free_port()
    write_camera(tmp_path, f'kind = "http"\nport = {port}\nseconds = 1\n')
    broken = {
        b"POST / HTTP/1.1\r\nContent-Length: 50\r\n\r\nabc": b" 408 ",
        b"POST / HTTP/1.1\r\n\r\n": b" 411 ",
        b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n": b" 411 ",
        b"POST / HTTP/1.1\r\nContent-Length: 9" + b"9" * 30 + b"\r\n\r\n": b" 413 ",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n": b" 411 ",
        b"GET / HTTP/1.1\r\n\r\n": b" 501 ",
        b"\x16\x03\x01 hello\r\n\r\n": b" 400 ",
    }
    with running(tmp_path, "agent.toml"):
        for request, status in broken.items():
            with socket.create_connection(("127.0.0.1", port), timeout=60) as sender:
                sender.sendall(request)
                assert status in sender.recv(1 << 16).split(b"\r\n")[0] + b" ", request
        assert post(port, picture(1), "y=person")[1] == "kept"
        assert post(port, b"", "y=person") == (422, "refused.payload")
        assert post(port, picture(2), "y=person&time=yesterday&" + "a=1&" * 200)[0] == 400


def test_beyond_the_loopback_http_needs_a_token_and_tls_or_a_word(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    token = str(tmp_path / "token")
    for options, words in (({}, "insecure"), ({"token_file": token}, "the token goes unencrypted")):
        source = make_source({"kind": "http", "host": "0.0.0.0", "port": free_port(), **options}, 0)
        with pytest.raises(FedkeepError, match=words):
            source.open()
    with pytest.raises(ConfigError, match="key_file needs the cert_file"):
        make_source({"kind": "http", "key_file": "k"}, 0)


@pytest.mark.skipif(
    not (shutil.which("mosquitto") and shutil.which("mosquitto_pub")),
    reason="mosquitto and its clients are not installed",
)
def test_raw_messages_are_files_with_user_properties(broker: int, tmp_path: Path) -> None:
    write_camera(
        tmp_path,
        f'kind = "mqtt"\nformat = "raw"\ntopic = "cam"\nport = {broker}\noverload = "wait"\n',
    )
    (tmp_path / "p.jpg").write_bytes(picture(3))
    with running(tmp_path, "agent.toml"), AgentClient(str(tmp_path / "a.sock")) as client:
        said = ["-D", "publish", "user-property"]
        command = ["mosquitto_pub", "-V", "5", "-q", "1", "-p", str(broker), "-t", "cam"]
        command += ["-f", "p.jpg", *said, "y", "person", *said, "id", "a", *said, "lux", "3"]
        deadline = time.monotonic() + 120
        while not client.status().samples and time.monotonic() < deadline:
            subprocess.run(command, cwd=tmp_path, check=True)
            time.sleep(0.2)
        [part] = client.pull_samples()
    assert (part.samples[0].name, part.samples[0].data) == ("a", picture(3))


def test_an_encrypted_store_of_files_is_rekeyed_resized_and_shows_nothing(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("ab" * 32)
    (tmp_path / "key").chmod(0o600)
    (tmp_path / "new").write_text("cd" * 32)
    (tmp_path / "new").chmod(0o600)
    keyed = {**PICTURES, "store": {"budget": 400_000, "key_file": str(tmp_path / "key")}}
    assembly = make_agent(tmp_path, **keyed)
    offer(assembly.agent, *(picture(i) for i in range(5)))
    found = files_of(assembly)
    assembly.disk.close()
    raw = (tmp_path / "a.store").read_bytes()
    assert not any(picture(i)[-120:-60] in raw for i in range(5))
    store = str(tmp_path / "a.store")
    said_by("rekey", store, "--key-file", tmp_path / "key", "--new-key-file", tmp_path / "new")
    larger = {**PICTURES, "store": {"budget": 700_000, "key_file": str(tmp_path / "new")}}
    again = make_agent(tmp_path, **larger)
    assert files_of(again) == found
    again.disk.close()
    assert "5 files" in said_by("check", store, "--key-file", tmp_path / "new")


def test_an_erased_file_is_gone_from_the_disk_and_is_refused(tmp_path: Path) -> None:
    assembly = make_agent(tmp_path, **PICTURES)
    agent = assembly.agent
    offer(agent, picture(1), picture(2))
    id_ = next(
        n.id for n in agent.store.records.values() if agent.store.payload(n.id) == picture(1)
    )
    assert agent.erase([id_]) == 1
    raw = (tmp_path / "a.store").read_bytes()
    assert picture(1)[-120:-60] not in raw
    assert picture(2)[-120:-60] in raw
    assert offer(agent, picture(1)) == ["refused.erased"]
    assert agent.store._used_cells == sum(map(agent.store._cells, agent.store._files.values()))
    assembly.disk.close()
