"""Linear layers for the few rows of a decoding step on a CPU.

A BLAS library rearranges the weight block by block inside every product. For few rows that costs as much as the product
itself. `packed_linear` takes a weight that was rearranged once, and reads it as one stream. `streamed_linear` takes the
weight as it is: it needs no copy, and gives the same result (see csrc/cpu/linear.cpp). `folded_linear` is as fast or
faster, and may add in another order for another number of rows. Which is faster than torch's own product is measured,
once per machine and shape (`costs`).

The operators are float32 only, and there are kernels alone (`is_available`). The results differ from those of
`torch.nn.functional.linear` by rounding.
"""

from __future__ import annotations

import functools
import math
import mmap
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.ops import _library, _timings

# Timings are those of this kernel: to be renamed when it changes.
_KERNEL = "linear 19"
# Dot products are measured with so many rows at most: with more, they read each line from the cache too often.
MAX_DOT_ROWS = 24
# Up to here each number of rows is measured for itself: small batches, and the checks of speculative decoding.
_EXACT_ROWS = 9
# Beyond these, shapes are measured with the next power of two of rows, and beyond this many in proportion.
_MAX_ROWS = 1024
# A wider layer is measured with fewer outputs, and in proportion.
MAX_BYTES = 2**24
# The weights of a model do not stay in the cache from one step to the next; those that are measured must not either.
# With many rows that makes no difference. So they are taken out of it, and take turns: so many bytes of them, or more
# where they cannot be taken out.
_COLD_BYTES, _COLD_BYTES_BY_TURNS = 2**23, 2**25
_MANY_ROWS = 256
# So often at least; more often, up to the latter, until the shortest time of every product has been met twice.
_ROUNDS, _MAX_ROUNDS = 3, 12
_STEADY = 1.1


class Costs(NamedTuple):
    """Seconds that a product takes."""

    plain: float  # torch's own
    packed: float  # with the packed weight
    packing: float  # that packing the weight takes, which is no product, into memory that was used before
    streamed: float = math.inf  # with the weight as it is: `folded_linear`
    dots: float = math.inf  # as dot products with the lines of the weight (fastgen/ops/dot_linear.py)
    keeping: float = 0.0  # what packing takes more if the packed weight is kept: it needs memory of its own


def pack(weight: Tensor) -> Tensor:
    """The weight, [outputs, inputs], float32, in panels: an opaque tensor for `packed_linear`, valid in this process.

    Raises:
        RuntimeError: the weight has another shape or dtype.
    """
    return torch.ops.fastgen.pack_linear.default(weight.detach())


def as_rows(x: Tensor) -> Tensor:
    """[..., inputs] as the kernels take it: [rows, inputs], the inputs next to each other; a view where it can be."""
    return x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1]).contiguous()


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    """`torch.nn.functional.linear(x, weight, bias)` with `packed = pack(weight)`; not differentiable.

    x is [..., inputs] and the bias [outputs], float32.

    Raises:
        RuntimeError: shapes or dtypes do not fit together.
    """
    y = torch.ops.fastgen.packed_linear.default(as_rows(x), packed, bias, outputs)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], outputs)


def streamed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`packed_linear` with the weight as it is, [outputs, inputs], any strides. The result has the same bits."""
    y = torch.ops.fastgen.streamed_linear.default(as_rows(x), weight, bias)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], weight.shape[0])


def folded_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`streamed_linear` without its order of sums: that may depend on the number of rows.

    Rows that do not fill a vector have several inputs each in one.
    """
    rows = as_rows(x)
    y = x.new_empty(rows.shape[0], weight.shape[0])
    torch.ops.fastgen.folded_linear_out.default(y, rows, weight, bias)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], weight.shape[0])


@functools.cache
def is_available() -> bool:
    """Whether there are kernels in this process. Without them, nothing is gained."""
    return _library.has_kernel("fastgen::packed_linear")


def has_vectors() -> bool:
    """Whether there are kernels with vector instructions (AVX2 or AVX-512) that this process may use.

    These give the same bits, whatever the number of rows and threads: each output is the sum over its inputs in one
    order, with fused multiply-adds.
    """
    return is_available() and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def backend() -> str:
    """Which implementation serves this operator."""
    if not is_available():
        return f"torch, nothing is packed: {_library.load('CPU') or 'no kernel for this processor'}"
    known = [Costs(*cost) for cost in _timings.all(_KERNEL).values() if len(cost) == len(Costs._fields)]
    packed = sum(cost.packed < cost.plain for cost in known)
    streamed = sum(cost.streamed < cost.plain for cost in known)
    faster = f"packed for {packed}, as it is for {streamed} of {len(known)} shapes"
    return f"{_library.backend('fastgen::packed_linear')}, where measured to be faster: {faster}"


def costs(rows: int, inputs: int, outputs: int, transposed: bool, measure: bool = True) -> Costs | None:
    """What a layer of this shape costs on this machine for an input of some rows, with the number of threads in force.

    Measured once, which takes as long as some tens of such products and draws no random numbers, and remembered
    (`fastgen.ops._timings`). None if it is not known, and not to be measured.

    Args:
        transposed: the weight is stored as [inputs, outputs], as GPT-2's.
    """
    bucket = rows_measured(rows) if rows <= MAX_DOT_ROWS else min(1 << (rows - 1).bit_length(), _MAX_ROWS)
    key = f"{bucket}x{inputs}x{outputs}{'t' if transposed else ''}"
    measuring = (lambda: _measure(bucket, inputs, outputs, transposed)) if measure else None
    known = _timings.get(_KERNEL, key, len(Costs._fields), measuring)
    if known is None:
        return None
    costs, scale = Costs(*known), max(rows / bucket, 1.0)
    products = {name: getattr(costs, name) * scale for name in ("plain", "packed", "streamed", "dots")}
    return costs._replace(**products)


def rows_measured(rows: int) -> int:
    """With how many rows products of at most `MAX_DOT_ROWS` are measured."""
    return rows if rows <= _EXACT_ROWS else -(-rows // 4) * 4


@torch.no_grad()
def _measure(rows: int, inputs: int, outputs: int, transposed: bool) -> Costs:
    some = min(outputs, max(MAX_BYTES // (4 * inputs), 1))
    # Whatever the user has made the default of new tensors.
    full = functools.partial(torch.full, dtype=torch.float32, device="cpu")
    x, bias = full((rows, inputs), 0.5), full((some,), 0.5)
    count = count_of_cold(4 * inputs * some, 16) if rows < _MANY_ROWS else 1
    weights = [full((inputs, some) if transposed else (some, inputs), 0.25) for _ in range(count)]

    def pack_rows(weight: Tensor) -> Tensor:
        return pack(weight.t() if transposed else weight)

    def plain(weight: Tensor) -> Tensor:
        return torch.addmm(bias, x, weight) if transposed else F.linear(x, weight, bias)

    # Neither of the others makes memory for its result in a recorded step.
    result = full((rows, some), 0.0)

    def into(operator: Callable[..., object]) -> Callable[[Tensor], object]:
        return lambda weight: operator(result, x, weight.t() if transposed else weight, bias)

    # With copies, or one would find in the cache what another has just read.
    copies = [weight.clone() for weight in weights]
    products: list[tuple[Callable[[Tensor], object], list[Tensor]]] = [
        (pack_rows, weights),
        (plain, weights),
        (lambda panels: packed_linear(x, panels, bias, some), [pack_rows(weight) for weight in weights]),
        (into(torch.ops.fastgen.folded_linear_out.default), copies),
    ]
    # In turn with the others: shares of torch's time from two measurements tell less than the products differ.
    if rows <= MAX_DOT_ROWS and _library.has_kernel("fastgen::dot_linear_out"):
        products.append((into(torch.ops.fastgen.dot_linear_out.default), [weight.clone() for weight in weights]))
    scale = outputs / some
    packing, plain_seconds, packed, *others = (time * scale for time in shortest_times(products))
    keeping = _seconds_of_new_memory(4 * inputs * some) * scale
    return Costs(plain_seconds, packed, packing, *others)._replace(keeping=keeping)


def _seconds_of_new_memory(size: int) -> float:
    """What writing to memory takes more when the system has just given it: it maps and clears each page then."""
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    rounds = []
    for _ in range(_ROUNDS):
        memory = torch.frombuffer(mmap.mmap(-1, size, **private), dtype=torch.float32)
        rounds.append([_seconds(Tensor.zero_, [memory], from_memory=False) for _ in range(2)])
    first, second = map(min, zip(*rounds, strict=True))
    return max(first - second, 0.0)


def shortest_times(products: list[tuple[Callable[[Tensor], object], list[Tensor]]]) -> list[float]:
    """Seconds that each product takes with one of its weights, which come from memory (`count_of_cold`).

    They run in turns, so that what else the machine does meets all of them.
    """
    rounds: list[list[float]] = []
    is_steady = False  # the shortest time of each is no accident
    while len(rounds) < _ROUNDS or (len(rounds) < _MAX_ROUNDS and not is_steady):
        rounds.append([_seconds(*product) for product in products])
        is_steady = all(sorted(times)[:2][-1] <= _STEADY * min(times) for times in zip(*rounds, strict=True))
    return [min(times) for times in zip(*rounds, strict=True)]


def count_of_cold(size: int, most: int) -> int:
    """How many weights of `size` bytes to measure with, so that they come from memory; `most` at the most."""
    can_evict = evict(torch.zeros(1, device="cpu"))
    return max(1, min(most, (_COLD_BYTES if can_evict else _COLD_BYTES_BY_TURNS) // size))


def evict(x: Tensor) -> bool:
    """Takes a tensor whose numbers lie next to each other out of the processor's caches. False if it cannot."""
    return is_available() and torch.ops.fastgen.evict.default(x)


def _seconds(product: Callable[[Tensor], object], weights: list[Tensor], from_memory: bool = True) -> float:
    for weight in weights if from_memory else ():
        evict(weight)
    start = time.perf_counter()
    for weight in weights:
        product(weight)
    return (time.perf_counter() - start) / len(weights)


_library.define("evict(Tensor x) -> bool")
# That of fastgen/ops/dot_linear.py, which is measured here beside the others; and several with the same x.
_library.define("dot_linear_out(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias) -> ()")
_library.define("dot_linears_out(Tensor(a!)[] out, Tensor x, Tensor[] weight, Tensor?[] bias) -> ()")
_library.define("pack_linear(Tensor weight) -> Tensor")
_library.define("packed_linear(Tensor x, Tensor packed, Tensor? bias, int outputs) -> Tensor")
_library.define("streamed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.define("streamed_linear_out(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias) -> ()")
# The same with sums in another order for some numbers of rows, which is faster.
_library.define("folded_linear_out(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias) -> ()")
_library.define("folded_linears_out(Tensor(a!)[] out, Tensor x, Tensor[] weight, Tensor?[] bias) -> ()")
# Several of them with the same x.
_library.define("streamed_linears_out(Tensor(a!)[] out, Tensor x, Tensor[] weight, Tensor?[] bias) -> ()")
