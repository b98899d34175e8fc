"""Which calls of `shared_prefix_attention` the kernel serves, and that the others work as they always did."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fastgen.ops import attention
from fastgen.ops.attention import shared_prefix_attention
from tests.ops.torch_attention import skipped_where_torch_fails

ROOT = Path(__file__).parents[2]
KERNEL_TYPES = [torch.float32, torch.float16, torch.bfloat16]


class TestWhatServes:
    """Which calls of `shared_prefix_attention` go to the kernel, and that the others work as they always did."""

    @pytest.fixture
    def served(self, monkeypatch):
        """The names of what has served."""
        names = []

        composed = attention.composed

        def record(*args):
            names.append("reference")
            return composed(*args)

        monkeypatch.setattr(attention, "composed", record)
        return names

    def test_a_decoding_step(self, served):
        query, prefix, suffix = torch.randn(8, 2, 1, 8), torch.randn(2, 2, 50, 8), torch.randn(8, 2, 3, 8)
        shared_prefix_attention(query, prefix, prefix, suffix, suffix)
        shared_prefix_attention(query, prefix, prefix)
        assert served == []

    @pytest.mark.parametrize("dtype", attention.MAX_ROWS)
    def test_many_queries(self, served, dtype, monkeypatch):
        monkeypatch.setattr(attention, "_converts_halves", lambda: True)
        prefix, own = torch.randn(2, 2, 50, 8, dtype=dtype), torch.randn(4, 2, 3, 8, dtype=dtype)
        for suffix, most in zip([None, own], attention.MAX_ROWS[dtype], strict=True):
            for queries, by in [(most // 4, []), (most // 4 + 1, ["reference"])]:
                served.clear()
                query = torch.randn(4, 4, queries, 8, dtype=dtype)
                with skipped_where_torch_fails(dtype):
                    shared_prefix_attention(query, prefix, prefix, suffix, suffix)
                assert served == by, (suffix is None, queries)

    def test_half_precision_without_instructions_for_it(self, served, monkeypatch):
        monkeypatch.setattr(attention, "_converts_halves", lambda: False)
        for dtype in KERNEL_TYPES:
            prefix = torch.randn(2, 2, 5, 8, dtype=dtype)
            shared_prefix_attention(torch.randn(4, 2, 1, 8, dtype=dtype), prefix, prefix)
        assert served == ["reference"] * 2

    def test_strides_that_the_kernel_does_not_take(self, served):
        query, prefix = torch.randn(4, 2, 1, 8), torch.randn(2, 2, 8, 5).transpose(-1, -2)
        shared_prefix_attention(query, prefix, prefix)
        assert served == ["reference"]

    def test_other_types(self, served):
        query, prefix = torch.randn(4, 2, 1, 8).double(), torch.randn(2, 2, 5, 8).double()
        assert shared_prefix_attention(query, prefix, prefix).dtype == torch.float64
        assert served == ["reference"]

    def test_gradients(self, served):
        query, prefix = torch.randn(4, 2, 1, 8, requires_grad=True), torch.randn(2, 2, 5, 8)
        shared_prefix_attention(query, prefix, prefix).sum().backward()
        assert query.grad is not None and query.grad.isfinite().all()
        with torch.no_grad():
            shared_prefix_attention(query, prefix, prefix)
        assert served == ["reference"]

    def test_autocast(self, served, monkeypatch):
        monkeypatch.setattr(attention, "_converts_halves", lambda: True)
        query, prefix = torch.randn(4, 2, 1, 8), torch.randn(2, 2, 5, 8)
        with torch.autocast("cpu", torch.bfloat16):
            assert shared_prefix_attention(query, prefix, prefix).dtype == torch.bfloat16
            half = query.bfloat16(), prefix.bfloat16(), prefix.bfloat16()
            assert shared_prefix_attention(*half).dtype == torch.bfloat16
            assert served == ["reference"]
            # Rotary embeddings leave keys in float32 where the values are not.
            for own in ((None, None), (query, half[0])):
                mixed = shared_prefix_attention(query, prefix, half[1], *own)
                assert mixed.dtype == torch.bfloat16
