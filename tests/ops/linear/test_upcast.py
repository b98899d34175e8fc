"""GEMM with upcast weights: its memory, and what is served.

What it has in common with other kernels is in test_kernels.py.
"""

from __future__ import annotations

import pytest
import torch

from fastgen.ops.linear import gemm, upcast

pytestmark = pytest.mark.skipif(not gemm.is_available(), reason="the extension was not built")


def test_takes_little_memory() -> None:
    """However large the weight and however many the rows: some lines and some rows of them."""
    x, weight = torch.zeros(5000, 256, dtype=torch.float16), torch.zeros(8192, 256, dtype=torch.float16)
    with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profile:
        upcast.upcast_gemm(x, weight, None)
    held = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    assert most <= 5000 * 8192 * 2 + 1024 * 256 * 4 + 1024 * 1024 * 4 + 2 * 2**20


@pytest.mark.parametrize(
    ("x", "weight", "bias"),
    [
        (torch.zeros(17, 4), torch.zeros(3, 5), None),
        (torch.zeros(17, 4), torch.zeros(4, 3).t(), None),
        (torch.zeros(17, 4), torch.zeros(4), None),
        (torch.zeros(17, 4), torch.zeros(3, 4), torch.zeros(4)),
        (torch.zeros(17, 4), torch.zeros(3, 4), torch.zeros(3).double()),
        (torch.zeros(17, 4), torch.zeros(3, 4).bfloat16(), None),
        (torch.zeros(17, 4).double(), torch.zeros(3, 4), None),
    ],
)
def test_refuses_what_does_not_fit(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    single = (torch.float32, torch.float16)
    x, weight, bias = (
        tensor.to(single[1]) if tensor is not None and tensor.dtype is single[0] else tensor
        for tensor in (x, weight, bias)
    )
    with pytest.raises(RuntimeError, match="upcast_gemm"):
        upcast.upcast_gemm(x, weight, bias)
