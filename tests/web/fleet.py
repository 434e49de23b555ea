"""Records of runs that never happened, for tests of what reads records: valid and repeatable."""

import base64
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedkeep.records import (
    Change,
    DeviceLine,
    End,
    Evaluation,
    GistLine,
    Header,
    HoldingsLine,
    PlanLine,
    PrivacyLine,
    Recorder,
    Round,
    Slot,
    Timing,
)

LABELS = (
    "shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "blouse",
    "sneaker",
    "bag",
    "boot",
)
METHODS = {  # final accuracy, rounds to two thirds of it
    "ode": (0.86, 60.0),
    "fifo": (0.79, 130.0),
    "reservoir": (0.80, 140.0),
    "high-loss": (0.74, 150.0),
    "full-data": (0.88, 50.0),
}
REASONS = ("non-finite", "wrong shape", "too late")


def picture(label: int, rng: np.random.Generator) -> np.ndarray:
    """A grey 28x28 picture whose shape tells its label: so many rings, bright or dark."""
    y, x = np.mgrid[-1:1:28j, -1:1:28j]
    radius = np.hypot(x * rng.uniform(0.8, 1.3), y * rng.uniform(0.8, 1.3))
    wave = np.cos(radius * (2 + label) * 1.5) ** 2 * (radius < 0.95)
    grey: np.ndarray = 255 * np.clip(wave + rng.normal(0, 0.08, wave.shape), 0, 1)
    return grey.astype(np.uint8)


class FakeRun:
    """One run, written as far as asked."""

    def __init__(
        self,
        path: Path,
        method: str = "ode",
        seed: int = 0,
        *,
        task: str = "fashion-mnist",
        setting: str = "",
        rounds: int = 400,
        devices: int = 20,
        labels: Sequence[str] = LABELS,
        images: bool = True,
        name: str | None = None,
    ) -> None:
        self.rng = np.random.default_rng([seed, *method.encode()])
        self.round, self.every = 0, 10
        self._method, self._devices, self._labels, self._images = (
            method,
            devices,
            len(labels),
            images,
        )
        self._sent = 0
        self._quotas = self._plan()
        self._recorder = Recorder(path)
        self._recorder.start(
            Header(
                run=name or path.stem,
                method=method,
                task=task,
                seed=seed,
                setting=setting,
                config={"train": {"rounds": rounds}, "policy": {"name": method}, "seed": seed},
                config_hash=f"{seed:08x}",
                versions={"fedkeep": "0.1.0"},
                labels=tuple(labels),
                devices=devices,
                rounds=rounds,
                image=(28, 28) if images else None,
            )
        )
        self._write_plan()

    def advance(self, rounds: int) -> None:
        """Goes on by so many rounds."""
        for _ in range(rounds):
            self.round += 1
            self._recorder.write(self._activity())
            if self.round % self.every == 0 or self.round == 1:
                self._evaluate()

    def finish(self) -> None:
        self._recorder.write(End(round=self.round, digest="5eed"))

    def __del__(self) -> None:
        """A run that is dropped is stopped: its record may be written by another."""
        self._recorder.close()

    def _plan(self) -> np.ndarray:
        wants = self.rng.random((self._devices, self._labels)) < 0.45
        wants[:, -1:] &= np.arange(self._devices)[:, None] < 3
        return np.where(wants, 1 + (self.rng.random(wants.shape) < 0.3), 0)

    def _write_plan(self) -> None:
        holders = (self._quotas > 0).sum(axis=0)
        self._recorder.write(
            PlanLine(
                round=self.round,
                devices=tuple(range(self._devices)),
                quotas=tuple(map(tuple, self._quotas.tolist())),
                holders=tuple(holders.tolist()),
                wanted=(5,) * self._labels,
            )
        )

    def _activity(self) -> Round:
        arrivals = int(self.rng.poisson(60))
        replaced = int(arrivals * 0.35 * np.exp(-self.round / 150))
        kept = int(arrivals * 0.3 * np.exp(-self.round / 25))
        lost = int(self.rng.random() < 0.08)
        refused = {str(self.rng.choice(REASONS)): 1} if self.rng.random() < 0.06 else {}
        return Round(
            round=self.round,
            participants=tuple(sorted(self.rng.choice(self._devices, 5, replace=False).tolist())),
            arrivals=arrivals,
            kept=kept,
            replaced=replaced,
            refused=arrivals - kept - replaced,
            dropouts=lost,
            refused_reports=refused,
            staleness=4 * (1 - np.exp(-self.round / 30)) + self.rng.normal(0, 0.15),
        )

    def _evaluate(self) -> None:
        final, pace = METHODS.get(self._method, (0.7, 100.0))
        accuracy = final * (1 - 0.88 * np.exp(-self.round / pace)) + self.rng.normal(0, 0.006)
        self._sent += self.every * 5 * 180_000
        self._recorder.write(
            Evaluation(
                round=self.round,
                accuracy=float(accuracy),
                loss=float(2.3 * (1 - accuracy) + 0.1),
                device_accuracy_quantiles=tuple(
                    (accuracy * np.array([0.4, 0.8, 1.0, 1.05, 1.1])).tolist()
                ),
                samples_valued=self.round * 60,
                bytes_stored=self._devices * 5 * 785,
                bytes_up=self._sent,
                bytes_down=2 * self._sent,
                label_coverage=min(1.0, 0.4 + self.round / 100),
                store_turnover=float(0.5 * np.exp(-self.round / 90)),
            )
        )
        filled = np.minimum(self._quotas, self.rng.poisson(self.round / 30, self._quotas.shape))
        self._recorder.write(
            HoldingsLine(
                round=self.round,
                devices=tuple(range(self._devices)),
                filled=tuple(map(tuple, filled.tolist())),
            )
        )
        for device in range(min(6, self._devices)):
            self._snapshot(device)
        spent = 0.02 * self.round
        self._recorder.write(
            PrivacyLine(
                round=self.round, epsilon_spent=spent, epsilon_left=max(0.0, 8 - spent), delta=1e-5
            )
        )
        if self._method.startswith("gist"):
            self._recorder.write(
                GistLine(
                    round=self.round,
                    participations=50,
                    trust=0.6,
                    likeness=0.75,
                    worth=40.0,
                    reach=0.35,
                )
            )
        self._recorder.write(Timing(round=self.round, seconds=self.round * 0.11))

    def _snapshot(self, device: int) -> None:
        owned = np.flatnonzero(self._quotas[device])
        slots = tuple(self._slot(int(label)) for label in owned[:8])
        changes = (
            tuple(self._change(int(self.rng.choice(owned))) for _ in range(8)) if len(owned) else ()
        )
        self._recorder.write(
            DeviceLine(round=self.round, device=device, capacity=8, slots=slots, changes=changes)
        )

    def _slot(self, label: int) -> Slot:
        shown = base64.b64encode(self._picture(label).tobytes()).decode() if self._images else None
        age = int(self.rng.integers(1, 300))
        score = float(self.rng.normal(0.4, 0.3))
        return Slot(
            id=int(self.rng.integers(1, 60_000)),
            label=label,
            score=score,
            age=age,
            uses=age // 60,
            thumbnail=shown,
        )

    def _picture(self, label: int) -> np.ndarray:
        return picture(label, self.rng)

    def _change(self, label: int) -> Change:
        fate = str(self.rng.choice(["kept", "replaced", "refused", "refused", "refreshed"]))
        return Change(
            id=int(self.rng.integers(1, 60_000)),
            label=label,
            score=float(self.rng.normal(0.2, 0.4)),
            fate=fate,
            displaced=int(self.rng.integers(1, 60_000)) if fate == "replaced" else None,
        )


def write_fleet(directory: Path, seeds: int = 2, rounds: int = 200) -> None:
    """Every method with so many seeds, all finished."""
    for method in METHODS:
        for seed in range(seeds):
            run = FakeRun(directory / f"{method}-{seed}.jsonl", method, seed, rounds=rounds)
            run.advance(rounds)
            run.finish()
