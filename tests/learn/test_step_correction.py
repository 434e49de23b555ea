"""A correction in a user's own loop: once per step, in the loop's units, and never harmful."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedkeep.core.errors import ConfigError
from fedkeep.core.types import Vector
from fedkeep.learn.backends import Layout
from fedkeep.learn.step_correction import Progress, StepCorrection, UnitEvidence

torch.manual_seed(0)
X, Y = torch.randn(8, 5), torch.arange(8) % 3


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(5, 3)


def layout_of(module: nn.Module) -> Layout:
    named = dict(module.named_parameters())
    return Layout(tuple(named), tuple(tuple(p.shape) for p in named.values()))


def gradient_of(module: nn.Module, x: torch.Tensor = X, y: torch.Tensor = Y) -> Vector:
    parts = torch.autograd.grad(cross_entropy(module(x), y), list(module.parameters()))
    return torch.cat([part.ravel() for part in parts]).numpy()


def flat(module: nn.Module) -> Vector:
    return torch.cat([p.detach().ravel() for p in module.parameters()]).numpy().copy()


def corrected(
    module: nn.Module,
    correction: Vector,
    slopes: list[float] | None = None,
    losses: list[float] | None = None,
    evidence: UnitEvidence = UnitEvidence(),
) -> StepCorrection:
    """A correction whose looks find these slopes and losses, in turn."""
    found = iter(zip(slopes or [1.0] * 9, losses or [0.0] * 9, strict=False))
    gradient = gradient_of(module)
    return StepCorrection(
        layout_of(module),
        correction,
        lambda _: Progress(*next(found)),
        gradient,
        variance=0.0,
        loss=1.0,
        evidence=evidence,
    )


def opposing(module: nn.Module, share: float = 0.25) -> Vector:
    """A correction that shortens the step: the cap on its length plays no part."""
    return np.asarray(-share * gradient_of(module), dtype=np.float32)


def moved(module: nn.Module, before: Vector, rate: float) -> Vector:
    return np.asarray((before - flat(module)) / rate, dtype=np.float32)


def test_a_step_is_corrected_once_however_often_the_loop_asks_and_accumulates() -> None:
    module, before = net(), flat(net())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    own = gradient_of(module)
    steps = corrected(module, opposing(module))
    for x, y in zip(torch.split(X, 2), torch.split(Y, 2), strict=True):
        torch.autograd.backward(cross_entropy(module(x), y) / 4)
        steps.attach(module, optimizer)
    optimizer.step()
    np.testing.assert_allclose(moved(module, before, 0.5), 0.75 * own, atol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_changes_nothing(fused: bool) -> None:
    module, before = net(), flat(net())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)  # type: ignore[attr-defined]
    own = gradient_of(module)
    steps = corrected(module, opposing(module))
    steps.attach(module, optimizer)
    torch.autograd.backward(scaler.scale(cross_entropy(module(X), Y)))
    scaler.step(optimizer)
    np.testing.assert_allclose(moved(module, before, 0.5), 0.75 * own, atol=1e-6)
    assert steps.evidence.unit == 1.0


def test_a_step_is_never_longer_than_without() -> None:
    module, before = net(), flat(net())
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    own = gradient_of(module)
    correction = np.random.default_rng(0).normal(size=len(own)).astype(np.float32)
    corrected(module, correction).attach(module, optimizer)
    torch.autograd.backward(cross_entropy(module(X), Y))
    optimizer.step()
    step = moved(module, before, 1.0)
    assert np.linalg.norm(step) == pytest.approx(np.linalg.norm(own), rel=1e-4)
    toward = own + correction
    cosine = step @ toward / np.linalg.norm(step) / np.linalg.norm(toward)
    assert cosine == pytest.approx(1.0, abs=1e-5)


def test_it_fades_from_look_to_look_as_the_errors_have_faded() -> None:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    own, opposed = gradient_of(module), opposing(module)
    corrected(module, opposed, slopes=[0.5, 0.16, 0.0]).attach(module, optimizer)
    strengths = []
    for _ in range(6):
        optimizer.zero_grad()
        torch.autograd.backward(cross_entropy(module(X), Y))
        optimizer.step()
        parts = [p.grad.ravel() for p in module.parameters() if p.grad is not None]
        added = torch.cat(parts).numpy() - own
        strengths.append(float(added @ opposed / (opposed @ opposed)))
    # Looks come before steps 2, 3 and 5; between them it goes on fading at the same rate.
    expected = [1.0, 0.5, 0.16, 0.16**1.5, 0.0, 0.0]
    np.testing.assert_allclose(strengths, expected, atol=1e-5)


def test_a_rise_of_the_stored_samples_loss_ends_it() -> None:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    own = gradient_of(module)
    steps = corrected(module, opposing(module), losses=[1.01, 1.03])
    steps.attach(module, optimizer)
    for number in range(3):
        optimizer.zero_grad()
        torch.autograd.backward(cross_entropy(module(X), Y))
        optimizer.step()
        assert steps.rose == (number == 2)
    parts = [p.grad.ravel() for p in module.parameters() if p.grad is not None]
    np.testing.assert_allclose(torch.cat(parts).numpy(), own, atol=1e-7)
    assert "loss rose from 1 to 1.03 within 2 steps" in str(steps.stopped)


@pytest.mark.parametrize("multiple", [0.1, 16.0])
def test_the_unit_of_the_loops_gradients_is_found(multiple: float) -> None:
    module, before = net(), flat(net())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    own = gradient_of(module)
    corrected(module, opposing(module)).attach(module, optimizer)
    torch.autograd.backward(multiple * cross_entropy(module(X), Y))
    optimizer.step()
    np.testing.assert_allclose(
        moved(module, before, 0.5), 0.75 * multiple * own, rtol=1e-3, atol=1e-5 * multiple
    )


def test_a_mini_batch_is_no_evidence_of_another_unit() -> None:
    rng = np.random.default_rng(0)
    evidence = UnitEvidence()
    for _ in range(50):
        evidence = evidence.with_step(float(rng.normal(1.0, 2.0)), 1.0, variance=4.0)
        assert evidence.unit == 1.0


def test_a_layer_that_mixes_samples_switches_it_off_while_it_trains(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    module.eval()
    steps = corrected(module, opposing(module))
    module.train()
    steps.attach(module, optimizer)
    before, own = flat(module), gradient_of(module)
    torch.autograd.backward(cross_entropy(module(X), Y))
    optimizer.step()
    assert "layer '1' mixes the samples of a batch while it trains" in caplog.text
    np.testing.assert_allclose(moved(module, before, 1.0), own, atol=1e-6)


def test_momentum_and_adam_see_the_corrected_gradient() -> None:
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=0.1),
    ):
        module, plain = net(), net()
        optimizer, reference = make(module.parameters()), make(plain.parameters())
        corrected(module, opposing(module)).attach(module, optimizer)
        torch.autograd.backward(cross_entropy(module(X), Y))
        optimizer.step()
        torch.autograd.backward(0.75 * cross_entropy(plain(X), Y))
        reference.step()
        np.testing.assert_allclose(flat(module), flat(plain), atol=1e-6)


def test_wrappers_are_seen_through_and_other_modules_refused() -> None:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    steps = corrected(module, opposing(module))
    steps.attach(nn.ModuleDict({"module": module}), optimizer)
    with pytest.raises(ConfigError, match="parameter 'weight' of the synced model is not there"):
        steps.attach(nn.Sequential(nn.Linear(5, 3)), optimizer)
    with pytest.raises(ConfigError, match=r"parameter 'weight' of the synced model is \(4, 5\)"):
        steps.attach(nn.Linear(5, 4), optimizer)
    with pytest.raises(ConfigError, match="the module and its torch optimizer"):
        steps.attach(module, 0.1)


def test_without_an_optimizer_those_of_the_module_are_corrected_and_no_others() -> None:
    module, other = net(), net()
    before, own = flat(module), gradient_of(module)
    corrected(module, opposing(module)).attach(module)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in (module, other)]
    for each, optimizer in zip((module, other), optimizers, strict=True):
        torch.autograd.backward(cross_entropy(each(X), Y))
        optimizer.step()
    np.testing.assert_allclose(moved(module, before, 1.0), 0.75 * own, atol=1e-6)
    np.testing.assert_allclose(moved(other, before, 1.0), own, atol=1e-6)


def test_a_new_correction_ends_the_one_before() -> None:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    for _ in range(3):
        before, own = flat(module), gradient_of(module)
        optimizer.zero_grad()
        corrected(module, opposing(module)).attach(module, optimizer)
        torch.autograd.backward(cross_entropy(module(X), Y))
        optimizer.step()
        np.testing.assert_allclose(moved(module, before, 1.0), 0.75 * own, atol=1e-6)


def test_detached_it_leaves_the_optimizer_alone() -> None:
    module, before = net(), flat(net())
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    own = gradient_of(module)
    steps = corrected(module, opposing(module))
    steps.attach(module, optimizer)
    steps.detach()
    torch.autograd.backward(cross_entropy(module(X), Y))
    optimizer.step()
    np.testing.assert_allclose(moved(module, before, 1.0), own, atol=1e-6)
