"""Tests are skipped where torch's own attention fails, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.ops import torch_attention

ERROR = "pack_vnni2 is only supported when avx512 is supported"


@pytest.fixture
def without_packing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch with ATEN_CPU_CAPABILITY=avx2 on a processor with AMX for float16."""
    original = F.scaled_dot_product_attention

    def attention(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if query.dtype == torch.float16 and min(query.shape[2], key.shape[2]) >= 16:
            raise RuntimeError(f"{ERROR}\nException raised from somewhere")
        return original(query, key, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    torch_attention.failure.cache_clear()
    yield
    torch_attention.failure.cache_clear()


def attend(dtype: torch.dtype, queries: int = 64) -> None:
    x = torch.randn(1, 1, queries, 8, dtype=dtype)
    with torch_attention.skipped_where_torch_fails(dtype):
        F.scaled_dot_product_attention(x, x, x)


def test_torch_fails(without_packing: None) -> None:
    with pytest.raises(pytest.skip.Exception, match=f"torch.float16: {ERROR}$"):
        attend(torch.float16)


def test_torch_does_not_fail(without_packing: None) -> None:
    attend(torch.float32)
    attend(torch.bfloat16)
    attend(torch.float16, queries=8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_errors_are_not_skipped(without_packing: None, dtype: torch.dtype) -> None:
    with pytest.raises(RuntimeError, match="of our own"), torch_attention.skipped_where_torch_fails(dtype):
        raise RuntimeError("of our own")


def test_an_error_that_only_we_raise_is_not_skipped() -> None:
    """The same words, where torch itself can do it."""
    with pytest.raises(RuntimeError, match=ERROR), torch_attention.skipped_where_torch_fails(torch.float32):
        raise RuntimeError(ERROR)
