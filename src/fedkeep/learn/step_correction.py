"""A correction inside a user's own training loop: one hook before each step of an optimizer.

The rule is in docs/flower.md. In short: once per step, whatever the loop accumulates; in the units
of the loop's own gradients; fading as far as the stored samples' errors have been seen to fade;
never lengthening a step; and off for the rest of a participation in which the loss of the stored
samples rises while it is used.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fedkeep.core.errors import ConfigError
from fedkeep.core.types import Vector
from fedkeep.learn.backends import Layout
from fedkeep.learn.objective import as_tensor
from fedkeep.learn.user_model import mixing_layers, plain_name

log = logging.getLogger("fedkeep.flower")

_UNIT = 0.5
"""By how much, relative to 1, a loop's unit may differ from the declared loss's unnoticed."""
_SPREADS = 3.0
"""How many standard deviations of a single sample's gradient are no evidence of another unit."""
_RISE = 1.02
"""The stored samples' mean loss over that at the start, beyond which it has risen."""
_CORRECTED: "WeakKeyDictionary[nn.Module, StepCorrection]" = WeakKeyDictionary()
"""The correction of each module: a new one ends that of an earlier participation."""


@dataclass(frozen=True)
class Progress:
    """What is known of the stored samples under a model in the middle of training."""

    slope: float
    """How much of their gradients' deviations is left, 0 to 1."""
    loss: float
    """Their mean loss."""


@dataclass(frozen=True)
class UnitEvidence:
    """How long the loop's gradients are along those of the declared loss, over many first steps.

    A loop may train with a multiple of the declared loss: a sum over its samples, gradients that
    are accumulated, or scaled, or clipped. Along the stored samples' mean gradient a, its gradient
    is then that multiple of a. A mini-batch makes this noisy; no batch is smaller than one sample.

    Examples
    --------
    >>> evidence = UnitEvidence()
    >>> evidence.unit  # nothing is known
    1.0
    >>> for _ in range(20):
    ...     evidence = evidence.with_step(along=16.0, expected=1.0, variance=4.0)
    >>> evidence.unit  # a loop that sums sixteen samples
    16.0
    """

    along: float = 0.0
    """Sum of <loop's gradient, a>."""
    expected: float = 0.0
    """Sum of <a, a>."""
    variance: float = 0.0
    """Sum of the variances of <a sample's gradient, a>."""

    def with_step(self, along: float, expected: float, variance: float) -> "UnitEvidence":
        """Count one more first step."""
        return UnitEvidence(self.along + along, self.expected + expected, self.variance + variance)

    @property
    def unit(self) -> float:
        """The multiple; 1 unless the evidence is against it."""
        noise = _SPREADS * sqrt(self.variance)
        if not abs(self.along - self.expected) > _UNIT * self.expected + noise:
            return 1.0
        return max(self.along / self.expected, 0.0) if self.expected > 0 else 0.0


class StepCorrection:
    """Adds a correction to the gradients of a module before each step of its optimizer.

    Parameters
    ----------
    layout
        Names and shapes of the trainable parameters, in the order of the flat model.
    correction
        What is added at first, over the last numbers of the flat model.
    measure
        From a model in the middle of training to what is known of the stored samples.
    gradient
        The stored samples' mean gradient before training, over the same numbers.
    variance
        That of the samples' products with it.
    loss
        The stored samples' mean loss before training.
    evidence
        Of the unit of the loop's gradients, from participations before.
    mixing
        Names the first layer in which samples of a batch mix while it trains, if any does.
    """

    def __init__(
        self,
        layout: Layout,
        correction: Vector,
        measure: Callable[[Vector], Progress],
        gradient: Vector,
        variance: float,
        loss: float,
        evidence: UnitEvidence = UnitEvidence(),
        mixing: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._layout, self._measure, self._loss = layout, measure, loss
        self._mixing = mixing
        self._correction, self._gradient = (self._whole(v) for v in (correction, gradient))
        self._variance, self.evidence = variance, evidence
        self._attached: dict[tuple[int, int], Any] = {}
        self.steps = 0
        """Steps corrected, or looked at."""
        self.stopped: str | None = None
        """Why it is off; None while it is used."""
        self.rose = False
        """Whether the stored samples' loss rose while it was used."""
        self._known = (0, 1.0)
        """The step of the last look, and the slope that it found."""

    def attach(self, module: nn.Module, optimizer: Any = None) -> None:
        """Correct each step of the optimizer from now on; a second call changes nothing.

        Without an optimizer, each step of any optimizer of the module's parameters is corrected. A
        correction that the module had from an earlier participation ends.

        Raises
        ------
        ConfigError
            If the module's trainable parameters are not those of the synced model, or the optimizer
            is none of torch's.
        """
        if (id(module), id(optimizer)) in self._attached:
            return
        if not isinstance(optimizer, torch.optim.Optimizer | None):
            raise ConfigError(
                "keeper.correct takes the module and its torch optimizer, as in "
                f"keeper.correct(net, optimizer); this is a {type(optimizer).__name__}"
            )
        known = dict(module.named_parameters())
        named = {plain_name(name): p for name, p in known.items()} | known
        for name, shape in zip(self._layout.names, self._layout.shapes, strict=True):
            if name not in named or tuple(named[name].shape) != shape:
                found = "is not there" if name not in named else f"is {tuple(named[name].shape)}"
                raise ConfigError(
                    f"parameter '{name}' of the synced model {found} in the module given to "
                    "keeper.correct: give it the module that is trained"
                )
        before = _CORRECTED.get(module, self)
        if before is not self:
            before.detach()
        _CORRECTED[module] = self
        parameters = [named[name] for name in self._layout.names]

        def hook(stepping: torch.optim.Optimizer, *_: Any) -> None:
            self._before_step(module, parameters, stepping)

        register = (
            register_optimizer_step_pre_hook
            if optimizer is None
            else optimizer.register_step_pre_hook
        )
        self._attached[id(module), id(optimizer)] = register(hook)

    def detach(self) -> None:
        """Leave every optimizer as it was."""
        for handle in self._attached.values():
            handle.remove()
        self._attached.clear()

    def _whole(self, last: Vector) -> list[Tensor]:
        """Divide the last numbers of a flat model by parameter, the others zero."""
        whole = np.zeros(self._layout.size, dtype=np.float32)
        whole[self._layout.size - len(last) :] = last
        views: list[Tensor] = self._layout.views(as_tensor(whole))
        return views

    @torch.no_grad()
    def _before_step(
        self, module: nn.Module, parameters: Sequence[nn.Parameter], optimizer: Any
    ) -> None:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if self.stopped is not None or held.isdisjoint(map(id, parameters)):
            return
        if self.steps == 0 and (mixing := self._mixing_now(module)) is not None:
            self.stopped = (
                f"{f'layer {mixing!r}' if mixing else 'the model'} mixes the samples of a batch "
                "while it trains: corrections are off for this model (GroupNorm and LayerNorm keep "
                "them)"
            )
            log.warning(self.stopped)
            return
        rows = [
            (p.grad, own.to(p.device), mean.to(p.device))
            for p, own, mean in zip(parameters, self._correction, self._gradient, strict=True)
            if id(p) in held and p.grad is not None
        ]
        scale = getattr(optimizer, "grad_scale", None)  # of a GradScaler, in fused optimizers
        units = 1.0 if scale is None else float(scale)
        if self.steps == 0:
            along = sum(float((g * mean).sum()) for g, _, mean in rows) / units
            expected = sum(float((mean * mean).sum()) for _, _, mean in rows)
            self.evidence = self.evidence.with_step(along, expected, self._variance)
        self._look(parameters)
        self.steps += 1
        strength = self._strength() * self.evidence.unit * units
        if self.stopped is not None or not strength > 0:
            return
        before = _length([g for g, _, _ in rows])
        for g, own, _ in rows:
            g.add_(own.to(g.dtype), alpha=strength)
        after = _length([g for g, _, _ in rows])
        if after > before:
            for g, _, _ in rows:
                g.mul_(before / after)

    def _mixing_now(self, module: nn.Module) -> str | None:
        """Name the first layer that, as the module trains now, mixes samples; None if none does."""
        known = mixing_layers(module)
        if known or not module.training:
            return known[0] if known else None
        return self._mixing()

    def _look(self, parameters: Sequence[nn.Parameter]) -> None:
        """Measures the stored samples anew before steps 2, 3, 5, 9, 17, ..."""
        if self.steps == 0 or self.steps & (self.steps - 1):
            return
        model = torch.cat([p.detach().reshape(-1) for p in parameters]).float().cpu().numpy()
        with torch.enable_grad():
            now = self._measure(model)
        self._known = self.steps, now.slope
        if not now.loss <= self._loss * _RISE + 1e-6:
            self.rose = True
            self.stopped = (
                f"the stored samples' loss rose from {self._loss:.4g} to {now.loss:.4g} within "
                f"{self.steps} steps: no correction until the next model"
            )

    def _strength(self) -> float:
        """Tell how much of it this step takes: it goes on fading at the rate last seen."""
        step, slope = self._known
        return 1.0 if step == 0 else float(slope ** ((self.steps - 1) / step))


def _length(gradients: Sequence[Tensor]) -> float:
    norms = [torch.linalg.vector_norm(g.float()) for g in gradients]
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
