"""The store's file: whatever is committed comes back, nothing else does, and it never grows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkeep.agent.cellfile import CellFile, StoreError
from fedkeep.agent.cells import (
    Cipher,
    FileCell,
    Geometry,
    Label,
    Root,
    decode_cell,
    decode_label,
    decode_root,
)
from tests.faults.script import RamDisk

GEOMETRY = Geometry.within(40_000, 256)


def fresh(cipher: Cipher | None = None) -> tuple[RamDisk, CellFile]:
    disk = RamDisk(bytes(GEOMETRY.size))
    file = CellFile(disk, GEOMETRY, cipher)
    file.format(Label(GEOMETRY, {}))
    return disk, file


def test_a_layout_fills_its_budget_and_no_more() -> None:
    for budget in (33_000, 40_000, 1_000_000, 9_000_000):
        geometry = Geometry.within(budget, 960)
        assert budget - 960 - 4096 < geometry.size <= budget // 4096 * 4096
        assert geometry.cell(geometry.cells) <= geometry.root(0, 1)
        assert geometry.root(1, 1) + geometry.root_size == geometry.label_copy


@pytest.mark.parametrize("encrypted", [False, True])
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_every_reader_sees_exactly_the_last_commit(encrypted: bool, data: st.DataObject) -> None:
    cipher = Cipher(bytes(32)) if encrypted else None
    disk, file = fresh(cipher)
    held: dict[int, bytes] = {}
    for _ in range(data.draw(st.integers(1, 6))):
        blobs = data.draw(st.lists(st.binary(max_size=700), max_size=5))
        gone = data.draw(st.lists(st.sampled_from(sorted(held)), unique=True)) if held else []
        numbers = file.commit([(7, blob) for blob in blobs], gone, wipe=data.draw(st.booleans()))
        held = {n: b for n, b in held.items() if n not in gone} | dict(
            zip(numbers, blobs, strict=True)
        )
        file = CellFile(disk, GEOMETRY, cipher)
        found = file.load()
        assert not file.damage
        assert {blob.number: blob.data for blob in found} == held
        assert len(disk.image) == GEOMETRY.size


def test_a_wipe_leaves_no_byte_of_what_was_removed() -> None:
    disk, file = fresh()
    secret = np.random.default_rng(0).bytes(500)
    (first,) = file.commit([(1, secret)], [])
    file.commit([(1, b"other")], [first])
    assert secret[:100] in disk.image
    file.commit([], [], wipe=True)
    assert secret[:100] not in disk.image
    assert secret[300:400] not in disk.image


def test_a_wipe_that_a_crash_cut_short_is_done_by_the_next_commit() -> None:
    disk, file = fresh()
    (first,) = file.commit([(1, b"secret" * 20)], [])
    before = bytes(disk.image)
    file.commit([], [first], wipe=True)
    # As if only the root of that commit had reached the disk, and nothing of the wipe.
    crashed = RamDisk(before)
    size = GEOMETRY.root_size
    halves = [
        bytes(disk.image[at : at + size])
        for h in (0, 1)
        for at in (GEOMETRY.root(h), GEOMETRY.root(h, 1))
    ]
    due = [half for half in halves if (root := decode_root(half, GEOMETRY.cells)) and root.wipe]
    assert len(due) == 2
    crashed.image[GEOMETRY.root(0) : GEOMETRY.root(0) + size] = due[0]
    again = CellFile(crashed, GEOMETRY)
    assert again.load() == []
    again.commit([(1, b"next")], [])
    assert b"secret" not in crashed.image


def test_a_commit_beyond_the_budget_is_refused_and_changes_nothing() -> None:
    disk, file = fresh()
    file.commit([(1, b"kept")], [])
    with pytest.raises(StoreError, match="no room"):
        file.commit([(1, bytes(50_000))], [])
    assert [blob.data for blob in CellFile(disk, GEOMETRY).load()] == [b"kept"]


def test_sealed_cells_do_not_show_their_content_nor_open_elsewhere() -> None:
    cipher = Cipher(bytes(range(32)))
    disk, file = fresh(cipher)
    file.commit([(1, b"plain text")], [])
    assert b"plain text" not in disk.image
    sealed = cipher.seal(b"plain text", b"here")
    assert cipher.unseal(sealed, b"here") == b"plain text"
    assert cipher.unseal(sealed, b"there") is None


@given(st.binary(min_size=64, max_size=64))
@settings(max_examples=200)
def test_random_bytes_are_no_part_of_a_store(noise: bytes) -> None:
    page = noise * 64
    assert decode_cell(page[:256]) is None
    assert decode_root(page, 8) is None
    assert decode_label(page) is None


def test_parts_survive_encoding() -> None:
    for cell in (
        FileCell(2, 77, 1, 3, b"data"),
        FileCell(1, 5 << 20, 0, 1, b"x", light=True, frees=0),
    ):
        assert decode_cell(cell.encode().ljust(256, b"\0")) == cell
    root = Root(9, b"\xf0", wipe=True)
    assert decode_root(root.encode(8).ljust(64, b"\0"), 8) == root
    label = Label(GEOMETRY, {"shape": [3]})
    assert decode_label(label.encode()) == label
