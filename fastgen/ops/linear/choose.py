"""Linear ops, and the choice of their kernels on the CPU: from a static table.

The choice depends on the instruction set, the dtype, the layout of the weight and M (rows of x, tokens). Nothing is
timed in a user's call, so results do not depend on a clock. N and K do not matter: from 192 x 576 to 4,096 x 1,024 the
best kernel changes at the same M. A packed weight has one kernel, which its format and layout determine.

The shipped table is based on measurements on AMD EPYC (Zen 3, Zen 4, Zen 5) and Intel Xeon (AVX-512, AMX): see
docs/experiments.md. `python -m fastgen tune` measures a machine and writes a profile that replaces it (`tune.py`).

In float32, GEMM on the unpacked weight and on its packed 16-bit copy return the same bits. GEMV and bf16x3 add in other
orders, so M decides there which bits a row has: docs/precision.md says where, and what avoiding it would cost.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen import memory
from fastgen.ops import _library, gpu
from fastgen.ops.linear import as_rows, copies, fit, kernels, on_gpu
from fastgen.ops.linear.kernels import BF16X3, GEMM, GEMV, GROUPED, PANEL_GEMM, Kernel  # noqa: F401 (of captured steps)
from fastgen.ops.linear.weights import Layout, PackedWeight


class Isa(enum.IntEnum):
    """Instruction sets, older ones first, numbered as by the operator `fastgen::instruction_set`."""

    PORTABLE = 0
    AVX2 = 1
    AVX512 = 2
    AVX512_BF16 = 3
    AMX = 4


# Whether there are kernels in this process: nothing is gained without them.
is_available = _library.availability("fastgen::gemm_out")
KERNELS = {kernel.name: kernel for kernel in (GEMV, GEMM, BF16X3)}
# Names in the table for torch's own kernel, and for the packed 16-bit copy.
TORCH, PANELS = "torch", "panels"

# The kernels that serve each key, in rising order of M. In float32, torch's kernel is not among them: it makes the bits
# of a row depend on the other rows.
Key = tuple[torch.dtype, Layout]
SERVE: Mapping[Key, Sequence[str]] = {
    (torch.float32, Layout.ROWS): ("gemv", "gemm", "bf16x3"),
    (torch.float32, Layout.COLUMNS): ("gemv", "gemm"),
    (torch.float32, Layout.PANELS): (PANELS, "gemm", "bf16x3"),
    (torch.bfloat16, Layout.ROWS): ("gemv", TORCH, "gemm"),
    (torch.bfloat16, Layout.COLUMNS): ("gemv", TORCH, "gemm"),
    (torch.float16, Layout.ROWS): ("gemv", TORCH, "gemm"),
    (torch.float16, Layout.COLUMNS): ("gemv", TORCH, "gemm"),
}
# The fastest kernel up to each number of rows. A row of the table ends with the kernel for all larger numbers.
Row = Sequence[tuple[float, str]]
_REST = math.inf
# Precisions of torch's float32 products on the CPU in which it may round the operands.
_ROUNDED = ("tf32", "bf16")
_ALL_TORCH: Row = ((_REST, TORCH),)
_FLOATS: Mapping[Key, Row] = {
    (torch.float32, Layout.ROWS): ((8, "gemv"), (_REST, "gemm")),
    (torch.float32, Layout.COLUMNS): ((1, "gemv"), (_REST, "gemm")),
    (torch.float32, Layout.PANELS): ((kernels.PANELS_MAX_ROWS, PANELS), (_REST, "gemm")),
}
_BF16, _FP16 = (torch.bfloat16, Layout.ROWS), (torch.float16, Layout.ROWS)
_BF16_COLUMNS, _FP16_COLUMNS = (torch.bfloat16, Layout.COLUMNS), (torch.float16, Layout.COLUMNS)
_HALVES: Row = ((64, "gemv"), (_REST, "gemm"))
_HALF_COLUMNS: Row = ((16, "gemv"), (_REST, "gemm"))
# On processors that multiply bfloat16, torch uses that for many rows.
_MULTIPLIED: Row = ((64, "gemv"), (_REST, TORCH))
_FLOATS_AND_FP16 = {**_FLOATS, _FP16: _HALVES, _FP16_COLUMNS: _HALF_COLUMNS}
TABLE: Mapping[Isa, Mapping[Key, Row]] = {
    Isa.PORTABLE: {},
    Isa.AVX2: {**_FLOATS_AND_FP16, _BF16: ((24, "gemv"), (_REST, "gemm")), _BF16_COLUMNS: _HALF_COLUMNS},
    Isa.AVX512: {**_FLOATS_AND_FP16, _BF16: _HALVES, _BF16_COLUMNS: _HALF_COLUMNS},
    Isa.AVX512_BF16: {**_FLOATS_AND_FP16, _BF16: _MULTIPLIED, _BF16_COLUMNS: _ALL_TORCH},
    Isa.AMX: {
        **_FLOATS_AND_FP16,
        # Fewer than 16 rows do not fill a tile, and take as long as 16.
        (torch.float32, Layout.ROWS): ((8, "gemv"), (15, "gemm"), (_REST, "bf16x3")),
        (torch.float32, Layout.PANELS): ((15, PANELS), (_REST, "bf16x3")),
        _BF16: ((16, "gemv"), (_REST, TORCH)),
        _BF16_COLUMNS: _ALL_TORCH,
        _FP16: ((16, "gemv"), (_REST, "gemm")),
    },
}


@overload
def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = ..., floats: bool = ...) -> Tensor: ...
@overload
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = ...) -> Tensor | None: ...
def linear(x: Tensor, weight: Any, bias: Tensor | None = None, floats: bool = False) -> Tensor | None:
    """`torch.nn.functional.linear(x, weight, bias)`; None if torch's own kernel is chosen. Not differentiable.

    x is [..., K], the weight [N, K], the bias [N]. `kernels.multiply_packed` has the types that a packed weight
    multiplies, and says what `floats` is.

    Raises:
        RuntimeError: a packed weight, x and the bias do not fit together.
    """
    if isinstance(weight, PackedWeight):
        return kernels.multiply_packed(x, weight, bias, floats)
    kernel = kernel_for(x, weight, bias)
    return None if kernel is None else kernel.multiply(x, weight, bias)


def kernel_for(x: Tensor, weight: Tensor, bias: Tensor | None) -> Kernel | None:
    """Returns the kernel for x as [..., K], a weight [N, K] and a bias [N] or None; None for torch's own."""
    layout, count = layout_of(weight), x.numel()
    if layout is None or not count or not weight.numel() or not fit(x, weight, bias):
        return None
    kernel = KERNELS.get(name_of(x.dtype, layout, count // x.shape[-1]))
    # If the user allows float32 products of lower precision, torch has faster ones.
    # `torch.get_float32_matmul_precision` raises if only this backend, or only CUDA, has been allowed to.
    of_torch: Any = torch.backends.mkldnn
    return None if kernel is BF16X3 and of_torch.matmul.fp32_precision in _ROUNDED else kernel


def name_of(dtype: torch.dtype, layout: Layout, m: int, isa: Isa | None = None) -> str:
    """Returns the kernel's name in the table for M rows of this type, which may be `TORCH` or `PANELS`.

    Args:
        isa: the instruction set; by default that of this process.
    """
    row = _table(instruction_set() if isa is None else isa).get((dtype, layout), _ALL_TORCH)
    return next(name for most, name in row if m <= most)


def layout_of(weight: Tensor) -> Layout | None:
    """Returns the layout of a weight, [N, K]; None if no kernel reads it."""
    if weight.dim() != 2:
        return None
    return Layout.ROWS if weight.stride(1) == 1 else Layout.COLUMNS if weight.stride(0) == 1 else None


def reads_panels(m: int) -> bool:
    """Whether M rows of float32 read a weight from its packed 16-bit copy."""
    return name_of(torch.float32, Layout.PANELS, m) == PANELS


def gemv_rows(dtype: torch.dtype, layout: Layout, m: int) -> int | None:
    """Returns up to how many rows GEMV serves; None if torch's kernel serves any number of rows up to M."""
    row = _table(instruction_set()).get((dtype, layout), _ALL_TORCH)
    if any(name == TORCH and after < m for (after, _), (_, name) in zip([(0, ""), *row], row, strict=False)):
        return None
    return max((int(most) for most, name in row if name == "gemv"), default=0)


@functools.cache
def instruction_set() -> Isa:
    """Returns what the processor has and ATEN_CPU_CAPABILITY allows; portable without compiled kernels."""
    if not is_available():
        return Isa.PORTABLE
    return Isa(torch.ops.fastgen.instruction_set.default())


@functools.cache
def _table(isa: Isa) -> Mapping[Key, Row]:
    """Returns the shipped table, overridden by a profile of this machine, as it was when first read."""
    return {**TABLE[isa], **_profile(isa)}


def profile_path() -> Path | None:
    """Returns where `python -m fastgen tune` writes: `fastgen/linear.json` in the user's cache folder (XDG_CACHE_HOME,
    or ~/.cache), or `linear.json` in the folder FASTGEN_CACHE; None if that is empty, or if there is no home.
    """
    folder = os.environ.get("FASTGEN_CACHE")
    if folder is not None:
        return Path(folder, "linear.json") if folder else None
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(cache or Path.home() / ".cache", "fastgen", "linear.json")
    except RuntimeError:
        return None


def machine(isa: Isa) -> str:
    """Returns the key of a profile: the processor's name and the instruction set."""
    return f"{memory.processor()} | {isa.name}"


@functools.cache
def _profile(isa: Isa) -> dict[Key, Row]:
    """Returns the profile of such a machine; {} if there is no file, or if `tune` did not write it."""
    path = profile_path()
    try:
        found = json.loads(path.read_text())[machine(isa)] if path is not None else {}
        return {_key(name): _row(_key(name), row, isa) for name, row in found.items()}
    except (OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError):
        return {}


def _key(name: str) -> Key:
    dtype, layout = name.split()
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype], Layout(layout)


def _row(key: Key, row: Any, isa: Isa) -> Row:
    """Raises ValueError if `row` is not a row of the table, or names a kernel that does not serve there."""
    found = [(_REST if most is None else float(most), str(name)) for most, name in row]
    if not found or found[-1][0] != _REST or not all(serves(name, key, most, isa) for most, name in found):
        raise ValueError(f"no row of a table: {row!r}")
    return found


def serves(name: str, key: Key, m: float, isa: Isa) -> bool:
    """Whether a kernel of this name serves up to M rows."""
    if name not in SERVE[key]:
        return False
    if name == "bf16x3":
        return isa is Isa.AMX and m >= kernels.BF16X3_MIN_ROWS
    return name != "gemv" or m <= kernels.GEMV_MAX_ROWS[key[0]]


def forget() -> None:
    """Clears the cached instruction set and profile: after `tune`, and in tests."""
    for cached in (instruction_set, _table, _profile):
        cached.cache_clear()


def backend() -> str:
    """Returns which table is in use."""
    isa = instruction_set()
    if isa is Isa.PORTABLE:
        return f"torch's products: {_library.load('CPU') or 'no kernel for this processor'}"
    profile = _profile(isa)
    if not profile:
        return f"the shipped table, {isa.name}"
    return f"a profile of this machine ({hashlib.sha256(repr(profile).encode()).hexdigest()[:8]}), {isa.name}"


# ---- low-bit copies of weights (`copies`), on request

PRECISIONS = ("int8", "int4", "bf16")


def types(precision: str, device: torch.device) -> tuple[torch.dtype, ...]:
    """Returns the types of activations that weights of this precision can multiply on this device."""
    is_any = on_gpu.is_for(device) or precision in copies.BITS
    return (torch.float32, torch.bfloat16, torch.float16) if is_any else (torch.float32,)


def is_for(device: torch.device) -> bool:
    """Whether weights on this device can have one of `PRECISIONS`, if nothing is missing there."""
    return device.type == "cpu" or on_gpu.is_for(device)


def unavailable(precision: str, device: torch.device | None = None) -> str | None:
    """Returns why weights of this precision cannot be used on this device, by default the CPU; None if they can.

    On the CPU this depends on the processor's instructions, on a GPU on Triton.
    """
    if device is not None and on_gpu.is_for(device):
        return gpu.unavailable(device) if precision in copies.BITS else f"weights in {precision} are for CPUs"
    return missing(precision)


def missing(precision: str) -> str | None:
    """Returns why there are no kernels for this precision in this process, on the CPU; None if there are."""
    if precision in copies.BITS:
        is_served, needed = instruction_set() >= Isa.AVX2, "AVX2"
    else:
        is_served, needed = _packs_bf16(), "AVX-512 BF16"
    return None if is_served else _library.load("CPU") or f"this processor does not have {needed}, or may not use it"


def _packs_bf16() -> bool:
    # A name in ATEN_CPU_CAPABILITY rules out this instruction set in the table, but not in these kernels.
    try:
        torch.ops.fastgen.pack_bf16.default(torch.zeros(1, 1, dtype=torch.float32, device="cpu"))
    except RuntimeError:
        return False
    return True


def precisions() -> str:
    """Returns which precisions the CPU serves, and why not the others."""
    reasons = {precision: missing(precision) for precision in PRECISIONS}
    there = [precision for precision, reason in reasons.items() if reason is None]
    phrases = [f"{_library.backend('fastgen::grouped_linear_out')}: {', '.join(there)}"] if there else []
    phrases += [f"no {precision}: {reason}" for precision, reason in reasons.items() if reason is not None]
    return "; ".join(phrases)


# ---- mixtures of experts: consecutive rows of x are multiplied with the weight of their expert
#
# torch multiplies once for each expert, also for those without rows. Here experts without rows cost nothing, and the
# others share the threads (csrc/cpu/gemm/experts.cpp). There are kernels only, and no reference.


def expert_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Returns [S, N]: rows of x times the weights of their experts, with sums in float32; not differentiable.

    x is [S, K], the weight [experts, N, K], contiguous along K or N and of the same type: float32, bfloat16 or float16.
    Expert e has the rows from `ends[e - 1]` to `ends[e]`, [experts] int32; rows after the last one are zeros.

    Raises:
        RuntimeError: shapes, strides or dtypes do not fit together, or the ends do not ascend.
    """
    y = x.new_empty(x.shape[0], weight.shape[1])
    most = _expert_rows(x, weight)
    torch.ops.fastgen.expert_linear_out.default(y, as_rows(x), weight, ends, 0 if most is None else most)
    return y


def serves_experts(x: Tensor, weight: Tensor, ends: Tensor) -> bool:
    """Whether `expert_linear` takes these, and is at least as fast as torch for any division of the rows."""
    return (
        _library.has_kernel("fastgen::expert_linear_out")
        and all(each.device.type == "cpu" for each in (x, weight, ends))
        and x.dim() == 2
        and weight.dim() == 3
        and x.shape[1] == weight.shape[2] > 0
        and x.dtype is weight.dtype
        and ends.dtype is torch.int32
        and ends.shape == weight.shape[:1]
        and ends.is_contiguous()
        and _expert_rows(x, weight) is not None
    )


def _expert_rows(x: Tensor, weight: Tensor) -> int | None:
    """Returns up to how many rows of an expert GEMV serves; None if torch's product serves some numbers of rows."""
    layout = Layout.ROWS if weight.stride(2) == 1 else Layout.COLUMNS if weight.stride(1) == 1 else None
    return None if layout is None else gemv_rows(x.dtype, layout, x.shape[0])


def separate_linear(x: Tensor, weights: Sequence[Tensor], ends: Tensor) -> Tensor:
    """Returns [S, N]: rows of x times the weights of their experts, [N, K] each; not differentiable.

    The rows of each expert are those of `expert_linear`. A recorded graph calls this as one operator, which reads the
    ends on the host.
    """
    found: Tensor = torch.ops.fastgen.separate_linear.default(x, weights, ends)
    return found


def _separate_linear(x: Tensor, weights: Sequence[Tensor], ends: Tensor) -> Tensor:
    y, begin = x.new_zeros(x.shape[0], weights[0].shape[0]), 0
    for weight, end in zip(weights, ends.tolist(), strict=True):
        if end > begin:
            rows = x[begin:end]
            kernel = kernel_for(rows, weight, None)
            y[begin:end] = F.linear(rows, weight) if kernel is None else kernel.multiply(rows, weight, None)
        begin = end
    return y


def _fake_separate_linear(x: Tensor, weights: Sequence[Tensor], ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weights[0].shape[0])


_SEPARATE = "separate_linear(Tensor x, Tensor[] weights, Tensor ends) -> Tensor"
_library.define(_SEPARATE, _separate_linear, _fake_separate_linear)


# ---- other products in half precision, on a CPU without instructions for it
#
# With AVX2, torch multiplies number by number, and takes several times as long as in float32.

HALF = (torch.float16, torch.bfloat16)
# Elements of operands and results that are in float32 at a time: 64 MiB.
_AT_ONCE = 2**24


def is_slow(dtype: torch.dtype) -> bool:
    """Whether torch multiplies this type number by number on this CPU. AVX2 was measured; others are left to torch."""
    return dtype in HALF and is_available() and instruction_set() is Isa.AVX2


def upcast(product: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Returns `product(*tensors)`: in half precision that is slow computed in float32, and rounded once.

    Operands with the same leading dimensions of a `torch.matmul` are upcast a few matrices at a time.
    """
    dtype = tensors[0].dtype
    if not is_slow(dtype) or any(each.dtype is not dtype or each.device.type != "cpu" for each in tensors):
        return product(*tensors)
    if product is torch.matmul and tensors[0].dim() > 2 and tensors[0].shape[:-2] == tensors[1].shape[:-2]:
        return _in_parts(*tensors)
    return product(*(each.float() for each in tensors)).to(dtype)


def _in_parts(a: Tensor, b: Tensor) -> Tensor:
    """Returns the products of matrices [..., M, K] and [..., K, N]."""
    m, k, n = *a.shape[-2:], b.shape[-1]
    some = max(_AT_ONCE // max(m * k + k * n + m * n, 1), 1)
    count = a.shape[:-2].numel()
    if count <= some:
        return torch.matmul(a.float(), b.float()).to(a.dtype)
    parts = zip(a.flatten(0, -3).split(some), b.flatten(0, -3).split(some), strict=True)
    return torch.cat([torch.bmm(x.float(), y.float()).to(a.dtype) for x, y in parts]).view(*a.shape[:-2], m, n)
