"""Attacks on the last-layer g_hat_c of n Fashion-MNIST samples, and the figure of docs/privacy.md.

    FEDKEEP_DATA=... python experiments/attacks.py [--json FILE] [--figure FILE] [--trials 20]

The model is softmax regression on the pixels: the input of its last layer is the image itself, which is the worst case.
It was trained for a while on other images, and the attacker knows the labels of the samples.
"""

import argparse
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from lab.attacks import (
    LastLayer,
    MembershipAttack,
    advantage,
    invert_analytically,
    invert_by_matching,
    similarity,
)

from fedkeep.core.estimators import mean_gradient
from fedkeep.core.ports import Job
from fedkeep.core.types import Batch, FloatArray, LocalTraining, Report, TrainOrder, Vector
from fedkeep.data.fashion_mnist import FashionMnist
from fedkeep.learn.dense_learner import DenseLearner
from fedkeep.privacy.guard import Guard
from fedkeep.privacy.ledger import Ledger
from fedkeep.privacy.options import PrivacyOptions

SIZES = (1, 2, 5, 10, 20, 50, 100)
EPSILONS: tuple[float | None, ...] = (None, 100.0, 8.0, 1.0)
CLASSES, PIXELS = 10, 784
SHOWN = (1, 2, 5, 20)
LEARNER = DenseLearner((PIXELS, CLASSES))


def images() -> Batch:
    """All images in random order, pixels in [0, 1]."""
    data = FashionMnist().load(0)
    order = np.random.default_rng(0).permutation(len(data.y))
    return Batch(data.x.reshape(-1, PIXELS), data.y, np.arange(len(data.y))).take(order)


def trained(public: Batch) -> Vector:
    """A model after some training on images that are not attacked."""
    local = LocalTraining(learning_rate=0.1, epochs=5, batch_size=64)
    return LEARNER.train(LEARNER.initial(0), Job(public, np.ones(len(public)), 0), local)


class Attack:
    """The attacker's knowledge: the model, and other images of the same kind."""

    def __init__(self, everything: Batch) -> None:
        self.public, self.private = everything.take(slice(0, 5000)), everything.take(slice(5000, None))
        self.model = trained(self.public)
        self.layer = LastLayer.of(self.model, CLASSES)
        self.probe = LEARNER.probe(self.model)
        by_label = [self.public.take(self.public.y == y) for y in range(CLASSES)]
        self._by_label = by_label
        self.usual_images = np.stack([batch.x.mean(axis=0) for batch in by_label]).astype(np.float64)

    @cache  # noqa: B019 - one attacker lives as long as the program
    def typical(self, epsilon: float | None) -> FloatArray:
        """The mean gradient of each label, clipped as on the devices."""
        return np.array([told(self.model, batch, epsilon) for batch in self._by_label], dtype=np.float64)

    def upload(self, batch: Batch, epsilon: float | None, seed: int) -> Vector:
        """What leaves a device that saw this batch, by the code that real devices run."""
        options = PrivacyOptions(epsilon=epsilon)
        gradient = told(self.model, batch, epsilon)
        report = Report(0, self.model, 1.0, 1, 1, gradient, len(batch))
        order = TrainOrder(0, self.model, None, LocalTraining(0.1, 1))
        noise = np.random.default_rng(seed).standard_normal
        sent = Guard(options, Ledger(), lambda _: None, noise).release(report, order).local_gradient
        assert sent is not None
        return sent

    def inverted(self, upload: Vector, labels: np.ndarray) -> np.ndarray:
        """The attacker's images: by formula for one sample, by gradient matching from the usual ones for more."""
        gradient = LastLayer.of(upload, CLASSES)
        if len(labels) == 1:
            return np.clip(invert_analytically(gradient), 0, 1)[None]
        return invert_by_matching(self.layer, gradient, labels, self.usual_images[labels])


def told(model: Vector, batch: Batch, epsilon: float | None) -> Vector:
    """What a device tells of a batch before noise: clipped where there is to be any."""
    return mean_gradient(LEARNER.probe(model).measure(batch), PrivacyOptions().clip if epsilon else None)


def unscaled(upload: Vector, epsilon: float | None, n: int) -> Vector:
    """The upload at its length before the guard shortened it, as far as the attacker can tell: that of the noise."""
    if epsilon is None:
        return upload
    options = PrivacyOptions(epsilon=epsilon)
    noise = options.noise_multiplier() * 2 * options.clip / n * np.sqrt(len(upload))
    shortened = np.linalg.norm(upload) > 0.999 * options.clip
    return upload * np.float32(max(1.0, noise / options.clip)) if shortened else upload


def run(attack: Attack, n: int, epsilon: float | None, trials: int) -> dict[str, Any]:
    """Both attacks on `trials` devices with n samples each."""
    likeness, usual, members, others = [], [], [], []
    for trial in range(trials):
        start = 2 * trial * n
        batch, strangers = (
            attack.private.take(slice(start, start + n)),
            attack.private.take(slice(start + n, start + 2 * n)),
        )
        upload = unscaled(attack.upload(batch, epsilon, trial), epsilon, n)
        if trial * n < 200:
            truth = batch.x.astype(np.float64)
            likeness.append(similarity(attack.inverted(upload, batch.y), truth))
            usual.append(similarity(attack.usual_images[batch.y], truth))
        clip = np.inf if epsilon is None else PrivacyOptions().clip
        membership = MembershipAttack(upload, batch.y, attack.typical(epsilon), clip)
        members.append(membership.scores(attack.probe.measure(batch), batch.y))
        others.append(membership.scores(attack.probe.measure(strangers), strangers.y))
    found = np.concatenate(likeness)
    return {
        "n": n,
        "epsilon": epsilon,
        "likeness": float(found.mean()),
        "recovered": float((found > 0.95).mean()),
        "likeness_of_usual_images": float(np.concatenate(usual).mean()),
        "membership": advantage(np.concatenate(members), np.concatenate(others)),
    }


def shown_images(attack: Attack) -> dict[str, list[np.ndarray]]:
    """For a few n one sample and what the attacker makes of it, without and with noise."""
    rows: dict[str, list[np.ndarray]] = {"sample": [], "no noise": [], "epsilon 8": []}
    for n in SHOWN:
        batch = attack.private.take(slice(300, 300 + n))
        rows["sample"].append(batch.x[0])
        for name, epsilon in (("no noise", None), ("epsilon 8", 8.0)):
            upload = unscaled(attack.upload(batch, epsilon, 0), epsilon, n)
            guesses = attack.inverted(upload, batch.y)
            centred = guesses - guesses.mean(axis=1, keepdims=True)
            best = (centred @ (batch.x[0] - batch.x[0].mean()) / (np.linalg.norm(centred, axis=1) + 1e-9)).argmax()
            rows[name].append(guesses[best])
    return rows


def draw(runs: list[dict[str, Any]], pictures: dict[str, list[np.ndarray]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure = plt.figure(figsize=(10, 6.2), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=[1.5, 1])
    left, right = upper.subplots(1, 2)
    for epsilon, colour in zip(EPSILONS, ("#c0392b", "#e08e0b", "#2471a3", "#1e8449"), strict=True):
        own = [r for r in runs if r["epsilon"] == epsilon]
        name = "no noise" if epsilon is None else f"epsilon {epsilon:g}"
        left.plot([r["n"] for r in own], [r["likeness"] for r in own], "o-", ms=4, color=colour, label=name)
        right.plot([r["n"] for r in own], [r["membership"] for r in own], "o-", ms=4, color=colour, label=name)
    base = [r for r in runs if r["epsilon"] is None]
    left.plot(
        [r["n"] for r in base], [r["likeness_of_usual_images"] for r in base], "k:", label="mean image of the label"
    )
    right.axhline(0.5, color="k", ls=":", label="guessing")
    left.set(xscale="log", xlabel="samples in the estimator", ylabel="correlation with the true image", ylim=(0, 1.03))
    right.set(xscale="log", xlabel="samples in the estimator", ylabel="membership: area under ROC", ylim=(0.45, 1.03))
    left.set_title("Inversion: how alike the attacker's image is", fontsize=10)
    right.set_title("Membership: was this image in the estimator?", fontsize=10)
    for axes in (left, right):
        axes.set_xticks(SIZES, [str(n) for n in SIZES])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    grid = lower.subplots(len(pictures), len(SHOWN), squeeze=False)
    for row, (name, shown) in zip(grid, pictures.items(), strict=True):
        for axes, picture, n in zip(row, shown, SHOWN, strict=True):
            axes.imshow(picture.reshape(28, 28), cmap="gray", vmin=0, vmax=1)
            axes.set(xticks=[], yticks=[])
            if name == "sample":
                axes.set_title(f"n = {n}", fontsize=9)
        row[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9)
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "privacy" / "attacks.json")
    parser.add_argument("--figure", type=Path, default=Path("docs/figures/privacy-attacks.png"))
    parser.add_argument("--trials", type=int, default=40)
    options = parser.parse_args()
    attack = Attack(images())
    runs = [run(attack, n, epsilon, options.trials) for epsilon in EPSILONS for n in SIZES]
    options.json.write_text(json.dumps(runs, indent=1) + "\n")
    options.figure.parent.mkdir(parents=True, exist_ok=True)
    draw(runs, shown_images(attack), options.figure)


if __name__ == "__main__":
    main()
