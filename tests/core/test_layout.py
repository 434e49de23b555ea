"""Gradient layouts: sketches are linear, agree with whole arithmetic, and give low ranks back."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkeep.core.gradients.layout import (
    GradientLayout,
    KnownGradient,
    SketchedBlock,
    WholeBlock,
    sketched_layout,
    whole_layout,
)
from fedkeep.core.types import Batch
from fedkeep.learn.models import learner_for

SHAPES = [(60, 40), (60,), (20, 60), (20,), (7, 20), (7,)]
PARAMETERS = sum(int(np.prod(shape)) for shape in SHAPES)


def gradient(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(PARAMETERS).astype(np.float32)


def test_a_sketch_by_hand() -> None:
    block = SketchedBlock((3, 2), rank=1, number=0)
    matrix = np.array([[1, 2], [3, 4], [5, 6]], dtype=np.float32)
    y, z = block.products(block.of_gradient(matrix.ravel()))
    signs = block.omega.ravel()
    assert y.ravel().tolist() == [row @ signs for row in matrix]
    assert z.tolist() == [(row[:, None] * matrix).sum(axis=0).tolist() for row in block.psi]
    assert set(np.unique(block.psi)) <= {-1.0, 1.0}


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(0, 99), st.floats(-3, 3), st.floats(-3, 3))
def test_sketches_are_linear(rank: int, seed: int, left: float, right: float) -> None:
    layout = sketched_layout(SHAPES, rank)
    one, other = gradient(seed), gradient(seed + 1)
    mixed = np.float32(left) * one + np.float32(right) * other
    expected = np.float32(left) * layout.of_gradient(one) + np.float32(right) * layout.of_gradient(
        other
    )
    assert np.allclose(layout.of_gradient(mixed), expected, atol=1e-3)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(0, 99))
def test_what_has_the_rank_comes_back(rank: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for shape in [(60, 40), (40, 60)]:
        block = SketchedBlock(shape, rank, number=0)
        matrix = rng.standard_normal((shape[0], rank)) @ rng.standard_normal((rank, shape[1]))
        found = block.reconstruct(block.of_gradient(matrix.ravel().astype(np.float32)))
        # Shortened at most to what Z estimates, and otherwise the same.
        direction = found @ matrix.ravel() / np.linalg.norm(found) / np.linalg.norm(matrix)
        assert direction == pytest.approx(1, abs=1e-4)
        assert np.linalg.norm(found) <= np.linalg.norm(matrix) * 1.001


def test_a_full_rank_gives_everything_back() -> None:
    block = SketchedBlock((60, 40), rank=40, number=0)
    matrix = gradient(3)[:2400]
    assert np.allclose(block.reconstruct(block.of_gradient(matrix)), matrix, atol=1e-4)


def test_a_weight_that_would_not_get_smaller_stays_whole() -> None:
    layout = sketched_layout(SHAPES, rank=8)
    kinds = [type(block) for block in layout.blocks]
    assert kinds[0] is SketchedBlock
    assert all(kind is WholeBlock for kind in kinds[1::2])
    assert kinds[4] is WholeBlock  # 7 x 20: 8 * 20 + 17 * 7 > 140
    last = layout.of_gradient(gradient(0))[-7:]
    assert last.tolist() == gradient(0)[-7:].tolist()


def test_ranks_nest() -> None:
    matrix = gradient(1)[:2400]
    low, high = (SketchedBlock((60, 40), rank, number=5) for rank in (3, 9))
    (y, z), (more_y, more_z) = (block.products(block.of_gradient(matrix)) for block in (low, high))
    assert np.allclose(y, more_y[:, :3])
    assert np.allclose(z, more_z[:7])


def test_products_that_contradict_each_other_are_seen() -> None:
    layout = sketched_layout(SHAPES, rank=4)
    numbers = layout.of_gradient(gradient(2))
    assert layout.disagreement(numbers) < 1e-5
    forged = numbers.copy()
    forged[:100] *= -1
    assert layout.disagreement(forged) > 0.1
    assert whole_layout(PARAMETERS).disagreement(gradient(0)) == 0


@pytest.mark.parametrize(
    ("model", "shape", "options"),
    [
        ("mlp", (40,), {"hidden": [60]}),
        ("mlp", (90,), {"hidden": [50, 30]}),
        ("lenet", (1, 28, 28), {}),
        ("traffic-cnn", (3, 64), {}),
    ],
)
@pytest.mark.parametrize("rank", [2, 5])
def test_every_backend_sketches_as_if_it_had_made_the_gradient(
    model: str, shape: tuple[int, ...], options: dict[str, list[int]], rank: int
) -> None:
    learner = learner_for(model, shape, 6, **options)
    rng = np.random.default_rng(0)
    batches = [
        Batch(
            rng.standard_normal((n, *shape), dtype=np.float32), rng.integers(0, 6, n), np.arange(n)
        )
        for n in (5, 3)
    ]
    models = [learner.initial(0), learner.initial(1)]
    layout = sketched_layout(learner.gradient_shapes(None), rank)
    assert layout.parameters == learner.gradient_size
    assert not layout.whole
    for batch, measured in zip(batches, learner.measure_many(models, batches), strict=True):
        weights = rng.random(len(batch))
        expected = layout.of_gradient(measured.weighted_gradient(weights))
        found = measured.sketched_gradient(layout, weights)
        assert np.allclose(found, expected, rtol=1e-3, atol=1e-5 * np.abs(expected).max())
        last = sketched_layout(learner.gradient_shapes(1), rank)
        of_last = measured.sketched_gradient(last, weights)
        expected = last.of_gradient(measured.weighted_gradient(weights))
        assert np.allclose(of_last, expected, rtol=1e-3, atol=1e-5 * np.abs(expected).max())
    single: GradientLayout = layout
    probe = learner.probe(models[0]).measure(batches[0])
    whole = probe.weighted_gradient(np.ones(5))
    expected = single.of_gradient(whole)
    found = probe.sketched_gradient(single, np.ones(5))
    assert np.allclose(found, expected, rtol=1e-3, atol=1e-5 * np.abs(expected).max())


def test_nothing_gives_nothing_and_infinity_gives_no_correction() -> None:
    block = SketchedBlock((60, 40), 4, number=0)
    nothing = np.zeros(block.size, dtype=np.float32)
    assert not block.reconstruct(nothing).any()
    endless = nothing.copy()
    endless[0] = np.inf
    with np.errstate(invalid="ignore"):
        assert not np.isfinite(block.reconstruct(endless)).all()


def test_known_gradients_that_are_almost_the_same_do_no_harm() -> None:
    layout = sketched_layout(SHAPES, rank=4)
    one, wanted = gradient(0), gradient(1)
    other = one + np.float32(1e-6) * gradient(2)
    known = [KnownGradient(g, layout.of_gradient(g)) for g in (one, other)]
    mixed = 3 * one + np.float32(0.01) * wanted
    found = layout.reconstruct_near(layout.of_gradient(mixed), known)
    assert np.linalg.norm(found - mixed) < 0.02 * np.linalg.norm(mixed)
    assert np.linalg.norm(
        layout.reconstruct(layout.of_gradient(mixed)) - mixed
    ) > 10 * np.linalg.norm(found - mixed)


def norm_of_difference(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize(
    ("model", "shape", "samples"),
    [
        ("mlp", (90,), 7),  # numpy
        ("lenet", (1, 28, 28), 5),  # a chain of layers in one pass
        ("lenet", (1, 28, 28), 40),  # one model, hooks
        ("traffic-cnn", (3, 64), 300),  # in pieces
        ("char-mlp", (16,), 6),  # embedding: autograd
        ("char-gru", (16,), 4),  # recurrent
        ("char-transformer", (16,), 4),  # attention, normalisation
    ],
)
def test_thin_products_are_exact_in_every_backend(
    model: str, shape: tuple[int, ...], samples: int
) -> None:
    pytest.importorskip("torch")
    classes = 36 if model.startswith("char") else 6
    learner = learner_for(model, shape, classes)
    rng = np.random.default_rng(1)
    x = rng.integers(0, 36, (samples, *shape)) if classes == 36 else rng.random((samples, *shape))
    batch = Batch(x.astype(np.float32), rng.integers(0, classes, samples), np.arange(samples))
    layout = sketched_layout(learner.gradient_shapes(None), rank=2)
    assert not layout.whole
    measured = learner.probe(learner.initial(0)).measure(batch)
    weights = rng.random(samples)
    expected = layout.of_gradient(measured.weighted_gradient(weights))
    assert norm_of_difference(measured.sketched_gradient(layout, weights), expected) <= 1e-5
