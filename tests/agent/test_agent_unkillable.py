"""Faults that once ended the agent, or cost it samples; with a real process where it takes one."""

import errno
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
import zipfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fedkeep.agent.arrivals import OutlierFilter
from fedkeep.agent.assembly import check_model
from fedkeep.agent.cellfile import StoreError
from fedkeep.agent.connections import listen_unix
from fedkeep.agent.sources.folder import FolderSource, read_npz
from fedkeep.core.errors import ConfigError, DataError, FedkeepError, RejectedError
from fedkeep.core.types import Batch
from fedkeep.protocol.client import AgentClient
from fedkeep.protocol.framing import receive_frame, send_frame
from tests.agent.builders import LABELS, arrival, feed, make_agent, order
from tests.agent.test_agent_process import (
    ENVIRONMENT,
    lines,
    outcome,
    running,
    wait_until_ready,
    write_config,
)
from tests.faults.hostile import SOUND, write_csv, write_lines


def test_a_foreign_file_as_a_store_is_refused_for_good_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "a.store").write_bytes(b"somebody's data " * 300_000)
    write_config(tmp_path)
    code, said = outcome(tmp_path, "agent.toml")
    assert (code, "is not a store of fedkeep: left untouched" in said) == (2, True)
    assert (tmp_path / "a.store").read_bytes() == b"somebody's data " * 300_000
    assert not list(tmp_path.glob("a.store?*"))


def test_a_full_store_survives_a_higher_budget_whole_and_refuses_a_lower_one(
    tmp_path: Path,
) -> None:
    assembly = make_agent(tmp_path)
    feed(assembly.agent, 0, 3 * assembly.agent.device.capacity)
    held = sorted(assembly.agent.store.stored().batch.ids.tolist())
    assert len(held) == assembly.agent.device.capacity
    assembly.disk.close()
    for budget in (112_000, 150_000, 110_000):
        again = make_agent(tmp_path, store={"budget": budget})
        assert sorted(again.agent.store.stored().batch.ids.tolist()) == held
        again.disk.close()
    with pytest.raises(ConfigError, match=f"holds {len(held)} samples .* set it to "):
        make_agent(tmp_path, store={"budget": 80_000})


@pytest.mark.parametrize("policy", ["ode", "balanced-reservoir"])
def test_another_budget_divides_its_own_slots(
    tmp_path: Path, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A plan for the budget before would leave slots empty, or write more than the file holds."""
    tables: dict[str, Any] = {"policy": {"name": policy}}
    assembly = make_agent(tmp_path, **tables, store={"budget": 200_000})
    feed(assembly.agent, 0, 30)
    assembly.agent.participate(order(assembly, quota=assembly.agent.device.capacity // LABELS))
    assembly.disk.close()
    for first, budget in ((100, 110_000), (5000, 150_000)):
        assembly = make_agent(tmp_path, **tables, store={"budget": budget})
        feed(assembly.agent, first, 4 * assembly.agent.device.capacity)
        assert len(assembly.agent.store) == assembly.agent.device.capacity
        assembly.disk.close()
    assert "it counts no more" in caplog.text


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_hostile_lines_do_not_end_the_process(tmp_path: Path, kind: str) -> None:
    (write_lines if kind == "jsonl" else write_csv)(tmp_path / f"in.{kind}", 2000)
    write_config(tmp_path, f'[[source]]\nkind = "lines"\npath = "in.{kind}"\n')
    code, said = outcome(tmp_path, "agent.toml", "--until-sources-end")
    assert code == 0
    assert "Traceback" not in said
    assert "malformed" in said.splitlines()[-1]
    with running(tmp_path, "agent.toml"), AgentClient(str(tmp_path / "a.sock")) as client:
        assert all(client.why(str(10**9 + i)).stored for i in range(SOUND))


def test_a_csv_as_documented_is_read_and_the_end_says_what_came_of_it(tmp_path: Path) -> None:
    rows = [f"{','.join(['0.5'] * 6)},{i % 3},s{i}" for i in range(9)]
    (tmp_path / "flows.csv").write_text("\n".join(["a,b,c,d,e,f,y,id", *rows, "1,2,3", ""]))
    write_config(tmp_path, '[[source]]\nkind = "lines"\npath = "flows.csv"\n')
    code, said = outcome(tmp_path, "agent.toml", "--until-sources-end")
    assert code == 0
    assert "room for" in said
    assert "reading lines" in said
    assert "no server has called yet" in said
    assert "10 arrived, 9 kept, refused 1 malformed, 9 of" in said.splitlines()[-1]


def test_a_damaged_archive_is_set_aside_once_and_for_all(tmp_path: Path) -> None:
    inbox = tmp_path / "in"
    inbox.mkdir()
    np.savez_compressed(inbox / "a.npz", x=np.ones((4, 6)), y=np.zeros(4))
    image = bytearray((inbox / "a.npz").read_bytes())
    image[60:90] = bytes(30)
    (inbox / "a.npz").write_bytes(image)
    (inbox / "b.npz").mkdir()
    write_config(tmp_path, '[[source]]\nkind = "folder"\npath = "in"\n')
    for _ in range(2):
        with running(tmp_path, "agent.toml"), AgentClient(str(tmp_path / "a.sock")) as client:
            deadline = time.monotonic() + 120
            while not (inbox / "refused" / "a.npz").exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            assert client.status().samples == 0
    assert (inbox / "refused" / "a.npz").read_bytes() == bytes(image)


def test_an_archive_that_unpacks_to_too_much_is_refused_unread(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", bytes(80_000_000))
    source = FolderSource("f", str(tmp_path))
    source.open()
    refused: list[str] = []
    sink: Any = type(
        "Sink", (), {"refuse": lambda _, reason, *__: refused.append(reason), "stopped": False}
    )()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    source._take(tmp_path / "bomb.npz", sink)
    assert refused == ["oversized"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40_000
    assert (tmp_path / "refused" / "bomb.npz").exists()


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_an_archive_that_lies_about_what_it_unpacks_to_is_refused_unread(
    tmp_path: Path, method: int
) -> None:
    with zipfile.ZipFile(tmp_path / "liar.npz", "w", method) as archive:
        archive.writestr("x.npy", bytes(80_000_000))
    image = (tmp_path / "liar.npz").read_bytes()
    (tmp_path / "liar.npz").write_bytes(
        image.replace(struct.pack("<I", 80_000_000), struct.pack("<I", 8_000_000))
    )
    with pytest.raises(DataError, match="does not bound"):
        read_npz(tmp_path / "liar.npz", 64_000_000)


def test_an_archive_with_a_long_table_of_contents_is_refused_unread(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "many.npz", "w") as archive:
        for number in range(65):
            archive.writestr(str(number), b"")
    with pytest.raises(RejectedError, match="more than 64 arrays"):
        read_npz(tmp_path / "many.npz", 64_000_000)


def test_what_is_no_file_in_a_folder_is_set_aside(tmp_path: Path) -> None:
    inbox = tmp_path / "in"
    inbox.mkdir()
    os.mkfifo(inbox / "a.npz")
    (inbox / "b.npz").symlink_to("/dev/zero")
    np.savez(inbox / "c.npz", x=np.empty((9, 0)), y=np.zeros(9))
    np.savez(inbox / "d.npz", x=np.ones((1, 6)), y=np.zeros(1))
    write_config(tmp_path, '[[source]]\nkind = "folder"\npath = "in"\n')
    with running(tmp_path, "agent.toml"):
        deadline = time.monotonic() + 120
        while list(inbox.glob("*.npz")) and time.monotonic() < deadline:
            time.sleep(0.02)
    assert sorted(file.name for file in (inbox / "refused").glob("*.npz")) == [
        "a.npz",
        "b.npz",
        "c.npz",
    ]


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (b'garbage\n{"x": [1, 2, 3, 4, 5, 6], "y": 1}\n', "2 arrived, 1 kept, refused 1 malformed"),
        (b"garbage\na,b,c,d,e,f,y\n1,2,3,4,5,6,1\n", "2 arrived, 1 kept, refused 1 malformed"),
        (b'\xef\xbb\xbf{"x": [1, 2, 3, 4, 5, 6], "y": 1}\n', "1 arrived, 1 kept"),
        (b"\xef\xbb\xbfy,a,b,c,d,e,f\n1,1,2,3,4,5,6\n", "1 arrived, 1 kept"),
        (b"", "0 arrived, 0 kept"),
    ],
)
def test_however_a_stream_begins_its_samples_are_read(
    tmp_path: Path, stream: bytes, said: str
) -> None:
    write_config(tmp_path, '[[source]]\nkind = "lines"\n')
    command = [sys.executable, "-m", "fedkeep.agent", "agent.toml", "--until-sources-end"]
    done = subprocess.run(
        command, cwd=tmp_path, env=ENVIRONMENT, input=stream, capture_output=True, check=True
    )
    assert said in done.stderr.decode().splitlines()[-1]


def test_a_stream_without_any_sample_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("a,b,c,d,e,f,class\n1,2,3,4,5,6,1\n")
    write_config(tmp_path, '[[source]]\nkind = "lines"\npath = "in.txt"\n')
    code, said = outcome(tmp_path, "agent.toml", "--until-sources-end")
    assert (
        code,
        "no line is JSON or a CSV header with the column 'y'" in said.splitlines()[-1],
    ) == (1, True)


def test_a_pipe_without_a_writer_holds_up_neither_start_nor_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    write_config(tmp_path, '[[source]]\nkind = "lines"\npath = "pipe"\n')
    with running(tmp_path, "agent.toml"):
        pass
    with running(tmp_path, "agent.toml"), (tmp_path / "pipe").open("w") as pipe:
        pipe.write(lines(5))
        pipe.flush()
        with AgentClient(str(tmp_path / "a.sock")) as client:
            deadline = time.monotonic() + 120
            while client.status().samples < 5 and time.monotonic() < deadline:
                time.sleep(0.02)
            assert client.status().samples == 5


def test_a_store_that_is_no_file_is_left_as_it_is(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.store")
    write_config(tmp_path)
    code, said = outcome(tmp_path, "agent.toml")
    assert (code, "is not a file: left untouched" in said) == (2, True)
    assert (tmp_path / "a.store").is_fifo()


def test_a_store_behind_a_link_stays_there(tmp_path: Path) -> None:
    (tmp_path / "flash").mkdir()
    (tmp_path / "a.store").symlink_to("flash/real")
    for budget in (100_000, 200_000):
        make_agent(tmp_path, store={"budget": budget}).disk.close()
        assert (tmp_path / "a.store").is_symlink()
        assert [file.name for file in (tmp_path / "flash").iterdir()] == ["real"]


def test_what_a_killed_move_left_is_removed_and_a_failing_disk_is_not_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_agent(tmp_path).disk.close()
    (tmp_path / "a.store.new").write_bytes(bytes(5000))
    make_agent(tmp_path).disk.close()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StoreError, match=r"no room for the \d+ bytes"):
        make_agent(tmp_path, store={"budget": 200_000})
    assert [file.name for file in tmp_path.iterdir()] == ["a.store"]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"samples": {"shape": [10**20]}}, "shape must make at most"),
        ({"samples": {"labels": 10**20}}, "labels must be between"),
        ({"store": {"budget": 10**17}}, "no room for the 100000000000000000 bytes"),
    ],
)
def test_numbers_beyond_any_device_are_refused_by_name(
    tmp_path: Path, table: dict[str, Any], said: str
) -> None:
    with pytest.raises(FedkeepError, match=said):
        make_agent(tmp_path, **table)
    assert not list(tmp_path.iterdir())


def test_the_path_of_a_socket_may_be_too_long(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at most 107 bytes"):
        listen_unix(tmp_path / ("a" * 150))


def test_idle_connections_beyond_the_descriptors_harm_neither_stream_nor_api(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    tables = (
        f'[[source]]\nkind = "socket"\naddress = "unix://{tmp_path}/in.sock"\noverload = "wait"\n'
    )
    write_config(tmp_path, f"{tables}[metrics]\nport = {port}\n")
    limited = f'ulimit -n 128; exec "{sys.executable}" -m fedkeep.agent agent.toml'
    process = subprocess.Popen(
        ["sh", "-c", limited], cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.DEVNULL
    )
    idle = []
    try:
        wait_until_ready(tmp_path, process)  # type: ignore[arg-type]
        for path in ("in.sock", "a.sock"):
            for _ in range(200):
                one = socket.socket(socket.AF_UNIX)
                one.connect(str(tmp_path / path))
                idle.append(one)
        idle += [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            assert b"fedkeep_capacity" in answer.read()
        with socket.socket(socket.AF_UNIX) as sender:
            sender.connect(str(tmp_path / "in.sock"))
            sender.settimeout(60.0)
            x = np.ones(6, "<f4").tobytes()
            send_frame(sender, msgspec.msgpack.encode({"x": x, "y": 1, "id": 5}))
            assert msgspec.msgpack.decode(receive_frame(sender) or b"")["fate"] == "kept"
        wait_until_ready(tmp_path, process)  # type: ignore[arg-type]
        with AgentClient(str(tmp_path / "a.sock"), timeout=60) as client:
            assert client.status().samples == 1
        assert process.poll() is None
    finally:
        for one in idle:
            one.close()
        process.terminate()
        assert process.wait(120) == 0


def test_senders_that_read_no_answers_hold_up_neither_another_nor_the_api(tmp_path: Path) -> None:
    write_config(tmp_path, f'[[source]]\nkind = "socket"\naddress = "unix://{tmp_path}/in.sock"\n')

    def records(first: int, count: int) -> bytes:
        coded = [
            msgspec.msgpack.encode({"x": [id_] * 6, "y": 1, "id": id_})
            for id_ in range(first, first + count)
        ]
        return b"".join(struct.pack(">I", len(one)) + one for one in coded)

    def flood(sender: socket.socket, first: int) -> None:
        with suppress(OSError):  # it is cut off
            sender.sendall(records(first, 20_000))

    with running(tmp_path, "agent.toml"), ExitStack() as stack:
        senders = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(5)]
        for sender in senders:
            sender.connect(str(tmp_path / "in.sock"))
        *deaf, sound = senders
        floods = [
            threading.Thread(target=flood, args=(one, 10**6 * number))
            for number, one in enumerate(deaf)
        ]
        for thread in floods:
            thread.start()
        waits = []
        for id_ in range(20):
            start = time.monotonic()
            sound.sendall(records(10**8 + id_, 1))
            assert receive_frame(sound) is not None
            waits.append(time.monotonic() - start)
        with AgentClient(str(tmp_path / "a.sock"), timeout=60) as client:
            assert client.status().samples > 0
        for thread in floods:
            thread.join(30)
            assert not thread.is_alive()
    assert max(waits) < 2, "once it was every one of them"


def test_a_file_system_without_room_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    write_config(tmp_path)
    limited = f'ulimit -f 100; exec "{sys.executable}" -m fedkeep.agent agent.toml'
    done = subprocess.run(
        ["bash", "-c", limited],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "no room for the 196608 bytes" in done.stderr) == (1, True)
    assert [file.name for file in tmp_path.iterdir()] == ["agent.toml"]


def test_more_labels_keep_the_samples_and_fewer_are_refused_with_the_remedy(tmp_path: Path) -> None:
    assembly = make_agent(tmp_path)
    feed(assembly.agent, 0, 30)
    assembly.agent.participate(order(assembly))
    held = sorted(assembly.agent.store.stored().batch.ids.tolist())
    assembly.disk.close()
    with pytest.raises(
        ConfigError,
        match=r"label 2, but \[samples\] labels is 2: set it to 3 or more, or .* --label 2",
    ):
        make_agent(tmp_path, samples={"labels": 2})
    again = make_agent(tmp_path, samples={"labels": 5})
    assert sorted(again.agent.store.stored().batch.ids.tolist()) == held
    assert again.agent.device.model is None
    feed(again.agent, 1000, 9)
    again.disk.close()


def test_another_model_keeps_the_samples_and_learns_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assembly = make_agent(tmp_path, store={"budget": 200_000})
    feed(assembly.agent, 0, 30)
    assembly.agent.participate(order(assembly))
    held = sorted(assembly.agent.store.stored().batch.ids.tolist())
    assembly.disk.close()
    other = {"model": {"name": "mlp", "hidden": [4]}, "store": {"budget": 200_000}}
    again = make_agent(tmp_path, **other)
    assert "[model] is another than before" in caplog.text
    assert sorted(again.agent.store.stored().batch.ids.tolist()) == held
    assert again.agent.device.model is None
    again.agent.participate(order(again, 1))
    again.disk.close()


def test_another_policy_keeps_the_samples(tmp_path: Path) -> None:
    assembly = make_agent(tmp_path)
    feed(assembly.agent, 0, 30)
    assembly.agent.participate(order(assembly))
    held = sorted(assembly.agent.store.stored().batch.ids.tolist())
    assembly.disk.close()
    for name in ("fifo", "balanced-reservoir", "high-loss", "ode"):
        again = make_agent(tmp_path, policy={"name": name}, store={"budget": 110_000})
        assert set(held) <= set(again.agent.store.stored().batch.ids.tolist()), name
        feed(again.agent, 1000, 3)
        again.disk.close()


def test_a_model_that_does_not_fit_its_samples_is_said_before_anything_is_written(
    tmp_path: Path,
) -> None:
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from fedkeep.learn.export import export

    export(
        lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6, 3)),
        (6,),
        None,
        tmp_path / "m.onnx",
    )
    model = {"path": str(tmp_path / "m.onnx")}
    with pytest.raises(ConfigError, match=r"does not take samples of \[samples\] shape = \[7\]"):
        make_agent(tmp_path, model=model, samples={"shape": [7]})
    with pytest.raises(ConfigError, match=r"has 3 outputs, but \[samples\] labels = 5"):
        make_agent(tmp_path, model=model, samples={"labels": 5})
    assert not (tmp_path / "a.store").exists()
    assembly = make_agent(tmp_path, model=model)
    feed(assembly.agent, 0, 9)
    assembly.disk.close()


def test_whole_numbers_reach_a_torch_model_as_floats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    source = "import torch\ndef make():\n    return torch.nn.Sequential(torch.nn.Linear(6, 3))\n"
    (tmp_path / "own_model.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    tables: dict[str, Any] = {"model": {"name": "own_model:make"}, "samples": {"dtype": "uint8"}}
    for round_ in range(2):
        assembly = make_agent(tmp_path, **tables)
        for id_ in range(20):
            one = arrival(20 * round_ + id_)
            one.x = np.arange(6, dtype=np.uint8) + id_
            assembly.agent.intake.offer(one, wait=True)
        while assembly.agent.step(0.0):
            pass
        assert assembly.agent.participate(order(assembly, round_)).samples > 0
        assembly.disk.close()


def test_a_silent_stream_declares_a_falling_rate(tmp_path: Path) -> None:
    assembly = make_agent(tmp_path)
    agent, now = assembly.agent, [0.0]
    agent.store.clock._boot = lambda: now[0]
    agent.store.clock._start = 0.0
    feed(agent, 0, 30)
    first = agent.profile().rate
    now[0] = 600.0
    later = agent.profile().rate
    now[0] = 5 * 3600.0
    assert first > 10 * later > 0
    assert agent.profile().rate == 0
    assembly.disk.close()


def test_one_huge_sample_is_refused_and_shown(tmp_path: Path) -> None:
    assembly = make_agent(tmp_path)
    one = arrival(1)
    one.x = np.full(6, 1e30, np.float32)
    assembly.agent.intake.offer(one, wait=True)
    assembly.agent.step(0.0)
    assert assembly.agent.counters.counts()["refused.huge"] == 1
    assert "1.e+30" in assembly.agent.intake.refused[-1].raw
    assembly.disk.close()


def test_alone_slots_of_labels_that_have_not_come_are_lent_and_given_back(tmp_path: Path) -> None:
    alone: dict[str, Any] = {"policy": {"name": "balanced-reservoir"}, "store": {"budget": 130_000}}
    assembly = make_agent(tmp_path, **alone)
    agent, capacity = assembly.agent, assembly.agent.device.capacity
    for id_ in range(3 * capacity):
        agent.intake.offer(arrival(id_, label=0), wait=True)
        if len(agent.intake) >= 8:
            agent.step(0.0)
    while agent.step(0.0):
        pass
    assert len(agent.store) == capacity
    agent.commit(whole=False)
    assembly.disk.close()
    again = make_agent(tmp_path, **alone)
    assert len(again.agent.store) == capacity
    for id_ in range(10_000, 10_000 + capacity):
        again.agent.intake.offer(arrival(id_, label=1), wait=True)
        if len(again.agent.intake) >= 8:
            again.agent.step(0.0)
    while again.agent.step(0.0):
        pass
    again.agent.commit()
    labels = np.bincount(again.agent.store.stored().batch.y, minlength=3)
    assert labels.sum() == capacity
    assert labels[1] > 0.2 * capacity
    again.disk.close()


def test_alone_with_a_model_values_are_against_the_mean_of_what_came(tmp_path: Path) -> None:
    assembly = make_agent(
        tmp_path, policy={"name": "ode", "choice": "greatest", "value": "projection"}
    )
    agent, learner = assembly.agent, assembly.agent.device.learner
    model = learner.initial(0)
    agent.device.set_model(model)  # as from [model] path
    feed(agent, 0, 248)
    assert agent.device.global_gradient is None
    feed(agent, 248, 20)
    came = [arrival(id_) for id_ in range(256)]
    batch = Batch(
        np.stack([one.x for one in came]), np.array([one.y for one in came]), np.arange(256)
    )
    mean = learner.probe(model).measure(batch).mean_gradient()
    direction = agent.device.global_gradient
    assert direction is not None
    np.testing.assert_allclose(direction, mean, rtol=1e-4, atol=1e-6)
    stored = agent.store.stored()
    np.testing.assert_allclose(
        stored.scores,
        learner.probe(model).measure(stored.batch).projections(mean),
        rtol=1e-3,
        atol=1e-5,
    )
    assert agent.erase([int(stored.batch.ids[0])]) == 1
    assert agent.device.global_gradient is None
    assembly.disk.close()


def test_samples_far_beyond_the_usual_are_refused_until_they_are_the_usual() -> None:
    first = np.vstack([np.full((20, 3), 2.0), np.full((1, 3), 3e5)])
    assert np.flatnonzero(OutlierFilter(1e6, 100.0).huge(first)).tolist() == [20]
    magnitudes = OutlierFilter(1e6, 100.0)
    assert not magnitudes.huge(np.full((20, 3), 2.0)).any()
    assert magnitudes.huge(np.array([[1.0, -250.0, 0.0], [150.0, 0.0, 0.0]])).tolist() == [
        True,
        False,
    ]
    for _ in range(3):
        last = magnitudes.huge(np.full((32, 3), 500.0))
    assert not last.any()
    assert magnitudes.huge(np.array([[2e6, 0, 0]])).all()


def test_a_kill_between_two_commits_of_statistics_costs_no_sample(tmp_path: Path) -> None:
    assembly = make_agent(tmp_path)
    agent = assembly.agent
    feed(agent, 0, 3)
    for id_ in range(100, 130):
        agent.intake.offer(arrival(id_), wait=True)
    while agent.step(0.0):
        pass
    assert agent.commit(whole=False)
    held = sorted(agent.store.stored().batch.ids.tolist())
    assembly.disk.close()  # nothing else: as after a kill
    again = make_agent(tmp_path)
    assert sorted(again.agent.store.stored().batch.ids.tolist()) == held
    assert [d.verdict for d in again.agent.store.log.about(129)] == ["kept"]
    assert again.agent.counters.counts()["kept"] == 33
    feed(again.agent, 200, 30)
    assert set(held) <= set(again.agent.store.stored().batch.ids.tolist())
    again.disk.close()


def test_it_tells_systemd_that_it_is_ready_and_alive(tmp_path: Path) -> None:
    write_config(tmp_path, '[[source]]\nkind = "lines"\npath = "in.jsonl"\n')
    (tmp_path / "in.jsonl").write_text(lines(5))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(60.0)
        environment = {
            **ENVIRONMENT,
            "NOTIFY_SOCKET": str(tmp_path / "notify"),
            "WATCHDOG_USEC": "400000",
        }
        command = [sys.executable, "-m", "fedkeep.agent", "agent.toml"]
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL
        )
        heard: list[str] = []
        try:
            while not {"READY=1", "WATCHDOG=1"} <= set(heard):
                heard.append(listener.recv(4096).decode())
        finally:
            process.terminate()
            process.wait(120)
        while "STOPPING=1" not in heard:
            heard.append(listener.recv(4096).decode())
    assert heard.index("READY=1") < heard.index("WATCHDOG=1")


def test_a_learner_of_other_outputs_is_refused(tmp_path: Path) -> None:
    assembly = make_agent(tmp_path)
    with pytest.raises(ConfigError, match="has 3 outputs"):
        check_model(assembly.agent.device.learner, (6,), 4)
    assembly.disk.close()
    assert [file.name for file in tmp_path.iterdir()] == ["a.store"]
