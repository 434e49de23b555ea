"""The agent's state in a few numbers, for its API, its metrics and people."""

from collections import Counter

import numpy as np

from fedkeep.agent.agent import Agent
from fedkeep.agent.record import Note
from fedkeep.link.messages import GistStatus, LabelSummary, Status, StoredSummary, Vitals

QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)


def summarise(agent: Agent) -> Status:
    with agent.lock:
        device, store, gist = agent.device, agent.store, agent.device.gist
        scores, received, spending = store.ranks()["scores"], agent.model_date.received, agent.door.spending()
        told = None
        if gist is not None:
            did = {name: getattr(gist.latest, name, None) for name in ("trust", "likeness", "reach")}
            taken = gist.nbytes + device.window.nbytes
            told = GistStatus(gist.options.name, gist.worth, device.window.count, taken, **did)
        return Status(
            samples=len(scores),
            capacity=device.capacity,
            bytes=store.file.bytes_used,
            budget=store.file.geometry.size,
            round=store.model_version,
            model_age_seconds=None if received is None else store.clock.now() - received,
            counters=agent.counters.counts(),
            stride=agent.intake.stride,
            policy=store.log.policy,
            preset=agent.config.preset,
            value_quantiles=tuple(np.quantile(scores, QUANTILES).tolist()) if len(scores) else (),
            labels_held=len({note.label for note in store.records()}),
            labels=agent.config.samples.labels,
            epsilon_spent=None if spending is None else spending.spent,
            epsilon_budget=None if spending is None else spending.budget,
            sample_bytes=store.file.geometry.cell_size,
            gist=told,
        )


def vitals(agent: Agent) -> Vitals:
    """The store in the few numbers that a fleet's page shows."""
    with agent.lock:
        labels = Counter(note.label for note in agent.store.records())
        counts = Counter(agent.counters.counts())
        gist = None if agent.device.gist is None else agent.device.gist.figures()
    kept, replaced = counts["kept"], counts["replaced"]
    refused = sum(count for name, count in counts.items() if name.startswith("refused."))
    filled = tuple(labels[label] for label in range(agent.config.samples.labels))
    arrivals = kept + replaced + refused + counts["refreshed"]
    return Vitals(labels.total(), filled, arrivals, kept, replaced, refused, gist=gist)


def stored_summary(agent: Agent) -> StoredSummary:
    with agent.lock:
        notes, now = agent.store.notes(), agent.store.clock.now()
    by_label: dict[int, list[Note]] = {}
    for note in notes:
        by_label.setdefault(note.label, []).append(note)
    size, rows = agent.store.file.geometry.cell_size, []
    for label, found in sorted(by_label.items()):
        values = np.quantile([note.score for note in found], (0.0, 0.5, 1.0)).tolist()
        ages = [now - note.taken for note in found]
        rows.append(LabelSummary(label, len(found), len(found) * size, *values, max(ages), min(ages)))
    return StoredSummary(tuple(rows))
