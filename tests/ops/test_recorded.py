"""Operators in a recorded step: one call each, which reads what is in the buffers when it is replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgen.ops import _library, search_step
from fastgen.ops.search_step import EVERYTHING, top_p_
from tests.decoding.captured.replayed import Replayed

pytestmark = pytest.mark.skipif(bool(_library.load("CPU")), reason="there are no kernels in this process")
ops = torch.ops.fastgen


def _top_p(scores: Tensor, drawn: Tensor) -> Tensor:
    """Each row has a share of its own, or stays what it is."""
    shares = drawn.double().abs().clamp(max=1.0).masked_fill(drawn > 0.5, EVERYTHING)
    return top_p_(scores.clone(), shares, -torch.inf, 1)


def _best(scores: Tensor, running: Tensor) -> Any:
    return search_step.by_beam(scores, running, 8, normalise=True)


# Of each operator: a function that calls it, and the shapes of what it is given.
RECORDED: dict[Any, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    ops.best_candidates_out.default: (_best, ((8, 900), (2, 4))),
    ops.top_p_.default: (_top_p, ((3, 3000), (3, 1))),
    ops.sort_rows_out.default: (search_step.sort_rows, ((2, 3000),)),
    ops.top_two_out.default: (lambda scores: search_step.top_two(scores, 0.01), ((3, 40),)),
}


@pytest.mark.parametrize("operator", RECORDED, ids=str)
def test_recorded(operator: Any) -> None:
    function, shapes = RECORDED[operator]
    buffers, program = [torch.randn(shape) for shape in shapes], Replayed()
    function(*buffers)  # what is looked at once, as the order of torch's ties
    found = program.capture(lambda: function(*buffers))
    assert program.functions.count(operator) == 1
    for _ in range(3):
        for buffer in buffers:
            buffer.normal_()
        program.replay()
        torch.testing.assert_close(found, function(*buffers), rtol=0, atol=0)
