"""The record of a real fleet, in the same lines as a simulation's.

A round's lines are written before the round is committed, and a server that resumes cuts off what
was not: after a crash the record tells of each round once.
"""

import hashlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from pathlib import Path

import numpy as np
from msgspec import structs

from fedkeep.config.method import FleetSpec
from fedkeep.core.gist import GistFigures
from fedkeep.core.planning.greedy import LabelLimits
from fedkeep.core.planning.plan import Plan
from fedkeep.core.server import Server
from fedkeep.core.types import DeviceId, IntArray
from fedkeep.flower.membership import Membership
from fedkeep.flower.rounds import RoundOutcome
from fedkeep.protocol.messages import Evaluated
from fedkeep.records import Recorder, lines
from fedkeep.records.measures import LISTED, gist_line, plan_line
from fedkeep.records.runs import begins_with_header, read_run, versions

_SIGN_OF_LIFE_SECONDS = 20.0
_COUNTS = ("arrivals", "kept", "replaced", "refused")
_NEVER_SEEN = Evaluated(samples=0, total_loss=0.0, correct=0)


@dataclass(frozen=True)
class FleetRecordOptions:
    """`records`: where the run's record is written; `fedkeep watch` follows the folder."""

    directory: str = ""
    """Empty: nowhere."""


def header_of(spec: FleetSpec) -> lines.Header:
    """Return the first line of a fleet's record."""
    run = str(spec.deployment["state"].get("run", "default"))
    described = spec.described() | {"preset": spec.preset, **spec.deployment}
    digest = hashlib.sha256(repr(sorted(described.items())).encode()).hexdigest()[:16]
    return lines.Header(
        run=run, method=spec.names["policy"], task="fleet", seed=spec.seed, config=described,
        config_hash=digest,
        versions=versions(), labels=spec.label_names, devices=0, rounds=spec.train.rounds,
        measure="accuracy" if spec.samples.numbers is None else "r2",
    )  # fmt: skip


class FleetRecorder:
    """Writes what a server sees of its fleet, round by round."""

    def __init__(self, path: Path, header: lines.Header) -> None:
        self._path, self._header, self._resumed = path, header, False
        self._recorder: Recorder
        self._planned: Plan | None = None
        self._written: list[lines.Member] = []
        self._evaluated: dict[DeviceId, Evaluated] = {}
        self._took_part: set[DeviceId] = set()
        self._rejected: dict[DeviceId, str] = {}
        self._began = self._written_at = time.monotonic()

    @contextmanager
    def recording(self, server: Server) -> Iterator[None]:
        """Hold the record open, and end it with the run; a resumed one is cut to its round."""
        self._resumed = server.round > 0 and begins_with_header(self._path)
        with Recorder(self._path) as self._recorder:
            if self._resumed:
                self._recorder.truncate_after(server.round)
                self._began -= sum(timing.seconds for timing in read_run(self._path).timings[-1:])
            else:
                self._recorder.start(self._header)
            yield
            digest = hashlib.sha256(server.model.tobytes()).hexdigest()
            self._recorder.write(lines.End(round=server.round, digest=digest))

    def note(
        self, outcome: RoundOutcome, server: Server, fleet: Membership, tally: IntArray
    ) -> None:
        """Write a round that is about to be committed."""
        done, accepted = outcome.summary.round + 1, set(outcome.summary.accepted)
        rejected = self._rejected | {
            rejection.device: rejection.reason for rejection in outcome.rejections
        }
        self._rejected = {
            device: reason for device, reason in rejected.items() if device not in accepted
        }
        self._took_part |= accepted
        reasons: defaultdict[str, list[int]] = defaultdict(list)
        for rejection in sorted(outcome.rejections, key=attrgetter("reason", "device")):
            reasons[rejection.reason].append(rejection.device)
        plan, coordinator, write = server.plan, server.coordinator, self._recorder.write
        if plan is not None and plan is not self._planned and isinstance(coordinator, LabelLimits):
            self._planned = plan
            write(plan_line(done, plan, coordinator.clients_per_label))
        round_line = lines.Round(
            round=done,
            participants=outcome.summary.participants[:LISTED],
            participations=len(outcome.summary.participants),
            dropouts=len(
                set(outcome.summary.missing)
                - {rejection.device for rejection in outcome.rejections}
            ),
            refused_reports={reason: len(devices) for reason, devices in reasons.items()},
            refused_devices={reason: tuple(devices) for reason, devices in reasons.items()},
            staleness=server.estimator.staleness(done),
            **self._since_reported(outcome.evaluated),
        )
        write(round_line)
        self._evaluated |= outcome.evaluated
        for line in self._evaluation(done, outcome, tally) if outcome.evaluated else ():
            write(line)
        write(lines.Timing(round=done, seconds=time.monotonic() - self._began))
        self.note_members(done, fleet)
        self._recorder.sync()

    def note_members(self, round_: int, fleet: Membership) -> None:
        """Write who is in the fleet, if that has changed or was not written for a while."""
        members = []
        for device, entry in sorted(fleet.entries.items())[:LISTED]:
            reported = self._evaluated.get(device, _NEVER_SEEN)
            vitals, name = reported.vitals, entry.name or f"device {device}"
            stored, labels = (
                (None, None) if vitals is None else (vitals.stored, sum(map(bool, vitals.filled)))
            )
            member = lines.Member(
                device=device, name=name, online=device in fleet.present,
                capacity=entry.profile.capacity, stored=stored, labels=labels,
                accuracy=None if np.isnan(reported.accuracy) else reported.accuracy,
                refused=self._rejected.get(device),
                changes=None if vitals is None else vitals.changes,
                silent=0 if vitals is None else vitals.silent or 0,
            )  # fmt: skip
            members.append(member)
        if members != self._written or time.monotonic() - self._written_at > _SIGN_OF_LIFE_SECONDS:
            self._written, self._written_at = members, time.monotonic()
            seen = tuple(
                structs.replace(member, seen=fleet.last_seen.get(member.device))
                for member in members
            )
            self._recorder.write(lines.Members(round=round_, members=seen))

    def _since_reported(self, evaluated: Mapping[DeviceId, Evaluated]) -> dict[str, int]:
        """Return what the devices' stores did since they last reported, or since a resume."""
        since = dict.fromkeys(_COUNTS, 0)
        for device, reported in evaluated.items():
            known = self._evaluated.get(device, reported if self._resumed else _NEVER_SEEN)
            for name in _COUNTS if reported.vitals is not None else ():
                since[name] += max(
                    0, getattr(reported.vitals, name) - getattr(known.vitals, name, 0)
                )
        return since

    def _evaluation(
        self, done: int, outcome: RoundOutcome, tally: IntArray
    ) -> Iterator[lines.Line]:
        evaluated = dict(sorted(outcome.evaluated.items()))
        vitals = {device: e.vitals for device, e in evaluated.items() if e.vitals is not None}
        labels = len(self._header.labels)
        if vitals:
            rows = {device: (*v.filled, *[0] * labels)[:labels] for device, v in vitals.items()}
            listed = tuple(device for device in rows if device < LISTED)
            yield lines.HoldingsLine(
                round=done, devices=listed, filled=tuple(rows[device] for device in listed)
            )
            held = np.array(list(rows.values())).sum(axis=0) > 0
        budgets = ((v.epsilon_spent, v.epsilon_left, v.delta) for v in vitals.values())
        if spent := [
            (most, left, delta)
            for most, left, delta in budgets
            if most is not None and delta is not None
        ]:
            most, left, delta = max(spent, key=itemgetter(0))
            yield lines.PrivacyLine(round=done, epsilon_spent=most, epsilon_left=left, delta=delta)
        figures = [
            GistFigures(*v.gist)
            for device, v in vitals.items()
            if v.gist is not None and device in self._took_part
        ]
        self._took_part = set()
        if figures:
            yield gist_line(done, figures)
        accuracies = [e.accuracy for e in evaluated.values()]
        known = [a for a in accuracies if not np.isnan(a)]
        yield lines.Evaluation(
            round=done,
            accuracy=outcome.evaluation.get("accuracy"),
            loss=outcome.evaluation.get("loss"),
            rmse=outcome.evaluation.get("rmse"),
            mae=outcome.evaluation.get("mae"),
            device_accuracy=tuple(accuracies) if len(accuracies) <= LISTED else (),
            device_accuracy_quantiles=tuple(np.quantile(known, [0, 0.25, 0.5, 0.75, 1]).tolist())
            if known
            else (),
            samples_valued=sum(v.arrivals for v in vitals.values()),
            bytes_up=int(tally[1]),
            bytes_down=int(tally[0]),
            label_coverage=float(held.mean()) if vitals else None,
        )
