"""Convolutions in half precision, on a CPU without instructions for it.

There torch multiplies number by number. With AVX2, the two convolutions of a Whisper encoder in bfloat16 take more than
half of the call's time. In float32, with the result rounded once, they take a few percent of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from fastgen.decoding.layer_forms import FunctionForm, serves
from fastgen.decoding.modules import is_plain
from fastgen.ops.linear import choose

_DIMENSIONS: Mapping[type[nn.Module], int] = {nn.Conv1d: 3, nn.Conv2d: 4, nn.Conv3d: 5}  # of the weight
_HALF = (torch.float16, torch.bfloat16)


def form_of(module: nn.Module) -> FunctionForm | None:
    """Returns the form of a convolution; None for any other layer, or if torch's convolution is as good."""
    weight = module._parameters.get("weight")
    dimensions = _DIMENSIONS.get(type(module))
    if weight is None or dimensions is None or weight.dtype not in _HALF or choose.is_left_to_torch(weight.dtype):
        return None
    if not choose.is_available() or not is_plain(module, weight.dtype, dimensions=dimensions):
        return None
    return FunctionForm(module, partial(_convolve, module), partial(serves, dtype=weight.dtype))


def _convolve(module: nn.Module, x: Tensor) -> Tensor:
    weight, bias = module._parameters["weight"], module._parameters["bias"]
    assert isinstance(weight, Tensor) and isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    result = module._conv_forward(x.float(), weight.float(), None if bias is None else bias.float())
    return result.to(x.dtype)
