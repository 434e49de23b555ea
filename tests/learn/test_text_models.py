"""The models for text satisfy the invariants of learners, and learn."""

import numpy as np
import pytest

from fedkeep.core.protocols import TrainingJob
from fedkeep.core.types import Batch, LocalTraining
from fedkeep.learn.models import learner_for
from fedkeep.testing import check_learner

pytest.importorskip("torch")
SYMBOLS, LENGTH = 6, 5


def contexts(n: int) -> Batch:
    """The label is the second character: a bag of characters does not tell it."""
    x = np.random.default_rng(0).integers(0, SYMBOLS, (n, LENGTH))
    return Batch(x.astype(np.float32), x[:, 1].astype(np.int64), np.arange(n))


@pytest.mark.parametrize("name", ["char-mlp", "char-gru", "char-transformer"])
def test_it_satisfies_the_invariants_of_learners_and_uses_positions(name: str) -> None:
    length = {} if name == "char-gru" else {"length": LENGTH}
    learner = learner_for(name, (LENGTH,), SYMBOLS, **length)
    assert "one-by-one" in check_learner(learner, contexts(12))
    batch = contexts(200)
    job = TrainingJob(batch, np.ones(200), seed=0)
    model = learner.train(learner.initial(0), job, LocalTraining(0.5, epochs=300))
    assert (learner.logits(model, batch.x).argmax(axis=1) == batch.y).mean() > 0.9
