"""Runs the compiled CUDA operators over many shapes, for compute-sanitizer to watch; see tools/gpu_check.py.

Every tensor has the size that the operator is told, so that a step over an end of one leaves the allocation. The
results are compared with the reference: a kernel that does nothing has no errors either.
"""

from __future__ import annotations

import random
import sys

import torch

from fastgen.ops import no_repeat_ngram


def check_no_repeat_ngram(generator: random.Random, rounds: int) -> None:
    """Rows, lengths and types as they come, with and without a context."""
    for _ in range(rounds):
        rows, length = generator.choice([1, 3, 32, 129]), generator.choice([1, 2, 31, 257, 1025])
        vocabulary, n = generator.choice([1, 7, 1000]), generator.choice([1, 2, 3, 5, length, length + 1])
        score_type = generator.choice([torch.float32, torch.float16, torch.bfloat16])
        token_type = generator.choice([torch.int32, torch.int64])
        scores = torch.randn(rows, vocabulary, device="cuda", dtype=score_type)
        # Ids on both sides of what the vocabulary has: they must not be written to.
        tokens = torch.randint(-2, 5, (rows, length), device="cuda", dtype=token_type)
        lengths = torch.randint(-1, length + 2, (rows,), device="cuda")
        context = torch.randint(-2, 5, (1, generator.choice([1, 40])), device="cuda", dtype=token_type)
        for more in ({}, {"context": context}):
            wanted = no_repeat_ngram.reference(scores.clone(), tokens, lengths, n, **more)
            found = no_repeat_ngram.no_repeat_ngram_(scores.clone(), tokens, n, lengths, **more)
            if not torch.equal(found, wanted):
                raise SystemExit(f"memcheck: wrong result for {rows} x {length}, n = {n}, {score_type}, {token_type}")


def main() -> int:
    backend = no_repeat_ngram.backend()
    if "CUDA (csrc)" not in backend:
        print(f"memcheck: no CUDA kernel to watch: {backend}")
        return 1
    rounds = 12
    check_no_repeat_ngram(random.Random(0), rounds)
    torch.cuda.synchronize()
    print(f"memcheck: no_repeat_ngram on {2 * rounds} calls, no error")
    return 0


if __name__ == "__main__":
    sys.exit(main())
