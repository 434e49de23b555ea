"""Every operation of the store in any order, with crashes, failing disks, other budgets and keys in
between.
"""

import errno
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fedkeep.agent.cells import Cipher
from fedkeep.agent.record import Verdict
from fedkeep.agent.store_file import find_label, open_file, plan
from fedkeep.agent.store_moves import rekey
from fedkeep.core.store import MemoryStore
from tests.faults.corruption import LAYOUT, OPTIONS
from tests.faults.script import FORM, REGIONS, RamDisk, Scripted, sample, samples

KEYS = (None, "11" * 32, "22" * 32)


class StoreMachine(RuleBasedStateMachine):
    """The model is what the last commit that succeeded left; what is read must be that, and nothing
    besides.
    """

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="store-machine-"))
        self.options: dict[str, Any] = {"path": str(self.folder / "s"), "budget": OPTIONS.budget}
        self.next, self.key, self.fails = 0, 0, False
        self.erased: list[bytes] = []
        self.doubtful: dict[int, bytes] = {}
        """What a commit of samples alone that failed may have left, each in the place of another.
        """
        self._open()
        self.committed = self._held()
        self.present = dict(self.committed)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.disk.close()
            shutil.rmtree(self.folder)

    def _layout(self) -> Any:
        from dataclasses import replace

        key = KEYS[self.key]
        place = self.folder / "key"
        if key is not None:
            place.unlink(missing_ok=True)
            place.touch(0o600)
            place.write_text(key)
        changes = {**self.options, "key_file": str(place) if key else None}
        return plan(replace(OPTIONS, **changes), FORM, 4_000)

    def _open(self) -> None:
        layout = self._layout()
        opened = open_file(layout, REGIONS)
        run = Scripted(RamDisk(b""), layout)
        run.quotas = np.full(REGIONS, LAYOUT.capacity // REGIONS)
        run.file = run.store.file = opened.file
        run.store._index = MemoryStore(run.quotas)
        run.store.ranks = run.store._index.ranks
        run.store.load(opened.blobs)
        run.store.restore({"quotas": run.quotas})
        self.run, self.disk = run, opened.file.disk
        self.write = self.disk.write

    def _check(self) -> None:
        """What was read is what was committed, but for what a failed commit may have put in its
        place.
        """
        held = self._held()
        new = held.keys() - self.committed.keys()
        assert held.items() <= (self.committed | self.doubtful).items()
        assert len(self.committed.keys() - held.keys()) <= len(new)
        self.present, self.committed, self.doubtful = dict(held), dict(held), {}

    def _held(self) -> dict[int, bytes]:
        held = self.run.store.stored().batch
        return {i: x.tobytes() for i, x in zip(held.ids.tolist(), held.x, strict=True)}

    @rule(count=st.integers(1, 12), again=st.booleans())
    def offer(self, count: int, again: bool) -> None:
        first = max(0, self.next - 6) if again else self.next
        batch = samples(first, count)
        scores = np.random.default_rng(first).random(count)
        self.run.store.offer(batch, batch.y, scores, self.next + np.arange(count))
        self.next = max(self.next, first + count)
        self.present = self._held()

    @rule(share=st.floats(0, 1))
    def revalue(self, share: float) -> None:
        held = self.run.store.stored().batch.ids
        scores = np.random.default_rng(self.next).random(len(held))
        self.run.store.rescore(np.where(scores < share / 4, -np.inf, scores))
        self.present = self._held()

    @rule(whole=st.booleans())
    def commit(self, whole: bool) -> None:
        whole = whole or not self.run.store.readable
        try:
            self.run.store.commit(self.run.state() if whole else None)
        except OSError:
            assert self.fails
            tried = {} if whole else dict(self.present)
            self._recover()
            self.doubtful |= tried
            return
        self.committed, self.doubtful = dict(self.present), {}

    @rule(count=st.integers(1, 5))
    def erase(self, count: int) -> None:
        victims = sorted(self.present)[:count]
        self.run.store.forget(victims, Verdict.ERASED)
        try:
            self.run.store.commit(self.run.state(), wipe=True)
        except OSError:
            assert self.fails
            self._recover()
            return
        self.present = self.committed = self._held()
        self.doubtful = {}
        self.erased += [sample(i).tobytes() for i in victims]

    @rule()
    def fail_next_write(self) -> None:
        def failing(offset: int, data: bytes) -> None:
            self.disk.write = self.write  # type: ignore[method-assign]
            self.write(offset, data[: len(data) // 2])
            raise OSError(errno.EIO, "Input/output error")

        self.fails = True
        self.disk.write = failing  # type: ignore[method-assign]

    def _recover(self) -> None:
        self.fails = False
        self.disk.write = self.write  # type: ignore[method-assign]
        # An erased sample that was offered again may stand in a cell that the failed commit wrote.
        offered = set(self._held().values())
        self.erased = [gone for gone in self.erased if gone not in offered]
        self.run.store.load(self.run.store.file.reload())
        self.run.store.restore({"quotas": self.run.quotas})
        assert self._held() == self.committed
        self.present = dict(self.committed)

    @precondition(lambda self: not self.fails)
    @rule()
    def crash(self) -> None:
        self.disk.close()
        self._open()
        self._check()

    @precondition(lambda self: not self.fails)
    @rule(budget=st.sampled_from([OPTIONS.budget, 110_000, 150_000, 200_000]))
    def move(self, budget: int) -> None:
        self.disk.close()
        self.options["budget"] = budget
        self._open()
        assert (self.folder / "s").stat().st_size <= budget
        self._check()

    @precondition(lambda self: not self.fails and self.options["budget"] > OPTIONS.budget)
    @rule(key=st.sampled_from(range(len(KEYS))))
    def change_key(self, key: int) -> None:
        self.disk.close()
        ciphers = [Cipher(bytes.fromhex(k)) if k else None for k in KEYS]
        path = self.folder / "s"
        label, _ = find_label(path, ciphers[self.key])
        rekey(path, label, ciphers[self.key], ciphers[key])
        self.key = key
        self._open()
        self._check()

    @invariant()
    def nothing_erased_is_in_any_file(self) -> None:
        if not getattr(self, "erased", None):
            return
        again = set(self.present.values())
        images = [f.read_bytes() for f in self.folder.iterdir() if f.name != "key"]
        for gone in self.erased[-20:]:
            assert gone in again or not any(gone in image for image in images)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
