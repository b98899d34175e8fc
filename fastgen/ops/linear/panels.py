"""GEMM in float32 on a packed 16-bit weight that represents it exactly, for the rows of a decode step on the CPU.

Most checkpoints are stored in bfloat16 or float16. If one is loaded in float32, these types represent its weights
exactly (`exact_cast`). Linear ops with few rows are bound by reading the weight: 16 bits take half of the time, and are
upcast in registers. A panel interleaves as many n as a vector has lanes. So no sum crosses the lanes of a vector, and
no lane is idle, whatever M is (see csrc/cpu/gemm/panels.cpp). The result has the same bits as
`fastgen.ops.linear.kernels` with the float32 weight. There are kernels only, and no reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.ops import _library
from fastgen.ops.linear import as_rows, fit_in_float32, with_shape_of

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


_library.define("exact_cast_out(Tensor(a!) out, Tensor x) -> bool")


# More rows do not gain: the product is then no longer bound by reading the weight.
MAX_ROWS = 16


def pack(weight: Tensor) -> Tensor:
    """Packs a weight, [N, K], bfloat16 or float16, in panels: an opaque tensor that is valid in this process.

    Raises:
        RuntimeError: the weight has another shape or dtype, or is not contiguous along K.
    """
    return torch.ops.fastgen.pack_panels.default(weight.detach())


def panels_gemm(x: Tensor, packed: Tensor, bias: Tensor | None, n: int) -> Tensor:
    """`torch.nn.functional.linear(x, weight.float(), bias)` with the weight in panels; not differentiable.

    x is [..., K] and the bias [N], float32.

    Raises:
        RuntimeError: shapes or dtypes do not fit together.
    """
    rows = as_rows(x)
    y = x.new_empty(rows.shape[0], n)
    torch.ops.fastgen.panels_gemm_batch_out.default([y], rows, [packed], [bias])
    return with_shape_of(x, y)


def serves(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a 16-bit weight may replace this one: x is [M, K], all are float32.

    The weight is [N, K], contiguous; the bias [N] or None. `choose.reads_panels` tells up to which M it gains.
    """
    return fit_in_float32(x, weight, bias) and is_available()


is_available = _library.availability("fastgen::panels_gemm_batch_out")
_library.define("pack_panels(Tensor weight) -> Tensor")
_library.define("panels_gemm_batch_out(Tensor(a!)[] out, Tensor x, Tensor[] packed, Tensor?[] bias) -> ()")
