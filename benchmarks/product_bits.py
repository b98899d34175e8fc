"""Digests of the outputs of linear layers' kernels, to compare two commits bit by bit.

    python -m benchmarks.product_bits > new.txt; diff old.txt new.txt

A line has the kernel with its weight format, threads, M (tokens), N (out_features), K (in_features), a digest of the
output, and its error against float64, which decides whether different bits are as good. Inputs come from a fixed seed.
`ATEN_CPU_CAPABILITY=avx2` in the environment chooses the instruction set; without it, AMX is also used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from fastgen.ops.linear import choose, copies
from fastgen.ops.linear.choose import KERNELS, SERVE, Layout

ROWS = (1, 2, 4, 8, 16, 33, 128)
# (N, K): of a small model, of GPT-2, and with tails that do not fill a vector.
SHAPES = ((64, 64), (768, 768), (576, 1536), (1001, 130), (50257, 64))
THREADS = (1, 2)
Product = Callable[[Tensor], Tensor]


def products(weight: Tensor, bias: Tensor) -> Iterator[tuple[str, Callable[[int], bool], Product]]:
    """Yields the kernels by name, whether they serve a number of rows, and each with its packed weight [N, K],
    float32.
    """
    k = weight.shape[1]
    for key, names in SERVE.items() if choose.is_available() else ():
        dtype, layout = key
        cast = weight.to(dtype)
        if layout is Layout.COLUMNS:
            cast = cast.t().contiguous().t()
        for name in names:
            if name not in KERNELS or layout is Layout.PANELS:
                continue
            serves = partial(choose.serves, name, key, isa=choose.instruction_set())
            multiply = KERNELS[name].multiply
            yield f"{name} {dtype} {layout.value}", serves, partial(_in_type, multiply, cast, bias.to(dtype))
    for dtype in (torch.bfloat16, torch.float16) if choose.is_available() else ():
        yield f"panels {dtype}", bool, partial(choose.linear, weight=copies.panels(weight.to(dtype)), bias=bias)
    for precision in ("bf16", "int8", "int4"):
        if choose.unavailable(precision) is None:
            kept = copies.pack(weight, precision, 32)
            yield precision, bool, partial(choose.linear, weight=kept, bias=bias)
    for bits in (4, 8) if k % 32 == 0 and choose.is_available() else ():
        groups = copies.rounded(weight, bits, 32)
        for floats in (False, True):
            name = f"{bits} bits in groups, {'float' if floats else 'int8'} activations"
            yield name, bool, partial(choose.linear, weight=groups, bias=bias, floats=floats)


def _in_type(product: Callable[..., Tensor], weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    return product(x.to(weight.dtype), weight, bias)


def lines() -> Iterator[str]:
    """Yields a line for each kernel that serves here."""
    for n, k in SHAPES:
        generator = torch.Generator().manual_seed(n * 7 + k)
        weight = torch.randn(n, k, generator=generator) / k**0.5
        bias = torch.randn(n, generator=generator)
        inputs = {rows: torch.randn(rows, k, generator=generator) for rows in ROWS}
        for name, serves, product in products(weight, bias):
            for threads in THREADS:
                torch.set_num_threads(threads)
                for rows, x in inputs.items():
                    if serves(rows):
                        found = product(x)
                        exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
                        error = float((found.double() - exact).abs().max())
                        digest = hashlib.sha256(found.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
                        yield f"{name} | {threads} threads | {rows} x {n} x {k} | {digest[:16]} | {error:.3g}"


if __name__ == "__main__":
    for line in lines():
        print(line, flush=True)
