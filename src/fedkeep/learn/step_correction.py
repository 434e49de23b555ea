"""A correction inside a user's own training loop: one hook before each step of an optimizer.

The rule is in docs/flower.md. In short: once per step, whatever the loop accumulates; in the units
of the unscaled gradient; fading as far as the stored samples' errors have been seen to fade; never
lengthening a step; and off for the rest of a participation in which the loss of the stored samples
rises while it is used.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep.core.errors import ConfigError
from fedkeep.core.types import Vector
from fedkeep.learn.backends import Layout
from fedkeep.learn.objective import as_tensor
from fedkeep.learn.user_model import mixing_layers

log = logging.getLogger("fedkeep.flower")

_WRAPPERS = ("module.", "_orig_mod.", "_module.")
"""What wrappers put before a parameter's name: DistributedDataParallel, torch.compile, Opacus."""
_RISE = 1.02
"""The stored samples' mean loss over that at the start, beyond which it has risen."""


@dataclass(frozen=True)
class Progress:
    """What is known of the stored samples under a model in the middle of training."""

    slope: float
    """How much of their gradients' deviations is left, 0 to 1."""
    loss: float
    """Their mean loss."""


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
    loss
        The stored samples' mean loss before training.
    """

    def __init__(
        self,
        layout: Layout,
        correction: Vector,
        measure: Callable[[Vector], Progress],
        loss: float,
    ) -> None:
        self._layout, self._measure, self._loss = layout, measure, loss
        whole = np.zeros(layout.size, dtype=np.float32)
        whole[layout.size - len(correction) :] = correction
        self._parts = dict(zip(layout.names, layout.views(as_tensor(whole)), strict=True))
        self._attached: dict[tuple[int, int], Any] = {}
        self.steps = 0
        """Steps corrected, or looked at."""
        self.stopped: str | None = None
        """Why it is off; None while it is used."""
        self.rose = False
        """Whether the stored samples' loss rose while it was used."""
        self._known = (0, 1.0)
        """The step of the last look, and the slope that it found."""

    def attach(self, module: nn.Module, optimizer: Any) -> None:
        """Correct each step of the optimizer from now on; a second call changes nothing.

        Raises
        ------
        ConfigError
            If the module's trainable parameters are not those of the synced model, or the optimizer
            has no hook before its steps.
        """
        if (id(module), id(optimizer)) in self._attached:
            return
        if not hasattr(optimizer, "register_step_pre_hook"):
            raise ConfigError(
                "keeper.correct takes the module and its torch optimizer, as in "
                f"keeper.correct(net, optimizer); this is a {type(optimizer).__name__}"
            )
        named = {_plain(name): p for name, p in module.named_parameters()}
        for name, shape in zip(self._layout.names, self._layout.shapes, strict=True):
            if name not in named or tuple(named[name].shape) != shape:
                found = "is not there" if name not in named else f"is {tuple(named[name].shape)}"
                raise ConfigError(
                    f"parameter '{name}' of the synced model {found} in the module given to "
                    "keeper.correct: give it the module that is trained"
                )
        mixing = mixing_layers(module)
        if mixing:
            self.stopped = (
                f"layer '{mixing[0]}' mixes the samples of a batch while it trains: corrections "
                "are off for this model (GroupNorm and LayerNorm keep them)"
            )
            log.warning(self.stopped)
        parameters = [named[name] for name in self._layout.names]
        hook = lambda *_: self._before_step(parameters, optimizer)  # noqa: E731
        self._attached[id(module), id(optimizer)] = optimizer.register_step_pre_hook(hook)

    def detach(self) -> None:
        """Leave every optimizer as it was."""
        for handle in self._attached.values():
            handle.remove()
        self._attached.clear()

    @torch.no_grad()
    def _before_step(self, parameters: Sequence[nn.Parameter], optimizer: Any) -> None:
        if self.stopped is not None:
            return
        self._look(parameters)
        self.steps += 1
        strength = self._strength()
        if self.stopped is not None or strength <= 0:
            return
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        scale = getattr(optimizer, "grad_scale", None)
        units = 1.0 if scale is None else float(scale)
        pairs = [
            (p, part.to(p.device) * (strength * units))
            for p, part in zip(parameters, self._parts.values(), strict=True)
            if id(p) in held and p.grad is not None
        ]
        before = _length([p.grad for p, _ in pairs if p.grad is not None])
        for p, part in pairs:
            assert p.grad is not None  # noqa: S101 - chosen above
            p.grad.add_(part.to(p.grad.dtype))
        after = _length([p.grad for p, _ in pairs if p.grad is not None])
        if after > before:
            for p, _ in pairs:
                assert p.grad is not None  # noqa: S101
                p.grad.mul_(before / after)

    def _look(self, parameters: Sequence[nn.Parameter]) -> None:
        """Measures the stored samples anew before steps 2, 3, 5, 9, 17, ..."""
        if self.steps == 0 or self.steps & (self.steps - 1):
            return
        model = torch.cat([p.detach().reshape(-1) for p in parameters]).float().cpu().numpy()
        now = self._measure(model)
        self._known = self.steps, now.slope
        if not now.loss <= self._loss * _RISE + 1e-6:
            self.rose = True
            self.stopped = (
                f"the stored samples' loss rose from {self._loss:.4g} to {now.loss:.4g} within "
                f"{self.steps} steps: no correction until the next model"
            )

    def _strength(self) -> float:
        """How much of the correction this step takes: it fades from look to look as it has faded."""
        step, slope = self._known
        return 1.0 if step == 0 else float(slope ** (self.steps / step))


def _plain(name: str) -> str:
    """A parameter's name without what wrappers put before it."""
    while name.startswith(_WRAPPERS):
        name = name.partition(".")[2]
    return name


def _length(gradients: Sequence[Tensor]) -> float:
    norms = [torch.linalg.vector_norm(g.float()) for g in gradients]
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
