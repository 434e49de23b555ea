"""A disk that fails at every possible write, for a while or in the middle of an erasure."""

import errno
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fedkeep.core.errors import RejectedError
from tests.agent.builders import AssembledAgent, arrival, feed, make_agent, order


def failing(assembly: AssembledAgent, after: int, count: int) -> Callable[[], bool]:
    """Lets `after` writes through, then fails `count` of them; returns whether it ever failed."""
    write, done = assembly.disk.write, [0]

    def full(offset: int, data: bytes) -> None:
        done[0] += 1
        if after < done[0] <= after + count:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(offset, data)

    assembly.disk.write = full  # type: ignore[method-assign]
    return lambda: done[0] > after


def settle(assembly: AssembledAgent) -> None:
    """Goes on until the disk, which recovers, has taken everything."""
    agent = assembly.agent
    for turn in range(20):
        agent._pacer._retry = 0.0
        agent.step(0.0)
        if turn == 9:
            del assembly.disk.write
    assert agent.commit()
    assert not agent.intake.held


def content(agent: Any) -> dict[int, bytes]:
    batch = agent.store.stored().batch
    return {id_: x.tobytes() for id_, x in zip(batch.ids.tolist(), batch.x, strict=True)}


def reopened(folder: Path, assembly: AssembledAgent) -> dict[int, bytes]:
    assembly.disk.close()
    again = make_agent(folder)
    found = content(again.agent)
    assert not again.agent.store.file.damage
    counters = again.agent.counters
    assert counters["kept"] + counters["replaced"] == counters["seen"]
    again.disk.close()
    return found


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("after", range(12))
def test_every_sample_is_answered_once_and_stored(tmp_path: Path, after: int, count: int) -> None:
    assembly = make_agent(tmp_path, store={"commit_ms": 1})
    agent = assembly.agent
    feed(agent, 0, 12)
    failing(assembly, after, count)
    fates: dict[int, list[str]] = {}
    for id_ in range(20, 52):
        one, answers = arrival(id_), fates.setdefault(id_, [])
        one.acknowledge = answers.append
        agent.intake.offer(one, wait=True)
        if id_ % 8 == 3:
            agent.step(0.0)
    settle(assembly)
    assert {tuple(answers) for answers in fates.values()} <= {("kept",), ("replaced",)}
    before = content(agent)
    assert agent.counters["seen"] == 44
    assert reopened(tmp_path, assembly) == before


@pytest.mark.parametrize("after", range(16))
def test_an_erasure_that_fails_at_any_write_loses_no_other_sample(
    tmp_path: Path, after: int
) -> None:
    assembly = make_agent(tmp_path)
    agent = assembly.agent
    feed(agent, 0, 24)
    held = set(content(agent))
    one, fates = arrival(100), list[str]()
    one.acknowledge = fates.append
    agent.intake.offer(one, wait=True)
    agent.step(0.0)
    failed = failing(assembly, after, 2)
    erased = 0
    with suppress(RejectedError):
        erased = agent.erase([3, 4])
    assert erased == 2 or failed(), "it is refused only where the disk fails"
    settle(assembly)
    assert agent.erase([3, 4]) in (0, 2)
    assert fates == ["kept"]
    left = set(content(agent))
    assert left == (held | {100}) - {3, 4}
    feed(agent, 200, 40)
    before = content(agent)
    assert reopened(tmp_path, assembly) == before


@pytest.mark.parametrize("after", range(0, 16, 3))
def test_a_participation_that_fails_at_any_write_loses_no_sample(
    tmp_path: Path, after: int
) -> None:
    assembly = make_agent(tmp_path)
    agent = assembly.agent
    feed(agent, 0, 24)
    failing(assembly, after, 1)
    with suppress(RejectedError):
        agent.participate(order(assembly))
    settle(assembly)
    assert set(content(agent)) <= set(range(24))
    before = content(agent)
    assert agent.participate(order(assembly, 1)).samples == len(before)
    assert reopened(tmp_path, assembly) == before
