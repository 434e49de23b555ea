"""`fedkeep agent store` on files: sound, damaged, encrypted, encoded, foreign."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedkeep.agent import cells
from fedkeep.agent.agent import Agent
from fedkeep.agent.arrivals import Arrival
from fedkeep.cli.agent_store import inspect
from fedkeep.cli.agent_store import store as commands
from fedkeep.core.errors import ConfigError
from tests.agent.builders import LABELS, SHAPE, AssembledAgent, feed, make_agent, order


def ask(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(commands, [str(argument) for argument in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def filled(folder: Path, **tables: Any) -> tuple[Path, dict[int, np.ndarray]]:
    assembly = make_agent(folder, **tables)
    feed(assembly.agent, 0, 30)
    held = assembly.agent.store.stored().batch
    assembly.disk.close()
    return folder / "a.store", dict(zip(held.ids.tolist(), held.x, strict=True))


def test_check_and_show(tmp_path: Path) -> None:
    path, _ = filled(tmp_path)
    code, said = ask("check", path)
    assert (code, "30 samples of float32 [6], 3 labels" in said, "sound" in said) == (0, True, True)
    assert "label 0: 10, label 1: 10, label 2: 10" in ask("show", path)[1]
    image = path.read_bytes()
    assert path.read_bytes() == image


def test_repair(tmp_path: Path) -> None:
    path, held = filled(tmp_path)
    label, geometry = inspect(path).label, inspect(path).label.geometry
    image = bytearray(path.read_bytes())
    for half in (0, 1):
        for copy in (0, 1):
            image[geometry.root(half, copy) + 9] ^= 4
    image[20] ^= 1
    path.write_bytes(image)
    code, said = ask("check", path)
    assert code == 1
    assert "no root is whole" in said
    assert path.read_bytes() == bytes(image)
    assert "30 samples are left" in ask("repair", path)[1]
    assert ask("check", path)[0] == 0
    assert inspect(path).label == label
    again = make_agent(tmp_path)
    assert sorted(again.agent.store.stored().batch.ids.tolist()) == sorted(held)
    again.disk.close()


@pytest.mark.parametrize(
    "tables", [{}, {"store": {"encoding": "int8"}}, {"samples": {"dtype": "float16"}}]
)
def test_export_gives_back_what_was_stored(tmp_path: Path, tables: dict[str, Any]) -> None:
    path, held = filled(tmp_path, **tables)
    ask("export", path, tmp_path / "out.npz")
    with np.load(tmp_path / "out.npz") as arrays:
        assert dict(zip(arrays["ids"].tolist(), arrays["y"].tolist(), strict=True)) == {
            i: i % LABELS for i in held
        }
        for id_, x in zip(arrays["ids"].tolist(), arrays["x"], strict=True):
            np.testing.assert_array_equal(x, held[id_])
    ask("export", path, tmp_path / "folder")
    np.testing.assert_array_equal(np.load(tmp_path / "folder" / "1" / "7.npy"), held[7])
    with pytest.raises(ConfigError, match="exists"):
        ask("export", path, tmp_path / "folder")


def test_export_to_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    path, held = filled(tmp_path)
    ask("export", path, tmp_path / "out.parquet")
    table = parquet.read_table(tmp_path / "out.parquet").to_pydict()
    assert len(table["y"]) == 30
    np.testing.assert_array_equal(
        np.array(table["x"][3], np.float32).reshape(SHAPE), held[table["ids"][3]]
    )


def test_an_encrypted_store_needs_its_key_and_a_foreign_file_is_not_touched(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("ab" * 32)
    key.chmod(0o600)
    path, _ = filled(tmp_path, store={"key_file": str(key)})
    with pytest.raises(ConfigError, match="is encrypted"):
        ask("check", path)
    assert ask("check", path, "--key-file", key)[0] == 0
    other = tmp_path / "letters.txt"
    other.write_text("dear all " * 1000)
    os.mkfifo(tmp_path / "pipe")
    for verb in ("check", "repair", "show"):
        with pytest.raises(ConfigError, match="is not a store of fedkeep"):
            ask(verb, other)
        with pytest.raises(ConfigError, match="is not a file"):
            ask(verb, tmp_path / "pipe")
    assert other.read_text() == "dear all " * 1000


@pytest.mark.parametrize("encoding", ["float16", "int8", "uint8"])
def test_fewer_bytes_hold_more_samples_and_a_restart_changes_none(
    tmp_path: Path, encoding: str
) -> None:
    wide: dict[str, Any] = {
        "samples": {"shape": [192], "labels": LABELS},
        "store": {"budget": 600_000},
    }
    plain = make_agent(tmp_path, **wide)
    room = plain.agent.device.capacity
    plain.disk.close()
    (tmp_path / "a.store").unlink()
    small = {**wide, "store": {**wide["store"], "encoding": encoding}}
    assembly = make_agent(tmp_path, **small)
    assert assembly.agent.device.capacity > (1.5 if encoding == "float16" else 2.1) * room
    assembly.disk.close()
    (tmp_path / "a.store").unlink()
    assembly = make_agent(tmp_path, store={"encoding": encoding})
    feed(assembly.agent, 0, 40)
    assembly.agent.participate(order(assembly))
    before = assembly.agent.store.stored()
    assembly.disk.close()
    again = make_agent(tmp_path, store={"encoding": encoding})
    after = again.agent.store.stored()
    for name in ("x", "y", "ids"):
        np.testing.assert_array_equal(getattr(after.batch, name), getattr(before.batch, name))
    np.testing.assert_array_equal(after.scores, before.scores)
    again.disk.close()
    with pytest.raises(ConfigError, match=f"holds samples of dtype {encoding}"):
        make_agent(tmp_path)


def test_an_empty_store_is_written_out_too(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    make_agent(tmp_path).disk.close()
    for name in ("none.npz", "none.parquet", "none"):
        assert ask("export", tmp_path / "a.store", tmp_path / name) == (
            0, f"0 samples of shape [6] written to {tmp_path / name}\n"
        )  # fmt: skip
        assert (tmp_path / name).exists()


def sparse(agent: Agent, first: int, count: int) -> None:
    """Samples of 400 numbers, mostly zero; every tenth is noise that nothing can deflate."""
    for id_ in range(first, first + count):
        rng = np.random.default_rng(id_)
        x = rng.standard_normal(400) * (rng.random(400) < (1 if id_ % 10 == 9 else 0.05))
        agent.intake.offer(Arrival(x.astype(np.float32), id_ % LABELS, id_, "mill"), wait=True)
        agent.step(0.0)
    assert agent.commit()


def held_by(assembly: AssembledAgent) -> dict[int, np.ndarray]:
    stored = assembly.agent.store.stored().batch
    return dict(zip(stored.ids.tolist(), stored.x, strict=True))


@pytest.mark.parametrize("encoding", ["float32", "int8"])
def test_deflated_samples_lose_nothing_unless_they_must_and_can_be_packed_anew(
    tmp_path: Path, encoding: str
) -> None:
    limit = 450 if encoding == "float32" else 130
    plain: dict[str, Any] = {
        "samples": {"shape": [400]},
        "store": {"budget": 500_000, "encoding": encoding},
    }
    small = {**plain, "store": {**plain["store"], "deflate_to": limit}}
    assembly = make_agent(tmp_path, **plain)
    room = assembly.agent.device.capacity
    sparse(assembly.agent, 0, 40)
    held = held_by(assembly)
    assembly.disk.close()
    assert "see [store] deflate_to" in ask("check", tmp_path / "a.store")[1]
    assembly = make_agent(tmp_path, **small)
    assert assembly.agent.device.capacity > (3 if encoding == "float32" else 1.4) * room
    packed = held_by(assembly)
    rounded = {id_ for id_ in held if not np.array_equal(held[id_], packed[id_])}
    assert {9, 29} <= rounded <= {9, 19, 29, 39}
    assert all(np.abs(held[id_] - packed[id_]).max() < np.abs(held[id_]).max() for id_ in held)
    sparse(assembly.agent, 40, 40)
    packed = held_by(assembly)
    assert 1 <= assembly.agent.counters.counts()["coarsened"] <= 4
    assembly.disk.close()
    for tables in (small, plain):
        assembly = make_agent(tmp_path, **tables)
        now = held_by(assembly)
        assert all(np.array_equal(packed[id_], now[id_]) for id_ in packed | now)
        assert {note.source for note in assembly.agent.store.notes()} == {"mill"}
        assembly.disk.close()
    with pytest.raises(ConfigError, match="deflate_to must be from "):
        make_agent(tmp_path, **{**plain, "store": {**plain["store"], "deflate_to": 5000}})


def test_one_lost_copy_of_what_samples_are_read_with_costs_nothing(tmp_path: Path) -> None:
    path, held = filled(tmp_path, store={"encoding": "int8"})
    geometry = inspect(path).label.geometry
    image = path.read_bytes()
    apart = [at for copy in (0, 1) if (at := image.find(f"apart.{copy}.scales".encode())) > 0]
    assert len({(at - geometry.cell(0)) // geometry.cell_size for at in apart}) == 2
    for at in apart:
        path.write_bytes(image[:at] + b"?" + image[at + 1 :])
        again = make_agent(tmp_path, store={"encoding": "int8"})
        assert all(np.array_equal(x, held_by(again)[id_]) for id_, x in held.items())
        again.disk.close()


def test_a_store_of_another_format_is_refused_untouched_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr(cells, "FORMAT", cells.FORMAT - 1)
        path, _ = filled(tmp_path)
    image = path.read_bytes()
    formats = f"format {cells.FORMAT - 1} and this fedkeep reads {cells.FORMAT}"
    said = f"{formats}: left untouched; take its samples out"
    for verb in ("check", "repair", "show"):
        with pytest.raises(ConfigError, match=said):
            ask(verb, path)
    with pytest.raises(ConfigError, match=said):
        make_agent(tmp_path)
    assert path.read_bytes() == image


def test_bytes_behind_a_store_are_not_its_own(tmp_path: Path) -> None:
    path, held = filled(tmp_path)
    path.write_bytes(path.read_bytes() + b"behind" * 2000)
    assert ask("check", path)[0] == 0
    again = make_agent(tmp_path)
    assert held_by(again).keys() == held.keys()
    again.disk.close()


def test_one_label_lost_is_said_and_written_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, _ = filled(tmp_path)
    image = bytearray(path.read_bytes())
    image[30] ^= 1
    path.write_bytes(image)
    assert ask("check", path)[0] == 1
    make_agent(tmp_path).disk.close()
    assert "nothing is lost" in caplog.text
    assert ask("check", path)[0] == 0


def test_it_shows_what_a_sample_counts_for_now_and_not_when_it_came(tmp_path: Path) -> None:
    assembly = make_agent(tmp_path)
    feed(assembly.agent, 0, 12)
    assembly.agent.participate(order(assembly))
    now = assembly.agent.store.ranks()
    assembly.agent.commit()
    assembly.disk.close()
    notes = {note.id: note for note in inspect(assembly.agent.store_path).notes}
    assert {id_: note.uses for id_, note in notes.items()} == dict(
        zip(now["ids"].tolist(), now["uses"].tolist(), strict=True)
    )
    assert max(note.uses for note in notes.values()) == 1
    assert [notes[id_].score for id_ in now["ids"].tolist()] == now["scores"].tolist()
