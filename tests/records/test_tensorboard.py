"""Event files hold what the records hold."""

import struct
import sys
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event
from typer.testing import CliRunner

import fedkeep
from fedkeep.cli.app import app
from fedkeep.core.errors import DataError, MissingExtraError
from fedkeep.records import read_runs
from fedkeep.records.tensorboard import write_events


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    experiment = {
        "task": {"name": "demo", "devices": 4},
        "train": {"rounds": 4, "participation": 1.0},
        "record": {"every": 2},
        "methods": ["fifo", "default"],
        "sweep": {"storage.capacity": [3]},
    }
    out = tmp_path_factory.mktemp("runs")
    fedkeep.simulate(experiment, out=out, jobs=1, progress=False)
    return out


def scalars(folder: Path) -> dict[tuple[str, int], float]:
    """Read the one event file of a folder: records of length, checksum, event, checksum."""
    (file,) = folder.glob("events.out.tfevents.*")
    data = file.read_bytes()
    found: dict[tuple[str, int], float] = {}
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event = Event.FromString(data[12 : 12 + length])
        found |= {(v.tag, event.step): v.simple_value for v in event.summary.value}
        data = data[16 + length :]
    return found


def test_every_number_of_the_records_is_there(folder: Path, tmp_path: Path) -> None:
    runs = read_runs(folder)
    for run, written in zip(runs, write_events(runs, tmp_path / "tb"), strict=True):
        values = scalars(written)
        assert written.name == "seed-0"
        assert {step for _, step in values} == {e.round for e in run.evaluations}
        last = run.evaluations[-1]
        assert values["accuracy", 4] == pytest.approx(last.accuracy)
        assert values["bytes_up", 4] == last.bytes_up
        assert values[f"recall/{run.header.labels[0]}", 4] == pytest.approx(last.label_recall[0])


def test_the_command_line_writes_them_once(folder: Path, tmp_path: Path) -> None:
    command = ["report", str(folder), "--tensorboard", str(tmp_path)]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert len(list(tmp_path.rglob("events.out.*"))) == 2
    error = CliRunner().invoke(app, command).exception
    assert isinstance(error, DataError)
    assert "holds event files already: name another directory" in str(error)


def test_without_the_extra_a_sentence_names_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(MissingExtraError, match=r"fedkeep\[tensorboard\]"):
        write_events(read_runs(folder), tmp_path)
