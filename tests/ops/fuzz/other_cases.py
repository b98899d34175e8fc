"""Elementwise operators, norms, fingerprints, approximate logits, command lists and the thread pool."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from fastgen.ops import approximate_logits, elementwise, rms_norm
from fastgen.ops.search_step import MASKED
from tests.ops.fuzz.cases import Case, maybe, of, rows_apart, size, untouched

_ops = torch.ops.fastgen
_aten = torch.ops.aten
_FLOATING = (torch.float32, torch.float32, torch.bfloat16, torch.float16)


@of("rms_norm_out")
def norm(rng: random.Random) -> Case:
    dtype, shape = rng.choice(_FLOATING), (*[size(rng, 8, 0) for _ in range(rng.randrange(3))], size(rng, 300))
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    offset, rounds = rng.choice((0.0, 1.0)), rng.random() < 0.5
    out = x if rng.random() < 0.2 else untouched(shape, dtype)  # in place
    return Case([out, x, weight, 1e-6, offset, rounds])


@of("sort_rows_out")
def sort_rows(rng: random.Random) -> Case:
    shape = size(rng, 4, 0), size(rng, 300, 0)
    x = torch.randn(shape).masked_fill_(torch.rand(shape) < rng.choice((0.0, 0.5, 1.0)), -torch.inf)
    return Case([untouched(shape), untouched(shape, torch.int64), x])


@of("top_p_")
def top_p(rng: random.Random) -> Case:
    shape = size(rng, 4), size(rng, 3000)
    shares = torch.rand((shape[0], 1) if rng.random() < 0.5 else (1,), dtype=torch.float64) * rng.choice((1.0, 2.0))
    return Case([torch.randn(shape), shares, -torch.inf, rng.randint(1, 3), rng.random() < 0.5])


@of("fingerprint")
def fingerprint(rng: random.Random) -> Case:
    x = torch.randint(0, 100, (size(rng, 8, 0), size(rng, 40, 0))).to(rng.choice((*_FLOATING, torch.int64, torch.bool)))
    return Case([x])


def _executed(rng: random.Random) -> tuple[Any, tuple[Any, ...], dict[str, Any], Tensor]:
    """A function of torch with arguments, and a tensor for its result, maybe with gaps."""
    dtype = rng.choice(_FLOATING)
    kind = rng.choice(("function", "function", "two", "two", "copy", "layer norm", "gelu", "cat"))
    shape = tuple(size(rng, 10) for _ in range(rng.randint(1, 4)))  # twice as many numbers are still executed

    def tensor() -> Tensor:
        x = torch.randn(shape).to(dtype)
        change = rng.randrange(4)
        if change == 0:
            return rows_apart(x, rng)
        if change == 1:
            return x.transpose(0, -1).contiguous().transpose(0, -1)
        # A row of equal numbers has a standard deviation of zero, so that its layer norm is what rounding leaves.
        expands = change == 2 and kind != "layer norm" and rng.random() < 0.5
        return x[..., :1].expand(shape) if expands else x

    out = rows_apart(untouched(shape, dtype), rng)
    if kind == "function":
        names = (_aten.neg.default, _aten.relu.default, _aten.silu.default, _aten.sigmoid.default, _aten.tanh.default)
        return rng.choice(names), (tensor(),), {}, out
    if kind == "two":
        other = 0.5 if rng.random() < 0.3 else tensor()
        return rng.choice((_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor)), (tensor(), other), {}, out
    if kind == "layer norm":
        weights = [maybe(rng, torch.randn(shape[-1]).to(dtype)) for _ in range(2)]
        return _aten.native_layer_norm.default, (tensor(), [shape[-1]], *weights, 1e-5), {}, out
    if kind == "gelu":
        return _aten.gelu.default, (tensor(),), {"approximate": rng.choice(("none", "tanh"))}, out
    if kind == "cat":
        return _aten.cat.default, ([tensor(), tensor()], -1), {}, untouched((*shape[:-1], 2 * shape[-1]), dtype)
    if rng.random() < 0.5:
        other = rng.choice((torch.int64, torch.bool, torch.int32))
        return _aten.clone.default, (torch.randint(0, 9, shape).to(other),), {}, untouched(shape, other)
    return _aten._to_copy.default, (tensor(),), {"dtype": dtype}, out


@of("elementwise")
def elementwise_(rng: random.Random) -> Case:
    calls = [_executed(rng) for _ in range(rng.choice((1, 1, 2, 3)))]
    found: list[Any] = []
    for function, args, options, out in calls:
        results = [out, None, None] if function is _aten.native_layer_norm.default else [out]
        made = elementwise.instructions(function, args, options, results)
        assert made is not None, function
        found += made
    memory, code = elementwise.bound(found).args
    return Case([memory, code])


@of("largest_output_out")
def largest(rng: random.Random) -> Case:
    rows, inputs, outputs = size(rng, 6), size(rng, 100), rng.choice((size(rng, 100), 600))
    x, weight = rows_apart(torch.randn(rows, inputs), rng), torch.randn(outputs, inputs)
    bias = maybe(rng, torch.randn(outputs))
    copy = approximate_logits.bounded_copy(weight)
    assert copy is not None
    estimates = torch.empty(rows, outputs)
    approximate_logits.logits_out(estimates, x, bias, copy)
    banned = torch.rand(rows, outputs) < rng.choice((0.0, 0.0, 0.9))
    estimates.masked_fill_(banned, -torch.inf)

    given = [
        untouched((rows,), torch.int64), maybe(rng, untouched((rows,), torch.bool)), estimates, x, weight, bias,
        copy.norms, copy.weight.group_size, 4 * 2.0**-24, MASKED, rng.choice((0.0, 1e-3)),
    ]  # fmt: skip
    return Case(given)


# ---- command lists and the thread pool: the state of the process


def _planned() -> tuple[Tensor, Tensor]:
    """What a plan that is open writes to, and what it will hold."""
    out, x, weight = torch.zeros(1, 4), torch.randn(1, 4), torch.ones(4)
    _ops.rms_norm_out(out, x, weight, 1e-6, 0.0, False)
    return out, rms_norm.reference(x, weight, 1e-6)


@of("open_plan")
def open_plan(rng: random.Random) -> Case:
    def check(args: list[Any], _: Any) -> None:
        out, wanted = _planned()
        assert not out.any()
        number = _ops.close_plan(1)
        _ops.run_plan(number)
        _ops.drop_plan(number)
        torch.testing.assert_close(out, wanted)

    return Case([], check)


@of("close_plan")
def close_plan(rng: random.Random) -> Case:
    _ops.open_plan()
    count = rng.randrange(4)
    for _ in range(count):
        _planned()
    expected = rng.choice((count, count, -1, count + 1))

    def check(args: list[Any], number: int) -> None:
        assert (number >= 0) == (expected == count)
        if number >= 0:
            _ops.run_plan(number)
            _ops.drop_plan(number)

    return Case([expected], check)


@of("run_plan", "drop_plan")
def run_plan(rng: random.Random, name: str) -> Case:
    _ops.open_plan()
    out, wanted = _planned()
    number = _ops.close_plan(1)

    def check(args: list[Any], _: Any) -> None:
        if name == "run_plan":
            torch.testing.assert_close(out, wanted)
        else:
            assert not out.any()
        _ops.drop_plan(number)

    return Case([number], check)


@of("take_team", "give_team_back")
def thread_pool(rng: random.Random, name: str) -> Case:
    _ops.give_team_back()
    threads = rng.choice((0, 1, 2, 3, 4))

    def check(args: list[Any], has_pool: Any) -> None:
        if name == "take_team":
            assert has_pool == (threads > 1)
            scores = torch.randn(64, 2000)
            tokens, is_near = torch.zeros(64, dtype=torch.int64), torch.zeros(64, dtype=torch.bool)
            _ops.top_two_out(tokens, is_near, scores, MASKED, 0.0)
            assert torch.equal(tokens, scores.argmax(dim=1))
            _ops.give_team_back()
        else:
            assert _ops.take_team(2)
            _ops.give_team_back()

    if name == "give_team_back" and threads > 1:
        assert _ops.take_team(threads)
    return Case([threads] if name == "take_team" else [], check)
