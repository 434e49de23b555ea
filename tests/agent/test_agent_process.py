"""The agent as a real process: its imports, how it dies and restarts, and its start-up errors."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import fedkeep
from fedkeep.agent.assembly import read_config
from fedkeep.agent.daemon import CpuThrottle
from fedkeep.protocol.client import AgentClient, AgentUnreachableError
from fedkeep.protocol.framing import receive_frame, send_frame

BASE = """
[samples]
shape = [6]
labels = 3
[store]
path = "a.store"
budget = 200_000
[agent]
socket = "a.sock"
"""


ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONPATH": str(Path(fedkeep.__file__).parents[1]),
}


def write_config(folder: Path, more: str = "") -> Path:
    config = folder / "agent.toml"
    config.write_text(BASE + more)
    return config


def start(
    folder: Path, *arguments: str, entry: tuple[str, ...] = ("-m", "fedkeep.agent")
) -> subprocess.Popen[str]:
    command = [sys.executable, *entry, *arguments]
    return subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)


def wait_until_ready(folder: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        try:
            with AgentClient(str(folder / "a.sock"), timeout=60) as client:
                client.streams()
                return
        except AgentUnreachableError:
            time.sleep(0.02)
    raise TimeoutError("the agent did not start")


@contextmanager
def running(folder: Path, *arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    process = start(folder, *arguments, **options)
    try:
        wait_until_ready(folder, process)
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=120)


def outcome(
    folder: Path, *arguments: str, entry: tuple[str, ...] = ("-m", "fedkeep.agent")
) -> tuple[int, str]:
    process = start(folder, *arguments, entry=entry)
    _, errors = process.communicate(timeout=120)
    return process.returncode, errors


def lines(count: int, first: int = 0) -> str:
    rows = []
    for id_ in range(first, first + count):
        x = np.random.default_rng(id_).standard_normal(6).round(4).tolist()
        rows.append(json.dumps({"x": x, "y": id_ % 3, "id": id_}))
    return "\n".join(rows) + "\n"


def test_it_imports_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(lines(50))
    write_config(tmp_path, '[[source]]\nkind = "lines"\npath = "in.jsonl"\n')
    probe = (
        "import sys; from fedkeep.agent.__main__ import main\n"
        "code = main(['agent.toml', '--until-sources-end'])\n"
        "heavy = {'scipy', 'rich', 'typer', 'click', 'torch', 'sklearn', 'onnxruntime', 'paho',"
        " 'cryptography', 'fedkeep.data', 'numpy.random'}\n"
        "print(sorted(heavy & sys.modules.keys()), file=sys.stderr); sys.exit(code)"
    )
    code, errors = outcome(tmp_path, entry=("-c", probe))
    assert code == 0, errors
    assert errors.strip().splitlines()[-1] == "[]"


def test_the_client_of_the_api_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'rich', 'typer', 'scipy', 'onnxruntime'}"
    probe = f"import sys, fedkeep.protocol.client; print(sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", probe], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_command_line_runs_it_and_asks_it(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(lines(60))
    config = write_config(tmp_path, '[[source]]\nkind = "lines"\npath = "in.jsonl"\n')
    entry = ("-m", "fedkeep", "agent")
    with running(tmp_path, "run", str(config), entry=entry) as process:
        modules = Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")
        assert "fedkeep.agent" in modules, (
            "the light process has taken the place of the command line"
        )
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            shown = ask(tmp_path, "status")
            if "seen                     60" in shown:
                break
        assert "seen                     60" in shown
        assert "label" in ask(tmp_path, "show")
        assert "kept with random key" in ask(tmp_path, "why", "7")
        assert "1 samples erased. Models that were trained on them keep" in ask(
            tmp_path, "erase", "--id", "7"
        )
        assert "erased on request" in ask(tmp_path, "why", "7")
    code, errors = outcome(tmp_path, "status", "--socket", "a.sock", entry=entry)
    assert code == 2
    assert "no agent answers at a.sock" in errors


def ask(folder: Path, verb: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "fedkeep", "agent", verb, *arguments, "--socket", "a.sock"]
    return subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=True
    ).stdout


def test_a_kill_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    source = f'kind = "socket"\naddress = "unix://{tmp_path}/in.sock"\noverload = "wait"\n'
    write_config(tmp_path, f"[[source]]\n{source}")
    kept: set[int] = set()
    for life in range(3):
        with running(tmp_path, "agent.toml") as process:
            with AgentClient(str(tmp_path / "a.sock")) as client:
                held = {d for d in kept if client.why(str(d)).stored}
            assert held == kept
            sender = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sender.connect(str(tmp_path / "in.sock"))
            for id_ in range(life * 100, life * 100 + 60):
                x = np.random.default_rng(id_).standard_normal(6).astype("<f4")
                send_frame(
                    sender, msgspec.msgpack.encode({"x": x.tobytes(), "y": id_ % 3, "id": id_})
                )
            for _ in range(40):
                answer = msgspec.msgpack.decode(receive_frame(sender) or b"")
                if answer["fate"] == "kept":
                    kept.add(life * 100 + answer["n"])
            process.send_signal(signal.SIGKILL)
            process.wait()
            sender.close()
    assert len(kept) == 120


def test_a_terminated_agent_commits_first(tmp_path: Path) -> None:
    write_config(tmp_path, '[[source]]\nkind = "lines"\n')
    command = [sys.executable, "-m", "fedkeep.agent", "agent.toml"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    wait_until_ready(tmp_path, process)
    assert process.stdin is not None
    process.stdin.write(lines(20))
    process.stdin.flush()
    with AgentClient(str(tmp_path / "a.sock"), timeout=60) as client:
        deadline = time.monotonic() + 120
        while client.status().counters.get("seen", 0) < 20 and time.monotonic() < deadline:
            time.sleep(0.05)
    process.terminate()
    assert process.wait(120) == 0
    process.stdin.close()
    with running(tmp_path, "agent.toml"), AgentClient(str(tmp_path / "a.sock")) as client:
        assert client.status().counters["seen"] == 20


def test_metrics_are_served_on_the_loopback(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (tmp_path / "in.jsonl").write_text(lines(30) + '{"x": [1], "y": 0}\n')
    write_config(
        tmp_path, f'[metrics]\nport = {port}\n[[source]]\nkind = "lines"\npath = "in.jsonl"\n'
    )
    with running(tmp_path, "agent.toml"):
        deadline = time.monotonic() + 120
        text = ""
        while 'fate="seen",reason=""} 31.0' not in text and time.monotonic() < deadline:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
                text = answer.read().decode()
        for expected in (
            'fedkeep_arrivals_total{fate="refused",reason="shape"} 1.0',
            'fedkeep_arrivals_total{fate="kept",reason=""} 30.0',
            "fedkeep_samples 30.0",
            "fedkeep_bytes_budget",
            'fedkeep_value{quantile="0.5"}',
            "fedkeep_labels_held 3.0",
        ):
            assert expected in text, expected
        second = tmp_path / "second"
        second.mkdir()
        write_config(second, f"[metrics]\nport = {port}\n")
        code, errors = outcome(second, "agent.toml")
        assert code == 1, "another time it may be free"
        assert f"cannot listen at 127.0.0.1:{port}" in errors
        assert "Traceback" not in errors
        code, errors = outcome(tmp_path, "agent.toml")
        assert code == 1
        assert "in use by another agent" in errors


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("[agents]\n", "unknown table 'agents': did you mean 'agent'?"),
        ('[policy]\nname = "odd"\n', "unknown policy 'odd'"),
        ('[model]\nname = "softmx"\n', "did you mean 'softmax'"),
        ('[model]\npath = "none.onnx"\n', "cannot read the model none.onnx"),
        ('[[source]]\nkind = "lines"\npath = "none.jsonl"\n', "cannot read none.jsonl"),
        ("[storage]\nmax_age = 0\n", "max_age must be 1 or more"),
        ("x = \n", "is not valid TOML"),
        ("seed = -1\n", "seed must be between 0 and"),
        (
            '[[source]]\nkind = "iterator"\nfunction = "broken:samples"\n',
            "cannot import 'broken' (of 'broken:samples')",
        ),
    ],
)
def test_a_wrong_configuration_is_one_sentence(tmp_path: Path, more: str, message: str) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    write_config(tmp_path, more)
    code, errors = outcome(tmp_path, "agent.toml")
    assert code == 2
    assert message in errors
    assert "Traceback" not in errors
    assert len(errors.strip().splitlines()) == 1


def test_a_pickle_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"\x80\x04\x95evil")
    write_config(tmp_path, '[model]\npath = "model.onnx"\n')
    code, errors = outcome(tmp_path, "agent.toml")
    assert code == 2
    assert "a pickle" in errors


@pytest.mark.parametrize("failure", ["ValueError('no more')", "SystemExit('no more')"])
def test_a_source_that_fails_is_tried_again_and_ends_no_agent(tmp_path: Path, failure: str) -> None:
    (tmp_path / "broken.py").write_text(
        f"def samples():\n    yield [0.0] * 6, 1\n    raise {failure}\n"
    )
    write_config(tmp_path, '[[source]]\nkind = "iterator"\nfunction = "broken:samples"\n')
    with running(tmp_path, "agent.toml"), AgentClient(str(tmp_path / "a.sock")) as client:
        deadline = time.monotonic() + 120
        while (
            client.status().counters.get("refused.source-failed", 0) < 2
            and time.monotonic() < deadline
        ):
            time.sleep(0.1)
        assert client.status().counters["refused.source-failed"] >= 2
        assert "no more" in client.refused()[-1].raw
    code, errors = outcome(tmp_path, "agent.toml", "--until-sources-end")
    assert code == 1
    assert "source 'iterator' failed" in errors
    assert "Traceback" not in errors


def test_without_a_source_there_is_no_end_to_wait_for(tmp_path: Path) -> None:
    write_config(tmp_path)
    code, errors = outcome(tmp_path, "agent.toml", "--until-sources-end")
    assert code == 2
    assert "there is no [[source]] that could end" in errors.splitlines()[-1]


def test_a_stream_without_one_sample_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('hello\n{"x": 1}\n')
    write_config(tmp_path, '[[source]]\nkind = "lines"\npath = "in.jsonl"\n')
    code, errors = outcome(tmp_path, "agent.toml", "--until-sources-end")
    assert code == 1
    assert "not one record was a sample (2 malformed)" in errors.splitlines()[-1]


def test_the_deployed_configuration_is_a_configuration() -> None:
    root = Path(__file__).parents[2]
    config = read_config(root / "deploy" / "agent.toml")
    assert config.store.budget == 9_000_000
    assert (
        "-m fedkeep.agent /etc/fedkeep/agent.toml"
        in (root / "deploy" / "fedkeep-agent.service").read_text()
    )


def test_the_cap_on_cpu_rests_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    worked, rested = [0.0], list[float]()
    monkeypatch.setattr(time, "process_time", lambda: worked[0])
    monkeypatch.setattr(time, "sleep", rested.append)
    frugality = CpuThrottle(0.25)
    worked[0] = 0.1
    frugality.after(1)
    frugality.after(1)
    assert rested == [pytest.approx(0.3)]
