"""Settings from afar: by signature and consent only, on trial, and back to the last good ones."""

import http.server
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedkeep.agent.assembly import AgentConfig, parse_config
from fedkeep.agent.daemon import _prepared
from fedkeep.agent.remote import (
    Remote,
    RestartError,
    SettingsFile,
    new_keys,
    sign,
    under_settings,
    verified,
)
from fedkeep.cli.agent import agent as commands
from fedkeep.core.errors import ConfigError, RejectedError
from fedkeep.protocol.client import AgentClient, AgentUnreachableError
from fedkeep.protocol.messages import Status
from tests.agent.builders import config_table, make_agent
from tests.agent.test_agent_process import ask, lines, running, write_config

pytest.importorskip("cryptography", reason="cryptography is not installed")
FIFO = 'version = {}\n[policy]\nname = "fifo"\n'


@pytest.fixture
def keys(tmp_path: Path) -> bytes:
    private, public = new_keys()
    (tmp_path / "key.pub").write_text(public.hex())
    return private


def configured(folder: Path, **remote: Any) -> AgentConfig:
    given = {"key_file": str(folder / "key.pub"), "allow": ["policy", "storage", "model"], **remote}
    table = config_table(folder, remote=given, policy={"name": "balanced-reservoir"})
    return parse_config(table)


def remote_of(folder: Path, **options: Any) -> Remote:
    own = configured(folder, **options)
    assembly = make_agent(folder, **own.table)
    assembly.disk.close()
    return Remote(assembly.agent, parse_config, own)


def test_only_what_is_signed_newer_allowed_and_sound_is_taken(tmp_path: Path, keys: bytes) -> None:
    remote, foreign = remote_of(tmp_path), new_keys()[0]
    wrong = {
        "not signed by": [sign(FIFO.format(1), foreign), FIFO.format(1).encode(), b"", b"zz\nx"],
        "needs? `version`": [
            sign('[policy]\nname = "fifo"\n', keys),
            sign("version = true\n", keys),
        ],
        "not valid TOML": [sign("version = = 1\n", keys)],
        "does not take .agent. from afar": [sign("version = 1\n[agent]\nsocket = 'x'\n", keys)],
        "does not take .upload.": [sign("version = 1\n[upload]\nenabled = true\nto = 'x'\n", keys)],
        "does not take .remote.": [sign("version = 1\n[remote]\nallow = ['gist']\n", keys)],
        "did you mean 'fifo'": [sign("version = 1\n[policy]\nname = 'fifoo'\n", keys)],
        "needs the sha256": [sign("version = 1\n[model]\npath = 'm.onnx'\n", keys)],
        "at most 65536 bytes": [sign("version = 1\n" + "#" * 70_000, keys)],
    }
    for message, texts in wrong.items():
        for signed in texts:
            with pytest.raises(RejectedError, match=message):
                remote.configure(signed)
    assert remote.file.book.trying is None
    assert "version 3 on trial" in remote.configure(sign(FIFO.format(3), keys))
    with pytest.raises(RejectedError, match="version 3 is not newer than 3"):
        remote.configure(sign(FIFO.format(3), keys))
    assert remote.is_due.is_set()


def test_a_changed_text_is_not_the_signed_one(keys: bytes, tmp_path: Path) -> None:
    public = bytes.fromhex((tmp_path / "key.pub").read_text())
    signed = sign(FIFO.format(1), keys)
    assert verified(signed, public) == FIFO.format(1)
    for place in (3, 140, len(signed) - 2):
        changed = bytearray(signed)
        changed[place] ^= 1
        with pytest.raises(RejectedError, match="not signed"):
            verified(bytes(changed), public)


def test_settings_count_on_trial_become_good_and_the_next_are_taken_back(
    tmp_path: Path, keys: bytes
) -> None:
    own = configured(tmp_path)
    parse = partial(parse_config, stream="")
    remote = remote_of(tmp_path)
    remote.configure(sign(FIFO.format(1), keys))
    assert under_settings(own, parse).method.policy_name == "fifo"
    file = SettingsFile(own.store.file)
    file.confirm()
    remote = remote_of(tmp_path)
    remote.configure(sign("version = 2\n[policy]\nname = 'ode'\n", keys))
    for _ in range(2):
        assert under_settings(own, parse).method.policy_name == "ode"
    assert under_settings(own, parse).method.policy_name == "fifo", "two starts ended badly"
    assert "version 2 was taken back" in SettingsFile(own.store.file).summary()
    with pytest.raises(RejectedError, match="not newer than 2"):
        remote_of(tmp_path).configure(sign(FIFO.format(2), keys))


def test_a_stop_during_the_trial_is_no_failure(tmp_path: Path, keys: bytes) -> None:
    own = configured(tmp_path)
    remote_of(tmp_path).configure(sign(FIFO.format(1), keys))
    for _ in range(5):
        assert under_settings(own, parse_config).method.policy_name == "fifo"
        SettingsFile(own.store.file).ended_well()


def test_settings_that_let_it_not_come_up_are_taken_back_at_once(
    tmp_path: Path, keys: bytes
) -> None:
    from contextlib import ExitStack

    own = configured(tmp_path)
    text = f"version = 1\n[model]\npath = '{tmp_path}/none.onnx'\nsha256 = '{'0' * 64}'\n"
    remote_of(tmp_path).configure(sign(text, keys))
    with ExitStack() as stack:
        with pytest.raises(RestartError):
            _prepared(own, stack)
        agent = _prepared(own, stack)
        assert agent.remote is not None
        assert "version 1 was taken back" in agent.remote.file.summary()


def test_a_settings_file_that_is_damaged_counts_as_none(tmp_path: Path, keys: bytes) -> None:
    own = configured(tmp_path)
    remote_of(tmp_path).configure(sign(FIFO.format(1), keys))
    own.store.file.with_name("a.store.settings").write_bytes(b'{"good"')
    assert under_settings(own, parse_config).method.policy_name == "balanced-reservoir"


@pytest.mark.parametrize(
    ("remote", "message"),
    [
        ({"allow": ["agent"]}, "allow is of policy"),
        ({"allow": ["policy"]}, "need the key_file"),
        ({"key_file": "nokey"}, "it must be 64 hex digits"),
        ({"key_file": "k", "url": "file:///x"}, "must be https"),
        ({"key_file": "k", "url": "http://example.org/x"}, "insecure"),
    ],
)
def test_wrong_options_are_said(
    tmp_path: Path, remote: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nokey").write_text("12")
    (tmp_path / "k").write_text("12" * 32)

    def made() -> Remote:
        own = parse_config(config_table(tmp_path, remote=remote))
        assembly = make_agent(tmp_path, **own.table)
        assembly.disk.close()
        return Remote(assembly.agent, parse_config, own)

    with pytest.raises(ConfigError, match=message):
        made()


def wait_for(folder: Path, holds: Any) -> Status:
    """Asks until it answers as wanted; it may be starting anew meanwhile."""
    deadline, status = time.monotonic() + 120, None
    while time.monotonic() < deadline:
        try:
            with AgentClient(str(folder / "a.sock"), timeout=60) as client:
                status = client.status()
            if holds(status):
                return status
        except (AgentUnreachableError, RejectedError):
            pass
        time.sleep(0.1)
    raise AssertionError(status)


def test_a_running_agent_takes_settings_keeps_its_samples_and_its_process(
    tmp_path: Path, keys: bytes
) -> None:
    (tmp_path / "in.jsonl").write_text(lines(20))
    write_config(
        tmp_path,
        '[[source]]\nkind = "lines"\npath = "in.jsonl"\n'
        '[remote]\nkey_file = "key.pub"\nallow = ["policy"]\ntrial_seconds = 0.5\n',
    )
    (tmp_path / "key").write_text(keys.hex())
    (tmp_path / "one.toml").write_text(FIFO.format(1))
    made = CliRunner().invoke(
        commands,
        ["sign", f"{tmp_path}/one.toml", f"{tmp_path}/one.signed", "--key", f"{tmp_path}/key"],
    )
    assert "version 1 of policy" in made.output
    with running(tmp_path, "agent.toml") as process:
        before = wait_for(tmp_path, lambda now: now.samples == 20)
        assert before.settings == "as configured"
        assert "version 1 on trial" in ask(tmp_path, "configure", "one.signed")
        after = wait_for(tmp_path, lambda now: now.settings == "version 1")
        assert (after.policy, after.samples) == ("fifo", 20)
        assert process.poll() is None
        said = ask(tmp_path, "status")
        assert "settings version 1" in said


def test_settings_are_found_where_a_server_puts_them(tmp_path: Path, keys: bytes) -> None:
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "s").write_bytes(sign(FIFO.format(7), keys))
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "served"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        remote = remote_of(tmp_path, url=f"http://127.0.0.1:{server.server_port}/s")
        remote._look()
        assert remote.file.book.trying is not None
        assert remote.file.book.trying.version == 7
        remote._look()
    finally:
        server.shutdown()
        server.server_close()
