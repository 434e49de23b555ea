"""The live page's server, asked over a real socket."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the live page needs the 'web' extra")
pytest.importorskip("uvicorn", reason="the live page needs the 'web' extra")

from fedkeep.core.errors import ConfigError, DataError
from fedkeep.web.report import SCRIPTS, asset
from fedkeep.web.server import LiveServer

TOKEN = "a-secret-of-some-length"


@contextmanager
def serving(source: Path | str, token: str | None = None) -> Iterator[LiveServer]:
    server = LiveServer(source, port=0, token=token)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(timeout=10)
        assert not thread.is_alive()


def port_of(server: LiveServer) -> int:
    return int(server.url.split(":")[2].split("/")[0])


@contextmanager
def asked(
    server: LiveServer, path: str, method: str = "GET", **headers: str
) -> Iterator[HTTPResponse]:
    connection = HTTPConnection("127.0.0.1", port_of(server), timeout=60)
    try:
        connection.request(method, path, headers=headers)
        yield connection.getresponse()
    finally:
        connection.close()


def status(server: LiveServer, path: str, method: str = "GET", **headers: str) -> int:
    with asked(server, path, method, **headers) as answer:
        return answer.status


def next_update(answer: HTTPResponse) -> Any:
    while True:
        line = answer.readline()
        assert line, "the stream ended"
        if line.startswith(b"data:"):
            return json.loads(line[5:])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, fleet: dict[str, Any]) -> Path:
    found = tmp_path_factory.mktemp("fleet")
    fleet["write_fleet"](found, seeds=1, rounds=20)
    return found


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[LiveServer]:
    with serving(directory) as running:
        yield running


def test_the_page_and_all_its_files_are_there(server: LiveServer) -> None:
    with asked(server, "/") as answer:
        page = answer.read().decode()
    for name in (*SCRIPTS, "style.css", "icon.svg"):
        assert f'"{name}"' in page
        assert status(server, f"/{name}") == 200
    assert status(server, "/skeleton.html") == 404
    assert status(server, "/../server.py") == 404


def test_the_page_stays_small() -> None:
    names = (*SCRIPTS, "style.css", "icon.svg", "skeleton.html")
    assert sum(len(asset(name).encode()) for name in names) <= 300_000


def test_every_answer_carries_a_strict_policy(server: LiveServer) -> None:
    for path in ("/", "/main.js", "/nothing", "/api/device?run=x&device=1"):
        with asked(server, path) as answer:
            policy = answer.headers["Content-Security-Policy"]
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert policy.startswith("default-src 'none'; script-src 'self';")
        assert "unsafe" not in policy


def test_the_stream_begins_with_everything_and_goes_on_with_changes(
    tmp_path: Path, fleet: dict[str, Any]
) -> None:
    run = fleet["FakeRun"](tmp_path / "ode-0.jsonl")
    run.advance(10)
    with serving(tmp_path) as server, asked(server, "/api/stream") as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        first = next_update(answer)
        assert [view["round"] for view in first["views"]] == [10]
        run.advance(10)
        assert next_update(answer)["views"][0]["round"] == 20


def test_one_device_is_shown_on_request(server: LiveServer) -> None:
    with asked(server, "/api/device?run=ode-0&device=2") as answer:
        device = json.loads(answer.read())
    assert (device["device"], device["round"]) == (2, 20)
    assert status(server, "/api/device?run=ode-0&device=99") == 404
    assert status(server, "/api/device?run=none&device=2") == 404
    assert status(server, "/api/device?run=ode-0&device=two") == 422


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_written(server: LiveServer, method: str) -> None:
    assert status(server, "/", method) == 405


def test_another_host_name_is_refused_without_a_token(server: LiveServer) -> None:
    port = port_of(server)
    assert status(server, "/", Host=f"localhost:{port}") == 200
    assert status(server, "/", Host="attacker.example") == 403
    assert status(server, "/api/stream", Host=f"10.0.0.1:{port}") == 403


def test_a_token_opens_the_page_once_and_then_a_cookie_does(directory: Path) -> None:
    with serving(directory, TOKEN) as server:
        assert server.url.endswith(f"/?token={TOKEN}")
        for wrong in ("/", "/api/stream", "/main.js", "/?token=wrong", "/?token="):
            assert status(server, wrong) == 401
        with asked(server, f"/?token={TOKEN}") as answer:
            assert (answer.status, answer.headers["Location"]) == (303, "/")
            cookie = answer.headers["Set-Cookie"]
        assert TOKEN not in cookie
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert status(server, "/", Cookie=cookie.split(";")[0]) == 200
        assert status(server, "/", Cookie="fedkeep-watch=guess") == 401
        assert status(server, "/", Authorization=f"Bearer {TOKEN}") == 200
        assert status(server, "/", Authorization="Bearer wrong") == 401


def test_others_may_not_look_without_a_token(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--token"):
        LiveServer(tmp_path, host="0.0.0.0", port=0)
    with pytest.raises(ConfigError, match="at least 16 characters, got 5"):
        LiveServer(tmp_path, host="0.0.0.0", port=0, token="short")


def test_one_watch_follows_another(tmp_path: Path, fleet: dict[str, Any]) -> None:
    run = fleet["FakeRun"](tmp_path / "ode-0.jsonl")
    run.advance(10)
    with (
        serving(tmp_path, TOKEN) as first,
        serving(first.url) as second,
        asked(second, "/api/stream") as answer,
    ):
        while not (update := next_update(answer))["views"]:
            pass
        assert update["views"][0]["round"] == 10
        assert update["title"] == tmp_path.name
        run.advance(10)
        assert next_update(answer)["views"][0]["round"] == 20
        with asked(second, "/api/device?run=ode-0&device=1") as found:
            assert json.loads(found.read())["device"] == 1
        assert status(second, "/api/device?run=ode-0&device=77") == 404


def test_an_address_that_does_not_answer_is_reported(directory: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(DataError, match=f"cannot reach http://127.0.0.1:{port}"):
        LiveServer(f"http://127.0.0.1:{port}", port=0)
    with serving(directory, TOKEN) as server, pytest.raises(DataError, match=r"add \?token"):
        LiveServer(server.url.split("?")[0], port=0)
    with pytest.raises(DataError, match="not an address"):
        LiveServer("http://", port=0)


def watch(*arguments: str) -> subprocess.CompletedProcess[str]:
    source = str(Path(__file__).parents[2] / "src")
    command = [sys.executable, "-m", "fedkeep", "watch", *arguments]
    environment = os.environ | {"PYTHONPATH": source}
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=300, check=False
    )


def test_a_taken_port_ends_in_one_sentence_with_the_address(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = watch(str(tmp_path), "--port", str(port))
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"fedkeep: http://127.0.0.1:{port} is taken")
    assert ended.stderr.count("\n") == 1


def test_ctrl_c_ends_it_cleanly_while_a_page_is_open(directory: Path) -> None:
    source = str(Path(__file__).parents[2] / "src")
    command = [sys.executable, "-m", "fedkeep", "watch", str(directory), "--port", "0"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": source},
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        port = int(line.split("127.0.0.1:")[1].split()[0])
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/api/stream")
        assert next_update(connection.getresponse())["views"]
        process.send_signal(signal.SIGINT)
        _, complained = process.communicate(timeout=120)
        connection.close()
    assert process.returncode == 0
    assert complained == ""


def test_a_missing_directory_ends_in_one_sentence(tmp_path: Path) -> None:
    ended = watch(str(tmp_path / "nowhere"), "--port", "0")
    assert ended.returncode == 2
    assert "is not a directory" in ended.stderr
    assert "Traceback" not in ended.stderr
