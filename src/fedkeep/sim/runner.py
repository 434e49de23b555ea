"""Runs of an experiment into its record, with checkpoints from which a run can resume."""

import base64
import hashlib
import time
import zipfile
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep.config.experiment import RunSpec
from fedkeep.core.errors import DataError
from fedkeep.core.gist import GistFigures
from fedkeep.core.planning.greedy import LabelLimits
from fedkeep.core.protocols import OfferResult, Outcome, Stored
from fedkeep.core.regions import LabelRegions, TargetRegions
from fedkeep.core.types import Batch, DeviceId, IntArray
from fedkeep.data import Federation
from fedkeep.files import atomic_write
from fedkeep.records import Recorder, lines, read_run
from fedkeep.records.measures import LISTED, gist_line, plan_line
from fedkeep.records.runs import begins_with_header, is_intact_until, versions
from fedkeep.sim.engine import TALLIED, ModelScores, RoundRecord, Simulator
from fedkeep.sim.fleet import SimulatedFleet

_CHANGES = 12
"""The most comings and goings that a line tells of a device."""
Progress = Callable[[int, float | None], None]
"""Called with the rounds done and, where it was measured, the accuracy."""


def record_path(cell: RunSpec, directory: Path) -> Path:
    """Return where the record of a run lies in a directory."""
    return directory / f"{cell.name}.jsonl"


def is_finished(cell: RunSpec, directory: Path) -> bool:
    """Whether the directory holds the whole record of this very experiment."""
    try:
        run = read_run(record_path(cell, directory))
    except DataError:
        return False
    return run.end is not None and run.header.config_hash == cell.experiment.digest()


@np.errstate(over="ignore", invalid="ignore")  # the record tells a diverging run
def play(
    cell: RunSpec, directory: Path, *, resume: bool = False, progress: Progress | None = None
) -> Path:
    """Run an experiment to its end; with `resume`, from its last checkpoint.

    >>> import tempfile
    >>> from fedkeep.config.experiment import expand
    >>> table = {"task": {"name": "demo", "devices": 4}, "train": {"rounds": 2}}
    >>> table["policy"] = {"name": "fifo"}
    >>> [cell] = expand(table)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = read_run(play(cell, Path(folder)))
    >>> run.header.method, run.end.round
    ('fifo', 2)
    """
    path = record_path(cell, directory)
    if resume and is_finished(cell, directory):
        return path
    restored = _restored(cell, path) if resume and begins_with_header(path) else None
    simulator, seconds = restored or (Simulator(cell.experiment), 0.0)
    observer, saved = Observer(simulator), simulator.server.round
    with Recorder(path) as recorder:
        if restored is not None:
            recorder.truncate_after(saved)
        else:
            recorder.start(_header(cell, simulator.parts.data))
            for line in observer.opening():
                recorder.write(line)
        began = time.perf_counter() - seconds
        for record in simulator.run():
            for line in observer.see(record):
                recorder.write(line)
            if record.evaluation is not None:
                seconds = time.perf_counter() - began
                recorder.write(lines.Timing(round=record.round, seconds=seconds))
                if record.round - saved >= cell.experiment.record.checkpoint_every:
                    recorder.sync()
                    _save(cell, path, simulator, seconds)
                    saved = record.round
            if progress is not None:
                progress(record.round, record.evaluation.accuracy if record.evaluation else None)
        digest = hashlib.sha256(simulator.server.model.tobytes()).hexdigest()
        recorder.write(lines.End(round=simulator.server.round, digest=digest))
    _checkpoint(path).unlink(missing_ok=True)
    return path


def _checkpoint(path: Path) -> Path:
    """Return the path of a run's state, saved at evaluations when the record is complete."""
    return path.with_suffix(".checkpoint")


def _save(cell: RunSpec, path: Path, simulator: Simulator, seconds: float) -> None:
    state = simulator.snapshot()
    state["config_hash"], state["seconds"] = np.array(cell.experiment.digest()), np.array(seconds)
    # Names in a zip file are paths: slashes would become folders.
    members: Any = {name.replace("/", "|"): array for name, array in state.items()}
    with atomic_write(_checkpoint(path)) as file:
        np.savez(file, **members)


def _restored(cell: RunSpec, path: Path) -> tuple[Simulator, float] | None:
    """Return the last checkpoint and its seconds; None without one of this experiment."""
    try:
        with np.load(_checkpoint(path), allow_pickle=False) as arrays:
            state = {name.replace("|", "/"): array for name, array in arrays.items()}
    except FileNotFoundError:
        return None
    except (zipfile.BadZipFile, ValueError, EOFError) as error:
        raise DataError(
            f"the checkpoint {_checkpoint(path)} is damaged; delete it to start that run anew"
        ) from error
    if str(state.pop("config_hash")) != cell.experiment.digest():
        return None
    simulator, seconds = Simulator(cell.experiment), float(state.pop("seconds"))
    simulator.restore(state)
    return (simulator, seconds) if is_intact_until(path, simulator.server.round) else None


def _header(cell: RunSpec, data: Federation) -> lines.Header:
    experiment = cell.experiment
    return lines.Header(
        run=cell.name,
        method=experiment.label,
        task=experiment.names["task"],
        seed=experiment.seed,
        config=experiment.resolved(),
        config_hash=experiment.digest(),
        versions=versions(),
        labels=data.label_names,
        devices=data.devices,
        rounds=experiment.train.rounds,
        setting=cell.setting,
        image=image_size(data.sample_shape),
        measure="accuracy" if data.targets is None else "r2",
    )


class Observer:
    """Sums up rounds between two evaluations, from nothing at each, so that runs can resume."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator, self._data = simulator, simulator.parts.data
        self._fleet = (
            simulator.parts.fleet if isinstance(simulator.parts.fleet, SimulatedFleet) else None
        )
        regions = simulator.parts.regions
        self._clusters = 0 if isinstance(regions, LabelRegions | TargetRegions) else regions.count
        """How many clusters the plan divides; 0 where it divides labels, or nothing."""
        pictures = image_size(self._data.sample_shape) is not None
        self._greys = (float(self._data.x.min()), float(self._data.x.max())) if pictures else None
        watched = simulator.participants(0)[: simulator.experiment.record.devices]
        self._changes: dict[DeviceId, deque[lines.Change]] = {
            d: deque(maxlen=_CHANGES) for d in watched
        }
        if self._fleet is not None:
            self._fleet.watchers.append(self._watch)
        self._start_anew()

    def _start_anew(self) -> None:
        """Forgets what has been told, and takes the stores as they are for known."""
        self._rounds: list[RoundRecord] = []
        self._fates: Counter[int] = Counter()
        self._figures: list[GistFigures] = []
        self._known = _pairs(self._stores())
        for changes in self._changes.values():
            changes.clear()

    def see(self, record: RoundRecord) -> Iterator[lines.Line]:
        """Take a round into account; return the lines of its evaluation, if it has one."""
        self._rounds.append(record)
        if self._fleet is not None:
            gists = [self._fleet.devices[d].gist for d in record.summary.participants]
            self._figures += [
                did for gist in gists if gist is not None and (did := gist.figures) is not None
            ]
        if record.evaluation is not None:
            yield from self._account(record.round, record.evaluation)
            self._start_anew()

    def opening(self) -> Iterator[lines.Line]:
        """Return the lines before the first round: the plan, and the first evaluation."""
        plan, coordinator = self._simulator.server.plan, self._simulator.experiment.coordinator
        if plan is not None and isinstance(coordinator, LabelLimits):
            clusters = (f"cluster {region}" for region in range(self._clusters))
            yield plan_line(0, plan, coordinator.clients_per_label, clusters)
        yield self._evaluation(0, self._simulator.evaluate(), self._stores())

    def _account(self, round_: int, evaluated: ModelScores) -> Iterator[lines.Line]:
        summaries = [record.summary for record in self._rounds]
        participants = [device for summary in summaries for device in summary.participants]
        away = [
            set(summary.missing) - {rejection.device for rejection in summary.rejections}
            for summary in summaries
        ]
        yield lines.Round(
            round=round_,
            participants=tuple(sorted(set(participants)))[:LISTED],
            participations=len(participants),
            arrivals=sum(record.arrivals for record in self._rounds),
            kept=self._fates[OfferResult.KEPT],
            replaced=self._fates[OfferResult.REPLACED],
            refused=self._fates[OfferResult.REFUSED],
            dropouts=sum(map(len, away)),
            refused_reports=Counter(
                rejection.reason for summary in summaries for rejection in summary.rejections
            ),
            staleness=self._simulator.server.estimator.staleness(round_),
        )
        stores = self._stores()
        if self._fleet is not None:
            listed, count = [d for d in stores if d < LISTED], self._clusters or self._data.labels
            divided = [
                stores[d].regions if self._clusters else self._labels(stores[d].batch)
                for d in listed
            ]
            filled = tuple(tuple(np.bincount(own, minlength=count).tolist()) for own in divided)
            yield lines.HoldingsLine(round=round_, devices=tuple(listed), filled=filled)
            yield from (
                self._device(round_, d, stored)
                for d, stored in stores.items()
                if d in self._changes
            )
        if self._figures:
            yield gist_line(round_, self._figures)
        spending = self._simulator.parts.mechanisms.most_spent()
        if spending is not None:
            left, delta = spending.left, spending.delta
            yield lines.PrivacyLine(
                round=round_, epsilon_spent=spending.spent, epsilon_left=left, delta=delta
            )
        yield self._evaluation(round_, evaluated, stores)

    def _evaluation(
        self, round_: int, evaluated: ModelScores, stores: dict[DeviceId, Stored]
    ) -> lines.Evaluation:
        accuracy, pairs = evaluated.device_accuracy, _pairs(stores)
        right, tested = (sum(record.tested[i] for record in self._rounds) for i in (0, 1))
        labels = {
            label for stored in stores.values() for label in self._labels(stored.batch).tolist()
        }
        numbers = evaluated.numbers
        return lines.Evaluation(
            round=round_,
            accuracy=evaluated.accuracy,
            loss=evaluated.loss,
            rmse=None if numbers is None else numbers.rmse,
            mae=None if numbers is None else numbers.mae,
            device_accuracy=tuple(accuracy.tolist()) if self._data.devices <= LISTED else (),
            device_accuracy_quantiles=tuple(
                np.nanquantile(accuracy, [0, 0.25, 0.5, 0.75, 1]).tolist()
            ),
            worst_tenth=evaluated.worst_tenth,
            label_recall=tuple(evaluated.label_recall.tolist()),
            rare_recall=evaluated.rare_recall,
            prequential=right / tested if tested else None,
            bytes_stored=sum(stored.batch.x.nbytes for stored in stores.values()),
            **{name: self._simulator.tally[name] for name in TALLIED},
            label_coverage=len(labels) / self._data.labels if self._fleet is not None else None,
            store_turnover=len(pairs - self._known) / len(pairs) if pairs else None,
        )

    def _device(self, round_: int, device: DeviceId, stored: Stored) -> lines.DeviceLine:
        now = self._simulator.parts.stream.position(device, round_)
        labels = self._labels(stored.batch)
        columns = (stored.batch.ids, labels, stored.scores, stored.arrivals, stored.uses)
        thumbnails: list[str | None] = [None] * len(stored.batch)
        if self._greys is not None:  # on the scale of all the data
            low, high = self._greys
            grey = np.clip(255 * (stored.batch.x - low) / max(high - low, 1e-12), 0, 255).astype(
                np.uint8
            )
            thumbnails = [base64.b64encode(picture.tobytes()).decode() for picture in grey]
        shown = self._data.targets is not None and stored.batch.y.ndim == 1
        targets = stored.batch.y.tolist() if shown else [None] * len(stored.batch)
        rows = zip(*(column.tolist() for column in columns), targets, thumbnails, strict=True)
        slots = tuple(
            lines.Slot(
                id=id_,
                label=label,
                score=score,
                age=now - arrival,
                uses=uses,
                target=target,
                thumbnail=thumbnail,
            )
            for id_, label, score, arrival, uses, target, thumbnail in rows
        )
        capacity, changes = (
            int(self._simulator.parts.capacities[device]),
            tuple(self._changes[device]),
        )
        return lines.DeviceLine(
            round=round_, device=device, capacity=capacity, slots=slots, changes=changes
        )

    def _watch(self, device: DeviceId, batch: Batch, outcome: Outcome) -> None:
        self._fates.update(outcome.results.tolist())
        if device not in self._changes:
            return
        labels = self._labels(batch)
        for i in np.flatnonzero(outcome.results != OfferResult.REFUSED)[-_CHANGES:].tolist():
            id_, label, score = int(batch.ids[i]), int(labels[i]), float(outcome.scores[i])
            fate, displaced = (
                OfferResult(int(outcome.results[i])).name.lower(),
                int(outcome.evicted[i]),
            )
            gone = None if displaced < 0 else displaced
            self._changes[device].append(
                lines.Change(id=id_, label=label, score=score, fate=fate, displaced=gone)
            )

    def _labels(self, batch: Batch) -> IntArray:
        """Give the labels of samples, or the intervals of their targets."""
        targets = self._data.targets
        return batch.y if targets is None else targets.assign(batch.y)

    def _stores(self) -> dict[DeviceId, Stored]:
        devices = self._fleet.devices if self._fleet is not None else {}
        return {d: device.store.stored() for d, device in sorted(devices.items())}


def _pairs(stores: dict[DeviceId, Stored]) -> set[tuple[DeviceId, int]]:
    return {(d, id_) for d, stored in stores.items() for id_ in stored.batch.ids.tolist()}


def image_size(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Height and width of samples that are grey images; None of any others."""
    return (
        (shape[1], shape[2]) if len(shape) == 3 and shape[0] == 1 and min(shape[1:]) >= 8 else None
    )
