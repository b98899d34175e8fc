"""Linear ops of a mixture of experts on the CPU: consecutive rows of x are multiplied with the weight of their expert.

torch multiplies once for each expert, also for those without rows. Here experts without rows cost nothing, and the
others share the threads (csrc/cpu/gemm/experts.cpp). There are kernels only, and no reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.ops import _library
from fastgen.ops.linear import as_rows, choose
from fastgen.ops.linear.choose import Layout


def expert_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Returns [S, N]: rows of x times the weights of their experts, with sums in float32; not differentiable.

    x is [S, K], the weight [experts, N, K], contiguous along K or N and of the same type: float32, bfloat16 or float16.
    Expert e has the rows from `ends[e - 1]` to `ends[e]`, [experts] int32; rows after the last one are zeros.

    Raises:
        RuntimeError: shapes, strides or dtypes do not fit together, or the ends do not ascend.
    """
    y = x.new_empty(x.shape[0], weight.shape[1])
    most = _gemv_rows(x, weight)
    torch.ops.fastgen.expert_linear_out.default(y, as_rows(x), weight, ends, 0 if most is None else most)
    return y


def serves(x: Tensor, weight: Tensor, ends: Tensor) -> bool:
    """Whether `expert_linear` takes these, and is at least as fast as torch for any division of the rows."""
    return (
        is_available()
        and all(each.device.type == "cpu" for each in (x, weight, ends))
        and x.dim() == 2
        and weight.dim() == 3
        and x.shape[1] == weight.shape[2] > 0
        and x.dtype is weight.dtype
        and ends.dtype is torch.int32
        and ends.shape == weight.shape[:1]
        and ends.is_contiguous()
        and _gemv_rows(x, weight) is not None
    )


def _gemv_rows(x: Tensor, weight: Tensor) -> int | None:
    """Returns up to how many rows of an expert GEMV serves; None if torch's product serves some numbers of rows."""
    layout = Layout.ROWS if weight.stride(2) == 1 else Layout.COLUMNS if weight.stride(1) == 1 else None
    return None if layout is None else choose.gemv_rows(x.dtype, layout, x.shape[0])


is_available, backend = _library.asking("fastgen::expert_linear_out")
_library.define("expert_linear_out(Tensor(a!) out, Tensor x, Tensor weight, Tensor ends, int gemv_rows) -> ()")
