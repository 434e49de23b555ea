"""The store on disk.

The core's in-memory store decides, this one makes its decisions survive a power cut.
"""

from collections.abc import Iterable
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
    join_name,
    split_name,
)
from fedkeep.agent.retention import AgeClock
from fedkeep.core.errors import ConfigError
from fedkeep.core.protocols import OfferResult, Outcome
from fedkeep.core.regions import LabelRegions, Regions
from fedkeep.core.store import MemoryStore
from fedkeep.core.types import AnyArray, ArraySpec, Batch, IntArray, Scores, State, StateSpec
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
_RANKED = 1
"""The tier of a sample that nothing but its score moves; as in `MemoryStore.snapshot`."""


class DurableStore:
    """Implements the `Store` port; changes reach the file all at once, by `commit`.

    A sample's record is written once. Scores that change later go into small arrays of ranks beside
    it.
    """

    def __init__(
        self,
        file: CellFile,
        index: MemoryStore,
        form: SampleForm,
        log: DecisionLog,
        clock: AgeClock,
        capacity: int,
        regions: Regions | None = None,
    ) -> None:
        self._regions = regions
        """Divides what the file holds; by default the labels are the regions."""
        self.file, self._index, self.codec = file, index, form.codec()
        self.stored, self.ranks = index.stored, index.ranks
        self.mark_used, self.expire = index.mark_used, index.expire
        self.log, self.clock = log, clock
        self.model_version = -1
        """Noted with every decision; the agent sets it when a new model arrives."""
        self.source = ""
        """Where the batch being offered comes from."""
        self.names: dict[int, str] = {}
        """What the samples of that batch were called, by their ids, where the id is not the name
        itself.
        """
        self.name_bytes = form.name_bytes
        self._capacity, self._discounts = capacity, form.discounts
        self._written: dict[str, tuple[int, bytes]] = {}
        """By an array's name, the number of its blob and a digest of its bytes."""
        self._ranks: State = {}
        """As they were found in the file."""
        self.records: dict[int, SampleMetadata] = {}
        """What was known of each sample when it was stored.

        Also before `restore` has put them to use.
        """
        self._blobs: dict[int, int] = {}
        self.staged: dict[int, tuple[bytes, int | None]] = {}
        """Samples that the next commit has to write, encoded, each with the blob whose place it
        takes, if any.
        """
        self._settled: dict[bytes, bytes] = {}
        """The samples settled last, and how each of them is encoded."""
        self._quotas: IntArray | None = None
        self._obsolete: list[int] = []
        """Other blobs that go with the next commit: their samples have left, or are there anew."""
        self._samples: dict[int, bytes] = {}
        self._sources = [""]
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
        outcome = self._index.offer(batch, regions, scores, arrivals)
        wall, taken = self.clock.wall(), self.clock.now()
        refused = outcome.results == OfferResult.REFUSED
        self.log.add_refusals(batch, arrivals, outcome, self.model_version, wall)
        columns = (batch.ids, arrivals, scores, outcome.thresholds, outcome.evicted, batch.y)
        for i in np.flatnonzero(~refused | (outcome.evicted >= 0)).tolist():
            if refused[
                i
            ]:  # it was stored, came again and leaves; later in the batch it may be kept anew
                self._let_go([int(batch.ids[i])], Verdict.DROPPED)
                continue
            known = [column[i].item() for column in columns]
            note = SampleMetadata._make(
                [
                    *known,
                    self.model_version,
                    taken,
                    wall,
                    self.source,
                    int(regions[i]),
                    0,
                    self.names.get(known[0], "") if self.name_bytes else "",
                ]
            )
            fate = outcome.results[i]
            self.log.add(note, Verdict(int(fate)))
            if fate != OfferResult.REFRESHED:
                place = self._discard(note.displaced) if fate == OfferResult.REPLACED else None
                row = (
                    self._settled.get(batch.x[i].tobytes())
                    or self.codec.encode(batch.x[i : i + 1])[0]
                )
                content = join_name(row, note.name, self.name_bytes)
                self.records[note.id], self.staged[note.id] = note, (content, place)
                sources = [*self._sources, self.source]
                if (
                    self.source not in self._sources
                    and len("\n".join(sources).encode()) <= SOURCE_NAMES
                ):
                    self._sources, self.readable = sources, False
        return outcome

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
        regions = np.array([note.region for note in notes], dtype=np.int64)
        held = np.bincount(regions, minlength=self._index.regions)
        quotas = state.get("quotas")
        if quotas is None or not self._index.would_hold(held, quotas):
            rest, extra = divmod(max(0, self._capacity - int(held.sum())), len(held))
            quotas = held + rest + (np.arange(len(held)) < extra)
        x = self.codec.decode([self._samples[note.id] for note in notes])
        y = np.array([note.label for note in notes], dtype=np.int64)
        self._index.restore({**columns, "x": x, "y": y, "regions": regions, "quotas": quotas})
        self._samples, self._ranks = {}, {}
        self.configure(quotas)

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
        gone = np.array([id_ for id_ in ids if id_ in self.records], dtype=np.int64)
        state = self._index.snapshot()
        keep = ~np.isin(state["ids"], gone)
        state.update({name: column[keep] for name, column in state.items() if name != "quotas"})
        self._index.restore(state)
        self._settled = {}
        self.log.forget(gone)
        return len(self._let_go(gone.tolist(), verdict))

    def load(self, blobs: list[Blob]) -> State:
        """Take over what a file holds.

        Returns the arrays that others committed with the samples.
        """
        self.records, self._blobs = {}, {}
        self._samples, self.staged = {}, {}
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
            note = record.decode_note(blob, self._sources)
            row, name = split_name(blob.data[META_BYTES:], self.name_bytes)
            self.records[note.id] = note._replace(name=name)
            self._blobs[note.id], self._samples[note.id] = blob.number, row
        self._divide()
        self._ranks = {name: array for name, array in state.items() if name.startswith(_RANKS)}
        return {
            name: array for name, array in state.items() if not name.startswith((APART, _RANKS))
        }

    def _divide(self) -> None:
        """Note the region of each sample; the file does not hold it, for it follows from it."""
        notes = list(self.records.values())
        y = np.array([note.label for note in notes], dtype=np.int64)
        found = y if self._index.regions > 1 else np.zeros(len(y), dtype=np.int64)
        if self._regions is not None and not isinstance(self._regions, LabelRegions) and notes:
            x = self.codec.decode([self._samples[note.id] for note in notes])
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
        add = [
            record.encode_sample(self.records[id_], row, self._sources) for id_, (row, _) in staged
        ]
        add += changed.values()
        remove = [place for _, (_, place) in staged if place is not None]
        remove += [*self._obsolete, *(self._written[name][0] for name in replaced)]
        if not add and not remove and not wipe:
            return
        numbers = self.file.commit(add, remove, wipe=wipe, atomic=state is not None)
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
        return self.staged.pop(id_, (b"", self._blobs.pop(id_, None)))[1]

    def _let_go(self, ids: list[int], verdict: Verdict) -> list[int]:
        """Let samples go that left for no newcomer.

        The log keeps that they did, and nothing of what they were.
        """
        for id_ in (id_ for id_ in ids if id_ in self.records):
            place = self._discard(id_)
            if place is not None:
                self._obsolete.append(place)
            self.log.add(
                SampleMetadata(id_, model_version=self.model_version, wall=self.clock.wall()),
                verdict,
            )
        return ids


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
    return {f"{_RANKS}{bucket}": rows[buckets == bucket] for bucket in np.unique(buckets).tolist()}


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
