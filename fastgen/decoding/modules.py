"""The modules of a model, which each call looks at more than once."""

from __future__ import annotations

import torch
from torch import nn


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Those of `model.modules()`, each once, in an order of its own. That method takes several times as long, because
    it makes their names.
    """
    found: dict[nn.Module, None] = {model: None}
    left = [model]
    while left:
        for child in left.pop()._modules.values():
            if child is not None and child not in found:
                found[child] = None
                left.append(child)
    return list(found)


def device_of(model: nn.Module) -> torch.device:
    """Where its first parameter is: the device of a model that is on one. The CPU for a model without any."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
