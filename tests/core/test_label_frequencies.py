"""Shares of the stream and the slots that follow from them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedkeep.core.selection import LabelFrequencies


def test_targets_follow_the_root_of_the_share() -> None:
    shares = LabelFrequencies(3)
    shares.update(np.array([0] * 16 + [2]))
    given_slots = shares.allocate(10)
    assert given_slots.sum() == 10
    assert given_slots[1] == 0
    assert np.abs(given_slots[[0, 2]] - [8, 2]).max() <= 1


@given(st.lists(st.integers(0, 12), min_size=1, max_size=80), st.integers(1, 9), st.integers(0, 5))
def test_all_slots_are_given_and_only_to_what_has_come(
    regions: list[int], capacity: int, seed: int
) -> None:
    shares = LabelFrequencies(13, seed=seed)
    shares.update(np.array(regions))
    targets = shares.allocate(capacity)
    assert targets.sum() == capacity
    assert (targets >= 0).all()
    assert set(np.flatnonzero(targets)) <= set(regions)


def test_with_fewer_slots_than_labels_every_label_has_its_turns() -> None:
    shares, held = LabelFrequencies(8, seed=1), np.zeros(8)
    for _ in range(400):
        shares.update(np.array([0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7]))
        held += shares.allocate(3)
    due = np.sqrt([9, 1, 1, 1, 1, 1, 1, 1])
    np.testing.assert_allclose(held / 400, 3 * due / due.sum(), atol=0.08)


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=60), st.lists(st.integers(1, 9), min_size=1)
)
def test_where_targets_change_does_not_depend_on_chunking(
    regions: list[int], cuts: list[int]
) -> None:
    def changes(pieces: list[list[int]]) -> list[int]:
        shares, found, position = LabelFrequencies(5), [], 0
        for piece in pieces:
            for start, stop, renewed in shares.change_points(np.array(piece)):
                found += [position + start] if renewed else []
                shares.update(np.array(piece[start:stop]))
            position += len(piece)
        return found

    pieces, start = [], 0
    while start < len(regions):
        cut = cuts[start % len(cuts)]
        pieces.append(regions[start : start + cut])
        start += cut
    assert changes([regions]) == changes(pieces)
