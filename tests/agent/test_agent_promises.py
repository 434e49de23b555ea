"""What docs/agent.md promises of streams, on real processes whose disk, model or senders fail."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fedkeep.protocol.client import AgentClient
from fedkeep.protocol.framing import receive_frame, send_frame
from tests.agent.test_agent_process import (
    BASE,
    ENVIRONMENT,
    lines,
    outcome,
    running,
    wait_until_ready,
    write_config,
)
from tests.agent.test_sources import _connect, free_port, publish, running_broker

ROOT = Path(__file__).parents[2]


def eventually(condition: Any, seconds: float = 120.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@contextmanager
def full_disk(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Every write of the process to a file fails, as on a disk that is full."""
    _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (hard, hard))


def save(folder: Path, name: str, ids: range, label: int = 0) -> None:
    x = np.random.default_rng(ids.start).standard_normal((len(ids), 6)).astype(np.float32)
    with (folder / "making.tmp").open("wb") as file:
        np.savez(file, x=x, y=np.full(len(ids), label), ids=np.array(ids))
    (folder / "making.tmp").rename(folder / name)


def held(folder: Path, names: list[str]) -> int:
    with AgentClient(str(folder / "a.sock")) as client:
        return sum(client.why(name).stored for name in names)


def json_samples(prefix: str, count: int) -> list[bytes]:
    rows = np.random.default_rng(len(prefix)).standard_normal((count, 6)).round(3).tolist()
    return [
        json.dumps({"x": x, "y": i % 3, "id": f"{prefix}{i}"}).encode() for i, x in enumerate(rows)
    ]


@pytest.mark.parametrize("end", ["recovers", signal.SIGTERM, signal.SIGKILL])
def test_with_a_full_disk_files_stay_and_nobody_is_answered(tmp_path: Path, end: Any) -> None:
    port, folder = free_port(), tmp_path / "in"
    folder.mkdir()
    os.mkfifo(tmp_path / "pipe")
    more = (
        f'[[source]]\nkind = "folder"\npath = "{folder}"\n'
        f'[[source]]\nkind = "mqtt"\ntopic = "sensors/#"\nport = {port}\n'
        f'[[source]]\nkind = "socket"\naddress = "unix://{tmp_path}/in.sock"\noverload = "drop"\n'
        f'[[source]]\nkind = "lines"\npath = "{tmp_path}/pipe"\n'
    )
    write_config(tmp_path, more)
    over_mqtt, piped = json_samples("m", 20), json_samples("p", 15)
    named = [f"m{i}" for i in range(20)] + [f"s{i}" for i in range(10)]
    with running_broker(tmp_path, port), running(tmp_path, "agent.toml") as process:
        sender = _connect(f"unix://{tmp_path}/in.sock")
        sender.settimeout(1.0)
        time.sleep(2.0)  # the subscription
        writer = os.open(tmp_path / "pipe", os.O_WRONLY)
        with full_disk(process):
            save(folder, "a.npz", range(50))
            publish(port, over_mqtt)
            for i in range(10):
                record = {"x": [i] * 6, "y": i % 3, "id": f"s{i}"}
                send_frame(sender, msgspec.msgpack.encode(record))
            os.write(writer, b"".join(line + b"\n" for line in piped))
            with AgentClient(str(tmp_path / "a.sock")) as client:
                assert eventually(lambda: client.status().waiting), "it says that it waits"
                assert client.status().waiting == "the disk takes no writes: File too large"
            with pytest.raises(TimeoutError):
                sender.recv(1)
            assert (folder / "a.npz").exists()
            if end != "recovers":
                process.send_signal(end)
                assert process.wait(120) == (1 if end == signal.SIGTERM else -end)
                assert (folder / "a.npz").exists()
        if end == "recovers":
            everything = [*named, *(f"p{i}" for i in range(15)), *map(str, range(50))]
            assert eventually(lambda: held(tmp_path, everything) == 95)
            sender.settimeout(60.0)
            fates = [
                msgspec.msgpack.decode(receive_frame(sender) or b"")["fate"] for _ in range(10)
            ]
            assert fates == ["kept"] * 10
            assert eventually(lambda: not (folder / "a.npz").exists())
            with AgentClient(str(tmp_path / "a.sock")) as client:
                counters = client.status().counters
                assert (counters["seen"], counters["kept"]) == (95, 95)
                assert not client.status().waiting
        os.close(writer)
        sender.close()
        if end != "recovers":
            process.communicate()
            with running(tmp_path, "agent.toml"):
                again = [*named[:20], *map(str, range(50))]
                assert eventually(lambda: held(tmp_path, again) == 70), (
                    "what has a way back is back"
                )
                assert eventually(lambda: not (folder / "a.npz").exists())


def test_until_sources_end_waits_for_the_disk(tmp_path: Path) -> None:
    write_config(tmp_path, '[[source]]\nkind = "lines"\npath = "-"\n')
    command = [sys.executable, "-m", "fedkeep.agent", "agent.toml", "--until-sources-end"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=ENVIRONMENT, stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    wait_until_ready(tmp_path, process)  # type: ignore[arg-type]
    assert process.stdin is not None
    with full_disk(process):
        process.stdin.write(lines(30).encode())
        process.stdin.close()
        with AgentClient(str(tmp_path / "a.sock")) as client:
            assert eventually(lambda: client.status().waiting)
        time.sleep(1.0)
        assert process.poll() is None
    assert process.wait(120) == 0
    assert process.stderr is not None
    said = process.stderr.read().decode()
    process.stderr.close()
    assert "30 arrived, 30 kept" in said
    assert "can be written again" in said


def test_every_record_of_a_pipe_is_valued(tmp_path: Path) -> None:
    """`cat 100k.jsonl | agent`, with labels in turn: none is skipped, and no label is absent."""
    rows = np.random.default_rng(0).integers(-9, 9, (1000, 6)).tolist()
    text = "".join(f'{{"x": {rows[i % 1000]}, "y": {i % 3}, "id": {i}}}\n' for i in range(100_000))
    (tmp_path / "in.jsonl").write_text(text)
    write_config(tmp_path, '[[source]]\nkind = "lines"\n')
    with (tmp_path / "in.jsonl").open("rb") as file:
        cat = subprocess.Popen(["cat"], stdin=file, stdout=subprocess.PIPE)
        done = subprocess.run(
            [sys.executable, "-m", "fedkeep.agent", "agent.toml", "--until-sources-end"],
            cwd=tmp_path, env=ENVIRONMENT, stdin=cat.stdout, stderr=subprocess.PIPE, text=True,
            check=True,
        )  # fmt: skip
        cat.communicate()
    assert "100000 arrived" in done.stderr
    assert "skipped" not in done.stderr
    with running(tmp_path, "agent.toml"), AgentClient(str(tmp_path / "a.sock")) as client:
        now = client.status()
        assert (now.counters["seen"], now.samples) == (100_000, now.capacity)
        shares = [row.count / now.samples for row in client.stored().labels]
        assert all(abs(share - 1 / 3) < 0.05 for share in shares), shares


def test_a_burst_to_an_idle_agent_is_valued_whole(tmp_path: Path) -> None:
    write_config(tmp_path, f'[[source]]\nkind = "socket"\naddress = "unix://{tmp_path}/in.sock"\n')
    with running(tmp_path, "agent.toml"):
        sender = _connect(f"unix://{tmp_path}/in.sock")
        for i in range(300):
            record = {"x": [i] * 6, "y": i % 3, "id": i}
            send_frame(sender, msgspec.msgpack.encode(record))
        fates = [msgspec.msgpack.decode(receive_frame(sender) or b"")["fate"] for _ in range(300)]
        sender.close()
    assert set(fates) == {"kept"}


def test_shocks_after_a_long_rest_are_kept(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rest, shocks = rng.normal(0, 0.01, (2000, 6)), rng.normal(0, 5.0, (61, 6))
    with (tmp_path / "in.jsonl").open("w") as file:
        for i, x in enumerate([*rest, *shocks]):
            file.write(json.dumps({"x": x.tolist(), "y": int(i >= 2000), "id": i}) + "\n")
    source = '[[source]]\nkind = "lines"\npath = "in.jsonl"\n'
    (tmp_path / "agent.toml").write_text(BASE.replace("200_000", "2_000_000") + source)
    code, said = outcome(tmp_path, "agent.toml", "--until-sources-end")
    assert code == 0
    assert "refused" not in said
    with running(tmp_path, "agent.toml"), AgentClient(str(tmp_path / "a.sock")) as client:
        assert sum(client.why(str(i)).stored for i in range(2000, 2061)) == 61


def test_fifo_without_model_and_server_is_first_in_first_out(tmp_path: Path) -> None:
    text = BASE.replace("200_000", "100_000") + '[policy]\nname = "fifo"\n'
    (tmp_path / "agent.toml").write_text(text + '[[source]]\nkind = "lines"\npath = "in.jsonl"\n')
    (tmp_path / "in.jsonl").write_text(lines(3000))
    code, said = outcome(tmp_path, "agent.toml", "--until-sources-end")
    assert code == 0
    assert "policy fifo needs none" in said
    (tmp_path / "in.jsonl").write_text("")
    with running(tmp_path, "agent.toml"), AgentClient(str(tmp_path / "a.sock")) as client:
        capacity = client.status().capacity
        assert 40 < capacity < 3000
        newest = range(3000 - capacity, 3000)
        assert all(client.why(str(i)).stored for i in [*newest[:20], *newest[-20:]])
        assert not client.why(str(3000 - capacity - 1)).stored


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "[" * 5000 + "]" * 5000,
        ".".join(["a"] * 5000) + " = 1",
        "[" + ".".join(["a"] * 5000) + "]",
        "x = " + "{a = " * 5000 + "1" + "}" * 5000,
    ],
    ids=["lists", "keys", "tables", "inline"],
)
def test_a_configuration_nested_5000_deep_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "agent.toml").write_text(text)
    code, said = outcome(tmp_path, "agent.toml")
    assert code == 2
    assert said.strip().endswith("nests deeper than any configuration does")
    assert len(said.splitlines()) == 1


def test_a_file_system_that_is_read_only_at_the_start_may_pass(tmp_path: Path) -> None:
    """Exit code 1, which systemd starts again; 2 would be for good."""
    mounted = tmp_path / "flash"
    mounted.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", mounted], check=False).returncode:
        pytest.skip("nothing may be mounted here")
    try:
        text = BASE.replace('path = "a.store"', f'path = "{mounted}/a.store"')
        (tmp_path / "agent.toml").write_text(text)
        subprocess.run(["mount", "-o", "remount,ro", mounted], check=True)
        code, said = outcome(tmp_path, "agent.toml")
        assert (code, "Read-only file system" in said, "Traceback" in said) == (1, True, False)
        subprocess.run(["mount", "-o", "remount,rw", mounted], check=True)
        with running(tmp_path, "agent.toml"):
            pass
    finally:
        subprocess.run(["umount", mounted], check=True)


def exported(folder: Path) -> Path:
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from fedkeep.learn.export import export

    export(
        lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6, 3)),
        (6,),
        None,
        folder / "m.onnx",
    )
    return folder / "m.onnx"


def endless(path: Path) -> None:
    """Puts a loop that never ends in front of the model's logits."""
    import onnx
    from onnx import TensorProto, helper

    model = onnx.load(path)
    graph = model.graph
    for node in graph.node:
        node.output[:] = ["inner" if name == "logits" else name for name in node.output]
        node.input[:] = ["inner" if name == "logits" else name for name in node.input]
    scalar = {"elem_type": TensorProto.BOOL, "shape": []}
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["going"], ["goes_on"]),
            helper.make_node("Abs", ["value"], ["next"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("turn", TensorProto.INT64, []),
            helper.make_tensor_value_info("going", **scalar),
            helper.make_tensor_value_info("value", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("goes_on", **scalar),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, None),
        ],
    )
    graph.initializer.append(helper.make_tensor("yes", TensorProto.BOOL, [], [True]))
    graph.node.append(helper.make_node("Loop", ["", "yes", "inner"], ["logits"], body=body))
    onnx.save(model, path)


def test_a_model_that_never_ends_is_refused_in_bounded_time(tmp_path: Path) -> None:
    path = exported(tmp_path)
    write_config(tmp_path, f'[model]\npath = "{path}"\nload_seconds = 20\n')
    with running(tmp_path, "agent.toml"):
        pass
    (tmp_path / "a.store").unlink()
    endless(path)
    write_config(tmp_path, f'[model]\npath = "{path}"\nload_seconds = 3\n')
    start = time.monotonic()
    code, said = outcome(tmp_path, "agent.toml")
    assert time.monotonic() - start < 20
    assert (code, len(said.splitlines())) == (2, 1)
    assert "did not value one sample in 3 seconds: it may loop without end" in said
    assert not (tmp_path / "a.store").exists()


def test_a_model_must_have_the_checksum_that_is_given(tmp_path: Path) -> None:
    path = exported(tmp_path)
    right = subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True).stdout
    for digest, code, words in (
        (right.split()[0], 0, ""),
        ("0" * 64, 2, "not " + "0" * 64 + " as [model] sha256 says"),
        ("abc", 2, "sha256 must be 64 hex digits"),
    ):
        (tmp_path / "in.jsonl").write_text(lines(9))
        source = '[[source]]\nkind = "lines"\npath = "in.jsonl"\n'
        write_config(tmp_path, f'[model]\npath = "{path}"\nsha256 = "{digest}"\n{source}')
        found, said = outcome(tmp_path, "agent.toml", "--until-sources-end")
        assert (found, words in said, "Traceback" in said) == (code, True, False)
    write_config(tmp_path, '[model]\nname = "softmax"\nsha256 = "00"\n')
    assert "sha256 is for a model from a file" in outcome(tmp_path, "agent.toml")[1]


def test_a_query_does_not_empty_the_metrics(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    port = free_port()
    write_config(tmp_path, f"[metrics]\nport = {port}\n")
    with running(tmp_path, "agent.toml"):
        for query in ("", "?name[]=", "?name[]=nothing"):
            address = f"http://127.0.0.1:{port}/metrics{query}"
            with urllib.request.urlopen(address, timeout=60) as answer:
                assert "fedkeep_capacity" in answer.read().decode(), query


def test_metrics_beyond_loopback_need_a_word(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    port = free_port()
    write_config(tmp_path, f'[metrics]\nport = {port}\nhost = "0.0.0.0"\n')
    code, said = outcome(tmp_path, "agent.toml")
    assert (code, "set insecure = true" in said) == (2, True)
    more = f'[metrics]\nport = {port}\nhost = "0.0.0.0"\ninsecure = true\n'
    write_config(tmp_path, more)
    with running(tmp_path, "agent.toml") as process:
        pass
    assert process.returncode == 0


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x1b[31m\x9b5n\u202e[/bad][bold]:smile:"


def test_nothing_that_came_reaches_the_terminal_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "\x1b[2J.npz").write_bytes(b"nonsense")
    (folder / "a.\x1b[2J").write_bytes(b"nonsense")
    record = json.dumps({"x": [1, HOSTILE], "y": 0, "id": HOSTILE}, ensure_ascii=False)
    (tmp_path / "in.jsonl").write_text(f"{record}\n{HOSTILE}\n{lines(3)}")
    write_config(
        tmp_path,
        '[[source]]\nkind = "lines"\npath = "in.jsonl"\n'
        f'[[source]]\nkind = "folder"\npath = "{folder}"\n',
    )
    said = ""
    with running(tmp_path, "agent.toml") as process:
        with AgentClient(str(tmp_path / "a.sock")) as client:
            assert eventually(lambda: len(client.refused()) >= 4)
        for words in (["refused"], ["status"], ["why", HOSTILE], ["why", "[/bad]"], ["show"]):
            done = subprocess.run(
                [sys.executable, "-m", "fedkeep", "agent", *words, "--socket", "a.sock"],
                cwd=tmp_path, env=ENVIRONMENT, capture_output=True, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            said += (done.stdout + done.stderr).decode()
        process.terminate()
        process.wait(120)
        assert process.stderr is not None
        said += process.stderr.read()
    code, errors = outcome(tmp_path, f"{HOSTILE}.toml")
    assert code == 2
    said += errors
    assert "Traceback" not in said
    assert "[/bad]" in said
    assert not re.search(r"[^\n\x20-\x7e┏━┳┓┃┡╇┩│└┴┘─┬├┤┼]", said), ascii(said)


def test_a_path_for_a_socket_that_is_too_long_is_a_sentence(tmp_path: Path) -> None:
    entry = ("-m", "fedkeep", "agent")
    for socket_path in ("x" * 200, "a\0b", "unix:///run/a.sock"):
        if "\0" in socket_path:
            continue
        code, said = outcome(tmp_path, "status", "--socket", socket_path, entry=entry)
        assert (code, len(said.splitlines()), "None" in said) == (2, 1, False)


def unit(name: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (ROOT / "deploy" / name).read_text().replace("\\\n", " ").splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def test_agent_and_supernode_share_user_and_socket() -> None:
    import tomllib

    agent, node = unit("fedkeep-agent.service"), unit("flower-supernode.service")
    table = tomllib.loads((ROOT / "deploy" / "agent.toml").read_text())
    assert agent["User"] == node["User"] == ["fedkeep"]
    assert "DynamicUser" not in agent
    assert f'agent-socket="{table["agent"]["socket"]}"' in node["ExecStart"][0]
    folder = Path(table["agent"]["socket"]).parent
    assert agent["RuntimeDirectory"] == [folder.name]
    assert folder.parent == Path("/run")
    assert agent["StartLimitIntervalSec"] == ["0"]
    assert agent["RestartPreventExitStatus"] == ["2"]
    people = (ROOT / "deploy" / "fedkeep.sysusers.conf").read_text()
    assert re.search(r"^u fedkeep ", people, re.MULTILINE)


def test_systemd_finds_no_mistake_in_the_agents_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze on this machine")
    for name in ("fedkeep-agent.service", "flower-supernode.service"):
        text = (ROOT / "deploy" / name).read_text()
        there = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", text, flags=re.MULTILINE)
        (tmp_path / name).write_text(there)
    units = [str(tmp_path / name) for name in ("fedkeep-agent.service", "flower-supernode.service")]
    done = subprocess.run(
        ["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False
    )
    complaints = [line for line in done.stderr.splitlines() if str(tmp_path) in line]
    assert not complaints, done.stderr


def test_the_queue_is_as_long_as_it_is_set(tmp_path: Path) -> None:
    write_config(
        tmp_path,
        'queue = 7\n[[source]]\nkind = "socket"\noverload = "drop"\n'
        f'address = "unix://{tmp_path}/in.sock"\n',
    )
    with running(tmp_path, "agent.toml") as process:
        sender = _connect(f"unix://{tmp_path}/in.sock")
        process.send_signal(signal.SIGSTOP)
        frames = b""
        for i in range(100):
            payload = msgspec.msgpack.encode({"x": [i] * 6, "y": 0, "id": i})
            frames += len(payload).to_bytes(4) + payload
        sender.sendall(frames)
        process.send_signal(signal.SIGCONT)
        fates = [msgspec.msgpack.decode(receive_frame(sender) or b"")["fate"] for _ in range(100)]
        sender.close()
        with AgentClient(str(tmp_path / "a.sock")) as client:
            counters = client.status().counters
    assert counters["skipped.drop"] == fates.count("skipped") > 0
