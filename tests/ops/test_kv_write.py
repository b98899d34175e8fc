"""Writing into the cache on the CPU: that position and nothing else."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings

from fastgen.ops import _library
from fastgen.ops import gpu as package
from fastgen.ops.kv_write import kv_write
from tests.ops.gpu.test_kv_write import PLAIN, cases, check

needs_kernel = pytest.mark.skipif(bool(_library.load("CPU")), reason="there are no kernels in this process")
CPU = torch.device("cpu")
LONG = PLAIN | {"position_type": torch.int64}


@needs_kernel
@given(case=cases)
@example(case=LONG | {"position": -1})
@example(case=LONG | {"position": 5})
@example(case=LONG | {"position": 2**40})
@example(case=LONG | {"position": [4, -1, 2**40, 0]})
@example(case=LONG | {"dims": (7, 3), "position": 0})
@example(case=LONG | {"dtype": torch.float64})
@settings(max_examples=25)
def test_kernel(case):
    check(torch.ops.fastgen.kv_write, case | {"position_type": torch.int64}, CPU)


@given(case=cases)
@example(case=LONG | {"dtype": torch.float64})
@settings(max_examples=25)
def test_without_a_gpu(case):
    """Positions of another type than the kernel's are written by torch."""
    with mock.patch.object(package, "available", lambda *tensors: False):
        check(kv_write, case, CPU)


@needs_kernel
def test_a_position_of_any_shape_and_one_source_for_all_rows():
    keys, cache = torch.randn(1, 2, 4).expand(3, 2, 4), torch.zeros(3, 2, 5, 4)
    torch.ops.fastgen.kv_write(keys, keys, cache, cache.clone(), torch.tensor([[2]]))
    assert cache[:, :, 2].equal(keys) and not cache[:, :, [0, 1, 3, 4]].any()
