"""The instruction set of the compiled operators."""

from __future__ import annotations

import pytest
import torch

from fastgen.ops import _library
from fastgen.ops.linear import choose, copies
from tests.ops.instructions import instruction_set

pytestmark = pytest.mark.skipif(bool(_library.load("CPU")), reason="there are no kernels in this process")


def test_it_is_chosen_once() -> None:
    """A weight that has been packed fits the products of this process, whatever becomes of the environment."""
    x, weight = torch.randn(3, 20), torch.randn(50, 20).bfloat16()
    with instruction_set("default"), pytest.MonkeyPatch.context() as patch:
        packed = copies.panels(weight)
        for other in ("avx512", "avx2", "default"):
            patch.setenv("ATEN_CPU_CAPABILITY", other)
            found = choose.linear(x, packed, None)
            torch.testing.assert_close(found, x @ weight.float().t(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["", "AVX2", "anything"])
def test_a_name_that_means_nothing_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    widths = []
    for given in (None, name):
        with instruction_set(given):
            widths.append(copies.panels(torch.zeros(1, 1).half()).qweight.shape[2])  # that of a panel, twice
    assert widths[0] == widths[1]
