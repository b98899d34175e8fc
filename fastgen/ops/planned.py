"""Operators of a recorded program whose operands stay where they are: several that follow one another are one call.

Starting an operator from Python takes as long as a product of a small layer with one row, or longer. So what each is to
do is written down once, with the addresses of its operands (csrc/cpu/planned.h).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastgen.ops import _library, elementwise, grouped_linear

_ops = torch.ops.fastgen
Call = Callable[[], object]


class Planned(functools.partial[None]):
    """Calls that have become one.

    Attributes:
        calls: they hold the operands, whose memory must stay where it is.
    """

    calls: tuple[Call, ...]


def joined(calls: Sequence[Call]) -> list[Call]:
    """These calls, which are made one after the other, with fewer ones in the place of those that have a plan."""
    if not is_available():
        return list(calls)
    found: list[Call] = []
    for has_plan, some in itertools.groupby(calls, key=_has_plan):
        each = tuple(some)
        found += [_one(each)] if has_plan else each
    return found


@functools.cache
def is_available() -> bool:
    """Whether there are kernels in this process."""
    return all(_library.has_kernel(f"fastgen::{name}") for name in ("run_planned", "plan_grouped_linears"))


def _has_plan(call: Call) -> bool:
    return isinstance(call, functools.partial) and call.func in _PLANS and not call.keywords


def _one(calls: tuple[Any, ...]) -> Planned:
    plans = [_PLANS[call.func](*call.args) for call in calls]
    made = Planned(_ops.run_planned.default, torch.cat(plans))
    made.calls = calls
    return made


def _of_one_product(out: Tensor, x: Tensor, *operands: Any) -> Tensor:
    numbers, scales, zeros, minimums, order, bias, *sizes = operands
    parts = [numbers], [scales], [zeros], [minimums]
    return _ops.plan_grouped_linears.default([out], x, *parts, order, [bias], *sizes)


_PLANS: dict[Any, Callable[..., Tensor]] = {
    _ops.elementwise.default: _ops.plan_elementwise.default,
    _ops.grouped_linears_out.default: _ops.plan_grouped_linears.default,
    _ops.grouped_linear_out.default: _of_one_product,
}
assert elementwise and grouped_linear  # which define these
_library.define("run_planned(Tensor plans) -> ()")
