"""Runs the CUDA operators and the Triton kernels at odd sizes under compute-sanitizer; see tools/gpu_check.py.

Every tensor has exactly the size that the operator is told, so that an access beyond it leaves the allocation. Results
are compared with the reference, because a kernel that does nothing has no errors either.
"""

from __future__ import annotations

import random
import sys

import torch

from fastgen.ops import _library, attention, kv_write, no_repeat_ngram, rms_norm, search_step
from fastgen.ops import gpu as package
from fastgen.ops.linear import on_gpu, weights


def check_no_repeat_ngram(generator: random.Random, rounds: int) -> None:
    """Checks random rows, lengths and types, with and without a context."""
    for _ in range(rounds):
        rows, length = generator.choice([1, 3, 32, 129]), generator.choice([1, 2, 31, 257, 1025])
        vocabulary, n = generator.choice([1, 7, 1000]), generator.choice([1, 2, 3, 5, length, length + 1])
        score_type = generator.choice([torch.float32, torch.float16, torch.bfloat16])
        token_type = generator.choice([torch.int32, torch.int64])
        scores = torch.randn(rows, vocabulary, device="cuda", dtype=score_type)
        # Ids below and above the vocabulary: nothing may be written to them.
        tokens = torch.randint(-2, 5, (rows, length), device="cuda", dtype=token_type)
        lengths = torch.randint(-1, length + 2, (rows,), device="cuda")
        context = torch.randint(-2, 5, (1, generator.choice([1, 40])), device="cuda", dtype=token_type)
        for more in ({}, {"context": context}):
            wanted = no_repeat_ngram.reference(scores.clone(), tokens, lengths, n, **more)
            found = no_repeat_ngram.no_repeat_ngram_(scores.clone(), tokens, n, lengths, **more)
            if not torch.equal(found, wanted):
                raise SystemExit(f"memcheck: wrong result for {rows} x {length}, n = {n}, {score_type}, {token_type}")


def check_attention(device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Checks the KV cache and attention: in half precision with tensor cores and asynchronous loads, and in float32."""
    batch, per_input, heads, dim, prefix, suffix = 3, 3, 2, 80, 137, 7
    rows = batch * per_input

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    caches = [tensor(rows, heads, suffix, dim) for _ in range(4)]
    new, last = tensor(rows, heads, dim), torch.tensor([suffix - 1], device=device)
    kv_write.kv_write(new, new, *caches[:2], last)
    kv_write.reference(new, new, *caches[2:], last)
    same(caches[1][:, :, -1], caches[3][:, :, -1], "kv_write", 0.0)
    shared = tensor(batch, heads, prefix, dim)
    options = {
        "suffix_lengths": last + 1,
        "ancestry": torch.arange(rows, device=device).int().unsqueeze(1).repeat(1, suffix),
        "starts": torch.tensor([0, 5, prefix], device=device),
        "mask": tensor(1, heads, 1, prefix + suffix),
    }
    for splits in (1, 3):
        found = attention.decode_attention(new.unsqueeze(2), shared, shared, *caches[:2], **options, splits=splits)
        wanted = attention.reference(new.unsqueeze(2), shared, shared, *caches[:2], **options)
        same(found, wanted, f"decode_attention in {dtype}", tolerance)


def check_grouped_linear(device: str) -> None:
    """Checks GEMM and row reads of low-bit weights: unsplit and split, with several groups in a tile."""
    outputs = 67
    for bits, inputs, group_size, dtype in (
        (4, 1100, 64, torch.float16), (8, 1100, 64, torch.float16), (4, 77, 24, torch.float32),
    ):  # fmt: skip
        shape = outputs, -(-inputs // group_size)
        qweight = torch.randint(0, 2**bits, (outputs, inputs), device=device, dtype=torch.uint8)
        zeros = torch.randint(0, 2**bits, shape, device=device, dtype=torch.uint8)
        scales, mins = torch.rand(shape, device=device) * 0.01, torch.randn(shape, device=device) * 0.01
        x, bias = torch.randn(5, inputs, device=device, dtype=dtype), torch.randn(outputs, device=device, dtype=dtype)
        which = torch.tensor([0, outputs - 1, outputs, -1], device=device)
        for factors in ((zeros, None), (None, mins), (None, None)):
            weight = weights.pack(
                qweight, scales, *factors, bits=bits, group_size=group_size, layout=weights.Layout.ROWS
            )
            name = f"grouped_linear of {bits} bits"
            found = on_gpu.multiply(x, weight, bias)
            same(found, on_gpu.reference(x, weight, bias), name, 1e-4 if dtype is torch.float32 else 1e-2)
            lines, wanted = on_gpu.rows(weight, which, torch.float32), weights.unpacked(weight)
            values = weights.values(*wanted, bits, group_size)
            same(lines[:2], values[[0, outputs - 1]], f"lines of {bits} bits")
            if not lines[2:].isnan().all():
                raise SystemExit("memcheck: a line that is not there is no NaN")


def check_triton(device: str) -> None:
    """Checks each kernel once or twice, at sizes that do not fill a block."""
    check_attention(device, torch.float32, 1e-4)
    check_attention(device, torch.float16, 1e-2)
    batch, per_input = 3, 3
    rows = batch * per_input
    scores, running = torch.randn(rows, 4099, device=device), torch.randn(batch, per_input, device=device)
    found = search_step.best_continuations(scores, running, 2 * per_input).scores
    same(found, search_step.continuations_reference(scores, running, 2 * per_input).scores, "best_continuations")
    for width in (1000, 17001):
        x, weight = torch.randn(3, width, device=device), torch.randn(width, device=device)
        same(rms_norm.rms_norm(x, weight), rms_norm.reference(x, weight, 1e-6), "rms_norm")
    check_grouped_linear(device)


def same(found: torch.Tensor, wanted: torch.Tensor, name: str, tolerance: float = 1e-4) -> None:
    if not torch.allclose(found, wanted, rtol=tolerance, atol=tolerance):
        raise SystemExit(f"memcheck: wrong result of {name}")


def main() -> int:
    backend = _library.backend("fastgen::no_repeat_ngram_")
    if "CUDA (csrc)" not in backend:
        print(f"memcheck: no CUDA kernel to watch: {backend}")
        return 1
    rounds = 12
    check_no_repeat_ngram(random.Random(0), rounds)
    watched = "no_repeat_ngram"
    if package.available(torch.empty(0, device="cuda")):
        check_triton("cuda")
        watched += ", decode_attention, kv_write, best_continuations, rms_norm, grouped_linear"
    torch.cuda.synchronize()
    print(f"memcheck: {watched}: no error")
    return 0


if __name__ == "__main__":
    sys.exit(main())
