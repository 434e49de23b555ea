"""A fixed sequence of changes to a store: what it must hold after each step is known in advance."""

import numpy as np

from fedkeep.agent.cellfile import CellFile, FileDisk
from fedkeep.agent.cells import Geometry, Label
from fedkeep.agent.durable_store import DurableStore
from fedkeep.agent.record import DecisionLog, SampleForm, Verdict
from fedkeep.agent.retention import AgeClock
from fedkeep.agent.store_file import StoreLayout, StoreOptions, plan
from fedkeep.core.seeds import uniform_keys
from fedkeep.core.store import AfterUse, MemoryStore
from fedkeep.core.types import AnyArray, Batch, IntArray, State

FORM = SampleForm(np.dtype("<f4"), (24,))
OPTIONS = StoreOptions(budget=88_000, log_length=64)
STATE_BYTES = 4_000
LAYOUT = plan(OPTIONS, FORM, STATE_BYTES)
REGIONS = 4
BATCH = 8


class RamDisk(FileDisk):
    """A file in memory; whatever is written is there at once."""

    def __init__(self, image: bytes | bytearray) -> None:
        self.image = bytearray(image)

    def read(self, offset: int, length: int) -> bytes:
        return bytes(self.image[offset : offset + length]).ljust(length, b"\0")

    def write(self, offset: int, data: bytes) -> None:
        self.image[offset : offset + len(data)] = data

    def sync(self) -> None: ...

    def drop_cache(self) -> None: ...

    def extend(self, size: int) -> None:
        self.image.extend(bytes(max(0, size - len(self.image))))

    def cut(self, size: int) -> None:
        del self.image[size:]

    def close(self) -> None: ...


def sample(id_: int) -> AnyArray:
    """The one and only sample of that id."""
    return np.random.default_rng(id_).standard_normal(24).astype("<f4")


def samples(first: int, count: int) -> Batch:
    ids = np.arange(first, first + count)
    return Batch(np.stack([sample(int(i)) for i in ids]), ids % REGIONS, ids)


class Scripted:
    """A store that walks through the script and commits after every step."""

    def __init__(
        self,
        disk: FileDisk,
        layout: StoreLayout = LAYOUT,
        form: SampleForm = FORM,
        after_use: AfterUse = AfterUse(),
    ) -> None:
        self.file = CellFile(disk, layout.geometry)
        self.quotas: IntArray = np.full(REGIONS, layout.capacity // REGIONS)
        index = MemoryStore(self.quotas, after_use)
        self.store = DurableStore(
            self.file, index, form, DecisionLog(64, "ode"), AgeClock(), layout.capacity
        )
        self.step = 0

    def format(self, geometry: Geometry = LAYOUT.geometry) -> None:
        self.file.format(Label(geometry, {}))

    def open(self) -> None:
        self._adopt(self.store.load(self.file.load()))

    def reload(self) -> None:
        self._adopt(self.store.load(self.store.file.reload()))

    def _adopt(self, state: State) -> None:
        self.store.restore({"quotas": self.quotas})
        self.step = int(state.get("step", np.array(0)))
        self.store.log.restore(
            {n.removeprefix("log."): a for n, a in state.items() if n.startswith("log.")}
        )

    def advance(self) -> bool:
        """Takes the next step without committing it; True if something must be wiped."""
        step, self.step = self.step, self.step + 1
        if step % 10 == 7:
            stored = self.store.stored()
            self.store.rescore(uniform_keys(step, stored.batch.ids))
            self.store.mark_used(self.store.stored().batch.ids)
        elif step % 25 == 18:
            return self.store.forget(self.store.stored().batch.ids[:2].tolist(), Verdict.ERASED) > 0
        else:
            again = step % 6 == 5
            batch = samples((step - 3 if again else step) * BATCH, BATCH)
            arrivals = step * BATCH + np.arange(BATCH)
            self.store.offer(batch, batch.y, uniform_keys(1, arrivals), arrivals)
        return False

    def advance_alone(self, step: int) -> None:
        """Offers samples that are each worth more than all before them."""
        batch = samples(step * BATCH, BATCH)
        self.store.offer(batch, batch.y, batch.ids.astype(np.float64), batch.ids)
        self.step = step + 1

    def state(self) -> State:
        estimator = np.full(400, float(self.step))
        log = {f"log.{name}": array for name, array in self.store.log.snapshot().items()}
        return {"step": np.array(self.step), "estimator": estimator, "quotas": self.quotas, **log}

    def commit(self, *, wipe: bool = False) -> None:
        self.store.commit(self.state(), wipe=wipe)

    def digest(self) -> bytes:
        """All that a reader could see."""
        held = self.store.stored()
        columns = (
            held.batch.x,
            held.batch.y,
            held.batch.ids,
            held.regions,
            held.scores,
            held.arrivals,
            held.uses,
        )
        return b"".join(np.ascontiguousarray(column).tobytes() for column in columns)


class Expected:
    """What the store must hold after each step: the script run without a disk that can fail."""

    def __init__(self) -> None:
        self._walk = Scripted(RamDisk(bytes(LAYOUT.geometry.size)))
        self._digests = [self._walk.digest()]

    def after(self, step: int) -> bytes:
        while len(self._digests) <= step:
            self._walk.advance()
            self._digests.append(self._walk.digest())
        return self._digests[step]
