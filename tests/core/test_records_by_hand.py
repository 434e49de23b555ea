"""What the core remembers of devices and gradients, computed by hand."""

from fractions import Fraction

import numpy as np
import pytest

from fedkeep.core.claims import ClaimAudit
from fedkeep.core.device import Device, DeviceOptions
from fedkeep.core.errors import MissingExtraError, optional_import, where
from fedkeep.core.gist import Gist, GistOptions, NoiseModel, StoreSummary, pooled_mean
from fedkeep.core.gradient_exchange import GistSender, LocalGradients, SharedGist
from fedkeep.core.gradients import GradientAccumulator
from fedkeep.core.gradients.codec import pack, unpack
from fedkeep.core.gradients.fleet import Estimate, IncrementalEstimator, global_estimator
from fedkeep.core.gradients.layout import whole_layout
from fedkeep.core.gradients.local import LocalGradientEstimator
from fedkeep.core.policies.sld import Sld
from fedkeep.core.regions import LabelRegions
from fedkeep.core.state import drop_learned
from fedkeep.core.types import Report, Vector
from fedkeep.core.weighting import Weighting
from fedkeep.learn.dense_learner import DenseLearner

MODEL: Vector = np.zeros(1, dtype=np.float32)
GRADIENT: Vector = np.ones(1, dtype=np.float32)


def report(round_: int, samples: int, arrivals: int = 10) -> Report:
    return Report(round_, MODEL, 1.0, 1, samples, GRADIENT, arrivals)


# Claims


def test_a_record_counts_fill_and_arrivals_since_the_first_report() -> None:
    audit = ClaimAudit()
    audit.observe(3, report(0, samples=8), slots=4, rate=10.0)
    # The first report says when the device began to count, not how many came.
    assert audit.snapshot()["records"].tolist() == [[3, 1, 1.0, 10.0, 0.0, 0.0, 0]]
    audit.observe(3, report(2, samples=2), slots=4, rate=10.0)
    audit.observe(3, report(3, samples=2), slots=0, rate=10.0)
    (_, reports, fill, _, arrivals, declared, last), *_ = audit.snapshot()["records"].tolist()
    assert (reports, last) == (3, 3)
    assert fill == pytest.approx(0.7 * (0.7 * 1.0 + 0.3 * 0.5) + 0.3 * 1.0)
    assert arrivals == pytest.approx(0.8 * 10 + 10)
    assert declared == pytest.approx(0.8 * 10.0 * 2 + 10.0)


def audit_of(reports: int, rate: float, arrivals: int, samples: int) -> ClaimAudit:
    """Six devices that count ten arrivals a round and fill their stores; a seventh that differs."""
    audit = ClaimAudit()
    for round_ in range(reports):
        for device in range(6):
            audit.observe(device, report(round_, 4), slots=4, rate=rate)
        audit.observe(6, report(round_, samples, arrivals), slots=4, rate=rate)
    return audit


def test_an_empty_store_is_noticed_after_five_reports() -> None:
    assert audit_of(4, rate=10.0, arrivals=10, samples=0).review(4) == {}
    assert audit_of(5, rate=10.0, arrivals=10, samples=0).review(5) == {6: 0.0}


@pytest.mark.parametrize("rate", [0.1, 10.0])
def test_arrivals_far_below_the_declared_count_by_their_share_in_any_unit(rate: float) -> None:
    found = audit_of(5, rate, arrivals=1, samples=4).review(5)
    assert found == {6: pytest.approx(0.1)}
    assert audit_of(5, rate, arrivals=2, samples=4).review(5) == {}


# Gradients


def accumulated(*gradients: float) -> GradientAccumulator:
    made = GradientAccumulator(1, 1)
    for gradient in gradients:
        seen = made.snapshot()
        made.restore({"sum": seen["sum"] + gradient, "counts": seen["counts"] + 1})
    return made


def test_a_pending_estimate_gives_way_to_one_over_as_many_arrivals() -> None:
    estimator = LocalGradientEstimator(1)
    assert estimator.freeze(accumulated(), 0) == (None, 0)
    estimator.freeze(accumulated(2.0), 4)
    assert estimator.pending == (pytest.approx([2.0]), 1)
    estimator.freeze(accumulated(6.0), 5)
    assert estimator.pending == (pytest.approx([6.0]), 1)
    estimator.freeze(accumulated(), 6)
    assert estimator.pending == (pytest.approx([6.0]), 1)
    estimator.settle(None)
    estimator.settle(5)
    assert estimator.pending[1] == 1  # the report of round 6 has it, too
    estimator.settle(6)
    assert estimator.pending == (None, 0)


def test_an_estimator_that_has_sent_nothing_has_nothing_to_lose() -> None:
    estimator, restored = LocalGradientEstimator(1), LocalGradientEstimator(1)
    assert estimator.snapshot()["counts"].tolist() == [0, -1]
    estimator.freeze(accumulated(2.0), 0)
    restored.restore(estimator.snapshot())
    restored.settle(-1)
    assert restored.pending == (pytest.approx([2.0]), 1)


def estimate(gradient: float, round_: int = 0, weight: float = 1.0) -> Estimate:
    return Estimate(np.array([gradient], dtype=np.float32), weight, round_)


def test_an_estimate_counts_for_its_rounds_and_leaves_with_its_device() -> None:
    estimator = IncrementalEstimator(max_age=2)
    assert estimator.global_gradient() is None
    assert estimator.staleness(3) is None
    estimator.update({device: estimate(float(device)) for device in range(20)})
    assert estimator.global_gradient() == pytest.approx([9.5])
    estimator.forget(19)
    assert estimator.global_gradient() == pytest.approx([9.0])
    estimator.update({19: estimate(38.0, 1)})  # takes the free slot
    assert estimator.snapshot()["free"].tolist() == []
    assert estimator.global_gradient() == pytest.approx([(9 * 19 + 38) / 20])
    estimator.update({19: estimate(5.0, 2)})
    assert estimator.staleness(2) == pytest.approx(19 * 2 / 20)
    estimator.update({19: estimate(5.0, 3)})
    assert estimator.global_gradient() == pytest.approx([5.0])
    assert sorted(estimator.snapshot()["free"].tolist()) == list(range(19))


def test_an_old_estimate_does_not_set_the_clock_back() -> None:
    estimator = IncrementalEstimator(max_age=2)
    estimator.update({0: estimate(1.0, 5), 1: estimate(3.0, 2)})
    assert estimator.global_gradient() == pytest.approx([1.0])
    restored = IncrementalEstimator(max_age=2)
    restored.restore(estimator.snapshot())
    restored.update({1: estimate(3.0, 2)})
    assert restored.global_gradient() == pytest.approx([1.0])


def test_eq_8_goes_by_its_name_with_its_greatest_age() -> None:
    incremental = global_estimator("incremental", 3)
    assert isinstance(incremental, IncrementalEstimator)
    assert incremental.max_age == 3
    assert not isinstance(global_estimator("round-mean"), IncrementalEstimator)


# The gist


def summary(weights: list[float], fresh: list[bool]) -> StoreSummary:
    regions = np.zeros(len(weights), dtype=np.int64)
    return StoreSummary(np.array(weights) / sum(weights), regions, np.array(fresh))


@pytest.mark.parametrize(("fresh", "count"), [(1, 4), (2, 1), (0, 3)])
def test_the_variance_of_the_pooled_mean_is_that_of_its_coefficients(
    fresh: int, count: int
) -> None:
    # Two samples stand in m with 1/10 each, the rest of m has a variance of 3/100: ess 20.
    past = NoiseModel(np.ones(1), np.array([0.1]), np.array([2.0]), 0.03)
    found = pooled_mean(past, summary([1.0] * (2 + fresh), [False] * 2 + [True] * fresh), count)
    alpha, arrival = Fraction(20, 20 + count), Fraction(1, 20 + count)
    assert found.past_weight == pytest.approx(float(alpha))
    new = min(fresh, count)
    stored = [alpha / 10] * 2 + [arrival] * new + [Fraction(0)] * (fresh - new)
    shared = sum(stored, Fraction(0)) / len(stored)
    residual = alpha**2 * Fraction(3, 100) + (count - new) * arrival**2
    residual += sum(((coefficient - shared) ** 2 for coefficient in stored), Fraction(0))
    model = found.noise_model
    assert model.sample_coefficients.tolist() == pytest.approx([float(shared)])
    assert model.counts.tolist() == [2.0 + fresh]
    assert model.residual_variance == pytest.approx(float(residual))


def test_a_gist_that_is_restored_from_nothing_knows_nothing() -> None:
    gist = Gist(GistOptions(mode="local"), whole_layout(2), 1, seed=0, unbiased=True)
    whole = {
        "changes": np.array(4),
        "by_region": np.ones((3, 1)),
        "rest": np.array(0.5),
        "packed": np.array([1.0, 2.0], dtype=np.float32),
        "scales": np.empty(0, dtype=np.float32),
    }
    gist.restore(whole)
    assert gist.vector() == pytest.approx([1.0, 2.0])
    gist.restore({"changes": np.array(4)})
    assert gist.vector() is None
    assert gist.ess == 0
    assert set(gist.snapshot()) == {"changes"}


def test_int8_numbers_share_a_scale_by_sixty_four() -> None:
    vector = np.zeros(65, dtype=np.float32)
    vector[0], vector[63], vector[64] = 127.0, 0.5, 254.0
    packed = pack(vector, "int8", seed=0)
    assert packed["scales"].tolist() == [1.0, 2.0]
    assert unpack(packed, 65)[[0, 64]].tolist() == [127.0, 254.0]
    assert unpack(packed, 65)[63] in (0.0, 1.0)
    halves = pack(vector, "float16", seed=0)
    assert halves["scales"].tolist() == [127.0, 254.0]
    assert unpack(halves, 65)[[0, 64]].tolist() == [127.0, 254.0]


@pytest.mark.parametrize("name", ["max_ess", "last_layers"])
def test_a_gist_needs_at_least_one(name: str) -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        GistOptions(**{name: 0})
    assert getattr(GistOptions(**{name: 1}), name) == 1


def test_no_gist_is_no_message() -> None:
    assert GistSender(None).message(None) == (None, 0)
    empty = Gist(GistOptions(mode="shared"), whole_layout(2), 1, seed=0, unbiased=True)
    assert GistSender(1.0).message(empty) == (None, 0)


def test_only_a_shared_gist_turns_the_steps_of_devices() -> None:
    assert not LocalGradients().corrects_drift
    assert SharedGist().corrects_drift


# The device's state


def test_what_was_learned_under_a_model_goes_with_it_and_counts_stay() -> None:
    learner, labels = DenseLearner((3, 2)), LabelRegions(2)
    device = Device(
        learner, Sld(), capacity=4, sample_shape=(3,), labels=2, regions=labels,
        weighting=Weighting(client_label=1.0), gist=GistOptions(mode="shared"), seed=0,
    )  # fmt: skip
    learned = {name for name, spec in device.state_spec().items() if spec.learned}
    assert {"memory.*", "model", "direction"} < learned
    assert {"window.sum", "window.counts"} < learned
    assert {"gist.by_region", "gist.rest", "gist.packed", "gist.scales"} < learned
    assert not learned & {"counters", "gist.changes", "shares.counts", "assignment.quotas"}
    left = drop_learned(device.snapshot(), device.state_spec())
    assert "counters" in left
    assert not any(name.startswith("window.") for name in left)


def test_scores_are_renewed_unless_somebody_says_otherwise() -> None:
    assert DeviceOptions().rescore


# Errors


def failing() -> None:
    raise ValueError("a  message\nof two lines")


def test_an_error_of_custom_code_names_its_innermost_line() -> None:
    with pytest.raises(ValueError, match="two lines") as found:
        failing()
    line = failing.__code__.co_firstlineno + 1
    assert where(found.value) == f"ValueError: a message of two lines ({__file__}, line {line})"
    assert where(ValueError("never raised")) == "ValueError: never raised"


def test_a_missing_library_names_the_extra_that_brings_it() -> None:
    with (
        pytest.raises(MissingExtraError, match=r"a plot needs the 'plot' extra: pip install"),
        optional_import("a plot", "plot"),
    ):
        raise ImportError("no such module")
    with optional_import("a plot", "plot"):
        pass
