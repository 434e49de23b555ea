"""From figures to words: what to use, by how much, how sure that is, and what would change it."""

from collections.abc import Iterator
from dataclasses import dataclass

from fedkeep.advice.look import Look, describe, worries
from fedkeep.advice.trial import FIFO, LARGER, LOCAL, RATES, SHARED, UNLIMITED, Trial
from fedkeep.records.measures import LEVEL, Difference


@dataclass(frozen=True)
class Advice:
    """What to use, and all that is to be said about it."""

    method: str
    sentences: tuple[str, ...]
    worries: tuple[str, ...]

    def __str__(self) -> str:
        doubts = ["What to worry about:", *(f"- {worry}" for worry in self.worries)] if self.worries else []
        return "\n".join([*self.sentences, *doubts])


def recommended(trial: Trial) -> str:
    """FIFO unless the leader is shown to be ahead of it by what matters; then the simplest that is its equal."""
    leader = trial.leader()
    lead = trial.against(leader, FIFO)
    if lead is None or lead.verdict != "ahead" or lead.mean + (lead.half_width or 0.0) <= LEVEL:
        return FIFO
    for method in trial.panel.candidates:
        lead = trial.against(leader, method)
        if lead is not None and lead.verdict != "undecided" and lead.mean + (lead.half_width or 0.0) <= LEVEL:
            return method
    return leader


def advise(trial: Trial, seen: Look, gist_bytes: int, *, shuffled: bool, complete: bool) -> Advice:
    """The advice that the finished runs bear."""
    method = recommended(trial)
    said = [describe(seen), _use(trial, method), *_others(trial, method), _gist(trial, gist_bytes)]
    said += _more_storage(trial, method)
    doubts = [*worries(seen, trial.panel.capacity, shuffled=shuffled), *_doubts(trial, method, complete=complete)]
    return Advice(method, tuple(sentence for sentence in said if sentence), tuple(doubts))


def _use(trial: Trial, method: str) -> str:
    reached, finals = "", list(trial.finals.get(method, {}).values())
    if finals:
        seeds = "one seed" if len(finals) == 1 else f"{len(finals)} seeds"
        mean = sum(finals) / len(finals)
        reached = f" It reached {mean:.1%} with {trial.panel.slots(method)} samples a device ({seeds})."
    if method != FIFO:
        lead = trial.against(method, FIFO)
        by = "" if lead is None else f": {_by(lead)} FIFO"
        return f"Use {method}{by}.{reached}"
    leader = trial.leader()
    if leader == FIFO:
        return f"Use FIFO: no other way of choosing did better here.{reached}"
    nearest = f"{leader} came nearest, {_by(trial.against(leader, FIFO))} it."
    return f"Use FIFO: nothing is shown to be better by a point. {nearest}{reached}"


def _others(trial: Trial, method: str) -> Iterator[str]:
    """How each other candidate but FIFO stands to the one advised, or to the leader where only that is decided."""
    for other in (candidate for candidate in trial.panel.candidates if candidate not in (FIFO, method)):
        stands = [(base, trial.against(other, base)) for base in (method, trial.leader()) if base != other]
        known = [(base, found) for base, found in stands if found is not None]
        decided = [(base, found) for base, found in known if found.verdict != "undecided"]
        if known:
            base, found = (decided or known)[0]
            more = (
                f"about {found.seeds_to_decide} seeds would decide it"
                if found.seeds_to_decide
                else "hardly to be decided"
            )
            yield f"{_name(other)} is {_by(found)} {_name(base)}{'' if decided else f'; {more}'}."


def _more_storage(trial: Trial, method: str) -> Iterator[str]:
    """What a larger store would buy, and what none that has an end."""
    for candidate in trial.panel.candidates:
        capacity = LARGER * trial.panel.slots(candidate)
        found = trial.against(f"{candidate}, {capacity} samples", candidate)
        if found is not None:
            tried = f"({capacity} samples, {candidate})"
            yield f"A store {LARGER} times as large {tried} would be {_by(found)} the one tried."
    found = trial.against(UNLIMITED, method)
    if found is not None:
        means = "what is old misleads here" if found.verdict == "behind" else "choosing samples can hardly win more"
        yield f"Unlimited storage is {_by(found)} {_name(method)}: {means}."


def _gist(trial: Trial, gist_bytes: int) -> str:
    """What a gist would buy, beside the best that does without."""
    gists = [method for method in trial.panel.candidates if method in (LOCAL, SHARED)]
    if not gists:
        return f"A gist takes {gist_bytes:,} bytes, which leaves no room for samples."
    best, plain = trial.best_of(gists), trial.best_of([m for m in trial.panel.candidates if m not in gists])
    found = trial.against(best, plain)
    if found is None:
        return ""
    sent = "half as much is sent each way" if best == SHARED else "nothing more is sent"
    cost = f"It takes {gist_bytes:,} bytes of the device, and {sent}."
    return f"A gist ({best}) is {_by(found)} {_name(plain)}, the best without one. {cost}"


def _doubts(trial: Trial, method: str, *, complete: bool) -> Iterator[str]:
    rate = trial.panel.rates.get(method)
    if rate in (RATES[0], RATES[-1]):
        yield f"The best learning rate tried for {method} ({rate}) is at the edge of {RATES}: try further ones."
    if not complete:
        yield "The time was over before everything was decided: give it more with --minutes, and it goes on from here."
    if open_ := trial.open():
        yield f"Whether {trial.leader()} or {' or '.join(map(_name, open_))} is better is open."
    if trial.panel.rounds < 100:
        yield f"Only {trial.panel.rounds} rounds were tried: methods may stand otherwise after more."


def _by(found: Difference | None) -> str:
    """ "ahead of by 2.1 +- 0.4 points", to be followed by a name."""
    if found is None:
        return "not yet compared with"
    half = "" if found.half_width is None else f" ± {100 * found.half_width:.1f}"
    words = {
        "ahead": f"{abs(100 * found.mean):.1f}{half} points ahead of",
        "behind": f"{abs(100 * found.mean):.1f}{half} points behind",
        "level": "level (within a point) with",
        "undecided": f"undecided ({100 * found.mean:+.1f}{half} points) against",
    }
    return words[found.verdict]


def _name(method: str) -> str:
    return "FIFO" if method == FIFO else method
