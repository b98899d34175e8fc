"""Which kernels a recorded program calls: linear operators, several with one input, and elementwise operators."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen import settings
from fastgen.ops.linear import choose
from tests.decoding.captured.replayed import Replayed

pytestmark = pytest.mark.skipif(not choose.is_available(), reason="the extension was not built")


def captured(function: Callable[[], Tensor]) -> tuple[int, Callable[[], Tensor]]:
    """How many products are FastGen's, and what replays."""
    recorded = Replayed()
    result = recorded.capture(function)
    own = {torch.ops.fastgen.gemm_out.default, torch.ops.fastgen.gemv_out.default}
    return sum(each in own for each in recorded.functions), lambda: recorded.replay() or result


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 2, 8, 9, 24, 25, 40])
def test_a_weight(rows: int, transposed: bool, biased: bool) -> None:
    """It is multiplied by the kernel of the table, and is seen when it changes in place."""
    x, weight, bias = torch.randn(rows, 24), torch.randn(70, 24), torch.randn(70) if biased else None
    stored = weight.t().contiguous() if transposed else weight

    def layer() -> Tensor:
        if transposed:
            return x @ stored if bias is None else torch.addmm(bias, x, stored)
        return F.linear(x, stored, bias)

    recorded = Replayed()
    result = recorded.capture(layer)
    kernel = choose.kernel_for(x, stored.t() if transposed else stored, bias)
    assert (kernel is None) == (rows == 0) and (kernel is None or kernel.out in recorded.functions)
    for _ in range(2):
        recorded.replay()
        torch.testing.assert_close(result, layer(), atol=1e-4, rtol=1e-5)
        for part in (x, stored, bias):
            if part is not None:
                part.normal_()


OTHERS: dict[str, Callable[..., Tensor]] = {
    "beta": lambda x, weight, bias: torch.addmm(bias, x, weight, beta=2),
    "alpha": lambda x, weight, bias: torch.addmm(bias, x, weight, alpha=3),
    "one bias": lambda x, weight, bias: torch.addmm(bias[:1], x, weight),
    "a matrix": lambda x, weight, bias: torch.addmm(bias.expand(4, 7), x, weight),
    "strides": lambda x, weight, bias: torch.addmm(torch.stack([bias, bias], 1)[:, 0], x, weight),
    "no inputs": lambda x, weight, bias: x[:, :0] @ weight[:0],
    "no outputs": lambda x, weight, bias: x @ weight[:, :0],
    "columns": lambda x, weight, bias: x.t().contiguous().t() @ weight,
    "double": lambda x, weight, bias: x.double() @ weight.double(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_products_are_torchs(name: str) -> None:
    x, weight, bias = torch.randn(4, 6), torch.randn(6, 7), torch.randn(7)
    count, replay = captured(partial(OTHERS[name], x, weight, bias))
    assert count == 0
    torch.testing.assert_close(replay(), OTHERS[name](x, weight, bias), atol=0, rtol=0)


def test_products_that_must_be_torchs() -> None:
    x, weight = torch.randn(4, 20), torch.randn(20, 30)
    assert captured(lambda: x @ weight)[0] == 1
    with settings.changed(packed_weights="never"):
        assert captured(lambda: x @ weight)[0] == 0


@pytest.mark.parametrize(
    ("dtype", "rows"), [(torch.float32, 1), (torch.float32, 5), (torch.bfloat16, 5), (torch.float32, 28)], ids=str
)
def test_products_with_one_input_are_one_call(dtype: torch.dtype, rows: int) -> None:
    """Q, K and V; also a gate and what it lets through, with an activation between them."""
    x, bias = torch.randn(rows, 24).to(dtype), torch.randn(70).to(dtype)
    weights = [torch.randn(outputs, 24).to(dtype) for outputs in (70, 30, 31, 90, 90)]

    def layer() -> Tensor:
        query, key, value = (F.linear(x, *given) for given in ((weights[0], bias), weights[1:2], weights[2:3]))
        y = query.flatten()[:24] + x
        gated = F.silu(F.linear(y, weights[3])) * F.linear(y, weights[4])
        return torch.cat([query, key, value, gated], dim=1)

    recorded = Replayed()
    result = recorded.capture(layer)
    kernel = choose.kernel_for(x, weights[0], bias)
    if kernel is None or kernel.several is None:
        pytest.skip("no kernel for several products on this instruction set")
    together = [call for call in recorded.calls(planned=False) if call.func is kernel.several]
    assert [len(call.args[0]) for call in together] == [3, 2]
    for _ in range(2):
        recorded.replay()
        tolerance = {"atol": 1e-3, "rtol": 1e-4} if dtype is torch.float32 else {}
        torch.testing.assert_close(result, layer(), **tolerance)
        x.normal_(), weights[4].normal_(), bias.normal_()


@pytest.mark.parametrize("between", ["input", "weight", "bias", "result", "another input", "far away"])
def test_products_that_stay_apart(between: str) -> None:
    x, weight = torch.randn(1, 24), torch.randn(24, 24)

    def steps() -> Tensor:
        x.copy_(x.roll(1, 1))
        first, other = F.linear(x, weight), weight
        if between in ("bias", "result"):  # what the first gives is the bias, or the weight, of the second
            return F.linear(x, weight, first.flatten()) if between == "bias" else F.linear(x, first)
        if between == "input":
            x.copy_(-x)
        elif between == "weight":
            other = first.new_ones(24, 24) * first[0]
        elif between == "far away":
            first = first.relu().relu().relu().relu()
        return first + F.linear(x[:, :] if between != "another input" else x + 1, other)

    recorded = Replayed()
    result = recorded.capture(steps)
    assert torch.ops.fastgen.gemv_batch_out.default not in recorded.functions
    before = x.clone()
    recorded.replay()
    x.copy_(before)
    torch.testing.assert_close(result, steps())


def test_products_of_one_call_share_no_memory() -> None:
    """Threads execute them at the same time: nothing that one reads or writes lies where another one writes."""
    x, weights = torch.randn(1, 24), [torch.randn(24, 24) for _ in range(3)]

    def steps() -> Tensor:
        results = [F.linear(x, weight) for weight in [weight * 2 for weight in weights]]
        return results[0] + results[1] + results[2]

    recorded = Replayed()
    recorded.capture(steps)
    (call,) = (call for call in recorded.calls(planned=False) if call.func is torch.ops.fastgen.gemv_batch_out.default)
    results, _, used, _ = call.args
    places = sorted((each.data_ptr(), each.numel() * each.itemsize) for each in (*results, *used))
    assert all(place + size <= after for (place, size), (after, _) in itertools.pairwise(places))


# ---- small operators that follow one another are one call, with the same bits


def counted(function: Callable[[], Tensor], inputs: list[Tensor]) -> list[int]:
    """How many operators each of the calls has; replays are compared."""
    recorded = Replayed()
    result = recorded.capture(function)
    for _ in range(3):
        assert recorded.replay() or torch.equal(result, function())
        for x in inputs:
            x.normal_()
    calls = [call for call in recorded.calls(planned=False) if call.func is torch.ops.fastgen.elementwise.default]
    return [len(call.args[1]) for call in calls]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_rotary_embedding(dtype: torch.dtype) -> None:
    x, cos, sin = (torch.randn(2, heads, 1, 8).to(dtype) for heads in (3, 1, 1))

    def rotated() -> Tensor:
        return x * cos + torch.cat([-x[..., 4:], x[..., :4]], -1) * sin

    assert counted(rotated, [x, cos, sin]) == [6]
    # Two, and what another operator makes of them, between two more.
    assert counted(lambda: rotated().exp() * cos - sin, [x]) == [6, 2]
    assert counted(lambda: (x * cos).exp() - x, [x]) == [1, 1]


def test_memory_that_is_used_again() -> None:
    x = torch.randn(50)

    def chain() -> Tensor:
        y = x
        for _ in range(9):
            y = torch.cat([(y * x)[:25], -(y + x)[25:]]) - x
        return y

    assert counted(chain, [x]) == [9 * 6]


def test_large_ones_are_torchs() -> None:
    x = torch.randn(2**16)
    assert counted(lambda: -(x * x), [x]) == []
