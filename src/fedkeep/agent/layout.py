"""How the store's budget of bytes is divided: samples, the device's state, and room for a second copy of both."""

import math
import os
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from pathlib import Path

from fedkeep.agent.cells import HEADER, PAGE, Geometry
from fedkeep.agent.cipher import OVERHEAD
from fedkeep.agent.durable_store import COPIES, RANKS, SOURCE_NAMES
from fedkeep.agent.ledgers import CHUNK, ROW_BYTES
from fedkeep.agent.record import META_BYTES, SampleForm
from fedkeep.core.bounds import within
from fedkeep.core.encoding import SCALE_BYTES, VERSIONS, EncodingName
from fedkeep.core.errors import ConfigError

_ALIGNMENT = 4
_SMALL_ARRAYS = 12
"""Cells for the arrays of a device whose size is no multiple of a cell."""


@dataclass(frozen=True)
class StoreOptions:
    """Where samples are kept, how many bytes they may take, and for how long."""

    path: str = "fedkeep.store"
    budget: int = 9_000_000
    """Bytes of the file, with its journal, indexes and the device's state; the file has this size from the start."""
    ttl_days: float = 30.0
    """A sample older than this is removed and overwritten; 0 keeps samples for ever."""
    clock_tolerance_hours: float = 24.0
    """How wrong the wall clock may be after a reboot before a TTL could fire early."""
    commit_ms: int = 100
    """Samples are committed together at most this often, to spare the flash."""
    log_length: int | None = None
    """How many decisions are remembered for `fedkeep agent why`; None: as many as fit a twentieth of the budget."""
    key_file: str | None = None
    """A file with the key of 64 hex digits under which samples are encrypted; None: not encrypted."""
    key_env: str | None = None
    """An environment variable with that key, instead of a file."""
    encoding: EncodingName | None = None
    """Fewer bytes per sample: `float16`, `int8`, `uint8`; None: as [samples] dtype says."""
    deflate_to: int | None = None
    """Bytes into which each sample is deflated, without loss where that is enough, else rounded until it fits; \
`fedkeep agent store check` says what would do. None: not deflated."""
    damaged_bytes: int = 0
    """Bytes that numbered copies of a damaged file may take beside the budget; 0: none is made."""

    def __post_init__(self) -> None:
        within(self, "ttl_days", "clock_tolerance_hours", "log_length", "damaged_bytes", least=0)
        within(self, "commit_ms", least=1, most=10_000)
        within(self, "budget", least=8 * PAGE)
        if self.key_file is not None and self.key_env is not None:
            raise ValueError("key_file and key_env must not both be set")

    @property
    def decisions(self) -> int:
        return min(2048, self.budget // (20 * ROW_BYTES)) if self.log_length is None else self.log_length

    @property
    def file(self) -> Path:
        """Where the store really is: behind a link, so that a file that takes its place does so there."""
        return Path(os.path.realpath(self.path))


@dataclass(frozen=True)
class StoreLayout:
    options: StoreOptions
    form: SampleForm
    geometry: Geometry
    capacity: int
    reserve: int
    """The samples that one commit may replace; there is room for both the old and the new ones."""
    state_bytes: int
    """What is committed besides samples."""


def plan(options: StoreOptions, form: SampleForm, state_bytes: int) -> StoreLayout:
    """The most samples for a budget, with room for a second copy of whatever one commit can change.

    `state_bytes` is what the device commits besides samples: model, direction, estimator.
    """
    layout = _layout(options, form, state_bytes)
    if layout.capacity:
        return layout
    least = least_budget(options, form, state_bytes, 1)
    raise ConfigError(f"a budget of {options.budget} bytes holds no sample beside the model: it needs {least}")


def least_budget(options: StoreOptions, form: SampleForm, state_bytes: int, samples: int) -> int:
    """The smallest budget, in whole pages, that holds this many samples."""
    pages = range(9, (8 * state_bytes + 64 * (form.codec().nbytes + 512) * (samples + 64)) // PAGE + 1024)

    def capacity(count: int) -> int:
        return _layout(replace(options, budget=count * PAGE), form, state_bytes).capacity

    return PAGE * (pages.start + bisect_left(pages, samples, key=capacity))


def _layout(options: StoreOptions, form: SampleForm, state_bytes: int) -> StoreLayout:
    overhead = HEADER + (OVERHEAD if options.key_file or options.key_env else 0)
    cell_size = -(-(overhead + META_BYTES + form.codec().nbytes) // _ALIGNMENT) * _ALIGNMENT
    geometry = Geometry.within(options.budget, cell_size)
    payload = cell_size - overhead
    scales = VERSIONS * SCALE_BYTES * math.prod(form.shape) if form.codec().quantised else 0
    needed = COPIES * (-(-(scales + 128) // payload) + -(-(SOURCE_NAMES + 64) // payload))
    state = -(-state_bytes // payload) + needed + _SMALL_ARRAYS

    def reserve(capacity: int) -> int:
        return max(8, min(capacity, 128, max(32, capacity // 8)))

    def cells(capacity: int) -> int:
        ranks = -(-RANKS[form.discounts].itemsize * capacity // payload) + capacity // 64 + 1
        chunks = -(-options.decisions // CHUNK) + reserve(capacity) // CHUNK + 2
        log_cells = chunks * -(-(CHUNK * ROW_BYTES + 512) // payload)
        return capacity + reserve(capacity) + 2 * (state + ranks) + log_cells

    capacity = bisect_right(range(1, geometry.cells + 1), geometry.cells, key=cells)
    return StoreLayout(options, form, geometry, capacity, reserve(capacity), state_bytes)
