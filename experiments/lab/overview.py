"""The verdict of RESULTS in three tables: who leads, how far to unlimited storage, and bytes."""

from collections.abc import Iterator
from statistics import median

from fedkeep.tables import Table
from lab.blocks import Block, sheet
from lab.findings import BALANCED, FIFO, GISTS, SLIGHT, UNLIMITED, Interval, share_closed
from lab.names import method_name, stream_name

_SUMMED_UP = (
    "gist-shared",
    "gist-local",
    BALANCED,
    "draw",
    "reservoir",
    "ode-est",
    "ode-default",
    "high-loss",
    "fedbalancer",
    "fifo-scaffold",
    "fifo-fedvarp",
    "fifo-momentum",
)
_RATES = {"over_fifo": "own", "over_fifo_shared": "the task's"}
"""Whose learning rate, by the column of results/arena.json."""


def verdict(arena: Table, bytes_: Table) -> Iterator[Block]:
    """The tables with a sentence before each; `bytes_` is results/bytes.json."""
    if not arena:
        yield "Nothing of the arena has run yet: `python experiments/reproduce.py gist`."
        return
    rounds = sorted({row["rounds"] for methods in arena.values() for row in methods.values()})
    seeds = max(row["seeds"] for methods in arena.values() for row in methods.values())
    span = f"{rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else f"{rounds[0]}"
    yield (
        f"On how many of {len(arena)} streams a method is better or worse than FIFO by the 95 % "
        "interval of the difference, taken seed by seed, and its leads in points; up to "
        f"{seeds} seeds, {span} rounds. Some methods take longer steps: at one rate for all they "
        "gain where that rate is small."
    )
    yield leads_table(arena)
    shares = shares_table(arena)
    if shares:
        yield (
            "Of the way from FIFO to unlimited storage the better gist goes, at the task's rate. "
            "Streams where that way is shorter than half a point are left out."
        )
        yield shares
    if bytes_:
        yield (
            "Where a FIFO store of no more bytes than a gist's is more accurate, the widest such "
            "difference of each stream."
        )
        yield better_buys_table(bytes_)


def leads_table(arena: Table) -> str:
    """By method and rates: on how many streams it is better and worse, and by how much."""
    rows = []
    for method in _SUMMED_UP:
        for key, rates in _RATES.items():
            found = {
                task: Interval(*lead)
                for task, row in arena.items()
                if (lead := row.get(method, {}).get(key))
            }
            if not found:
                continue
            counts = [sum(lead.ahead is side for lead in found.values()) for side in _SIDES]
            leads = [lead.mean for lead in found.values()]
            spread = (min(leads), median(leads), max(leads))
            worse = [stream_name(task) for task, lead in found.items() if lead.ahead is False]
            where = "; ".join(worse) if len(worse) <= _NAMED else f"{len(worse)} streams"
            rows.append(
                (
                    method_name(method),
                    rates,
                    *map(str, counts),
                    *(f"{lead:+.1f}" for lead in spread),
                    where or "none",
                )
            )
    counted = ("better", "undecided", "worse", "least", "median", "greatest", "worse on")
    heads = ("method", "learning rate", *counted)
    return sheet(heads, rows)


_SIDES = (True, None, False)
_NAMED = 2
"""Streams on which a method is worse are named up to this many."""


def gap_closed(row: Table) -> float | None:
    """The better gist's share of the way, at the task's rate.

    None where the way is below half a point or no gist has run.
    """
    means = {
        m: float(found["shared_rate"][0])
        for m, found in row.items()
        if found["shared_rate"] is not None
    }
    best = max((means[m] for m in GISTS if m in means), default=None)
    if FIFO not in means or UNLIMITED not in means or means[UNLIMITED] - means[FIFO] < SLIGHT:
        return None
    return share_closed(means[FIFO], best, means[UNLIMITED])


def shares_table(arena: Table) -> str:
    """By stream; empty where unlimited storage has not run."""
    rows = [
        (stream_name(task), f"{100 * share:.0f} %")
        for task, row in arena.items()
        if (share := gap_closed(row)) is not None
    ]
    return sheet(("stream", "of the way"), rows) if rows else ""


def better_buys_table(table: Table) -> str:
    """By task: FIFO's slots and accuracy, and those of the gist that it beats in no more bytes."""
    rows = []
    for task, methods in table.items():
        stores = [(m, *p) for m, points in methods.items() if m.startswith(FIFO) for p in points]
        buys = []
        for method in (m for m in methods if m.startswith("gist")):
            for size, slots, accuracy, _ in methods[method]:
                best = max(
                    (store for store in stores if store[1] <= size),
                    key=lambda store: float(store[3]),
                    default=None,
                )
                if best is not None and best[3] > accuracy:
                    fifo = f"{method_name(best[0])}, {best[2]} slots: {best[3]:.1f}"
                    gist = f"{method_name(method)}, {slots} slots: {accuracy:.1f}"
                    buys.append((best[3] - accuracy, fifo, gist))
        if buys:
            lead, fifo, gist = max(buys)
            rows.append((stream_name(task), fifo, gist, f"{lead:+.1f}"))
        else:
            rows.append((stream_name(task), "nowhere", "", ""))
    return sheet(("stream", "FIFO", "gist", "FIFO's lead"), rows)
