"""The page's view of a run: subsampled without losing a count, following a file that changes."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedkeep.core.errors import DataError
from fedkeep.records import GistLine, Recorder, Round, Run, read_run
from fedkeep.web.digest import BINS, ROWS, Digest, RunView, Subsampled, evenly
from fedkeep.web.feed import DirectoryFeed, Update


@given(st.integers(0, 500))
def test_thinning_loses_nothing_and_stays_small(n: int) -> None:
    subsampled: Subsampled[int] = Subsampled(16, lambda early, late: early + late)
    for _ in range(n):
        subsampled.add(1)
    assert sum(subsampled) == n
    assert len(subsampled) <= 16
    assert n < 16 or len(subsampled) >= 8


@given(st.integers(0, 1000), st.integers(1, 50))
def test_even_choice_is_small_ordered_and_ends_with_the_last(n: int, limit: int) -> None:
    chosen = evenly(range(n), limit)
    assert len(chosen) <= limit
    assert list(chosen) == sorted(chosen)
    assert not n or chosen[-1] == n - 1


def digested(run: Run) -> Digest:
    digest = Digest(run.header)
    for line in run.lines:
        digest.add(line)
    return digest


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory, fleet: dict[str, Any]) -> Run:
    path = tmp_path_factory.mktemp("runs") / "ode-0.jsonl"
    fake = fleet["FakeRun"](path, "ode", 0, devices=8, images=False)
    fake.advance(700)
    fake.finish()
    return read_run(path)


def test_a_view_counts_everything_that_happened(long_run: Run) -> None:
    view = digested(long_run).view("ode-0", 0.0)
    for name in ("arrivals", "kept", "replaced", "refused", "dropouts"):
        assert view["totals"][name] == sum(getattr(line, name) for line in long_run.rounds)
    assert view["totals"]["participants"] == 700 * 5
    reasons = [reason for line in long_run.rounds for reason in line.refused_reports]
    assert view["refused_reports"] == {
        reason: reasons.count(reason) for reason in sorted(set(reasons))
    }
    assert view["round"] == 700
    assert view["finished"]


def test_merged_rounds_keep_their_mean_per_round(long_run: Run) -> None:
    activity = digested(long_run).view("ode-0", 0.0)["activity"]
    assert BINS // 2 <= len(activity["round"]) <= BINS
    rounds = [0, *(r for r in activity["round"] if r is not None)]
    spans = [late - early for early, late in pairwise(rounds)]
    counted = sum(s * (a or 0) for s, a in zip(spans, activity["arrivals"], strict=True))
    assert counted == pytest.approx(sum(line.arrivals for line in long_run.rounds))


def test_a_huge_plan_is_shortened_for_the_page(tmp_path: Path, fleet: dict[str, Any]) -> None:
    fleet["FakeRun"](tmp_path / "big.jsonl", devices=ROWS + 50, images=False).advance(1)
    view = digested(read_run(tmp_path / "big.jsonl")).view("big", 0.0)
    assert (
        len(view["plan"].quotas)
        == len(view["plan"].devices)
        == len(view["holdings"].filled)
        == ROWS
    )
    assert view["devices"] == ROWS + 50


def only(update: Update | None) -> RunView:
    assert update is not None
    (view,) = update.views
    return view


def test_a_feed_tells_only_what_changed(tmp_path: Path, fleet: dict[str, Any]) -> None:
    feed = DirectoryFeed(tmp_path, pause=0)
    empty = feed.since(0)
    assert empty is not None
    assert empty.views == ()
    one = fleet["FakeRun"](tmp_path / "sub" / "ode-0.jsonl", "ode")
    fleet["FakeRun"](tmp_path / "fifo-0.jsonl", "fifo").advance(20)
    first = feed.since(empty.version)
    assert first is not None
    assert first.keys == ("fifo-0", "sub/ode-0")
    assert feed.since(first.version) is None
    one.advance(20)
    second = feed.since(first.version)
    assert only(second)["key"] == "sub/ode-0"
    assert second is not None
    assert [row.method for row in second.comparison.rows] == ["fifo", "ode"]


def test_a_feed_tells_what_is_wrong_with_the_fleet_and_when_it_is_over(
    tmp_path: Path, fleet: dict[str, Any]
) -> None:
    fleet["FakeRun"](tmp_path / "fleet.jsonl").advance(1)
    wrong = ["agent-1 does not run"]
    feed = DirectoryFeed(tmp_path, pause=0, troubles=lambda: tuple(wrong))
    first = feed.since(0)
    assert first is not None
    assert first.troubles == ("agent-1 does not run",)
    assert feed.since(first.version) is None
    wrong.clear()
    second = feed.since(first.version)
    assert second is not None
    assert second.troubles == ()


def test_a_feed_follows_cuts_restarts_and_removals(tmp_path: Path, fleet: dict[str, Any]) -> None:
    path = tmp_path / "ode-0.jsonl"
    fleet["FakeRun"](path, "ode", 0).advance(40)
    feed = DirectoryFeed(tmp_path, pause=0)
    assert only(feed.since(0))["round"] == 40
    with Recorder(path) as recorder:
        recorder.truncate_after(20)
    cut = only(feed.since(0))
    assert cut["round"] == 20
    assert cut["totals"]["participants"] == 20 * 5
    fleet["FakeRun"](path, "fifo", 3).advance(10)
    assert (only(feed.since(0))["method"], only(feed.since(0))["round"]) == ("fifo", 10)
    path.unlink()
    gone = feed.since(0)
    assert gone is not None
    assert gone.keys == ()


def test_a_damaged_line_is_counted_and_passed_over(tmp_path: Path, fleet: dict[str, Any]) -> None:
    path = tmp_path / "ode-0.jsonl"
    fleet["FakeRun"](path).advance(1)
    with path.open("a") as file:
        file.write('{"kind": "round", "round": "three"}\n{"kind": "new-fangled"}\n')
    with Recorder(path) as recorder:
        recorder.write(Round(round=2, participants=()))
    view = only(DirectoryFeed(tmp_path).since(0))
    assert (view["round"], view["damaged"]) == (2, 1)


def test_the_clock_beside_the_run_is_shown(tmp_path: Path, fleet: dict[str, Any]) -> None:
    fleet["FakeRun"](tmp_path / "ode-0.jsonl").advance(20)
    assert only(DirectoryFeed(tmp_path).since(0))["seconds"] == pytest.approx(20 * 0.11)


def test_watching_what_is_no_directory_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a directory"):
        DirectoryFeed(tmp_path / "nowhere")


def test_merged_gist_lines_count_by_their_participations(long_run: Run) -> None:
    digest = Digest(long_run.header)
    for round_ in range(1, 2 * BINS + 1):
        count, worth = (30, 10.0) if round_ % 2 else (10, 50.0)
        digest.add(
            GistLine(
                round=round_, participations=count, trust=0.5, likeness=0.8, worth=worth, reach=0.3
            )
        )
    shown = digest.view("gist-0", 0.0)["gist"]
    assert len(shown["round"]) == BINS
    assert shown["worth"] == pytest.approx([20.0] * BINS)
    assert shown["trust"] == pytest.approx([0.5] * BINS)
