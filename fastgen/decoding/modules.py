"""The modules of a model, which each call looks at more than once, and what a layer is."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize


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


def is_plain(module: nn.Module, dtype: torch.dtype = torch.float32, device: str = "cpu") -> bool:
    """Whether a layer is its weight and bias and nothing else, of this type on this kind of device."""
    for name in ("weight", "bias"):
        parameter = module._parameters.get(name)
        if parameter is None:
            # An attribute of that name is the work of a hook or a parametrisation.
            if name == "weight" or getattr(module, name, None) is not None:
                return False
            continue
        if type(parameter) is not nn.Parameter or type(parameter.data) is not Tensor or parameter.is_inference():
            return False
        if parameter.dtype is not dtype or parameter.device.type != device or parameter.layout != torch.strided:
            return False
        if parameter.dim() != (2 if name == "weight" else 1) or (name == "bias" and not parameter.is_contiguous()):
            return False
    return not parametrize.is_parametrized(module)
