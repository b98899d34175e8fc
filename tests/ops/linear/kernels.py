"""The kernels of linear layers in one table: formats and layouts of weights, instruction sets, and bounds of errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fastgen.ops import _library
from fastgen.ops.linear import choose, copies
from fastgen.ops.linear.kernels import BF16X3, GEMM, GEMV
from tests.ops.instructions import has_tiles, unless_again
from tests.ops.linear import dequantizing

_ops = torch.ops.fastgen
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# None: all that the processor has.
SETS = ("avx512", "avx2", "default")
GROUP_SIZE = 32


class Packed(NamedTuple):
    """A weight in the format of a kernel, and the numbers that it stands for, [N, K]."""

    weight: Any
    meant: Tensor


class Kernel(NamedTuple):
    """A kernel with a format of its weight.

    Attributes:
        dtype: of x, the bias and the result.
        pack: from the weight, [N, K] of this dtype as it lies.
        multiply: (x, weight, bias), x of any number of dimensions.
        out: (result, x, weight, bias), x as [M, K].
        several: (results, x, weights, biases).
        mixes: whether the weights of one call may lie in different ways.
        error: of a result, as a part of the largest number of the row of x times the sum of the weights.
        as_gemm: whether results have the bits of GEMM in float32 with the numbers that the weight stands for, rounded
            once to the dtype.
        order: M with the same one have the same order of sums.
        by_layout: layouts of the weight with another order of sums.
        most: rows that it is tried with.
        least: outputs of a weight.
        missing: why it does not run here.
    """

    name: str
    dtype: torch.dtype
    sets: tuple[str | None, ...]
    layouts: tuple[str, ...]
    pack: Callable[[Tensor], Packed]
    multiply: Callable[[Tensor, Any, Tensor | None], Tensor]
    out: Callable[..., object] | None = None
    several: Callable[..., object] | None = None
    mixes: bool = True
    error: float = 2e-6
    as_gemm: bool = False
    order: Callable[[int], int] = lambda m: 0
    by_layout: tuple[str, ...] = ()
    most: int = 2**20
    least: int = 0
    missing: str = _library.load("CPU")


def as_it_is(weight: Tensor) -> Packed:
    return Packed(weight, weight)


def _gemv(dtype: torch.dtype) -> Kernel:
    in_tiles = dtype is BF16 and has_tiles()
    return Kernel(
        f"gemv {dtype}", dtype, (None, *SETS), ("rows", "gaps", "columns"), as_it_is, GEMV.multiply,
        _ops.gemv_out, _ops.gemv_batch_out,
        # With AMX, 8 to 16 rows of bfloat16 are multiplied in its tiles.
        order=lambda m: int(in_tiles and 8 <= m <= 16), by_layout=("columns",), most=49, mixes=False,
    )  # fmt: skip


def _panels(dtype: torch.dtype) -> Kernel:
    def pack(weight: Tensor) -> Packed:
        return Packed(copies.panels(weight.to(dtype)), weight.to(dtype))

    def several(ys: list[Tensor], x: Tensor, weights: list[Any], biases: list[Tensor | None]) -> None:
        _ops.panels_gemm_batch_out(ys, x, [weight.qweight for weight in weights], biases)

    return Kernel(
        f"panels {dtype}", F32, SETS, ("rows", "gaps"), pack, choose.linear,
        lambda y, x, weight, bias: several([y], x, [weight], [bias]), several, as_gemm=True,
    )  # fmt: skip


def _grouped(bits: int, rotated: bool, floats: bool, dtype: torch.dtype) -> Kernel:
    sizes = bits, GROUP_SIZE, rotated, floats

    def pack(weight: Tensor) -> Packed:
        packed = copies.rounded(weight, bits, GROUP_SIZE, rotated)
        return Packed(packed, dequantizing.dequantized(packed, torch.float64))

    def several(ys: list[Tensor], x: Tensor, weights: list[Any], biases: list[Tensor | None]) -> None:
        parts = [[weight[part] for weight in weights] for part in range(4)]
        _ops.grouped_linear_batch_out(ys, x, *parts, None, biases, *sizes)

    activations = "float" if floats else "int8"
    return Kernel(
        f"{bits} bits in groups, {activations} activations in {dtype}{', rotated' if rotated else ''}",
        dtype, (None, "avx-vnni", "avx2", "default"), ("rows", "gaps", "columns", "part"), pack,
        lambda x, weight, bias: choose.linear(x, weight, bias, floats),
        lambda y, x, weight, bias: _ops.grouped_linear_out(y, x, *weight[:5], bias, *sizes), several,
        # Half a step of 8 bits; rotated ones are larger.
        error=2e-6 if floats else 0.03 if rotated else 1 / 250, as_gemm=floats and dtype is F32, least=1,
    )  # fmt: skip


KERNELS = [
    Kernel(
        "gemm", F32, SETS, ("rows", "gaps", "columns", "part", "one row", "one column", "overlapping"), as_it_is,
        GEMM.multiply, _ops.gemm_out, _ops.gemm_batch_out,
    ),
    *map(_gemv, (F32, BF16, F16)),
    *map(_panels, (BF16, F16)),
    *(
        Kernel(
            f"gemm {dtype}", dtype, SETS, ("rows", "gaps", "columns"), as_it_is, GEMM.multiply,
            _ops.gemm_out, _ops.gemm_batch_out, as_gemm=True,
        )
        for dtype in (BF16, F16)
    ),
    Kernel(
        "bf16x3", F32, (None,), ("rows", "gaps"), as_it_is, BF16X3.multiply, _ops.bf16x3_gemm_out,
        error=5e-7, missing="" if has_tiles() else "this processor has no AMX",
    ),
    _grouped(4, False, True, F32),
    _grouped(4, False, False, BF16),
    _grouped(8, True, False, F32),
    Kernel(
        "tiles of bf16", F32, (None, "avx512"), ("rows", "gaps", "columns", "part"),
        lambda weight: Packed(copies.pack(weight, "bf16"), weight.bfloat16()),
        choose.linear,
        # x is rounded to 8 significant bits. With AMX, what is left of a tile of rows decides about the order.
        error=2**-8, order=lambda m: m, least=1, missing=choose.unavailable("bf16") or "",
    ),
]  # fmt: skip


def cases(kernels: list[Kernel], once: bool = False) -> pytest.MarkDecorator:
    """Each kernel with each instruction set. What is checked before a set is chosen needs one of them, the widest."""
    return pytest.mark.parametrize(
        ("kernel", "vectors"),
        [
            pytest.param(
                kernel, name, id=f"{kernel.name} {name or 'widest'}",
                marks=[
                    pytest.mark.skipif(bool(kernel.missing), reason=f"{kernel.name}: {kernel.missing}"),
                    unless_again(name, (None,) if once else kernel.sets),
                ],
            )
            for kernel in kernels
            for name in ((None,) if once else kernel.sets)
        ],
    )  # fmt: skip


EVERY = cases(KERNELS)
WITH_CHECKS = [kernel for kernel in KERNELS if kernel.out is not None]
WITH_SEVERAL = [kernel for kernel in KERNELS if kernel.several is not None]


class Draw:
    """Numbers of a kernel's type, of which each seed gives the same."""

    def __init__(self, kernel: Kernel, seed: int = 0) -> None:
        self._kernel, self._generator = kernel, torch.Generator().manual_seed(seed)

    def numbers(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator).to(self._kernel.dtype)

    def weight(self, n: int, k: int, layout: str = "rows") -> Tensor:
        return {
            "rows": lambda: self.numbers(n, k),
            "gaps": lambda: self.numbers(n, k + 2)[:, :k],
            "columns": lambda: self.numbers(k, n + 2)[:, :n].t(),
            "part": lambda: self.numbers(n * 2 + 1, k * 2 + 3)[1::2, 2:-1:2],
            "one row": lambda: self.numbers(1, k).expand(n, k),
            "one column": lambda: self.numbers(n, 1).expand(n, k),
            "overlapping": lambda: self.numbers(n + k).unfold(0, k, 1)[:n],
        }[layout]()

    def packed(self, n: int, k: int, layout: str = "rows") -> Any:
        return self._kernel.pack(self.weight(n, k, layout)).weight
