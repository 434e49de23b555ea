"""The agent's state in a few numbers, for its API, its metrics and people."""

from pathlib import Path

import numpy as np

from fedkeep.agent.agent import Agent
from fedkeep.agent.record import Note
from fedkeep.core.device import Device
from fedkeep.core.errors import ConfigError
from fedkeep.core.orders import screen_parameters
from fedkeep.core.screening import screen_samples
from fedkeep.core.types import AnyArray, Vector
from fedkeep.learn.judging import judge
from fedkeep.link.messages import Evaluated, GistStatus, LabelSummary, Status, StoredSummary, Vitals

QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)


def summarise(agent: Agent) -> Status:
    with agent.lock:
        scores = agent.store.ranks()["scores"]
        received = agent.model_date.received
        spending = agent.door.spending()
        quantiles = np.quantile(scores, QUANTILES).tolist() if len(scores) else []
        return Status(
            samples=len(scores),
            capacity=agent.device.capacity,
            bytes=agent.store.file.bytes_used,
            budget=agent.store.file.geometry.size,
            round=agent.store.model_version,
            model_age_seconds=None if received is None else agent.store.clock.now() - received,
            counters=agent.counters.counts(),
            stride=agent.intake.stride,
            policy=agent.store.log.policy,
            preset=agent.preset,
            value_quantiles=tuple(quantiles),
            labels_held=len({note.label for note in agent.store.records()}),
            labels=agent.labels,
            epsilon_spent=None if spending is None else spending.spent,
            epsilon_budget=None if spending is None else spending.budget,
            sample_bytes=agent.store.file.geometry.cell_size,
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
        labels = [note.label for note in agent.store.records()]
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
    size = agent.store.file.geometry.cell_size
    return StoredSummary(tuple(_of_label(label, found, size, now) for label, found in sorted(by_label.items())))


def _of_label(label: int, notes: list[Note], size: int, now: float) -> LabelSummary:
    lowest, median, highest = np.quantile([note.score for note in notes], (0.0, 0.5, 1.0)).tolist()
    ages = [now - note.taken for note in notes]
    return LabelSummary(label, len(notes), len(notes) * size, lowest, median, highest, max(ages), min(ages))


_CHUNK = 256


class Evaluator:
    """Measures models on held-out samples where the operator gave some, else on what is stored."""

    def __init__(self, agent: Agent, held_out: str | None, shape: tuple[int, ...]) -> None:
        self._agent = agent
        self._held_out = _read(Path(held_out), shape, agent.labels) if held_out else None

    def evaluate(self, model: Vector) -> Evaluated:
        """Losses summed, and how many labels were right."""
        screen_parameters(model, self._agent.device.learner.size, "model")
        if self._held_out is not None:
            x, y = self._held_out
        else:
            with self._agent.lock:
                batch = self._agent.store.stored().batch
            x, y = batch.x, batch.y
        loss, right = 0.0, 0
        for start in range(0, len(y), _CHUNK):
            part = slice(start, start + _CHUNK)
            losses, found = judge(self._agent.device.learner, model, x[part], y[part])
            loss, right = loss + float(losses.sum()), right + int(found.sum())
        where = "stored" if self._held_out is None else "held-out"
        return Evaluated(len(y), loss, right, where, self._agent.door.vitals(vitals(self._agent)))


def _read(path: Path, shape: tuple[int, ...], labels: int) -> tuple[AnyArray, AnyArray]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            x, y = arrays["x"], arrays["y"]
    except Exception as error:
        raise ConfigError(f"held_out must be an npz file with x and y, {path} is not: {error}") from error
    sound, refused = screen_samples(x, y, shape, labels)
    if refused:
        raise ConfigError(f"held_out file {path} holds unsound samples: {dict(refused)}")
    return x[sound], y[sound].astype(np.int64)
