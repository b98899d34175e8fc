"""Products in half precision on a CPU without instructions for it: in float32, and rounded once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fastgen
from fastgen.decoding import layer_forms
from fastgen.ops.linear import choose
from fastgen.ops.linear import choose as of_operators
from fastgen.ops.linear.choose import Isa, upcast
from tests.noting import noted

pytestmark = pytest.mark.skipif(not choose.is_available(), reason="the extension was not built")

HALF = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def without_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    fastgen.enable()
    monkeypatch.setattr(choose, "instruction_set", lambda: Isa.AVX2)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    "product",
    [
        lambda a, b, c: torch.matmul(a, b), lambda a, b, c: a.matmul(b), lambda a, b, c: a @ b,
        lambda a, b, c: torch.matmul(a[:, None], other=b[:, None]),
        lambda a, b, c: torch.bmm(a, b), lambda a, b, c: a.bmm(mat2=b),
        lambda a, b, c: torch.baddbmm(c, a, b, alpha=0.5),
        lambda a, b, c: c.baddbmm(batch1=a, batch2=b, beta=3, alpha=2),
    ],
)  # fmt: skip
@torch.no_grad()
def test_is_the_float32_result_rounded_once(product: Callable[..., Tensor], dtype: torch.dtype) -> None:
    a, b, c = (torch.randn(shape).to(dtype) for shape in ((2, 5, 70), (2, 70, 3), (2, 1, 3)))
    with layer_forms.upcast_products(dtype):
        found = product(a, b, c)
    assert torch.equal(found, product(a.float(), b.float(), c.float()).to(dtype))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@torch.no_grad()
def test_a_few_matrices_at_a_time(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_operators, "_AT_ONCE", 1000)
    for leading in ((7,), (2, 3)):
        a, b = (torch.randn(*leading, *shape).to(dtype) for shape in ((5, 20), (4, 20)))
        b = b.transpose(-1, -2)
        with layer_forms.upcast_products(dtype):
            assert torch.equal(a @ b, (a.float() @ b.float()).to(dtype))


@torch.no_grad()
def test_results_that_are_given_are_written_to() -> None:
    a, b, out = (torch.randn(2, 4, 4).bfloat16() for _ in range(3))
    wanted = a.bmm(b)
    with layer_forms.upcast_products(torch.bfloat16):
        assert torch.bmm(a, b, out=out) is out and torch.equal(out, wanted)
        assert torch.baddbmm(a, a, b, out=out) is out
        with pytest.raises(TypeError):
            torch.matmul(1, 2)


@pytest.mark.parametrize(
    "what", ["a matrix", "a vector", "float32", "gradients", "disabled", "instructions", "a subclass", "never"]
)
def test_what_stays_torchs(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.float32 if what == "float32" else torch.bfloat16
    shapes = ((5, 700), (700, 3)) if what == "a matrix" else ((2, 5, 700), (2, 700, 1 if what == "a vector" else 3))
    a, b = (torch.randn(shape).to(dtype) for shape in shapes)
    if what == "a subclass":
        a = torch.nn.Parameter(a, requires_grad=False)
    if what == "disabled":
        fastgen.disable()
    if what == "instructions":
        monkeypatch.setattr(choose, "instruction_set", lambda: Isa.AVX512_BF16)
    if what == "never":
        fastgen.enable(packed_weights="never")
    upcast = noted(monkeypatch, layer_forms, "upcast")
    with torch.set_grad_enabled(what == "gradients"), layer_forms.upcast_products(torch.bfloat16):
        found = a @ b
    assert not upcast and torch.equal(found, a @ b)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("is_slow", [True, False])
def test_upcast_only_where_torch_is_slow(is_slow: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "instruction_set", lambda: Isa.AVX2 if is_slow else Isa.AMX)
    seen: list[torch.dtype] = []

    def product(a: Tensor, b: Tensor) -> Tensor:
        seen.append(a.dtype)
        return a @ b

    a, b = torch.randn(2, 5, 70).to(dtype), torch.randn(2, 70, 3).to(dtype)
    found = upcast(product, a, b)
    assert seen == [torch.float32 if is_slow else dtype] and found.dtype is dtype
    assert torch.equal(found, (a.float() @ b.float()).to(dtype) if is_slow else a @ b)
