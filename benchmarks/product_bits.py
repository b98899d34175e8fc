"""Digests of what the kernels of linear layers return, so that two commits can be compared bit by bit.

    python -m benchmarks.product_bits FILE              # writes FILE
    python -m benchmarks.product_bits FILE --against OLD  # and says which results differ from those in OLD

A line has the kernel with its weight format, the instruction set, threads, M (tokens), N (out_features), K
(in_features), and a digest of the output. Inputs are drawn from a seed. Each instruction set runs in a process of its
own, under the name that torch gives it, and so does all that the processor has ("all": with AMX). `--against` also
reports how far the new result is from float64, which decides whether other bits are as good.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.machine import ROOT
from fastgen.ops import quantized_linear
from fastgen.ops.linear import bf16x3, gemm, gemv, grouped, panels, upcast

# None: all that the processor has, AMX among it, which torch's variable leaves out.
CAPABILITIES = ("default", "avx2", "avx512", None)
ROWS = (1, 2, 4, 8, 16, 33, 128)
# (N, K): of a small model, of GPT-2's, with tails that fill no vector.
SHAPES = ((64, 64), (768, 768), (576, 1536), (1001, 130), (50257, 64))
THREADS = (1, 2)
Product = Callable[[Tensor], Tensor]


def products(weight: Tensor, bias: Tensor) -> Iterator[tuple[str, Product]]:
    """Kernels by name, each with the weight, [N, K], float32, in its format; those that serve such a weight here."""
    n, k = weight.shape
    if gemm.is_available():
        yield "gemm f32", lambda x: gemm.gemm(x, weight, bias)
        columns = weight.t().contiguous().t()
        yield "gemm f32, columns", lambda x: gemm.gemm(x, columns, bias)
    for dtype, name in ((torch.float32, "f32"), (torch.bfloat16, "bf16"), (torch.float16, "f16")):
        cast, own = weight.to(dtype), bias.to(dtype)
        yield f"gemv {name}", _of(gemv.gemv, cast, own, most=gemv.MAX_ROWS[dtype])
        if dtype == torch.float32:
            continue
        yield f"upcast {name}", _of(upcast.upcast_gemm, cast, own, least=gemv.MAX_ROWS[dtype] + 1)
        if panels.is_available():
            packed = panels.pack(cast)
            yield f"panels {name}", lambda x, packed=packed: panels.panels_gemm(x, packed, bias, n)
    if bf16x3.is_available():
        yield "bf16x3", _of(bf16x3.bf16x3_gemm, weight, bias, least=bf16x3.MIN_ROWS)
    for precision in ("bf16", "int8", "int4"):
        if quantized_linear.unavailable(precision) is None:
            kept = quantized_linear.pack(weight, precision, 32)
            yield precision, lambda x, kept=kept: quantized_linear.quantized_linear(x, kept, bias)
    for bits in (4, 8):
        if k % 32 or not grouped.is_available():
            continue
        groups = grouped.rounded(weight, bits, 32)
        for floats in (False, True):
            name = f"{bits} bits in groups, {'float' if floats else 'int8'} activations"
            yield name, partial(grouped.grouped_linear, weight=groups, bias=bias, floats=floats)


def _of(
    product: Callable[..., Tensor], weight: Tensor, bias: Tensor, least: int = 1, most: float = math.inf
) -> Product:
    """The product for `least` to `most` rows, in the weight's type."""

    def run(x: Tensor) -> Tensor:
        if not least <= x.shape[0] <= most:
            raise NotImplementedError
        return product(x.to(weight.dtype), weight, bias)

    return run


def measured() -> Iterator[dict[str, object]]:
    """A line for each product of this process."""
    capability = torch.backends.cpu.get_cpu_capability() if os.environ.get("ATEN_CPU_CAPABILITY") else "all"
    for n, k in SHAPES:
        generator = torch.Generator().manual_seed(n * 7 + k)
        weight = torch.randn(n, k, generator=generator) / k**0.5
        bias = torch.randn(n, generator=generator)
        inputs = {rows: torch.randn(rows, k, generator=generator) for rows in ROWS}
        for name, product in products(weight, bias):
            for threads in THREADS:
                torch.set_num_threads(threads)
                for rows, x in inputs.items():
                    try:
                        found = product(x)
                    except NotImplementedError:
                        continue
                    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
                    error = float((found.double() - exact).abs().max())
                    digest = hashlib.sha256(found.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
                    key = f"{name} | {capability} | {threads} threads | M {rows} | N {n} | K {k}"
                    yield {"product": key, "digest": digest, "error": error}


def record(file: Path) -> dict[str, dict[str, object]]:
    """Runs each instruction set in its own process, and writes all lines."""
    lines: dict[str, dict[str, object]] = {}
    for capability in CAPABILITIES:
        environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability or "", "FASTGEN_CACHE": ""}
        if capability is None:
            del environment["ATEN_CPU_CAPABILITY"]
        command = [sys.executable, "-m", "benchmarks.product_bits", "--here"]
        done = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        lines |= {line["product"]: line for line in map(json.loads, done.stdout.splitlines())}
    file.write_text("".join(json.dumps(line) + "\n" for line in lines.values()))
    return lines


def differences(old: dict[str, dict[str, object]], new: dict[str, dict[str, object]]) -> Iterator[str]:
    """A sentence for each product whose bits are others, or that is in one of the two alone."""
    for key in sorted(old.keys() | new.keys()):
        if key not in new:
            yield f"gone: {key}"
        elif key not in old:
            yield f"new: {key}"
        elif old[key]["digest"] != new[key]["digest"]:
            yield f"other bits: {key}: {new[key]['error']:.3g} from float64, before {old[key]['error']:.3g}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.product_bits", description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path, nargs="?", help="is written")
    parser.add_argument("--against", type=Path, metavar="OLD", help="a file of another commit on this machine")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.here:
        for line in measured():
            print(json.dumps(line))
        return 0
    if given.file is None:
        parser.error("name the file to write")
    new = record(given.file)
    print(f"{len(new)} products in {given.file}")
    if given.against is None:
        return 0
    old = {line["product"]: line for line in map(json.loads, given.against.read_text().splitlines())}
    found = list(differences(old, new))
    print("\n".join(found) or "all have the same bits")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
