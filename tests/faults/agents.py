"""Power cuts under whole agents: files as samples, labels that come later, rules and erasures."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep.agent.agent import Agent
from fedkeep.agent.arrivals import Arrival
from fedkeep.agent.assembly import assemble, parse_config
from tests.faults.power_loss import Losses, RecordingDisk, crash_image

_LABELS = 3
_NUMBERS: dict[str, Any] = {
    "policy": {"name": "balanced-reservoir"},
    "samples": {"shape": [6], "labels": _LABELS},
    "store": {"budget": 84_000, "log_length": 64},
    "waiting": {"share": 0.4, "rule": "random"},
}
_FILES: dict[str, Any] = {
    **_NUMBERS,
    "samples": {"shape": [6], "labels": _LABELS, "decoder": "npy", "payload_bytes": 2000},
    "store": {"budget": 300_000, "log_length": 64},
}
_RULES: dict[str, Any] = {
    **_FILES,
    "waiting": {"share": 0.0},
    "store": {"budget": 200_000, "log_length": 64, "typical_bytes": 400},
    "rule": [
        {"name": "alarms", "when": "label == 2", "slots": 6, "before": 2},
        {"name": "calm", "when": "label == 1", "action": "most", "n": 9, "per": "minute"},
    ],
}
KINDS = {
    "numbers whose labels come later": _NUMBERS,
    "files whose labels come later": _FILES,
    "files under rules": _RULES,
}


@dataclass(frozen=True)
class Held:
    """What an agent holds once a step is on the disk: a label or None, by the sample's number."""

    labels: dict[int, int | None]
    erased: frozenset[int]


def content(id_: int, *, is_file: bool) -> Any:
    """The one and only sample of that id; of a file, from one cell to several."""
    x = np.random.default_rng(id_).standard_normal(6)
    if not is_file:
        return x.astype(np.float32)
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (6,), }"
    header += b" " * (id_ * 137 % 1700) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + x.tobytes()


def held_by(agent: Agent, erased: set[int]) -> Held:
    labelled = {note.id: note.label for note in agent.store.records.values()}
    return Held(labelled | dict.fromkeys(agent.store.unlabelled), frozenset(erased))


def take_step(agent: Agent, step: int, rng: np.random.Generator, erased: set[int]) -> None:
    """Samples with and without labels, labels of earlier ones, or an erasure."""
    if step % 9 == 8:
        known = sorted(agent.store.records)
        chosen = {known[int(place)] for place in rng.integers(0, len(known), 2)}
        agent.erase(sorted(chosen))
        erased |= chosen
        return
    is_file, waits = agent.decode is not None, agent.device.waiting is not None
    batch = []
    for id_ in range(4 * step, 4 * step + 4):
        y = None if waits and rng.random() < 0.5 else id_ % _LABELS
        came = agent.intake.form.taken(content(id_, is_file=is_file))
        batch.append(Arrival(came, y, id_, "s"))
    waiting = sorted(agent.store.unlabelled)
    for id_ in waiting[: int(rng.integers(0, 4))]:
        batch.append(Arrival(None, id_ % _LABELS, id_, "s", label_only=True))
    if waits and agent.store.records and rng.random() < 0.3:
        corrected = max(agent.store.records)
        batch.append(Arrival(None, int(rng.integers(_LABELS)), corrected, "s", label_only=True))
    agent.judge(batch)
    assert agent.commit(whole=step % 7 == 0)


def _recorded(table: dict[str, Any], steps: int, seed: int) -> tuple[RecordingDisk, list[Held]]:
    agent = assemble(parse_config(table))
    path = Path(table["store"]["path"])
    agent.store.file.disk.close()
    disk = RecordingDisk(path.read_bytes())
    disk.written = disk.block_bytes = 0
    agent.store.file.disk = disk
    rng, erased = np.random.default_rng(seed), set[int]()
    held = [held_by(agent, erased)]
    for step in range(steps):
        take_step(agent, step, rng, erased)
        held.append(held_by(agent, erased))
        disk.acknowledge(step + 1)
    return disk, held


def table_of(kind: str, folder: Path) -> dict[str, Any]:
    """The configuration of such an agent."""
    store = {**KINDS[kind]["store"], "path": str(folder / "a.store")}
    return {**KINDS[kind], "store": store, "agent": {"nice": 0, "seed": 1}}


def try_power_cuts(kind: str, folder: Path, steps: int, states: int, seed: int = 0) -> Losses:
    """Cuts the power at random points and starts an agent on what is left.

    What was acknowledged is there under its label, or made way in the step that was under way; what
    was erased is not there.
    """
    table = table_of(kind, folder)
    disk, held = _recorded(table, steps, seed)
    rng, losses = np.random.default_rng(seed), Losses()
    for _ in range(states):
        point = int(rng.integers(0, len(disk.events) + 1))
        image, done = crash_image(disk, point, rng)
        (folder / "a.store").write_bytes(image)
        back = assemble(parse_config(table))
        _compare(back, held[done], held[min(done + 1, steps)], losses)
        back.store.file.disk.close()
    return losses


def _compare(agent: Agent, before: Held, after: Held, losses: Losses) -> None:
    found = held_by(agent, set()).labels
    losses.states += 1
    losses.lost += not before.labels.keys() & after.labels.keys() <= found.keys()
    unheard = found.keys() - before.labels.keys() - after.labels.keys()
    wrong = bool(unheard or found.keys() & before.erased)
    is_file = agent.decode is not None
    for id_, label in found.items():
        wrong |= label not in (before.labels.get(id_, -1), after.labels.get(id_, -1))
        stored = agent.store.payload(id_) if is_file else None
        wrong |= is_file and stored != content(id_, is_file=True)
    if not is_file:
        batch = agent.store.stored().batch
        for id_, x in zip(batch.ids.tolist(), batch.x, strict=True):
            wrong |= not np.array_equal(x, content(id_, is_file=False))
    losses.wrong += wrong
