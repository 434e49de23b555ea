"""Runs the agent's fault tests in long form, for a table: `python -m tests.faults.agent_table`."""

import logging
import multiprocessing
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.faults import agent_limits, agents, light, torn
from tests.faults.corruption import FORMS, try_corruptions
from tests.faults.full_disk import try_every_call
from tests.faults.hostile import KINDS, besiege
from tests.faults.kills import POINTS, try_kills
from tests.faults.power_loss import try_power_cuts
from tests.faults.resizes import resize
from tests.faults.table import Row, write_page

OUT = Path("docs/faults-agent.md")


def kills(folder: Path, scale: float) -> Row:
    tally = try_kills(folder / "store", kills=int(1000 * scale))
    found = (
        f"{tally.kills} kills ({len(POINTS)} named points), "
        f"{tally.lost} lost, {tally.wrong} wrong reads"
    )
    return (
        "`kill -9`, at random and at named points",
        "0 acknowledged lost, 0 wrong",
        found,
        not tally.lost + tally.wrong,
    )


def power(_folder: Path, scale: float) -> Row:
    losses = try_power_cuts(steps=120, states=int(2000 * scale))
    found = f"{losses.states} crash states, {losses.lost} lost, {losses.wrong} wrong reads"
    target = "0 acknowledged lost, 0 wrong"
    return (
        "power loss, unsynced writes lost, torn and reordered",
        target,
        found,
        not losses.lost + losses.wrong,
    )


def light_kills(folder: Path, scale: float) -> Row:
    found = light.try_kills(folder / "store", kills=int(1000 * scale))
    text = f"{found.tried} kills, {found.lost} lost, {found.wrong} wrong reads"
    return (
        "`kill -9` while samples are committed alone",
        "0 acknowledged lost, 0 wrong",
        text,
        not found.lost + found.wrong,
    )


def light_power(_folder: Path, scale: float) -> Row:
    found = light.try_power_cuts(steps=200, states=int(2000 * scale))
    text = f"{found.tried} crash states, {found.lost} lost, {found.wrong} wrong reads"
    return (
        "power loss while samples are committed alone",
        "0 acknowledged lost, 0 wrong",
        text,
        not found.lost + found.wrong,
    )


def agents_power(folder: Path, scale: float) -> Row:
    found = []
    for number, kind in enumerate(agents.KINDS):
        (folder / str(number)).mkdir()
        part = agents.try_power_cuts(kind, folder / str(number), 120, int(2000 * scale))
        found.append(part)
    states, lost = sum(part.states for part in found), sum(part.lost for part in found)
    wrong = sum(part.wrong for part in found)
    return (
        "power loss under whole agents: files, labels that come later, rules, erasures",
        "0 acknowledged lost, 0 wrong",
        f"{states} crash states, {lost} lost, {wrong} with something wrong or erased in them",
        not lost + wrong,
    )


def resizing(folder: Path, scale: float) -> Row:
    times, lost = resize(folder, int(200 * scale))
    return (
        "another budget under a full store",
        "0 lost",
        f"{times} budgets, {lost} lost a sample",
        not lost,
    )


def torn_blocks(_folder: Path, scale: float) -> Row:
    steps = max(1, int(4 * scale))
    found = [
        try_(sector, block, 17, steps)
        for try_ in (torn.try_all, torn.try_all_light)
        for sector, block in ((None, None), (512, 512), (4096, 4096))
    ]
    lost = sum(losses.lost + losses.wrong for losses in found)
    bare = torn.try_all_light(None, 4096, 17, steps)
    text = f"{sum(losses.states for losses in found)} states, {lost} lost or wrong"
    return (
        "every crash state of short histories, a torn block of 512 B or 4 KiB under `sector`",
        "0 acknowledged lost, 0 wrong",
        f"{text}; without `sector`, a torn 4 KiB costs some in {bare.lost} of {bare.states}",
        not lost,
    )


def torn_moves(folder: Path, _scale: float) -> Row:
    found = [
        torn.try_resizes(folder, budgets, 4096)
        for budgets in ((100_000, 140_000), (140_000, 100_000), (100_000, 104_096))
    ]
    lost = sum(losses.lost + losses.wrong for losses in found)
    return (
        "every crash state of a change of the budget, a torn block of 4 KiB",
        "0 lost",
        f"{sum(losses.states for losses in found)} states, {lost} lost a sample",
        not lost,
    )


def sieges(folder: Path, scale: float) -> Row:
    records = refused = failures = 0
    for kind in KINDS:
        (folder / kind).mkdir()
        siege = besiege(kind, folder / kind, int(10_000 * scale))
        records, refused, failures = (
            records + siege.records,
            refused + siege.refused,
            failures + siege.failures,
        )
    found = (
        f"{len(KINDS)} sources, {records} records, {refused} refused, "
        f"{failures} exits or sound samples lost"
    )
    return (
        "hostile records and files, 10,000 per source",
        "0 exits, sound samples kept",
        found,
        not failures,
    )


def budget(folder: Path, scale: float) -> Row:
    found = agent_limits.watch_budget(folder, int(100_000 * scale))
    written = f"{found.written_per_accepted:.0f} B written per accepted sample"
    text = f"{found.offers} offers, peak {found.peak_percent:.1f} %; {written}"
    return (
        "byte budget, all files, at every write",
        "never above 100 %",
        text,
        found.peak_percent <= 100,
    )


def full(_folder: Path, scale: float) -> Row:
    failures = try_every_call(steps=max(20, int(40 * scale)))
    bad = failures.lost + failures.wrong + failures.stuck
    found = (
        f"{failures.calls} calls failed, {failures.lost} lost, {failures.wrong} wrong, "
        f"{failures.stuck} did not recover"
    )
    return "disk full or failing at every write and sync", "nothing lost, recovers", found, not bad


def corruption(folder: Path, scale: float) -> Row:
    salvage = try_corruptions(folder, count=int(10_000 * scale))
    found = (
        f"{salvage.corruptions} corruptions of {len(FORMS)} encodings, {salvage.crashes} crashes, "
        f"{salvage.wrong} wrong samples, {salvage.saved_percent:.2f} % saved"
    )
    met = not salvage.crashes + salvage.wrong and salvage.saved_percent >= 99
    return (
        "random corruption of the file, roots included",
        "0 crashes, 0 wrong, >= 99 % saved",
        found,
        met,
    )


def reopening(folder: Path, scale: float) -> Row:
    p99, cpu = agent_limits.reopen_p99_ms(folder, max(30, int(150 * scale)))
    found = f"p99 {p99:.1f} ms ({cpu:.1f} ms of CPU)"
    return (
        "reopen after a crash, 1 MB store of 960-byte samples",
        "p99 under 50 ms",
        found,
        p99 < 50,
    )


def erasing(folder: Path, _scale: float) -> Row:
    found = agent_limits.erase_all(folder)
    text = f"{found.samples} samples, {found.hits} hits, {found.seconds * 1000:.0f} ms"
    return "erase", "0 hits in any file within 1 s", text, not found.hits and found.seconds < 1


def acknowledging(folder: Path, scale: float) -> Row:
    p99 = agent_limits.acknowledge_p99_ms(folder, 20 * max(0.2, scale))
    return (
        "time to an acknowledgement, 500 samples a second",
        "p99 within 250 ms",
        f"p99 {p99:.0f} ms",
        p99 <= 250,
    )


def soaking(folder: Path, scale: float) -> Row:
    found = agent_limits.soak(folder, int(1_000_000 * scale))
    text = f"{found.samples} samples, {found.growth_percent:+.2f} % ({found.megabytes:.1f} MB)"
    return "soak: resident memory after a fifth", "growth under 1 %", text, found.growth_percent < 1


ROWS: tuple[Callable[[Path, float], Row], ...] = (
    kills, power, light_kills, light_power, agents_power, torn_blocks, resizing, torn_moves,
    sieges, budget, full, corruption, reopening, erasing, acknowledging, soaking,
)  # fmt: skip


def measure(row: Callable[[Path, float], Row], scale: float) -> Row:
    """One row, in a process of its own so that none sees another's memory."""
    memory = Path("/dev/shm")  # what is damaged on purpose need not reach a disk
    where = memory if row is corruption and memory.is_dir() else None
    with (
        tempfile.TemporaryDirectory(dir=where) as folder,
        multiprocessing.get_context("spawn").Pool(1) as pool,
    ):
        return pool.apply(_quietly, (row, Path(folder), scale))


def _quietly(row: Callable[[Path, float], Row], folder: Path, scale: float) -> Row:
    logging.disable(logging.ERROR)
    return row(folder, scale)


def main() -> None:
    about = (
        "Written by `python -m tests.faults.agent_table`; "
        "every row is a test that can fail, in `tests/faults/`."
    )
    write_page(
        OUT,
        "The agent under faults",
        about,
        [(row.__name__, partial(measure, row)) for row in ROWS],
    )


if __name__ == "__main__":
    main()
