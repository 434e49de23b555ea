"""What to let go of when all whole cells of a damaged file were taken: more than ever counted at one time."""

from __future__ import annotations

from collections import Counter

from fedkeep.agent.cellfile import Blob
from fedkeep.agent.record import SAMPLE, decode_note
from fedkeep.agent.shelf import older_arrays


def superfluous(blobs: list[Blob], capacity: int) -> set[int]:
    """The numbers of blobs that go: earlier records of the same, then samples beyond the capacity.

    Regions take turns, each with its highest scores first, so that none is lost to another's larger values.
    """
    newest: dict[int, Blob] = {}
    gone = older_arrays(blobs)
    for blob in sorted((b for b in blobs if b.kind == SAMPLE), key=lambda b: b.number):
        id_ = decode_note(blob).id
        if id_ in newest:
            gone.add(newest[id_].number)
        newest[id_] = blob
    notes = sorted(((decode_note(blob), blob.number) for blob in newest.values()), key=lambda pair: -pair[0].score)
    turns: Counter[int] = Counter()
    ranked = []
    for note, number in notes:
        ranked.append((turns[note.region], number))
        turns[note.region] += 1
    return gone | {number for _, number in sorted(ranked)[capacity:]}
