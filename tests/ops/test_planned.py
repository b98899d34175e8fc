"""Operators with a plan: what they do in one call is what they do one after the other."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgen.ops import elementwise, grouped_linear, planned
from fastgen.ops.elementwise import Instruction

pytestmark = pytest.mark.skipif(not planned.is_available(), reason="no kernels")
_ops = torch.ops.fastgen


def _product(x: Tensor, outputs: int, bias: Tensor | None) -> tuple[Tensor, partial[None]]:
    weight = grouped_linear.rounded(torch.randn(outputs, x.shape[1]), 8, 32)
    out = torch.full((x.shape[0], outputs), torch.nan)
    return out, partial(_ops.grouped_linear_out.default, out, x, *weight[:5], bias, 8, 32, False)


def _products(x: Tensor, outputs: tuple[int, ...]) -> tuple[list[Tensor], partial[None]]:
    weights = [grouped_linear.rounded(torch.randn(n, x.shape[1]), 8, 64, rotated=True) for n in outputs]
    results = [torch.full((x.shape[0], n), torch.nan) for n in outputs]
    parts = [list(part) for part in zip(*(weight[:4] for weight in weights), strict=True)]
    nothing = [None] * len(outputs)
    return results, partial(_ops.grouped_linears_out.default, results, x, *parts, None, nothing, 8, 64, True)


def _elementwise(kind: int, out: Tensor, *operands: Any) -> partial[None]:
    return elementwise.bound([Instruction(kind, out, operands)])


def _program(rows: int) -> tuple[Tensor, list[Tensor], list[Any]]:
    """Its input, its results, and its calls, with one between them that has no plan."""
    x, bias = torch.randn(rows, 96), torch.randn(33)
    first, product = _product(x, 33, bias)
    several, products = _products(x, (5, 64))
    summed, turned, logarithm = torch.zeros(rows, 33), torch.zeros(rows, 64), torch.zeros(rows, 64)
    add = _elementwise(elementwise._ADD, summed, first, first)
    silu = _elementwise(elementwise._SILU, turned, several[1])
    between = partial(torch.ops.aten.exp.out, turned, out=logarithm)
    negate = _elementwise(elementwise._NEGATE, several[0], several[0])
    return x, [first, *several, summed, turned, logarithm], [product, add, products, silu, between, negate]


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_they_do_the_same_in_fewer_calls(rows: int) -> None:
    x, results, calls = _program(rows)
    joined = planned.joined(calls)
    assert [isinstance(call, planned.Planned) for call in joined] == [True, False, True]
    for _ in range(2):
        x.normal_()
        for call in calls:
            call()
        expected = [each.clone() for each in results]
        for each in results:
            each.fill_(torch.nan)
        for call in joined:
            call()
        assert all(map(torch.equal, results, expected))


def test_the_position_that_is_written_is_read_each_time() -> None:
    several, x, position = torch.zeros(4, 7), torch.randn(7), torch.tensor(0)
    instruction = Instruction(elementwise._COPY, several[0], (x,), position=(position, 7, 4))
    (call,) = planned.joined([elementwise.bound([instruction])])
    for at in (2, 0, 3, -1, 4):
        position.fill_(at)
        several.fill_(-1.0)
        call()
        expected = torch.full((4, 7), -1.0)
        if 0 <= at < 4:
            expected[at] = x
        assert torch.equal(several, expected)


def test_memory_is_held() -> None:
    joined = planned.joined(_program(2)[2][:4])
    gc.collect()
    (only,) = joined
    only.calls[0].args[1].normal_()  # the input
    only()
    assert only.calls[0].args[0].isfinite().all()


def test_without_a_plan() -> None:
    """With arguments by name, and operators of torch."""
    x = torch.randn(3)
    calls = [partial(torch.ops.aten.neg.out, x, out=x), partial(_ops.elementwise.default, memory=[], code=x)]
    assert planned.joined(calls) == calls and planned.joined([]) == []


def test_what_does_not_fit_is_refused_when_it_is_planned() -> None:
    out, call = _product(torch.randn(2, 96), 33, None)
    for wrong in (out[:1], out.double(), out.t()):
        with pytest.raises(RuntimeError, match="grouped_linear"):
            planned.joined([partial(call.func, wrong, *call.args[1:])])
    with pytest.raises(RuntimeError, match="elementwise"):
        planned.joined([partial(_ops.elementwise.default, [], torch.zeros(3))])


@pytest.mark.parametrize("size", [0, 8, 24, 4000])
def test_what_is_no_plan(size: int) -> None:
    wrong = torch.zeros(size, dtype=torch.uint8)
    if size:
        with pytest.raises(RuntimeError, match="no plan"):
            _ops.run_planned.default(wrong)
    for other in (wrong.float(), torch.zeros(2, 2, dtype=torch.uint8)):
        with pytest.raises(RuntimeError, match="run_planned"):
            _ops.run_planned.default(other)
    _, call = _product(torch.randn(1, 32), 3, None)
    plan = planned.joined([call])[0].args[0]
    with pytest.raises(RuntimeError, match="no plan"):
        _ops.run_planned.default(plan[:-8])
