"""The store on disk.

The core's in-memory store decides, this one makes its decisions survive a power cut.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from hashlib import blake2b

import numpy as np

from fedkeep.agent import record
from fedkeep.agent.cellfile import Blob, CellFile
from fedkeep.agent.record import (
    APART,
    META_BYTES,
    DecisionLog,
    SampleForm,
    SampleMetadata,
    Verdict,
    join_content,
    origin_of,
    split_content,
)
from fedkeep.agent.retention import AgeClock
from fedkeep.core.errors import ConfigError, FedkeepError, RejectedError
from fedkeep.core.protocols import OfferResult, Outcome, Stored
from fedkeep.core.regions import LabelRegions, Regions, TargetRegions
from fedkeep.core.rules.store import HELD, HeldSample, RuledStore
from fedkeep.core.store import MemoryStore
from fedkeep.core.types import AnyArray, ArraySpec, Batch, IntArray, Scores, State, StateSpec
from fedkeep.core.waiting import UNLABELLED, Departure
from fedkeep.encoding import SampleCodec

COPIES = 2
"""Of what samples cannot be read without.

The scales of their encoding, and the names of their sources.
"""
_SOURCES = "sources"
SOURCE_NAMES = 256
"""Bytes for the names of sources.

Those that came when it was full are known as long as the process lives.
"""
_BUCKET = 64
"""Ranks are written in buckets of about this many samples, so that a renewed score costs few bytes.
"""
_RANK = [("ids", "<i8"), ("scores", "<f8"), ("arrivals", "<i8"), ("uses", "<i4"), ("tiers", "i1")]
RANKS = {False: np.dtype(_RANK), True: np.dtype([*_RANK, ("effective", "<f8")])}
"""A rank, by whether the score that counts may not be the sample's own.

Where `after_use` is `discount`.
"""
_RANKS = "ranks."
_LATE_AT_ONCE = 8
"""No store has less room than this beside its samples."""
_RANKED = 1
"""The tier of a sample that nothing but its score moves; as in `MemoryStore.snapshot`."""


class DurableStore:
    """Implements the `Store` port; changes reach the file all at once, by `commit`.

    A sample's record is written once. Scores that change later go into small arrays of ranks beside
    it.

    It is the journal of a waiting room, too. A sample that waits is a record without a label; its
    label, like one that is corrected, comes with a record that takes the former one's place.
    """

    def __init__(  # noqa: PLR0915 - one journal's parts
        self,
        file: CellFile,
        index: MemoryStore,
        form: SampleForm,
        log: DecisionLog,
        clock: AgeClock,
        capacity: int,
        sample_cells: int = 0,
        decode: Callable[[bytes], AnyArray] | None = None,
        regions: Regions | None = None,
    ) -> None:
        self.file, self._index, self.codec = file, index, form.codec()
        self.ranks = index.ranks
        self.mark_used, self.expire = index.mark_used, index.expire
        self.label_of = index.label_of
        self.log, self.clock = log, clock
        self.model_version = -1
        """Noted with every decision; the agent sets it when a new model arrives."""
        self.source = ""
        """Where the batch being offered comes from."""
        self.names: dict[int, str] = {}
        """What the samples of that batch were called, by their ids, where the id is not the name
        itself.
        """
        self.times: dict[int, float] = {}
        """The own times of the records of that batch, by their ids."""
        self.payloads: dict[int, bytes] = {}
        """The files of that batch, by their ids, where samples are files."""
        self.name_bytes = form.name_bytes
        self._form, self._decode = form, decode
        self._sample_cells, self._used_cells = sample_cells, 0
        """How many cells the samples may take, and take; counted where samples are files."""
        self.wanted: dict[int, list[str]] = {}
        """Of samples that come without labels, the rules that want them kept, by their ids."""
        self._files: dict[int, bytes] = {}
        """The files that are stored, by their samples' ids; those that wait for a label, too."""
        self._released: dict[int, bytes] = {}
        """The files of samples that waited and got their label, until they are offered."""
        self._targets, self._width = form.targets, form.target_width
        self._capacity, self._discounts, self._regions = capacity, form.discounts, regions
        self._written: dict[str, tuple[int, bytes]] = {}
        """By an array's name, the number of its blob and a digest of its bytes."""
        self._ranks: State = {}
        """As they were found in the file."""
        self.records: dict[int, SampleMetadata] = {}
        """What was known of each sample when it was stored.

        Also before `restore` has put them to use.
        """
        self.unlabelled: dict[int, SampleMetadata] = {}
        """What is known of each sample that waits for its label."""
        self._before: dict[int, SampleMetadata] = {}
        """The same of samples whose label has just come."""
        self._swaps = False
        """Whether records give way to others of the same samples: then a commit must be atomic,
        or a crash could leave neither."""
        self._blobs: dict[int, int] = {}
        self.staged: dict[int, tuple[bytes, int | None]] = {}
        """Samples that the next commit has to write, encoded, each with the blob whose place it
        takes, if any.
        """
        self._late: dict[int, tuple[bytes, int | None]] = {}
        """The same of samples that rules hold after all; written a few at a time, since there can
        be more of them than one commit has room for."""
        self._settled: dict[bytes, bytes] = {}
        """The samples settled last, and how each of them is encoded."""
        self._quotas: IntArray | None = None
        self._obsolete: list[int] = []
        """Other blobs that go with the next commit: their samples have left, or are there anew."""
        self._samples: dict[int, bytes] = {}
        self._waiting_rows: dict[int, bytes] = {}
        self._sources = [""]
        self.source_bytes = SOURCE_NAMES
        """Of the names of sources, with those of rules."""
        self.groups_of: Callable[[SampleMetadata], list[tuple[int, int]]] | None = None
        """Tells the rules that held a sample, and its group under each; None without rules."""
        self._remembered: dict[int, SampleMetadata] = {}
        """What a rule needs to know of a sample of the batch, if it holds it later on."""
        if isinstance(index, RuledStore):
            index.tag = lambda id_: (self._remembered.get(id_), self.payloads.get(id_))
        self.readable = False
        """Whether all that samples cannot be read without is on the disk.

        If not, a commit of some must be whole.
        """

    def configure(self, quotas: IntArray) -> list[int]:
        """Set the slots of each region; returns the ids of what was dropped."""
        self._quotas = quotas.copy()
        return self._let_go(self._index.configure(quotas), Verdict.DROPPED)

    def offer(self, batch: Batch, regions: IntArray, scores: Scores, arrivals: IntArray) -> Outcome:
        """Offer samples; what is kept is written by the next commit."""
        labels, targets = self._labelled(batch)
        self._remember(batch.ids, labels, targets)
        if self._decode is not None:
            # The files are kept, and the numbers made again when they are wanted.
            slim = Batch(np.zeros((len(batch), 0), np.float32), batch.y, batch.ids)
            outcome = self._index.offer(slim, regions, scores, arrivals)
        else:
            outcome = self._index.offer(batch, regions, scores, arrivals)
        wall, taken = self.clock.wall(), self.clock.now()
        refused = outcome.results == OfferResult.REFUSED
        self.log.add_refusals(labels, batch.ids, arrivals, outcome, self.model_version, wall)
        columns = (batch.ids, arrivals, scores, outcome.thresholds, outcome.evicted, labels)
        for i in np.flatnonzero(~refused | (outcome.evicted >= 0)).tolist():
            if refused[
                i
            ]:  # it was stored, came again and leaves; later in the batch it may be kept anew
                self._let_go([int(batch.ids[i])], Verdict.DROPPED)
                continue
            id_, arrival, score, floor, displaced, label = (c[i].item() for c in columns)
            note = SampleMetadata(
                id_,
                arrival,
                score,
                floor,
                displaced,
                label,
                self.model_version,
                taken,
                wall,
                self.source,
                int(regions[i]),
                name=self.names.get(id_, "") if self.name_bytes else "",
                target=targets[i],
                time=self.times.get(id_, math.nan) if self._form.extra_bytes else math.nan,
            )
            note = self._with_rules(note)
            fate = outcome.results[i]
            self.log.add(note, Verdict(int(fate)))
            if (before := self._before.pop(note.id, None)) is not None:
                # What bounds its stay counts from when it first came.
                note = note._replace(
                    taken=before.taken,
                    wall=before.wall,
                    source=before.source,
                    name=before.name,
                    time=before.time,
                )
            if fate != OfferResult.REFRESHED:
                place = self._discard(note.displaced) if fate == OfferResult.REPLACED else None
                content = join_content(self._row(batch, i), note, self._form)
                self.records[note.id], self.staged[note.id] = note, (content, place)
                self._name_origin(note)
        self._before.clear()
        self._released.clear()
        self._follow_rules()
        if self._decode is not None:
            self._fit(batch, outcome)
        return outcome

    def _row(self, batch: Batch, place: int) -> bytes:
        """Return a sample of a batch as it is stored."""
        if self._decode is not None:
            id_ = int(batch.ids[place])
            return self._keep_file(id_)
        x = batch.x[place : place + 1]
        return self._settled.get(x[0].tobytes()) or self.codec.encode(x)[0]

    def _keep_file(self, id_: int) -> bytes:
        """Return the file of a sample that is offered, or got its label, and count it as kept."""
        payload = self._released.get(id_) or self.payloads[id_]
        self._files[id_] = payload
        self._used_cells += self._cells(payload)
        return payload

    def _cells(self, payload: bytes) -> int:
        """Return the cells that a file takes at most."""
        rest = self._form.content_bytes - (self._form.payload_bytes or 0)
        return -(-(META_BYTES + len(payload) + rest) // self.file.room)

    def _fit(self, batch: Batch, outcome: Outcome) -> None:
        """Let the samples go that rank lowest while their files take more than there is."""
        if self._used_cells <= self._sample_cells:
            return
        places = {id_: place for place, id_ in enumerate(batch.ids.tolist())}
        going = []
        beyond = self._used_cells - self._sample_cells
        for id_ in self._lowest_first():
            beyond -= self._cells(self._files[id_])
            going.append(id_)
            if id_ in places:
                outcome.results[places[id_]] = OfferResult.REFUSED
            if beyond <= 0:
                break
        self._remove(going, Verdict.DROPPED)

    def _lowest_first(self) -> list[int]:
        """Return the stored samples in the order in which they make way for larger files.

        Always one of the region that holds the most bytes, so that no label pays for another's.
        """
        ranks = self.ranks()
        order = np.lexsort((ranks["arrivals"], ranks["effective"], ranks["tiers"])).tolist()
        ids, regions = ranks["ids"].tolist(), ranks["regions"].tolist()
        waiting: dict[int, list[int]] = {}
        for place in reversed(order):
            waiting.setdefault(regions[place], []).append(ids[place])
        held = {
            region: sum(len(self._files[id_]) for id_ in own) for region, own in waiting.items()
        }
        found = []
        while any(waiting.values()):
            fullest = max((r for r in waiting if waiting[r]), key=lambda region: held[region])
            found.append(waiting[fullest].pop())
            held[fullest] -= len(self._files[found[-1]])
        return found

    def stored(self) -> Stored:
        """Give what is stored, oldest arrival first; the numbers of files are made anew."""
        found = self._index.stored()
        if self._decode is None:
            return found
        return replace(found, batch=replace(found.batch, x=self.samples(found.batch.ids.tolist())))

    def samples(self, ids: Sequence[int]) -> AnyArray:
        """Return the numbers of stored files.

        Raises
        ------
        RejectedError
            If one can no longer be decoded.
        """
        assert self._decode is not None
        x = np.zeros((len(ids), *self._form.shape), np.float32)
        for place, id_ in enumerate(ids):
            try:
                x[place] = self._decode(self._files[id_])
            except FedkeepError as error:
                name = (self.records.get(id_) or self.unlabelled[id_]).name or str(id_)
                raise RejectedError(
                    "payload",
                    f"the decoder no longer reads the stored sample {name} ({error}): set "
                    f"[samples] decoder as it was, or `fedkeep agent erase --id {name}`",
                ) from None
        return x

    @property
    def staged_samples(self) -> int:
        """How many samples the next commit has to write; of files, as if each were the longest."""
        if self._decode is None:
            return len(self.staged)
        room = self.file.room
        cells = sum(-(-(META_BYTES + len(row)) // room) for row, _ in self.staged.values())
        return -(-cells // -(-(META_BYTES + self._form.content_bytes) // room))

    @property
    def needs_whole(self) -> bool:
        """Whether samples wait that cannot be read without what only a whole commit writes."""
        return bool(self.staged or self._late) and not self.readable

    @property
    def sample_bytes(self) -> int:
        """Bytes of the budget that one stored sample takes; of files, on average."""
        cell = self.file.geometry.cell_size
        return cell * self._used_cells // max(1, len(self._files)) if self._files else cell

    def bytes_of(self, note: SampleMetadata) -> int:
        """Bytes of the budget that a stored sample takes."""
        payload = self._files.get(note.id)
        return self.file.geometry.cell_size * (1 if payload is None else self._cells(payload))

    def numbers(self, id_: int) -> AnyArray:
        """Return the numbers of a stored sample."""
        if self._decode is not None:
            return np.asarray(self.samples([id_])[0])
        if isinstance(self._index, RuledStore) and (held := self._index.held(id_)) is not None:
            return held.x
        batch = self.stored().batch
        return np.asarray(batch.x[int(np.flatnonzero(batch.ids == id_)[0])])

    def content(self, id_: int) -> bytes:
        """Return the file of a stored sample, or its numbers as little-endian float32."""
        payload = self._files.get(id_)
        return self.numbers(id_).astype("<f4").tobytes() if payload is None else payload

    def arrivals(self) -> dict[int, int]:
        """Return the arrival number of each stored sample, by which `notes` are in order."""
        ranks = self.ranks()
        return dict(zip(ranks["ids"].tolist(), ranks["arrivals"].tolist(), strict=True))

    def payload(self, id_: int) -> bytes | None:
        """Return the file of a stored sample, where samples are files."""
        return self._files.get(id_)

    def _labelled(self, batch: Batch) -> tuple[IntArray, list[tuple[float, ...]]]:
        """Give the label of each sample, or the interval of its target; and the targets."""
        if self._targets is None:
            return batch.y, [()] * len(batch)
        rows = batch.y.reshape(len(batch), self._width).tolist()
        return self._targets.assign(batch.y), list(map(tuple, rows))

    def _with_rules(self, note: SampleMetadata) -> SampleMetadata:
        """Note the rules that hold a sample."""
        index = self._index
        if not isinstance(index, RuledStore) or not (holders := index.holders(note.id)):
            return note
        names = tuple(index.rules[rule].name for rule in holders)
        return note._replace(rules=names, apart=not index.in_policy(note.id))

    def _follow_rules(self) -> None:
        """Stage what rules hold after all, and let go what they hold no longer."""
        if not isinstance(self._index, RuledStore):
            return
        gone, late = self._index.take_changes()
        self._let_go(gone, Verdict.DROPPED)
        for sample in late:
            known = self.records.get(sample.id)
            note = self._with_rules(known or self._late_note(sample))
            if note == known:
                continue
            place, file = None, self._files.get(sample.id, sample.tag[1])
            if known is None:
                self.log.add(note, Verdict.KEPT)
            else:
                place = self._discard(sample.id)
            if self._decode is None:
                [row] = self.codec.encode(sample.x[None])
            else:
                self._released[sample.id] = file
                row = self._keep_file(sample.id)
            self.records[note.id] = note
            self._late[note.id] = join_content(row, note, self._form), place
            self._name_origin(note)
        self._released.clear()

    def _remember(
        self, ids: IntArray, labels: IntArray, targets: Sequence[tuple[float, ...]]
    ) -> None:
        """Note what is known of a batch, where a rule may hold samples of it later on."""
        if not isinstance(self._index, RuledStore) or not self._index.remembers:
            return
        self._remembered = {
            id_: self._first_note(id_)._replace(label=label, target=target, displaced=-1)
            for id_, label, target in zip(ids.tolist(), labels.tolist(), targets, strict=True)
        }

    def _first_note(self, id_: int) -> SampleMetadata:
        """Return what is known of a sample since it first came, from which its age counts."""
        return self._before.get(id_) or SampleMetadata(
            id_,
            taken=self.clock.now(),
            wall=self.clock.wall(),
            source=self.source,
            name=self.names.get(id_, "") if self.name_bytes else "",
            time=self.times.get(id_, math.nan) if self._form.extra_bytes else math.nan,
        )

    def _late_note(self, sample: HeldSample) -> SampleMetadata:
        """Return what is known of a sample that was not kept when it came."""
        note: SampleMetadata = sample.tag[0]
        return note._replace(
            arrival=sample.arrival,
            score=sample.score,
            model_version=self.model_version,
            region=sample.region,
        )

    def log_forbidden(self, batch: Batch, rule: str) -> None:
        """Log samples that a rule never stores."""
        labels, _ = self._labelled(batch)
        self.log.add_forbidden(labels, batch.ids, rule, self.clock.wall())

    def holders(self, id_: int) -> list[str]:
        """Return the names of the rules that hold a stored sample."""
        index = self._index
        if not isinstance(index, RuledStore):
            return []
        return [index.rules[rule].name for rule in index.holders(id_)]

    def relabel(self, id_: int, label: float, region: int, score: float) -> list[int]:
        """Correct the label of a stored sample: its record is written anew, in its place."""
        note = self.records[id_]._replace(region=region, score=score)
        if self._targets is None:
            note = note._replace(label=int(label))
        else:
            [interval] = self._targets.assign(np.array([label])).tolist()
            note = note._replace(label=interval, target=(label,))
        file = self._files.get(id_)
        if file is None:
            [row] = self.codec.encode(self.numbers(id_)[None])
        place = self._discard(id_)
        if file is not None:
            self._released[id_] = file
            row = self._keep_file(id_)
        self.records[id_] = note
        self.staged[id_] = join_content(row, note, self._form), place
        self._swaps = True
        model, wall = self.model_version, self.clock.wall()
        self.log.add(note._replace(model_version=model, wall=wall, displaced=-1), Verdict.CORRECTED)
        return self._let_go(self._index.relabel(id_, label, region, score), Verdict.DROPPED)

    def waits(self, id_: int, x: AnyArray, arrival: int, displaced: int | None) -> None:
        """Stage a sample without a label, in the place of the one it displaced, if any."""
        place = None
        if displaced is not None:
            place = self._discard(displaced)
            self._log_left(displaced, Verdict.UNLABELLED)
        note = SampleMetadata(
            id_,
            arrival,
            displaced=-1 if displaced is None else displaced,
            label=UNLABELLED,
            model_version=self.model_version,
            taken=self.clock.now(),
            wall=self.clock.wall(),
            source=self.source,
            name=self.names.get(id_, "") if self.name_bytes else "",
            time=self.times.get(id_, math.nan) if self._form.extra_bytes else math.nan,
            rules=tuple(self.wanted.get(id_, ())),
            target=(math.nan,) * self._form.target_width,
        )
        self.log.add(note, Verdict.WAITING)
        # Where a damaged file gives back too many, those that never were scored go first.
        note = note._replace(score=-np.inf)
        if self._decode is not None:
            row = self._keep_file(id_)
        else:
            row = self._settled.get(x.tobytes()) or self.codec.encode(x[None])[0]
        self.unlabelled[id_] = note
        self.staged[id_] = join_content(row, note, self._form), place
        self._name_origin(note)

    def want(self, id_: int, x: AnyArray, rules: Sequence[str]) -> None:
        """Note that rules want a sample kept that waits already: it is written anew."""
        note = self.unlabelled[id_]
        names = (*note.rules, *(name for name in rules if name not in note.rules))
        if names == note.rules:
            return
        note, file = note._replace(rules=names), self._files.get(id_)
        place = self._discard(id_)
        if file is not None:
            self._released[id_] = file
            row = self._keep_file(id_)
            del self._released[id_]
        else:
            [row] = self.codec.encode(x[None])
        self.unlabelled[id_] = note
        self.staged[id_] = join_content(row, note, self._form), place
        self._swaps = True
        self._name_origin(note)

    def held(self) -> list[int]:
        """Give the ids of what waits and rules want kept."""
        return [note.id for note in self.unlabelled.values() if note.rules]

    def leaves(self, id_: int, how: Departure) -> None:
        """Let a waiting sample go; one that was labelled is offered next, and keeps its age."""
        note, file = self.unlabelled[id_], self._files.get(id_)
        place = self._discard(id_)
        if place is not None:
            self._obsolete.append(place)
        if how in (Departure.LABELLED, Departure.PSEUDO):
            self._before[id_] = note
            self._swaps = True
            if file is not None:
                self._released[id_] = file
        else:
            self._log_left(id_, Verdict.UNLABELLED)

    def waiting(self) -> tuple[AnyArray, IntArray, IntArray]:
        """Give the samples that the file holds without a label, their ids and arrival numbers."""
        notes = [note for note in self.unlabelled.values() if note.id in self._waiting_rows]
        ids = np.array([note.id for note in notes], dtype=np.int64)
        arrivals = np.array([note.arrival for note in notes], dtype=np.int64)
        if self._decode is not None:
            x = self.samples([note.id for note in notes])
        else:
            x = self.codec.decode([self._waiting_rows[note.id] for note in notes])
        self._waiting_rows = {}
        return x, ids, arrivals

    def drop_unlabelled(self) -> int:
        """Let all go that waits, where there is no waiting room any more."""
        ids = [*self.unlabelled]
        for id_ in ids:
            self.leaves(id_, Departure.DISPLACED)
        self._waiting_rows = {}
        return len(ids)

    def _name_origin(self, note: SampleMetadata) -> None:
        """Give a sample's source a number, with the rules that hold it, if there is room."""
        if not note.rules and note.source in self._sources:
            return
        for origin in dict.fromkeys((origin_of(note), note.source)):
            if origin in self._sources:
                return
            sources = [*self._sources, origin]
            if len("\n".join(sources).encode()) <= self.source_bytes:
                self._sources, self.readable = sources, False
                return

    def rescore(self, scores: Scores) -> list[int]:
        """Rank what is stored anew; returns the ids of what was dropped."""
        return self._let_go(self._index.rescore(scores), Verdict.DROPPED)

    def state_spec(self) -> StateSpec:
        """Describe the arrays of `snapshot`."""
        quotas = ArraySpec((self._index.regions,), np.int64, optional=True)
        return {"quotas": quotas}

    def snapshot(self) -> State:
        """Take the quotas only: samples and ranks have their own place in the file."""
        return {} if self._quotas is None else {"quotas": self._quotas}

    def restore(self, state: State) -> None:
        """Fill the in-memory store from the file that was loaded, under the quotas of `state`.

        Where there are none, or samples are newer than those that stand beside them, every sample
        has a slot and the rest are divided evenly, until the device divides them anew.
        """
        columns = rank_columns(self._ranks, self.records.values())
        notes = [self.records[id_] for id_ in columns["ids"].tolist()]
        alone = np.array([note.apart for note in notes], dtype=bool) | (columns["tiers"] == HELD)
        held_alone = [note for note, own in zip(notes, alone.tolist(), strict=True) if own]
        if not isinstance(self._index, RuledStore):  # the rules are gone: the policy decides
            columns["tiers"] = np.where(columns["tiers"] == HELD, _RANKED, columns["tiers"])
        elif held_alone:
            columns = {name: column[~alone] for name, column in columns.items()}
            notes = [self.records[id_] for id_ in columns["ids"].tolist()]
        regions = np.array([note.region for note in notes], dtype=np.int64)
        held = np.bincount(regions, minlength=self._index.regions)
        quotas = state.get("quotas")
        if quotas is None or not self._index.would_hold(held, quotas):
            rest, extra = divmod(max(0, self._capacity - int(held.sum())), len(held))
            quotas = held + rest + (np.arange(len(held)) < extra)
        if self._decode is not None:
            x: AnyArray = np.zeros((len(notes), 0), np.float32)
        else:
            x = self.codec.decode([self._samples[note.id] for note in notes])
        y: AnyArray = np.array([note.label for note in notes], dtype=np.int64)
        if self._targets is not None:
            y = self._targets.settled([note.target for note in notes])
        self._index.restore({**columns, "x": x, "y": y, "regions": regions, "quotas": quotas})
        self._hold_again(notes + held_alone)
        if isinstance(self._index, RuledStore) and "quotas" in state:
            self._index.leave_to_rules(state["quotas"])
        self._samples, self._ranks = {}, {}
        self.configure(quotas)

    def _hold_again(self, notes: Sequence[SampleMetadata]) -> None:
        """Let rules hold the samples that the file says they held; of a rule that is gone, none."""
        index = self._index
        if not isinstance(index, RuledStore) or self.groups_of is None:
            return
        again = {}
        for note in sorted(notes, key=lambda note: note.arrival):
            if not note.rules:
                continue
            x: AnyArray = np.zeros(0, np.float32)
            if self._decode is None:
                [x] = self.codec.decode([self._samples[note.id]])
            y = note.label if self._targets is None else self._targets.settled([note.target])[0]
            tag = (note, None)
            sample = HeldSample(note.id, x, y, note.region, note.score, note.arrival, tag)
            claims = again[note.id] = sample, self.groups_of(note)
            index.hold_again(*claims)
        for id_, claims in again.items():
            if not index.in_policy(id_) and not index.held(id_):
                index.hold_instead(*claims)
        unheld = {id_ for id_ in self.records if not index.in_policy(id_) and not index.held(id_)}
        self._let_go([*unheld], Verdict.DROPPED)
        index.take_changes()

    def __len__(self) -> int:
        return len(self._index)

    def as_stored(self, x: AnyArray) -> AnyArray:
        """Return samples as they come back from the file.

        What is valued and trained must be what is kept.
        """
        if not len(x) or self.codec.is_plain(x):
            return x.astype(np.float32, copy=False)
        if self.codec.learn(x):
            self.readable = False
        rows = self.codec.encode(x)
        settled = self.codec.decode(rows)
        self._settled = {sample.tobytes(): row for sample, row in zip(settled, rows, strict=True)}
        return settled

    def notes(self) -> list[SampleMetadata]:
        """Return what is known of each stored sample, with its present score, oldest first."""
        ranks = self.ranks()
        columns = zip(*(ranks[name].tolist() for name in ("ids", "scores", "uses")), strict=True)
        return [self.records[id_]._replace(score=score, uses=uses) for id_, score, uses in columns]

    def write_down_since(self, arrival: int) -> int:
        """Log the samples that arrived then or later, whose decisions a crash took.

        Returns how many there were.
        """
        notes = sorted(
            (n for n in self.records.values() if n.arrival >= arrival), key=lambda n: n.arrival
        )
        for note in notes:
            self.log.add(note, Verdict.KEPT if note.displaced < 0 else Verdict.REPLACED)
        return len(notes)

    def forget(self, ids: Iterable[int], verdict: Verdict) -> int:
        """Drop samples for good; the commit that follows must wipe.

        Returns how many there were.
        """
        ids = [*ids]
        gone = [id_ for id_ in ids if id_ in self.records]
        waited = [id_ for id_ in ids if id_ in self.unlabelled]
        self.log.forget(np.array(gone + waited, dtype=np.int64))
        # Also what is not stored: a rule may remember it, to hold it when an alarm comes.
        self._index.remove(ids)
        for id_ in waited:
            place = self._discard(id_)
            if place is not None:
                self._obsolete.append(place)
            self._log_left(id_, verdict)
        return len(waited) + len(self._remove(gone, verdict))

    def _remove(self, ids: list[int], verdict: Verdict) -> list[int]:
        """Take samples out of memory; the next commit takes them out of the file."""
        self._index.remove(ids)
        self._settled = {}
        return self._let_go(ids, verdict)

    def load(self, blobs: list[Blob]) -> State:
        """Take over what a file holds.

        Returns the arrays that others committed with the samples.
        """
        self.records, self._blobs, self.unlabelled = {}, {}, {}
        self._samples, self.staged, self._waiting_rows = {}, {}, {}
        self._before, self._swaps = {}, False
        self._files, self._used_cells = {}, 0
        newest = record.newest_of(blobs)
        self._obsolete = sorted(
            {blob.number for blob in blobs} - {blob.number for blob in newest.values()}
        )
        state = record.decode_arrays(newest)
        arrays = {name: blob for name, blob in newest.items() if isinstance(name, str)}
        self._written = {name: (blob.number, _digest(blob.data)) for name, blob in arrays.items()}
        self._sources = restore_codec(self.codec, state, newest)
        self.readable = self.codec.ready
        for blob in (blob for name, blob in newest.items() if isinstance(name, int)):
            row, note = split_content(blob, record.decode_note(blob, self._sources), self._form)
            self._blobs[note.id] = blob.number
            if note.label == UNLABELLED:
                self.unlabelled[note.id] = note
                self._waiting_rows[note.id] = row
                continue
            if self._targets is not None:  # by the intervals of now, whatever they were
                [label] = self._targets.assign(np.array([note.target])).tolist()
                note = note._replace(label=label)
            self.records[note.id] = note
            self._samples[note.id] = row
        self._divide()
        if self._decode is not None:
            self._files = self._samples | self._waiting_rows
            self._used_cells = sum(map(self._cells, self._files.values()))
        self._ranks = {name: array for name, array in state.items() if name.startswith(_RANKS)}
        return {
            name: array for name, array in state.items() if not name.startswith((APART, _RANKS))
        }

    def _divide(self) -> None:
        """Note the region of each sample; the file does not hold it, for it follows from it."""
        notes = list(self.records.values())
        y = np.array([note.label for note in notes], dtype=np.int64)
        found = y if self._index.regions > 1 else np.zeros(len(y), dtype=np.int64)
        if not isinstance(self._regions, LabelRegions | TargetRegions | None) and notes:
            rows = [self._samples[note.id] for note in notes]
            x = self.codec.decode(rows) if self._decode is None else _decoded(self._decode, rows)
            ids = np.array([note.id for note in notes], dtype=np.int64)
            found = self._regions.assign(Batch(x, y, ids), None)
        for note, region in zip(notes, found.tolist(), strict=True):
            self.records[note.id] = note._replace(region=region)

    def commit(self, state: State | None, *, wipe: bool = False) -> None:
        """Write samples, ranks and `state` in one transaction; returns once it is on the disk.

        Without a `state` only samples are written, each in the place of the one it replaced: no
        byte besides. Then a crash in the middle may leave some of them and not others. Raises
        OSError if the disk is full or fails. Then nothing was committed, and the file's `reload`
        gives back what was.
        """
        self._commit(state, wipe=wipe)
        while self._late:
            for id_ in list(self._late)[:_LATE_AT_ONCE]:
                self.staged[id_] = self._late.pop(id_)
                self._swaps = self._swaps or self.staged[id_][1] is not None
            self._commit(None)

    def _commit(self, state: State | None, *, wipe: bool = False) -> None:
        changed: dict[str, tuple[int, bytes]] = {}
        replaced: list[str] = []
        if state is not None:
            ranks = _rank_arrays(
                self.ranks(), self.records, self._capacity, discounts=self._discounts
            )
            names = np.frombuffer("\n".join(self._sources).encode(), np.uint8)
            needed = {**self.codec.snapshot(), _SOURCES: names}
            copies = {
                f"{APART}{copy}.{name}": array
                for copy in range(COPIES)
                for name, array in needed.items()
            }
            arrays = record.encode_arrays({**state, **ranks, **copies})
            old = self._written
            changed = {
                n: blob
                for n, blob in arrays.items()
                if n not in old or old[n][1] != _digest(blob[1])
            }
            replaced = [name for name in self._written if name in changed or name not in arrays]
        staged = sorted(self.staged.items(), key=lambda item: item[1][1] is None)
        notes = [self.records.get(id_) or self.unlabelled[id_] for id_, _ in staged]
        rows = [row for _, (row, _) in staged]
        add = [
            record.encode_sample(note, row, self._sources)
            for note, row in zip(notes, rows, strict=True)
        ]
        add += changed.values()
        remove = [place for _, (_, place) in staged if place is not None]
        remove += [*self._obsolete, *(self._written[name][0] for name in replaced)]
        if not add and not remove and not wipe:
            return
        atomic = state is not None or self._swaps
        numbers = self.file.commit(add, remove, wipe=wipe, atomic=atomic)
        self._swaps = False
        for name in replaced:
            del self._written[name]
        for (name, (_, data)), number in zip(changed.items(), numbers[len(staged) :], strict=True):
            self._written[name] = (number, _digest(data))
        if state is not None:
            self.readable = self.codec.ready
        self._blobs.update((id_, number) for (id_, _), number in zip(staged, numbers, strict=False))
        self.staged.clear()
        self._obsolete.clear()

    def _discard(self, id_: int) -> int | None:
        """Forgets a sample; returns the blob that it was, or whose place it was to take."""
        self.records.pop(id_, None)
        if (payload := self._files.pop(id_, None)) is not None:
            self._used_cells -= self._cells(payload)
        if (late := self._late.pop(id_, None)) is not None:
            return late[1]
        self.unlabelled.pop(id_, None)
        return self.staged.pop(id_, (b"", self._blobs.pop(id_, None)))[1]

    def _let_go(self, ids: list[int], verdict: Verdict) -> list[int]:
        """Let samples go that left for no newcomer.

        The log keeps that they did, and nothing of what they were.
        """
        for id_ in (id_ for id_ in ids if id_ in self.records):
            place = self._discard(id_)
            if place is not None:
                self._obsolete.append(place)
            self._log_left(id_, verdict)
        return ids

    def _log_left(self, id_: int, verdict: Verdict) -> None:
        """Log that a sample left, and nothing of what it was."""
        note = SampleMetadata(id_, model_version=self.model_version, wall=self.clock.wall())
        self.log.add(note, verdict)


def restore_codec(codec: SampleCodec, state: State, newest: dict[int | str, Blob]) -> list[str]:
    """Give a codec the scales that stand among the state.

    Returns the names of the samples' sources.

    Samples without their scales cannot be read by anyone; without those names, only less is known
    of them.
    """
    kept = {name.split(".", 2)[2]: array for name, array in state.items() if name.startswith(APART)}
    codec.restore(kept)
    if not codec.ready and any(isinstance(name, int) for name in newest):
        raise ConfigError(
            "the scales of the store's encoding are lost in both places, and without them "
            "nobody can read its samples: "
            "move the file away, and an agent begins a new one"
        )
    return bytes(kept.get(_SOURCES, b"")).decode(errors="replace").split("\n")


def _decoded(decode: Callable[[bytes], AnyArray], rows: Sequence[bytes]) -> AnyArray:
    """Return the features of payloads, (n, ...)."""
    return np.stack([decode(row) for row in rows])


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


def _rank_arrays(
    ranks: State, notes: dict[int, SampleMetadata], capacity: int, *, discounts: bool
) -> State:
    """Return, for the file, the ranks that are no longer as the samples' records have them."""
    recorded = [notes[id_] for id_ in ranks["ids"].tolist()]
    differ = (
        (ranks["uses"] > 0) | (ranks["tiers"] != _RANKED) | (ranks["effective"] != ranks["scores"])
    )
    differ |= ranks["scores"] != np.array([note.score for note in recorded])
    differ |= ranks["arrivals"] != np.array([note.arrival for note in recorded])
    rows = np.zeros(int(differ.sum()), dtype=RANKS[discounts])
    for name in rows.dtype.names or ():
        rows[name] = ranks[name][differ]
    buckets = rows["ids"] % max(1, -(-capacity // _BUCKET))
    # Not by np.unique, which loads a megabyte for masked arrays.
    found = sorted(set(buckets.tolist()))
    return {f"{_RANKS}{bucket}": rows[buckets == bucket] for bucket in found}


def rank_columns(arrays: State, notes: Iterable[SampleMetadata]) -> State:
    """Return the ranks of these samples, by arrival: from such arrays, or else their records."""
    ranks = {
        int(row["ids"]): row
        for name, array in arrays.items()
        if name.startswith(_RANKS)
        for row in array
    }
    rows = []
    for note in notes:
        row = (note.id, note.score, note.arrival, note.uses, _RANKED, note.score)
        rank = ranks.get(note.id)
        # One from an earlier stay of the same sample does not count.
        if rank is not None and rank["arrivals"] >= note.arrival:
            row = (*rank.tolist(), rank["scores"])[: len(row)]
        rows.append(row)
    table = np.array(sorted(rows, key=lambda row: row[2]), dtype=RANKS[True])
    return {name: table[name] for name in table.dtype.names or ()}
