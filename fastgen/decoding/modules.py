"""Iterating over the modules of a model, which each call does more than once, and what a plain layer is."""

from __future__ import annotations

from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Returns the modules of `model.modules()` in another order. Several times as fast, as it computes no names."""
    found: dict[nn.Module, None] = {model: None}
    left = [model]
    while left:
        for child in left.pop()._modules.values():
            if child is not None and child not in found:
                found[child] = None
                left.append(child)
    return list(found)


def device_of(model: nn.Module) -> torch.device:
    """Returns the device of the first parameter; the CPU for a model without parameters."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def runs_own_forward(module: nn.Module) -> bool:
    """Whether a module runs the forward pass of its class.

    An attribute may hold that very method: accelerate leaves it there when it removes its hooks, and so does a copy of
    the model that was made during a call.
    """
    if "forward" not in vars(module):
        return True
    own, of_class = vars(module)["forward"], type(module).forward
    # Not compared with `==`: a wrapper that looks like the method may be equal to it.
    return type(own) is MethodType and own.__self__ is module and own.__func__ is of_class


def drop_former_forward(module: nn.Module, former: object) -> None:
    """Drops an attribute that holds a module's forward pass as it was before its class got another one, this `former`
    function: accelerate, removing its hooks, has left it there.
    """
    if has_former_forward(module, former):
        vars(module).pop("forward", None)  # another thread may have dropped it meanwhile


def has_former_forward(module: nn.Module, former: object) -> bool:
    """Whether `drop_former_forward` drops something."""
    own = vars(module).get("forward")
    return type(own) is MethodType and own.__self__ is module and own.__func__ is former


def is_plain(
    module: nn.Module, dtype: torch.dtype = torch.float32, device: str = "cpu", *, dimensions: int = 2
) -> bool:
    """Whether a layer has only a weight and maybe a bias, of this dtype and on this type of device.

    Args:
        dimensions: of the weight.
    """
    for name in ("weight", "bias"):
        parameter = module._parameters.get(name)
        if parameter is None:
            # A hook or a parametrisation may have made an attribute of that name.
            if name == "weight" or getattr(module, name, None) is not None:
                return False
            continue
        if type(parameter) is not nn.Parameter or type(parameter.data) is not Tensor or parameter.is_inference():
            return False
        if parameter.dtype is not dtype or parameter.device.type != device or parameter.layout != torch.strided:
            return False
        if parameter.dim() != (dimensions if name == "weight" else 1):
            return False
        if name == "bias" and not parameter.is_contiguous():
            return False
    return not parametrize.is_parametrized(module)
