"""What a gist reveals: a local one nothing, a shared one at most its bound, of every sample."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkeep.agent.assembly import parse_config
from fedkeep.config.experiment import resolve
from fedkeep.config.method import parse_fleet
from fedkeep.core.device import Device
from fedkeep.core.errors import ConfigError
from fedkeep.core.gist import GistOptions
from fedkeep.core.participation import Participation
from fedkeep.core.policies.balanced_reservoir import BalancedReservoir
from fedkeep.core.types import Batch, FloatArray, LocalTraining, Report, TrainOrder
from fedkeep.learn.dense_learner import DenseLearner
from fedkeep.privacy.accountant import BudgetSpentError, PrivacyLedger
from fedkeep.privacy.gaussian import epsilon_spent
from fedkeep.privacy.mechanism import DPMechanism
from fedkeep.privacy.options import PrivacyOptions

pytest.importorskip("dp_accounting", reason="needs the privacy extra")

LEARNER = DenseLearner((3, 2))
CLIP = 0.25


def device(name: str, clip: float | None = CLIP) -> Device:
    gist = GistOptions(name)  # type: ignore[arg-type]
    made = Device(
        LEARNER,
        BalancedReservoir(),
        capacity=4,
        sample_shape=(3,),
        labels=2,
        gist=gist,
        clip=clip,
        seed=3,
    )
    made.set_model(LEARNER.initial(0))
    return made


def world(seed: int, scale: float = 1.0) -> Batch:
    rng = np.random.default_rng(seed)
    x = scale * rng.standard_normal((20, 3))
    return Batch(x.astype(np.float32), rng.integers(0, 2, 20), 1000 * seed + np.arange(20))


def order(round_: int) -> TrainOrder:
    model = LEARNER.initial(0) + np.float32(0.01 * round_) * LEARNER.initial(1)
    return TrainOrder(
        round_, model, None, LocalTraining(0.1, 1), accepted_round=round_ - 1 if round_ else None
    )


def reported(played: Device, streams: list[Batch]) -> list[FloatArray]:
    """What a device tells of these streams, one a round."""
    gists = []
    for round_, batch in enumerate(streams):
        played.observe(batch, float(round_))
        gradient = played.participate(order(round_)).local_gradient
        assert gradient is not None
        gists.append(gradient.astype(np.float64))
    return gists


# -- why a shared gist is refused for single samples -----------------------------------------


def test_one_sample_is_in_the_gist_of_many_reports() -> None:
    streams = [world(1), world(2), world(3)]
    other = Batch(streams[0].x.copy(), streams[0].y, streams[0].ids)
    other.x[0] = 5.0
    pairs = zip(
        reported(device("shared", None), streams),
        reported(device("shared", None), [other, *streams[1:]]),
        strict=True,
    )
    moved = [float(np.linalg.norm(one - two)) for one, two in pairs]
    assert min(moved) > 1e-3, moved


@pytest.mark.parametrize("tables", [{}, {"gist": {"mode": "shared"}, "policy": {"name": "ode"}}])
def test_noise_for_a_sample_is_refused_with_a_shared_gist(tables: dict[str, Any]) -> None:
    experiment = {"task": {"name": "demo"}, "privacy": {"epsilon": 8.0}, **tables}
    fleet = {
        "samples": {"shape": [3], "labels": 2},
        "model": {"name": "softmax"},
        "privacy": {"epsilon": 8.0},
        **tables,
    }
    with pytest.raises(ConfigError, match=r"privacy\.unit = 'device'"):
        resolve(experiment)
    with pytest.raises(ConfigError, match=r"privacy\.unit = 'device'"):
        parse_fleet(fleet)
    with pytest.raises(ConfigError, match=r"privacy\.unit = 'device'"):
        parse_config({**fleet, "gist": {"mode": "shared"}})


@pytest.mark.parametrize(
    "tables",
    [
        {"privacy": {"epsilon": 8.0, "unit": "device"}},
        {"privacy": {"epsilon": 8.0}, "gist": {"mode": "local"}},
        {"privacy": {"epsilon": 8.0}, "gist": {"mode": "none"}},
        {"privacy": {"epsilon": 8.0, "protect": ["model"]}},
        {"privacy": {"epsilon": 8.0}, "policy": {"name": "ode"}},
    ],
)
def test_what_has_a_bound_is_not_refused(tables: dict[str, Any]) -> None:
    assert resolve({"task": {"name": "demo"}, **tables}).privacy.epsilon == 8.0


# -- the bound, and what it costs ------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 50), st.integers(51, 99), st.sampled_from([1e-3, 1.0, 30.0, 1e6]))
def test_no_two_devices_tell_gists_further_apart_than_twice_the_clip(
    one: int, other: int, scale: float
) -> None:
    first = reported(device("shared"), [world(one), world(one + 100)])
    second = reported(device("shared"), [world(other, scale), world(other + 100, scale)])
    for mine, yours in zip(first, second, strict=True):
        assert np.linalg.norm(mine - yours) <= 2 * CLIP * (1 + 1e-5)


def reports(rounds: int, name: str = "shared") -> list[tuple[Report, TrainOrder]]:
    played, found = device(name), []
    for round_ in range(rounds):
        played.observe(world(round_), float(round_))
        found.append((played.participate(order(round_)), order(round_)))
    return found


def test_the_noise_is_made_for_the_whole_device_and_every_report_composes() -> None:
    options = PrivacyOptions(epsilon=4.0, unit="device", clip=CLIP, planned_participations=3)
    drawn: list[int] = []

    def recorded(size: int) -> FloatArray:
        drawn.append(size)
        return np.full(size, 1e-6)

    mechanism = DPMechanism(options, PrivacyLedger(), lambda _: None, recorded)
    multiplier = options.noise_multiplier()
    sent = []
    for number, (report, asked) in enumerate(reports(4), start=1):
        sent.append(mechanism.release(report, asked))
        paid = min(number, 3)
        assert mechanism.spending().device_epsilon == pytest.approx(
            epsilon_spent(paid / multiplier**2, options.delta)
        )
    assert mechanism.spending().device_epsilon == pytest.approx(4.0, rel=1e-6)
    assert [s.local_gradient is None for s in sent] == [False, False, False, True]
    assert drawn == [LEARNER.size] * 3
    first = reports(1)[0][0].local_gradient
    assert first is not None
    noisy = first.astype(np.float64) + 1e-6 * multiplier * 2 * CLIP
    expected = noisy * min(1.0, CLIP / float(np.linalg.norm(noisy)))
    np.testing.assert_allclose(sent[0].local_gradient, expected, atol=1e-8)


def test_a_device_that_must_stay_away_sends_nothing_once_its_gists_are_paid_for() -> None:
    options = PrivacyOptions(
        epsilon=4.0, unit="device", clip=CLIP, planned_participations=1, on_exhausted="absent"
    )
    mechanism = DPMechanism(options, PrivacyLedger(), lambda _: None)
    (first, asked), (second, asked_again) = reports(2)
    mechanism.release(first, asked)
    with pytest.raises(BudgetSpentError):
        mechanism.release(second, asked_again)


def test_a_gist_that_was_not_clipped_does_not_pass() -> None:
    options = PrivacyOptions(epsilon=4.0, unit="device", clip=1e-4)
    (report, asked), *_ = reports(1)
    with pytest.raises(Exception, match="unclipped"):
        DPMechanism(options, PrivacyLedger(), lambda _: None).release(report, asked)


# -- the local one ---------------------------------------------------------------------------


def test_a_local_gist_costs_no_budget_and_leaves_every_field_but_the_model_as_it_was() -> None:
    mechanism = DPMechanism(PrivacyOptions(epsilon=4.0), PrivacyLedger(), lambda _: None)
    for (corrected, asked), (plain, _) in zip(reports(3, "local"), reports(3, "none"), strict=True):
        sent = mechanism.release(corrected, asked)
        same = [f.name for f in fields(Report) if f.name != "model"]
        assert [getattr(sent, name) for name in same] == [getattr(plain, name) for name in same]
        assert sent.model.nbytes == plain.model.nbytes
        assert not np.array_equal(sent.model, plain.model)
    assert mechanism.spending().device_epsilon == 0.0


# -- erasing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["local", "shared"])
def test_a_device_that_forgets_its_stream_has_no_sum_left_that_a_sample_could_be_in(
    name: str,
) -> None:
    played = device(name)
    for round_ in range(3):
        played.observe(world(round_), float(round_))
        played.participate(order(round_))
    played.observe(world(9), 9.0)
    played.reset_statistics()
    state = played.snapshot()
    assert not any(part.startswith("gist.packed") for part in state)
    assert not np.any(state["window.sum"])
    participation = Participation(played, order(3))
    job = participation.prepare()
    assert job.correction is None
    assert len(job.batch) == 4
    assert participation.finish(order(3).model).local_gradient is None
