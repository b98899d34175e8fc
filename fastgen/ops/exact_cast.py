"""Exact casts of float32 weights to bfloat16 or float16, on the CPU.

Most checkpoints are stored in bfloat16 or float16. Whoever loads one in float32 has weights that these types represent
exactly. Products with few rows are bound by reading the weight, and those with panels of 16 bits
(`fastgen.ops.linear.panels`) have the same result, to the last bit. There are kernels alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.ops import _library

TYPES = (torch.bfloat16, torch.float16)
# The sample of a weight: so many rows at least, and so many elements of each.
_ROWS, _COLUMNS = 4, 64


def likely_types(weight: Tensor) -> list[torch.dtype]:
    """Those of `TYPES` that represent a few hundred elements of a weight, [N, K], float32, exactly.

    There is none for a weight that has been trained in float32.
    """
    some = weight[:: max(weight.shape[0] // _ROWS, 1), :_COLUMNS].contiguous()
    return [dtype for dtype in TYPES if _bits(some.to(dtype).float()).equal(_bits(some))]


def exact_cast(weight: Tensor) -> Tensor | None:
    """A weight, [N, K], float32, in one of `TYPES`; None if that would change a bit of any element.

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
