"""The server's memory holds whole rounds only, in SQLite and in a real PostgreSQL."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fedkeep.core.errors import ConfigError, DataError, RejectedError
from fedkeep.core.types import State
from fedkeep.flower.state_store import StateStore


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """A PostgreSQL server on its own Unix socket; it refuses root, so root uses another user."""
    if not (shutil.which("postgres") and shutil.which("initdb")):
        pytest.skip("no PostgreSQL binaries (postgres, initdb) on PATH")
    pytest.importorskip("psycopg", reason="needs the postgres extra")
    with tempfile.TemporaryDirectory(prefix="fedkeep-pg-") as name:
        home = Path(name)
        demote: list[str] = []
        if os.geteuid() == 0:
            if not shutil.which("setpriv"):
                pytest.skip(
                    "PostgreSQL refuses root, and there is no setpriv to become another user"
                )
            os.chown(home, 65534, 65534)
            demote = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        data = home / "data"
        made = subprocess.run(
            [*demote, "initdb", "-D", data, "-U", "fedkeep", "-A", "trust", "-N"],
            capture_output=True,
            check=False,
            cwd=home,
        )
        if made.returncode:
            pytest.skip(f"initdb failed here: {made.stderr.decode()[-200:]}")
        quiet = ["-c", "listen_addresses=", "-c", "unix_socket_permissions=0777"]
        server = subprocess.Popen(
            [*demote, "postgres", "-D", data, "-k", home, *quiet],
            cwd=home,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            _wait_for(home / ".s.PGSQL.5432", server)
            home.chmod(0o755)
            yield f"postgresql://fedkeep@/postgres?host={home}"
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(timeout=120)


def _wait_for(path: Path, server: subprocess.Popen[bytes]) -> None:
    import psycopg

    end = time.monotonic() + 120
    while time.monotonic() < end and server.poll() is None:
        try:
            psycopg.connect(f"host={path.parent} user=fedkeep dbname=postgres").close()
        except psycopg.OperationalError:
            time.sleep(0.1)
        else:
            return
    pytest.skip("PostgreSQL did not come up here")


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/state/server.db"
    return str(request.getfixturevalue("postgres"))


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    return str(request.node.nodeid)


def _state(round_: int, devices: int = 5) -> State:
    rng = np.random.default_rng(round_)
    state: State = {f"kept/{d}": rng.normal(size=(3, 2)).astype(np.float32) for d in range(devices)}
    state |= {
        "model": rng.normal(size=7).astype(np.float32),
        "round": np.array(round_),
        "names": np.array(["a", "é"]),
    }
    state["large"] = np.arange(200_000, dtype=np.float32)
    state["large"][round_] = -1
    state |= {"empty": np.zeros((0, 3)), "nan": np.array([np.nan, -0.0, np.inf])}
    return state


def _same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and a[k].tobytes() == b[k].tobytes()
        for k in a
    )


def test_a_new_run_has_no_state(url: str, run: str) -> None:
    assert StateStore(url, run).load() is None


def test_the_last_round_comes_back_bit_for_bit(url: str, run: str) -> None:
    store = StateStore(url, run)
    for round_ in range(4):
        store.commit(round_, _state(round_, devices=5 - round_))
    saved = StateStore(url, run).load()
    assert saved is not None
    assert saved.round == 3
    assert _same(saved.state, _state(3, devices=2))


def test_runs_do_not_see_each_other(url: str, run: str) -> None:
    StateStore(url, run + "/a").commit(0, _state(1))
    StateStore(url, run + "/b").commit(5, _state(2))
    first = StateStore(url, run + "/a").load()
    assert first is not None
    assert (first.round, _same(first.state, _state(1))) == (0, True)


def test_a_second_server_ends_the_first(url: str, run: str) -> None:
    old = StateStore(url, run)
    old.commit(0, _state(0))
    new = StateStore(url, run)
    new.load()
    new.commit(1, _state(1))
    with pytest.raises(RejectedError, match="another server"):
        old.commit(1, _state(9))
    saved = StateStore(url, run).load()
    assert saved is not None
    assert _same(saved.state, _state(1))


def test_a_new_run_does_not_overwrite_a_saved_one(url: str, run: str) -> None:
    StateStore(url, run).commit(3, _state(3))
    with pytest.raises(RejectedError, match="another server"):
        StateStore(url, run).commit(0, _state(0))


def test_a_failed_commit_leaves_the_round_before(url: str, run: str) -> None:
    store = StateStore(url, run)
    store.commit(0, _state(0))
    with pytest.raises(DataError, match="plain arrays"):
        store.commit(1, _state(1) | {"object": np.array([object()])})
    store.commit(1, _state(1))
    saved = StateStore(url, run).load()
    assert saved is not None
    assert saved.round == 1


def test_damage_is_noticed(tmp_path: Path) -> None:
    import sqlite3

    StateStore(str(tmp_path / "s.db"), "r").commit(0, _state(0))
    with sqlite3.connect(tmp_path / "s.db") as raw:
        raw.execute("UPDATE fedkeep_chunks SET data = zeroblob(length(data)) WHERE name = 'model'")
    raw.close()
    with pytest.raises(DataError, match="'model' is damaged"):
        StateStore(str(tmp_path / "s.db"), "r").load()


@pytest.mark.parametrize(
    "bad", ["mysql://u:secret@h/d", "nonsense://x", "postgresql://u:secret@/d?host=/nowhere"]
)
def test_a_wrong_url_is_one_sentence_without_its_password(bad: str) -> None:
    with pytest.raises(ConfigError, match="state") as refused:
        StateStore(bad, "r")
    assert "secret" not in str(refused.value)


_WRITER = """
import sys
import numpy as np
from fedkeep.flower.state_store import StateStore
store = StateStore(sys.argv[1], "run")
saved = store.load()
round_ = 0 if saved is None else saved.round + 1
while True:
    whole = {f"kept/{d}": np.full((40, 50), round_, np.float32) for d in range(20)}
    store.commit(round_, whole)
    print(round_, flush=True)
    round_ += 1
"""


def test_kill_nine_leaves_whole_rounds(tmp_path: Path) -> None:
    """Every acknowledged round is there, and no round is there by halves."""
    rng = np.random.default_rng(0)
    url = str(tmp_path / "state.db")
    acknowledged = -1
    for _ in range(int(os.environ.get("FEDKEEP_KILLS", "6"))):
        with subprocess.Popen(
            [sys.executable, "-c", _WRITER, url], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            acknowledged = int(writer.stdout.readline())
            time.sleep(float(rng.uniform(0, 0.05)))
            writer.kill()
            acknowledged = max([acknowledged, *map(int, writer.stdout.read().split())])
        saved = StateStore(url, "run").load()
        assert saved is not None
        assert acknowledged <= saved.round <= acknowledged + 1
        assert all((array == saved.round).all() for array in saved.state.values())
