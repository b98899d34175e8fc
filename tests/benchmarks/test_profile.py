"""Seconds in operators, and the least that they could be."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.profile import OTHERS, Rates, profile, work_of
from fastgen.ops import attention
from fastgen.ops.linear import gemm, gemv, panels

# An operation a second, and as many bytes as one likes; and the other way round.
_BY_OPERATIONS, _BY_BYTES = Rates(1.0, float("inf")), Rates(float("inf"), 1.0)


@pytest.fixture(autouse=True)
def every_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.profile._MIN_SHARE", 0.0)


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


@pytest.mark.parametrize(
    ("run", "bytes_moved"),
    [
        (lambda: _x(3, 5) @ _x(5, 7), 4 * (15 + 35 + 21)),
        (lambda: torch.bmm(_x(2, 3, 5), _x(2, 5, 7)), 8 * (15 + 35 + 21)),
        (lambda: torch.addmm(_x(7), _x(3, 5), _x(5, 7)), 4 * (15 + 35 + 21)),
        (lambda: F.linear(_x(2, 3, 5), _x(7, 5), _x(7)), 4 * (30 + 35 + 42)),
    ],
)
def test_the_work_of_what_torch_counts(run, bytes_moved):
    with torch.no_grad():
        with FlopCounterMode(display=False) as counter:
            run()
        assert sum(profile(run, lambda: _BY_OPERATIONS).floor.values()) == counter.get_total_flops() > 0
        assert sum(profile(run, lambda: _BY_BYTES).floor.values()) == bytes_moved


def test_the_work_of_attention():
    query, keys = _x(2, 4, 3, 8), _x(2, 4, 9, 8)
    work = Rates(2 * 8 * 3 * 9 * (8 + 8), 4 * 8 * (3 * 8 + 9 * 8 + 9 * 8 + 3 * 8))
    for rates, seconds in ((_BY_OPERATIONS, work.operations), (_BY_BYTES, work.bytes)):
        found = profile(lambda: F.scaled_dot_product_attention(query, keys, keys), rates=lambda rates=rates: rates)
        assert found.floor == {"aten::_scaled_dot_product_flash_attention_for_cpu": seconds}


def test_the_work_of_the_operators():
    weight, x = torch.randn(96, 5), torch.randn(3, 5)
    y = torch.empty(3, 96)
    work = work_of("fastgen::gemm_out", [list(t.shape) for t in (y, x, weight)] + [[]])
    assert work == Rates(2 * 3 * 5 * 96, 4 * (15 + 5 * 96 + 3 * 96))
    if gemm.is_available():
        found = profile(lambda: gemm.gemm(x, weight, None), lambda: _BY_OPERATIONS)
        assert sum(found.floor.values()) == work.operations

    operators = [torch.ops.fastgen.gemm_out] if gemm.is_available() else []
    operators += [torch.ops.fastgen.gemv_out] if gemv.is_available() else []
    for operator in operators:
        found = profile(lambda operator=operator: operator(y, x, weight, None), lambda: _BY_OPERATIONS)
        assert sum(found.floor.values()) == work.operations

    # Two weights with the same rows, which are read once.
    others = (torch.empty(3, 7), torch.randn(7, 5))
    works = Rates(2 * 3 * 5 * (96 + 7), 4 * (15 + 5 * (96 + 7) + 3 * (96 + 7)))
    for name in ("gemm_batch_out", "gemv_batch_out") if gemm.is_available() else ():
        several = partial(getattr(torch.ops.fastgen, name), [y, others[0]], x, [weight, others[1]], [None, None])
        for rates, amount in ((_BY_OPERATIONS, works.operations), (_BY_BYTES, works.bytes)):
            assert profile(several, lambda rates=rates: rates).floor == {f"fastgen::{name}": amount}

    # The same with weights of 16 bits.
    narrow = works._replace(bytes=works.bytes - 2 * 5 * (96 + 7))
    if panels.is_available():
        packed = [panels.pack(of.bfloat16().contiguous()) for of in (weight, others[1])]
        several = partial(torch.ops.fastgen.panels_gemm_batch_out, [y, others[0]], x, packed, [None, None])
        for rates, amount in ((_BY_OPERATIONS, narrow.operations), (_BY_BYTES, narrow.bytes)):
            assert profile(several, lambda rates=rates: rates).floor == {"fastgen::panels_gemm_batch_out": amount}

    # Four beams of two inputs, four heads over two of K/V; nine positions that the beams share, and two of their own.
    query, prefix, suffix = _x(8, 4, 1, 16), _x(2, 2, 9, 16), _x(8, 2, 2, 16)
    run = lambda: attention.shared_prefix_attention(query, prefix, prefix, suffix, suffix)  # noqa: E731
    name = "fastgen::shared_prefix_attention"
    work = work_of(name, [list(t.shape) for t in (query, prefix, prefix, suffix, suffix)])
    assert work == Rates(2 * 8 * 4 * 9 * 32, 4 * (2 * 8 * 4 * 16 + 2 * 2 * 2 * 9 * 16))
    assert profile(run, lambda: _BY_BYTES).floor.get(name, work.bytes) == work.bytes


def test_calls_add_up_and_what_takes_longer_counts():
    small, large = (torch.randn(n, n) for n in (64, 512))

    def run():
        for _ in range(3):
            large @ large
        small @ small
        large.sum(dim=0).cumsum(0).cumsum(0)

    found = profile(run, lambda: Rates(2.0, 4.0))
    # Operations take n cubed seconds and bytes three n squared.
    assert found.floor == {"aten::mm": 3 * 512**3 + 64**3}
    assert found.seconds["aten::mm"] > 0 and OTHERS in found.seconds
    assert work_of("aten::add", [[3, 4], [3, 4]]) is None


def test_rates_of_this_machine():
    found = profile(lambda: torch.randn(64, 64) @ torch.randn(64, 64))
    assert all(0 < seconds < 1 for seconds in found.floor.values()) and found.floor
