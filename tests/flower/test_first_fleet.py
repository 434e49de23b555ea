"""A first fleet's folder: what is written fits together, and only what was started is stopped."""

import json
import os
import socket
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedkeep.agent.assembly import assemble, read_config
from fedkeep.cli.app import app as cli
from fedkeep.cli.fifo_twin import play
from fedkeep.config.experiment import read_experiment
from fedkeep.config.method import parse_fleet
from fedkeep.core.errors import ConfigError
from fedkeep.core.state import snapshot_parts
from fedkeep.deploy import services
from fedkeep.deploy.deployment import Serving
from fedkeep.deploy.first_fleet import FirstFleet
from fedkeep.deploy.local_fleet import free_port
from fedkeep.deploy.services import ServiceStatus, troubles, write_services
from fedkeep.deploy.supervisor import Supervisor, _Process
from fedkeep.flower.server_app import check_specification, fixed_terms, refuse_changes
from fedkeep.flower.state_store import StateStore
from fedkeep.flower.strategy import FedkeepStrategy
from fedkeep.protocol.wire import to_array
from fedkeep.records import read_run
from fedkeep.tables import merged, read_toml


def test_specification_and_devices_fit_each_other(tmp_path: Path) -> None:
    fleet = FirstFleet(tmp_path / "f")
    fleet.create(2)
    spec = parse_fleet(read_toml(fleet.root / "fleet.toml"))
    agents = [read_config(fleet.home(number) / "agent.toml") for number in fleet.devices()]
    assert fleet.devices() == [0, 1]
    for agent in agents:
        assert (agent.samples.shape, agent.samples.labels) == (
            spec.samples.shape,
            spec.samples.labels,
        )
        assert (agent.model, agent.method.policy, agent.preset) == (
            spec.model,
            spec.policy,
            spec.preset,
        )
    assert len({agent.agent.socket for agent in agents}) == 2


def test_init_again_adds_devices_and_changes_nothing_else(tmp_path: Path) -> None:
    fleet = FirstFleet(tmp_path / "f")
    fleet.create(2)
    (fleet.root / "fleet.toml").write_text("# mine")
    key = (fleet.root / "nodes" / "node-0").read_bytes()
    fleet.create(3)
    assert (fleet.root / "fleet.toml").read_text() == "# mine"
    assert (fleet.root / "nodes" / "node-0").read_bytes() == key
    assert fleet.devices() == [0, 1, 2]


def test_a_number_that_another_process_has_now_is_left_alone(tmp_path: Path) -> None:
    fleet = FirstFleet(tmp_path)
    fleet.create(2)
    ours = {"pid": os.getpid(), "born": 1, "restarts": 0, "reason": ""}
    (tmp_path / "processes.json").write_text(json.dumps({"fleet": ours}))
    assert fleet.running() == {}
    assert not fleet.stop()


def test_mistakes_are_told_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fedkeep fleet init"):
        FirstFleet(tmp_path).start(1, 2)
    with pytest.raises(ConfigError, match="there is no fleet in"):
        FirstFleet(tmp_path).stop()
    with pytest.raises(ConfigError, match="too long a path"):
        FirstFleet(tmp_path / ("x" * 120)).create(2)


def test_a_taken_port_is_named_with_its_process_before_anything_starts(tmp_path: Path) -> None:
    fleet = FirstFleet(tmp_path / "f")
    fleet.create(2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"the page, is taken by process {os.getpid()} "):
            fleet.start(free_port(), port)
        with pytest.raises(ConfigError, match=r"the server, is taken by .* --port"):
            fleet.start(port, free_port())
    assert fleet.services() == {}
    assert not (fleet.root / "fleet.log").exists()


def test_more_devices_to_wait_for_than_there_are_is_refused(tmp_path: Path) -> None:
    fleet = FirstFleet(tmp_path / "f")
    fleet.create(2)
    text = fleet.specification.read_text().replace("min_devices = 2", "min_devices = 3")
    fleet.specification.write_text(text)
    with pytest.raises(ConfigError, match="min_devices is 3, and this fleet has 2 devices"):
        fleet.start(free_port(), free_port())


def _saved(fleet: FirstFleet) -> None:
    """Saves a round of the fleet as its server would."""
    spec = parse_fleet(read_toml(fleet.specification))
    strategy = FedkeepStrategy(
        spec.server(), store=StateStore(str(fleet.state), "fleet"), specification=fixed_terms(spec)
    )
    assert strategy.store is not None
    state = snapshot_parts(strategy._parts) | {"specification": to_array(fixed_terms(spec))}
    strategy.store.commit(1, state)


def test_a_changed_specification_is_refused_with_the_command_that_begins_anew(
    tmp_path: Path,
) -> None:
    fleet = FirstFleet(tmp_path / "f")
    fleet.create(2)
    _saved(fleet)
    spec = check_specification(fleet.specification)
    refuse_changes(spec, str(fleet.state), "fleet", "run reset")
    for path in (fleet.specification, *fleet.root.glob("devices/*/agent.toml")):
        path.write_text(path.read_text().replace("labels = 10", "labels = 12"))
    error = CliRunner().invoke(cli, ["fleet", "start", str(fleet.root)]).exception
    assert isinstance(error, ConfigError)
    assert "samples.labels was 10 when this run was saved and is 12 now" in str(error)
    assert f"fedkeep fleet reset {fleet.root}" in str(error)
    assert not (fleet.root / "fleet.log").exists(), "nothing was started"
    aside = fleet.reset()
    assert (aside / "state.db").exists()
    assert not fleet.state.exists()
    refuse_changes(check_specification(fleet.specification), str(fleet.state), "fleet", "")


def test_a_mistake_in_the_specification_is_named_with_its_file(tmp_path: Path) -> None:
    fleet = FirstFleet(tmp_path / "f")
    fleet.create(2)
    text = fleet.specification.read_text()
    fleet.specification.write_text(text.replace("rounds = 100000", "roundz = 3"))
    error = CliRunner().invoke(cli, ["fleet", "start", str(fleet.root)]).exception
    assert isinstance(error, ConfigError)
    assert str(error).startswith(f"{fleet.specification}: unknown key 'train.roundz'")


def test_a_device_that_differs_from_the_fleet_is_named_before_anything_starts(
    tmp_path: Path,
) -> None:
    fleet = FirstFleet(tmp_path / "f")
    fleet.create(2)
    path = fleet.home(1) / "agent.toml"
    path.write_text(path.read_text().replace("labels = 10", "labels = 12"))
    error = CliRunner().invoke(cli, ["fleet", "start", str(fleet.root)]).exception
    assert isinstance(error, ConfigError)
    assert "samples.labels is 10 in" in str(error)
    assert "devices/1/agent.toml" in str(error)


def test_a_supervisor_counts_restarts_and_outlives_a_disk_that_takes_nothing(
    tmp_path: Path,
) -> None:
    fleet = FirstFleet(tmp_path / "f")
    fleet.create(2)
    supervisor = Supervisor(fleet.root, free_port(), free_port())
    ending = _Process(["sh", "-c", "echo Traceback; echo 'fedkeep: no such source'; exit 3"])
    supervisor._processes = {"agent-0": ending}
    supervisor.look()
    supervisor._fleet.processes["agent-0"].wait()
    supervisor.look()
    assert fleet.services()["agent-0"] == ServiceStatus(
        None, 0, "ended with code 3: no such source"
    )
    ending.begun = -1e9  # its pause is over
    folder = fleet.root / "processes.json.new"
    folder.mkdir()  # nothing can be written there now
    with pytest.raises(OSError):  # noqa: PT011 - whichever the system gives
        supervisor.look()
    folder.rmdir()
    supervisor._fleet.processes["agent-0"].wait()
    supervisor.look()
    assert fleet.services()["agent-0"].restarts == 1
    said = CliRunner().invoke(cli, ["fleet", "status", str(fleet.root)]).output
    assert "started again once; it ended with code 3: no such source" in said
    (trouble,) = troubles(fleet.root)
    assert trouble.startswith("agent-0 does not run and was started again once: it ended with")


def test_restarts_by_the_server_are_in_status_and_on_the_page_and_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = FirstFleet(tmp_path / "f")
    fleet.create(2)
    supervisor = Supervisor(fleet.root, free_port(), free_port())
    supervisor._processes = {"server": _Process(["sleep", "60"])}
    with supervisor._fleet:
        supervisor.look()
        server = supervisor._fleet.processes["server"].pid
        deployment = supervisor._fleet.deployment
        deployment.note_serving(Serving(1, os.getpid(), 5))  # of a server that was before
        supervisor.look()
        assert "superlink" not in fleet.services()
        noted = Serving(server, os.getpid(), 2, "was killed by signal 9", 1, "finished:failed")
        deployment.note_serving(noted)
        supervisor.look()
        supervisor.look()
        said = CliRunner().invoke(cli, ["fleet", "status", str(fleet.root)]).output
        assert troubles(fleet.root) == (
            "superlink was started again 2 times: it was killed by signal 9",
            "run was started again once: it ended as: finished:failed",
        )
    assert "started again 2 times; it was killed by signal 9" in said
    assert "started again once; it ended as: finished:failed" in said
    assert caplog.text.count("the superlink was killed by signal 9, and is started again") == 1
    assert caplog.text.count("the run ended as: finished:failed, and is resumed") == 1


def test_troubles_are_what_does_not_run_what_was_started_again_and_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = os.getpid()
    statuses = {
        "fleet": ServiceStatus(alive),
        "agent-0": ServiceStatus(alive, 3, "was killed by signal 9"),
        "agent-1": ServiceStatus(None, 0, "ended with code 2: no such file"),
    }
    write_services(tmp_path, statuses)
    assert troubles(tmp_path) == (
        "agent-0 was started again 3 times: it was killed by signal 9",
        "agent-1 does not run: it ended with code 2: no such file",
    )
    write_services(tmp_path, {"fleet": ServiceStatus(None), "agent-1": ServiceStatus(None)})
    assert troubles(tmp_path) == (), "a fleet that was stopped has none"
    monkeypatch.setattr(services, "_LOW_DISK_BYTES", 1 << 62)
    (full,) = troubles(tmp_path)
    assert full.startswith("The disk is full: ")


def test_a_twin_plays_fifo_as_far_as_the_fleet_has_come(tmp_path: Path) -> None:
    fleet = FirstFleet(tmp_path / "f")
    fleet.create(2)
    table = merged(
        read_experiment(fleet.twin), {"task": {"devices": 2}, "storage": {"capacity": 12}}
    )
    record = tmp_path / "fifo.jsonl"
    rounds = iter([3, 20, None])
    play(table, record, lambda: next(rounds))
    run = read_run(record)
    assert [line.round for line in run.evaluations] == list(range(1, 21))
    assert (run.header.method, run.header.task, run.header.devices) == (
        "fifo, simulated",
        "fleet",
        2,
    )
    first, last = run.evaluations[0].accuracy, run.evaluations[-1].accuracy
    assert first is not None
    assert last is not None
    assert last > first + 0.2


def test_the_demo_is_scarce_and_is_tested_on_samples_that_are_never_trained_on(
    tmp_path: Path,
) -> None:
    fleet = FirstFleet(tmp_path / "f")
    fleet.create(2)
    config = read_config(fleet.home(0) / "agent.toml")
    agent = assemble(config)
    assert 10 <= agent.device.profile().capacity <= 20, "of ten labels, and 363 distinct samples"
    with np.load(fleet.home(0) / "held_out.npz", allow_pickle=False) as arrays:
        assert arrays["x"].shape[1:] == (30,)
        assert len(arrays["x"]) == len(arrays["y"]) > 50
