"""Linear ops of a mixture of experts: each row is multiplied as with the weight of its expert alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastgen.ops.linear import choose
from fastgen.ops.linear.choose import Isa, Layout
from fastgen.ops.linear.kernels import GEMM, GEMV
from tests.ops.instructions import each_set, instruction_set

pytestmark = pytest.mark.skipif(not choose.is_available(), reason="the extension was not built")

TYPES = [torch.float32, torch.bfloat16, torch.float16]
GEMV_ROWS = 5
# Rows of each expert: none at all, none at either end, a few, more than GEMV multiplies, and many.
COUNTS = [[0, 0, 0], [0, 3, 0], [1, 1, 1], [7, 0, 2, 40, 1], [0, 131, 5, 0], [2]]


def _ends(counts: list[int]) -> Tensor:
    return torch.tensor(counts).cumsum(0).int()


def _multiply(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    y = torch.full((x.shape[0], weight.shape[1]), torch.nan, dtype=x.dtype)
    torch.ops.fastgen.expert_linear_out(y, x, weight, ends, GEMV_ROWS)
    return y


@pytest.mark.parametrize("backend", each_set(None, "avx512", "avx2", "default"))
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_has_the_bits_of_each_experts_own_product(counts: list[int], dtype: torch.dtype, backend: str | None) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((sum(counts), 37), (len(counts), 19, 37))
    )
    wide = torch.cat((x, x), dim=1)[:, 37:]  # rows with gaps
    for stored in (weight, weight.transpose(1, 2).contiguous().transpose(1, 2)):
        with instruction_set(backend):
            found = _multiply(x, stored, _ends(counts))
            assert torch.equal(_multiply(wide, stored, _ends(counts)), found)
            for rows, y, own in zip(x.split(counts), found.split(counts), stored, strict=True):
                if len(rows):
                    kernel = GEMV if len(rows) <= GEMV_ROWS else GEMM
                    assert torch.equal(y, kernel.multiply(rows, own, None))
        exact = torch.cat([a.double() @ b.double().t() for a, b in zip(x.split(counts), stored, strict=True)])
        torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_an_expanded_row(dtype: torch.dtype) -> None:
    """All experts then read rows at one address, and not as many."""
    x, weight = torch.randn(1, 64).to(dtype).expand(7, 64), torch.randn(3, 5, 64).to(dtype)
    assert torch.equal(_multiply(x, weight, _ends([1, 2, 4])), _multiply(x.clone(), weight, _ends([1, 2, 4])))


def test_rows_of_no_expert_are_zeros() -> None:
    x, weight = torch.randn(6, 8), torch.randn(2, 5, 8)
    found = _multiply(x, weight, _ends([1, 3]))
    assert torch.equal(found[4:], torch.zeros(2, 5)) and found[:4].all()


@pytest.mark.parametrize(
    "changed",
    [
        {"ends": _ends([3, 4])}, {"ends": torch.tensor([4, 2]).int()}, {"ends": torch.tensor([-1, 2]).int()},
        {"ends": torch.tensor([1, 2])}, {"ends": _ends([1, 2, 3])}, {"weight": torch.randn(2, 5, 7)},
        {"weight": torch.randn(2, 5, 8).double()}, {"weight": torch.randn(2, 10, 16)[:, ::2, ::2]},
        {"x": torch.randn(6, 8).bfloat16()},
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(changed: dict[str, Tensor]) -> None:
    given = {"x": torch.randn(6, 8), "weight": torch.randn(2, 5, 8), "ends": _ends([2, 4])} | changed
    with pytest.raises(RuntimeError, match="expert_linear"):
        _multiply(**given)


def test_memory_that_is_read_is_not_written_to() -> None:
    weight, x = torch.randn(2, 8, 8), torch.randn(6, 8)
    with pytest.raises(RuntimeError, match="expert_linear"):
        torch.ops.fastgen.expert_linear_out(x, x, weight, _ends([2, 4]), GEMV_ROWS)


@pytest.mark.parametrize(
    ("isa", "dtype", "rows", "most"),
    [
        (Isa.PORTABLE, torch.float32, 1, None), (Isa.AVX2, torch.float64, 1, None),
        (Isa.AVX2, torch.float32, 1000, 8), (Isa.AVX2, torch.bfloat16, 1000, 24),
        (Isa.AVX512_BF16, torch.bfloat16, 64, 64), (Isa.AVX512_BF16, torch.bfloat16, 65, None),
        (Isa.AMX, torch.bfloat16, 16, 16), (Isa.AMX, torch.bfloat16, 17, None), (Isa.AMX, torch.float16, 1000, 16),
    ],
)  # fmt: skip
def test_torchs_products_stay_where_they_are_faster(
    isa: Isa, dtype: torch.dtype, rows: int, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "instruction_set", lambda: isa)
    assert choose.gemv_rows(dtype, Layout.ROWS, rows) == most


@pytest.mark.skipif(choose.instruction_set() is Isa.PORTABLE, reason="torch's products serve this instruction set")
@pytest.mark.parametrize(
    "changed",
    [
        {}, {"x": torch.ones(2, 3, 8)}, {"x": torch.ones(6, 8).double()}, {"weight": torch.ones(10, 8)},
        {"weight": torch.ones(2, 5, 9)}, {"weight": torch.ones(2, 10, 16)[:, ::2, ::2]}, {"ends": _ends([1, 2, 3])},
        {"ends": torch.tensor([2, 4])}, {"weight": torch.ones(2, 5, 8, device="meta")},
        {"weight": torch.ones(2, 5, 0), "x": torch.ones(6, 0)},
    ],
)  # fmt: skip
def test_what_is_served(changed: dict[str, Any]) -> None:
    given = {"x": torch.ones(6, 8), "weight": torch.ones(2, 5, 8), "ends": _ends([2, 4])} | changed
    assert choose.serves_experts(**given) == (not changed)
    if not changed:
        assert torch.equal(choose.expert_linear(**given)[:, 0], torch.tensor([8.0] * 6))
