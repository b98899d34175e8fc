"""Elementwise operators in one call: each to the last bit what torch's operator gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastgen.ops import elementwise
from tests.ops.instructions import instruction_set

pytestmark = pytest.mark.skipif(not elementwise.is_available(), reason="the extension was not built")

aten = torch.ops.aten
TYPES = [torch.float32, torch.bfloat16]
BINARY = [aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor]


def check(function: Any, args: list[Any]) -> None:
    expected = function(*args)
    out = torch.full_like(expected, torch.nan)
    found = elementwise.instructions(function, args, out)
    assert found is not None
    elementwise.bound(found)()
    bits = torch.int32 if out.dtype is torch.float32 else torch.int16
    assert torch.equal(out.isnan(), expected.isnan())
    # Which of two that are no numbers is passed on, processors decide.
    assert torch.equal(
        out.nan_to_num(7.0, torch.inf, -torch.inf).view(bits),
        expected.nan_to_num(7.0, torch.inf, -torch.inf).view(bits),
    )


def some(shape: list[int], dtype: torch.dtype, layout: str, generator: torch.Generator) -> Tensor:
    """[*shape] of random numbers, some of them special, not always next to each other."""
    wider = [2 * size + 1 for size in shape] if layout == "part" else shape
    numbers = torch.randn(wider, generator=generator).mul(10).to(dtype)
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 3e38, 1e-40]).to(dtype)
    numbers.view(-1)[:: max(numbers.numel() // 3, 1)] = special[torch.randint(7, (1,), generator=generator)]
    if layout == "part":
        return numbers[tuple(slice(1, None, 2) for _ in shape)]
    return numbers.t() if layout == "columns" and len(shape) == 2 and shape[0] == shape[1] else numbers


LAYOUTS = st.sampled_from(["whole", "part", "columns"])
SHAPES = st.builds(
    lambda outer, inner: [*outer, *inner],
    st.lists(st.integers(0, 4), max_size=3),
    st.lists(st.integers(0, 60), max_size=1),  # longer than a vector
)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", ["avx512", "avx2", "default"])
@given(shape=SHAPES, layouts=st.tuples(LAYOUTS, LAYOUTS), data=st.data(), seed=st.integers(0, 2**30))
def test_operators(
    name: str, dtype: torch.dtype, shape: list[int], layouts: tuple[str, str], data: Any, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    first = some(shape, dtype, layouts[0], generator)
    # Of the second, dimensions may be one, or be missing in front.
    missing = data.draw(st.integers(0, len(shape)))
    sizes = [data.draw(st.sampled_from([1, size])) for size in shape[missing:]]
    second = some(sizes, dtype, layouts[1], generator)
    with instruction_set(name):
        check(aten.neg.default, [first])
        for function in BINARY:
            check(function, [first, second])
            check(function, [second, first])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@given(shape=st.lists(st.integers(0, 5), min_size=1, max_size=4), data=st.data(), seed=st.integers(0, 2**30))
def test_concatenation(dtype: torch.dtype, shape: list[int], data: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    parts = []
    for size in data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4)):
        sizes = list(shape)
        sizes[dim] = size
        parts.append(some(sizes, dtype, data.draw(LAYOUTS), generator))
    check(aten.cat.default, [parts, dim])


def test_results_of_others() -> None:
    """A rotary position embedding: each operator reads what those before it have written."""
    x, cos, sin = torch.randn(2, 3, 1, 8), torch.randn(2, 1, 1, 8), torch.randn(2, 1, 1, 8)
    a, b, c, d, e = (torch.empty(2, 3, 1, size) for size in (8, 4, 8, 8, 8))
    steps = [
        (aten.mul.Tensor, [x, cos], a),
        (aten.neg.default, [x[..., 4:]], b),
        (aten.cat.default, [[b, x[..., :4]], -1], c),
        (aten.mul.Tensor, [c, sin], d),
        (aten.add.Tensor, [a, d], e),
    ]
    elementwise.bound([each for step in steps for each in elementwise.instructions(*step) or []])()
    expected = x * cos + torch.cat([-x[..., 4:], x[..., :4]], -1) * sin
    assert torch.equal(e, expected)


X = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("function", "args", "out"),
    [
        (aten.div.Tensor, [X, X], X),
        (aten.add.Scalar, [X, 2.0], X),
        (aten.add.Tensor, [X, 2.0], X),
        (aten.add.Tensor, [X, X.double()], X.double()),
        (aten.add.Tensor, [X, X.bfloat16()], X),
        (aten.add.Tensor, [X.bfloat16(), torch.zeros(())], X.bfloat16()),
        (aten.neg.default, [X.half()], X.half()),
        (aten.neg.default, [torch.zeros(2**14 + 1)], torch.zeros(2**14 + 1)),
        (aten.neg.default, [X.view([1] * 7 + [2, 3])], X.view([1] * 7 + [2, 3])),
        (aten.cat.default, [[X, X.double()]], torch.zeros(4, 3).double()),
        (aten.cat.default, [[torch.zeros(0), X]], X),
    ],
    ids=lambda value: "" if not callable(value) else str(value),
)
def test_what_is_left_to_torch(function: Any, args: list[Any], out: Tensor) -> None:
    assert elementwise.instructions(function, args, out) is None


SIZE, STRIDE, MEMORY, BEGIN = 3, 13, 11, 12  # where they are in an instruction: those of the result
SECOND = 31  # where its second operand begins


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, 5),
        (0, -1),
        (1, 8),
        (2, 9),
        (2, -1),
        (SIZE, 0),
        (SIZE, 4),
        (SIZE, 2**40),
        (MEMORY, 3),
        (MEMORY, -1),
        (BEGIN, -4),
        (BEGIN, 2),
        (BEGIN, 4),
        (BEGIN, 2**63 - 4),
        (SECOND + 1, 2**63 - 4),
        (STRIDE, -1),
        (STRIDE, 4),
        (STRIDE, 2**62),
        (SECOND, 7),
        (SECOND + 1, 24),
        (SECOND + 2, 2**61),
    ],
)
def test_memory_of_others_is_not_touched(place: int, value: int) -> None:
    """Whoever calls the operator itself with wrong numbers gets an error, and nothing has been written."""
    out, first, second = torch.zeros(2, 3), torch.ones(2, 3), torch.ones(2, 3)
    memory, code = elementwise.bound([elementwise.Instruction(2, out, first, second)]).args
    assert code.shape == (1, 41) and code[0, SIZE] == 2 and code[0, STRIDE] == 3 and code[0, SECOND] == 2
    code[0, place] = value
    with pytest.raises(RuntimeError, match="elementwise"):
        torch.ops.fastgen.elementwise(memory, code)
    assert not out.any()


@pytest.mark.parametrize("change", ["floats", "columns", "length", "int32", "part"])
def test_arguments_of_other_kinds(change: str) -> None:
    memory, code = elementwise.bound([elementwise.Instruction(2, torch.zeros(3), torch.ones(3), torch.ones(3))]).args
    if change == "floats":
        memory = [piece.view(torch.float32) for piece in memory]
    elif change == "columns":
        memory = [piece.view(3, 4).t() for piece in memory]
    else:
        code = {"length": code[:, 1:], "int32": code.int(), "part": code[0]}[change]
    with pytest.raises(RuntimeError, match="elementwise"):
        torch.ops.fastgen.elementwise(memory, code)
