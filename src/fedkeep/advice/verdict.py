"""An advice in words: which method to use, by how much, how certain, and what to watch out for."""

from collections.abc import Iterator

from fedkeep.advice.profile import DatasetProfile, describe, warnings
from fedkeep.advice.rule import MARGIN, Lead, best_of
from fedkeep.advice.trial import FIFO, LARGER, LOCAL, RATES, SHARED, UNLIMITED, Trial


def sentences(
    trial: Trial, profile: DatasetProfile, gist_bytes: int, *, shuffled: bool, complete: bool
) -> list[str]:
    """Return the advice that the finished runs support, line by line.

    Parameters
    ----------
    trial : Trial
        The trial, ended or not.
    profile : DatasetProfile
        The figures of the data.
    gist_bytes : int
        Bytes of a gist on the device.
    shuffled : bool
        Whether samples came in random order.
    complete : bool
        Whether the trial came to its end.
    """
    method = trial.recommended()
    measure = "" if profile.numbers is None else "an R2 of "
    found = [describe(profile), _use(trial, method, measure), *_others(trial, method)]
    found += [_gist(trial, gist_bytes), *_more_storage(trial, method)]
    doubts = [
        *warnings(profile, trial.settings.capacity, shuffled=shuffled),
        *_doubts(trial, method, complete=complete),
    ]
    if doubts:
        found += ["What to watch out for:", *(f"- {doubt}" for doubt in doubts)]
    return [sentence for sentence in found if sentence]


def _use(trial: Trial, method: str, measure: str = "") -> str:
    reached, finals = "", list(trial.finals.get(method, {}).values())
    if finals:
        seeds = "one seed" if len(finals) == 1 else f"{len(finals)} seeds"
        mean = sum(finals) / len(finals)
        slots = trial.settings.slots(method)
        reached = f" It reached {measure}{mean:.1%} with {slots} samples a device ({seeds})."
    if method != FIFO:
        stands = trial.lead(method, FIFO)
        assert stands is not None
        return f"Use {method}: it is better than FIFO by {_range(stands)}.{reached}"
    open_ = trial.open()
    if open_:
        return (
            "Use FIFO, the simplest, until more is known: whether it is exceeded by more than a "
            f"point is open for {', '.join(open_)}.{reached}"
        )
    return f"Use FIFO: no method is better by more than a point.{reached}"


def _others(trial: Trial, method: str) -> Iterator[str]:
    """Yield how each other candidate stands to FIFO."""
    for other in trial.settings.candidates:
        if other not in (FIFO, method):
            stands = trial.lead(other, FIFO)
            if stands is not None:
                yield f"{other} against FIFO: {_standing(stands)}."


def _more_storage(trial: Trial, method: str) -> Iterator[str]:
    """Yield the benefit of a larger store, and of unlimited storage."""
    for candidate in trial.settings.candidates:
        capacity = LARGER * trial.settings.slots(candidate)
        larger = f"{candidate}, {capacity} samples"
        if larger in trial.finals:
            stands = _standing(trial.lead(larger, candidate))
            yield f"A store {LARGER} times as large ({capacity} samples, {candidate}): {stands}."
    found = trial.lead(UNLIMITED, method)
    if found is not None:
        meaning = ""
        if found.high < 0:
            meaning = ": old samples mislead here"
        elif found.high <= MARGIN:
            meaning = ": another choice of samples can gain little"
        yield f"Unlimited storage against {_name(method)}: {_standing(found)}{meaning}."


def _gist(trial: Trial, gist_bytes: int) -> str:
    """Return the benefit of a gist over the best method without one."""
    gists = [method for method in trial.settings.candidates if method in (LOCAL, SHARED)]
    if not gists:
        return f"A gist takes {gist_bytes:,} bytes, which leaves no slot for samples."
    plain = [method for method in trial.settings.candidates if method not in gists]
    if not all(trial.finals.get(method) for method in (*gists, *plain)):
        return ""
    best, other = best_of(trial.finals, gists), best_of(trial.finals, plain)
    more = f"{gist_bytes // 2:,} bytes more are" if best == SHARED else "nothing more is"
    return (
        f"A gist ({best}) against {_name(other)}, the best without one: "
        f"{_standing(trial.lead(best, other))}. It takes {gist_bytes:,} bytes of the device, and "
        f"{more} sent each way."
    )


def _doubts(trial: Trial, method: str, *, complete: bool) -> Iterator[str]:
    rate = trial.settings.rates.get(method)
    if rate in (RATES[0], RATES[-1]):
        yield (
            f"The best learning rate tried for {method} ({rate}) is at the edge of {RATES}: try "
            "further ones."
        )
    if not complete:
        yield (
            "The time was over before everything was settled: give it more with --minutes, and it "
            "goes on from here."
        )
    if method != FIFO and (open_ := trial.open()):
        yield f"Whether {' or '.join(open_)} is better still is open."
    if trial.settings.rounds < 100:
        rounds = trial.settings.rounds
        yield f"Only {rounds} rounds were tried: methods may compare otherwise later."


def _standing(stands: Lead | None) -> str:
    """Return a lead in words, by the bounds of the rule: on one side of a point, or open."""
    if stands is None:
        return "not compared on enough seeds yet"
    if stands.is_better:
        return f"better by {_range(stands)}"
    if stands.high < 0:
        return f"worse by {_range(Lead(-stands.mean, -stands.high, -stands.low, stands.seeds, 0))}"
    if stands.is_settled:
        return f"not better by more than a point ({_interval(stands)})"
    more = f"; about {stands.more_seeds} seeds would settle it" if stands.more_seeds else ""
    return f"open ({_interval(stands)}){more}"


def _range(stands: Lead) -> str:
    return (
        f"{100 * stands.mean:.1f} points ({100 * stands.low:.1f} to {100 * stands.high:.1f}, "
        f"{stands.seeds} seeds)"
    )


def _interval(stands: Lead) -> str:
    return (
        f"{100 * stands.mean:+.1f} points, between {100 * stands.low:+.1f} and "
        f"{100 * stands.high:+.1f}, {stands.seeds} seeds"
    )


def _name(method: str) -> str:
    return "FIFO" if method == FIFO else method
