"""The agent's state in a few numbers, for its API, its metrics and people."""

from __future__ import annotations

import numpy as np

from fedkeep.agent.agent import Agent
from fedkeep.agent.record import Note
from fedkeep.core.device import Device
from fedkeep.link.messages import GistStatus, LabelSummary, Status, StoredSummary, Vitals

QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)


def summarise(agent: Agent) -> Status:
    with agent.lock:
        notes = agent.store.notes()
        received = agent.model_date.received
        scores = np.array([note.score for note in notes])
        spending = agent.spending()
        quantiles = np.quantile(scores, QUANTILES).tolist() if notes else []
        return Status(
            samples=len(notes),
            capacity=agent.device.capacity,
            bytes=agent.store.bytes_used,
            budget=agent.store.budget,
            round=agent.store.model_version,
            model_age_seconds=None if received is None else agent.store.clock.now() - received,
            counters=agent.counters.counts(),
            stride=agent.intake.stride,
            policy=agent.store.log.policy,
            preset=agent.preset,
            value_quantiles=tuple(quantiles),
            labels_held=len({note.label for note in notes}),
            labels=agent.labels,
            epsilon_spent=None if spending is None else spending.spent,
            epsilon_budget=None if spending is None else spending.budget,
            sample_bytes=agent.store.bytes_per_sample,
            gist=_gist(agent.device),
        )


def _gist(device: Device) -> GistStatus | None:
    gist, window = device.gist, device.window
    if gist is None:
        return None
    did = {} if gist.latest is None else {name: getattr(gist.latest, name) for name in ("trust", "likeness", "reach")}
    return GistStatus(gist.options.name, gist.worth, window.count, gist.nbytes + window.nbytes, **did)


def vitals(agent: Agent) -> Vitals:
    """The store in the few numbers that a fleet's page shows."""
    with agent.lock:
        labels = [note.label for note in agent.store.notes()]
        counts = agent.counters.counts()
        gist = None if agent.device.gist is None else agent.device.gist.figures()
    refused = sum(count for name, count in counts.items() if name.startswith("refused."))
    kept, replaced = counts.get("kept", 0), counts.get("replaced", 0)
    arrivals = kept + replaced + refused + counts.get("refreshed", 0)
    filled = np.bincount(labels, minlength=agent.labels).tolist() if labels else [0] * agent.labels
    return Vitals(len(labels), tuple(filled), arrivals, kept, replaced, refused, gist=gist)


def stored_summary(agent: Agent) -> StoredSummary:
    with agent.lock:
        notes, now = agent.store.notes(), agent.store.clock.now()
    by_label: dict[int, list[Note]] = {}
    for note in notes:
        by_label.setdefault(note.label, []).append(note)
    size = agent.store.bytes_per_sample
    return StoredSummary(tuple(_of_label(label, found, size, now) for label, found in sorted(by_label.items())))


def _of_label(label: int, notes: list[Note], size: int, now: float) -> LabelSummary:
    lowest, median, highest = np.quantile([note.score for note in notes], (0.0, 0.5, 1.0)).tolist()
    ages = [now - note.taken for note in notes]
    return LabelSummary(label, len(notes), len(notes) * size, lowest, median, highest, max(ages), min(ages))
