"""GEMM with upcast weights: its memory, and what is served.

What it has in common with other kernels is in test_kernels.py.
"""

from __future__ import annotations

import pytest
import torch

from fastgen.ops.linear import kernels
from fastgen.ops.linear.kernels import UPCAST

pytestmark = pytest.mark.skipif(not kernels.is_available(), reason="the extension was not built")


def test_takes_little_memory() -> None:
    """However large the weight and however many the rows: some lines and some rows of them."""
    x, weight = torch.zeros(5000, 256, dtype=torch.float16), torch.zeros(8192, 256, dtype=torch.float16)
    with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profile:
        UPCAST.multiply(x, weight, None)
    held = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    assert most <= 5000 * 8192 * 2 + 1024 * 256 * 4 + 1024 * 1024 * 4 + 2 * 2**20


def test_refuses_what_does_not_fit() -> None:
    x, weight, bias = (torch.zeros(shape, dtype=torch.float16) for shape in ((17, 4), (3, 4), (3,)))
    for given in (
        (x, torch.zeros(3, 5).half(), None), (x, torch.zeros(4, 3).half().t(), None), (x, weight[0], None),
        (x, weight, torch.zeros(4).half()), (x, weight, bias.double()), (x, weight.bfloat16(), None),
        (x.double(), weight, None),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="upcast_gemm"):
            UPCAST.multiply(*given)
