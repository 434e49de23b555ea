"""Attacks on the last-layer g_hat_c of n Fashion-MNIST samples, and the figure of docs/privacy.md.

    FEDKEEP_DATA=... python experiments/attacks.py [--json FILE] [--figure FILE] [--trials 20]

What a curious server can learn from an upload: to be tried before one trusts a setting. The last
layer is linear with weight W (Y, d) and bias b, under softmax cross-entropy: a sample with input h
and error e = softmax(W h + b) - onehot(y) has the gradient e (h, 1)^T, and g_hat_c is the mean over
n of them. The model is softmax regression on the pixels: the input of its last layer is the image
itself, which is the worst case. It was trained for a while on other images, and the attacker knows
the labels of the samples.
"""

import argparse
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import numpy as np

from fedkeep.core.gradients import clip_weights, mean_gradient
from fedkeep.core.protocols import PerSampleGradients, TrainingJob
from fedkeep.core.types import (
    Batch,
    FloatArray,
    IntArray,
    LocalTraining,
    Report,
    Scores,
    TrainOrder,
    Vector,
)
from fedkeep.data.fashion_mnist import FashionMnist
from fedkeep.learn.dense_learner import DenseLearner
from fedkeep.privacy.accountant import PrivacyLedger
from fedkeep.privacy.mechanism import DPMechanism
from fedkeep.privacy.options import PrivacyOptions

SIZES = (1, 2, 5, 10, 20, 50, 100)
EPSILONS: tuple[float | None, ...] = (None, 100.0, 8.0, 1.0)
CLASSES, PIXELS = 10, 784
SHOWN = (1, 2, 5, 20)
LEARNER = DenseLearner((PIXELS, CLASSES))
_MOMENTUM, _SCALE, _TINY = 0.9, 0.999, 1e-12


@dataclass(frozen=True, eq=False)
class LastLayer:
    """The layer that the server knows, since it sent it."""

    weight: FloatArray
    bias: FloatArray

    @classmethod
    def of(cls, vector: Vector, classes: int) -> Self:
        """The layer, or its gradient, in the flat order of weight (Y, d), then bias."""
        values = vector.astype(np.float64)
        return cls(values[:-classes].reshape(classes, -1), values[-classes:])

    def errors(self, inputs: FloatArray, labels: IntArray) -> FloatArray:
        """softmax(W h + b) - onehot(y) per sample, (n, Y)."""
        logits = inputs @ self.weight.T + self.bias
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        errors: FloatArray = shares - np.eye(len(self.bias))[labels]
        return errors


def invert_analytically(gradient: LastLayer) -> FloatArray:
    """The input behind one sample's gradient, (d,): a row of the weight's over its bias's.

    Exact for n = 1. For more it gives the mean of the inputs, weighted by their errors in the most
    telling class.
    """
    row = int(np.abs(gradient.bias).argmax())
    inputs: FloatArray = gradient.weight[row] / gradient.bias[row]
    return inputs


def invert_by_matching(
    layer: LastLayer,
    gradient: LastLayer,
    labels: IntArray,
    start: FloatArray,
    steps: int = 400,
    rate: float = 0.05,
) -> FloatArray:
    """Inputs in [0, 1] whose mean gradient is closest to the uploaded one, (n, d), by Adam.

    The slope is the derivative by the inputs of half the squared distance between the two
    gradients.
    """
    inputs, first, second, n = start.copy(), np.zeros_like(start), np.zeros_like(start), len(start)
    for step in range(1, steps + 1):
        errors = layer.errors(inputs, labels)
        weight_off = errors.T @ inputs / n - gradient.weight
        bias_off = errors.mean(axis=0) - gradient.bias
        by_error = inputs @ weight_off.T + bias_off
        shares = errors + np.eye(len(bias_off))[labels]
        by_logit = shares * (by_error - (shares * by_error).sum(axis=1, keepdims=True))
        slope = (errors @ weight_off + by_logit @ layer.weight) / n
        first = _MOMENTUM * first + (1 - _MOMENTUM) * slope
        second = _SCALE * second + (1 - _SCALE) * slope**2
        size = np.sqrt(second / (1 - _SCALE**step)) + _TINY
        inputs = np.clip(inputs - rate * first / (1 - _MOMENTUM**step) / size, 0.0, 1.0)
    return inputs


@dataclass(frozen=True, eq=False)
class MembershipAttack:
    """An attacker who holds an upload, knows its samples' labels, and has similar data."""

    uploaded: Vector
    labels: IntArray
    typical: FloatArray
    """The mean gradient of each label, (Y, P), from the attacker's own data."""
    clip: float
    """The clip of the devices, infinity for none."""

    def scores(self, candidates: PerSampleGradients, labels: IntArray) -> Scores:
        """How much better each candidate explains the upload than its absence does.

        Without it, the mean of the labels' typical gradients is expected; with it, that mean moved
        by what is particular to the candidate, over n. The score is the squared distance gained,
        over what there was to gain.
        """
        n = len(self.labels)
        lean = self.uploaded - self.typical[self.labels].mean(axis=0)
        weights = (
            clip_weights(candidates.norms(), self.clip)
            if np.isfinite(self.clip)
            else np.ones(len(labels))
        )
        along = weights * candidates.projections(lean.astype(np.float32))
        squares = (weights * candidates.norms()) ** 2
        for label, usual in enumerate(self.typical):
            own = labels == label
            along[own] -= float(lean @ usual)
            shared = weights[own] * candidates.projections(usual.astype(np.float32))[own]
            squares[own] += float(usual @ usual) - 2 * shared
        return (2 * along / n - squares / n**2) / max(float(lean @ lean), _TINY)


def advantage(members: Scores, others: Scores) -> float:
    """The chance that a member outscores another (area under the ROC curve): 0.5 is guessing."""
    wins = (members[:, None] > others[None, :]).mean() + 0.5 * (
        members[:, None] == others[None, :]
    ).mean()
    return float(wins)


def similarity(guesses: FloatArray, truths: FloatArray) -> FloatArray:
    """For each true input the correlation with the guess that is most like it, (n,)."""
    centred = [rows - rows.mean(axis=1, keepdims=True) for rows in (truths, guesses)]
    unit = [
        rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), _TINY) for rows in centred
    ]
    best: FloatArray = (unit[0] @ unit[1].T).max(axis=1)
    return best


def images() -> Batch:
    """All images in random order, pixels in [0, 1]."""
    data = FashionMnist().load(0)
    order = np.random.default_rng(0).permutation(len(data.y))
    return Batch(data.x.reshape(-1, PIXELS), data.y, np.arange(len(data.y))).take(order)


class Attack:
    """The attacker's knowledge: the model, and other images of the same kind."""

    def __init__(self, everything: Batch) -> None:
        self.public, self.private = (
            everything.take(slice(0, 5000)),
            everything.take(slice(5000, None)),
        )
        local = LocalTraining(learning_rate=0.1, epochs=5, batch_size=64)
        self.model = LEARNER.train(
            LEARNER.initial(0), TrainingJob(self.public, np.ones(len(self.public)), 0), local
        )
        self.layer = LastLayer.of(self.model, CLASSES)
        self.probe = LEARNER.probe(self.model)
        self._by_label = [self.public.take(self.public.y == y) for y in range(CLASSES)]
        self.usual_images = np.stack([batch.x.mean(axis=0) for batch in self._by_label]).astype(
            np.float64
        )

    @cache  # noqa: B019 - one attacker lives as long as the program
    def typical(self, epsilon: float | None) -> FloatArray:
        """The mean gradient of each label, clipped as on the devices."""
        return np.array(
            [upload_of(self.model, batch, epsilon) for batch in self._by_label], dtype=np.float64
        )

    def upload(self, batch: Batch, epsilon: float | None, seed: int) -> Vector:
        """What leaves a device that saw this batch, by the code that real devices run."""
        options = PrivacyOptions(epsilon=epsilon)
        report = Report(0, self.model, 1.0, 1, 1, upload_of(self.model, batch, epsilon), len(batch))
        order = TrainOrder(0, self.model, None, LocalTraining(0.1, 1))
        noise = np.random.default_rng(seed).standard_normal
        sent = (
            DPMechanism(options, PrivacyLedger(), lambda _: None, noise)
            .release(report, order)
            .local_gradient
        )
        assert sent is not None
        return sent

    def inverted(self, upload: Vector, labels: np.ndarray) -> np.ndarray:
        """The attacker's images: by formula for one sample, by gradient matching for more."""
        gradient = LastLayer.of(upload, CLASSES)
        if len(labels) == 1:
            return np.clip(invert_analytically(gradient), 0, 1)[None]
        return invert_by_matching(self.layer, gradient, labels, self.usual_images[labels])


def upload_of(model: Vector, batch: Batch, epsilon: float | None) -> Vector:
    """What a device tells of a batch before noise: clipped where there is to be any."""
    return mean_gradient(
        LEARNER.probe(model).measure(batch), PrivacyOptions().clip if epsilon else None
    )


def unscaled(upload: Vector, epsilon: float | None, n: int) -> Vector:
    """The upload at the length of its noise: before the mechanism clipped it."""
    if epsilon is None:
        return upload
    options = PrivacyOptions(epsilon=epsilon)
    noise = options.noise_multiplier() * 2 * options.clip / n * np.sqrt(len(upload))
    shortened = np.linalg.norm(upload) > 0.999 * options.clip
    return upload * np.float32(max(1.0, noise / options.clip)) if shortened else upload


def run(attack: Attack, n: int, epsilon: float | None, trials: int) -> dict[str, Any]:
    """Both attacks on `trials` devices with n samples each."""
    recovered, usual, members, others = [], [], [], []
    for trial in range(trials):
        batch, strangers = (
            attack.private.take(slice(at * n, at * n + n)) for at in (2 * trial, 2 * trial + 1)
        )
        upload = unscaled(attack.upload(batch, epsilon, trial), epsilon, n)
        if trial * n < 200:
            truth = batch.x.astype(np.float64)
            recovered.append(similarity(attack.inverted(upload, batch.y), truth))
            usual.append(similarity(attack.usual_images[batch.y], truth))
        clip = np.inf if epsilon is None else PrivacyOptions().clip
        membership = MembershipAttack(upload, batch.y, attack.typical(epsilon), clip)
        members.append(membership.scores(attack.probe.measure(batch), batch.y))
        others.append(membership.scores(attack.probe.measure(strangers), strangers.y))
    found = np.concatenate(recovered)
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
            best = (
                centred
                @ (batch.x[0] - batch.x[0].mean())
                / (np.linalg.norm(centred, axis=1) + 1e-9)
            ).argmax()
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
        for axes, key in ((left, "likeness"), (right, "membership")):
            axes.plot(
                [r["n"] for r in own], [r[key] for r in own], "o-", ms=4, color=colour, label=name
            )
    base = [(r["n"], r["likeness_of_usual_images"]) for r in runs if r["epsilon"] is None]
    left.plot(*zip(*base, strict=True), "k:", label="mean image of the label")
    right.axhline(0.5, color="k", ls=":", label="guessing")
    left.set(
        xscale="log",
        xlabel="samples in the estimator",
        ylabel="correlation with the true image",
        ylim=(0, 1.03),
    )
    right.set(
        xscale="log",
        xlabel="samples in the estimator",
        ylabel="membership: area under ROC",
        ylim=(0.45, 1.03),
    )
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
    parser.add_argument(
        "--json", type=Path, default=Path(__file__).parent / "privacy" / "attacks.json"
    )
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
