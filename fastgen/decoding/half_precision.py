"""Half precision on a CPU without instructions for it, for what is not a linear layer.

With AVX2, torch multiplies number by number. The two convolutions of a Whisper encoder in bfloat16 then take more than
half of the call's time, and the products of attention two thirds of a prefill, in models that spell attention out. In
float32, with the result rounded once, they take a few percent of it. (Linear layers: `fastgen.decoding.layer_forms`.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fastgen import settings
from fastgen.decoding.layer_forms import FunctionForm, serves
from fastgen.decoding.modules import is_plain
from fastgen.ops.linear.choose import is_slow, upcast

_DIMENSIONS: Mapping[type[nn.Module], int] = {nn.Conv1d: 3, nn.Conv2d: 4, nn.Conv3d: 5}  # of the weight
# Batches of products.
_MATMUL = frozenset({torch.matmul, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm})
_BADDBMM = frozenset({torch.baddbmm, Tensor.baddbmm})


def form_of(module: nn.Module) -> FunctionForm | None:
    """Returns the form of a convolution; None for any other layer, or if torch's convolution is as good."""
    weight = module._parameters.get("weight")
    dimensions = _DIMENSIONS.get(type(module))
    if weight is None or dimensions is None or not _is_upcast(weight.dtype):
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
    return _Upcasting() if _is_upcast(dtype) else contextlib.nullcontext()


def _is_upcast(dtype: torch.dtype) -> bool:
    """Whether products of this type are slow, and the user does not ask for torch's own."""
    return is_slow(dtype) and settings.current().packed_weights != "never"


class _Upcasting(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        given = [*args, *named.values()]
        if function in _MATMUL and len(given) == 2 and named.keys() <= {"other", "mat2"} and _are_served(given):
            # With a vector, converting the matrices would take longer than the product.
            return upcast(torch.matmul, *given) if given[1].shape[-1] > 1 else function(*args, **named)
        if function in _BADDBMM and named.keys() <= {"batch1", "batch2", "beta", "alpha"}:
            tensors = [each for each in given if isinstance(each, Tensor)]
            if len(tensors) == 3 and _are_served(tensors):
                scales = {name: value for name, value in named.items() if not isinstance(value, Tensor)}
                return upcast(partial(torch.baddbmm, **scales), *tensors)
        return function(*args, **named)


def _are_served(tensors: Sequence[Any]) -> bool:
    """Whether all of these are batches of matrices in one type that is slow."""
    first = tensors[0]
    return (
        isinstance(first, Tensor)
        and is_slow(first.dtype)
        and all(isinstance(each, Tensor) and serves(each, first.dtype) and each.dim() > 2 for each in tensors)
    )
