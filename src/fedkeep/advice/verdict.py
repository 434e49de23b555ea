"""From data and figures to words: what the data is like, what to use, by how much, how sure that is, what to fear."""

from collections.abc import Iterator

import numpy as np

from fedkeep.advice.trial import FIFO, LARGER, LOCAL, RATES, SHARED, UNLIMITED, Trial
from fedkeep.core.seeds import generator
from fedkeep.core.types import FloatArray, IntArray
from fedkeep.data import Federation
from fedkeep.records.measures import LEVEL, Difference

_NEIGHBOURS = 5
_LOOKED_AT = 1500
"""Samples whose neighbours are looked for: enough for a share, few enough for seconds."""


class DatasetProfile:
    """A fleet's data in figures: what can be counted without training anything.

    >>> from fedkeep.data import TASKS
    >>> seen = DatasetProfile(TASKS["demo"](devices=5).load(seed=0))
    >>> seen.labels_per_device, seen.sample_bytes
    ((9, 10, 10), 120)
    """

    def __init__(self, data: Federation) -> None:
        counts = data.label_counts
        shares = counts.sum(axis=0) / counts.sum()
        rng = generator(0, "look")
        ordered = [data.y[data.train.of(d)] for d in range(data.devices)]
        shuffled = [rng.permutation(labels) for labels in ordered]
        self.devices, self.labels, self.tested = data.devices, data.labels, len(data.test.indices)
        self.labels_per_device, self.samples_per_device = (
            (int(values.min()), int(np.median(values)), int(values.max()))
            for values in ((counts > 0).sum(axis=1), data.train.sizes)
        )
        """The fewest, the median and the most."""
        self.rarest, self.commonest = (
            (data.label_names[n], float(shares[n]))
            for n in (int(shares.argmin()), int(shares.argmax()))
        )
        """A label and its share of the samples."""
        self.sample_bytes = int(data.x[:1].nbytes)
        self.drift, self.drift_by_chance = (
            _halves_apart(labels, data.labels) for labels in (ordered, shuffled)
        )
        """How far the labels of the first and the second half of a device's rows lie apart, and what the same rows in
        random order would show: 0 alike, 1 nothing shared."""
        self.runs, self.runs_by_chance = map(_repeats, (ordered, shuffled))
        """How often a device's next row has the label of the one before."""
        self.doubtful = _contradicted(data, rng)
        """The share of labels that all nearest neighbours agree to contradict."""


def describe(seen: DatasetProfile) -> str:
    low, middle, high = seen.labels_per_device
    few, usual, many = seen.samples_per_device
    return (
        f"{seen.devices} devices with {usual} samples each ({few} to {many}), {seen.labels} labels of which a device "
        f"sees {middle} ({low} to {high}); label '{seen.commonest[0]}' is {seen.commonest[1]:.0%} of all, "
        f"'{seen.rarest[0]}' {seen.rarest[1]:.1%}. A sample takes {seen.sample_bytes:,} bytes."
    )


def worries(seen: DatasetProfile, capacity: int, *, shuffled: bool) -> Iterator[str]:
    """What may spoil an advice on this data, or the use of it."""
    if capacity >= seen.samples_per_device[1]:
        yield (
            f"Half of the devices can keep all that they have here, with room for {capacity} samples: there is nothing "
            "to choose. Give more of the data, or advise again with a smaller store."
        )
    if not shuffled and seen.drift > seen.drift_by_chance + 0.1:
        yield (
            "The order of the rows matters: the labels of the first and the second half of a device lie "
            f"{seen.drift:.2f} apart ({seen.drift_by_chance:.2f} by chance). If that order is not time, advise again "
            "with --shuffled."
        )
    if not shuffled and seen.runs > seen.runs_by_chance + 0.1:
        yield (
            f"Labels come in runs: {seen.runs:.0%} of rows repeat the label before ({seen.runs_by_chance:.0%} by "
            "chance), so the newest samples are much alike."
        )
    if seen.doubtful > 0.03:
        yield f"About {seen.doubtful:.0%} of the labels look doubtful: their nearest samples contradict them."
    if seen.rarest[1] < 0.02:
        yield f"Label '{seen.rarest[0]}' is rare ({seen.rarest[1]:.1%}): overall accuracy hardly shows how it fares."
    if seen.labels_per_device[1] < seen.labels:
        yield f"Half of the devices see at most {seen.labels_per_device[1]} of the {seen.labels} labels."
    if seen.tested < 500:
        yield f"Only {seen.tested} samples are for testing: a point of accuracy is {seen.tested / 100:.1f} of them."
    if seen.devices < 5:
        yield f"{seen.devices} devices are few for federated learning: what holds for them may not hold for a fleet."


def _halves_apart(labels: list[IntArray], count: int) -> float:
    """The total variation between the label mixes of first and second halves, the devices by their sizes."""
    apart, weight = 0.0, 0
    for own in (own for own in labels if len(own) > 1):
        first, second = (
            np.bincount(half, minlength=count) / len(half)
            for half in np.split(own, [len(own) // 2])
        )
        apart += len(own) * float(np.abs(first - second).sum()) / 2
        weight += len(own)
    return apart / max(weight, 1)


def _repeats(labels: list[IntArray]) -> float:
    alike = sum(int((own[1:] == own[:-1]).sum()) for own in labels)
    return alike / max(sum(len(own) - 1 for own in labels), 1)


def _contradicted(data: Federation, rng: np.random.Generator) -> float:
    chosen = rng.permutation(data.train.indices)[:_LOOKED_AT]
    x: FloatArray = data.x[chosen].reshape(len(chosen), -1).astype(np.float64)
    y = data.y[chosen]
    if len(chosen) <= _NEIGHBOURS:
        return 0.0
    square = (x**2).sum(axis=1)
    distances = square[:, None] + square[None, :] - 2 * x @ x.T
    np.fill_diagonal(distances, np.inf)
    nearest = y[np.argpartition(distances, _NEIGHBOURS, axis=1)[:, :_NEIGHBOURS]]
    agreed = (nearest == nearest[:, :1]).all(axis=1)
    return float((agreed & (nearest[:, 0] != y)).mean())


def recommended(trial: Trial) -> str:
    """FIFO unless the leader is shown to be better by what matters; then the simplest that is its equal."""
    leader = trial.leader()
    lead = trial.against(leader, FIFO)
    if lead is None or lead.verdict != "better" or lead.mean + (lead.half_width or 0.0) <= LEVEL:
        return FIFO
    for method in trial.panel.candidates:
        lead = trial.against(leader, method)
        if (
            lead is not None
            and lead.verdict != "inconclusive"
            and lead.mean + (lead.half_width or 0.0) <= LEVEL
        ):
            return method
    return leader


def advise(
    trial: Trial, seen: DatasetProfile, gist_bytes: int, *, shuffled: bool, complete: bool
) -> list[str]:
    """The advice that the finished runs bear, line by line: what to use, then what to worry about."""
    method = recommended(trial)
    said = [describe(seen), _use(trial, method), *_others(trial, method), _gist(trial, gist_bytes)]
    said += _more_storage(trial, method)
    doubts = [
        *worries(seen, trial.panel.capacity, shuffled=shuffled),
        *_doubts(trial, method, complete=complete),
    ]
    doubts = ["What to worry about:", *(f"- {doubt}" for doubt in doubts)] if doubts else []
    return [sentence for sentence in (*said, *doubts) if sentence]


def _use(trial: Trial, method: str) -> str:
    reached, finals = "", list(trial.finals.get(method, {}).values())
    if finals:
        seeds = "one seed" if len(finals) == 1 else f"{len(finals)} seeds"
        mean = sum(finals) / len(finals)
        reached = (
            f" It reached {mean:.1%} with {trial.panel.slots(method)} samples a device ({seeds})."
        )
    if method != FIFO:
        return f"Use {method}: {_by(trial.against(method, FIFO))} FIFO.{reached}"
    leader = trial.leader()
    if leader == FIFO:
        return f"Use FIFO: no other way of choosing did better here.{reached}"
    nearest = f"{leader} came nearest, {_by(trial.against(leader, FIFO))} it."
    return f"Use FIFO: nothing is shown to be better by a point. {nearest}{reached}"


def _others(trial: Trial, method: str) -> Iterator[str]:
    """How each other candidate but FIFO stands to the one advised, or to the leader where only that is decided."""
    for other in (
        candidate for candidate in trial.panel.candidates if candidate not in (FIFO, method)
    ):
        stands = [
            (base, trial.against(other, base)) for base in (method, trial.leader()) if base != other
        ]
        known = [(base, found) for base, found in stands if found is not None]
        decided = [(base, found) for base, found in known if found.verdict != "inconclusive"]
        if known:
            base, found = (decided or known)[0]
            more = "" if decided else "; hardly to be decided"
            if found.seeds_to_decide and not decided:
                more = f"; about {found.seeds_to_decide} seeds would decide it"
            yield f"{_name(other)} is {_by(found)} {_name(base)}{more}."


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
        means = (
            "what is old misleads here"
            if found.verdict == "worse"
            else "choosing samples can hardly win more"
        )
        yield f"Unlimited storage is {_by(found)} {_name(method)}: {means}."


def _gist(trial: Trial, gist_bytes: int) -> str:
    """What a gist would buy, beside the best that does without."""
    gists = [method for method in trial.panel.candidates if method in (LOCAL, SHARED)]
    if not gists:
        return f"A gist takes {gist_bytes:,} bytes, which leaves no room for samples."
    best, plain = (
        trial.best_of(gists),
        trial.best_of([m for m in trial.panel.candidates if m not in gists]),
    )
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
    """ "2.1 ± 0.4 points better than", to be followed by a name."""
    if found is None:
        return "not yet compared with"
    half = "" if found.half_width is None else f" ± {100 * found.half_width:.1f}"
    words = {
        "better": f"{abs(100 * found.mean):.1f}{half} points better than",
        "worse": f"{abs(100 * found.mean):.1f}{half} points worse than",
        "equivalent": "equivalent (within a point) to",
        "inconclusive": f"inconclusive ({100 * found.mean:+.1f}{half} points) against",
    }
    return words[found.verdict]


def _name(method: str) -> str:
    return "FIFO" if method == FIFO else method
