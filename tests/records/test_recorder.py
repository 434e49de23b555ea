"""A run's file: it reads back, a resumed run gives the same bytes, a torn line does no harm."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedkeep.core.errors import DataError
from fedkeep.records import (
    Change,
    DeviceLine,
    End,
    Evaluation,
    Header,
    HoldingsLine,
    Line,
    PlanLine,
    PrivacyLine,
    Recorder,
    Round,
    Slot,
    Timing,
    read_run,
    read_runs,
)
from fedkeep.records.lines import decode, encode
from fedkeep.records.runs import Tail, timing_path

HEADER = Header(
    run="ode-0",
    method="ode",
    task="synthetic",
    seed=0,
    config={"train": {"rounds": 3}, "policy": {"name": "ode"}},
    config_hash="abc",
    versions={"fedkeep": "0.1.0"},
    labels=("a", "b"),
    devices=2,
    rounds=3,
)

ALL_KINDS: list[Line] = [
    HEADER,
    PlanLine(round=0, devices=(0, 1), quotas=((1, 0), (1, 1)), holders=(2, 1), wanted=(2, 2)),
    Round(
        round=1,
        participants=(1,),
        arrivals=4,
        kept=2,
        refused_reports={"non-finite": 1},
        staleness=0.5,
    ),
    HoldingsLine(round=1, devices=(0, 1), filled=((0, 0), (1, 1))),
    DeviceLine(
        round=1,
        device=1,
        capacity=2,
        slots=(Slot(id=7, label=0, score=0.1, age=3, uses=1, thumbnail="AAAA"),),
        changes=(Change(id=7, label=0, score=0.1, fate="replaced", displaced=3),),
    ),
    PrivacyLine(round=1, epsilon_spent=0.5, epsilon_left=None, delta=1e-5),
    Evaluation(round=1, accuracy=0.1 + 0.2, loss=2.3, device_accuracy=(0.1, None)),
    End(round=1, digest="ff"),
]


def write(path: Path, *lines: Line) -> None:
    with Recorder(path) as recorder:
        for line in lines:
            recorder.write(line)


def test_every_kind_reads_back_as_written(tmp_path: Path) -> None:
    write(tmp_path / "run.jsonl", *ALL_KINDS, Timing(round=1, seconds=2.5))
    run = read_run(tmp_path / "run.jsonl")
    assert list(run.lines) == ALL_KINDS
    assert run.timings == (Timing(round=1, seconds=2.5),)
    assert run.end == ALL_KINDS[-1]


def test_the_clock_stays_out_of_the_run_file(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write(path, HEADER)
    before = path.read_bytes()
    write(path, Timing(round=0, seconds=1.0))
    assert path.read_bytes() == before


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_read_back_exactly(value: float) -> None:
    line = decode(encode(Evaluation(round=1, accuracy=value, loss=None)))
    assert isinstance(line, Evaluation)
    assert line.accuracy == value


def test_numbers_that_are_none_become_null_and_numpy_becomes_plain() -> None:
    filled = np.array([[1, 2]])
    line = decode(encode(HoldingsLine(round=np.int64(3), devices=np.arange(1), filled=filled)))  # type: ignore[arg-type]
    assert line == HoldingsLine(round=3, devices=(0,), filled=((1, 2),))
    diverged = decode(encode(Evaluation(round=1, accuracy=np.float32(0.5), loss=float("nan"))))  # type: ignore[arg-type]
    assert diverged == Evaluation(round=1, accuracy=0.5, loss=None)


def test_key_order_in_a_config_does_not_change_the_bytes() -> None:
    one = encode(HEADER)
    turned = {"policy": {"name": "ode"}, "train": {"rounds": 3}}
    assert (
        encode(
            Header(**{f: getattr(HEADER, f) for f in HEADER.__struct_fields__} | {"config": turned})
        )
        == one
    )


def evaluations(first: int, last: int) -> list[Line]:
    return [Evaluation(round=r, accuracy=r / 100, loss=1 / r) for r in range(first, last + 1)]


@given(stop=st.integers(0, 9), written=st.integers(0, 9), torn=st.binary(max_size=20))
def test_a_resumed_run_gives_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, stop: int, written: int, torn: bytes
) -> None:
    checkpoint = min(stop, written)
    whole = tmp_path_factory.mktemp("runs") / "whole.jsonl"
    resumed = whole.with_name("resumed.jsonl")
    write(whole, HEADER, *evaluations(1, 10), End(round=10, digest="d"))
    write(resumed, HEADER, *evaluations(1, written))
    with resumed.open("ab") as file:
        file.write(torn.replace(b"\n", b""))
    with Recorder(resumed) as recorder:
        recorder.truncate_after(checkpoint)
        for line in [*evaluations(checkpoint + 1, 10), End(round=10, digest="d")]:
            recorder.write(line)
    assert resumed.read_bytes() == whole.read_bytes()


def test_resuming_a_finished_run_takes_its_end_away(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write(path, HEADER, *evaluations(1, 2), End(round=2, digest="d"), Timing(round=1, seconds=1.0))
    with Recorder(path) as recorder:
        recorder.truncate_after(2)
        recorder.write(Timing(round=3, seconds=2.0))
        recorder.truncate_after(0)
    run = read_run(path)
    assert run.end is None
    assert run.lines == (HEADER,)
    assert run.timings == ()


def test_starting_again_discards_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run.jsonl"
    write(path, HEADER, *evaluations(1, 2), Timing(round=1, seconds=1.0))
    with Recorder(path) as recorder:
        recorder.start(HEADER)
    assert read_run(path).lines == (HEADER,)
    assert timing_path(path).read_bytes() == b""


def test_a_writer_killed_at_any_moment_leaves_a_readable_run(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write(path, HEADER)
    script = textwrap.dedent("""
        import itertools, pathlib, sys
        from fedkeep.records import Evaluation, Recorder
        recorder = Recorder(pathlib.Path(sys.argv[1]))
        parts = (0.5,) * 500
        for r in itertools.count(1):
            recorder.write(Evaluation(round=r, accuracy=0.5, loss=1.0, device_accuracy=parts))
            print(r, flush=True)
    """)
    source = str(Path(__file__).parents[2] / "src")
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": source},
    ) as writer:
        assert writer.stdout is not None
        while int(writer.stdout.readline()) < 50:
            pass
        writer.send_signal(signal.SIGKILL)
        writer.stdout.read()
    rounds = [line.round for line in read_run(path).evaluations]
    assert rounds == list(range(1, len(rounds) + 1))
    assert len(rounds) >= 50


def test_what_a_newer_version_wrote_is_read_as_far_as_it_is_known(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with path.open("w") as file:  # by another program, which knows of no checksums
        file.write(json.dumps(msgspec.to_builtins(HEADER)) + "\n")
        file.write(json.dumps({"kind": "weather", "round": 1, "sky": "blue"}) + "\n")
        file.write(
            json.dumps({"kind": "evaluation", "round": 1, "accuracy": 0.5, "loss": 1, "new": []})
            + "\n"
        )
    assert read_run(path).lines == (HEADER, Evaluation(round=1, accuracy=0.5, loss=1.0))


@pytest.mark.parametrize(
    "bad",
    [
        b"{}",
        b"nonsense",
        b'{"kind": "evaluation", "round": "one"}',
        b'{"kind": "round", "x": "\xff"}',
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "run.jsonl"
    write(path, HEADER)
    with path.open("ab") as file:
        file.write(bad + b"\n")
    with pytest.raises(DataError, match=r"run\.jsonl, line 2"):
        read_run(path)


def test_no_flipped_bit_goes_unnoticed(tmp_path: Path) -> None:
    path, damaged = tmp_path / "run.jsonl", tmp_path / "damaged.jsonl"
    write(path, *ALL_KINDS)
    clean, raw = read_run(path).lines, path.read_bytes()
    for place in range(len(raw)):
        flipped = bytearray(raw)
        flipped[place] ^= 1 << place % 8
        damaged.write_bytes(flipped)
        try:
            found = read_run(damaged).lines
        except DataError:
            continue
        torn = not flipped.endswith(b"\n")
        assert found == (clean[:-1] if torn else clean), place


def test_a_directory_without_runs_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a directory"):
        read_runs(tmp_path / "missing")
    (tmp_path / "other.jsonl").write_text('{"event": "login"}\n')
    (tmp_path / "torn.jsonl").write_bytes(encode(HEADER))
    with pytest.raises(DataError, match="no runs in"):
        read_runs(tmp_path)
    with pytest.raises(DataError, match="not the record of a run"):
        read_run(tmp_path / "torn.jsonl")
    with pytest.raises(DataError, match="cannot read"):
        read_run(tmp_path / "absent.jsonl")


def test_runs_are_found_in_subdirectories_in_order(tmp_path: Path) -> None:
    for name in ["b/two", "a/one"]:
        write(tmp_path / f"{name}.jsonl", HEADER)
    assert [run.path.stem for run in read_runs(tmp_path)] == ["one", "two"]


def test_a_record_that_cannot_be_written_is_reported_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot write the run's record"):
        Recorder(tmp_path / "file" / "run.jsonl")


def test_a_record_has_one_writer_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with Recorder(path) as first:
        first.start(HEADER)
        with pytest.raises(DataError, match=r"run\.jsonl is being written by another process"):
            Recorder(path)
    with Recorder(path) as second:
        second.write(Evaluation(round=1, accuracy=0.5, loss=1.0))
    assert read_run(path).lines == (HEADER, Evaluation(round=1, accuracy=0.5, loss=1.0))


def test_a_tail_gives_each_whole_line_once(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write(path, HEADER)
    tail = Tail(path)
    assert tail.read() == (False, [encode(HEADER)])
    assert tail.read() == (False, [])
    line = encode(Evaluation(round=1, accuracy=0.5, loss=1.0))
    with path.open("ab") as file:
        file.write(line[:10])
        file.flush()
        assert tail.read() == (False, [])
        file.write(line[10:] + b"\n")
    assert tail.read() == (False, [line])


def test_a_tail_notices_a_cut_and_a_new_beginning(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write(path, HEADER, *evaluations(1, 3))
    tail = Tail(path)
    tail.read()
    with Recorder(path) as recorder:
        recorder.truncate_after(1)
        assert tail.read() == (True, [encode(HEADER), *map(encode, evaluations(1, 1))])
        other = Header(**{f: getattr(HEADER, f) for f in HEADER.__struct_fields__} | {"seed": 9})
        recorder.start(other)
        for again in evaluations(1, 9):
            recorder.write(again)
    assert tail.read() == (True, [encode(other), *map(encode, evaluations(1, 9))])
