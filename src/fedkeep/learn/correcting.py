"""A correction added to the gradients of a module that somebody else trains."""

from __future__ import annotations

import torch
from torch import nn

from fedkeep.core.errors import ConfigError
from fedkeep.core.types import Vector
from fedkeep.learn.network import as_tensor


def add_to_gradients(module: nn.Module, correction: Vector) -> None:
    """Adds the correction to the gradients of the last parameters, as many as it has numbers."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    left = as_tensor(correction)
    with torch.no_grad():
        for parameter in reversed(parameters):
            if not len(left):
                return
            cut = len(left) - parameter.numel()
            if cut < 0:
                break
            part = left[cut:].view(parameter.shape).to(parameter.device)
            parameter.grad = part.clone() if parameter.grad is None else parameter.grad.add_(part)
            left = left[:cut]
    if len(left):
        raise ConfigError(f"a correction of {len(correction)} numbers does not fit this model: give it the one synced")
