"""Exact casts of float32 weights to bfloat16 or float16, on the CPU.

Most checkpoints are stored in bfloat16 or float16. If one is loaded in float32, these types represent its weights
exactly. Linear ops with few rows are bound by reading the weight, and those on panels of 16 bits
(`fastgen.ops.linear.panels`) have the same result, to the last bit. This operator has kernels only, and no reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.ops import _library

TYPES = (torch.bfloat16, torch.float16)
# The sample of a weight: at least this many rows, and this many elements of each.
_ROWS, _COLUMNS = 4, 64


def likely_types(weight: Tensor) -> list[torch.dtype]:
    """Returns those of `TYPES` that represent a few hundred elements of a weight, [N, K], float32, exactly.

    For a weight trained in float32, that is none of them.
    """
    some = weight[:: max(weight.shape[0] // _ROWS, 1), :_COLUMNS].contiguous()
    return [dtype for dtype in TYPES if _bits(some.to(dtype).float()).equal(_bits(some))]


def exact_cast(weight: Tensor) -> Tensor | None:
    """Casts a weight, [N, K], float32, to one of `TYPES`; returns None if that would change a bit of any element.

    Raises:
        RuntimeError: the weight is not contiguous.
    """
    for dtype in likely_types(weight):
        out = torch.empty_like(weight, dtype=dtype)
        if torch.ops.fastgen.exact_cast_out.default(out, weight):
            return out
    return None


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


is_available, backend = _library.asking("fastgen::exact_cast_out")
_library.define("exact_cast_out(Tensor(a!) out, Tensor x) -> bool")
