"""What torch's own attention cannot do on some processors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F


@functools.cache
def failure(dtype: torch.dtype) -> str | None:
    """What torch's own attention raises for that type, or None.

    Where a processor has AMX, its fused kernel packs keys and values of half precision. In torch 2.13 that code is
    there for AVX-512 only, and raises when ATEN_CPU_CAPABILITY asks for less. 64 queries and keys are packed for
    every type and number of threads.
    """
    x = torch.zeros(1, 1, 64, 8, dtype=dtype)
    try:
        F.scaled_dot_product_attention(x, x, x)
    except RuntimeError as error:
        return _first_line(error)
    return None


@contextlib.contextmanager
def skipped_where_torch_fails(dtype: torch.dtype) -> Iterator[None]:
    """Skips the test where the block raises the very error that torch's own attention raises for that type."""
    try:
        yield
    except RuntimeError as error:
        if _first_line(error) == failure(dtype):
            pytest.skip(f"torch's own attention in {dtype}: {failure(dtype)}")
        raise


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]
