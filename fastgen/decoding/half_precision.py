"""Half precision on a CPU without instructions for it, for what is not a linear layer.

There torch multiplies number by number. With AVX2, the two convolutions of a Whisper encoder in bfloat16 take more than
half of the call's time, and the products of attention two thirds of a prefill, in models that spell attention out. In
float32, with the result rounded once, they take a few percent of it. (Linear layers: `fastgen.decoding.layer_forms`.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fastgen.decoding.layer_forms import FunctionForm, serves
from fastgen.decoding.modules import is_plain
from fastgen.ops.half_precision import is_slow

_DIMENSIONS: Mapping[type[nn.Module], int] = {nn.Conv1d: 3, nn.Conv2d: 4, nn.Conv3d: 5}  # of the weight
# Batches of products.
_PRODUCTS = frozenset(
    {torch.matmul, torch.bmm, torch.baddbmm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm, Tensor.baddbmm}
)


def form_of(module: nn.Module) -> FunctionForm | None:
    """Returns the form of a convolution; None for any other layer, or if torch's convolution is as good."""
    weight = module._parameters.get("weight")
    dimensions = _DIMENSIONS.get(type(module))
    if weight is None or dimensions is None or not is_slow(weight.dtype):
        return None
    if not is_plain(module, weight.dtype, dimensions=dimensions):
        return None
    return FunctionForm(module, partial(_convolve, module), partial(serves, dtype=weight.dtype))


def _convolve(module: nn.Module, x: Tensor) -> Tensor:
    weight, bias = module._parameters["weight"], module._parameters["bias"]
    assert isinstance(weight, Tensor) and isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    result = module._conv_forward(x.float(), weight.float(), None if bias is None else bias.float())
    return result.to(x.dtype)


def upcast_products(dtype: torch.dtype) -> AbstractContextManager[object]:
    """Inside this, the calling thread's batches of products in this type are computed in float32, and rounded once."""
    return _Upcasting() if is_slow(dtype) else contextlib.nullcontext()


class _Upcasting(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if function not in _PRODUCTS:
            return function(*args, **named)
        tensors = [each for each in (*args, *named.values()) if isinstance(each, Tensor)]
        dtype = tensors[0].dtype
        if not all(serves(each, dtype) and each.dim() > 2 for each in tensors) or not is_slow(dtype):
            return function(*args, **named)
        wide = [_wide(each) for each in args]
        return function(*wide, **{name: _wide(each) for name, each in named.items()}).to(dtype)


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) else value
