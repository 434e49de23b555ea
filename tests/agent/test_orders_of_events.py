"""Several things at once, on real processes: what each of them promises alone holds together."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fedkeep.agent.cells import cipher_of
from fedkeep.agent.pacing import CommitPacer
from fedkeep.agent.store_file import find_label
from fedkeep.agent.store_moves import rekey
from fedkeep.core.errors import FedkeepError, RejectedError
from fedkeep.protocol.client import AgentClient
from fedkeep.protocol.framing import receive_frame, send_frame
from fedkeep.protocol.messages import Erase
from tests.agent.builders import feed, make_agent
from tests.agent.test_agent_process import running, start, wait_until_ready, write_config
from tests.agent.test_agent_promises import eventually, full_disk, held, save
from tests.agent.test_sources import _connect

SECRET = 1.2345678
"""A number that is found in the file for as long as its sample is."""


def client(folder: Path) -> AgentClient:
    return AgentClient(str(folder / "a.sock"))


def send(sender: Any, id_: object, value: float = SECRET, label: int = 0) -> None:
    send_frame(sender, msgspec.msgpack.encode({"x": [value] * 6, "y": label, "id": id_}))


def fate(sender: Any) -> str:
    return str(msgspec.msgpack.decode(receive_frame(sender) or b"")["fate"])


def is_in_file(folder: Path, value: float = SECRET) -> bool:
    return np.full(6, value, np.float32).tobytes() in (folder / "a.store").read_bytes()


@pytest.mark.parametrize("end", ["recovers", signal.SIGKILL, signal.SIGTERM])
def test_an_erasure_on_a_full_disk_is_refused_and_can_be_repeated(tmp_path: Path, end: Any) -> None:
    write_config(tmp_path, f'[[source]]\nkind = "socket"\naddress = "unix://{tmp_path}/in"\n')
    process = start(tmp_path, "agent.toml")
    wait_until_ready(tmp_path, process)
    sender = _connect(f"unix://{tmp_path}/in")
    for id_ in range(40):
        send(sender, id_, SECRET if id_ == 7 else float(id_), id_ % 3)
    assert {fate(sender) for _ in range(40)} == {"kept"}
    assert is_in_file(tmp_path)
    with full_disk(process):
        for id_ in range(40, 50):
            send(sender, id_, float(id_), id_ % 3)
        with client(tmp_path) as agent, pytest.raises(RejectedError, match="nothing was erased"):
            agent.erase(Erase(id="7"))
        if end != "recovers":
            process.send_signal(end)
            process.wait(120)
    names = [str(id_) for id_ in range(40)]
    if end != "recovers":
        process.communicate()
        sender.close()
        process = start(tmp_path, "agent.toml")
        wait_until_ready(tmp_path, process)
        sender = _connect(f"unix://{tmp_path}/in")
    else:
        assert {fate(sender) for _ in range(10)} == {"kept"}
    assert held(tmp_path, names) == 40
    with client(tmp_path) as agent:
        assert agent.erase(Erase(id="7")) == 1
    assert not is_in_file(tmp_path)
    send(sender, 7)
    assert fate(sender) == "refused.erased"
    sender.close()
    process.kill()
    process.communicate()
    with running(tmp_path, "agent.toml"):
        assert held(tmp_path, names) == 39
        sender = _connect(f"unix://{tmp_path}/in")
        send(sender, 7)
        assert fate(sender) == "refused.erased"
        sender.close()
    assert not is_in_file(tmp_path)


def test_a_move_to_another_budget_may_be_killed_at_any_time(tmp_path: Path) -> None:
    more = f'[[source]]\nkind = "socket"\naddress = "unix://{tmp_path}/in"\n'
    config = write_config(tmp_path, more)
    with running(tmp_path, "agent.toml"):
        sender = _connect(f"unix://{tmp_path}/in")
        for id_ in range(120):
            send(sender, id_, float(id_), id_ % 3)
        assert {fate(sender) for _ in range(120)} == {"kept"}
        sender.close()
        with client(tmp_path) as agent:
            assert agent.erase(Erase(id="7")) == 1
    names = [str(id_) for id_ in range(120)]
    text = config.read_text()
    for turn in range(12):
        budget = (800_000, 200_000, 4_000_000)[turn % 3]
        config.write_text(text.replace("budget = 200_000", f"budget = {budget}"))
        process = start(tmp_path, "agent.toml")
        time.sleep(0.35 + 0.04 * turn)
        process.kill()
        process.communicate()
    config.write_text(text)
    with running(tmp_path, "agent.toml"):
        assert held(tmp_path, names) == 119
    assert not is_in_file(tmp_path, 7.0)
    assert (tmp_path / "a.store").stat().st_size <= 200_000
    assert [path.name for path in tmp_path.glob("a.store*")] == ["a.store"]


_before_open: list[Callable[[], None]] = []
"""What happens once, right before a store is opened to be written."""


def _on_event(event: str, about: tuple[Any, ...]) -> None:
    if event != "open" or not _before_open:
        return
    path, _, flags = about
    if str(path).endswith("a.store") and (flags or 0) & os.O_RDWR:
        _before_open.pop()()


def test_a_store_that_gets_another_key_while_an_agent_opens_it_is_left_alone(
    tmp_path: Path,
) -> None:
    assembly = make_agent(tmp_path, store={"budget": 150_000})
    feed(assembly.agent, 0, 40)
    assembly.disk.close()
    path, key = tmp_path / "a.store", tmp_path / "key"
    key.touch(0o600)
    key.write_text("ab" * 32)
    label, _ = find_label(path, None)

    def change() -> None:
        rekey(path, label, None, cipher_of(key, None))

    sys.addaudithook(_on_event)  # there is no way to take it back: it waits for the list
    _before_open.append(change)
    with pytest.raises(FedkeepError, match=r"is encrypted|was changed while it was opened"):
        make_agent(tmp_path, store={"budget": 150_000})
    assert not _before_open
    again = make_agent(tmp_path, store={"budget": 150_000, "key_file": str(key)})
    assert again.agent.store.records.keys() == set(range(40))
    again.disk.close()


@pytest.mark.parametrize("shared", [True, False])
def test_an_id_of_two_sources_is_erased_where_it_was_meant(tmp_path: Path, shared: bool) -> None:
    space = 'namespace = "both"\n' if shared else ""
    more = "".join(
        f'[[source]]\nkind = "socket"\nname = "{name}"\naddress = "unix://{tmp_path}/{name}"\n{space}'
        for name in ("mill", "pump")
    )
    write_config(tmp_path, more)
    with running(tmp_path, "agent.toml"):
        mill, pump = (_connect(f"unix://{tmp_path}/{name}") for name in ("mill", "pump"))
        send(mill, 5)
        assert fate(mill) == "kept"
        send(pump, 5, 2.0)
        assert fate(pump) == ("refreshed" if shared else "kept")
        with client(tmp_path) as agent:
            assert agent.erase(Erase(id="5", source="mill")) == 1
            assert agent.why("5").stored is not shared
        for sender, again in (
            (mill, "refused.erased"),
            (pump, "refused.erased" if shared else "refreshed"),
        ):
            send(sender, 5)
            assert fate(sender) == again
        mill.close()
        pump.close()
    assert not is_in_file(tmp_path)


CLOCKS = """
import json, sys, time
from pathlib import Path
shift = json.loads(Path("clock.json").read_text())
real, get = time.time, time.clock_gettime
time.time = lambda: real() + shift["wall"]
time.clock_gettime = lambda which: get(which) + (
    shift["boot"] if which == time.CLOCK_BOOTTIME else 0.0
)
from fedkeep.agent import retention
Path("boot_id").write_text(shift["name"])
retention.AgeClock.__init__.__defaults__ = (
    *retention.AgeClock.__init__.__defaults__[:3], Path("boot_id")
)
from fedkeep.agent.__main__ import main
sys.exit(main(["agent.toml"]))
"""


def test_a_clock_that_is_set_back_delays_no_removal_over_restarts(tmp_path: Path) -> None:
    more = f'[[source]]\nkind = "socket"\naddress = "unix://{tmp_path}/in"\n'
    config = write_config(tmp_path, more)
    text = config.read_text().replace("budget = 200_000", "budget = 200_000\nttl_days = 3.0")
    config.write_text(text)
    day, clock = 86_400.0, tmp_path / "clock.json"
    # Days by the wall and by the boot-time clock, the boot, and whether the sample is still there.
    for number, (wall, boot, name, there) in enumerate(
        (
            (0.0, 0.0, "one", True),
            (-10.0, 0.5, "one", True),  # set back by ten days and a half
            (-8.5, 2.0, "one", True),
            (-7.9, 2.6, "one", True),
            (-7.4, 3.1, "one", False),
        )
    ):
        clock.write_text(json.dumps({"wall": wall * day, "boot": boot * day, "name": name}))
        with running(tmp_path, entry=("-c", CLOCKS)) as process:
            if not number:
                sender = _connect(f"unix://{tmp_path}/in")
                send(sender, 5)
                assert fate(sender) == "kept"
                sender.close()
            assert held(tmp_path, ["5"]) == there, number
            process.kill()
        assert is_in_file(tmp_path) == there


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_folder_waits_while_the_days_writes_are_spent(tmp_path: Path, end: Any) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    more = f'queue = 64\n[[source]]\nkind = "folder"\npath = "{folder}"\n'
    config = write_config(tmp_path, more)
    text = config.read_text()
    # A megabyte at once, and then nothing that a test would live to see.
    config.write_text(text.replace("budget = 200_000", "budget = 4_000_000\ndaily_writes = 1000"))
    for number in range(12):
        save(folder, f"{number:02}.npz", range(1000 * number, 1000 * (number + 1)), number % 3)
    with running(tmp_path, "agent.toml") as process:
        with client(tmp_path) as agent:
            assert eventually(lambda: agent.status().waiting)
            assert agent.status().waiting == "[store] daily_writes allows no more for now"
            counters = agent.status().counters
        left = sorted(folder.glob("*.npz"))
        assert left
        assert "skipped.sample" not in counters
        process.send_signal(end)
        process.communicate(timeout=120)
        assert process.returncode == (0 if end == signal.SIGTERM else -end)
    # What an agent that ends still took is counted at its end.
    left = sorted(folder.glob("*.npz"))
    assert left
    with running(tmp_path, "agent.toml"), client(tmp_path) as agent:
        gone = [f"{1000 * n}" for n in range(12) if not (folder / f"{n:02}.npz").exists()]
        assert all(agent.why(name).decisions or agent.why(name).stored for name in gone[-1:])
        assert eventually(lambda: agent.status().waiting), "a restart does not fill the bucket"
        assert sorted(folder.glob("*.npz")) == left
    config.write_text(text.replace("budget = 200_000", "budget = 4_000_000"))
    with running(tmp_path, "agent.toml"), client(tmp_path) as agent:
        assert eventually(lambda: not list(folder.glob("*.npz")))
        counters = agent.status().counters
        fates = ("kept", "replaced", "refused.score", "refreshed")
        assert sum(counters.get(name, 0) for name in fates) >= 12_000


def test_debts_outlive_a_process_and_savings_do_not() -> None:
    now, wall, written = [0.0], [1.8e9], [0]

    def pacer() -> CommitPacer:
        return CommitPacer(0.1, 86_400_000, lambda: written[0], lambda: now[0], lambda: wall[0])

    one = pacer()  # 1,000 bytes a second, 3.6 million at once
    written[0] += 3_700_000
    assert one.exhausted()
    other = pacer()
    other.restore(one.snapshot())
    assert other.exhausted()
    wall[0] += 101.0
    other.restore(one.snapshot() | {"bucket": np.array([-100_000.0, wall[0] - 101.0])})
    assert not other.exhausted()
    written[0] += 1_001
    assert other.exhausted()
    rich = pacer()
    heir = pacer()
    heir.restore(rich.snapshot())
    assert not heir.exhausted()
    written[0] += 1
    assert heir.exhausted()


@pytest.mark.parametrize("name_bytes", [0, 24])
def test_a_damaged_store_that_lost_its_namespace_is_not_taken_for_an_older_one(
    tmp_path: Path, name_bytes: int
) -> None:
    agent, disk = make_agent(tmp_path, store={"name_bytes": name_bytes})
    feed(agent, 0, 20)
    state = agent.store.load(agent.store.file.reload())
    left = {name: array for name, array in state.items() if not name.startswith("ids.")}
    agent.restore(left, damaged=True)
    assert agent.ids.earlier is (name_bytes == 0)
    disk.close()


def test_a_file_deleted_while_the_disk_is_full_ends_no_agent(tmp_path: Path) -> None:
    write_config(tmp_path, f'[[source]]\nkind = "socket"\naddress = "unix://{tmp_path}/in"\n')
    with running(tmp_path, "agent.toml") as process:
        sender = _connect(f"unix://{tmp_path}/in")
        for id_ in range(10):
            send(sender, id_, float(id_), id_ % 3)
        assert {fate(sender) for _ in range(10)} == {"kept"}
        with full_disk(process):
            (tmp_path / "a.store").unlink()
            for id_ in range(10, 20):
                send(sender, id_, float(id_), id_ % 3)
            with client(tmp_path) as agent:
                assert eventually(lambda: bool(agent.status().waiting))
            assert not list(tmp_path.glob("a.store*")), "nothing is left of what had no room"
        assert {fate(sender) for _ in range(10)} == {"kept"}
        sender.close()
        assert (tmp_path / "a.store").exists()
        process.kill()
        process.communicate()
    with running(tmp_path, "agent.toml"):
        assert held(tmp_path, [str(id_) for id_ in range(20)]) == 20
