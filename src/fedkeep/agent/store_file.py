"""The store's file.

How its budget is divided, and how it is opened, whatever a crash left of it.
"""

import errno
import logging
import math
import os
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep.agent.cellfile import Blob, CellFile, FileDisk, StoreError
from fedkeep.agent.cells import (
    LABEL_MAGIC,
    OVERHEAD,
    PAGE,
    Cipher,
    Geometry,
    Label,
    check_key,
    cipher_of,
    decode_label,
)
from fedkeep.agent.durable_store import COPIES, RANKS, SOURCE_NAMES
from fedkeep.agent.record import (
    CHUNK,
    META_BYTES,
    ROW_BYTES,
    SAMPLE,
    SampleForm,
    decode_note,
    join_content,
    newest_of,
    split_content,
)
from fedkeep.agent.store_moves import RESIZED_FROM, clear_away, finish_resize, make, resize
from fedkeep.core.bounds import check_range
from fedkeep.core.errors import ConfigError
from fedkeep.encoding import SCALE_BYTES, EncodingName

log = logging.getLogger(__name__)
_FOR_GOOD = (
    errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ENOENT,
    errno.ELOOP, errno.ENAMETOOLONG,
)  # fmt: skip
"""Failures that do not pass by themselves; a full, failing or read-only disk may recover."""
_ALIGNMENT = 4
NAME_BYTES = 24
"""Of the names that a new store keeps."""
LEAST_ERASED = 512
_ERASED_SHARE, _SMALL_SHARE, _SMALL_ERASED = 200, 64, 4096
"""What a budget gives to erased ids: more of a small one, up to so many bytes."""
_LOG = "log."
"""How the names of the decision log's arrays begin."""
_SMALL_ARRAYS = 12
"""Cells for the arrays of a device whose size is no multiple of a cell."""
EXTRA_BYTES = 32
"""For what records say of themselves, in a new store of files."""
PAYLOAD = "payload"
"""What a label says for the type of samples that are files."""
_RESERVED = 1 << 17
"""About as many bytes of files may one commit replace."""
_PARTS, _LEAST_PART, _LARGEST_PART = 8, 512, 4096
"""Into how many cells a file of average size goes, and how many bytes of it one takes."""


LEAST_BUDGET = 8 * PAGE
"""The least budget of any store, in bytes."""


@dataclass(frozen=True)
class StoreOptions:
    """Where samples are kept, how many bytes they may take, and for how long."""

    path: str = "fedkeep.store"
    budget: int = 9_000_000
    """Bytes of the file, with its journal, indexes and the device's state.

    The file has this size from the start.
    """
    ttl_days: float = 30.0
    """A sample older than this is removed and overwritten; 0 keeps samples for ever."""
    clock_tolerance_hours: float = 24.0
    """How wrong the wall clock may be after a reboot before a TTL could fire early."""
    commit_ms: int = 100
    """Samples are committed together at most this often, to spare the flash."""
    log_length: int | None = None
    """How many decisions are remembered for `fedkeep agent why`; None: as many as fit a twentieth \
of the budget."""
    key_file: str | None = None
    """A file with the key of 64 hex digits under which samples are encrypted; None: plain."""
    key_env: str | None = None
    """An environment variable with that key, instead of a file."""
    encoding: EncodingName | None = None
    """Fewer bytes per sample: `float16`, `int8`, `uint8`; None: as [samples] dtype says."""
    deflate_to: int | None = None
    """Bytes into which each sample is deflated, without loss where that is enough, else rounded \
until it fits; `fedkeep agent store check` says what would do. None: not deflated."""
    damaged_bytes: int = 0
    """Bytes that numbered copies of a damaged file may take beside the budget; 0: none is made."""
    erased_bytes: int | None = None
    """Bytes of the budget for the ids of erased samples, which are refused.

    One for every 8, and beyond 4,096 for every 4; None: a 200th of the budget or 4,096, of a budget
    below 262,144 a 64th, as far as a store that is there leaves room for it.
    """
    sector: int | None = None
    """512 or 4096.

    No two samples share a block of so many bytes, so that one which a power cut turns to garbage
    costs no acknowledged sample; None: a write is taken to damage its own bytes only.
    """
    name_bytes: int | None = None
    """The longest id that is kept as it came and comes back in an export, where it is no number.

    None: 24, or as the store was made.
    """
    extra_bytes: int | None = None
    """Bytes beside each sample for what its record says of itself, such as its own time.

    None: 32 with a decoder, else none, or as the store was made.
    """
    typical_bytes: int | None = None
    """What a file takes on average, where samples are files: the budget holds that many more, and \
while they are larger those that rank lowest leave. None: as much as [samples] payload_bytes."""
    daily_writes: int = 0
    """Bytes a day that may be handed to the file, on average; while they are spent, arrivals wait \
or are skipped as their source's `overload` says. 0: no limit."""

    def __post_init__(self) -> None:
        check_range(
            self,
            "ttl_days",
            "clock_tolerance_hours",
            "log_length",
            "damaged_bytes",
            "daily_writes",
            least=0,
        )
        check_range(self, "erased_bytes", least=LEAST_ERASED)
        check_range(self, "name_bytes", "extra_bytes", least=0, most=255)
        check_range(self, "typical_bytes", least=64)
        if self.sector not in (None, 512, PAGE):
            raise ValueError(f"sector must be 512 or {PAGE}, got {self.sector}")
        check_range(self, "commit_ms", least=1, most=10_000)
        check_range(self, "budget", least=LEAST_BUDGET)
        if self.key_file is not None and self.key_env is not None:
            raise ValueError("key_file and key_env must not both be set")

    @property
    def decisions(self) -> int:
        """How many decisions are remembered: by default whole chunks of them."""
        if self.log_length is not None:
            return self.log_length
        fitting = self.budget // (20 * ROW_BYTES) // CHUNK * CHUNK
        return min(2048, max(CHUNK, fitting))

    @property
    def erasure_bytes(self) -> int:
        """Bytes for the ids of erased samples."""
        if self.erased_bytes is not None:
            return self.erased_bytes
        small = max(LEAST_ERASED, min(_SMALL_ERASED, self.budget // _SMALL_SHARE))
        return max(small, self.budget // _ERASED_SHARE)

    @property
    def tolerance(self) -> float:
        """Seconds by which clocks may differ."""
        return self.clock_tolerance_hours * 3600.0

    @property
    def file(self) -> Path:
        """Where the store really is.

        Behind a link, so that a file that takes its place does so there.
        """
        return Path(os.path.realpath(self.path))


@dataclass(frozen=True)
class StoreLayout:
    """How a budget is divided."""

    options: StoreOptions
    form: SampleForm
    geometry: Geometry
    capacity: int
    reserve: int
    """The samples that one commit may replace; there is room for both the old and the new ones."""
    state_bytes: int
    """What is committed besides samples."""
    sample_cells: int
    """The cells that samples may take, once a commit is done."""


def plan(options: StoreOptions, form: SampleForm, state_bytes: int) -> StoreLayout:
    """Plan the most samples for a budget.

    There is room for a second copy of whatever one commit can change.

    `state_bytes` is what the device commits besides samples: model, direction, estimator.
    """
    layout = _layout(options, form, state_bytes)
    if layout.capacity:
        return layout
    least = least_budget(options, form, _state_under(options, state_bytes), 1)
    raise ConfigError(
        f"a budget of {options.budget} bytes holds no sample beside the model: it needs {least}"
    )


def least_budget(
    options: StoreOptions,
    form: SampleForm,
    state_bytes: int | Callable[[StoreOptions], int],
    samples: int,
) -> int:
    """Return the smallest budget, in whole pages, that holds this many samples.

    `state_bytes` is what the device commits besides samples, or what it is under a budget.
    """
    state_of = state_bytes if callable(state_bytes) else (lambda _: state_bytes)
    pages = range(
        9, (8 * state_of(options) + 64 * (form.content_bytes + 512) * (samples + 64)) // PAGE + 1024
    )

    def capacity(count: int) -> int:
        within = replace(options, budget=count * PAGE)
        return _layout(within, form, state_of(within)).capacity

    return PAGE * (pages.start + bisect_left(pages, samples, key=capacity))


def _state_under(options: StoreOptions, state_bytes: int) -> Callable[[StoreOptions], int]:
    """Return what a state takes under other budgets, whose default for erased ids is larger."""

    def state_of(within: StoreOptions) -> int:
        default = replace(within, erased_bytes=None).erasure_bytes
        return state_bytes + max(0, default - options.erasure_bytes)

    return state_of


def _layout(options: StoreOptions, form: SampleForm, state_bytes: int) -> StoreLayout:
    overhead = OVERHEAD[bool(options.key_file or options.key_env)]
    alignment = options.sector or _ALIGNMENT
    # Files differ in size: each takes several small cells, as many as it needs.
    content = META_BYTES + form.content_bytes
    if form.payload_bytes is not None:
        content = min(content, max(_LEAST_PART, min(_LARGEST_PART, form.typical_content // _PARTS)))
    cell_size = -(-(overhead + content) // alignment) * alignment
    geometry = Geometry.within(options.budget, cell_size)
    payload = cell_size - overhead
    scales = SCALE_BYTES * math.prod(form.shape) if form.codec().quantised else 0
    each, most = (
        -(-(META_BYTES + n) // payload) for n in (form.typical_content, form.content_bytes)
    )
    needed = COPIES * (-(-(scales + 128) // payload) + -(-(SOURCE_NAMES + 64) // payload))
    state = -(-state_bytes // payload) + needed + _SMALL_ARRAYS

    def reserve(capacity: int) -> int:
        if form.payload_bytes is not None:
            return max(4, min(32, _RESERVED // form.content_bytes))
        return max(8, min(capacity, 128, max(32, capacity // 8)))

    def cells(capacity: int) -> int:
        ranks = -(-RANKS[form.discounts].itemsize * capacity // payload) + capacity // 64 + 1
        # Twice: between two whole commits every chunk of the log may change.
        chunks = 2 * -(-options.decisions // CHUNK)
        log_cells = chunks * -(-(CHUNK * ROW_BYTES + 512) // payload)
        held = each * capacity + most * reserve(capacity)
        return held + 2 * (state + ranks) + log_cells

    capacity = bisect_right(range(1, geometry.cells + 1), geometry.cells, key=cells)
    held = max(each * capacity, geometry.cells - cells(capacity) + each * capacity)
    return StoreLayout(options, form, geometry, capacity, reserve(capacity), state_bytes, held)


@dataclass(frozen=True)
class Opened:
    """A store's file as it was found or made."""

    file: CellFile
    blobs: list[Blob]
    before: dict[str, Any]
    """For what it was made, as its label has it, if that is not lost."""
    now: dict[str, Any]


def open_file(
    layout: StoreLayout, labels: int, model: str = "", names: Sequence[str] = ()
) -> Opened:
    """Open the file, made or found, and what is in it.

    `model` tells models apart whose vectors mean different things. `names` are those of the labels,
    written down for whoever takes samples out.

    A file that is not a store is refused untouched; a damaged store gives back what is undamaged;
    one of another budget is moved over whole, or refused with the budget that it needs.
    """
    options, form = layout.options, layout.form
    path, cipher = options.file, cipher_of(options.key_file, options.key_env)
    sample: dict[str, Any] = {
        "dtype": form.encoding or form.dtype.str,
        "shape": list(form.shape),
        "deflate_to": form.deflate_to,
        "name_bytes": form.name_bytes,
    }
    if form.payload_bytes is not None:
        sample |= {"dtype": PAYLOAD, "shape": [], "payload_bytes": form.payload_bytes}
    if form.extra_bytes:
        sample["extra_bytes"] = form.extra_bytes
    if form.targets is not None:
        sample |= {"targets": form.target_width, "edges": list(form.targets.edges)}
    use = {
        "key": cipher.name if cipher else None,
        "labels": labels,
        "model": model,
        "capacity": layout.capacity,
        "sector": options.sector,
        "erased_bytes": options.erasure_bytes,
        "salt": int.from_bytes(os.urandom(7), "little"),
    }
    wanted = Label(layout.geometry, sample | use)
    if names:
        named = Label(layout.geometry, {**wanted.form, "names": list(names)})
        if named.fits(RESIZED_FROM):
            wanted = named
        else:
            log.warning(
                "%s has no room for the names of %d labels: what is taken out without an agent "
                "has their numbers",
                path,
                labels,
            )
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is not a file: left untouched; set [store] path to another")
        clear_away(path)
        if not path.exists() or not path.stat().st_size:
            make(path, [], wanted, cipher).disk.close()
        return _open(path, layout, wanted, cipher)
    except OSError as error:
        if error.errno not in _FOR_GOOD:
            raise StoreError(f"{path} cannot be used now: {error.strerror}") from error
        raise ConfigError(
            f"{path} cannot be used as a store: {error.strerror}; set [store] path to another"
        ) from error


def _open(path: Path, layout: StoreLayout, wanted: Label, cipher: Cipher | None) -> Opened:
    found, both = find_label(path, cipher, wanted.geometry)
    _check_form(path, found, wanted)
    if "salt" in found.form:
        wanted = replace(wanted, form={**wanted.form, "salt": found.form["salt"]})
    file = CellFile(FileDisk(path, found.geometry.size), found.geometry, cipher)
    try:
        # Only now is it locked: until then another program could give it another key or size.
        if find_label(path, cipher, wanted.geometry) != (found, both):
            raise StoreError(f"{path} was changed while it was opened: start the agent again")
        blobs, damage = file.load(), file.damage
        damage.label = not found.form
        if damage.label:
            _check_records(path, blobs, layout.form)
        room = max(layout.capacity, found.form.get("capacity", 0))
        gone = superfluous(blobs, room) if damage else set()
        blobs = [blob for blob in blobs if blob.number not in gone]
        _check_room(
            path, blobs, layout, None if "targets" in wanted.form else wanted.form["labels"]
        )
        if damage:
            log.warning("%s is damaged: %s; all else goes on", path, damage)
            set_aside(path, layout.options.damaged_bytes)
            file.discard(gone)
        elif damage.root_copies or not both:
            log.warning("%s: copies of a root or of the label are damaged; nothing is lost", path)
        if RESIZED_FROM in found.form:
            finish_resize(file, wanted, found.form[RESIZED_FROM]) if (
                found.geometry == wanted.geometry
            ) else file.disk.cut(found.geometry.size)
        if found.geometry != wanted.geometry:
            if beyond := _decisions_beyond(blobs, layout.options):
                file.discard(beyond)
                blobs = [blob for blob in blobs if blob.number not in beyond]
            packed = _repacked(blobs, found, layout.form)
            if packed is not blobs or not resize(file, blobs, wanted):
                if packed is blobs:
                    packed = file.load()
                moved = make(path, packed, wanted, cipher, file.disk)
                file.disk.close()
                file = moved
            log.info(
                "%s moved to a budget of %d bytes with all it held", path, wanted.geometry.size
            )
            blobs, file.damage = file.load(), damage
        elif not both or found != wanted:
            file.write_label(wanted)
    except BaseException:
        file.disk.close()
        raise
    return Opened(file, blobs, wanted.form | found.form, wanted.form)


def find_label(
    path: Path, cipher: Cipher | None, likely: Geometry | None = None
) -> tuple[Label, bool]:
    """Return the label at either end of the file, and whether it stands at both.

    The key must be the one it names.

    Without a label it is a store only if it holds parts of one where they would `likely` be; else
    it is somebody else's, and nothing of it may change.
    """
    with closing(FileDisk(path)) as disk:
        first = disk.read(0, PAGE)
        try:
            label = decode_label(first)
            end = max(0, path.stat().st_size - PAGE)
            last = disk.read(label.geometry.label_copy if label else end, PAGE)
            label = label or decode_label(last)
        except ConfigError as error:
            raise ConfigError(f"{path} {error}") from None
        if label is not None:
            check_key(label.form["key"], cipher, path)
            return label, first == last
        if likely is not None:
            file = CellFile(disk, likely)
            if file.load() or not file.damage.roots:
                return Label(likely, {}), False
    if first.startswith(LABEL_MAGIC):
        raise ConfigError(
            f"{path} is damaged at both ends: left untouched; an agent can repair it that is "
            "set as it was"
        )
    raise ConfigError(
        f"{path} is not a store of fedkeep: left untouched; set [store] path to another file"
    )


def _check_form(path: Path, found: Label, wanted: Label) -> None:
    held, meant = (label.form.get("targets", 0) for label in (found, wanted))
    if found.form and held != meant:
        words = [
            "labels" if not width else f"{width} numbers to predict" for width in (held, meant)
        ]
        raise ConfigError(
            f"{path} holds samples with {words[0]}, not {words[1]}: set [samples] targets and "
            "width as they were, or [store] path to another file"
        )
    for name in ("dtype", "shape"):
        now = wanted.form[name]
        before = found.form.get(name, now)
        if before != now:
            kinds = (kind if kind == PAYLOAD else _written(name, kind) for kind in (before, now))
            raise ConfigError(
                f"{path} holds samples of {name} {', not '.join(kinds)}: set "
                "[samples] shape and dtype and "
                "[store] encoding as they were, or [store] path to another file "
                "(`fedkeep agent store export` takes the samples out of this one)"
            )


def _written(name: str, form: Any) -> str:
    """Return a shape or a type as people write it."""
    return str(np.dtype(form)) if name == "dtype" else str(list(form))


def _check_records(path: Path, blobs: list[Blob], form: SampleForm) -> None:
    """Without a label nothing says what the samples are.

    They must look as configured, or nothing is touched.
    """
    lengths = [len(blob.data) - META_BYTES for blob in blobs if blob.kind == SAMPLE]
    most = form.content_bytes
    named = bool(form.name_bytes)
    varies = form.deflate_to is not None or form.payload_bytes is not None
    least = 1 + named if varies else form.codec().nbytes + named
    least += 8 * form.target_width
    if not blobs or not all(least <= length <= most for length in lengths):
        raise ConfigError(
            f"{path} has lost its label, and what it holds is not as [samples] and the key of "
            "[store] say: "
            "left untouched; set them as they were when it was made"
        )


def _check_room(path: Path, blobs: list[Blob], layout: StoreLayout, labels: int | None) -> None:
    """Refuses labels and a budget that would cost samples."""
    notes = [decode_note(blob) for blob in blobs if blob.kind == SAMPLE]
    highest = max((note.label for note in notes), default=-1)
    count = len({note.id for note in notes})
    if labels is not None and highest >= labels:
        raise ConfigError(
            f"{path} holds samples of label {highest}, but [samples] labels is {labels}: set it to "
            f"{highest + 1} or more, or first erase them by `fedkeep agent erase --label {highest}`"
        )
    longest = max((len(blob.data) for blob in blobs if blob.kind == SAMPLE), default=0)
    if layout.form.payload_bytes and longest > META_BYTES + layout.form.content_bytes:
        raise ConfigError(
            f"{path} holds a file of about {longest - META_BYTES} bytes, beyond [samples] "
            f"payload_bytes = {layout.form.payload_bytes}: set it as it was"
        )
    if count > layout.capacity:
        state = _state_under(layout.options, layout.state_bytes)
        least = least_budget(layout.options, layout.form, state, count)
        raise ConfigError(
            f"{path} holds {count} samples and [store] budget = {layout.options.budget} has "
            "room for "
            f"{layout.capacity}: set it to {least} or more, or first erase some (`fedkeep "
            "agent store export` takes "
            "them out)"
        )


def superfluous(blobs: list[Blob], capacity: int) -> set[int]:
    """Return the numbers of blobs that go.

    Earlier records of the same, then samples beyond the capacity.

    Labels take turns, each with its highest scores first, so that none is lost to another's larger
    values.
    """
    newest = newest_of(blobs).values()
    notes = [(decode_note(blob), blob.number) for blob in newest if blob.kind == SAMPLE]
    turns: Counter[int] = Counter()
    ranked = []
    for note, number in sorted(notes, key=lambda pair: -pair[0].score):
        ranked.append((turns[note.label], number))
        turns[note.label] += 1
    kept = {blob.number for blob in newest} - {number for _, number in sorted(ranked)[capacity:]}
    return {blob.number for blob in blobs} - kept


def _decisions_beyond(blobs: list[Blob], options: StoreOptions) -> set[int]:
    """Return the numbers of blobs with decisions that a shorter log has no place for.

    A budget that becomes smaller has no room for them.
    """
    chunks = max(1, -(-options.decisions // CHUNK))
    numbered = {
        name.removeprefix(_LOG): blob.number
        for name, blob in newest_of(blobs).items()
        if isinstance(name, str) and name.startswith(_LOG)
    }
    return {n for index, n in numbered.items() if index.isdecimal() and int(index) >= chunks}


def _repacked(blobs: list[Blob], found: Label, form: SampleForm) -> list[Blob]:
    """Return the blobs with samples deflated and names kept as they are from now on."""
    before = replace(
        form,
        extra_bytes=found.form.get("extra_bytes", 0) if found.form else form.extra_bytes,
        deflate_to=found.form.get("deflate_to", form.deflate_to),
        # Without a label a store is taken for one of the present form.
        name_bytes=found.form.get("name_bytes", 0) if found.form else form.name_bytes,
    )
    if before == form:
        return blobs
    old, new = before.codec(), form.codec()

    def packed(blob: Blob) -> bytes:
        row, note = split_content(blob, decode_note(blob), before)
        if before.deflate_to != form.deflate_to:
            row = new.packed(old.unpacked(row))
        return blob.data[:META_BYTES] + join_content(row, note, form)

    return [blob._replace(data=packed(blob)) if blob.kind == SAMPLE else blob for blob in blobs]


def copies_of(path: Path) -> dict[int, Path]:
    """Return the copies set aside so far, by their numbers."""
    found = {
        file.name.rpartition("-")[2]: file for file in path.parent.glob(f"{path.name}.damaged-*")
    }
    return {int(number): file for number, file in found.items() if number.isdigit()}


def set_aside(path: Path, allowed: int) -> None:
    """Keep a copy of a damaged file for whoever wants to look.

    All copies stay within `allowed` bytes.
    """
    import shutil  # a megabyte that most agents never need

    copies = copies_of(path)
    if sum(file.stat().st_size for file in (path, *copies.values())) > allowed:
        log.warning(
            "no copy of the damaged file is kept: [store] damaged_bytes = %d has no room for one",
            allowed,
        )
        return
    aside = path.with_name(f"{path.name}.damaged-{max(copies, default=0) + 1}")
    try:
        with aside.open("xb") as copy, path.open("rb") as file:
            aside.chmod(0o600)
            shutil.copyfileobj(file, copy)
        log.warning("a copy of the damaged file is at %s", aside)
    except OSError as error:
        aside.unlink(missing_ok=True)
        log.warning(
            "there was no room to set a copy of the damaged file aside (%s)", error.strerror
        )


def discard_copies(path: Path) -> None:
    """Overwrite and remove all copies: they hold samples that must not outlive the store's own."""
    for aside in copies_of(path).values():
        with closing(FileDisk(aside, 0)) as disk:
            disk.wipe()
        aside.unlink()


def as_found(
    options: StoreOptions, capacity_of: Callable[[StoreOptions], int], extra_bytes: int = 0
) -> StoreOptions:
    """Return the options with the bytes for names and erased ids settled, where they do not say.

    So are those for what records say of themselves: `extra_bytes` in a new store.

    A store that is there keeps its room for samples: it takes what it had, unless there is now room
    for more.
    """
    found = _peek(options.file) if options.file.is_file() else None
    if options.name_bytes is None:
        kept = NAME_BYTES if found is None else found.form.get("name_bytes", 0)
        options = replace(options, name_bytes=kept)
    if options.extra_bytes is None:
        kept = extra_bytes if found is None else found.form.get("extra_bytes", 0)
        options = replace(options, extra_bytes=kept)
    if options.erased_bytes is not None:
        return options
    if found is None:
        return replace(options, erased_bytes=options.erasure_bytes)
    had = found.form.get("erased_bytes", _SMALL_ERASED)
    chosen = replace(options, erased_bytes=max(had, options.erasure_bytes))
    if capacity_of(chosen) >= found.form.get("capacity", 0):
        return chosen
    return replace(options, erased_bytes=had)


def _peek(path: Path) -> Label | None:
    """Return the label at the head of a file, if there is one."""
    try:
        with closing(FileDisk(path)) as disk:
            return decode_label(disk.read(0, PAGE))
    except (OSError, ConfigError):
        return None
