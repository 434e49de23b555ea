"""What a run's record says of it: turns rounds and stores into lines."""

import base64
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from operator import attrgetter

import numpy as np

from fedkeep.core.coordination import LabelLimits
from fedkeep.core.ports import Fate, Outcome, Stored
from fedkeep.core.regions import LabelRegions
from fedkeep.core.types import AnyArray, Batch, DeviceId
from fedkeep.records import Change, DeviceLine, Evaluation, HoldingsLine, Line, PrivacyLine, Round, Slot
from fedkeep.records.measures import LISTED, gist_line, plan_line
from fedkeep.sim.engine import TALLIED, RoundRecord, Simulator
from fedkeep.sim.evaluation import ModelScores
from fedkeep.sim.fleet import SimulatedFleet

_CHANGES = 12
"""The most comings and goings that a line tells of a device."""


class Observer:
    """Sums up rounds between two evaluations; starts from nothing at each, so that a resumed run writes the same."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        self._data = simulator.parts.data
        self._fleet = simulator.parts.fleet if isinstance(simulator.parts.fleet, SimulatedFleet) else None
        regions = simulator.parts.regions
        self._clusters = 0 if isinstance(regions, LabelRegions) else regions.count
        """How many clusters the plan divides; 0 where it divides labels, or nothing."""
        pictures = image_size(self._data.sample_shape) is not None
        self._greys = (float(self._data.x.min()), float(self._data.x.max())) if pictures else None
        """Black and white, where samples are pictures."""
        self._watched = simulator.first_participants()[: simulator.experiment.record.devices]
        self._changes: dict[DeviceId, deque[Change]] = {d: deque(maxlen=_CHANGES) for d in self._watched}
        if self._fleet is not None:
            self._fleet.watchers.append(self._watch)
        self.start_anew()

    def start_anew(self) -> None:
        """Forgets what has been told, and takes the stores as they are for known."""
        self._participants: list[DeviceId] = []
        self._arrivals = self._dropouts = 0
        self._refused: Counter[str] = Counter()
        self._fates: Counter[int] = Counter()
        self._mendings: list[tuple[float, ...]] = []
        self._known = self._pairs()
        for changes in self._changes.values():
            changes.clear()

    def see(self, record: RoundRecord) -> None:
        """Takes a round into account."""
        self._participants += record.summary.participants
        self._arrivals += record.arrivals
        refused = {refusal.device for refusal in record.summary.refusals}
        self._dropouts += len(set(record.summary.missing) - refused)
        self._refused.update(refusal.reason for refusal in record.summary.refusals)
        if self._fleet is not None:
            gists = [self._fleet.devices[d].gist for d in record.summary.participants]
            self._mendings += [did for gist in gists if gist is not None and (did := gist.figures()) is not None]

    def opening(self) -> Iterator[Line]:
        """The lines before the first round: the plan, and how good the untrained model is."""
        plan, coordinator = self._simulator.server.plan, self._simulator.experiment.coordinator
        if plan is not None and isinstance(coordinator, LabelLimits):
            clusters = (f"cluster {region}" for region in range(self._clusters))
            yield plan_line(0, plan, coordinator.clients_per_label, clusters)
        yield self._evaluation(0, self._simulator.evaluate())

    def lines(self, round_: int, evaluated: ModelScores) -> Iterator[Line]:
        """The lines of an evaluation."""
        yield self._round(round_)
        if self._fleet is not None:
            yield from self._stored_lines(round_)
        if self._mendings:
            yield gist_line(round_, self._mendings)
        spending = self._simulator.parts.guards.most_spent()
        if spending is not None:
            left, delta = spending.left, spending.delta
            yield PrivacyLine(round=round_, epsilon_spent=spending.spent, epsilon_left=left, delta=delta)
        yield self._evaluation(round_, evaluated)

    def _evaluation(self, round_: int, evaluated: ModelScores) -> Evaluation:
        tally, few = self._simulator.tally, self._data.devices <= LISTED
        tested_first = self._simulator.prequential
        accuracy = evaluated.device_accuracy
        stored = [s for _, s in self._stores()]
        pairs = self._pairs()
        labels = {label for s in stored for label in s.batch.y.tolist()}
        return Evaluation(
            round=round_,
            accuracy=evaluated.accuracy,
            loss=evaluated.loss,
            device_accuracy=tuple(accuracy.tolist()) if few else (),
            device_accuracy_quantiles=tuple(np.nanquantile(accuracy, [0, 0.25, 0.5, 0.75, 1]).tolist()),
            worst_tenth=evaluated.worst_tenth,
            label_recall=tuple(evaluated.label_recall.tolist()),
            rare_recall=evaluated.rare_recall,
            prequential=tested_first.take() if tested_first is not None else None,
            bytes_stored=sum(s.batch.x.nbytes for s in stored),
            **{name: tally[name] for name in TALLIED},
            label_coverage=len(labels) / self._data.labels if self._fleet is not None else None,
            store_turnover=len(pairs - self._known) / len(pairs) if pairs else None,
        )

    def _round(self, round_: int) -> Round:
        return Round(
            round=round_,
            participants=tuple(sorted(set(self._participants)))[:LISTED],
            participations=len(self._participants),
            arrivals=self._arrivals,
            kept=self._fates[Fate.KEPT],
            replaced=self._fates[Fate.REPLACED],
            refused=self._fates[Fate.REFUSED],
            dropouts=self._dropouts,
            refused_reports=dict(self._refused),
            staleness=self._simulator.server.estimator.staleness(round_),
        )

    def _stored_lines(self, round_: int) -> Iterator[Line]:
        listed = [(d, stored) for d, stored in self._stores() if d < LISTED]
        divided, count = attrgetter("regions"), self._clusters
        if not self._clusters:
            divided, count = attrgetter("batch.y"), self._data.labels
        filled = [np.bincount(divided(stored), minlength=count) for _, stored in listed]
        yield HoldingsLine(
            round=round_, devices=tuple(d for d, _ in listed), filled=tuple(tuple(row.tolist()) for row in filled)
        )
        for d, stored in self._stores():
            if d in self._watched:
                yield self._device(round_, d, stored)

    def _device(self, round_: int, device: DeviceId, stored: Stored) -> DeviceLine:
        now = self._simulator.parts.stream.position(device, round_)
        slots = [
            Slot(id=id_, label=y, score=score, age=now - arrival, uses=uses, thumbnail=self._thumbnail(x))
            for x, y, id_, score, arrival, uses in zip(
                stored.batch.x,
                *(a.tolist() for a in (stored.batch.y, stored.batch.ids, stored.scores, stored.arrivals, stored.uses)),
                strict=True,
            )
        ]
        return DeviceLine(
            round=round_,
            device=device,
            capacity=self._simulator.experiment.storage.capacity,
            slots=tuple(slots),
            changes=tuple(self._changes[device]),
        )

    def _thumbnail(self, x: AnyArray) -> str | None:
        """The picture as 8-bit grey on the scale of all the data: one that is dim or drowned in noise looks so."""
        if self._greys is None:
            return None
        low, high = self._greys
        grey = np.clip(255 * (x - low) / max(high - low, 1e-12), 0, 255).astype(np.uint8)
        return base64.b64encode(grey.tobytes()).decode()

    def _watch(self, device: DeviceId, batch: Batch, outcome: Outcome) -> None:
        self._fates.update(outcome.fates.tolist())
        if device not in self._changes:
            return
        for i in np.flatnonzero(outcome.fates != Fate.REFUSED)[-_CHANGES:].tolist():
            displaced = int(outcome.displaced[i])
            change = Change(
                id=int(batch.ids[i]),
                label=int(batch.y[i]),
                score=float(outcome.scores[i]),
                fate=Fate(int(outcome.fates[i])).name.lower(),
                displaced=None if displaced < 0 else displaced,
            )
            self._changes[device].append(change)

    def _pairs(self) -> set[tuple[DeviceId, int]]:
        return {(d, id_) for d, stored in self._stores() for id_ in stored.batch.ids.tolist()}

    def _stores(self) -> Sequence[tuple[DeviceId, Stored]]:
        if self._fleet is None:
            return []
        return [(d, device.store.stored()) for d, device in sorted(self._fleet.devices.items())]


def image_size(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Height and width of samples that are grey images; None of any others."""
    if len(shape) == 3 and shape[0] == 1 and min(shape[1:]) >= 8:
        return shape[1], shape[2]
    return None
