"""Elementwise operators and norms in one call, against torch's operators: many of them to the last bit."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastgen.ops import elementwise, rms_norm
from tests.ops.instructions import each_set, instruction_set, threads

pytestmark = pytest.mark.skipif(not elementwise.is_available(), reason="the extension was not built")

aten = torch.ops.aten
TYPES = [torch.float32, torch.bfloat16, torch.float16]
BINARY = [aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor]
SETS = each_set("avx512", "avx2", "default")


def executed(function: Any, args: list[Any], like: Tensor, **options: Any) -> Tensor:
    """What the kernel writes to a tensor like that one, between other memory that it must leave as it is."""
    memory = torch.ones(like.untyped_storage().nbytes() // like.itemsize + 6).to(like.dtype)
    out = memory.as_strided(like.shape, like.stride(), 3)
    if function is rms_norm.OPERATOR:
        args = [out, *args[1:]]
    found = elementwise.instructions(function, args, options, [out])
    assert found is not None
    elementwise.bound(found)()
    assert memory[:3].all() and memory[-3:].all()
    return out


def check(function: Any, args: list[Any], **options: Any) -> None:
    expected = function(*args, **options)
    out = executed(function, args, expected, **options)
    if not out.is_floating_point():
        assert torch.equal(out, expected)
        return
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[out.itemsize]
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
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 3e38, 1e-40, 6e-8, 65519.0]).to(dtype)
    numbers.view(-1)[:: max(numbers.numel() // 3, 1)] = special[torch.randint(9, (1,), generator=generator)]
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
@pytest.mark.parametrize("name", SETS)
@settings(max_examples=20)
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
    number = data.draw(st.sampled_from([0.5, -3, 2.0**-14, 0.1] if dtype is torch.float32 else [0.5, -3, 2.0**-14]))
    with instruction_set(name):
        check(aten.neg.default, [first])
        check(aten.relu.default, [first])
        for exponent in (2, 3.0) if dtype is torch.float32 else (2.0,):
            check(aten.pow.Tensor_Scalar, [first, exponent])
        for other in TYPES:
            check(aten._to_copy.default, [first], dtype=other)
        for function in BINARY:
            check(function, [first, second])
            check(function, [second, first])
            check(function, [first, number])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@settings(max_examples=20)
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


@pytest.mark.parametrize("dtype", [*TYPES, torch.float64, torch.int64, torch.int32, torch.bool, torch.uint8], ids=str)
@pytest.mark.parametrize("layout", ["whole", "part", "columns"])
def test_copies(dtype: torch.dtype, layout: str) -> None:
    for shape in ([5, 5], [], [0, 3], [3, 1, 70]):
        x = some(shape, torch.float64, layout, torch.Generator().manual_seed(1)).nan_to_num(0.0, 99.0, 3.0).to(dtype)
        check(aten.clone.default, [x])
        check(aten.clone.default, [x], memory_format=torch.contiguous_format)


def test_a_copy_passes_every_number_on() -> None:
    for dtype, bits in ((torch.bfloat16, torch.int16), (torch.float16, torch.int16), (torch.float32, torch.int32)):
        x = torch.arange(-(2**15), 2**15).mul(2**16 if bits is torch.int32 else 1).to(bits)[:32767].view(dtype)
        assert torch.equal(executed(aten.clone.default, [x], x).view(bits), x.view(bits))


EPS = torch.finfo(torch.float32).eps
# Of a function: its options, what it is in float64, and its largest error as a share of the result, above -3 and below.
SMOOTH = {
    "silu": (aten.silu.default, {}, lambda x: x * torch.sigmoid(x), 2 * EPS, 2 * EPS),
    "sigmoid": (aten.sigmoid.default, {}, torch.sigmoid, 2 * EPS, 2 * EPS),
    "tanh": (aten.tanh.default, {}, torch.tanh, 2 * EPS, 2 * EPS),
    "gelu": (aten.gelu.default, {}, lambda x: x * torch.special.erfc(-x / 2**0.5) / 2, 1e-6, 2e-5),
    "gelu, tanh": (
        aten.gelu.default,
        {"approximate": "tanh"},
        lambda x: x * torch.sigmoid((8 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)),
        1e-6,
        2e-5,
    ),
}


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("which", SMOOTH)
def test_smooth_functions(which: str, name: str) -> None:
    """Against float64, over all of the range in which the result is more than the smallest numbers."""
    function, options, exact, near, far = SMOOTH[which]
    powers = torch.logspace(-37, 2.3, 8000, dtype=torch.float64).float()
    x = torch.cat([torch.linspace(-110, 110, 16001), powers, -powers])[torch.randperm(32001)]
    wanted = exact(x.double())
    with instruction_set(name):
        found = executed(function, [x], x, **options).double()
    bound = wanted.abs() * torch.where(x > -3, near, far)
    assert ((found - wanted).abs() <= bound.clamp(min=1e-36)).all()


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("which", SMOOTH)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_smooth_functions_of_special_numbers(which: str, dtype: torch.dtype, name: str) -> None:
    """What torch gives; in half precision what the exact result is rounded to, but for a few that are between two."""
    function, options, exact, *_ = SMOOTH[which]
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e30, -1e30, 1e-40, -1e-40]).to(dtype)
    x = torch.cat([special, torch.linspace(-9, 9, 500).to(dtype)])
    with instruction_set(name):
        found = executed(function, [x], x, **options)
    expected = function(special, **options)
    if which == "gelu":
        expected[special == torch.inf] = torch.inf  # for torch it is no number
    torch.testing.assert_close(found[:9], expected, equal_nan=True)
    # Of GELU, torch keeps the sign of zero on some processors only.
    zeros = exact(special[3:5].double()) if which == "gelu" else expected[3:5]
    assert torch.equal(found[3:5].signbit(), zeros.signbit())
    if dtype is not torch.float32:
        same = found[9:] == exact(x[9:].double()).to(dtype)
        assert same.float().mean() > 0.99
    stepped = torch.stack([x, x], 1)[:, 0]  # numbers that are not next to each other
    with instruction_set(name):
        assert torch.equal(executed(function, [stepped], x, **options).nan_to_num(7.0), found.nan_to_num(7.0))


ROWS = st.lists(st.integers(1, 3), max_size=3)
WIDTHS = st.sampled_from([1, 2, 15, 16, 17, 64, 255, 256, 257, 600])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", SETS)
@settings(max_examples=20)
@given(
    rows=ROWS,
    width=WIDTHS,
    layouts=st.tuples(LAYOUTS, LAYOUTS),
    mean=st.sampled_from([0.0, 30.0]),
    seed=st.integers(0, 99),
)
@example(rows=[1, 1], width=1, layouts=("whole", "whole"), mean=0.0, seed=1)
@example(rows=[3], width=600, layouts=("part", "part"), mean=30.0, seed=1)
def test_norms(
    name: str, dtype: torch.dtype, rows: list[int], width: int, layouts: tuple[str, str], mean: float, seed: int
) -> None:
    """As near to the norm in float64 as torch's: a few roundings of float32, and one of the type."""
    generator = torch.Generator().manual_seed(seed)
    x = some([*rows, width], torch.float32, layouts[0], generator).nan_to_num(1.0, 2.0, 3.0).clamp(-50, 50).add(mean)
    weight, bias = (
        some([width], torch.float32, layouts[1], generator).nan_to_num(1.0, 2.0, 3.0).clamp(-9, 9) for _ in "12"
    )
    x, weight, bias = (each.to(dtype) for each in (x, weight, bias))
    near = {"rtol": torch.finfo(dtype).eps * (2 if dtype is not torch.float32 else 8), "atol": 1e-5 * (1 + mean)}
    with instruction_set(name):
        for given_weight, given_bias in ((weight, bias), (weight, None), (None, None), (None, bias)):
            args = [x, [width], given_weight, given_bias, 1e-2]
            exact = F.layer_norm(*(a.double() if isinstance(a, Tensor) else a for a in args))
            found = executed(aten.native_layer_norm.default, args, torch.empty_like(x))
            torch.testing.assert_close(found, exact.to(dtype), **near)
        for offset, rounds_scaled in ((0.0, True), (1.0, False)):
            options = 1e-2, offset, rounds_scaled
            found = executed(rms_norm.OPERATOR, [None, x, weight, *options], torch.empty_like(x))
            alone = rms_norm.rms_norm(x, weight, 1e-2, offset=offset, rounds_scaled=rounds_scaled)
            assert torch.equal(found, alone)  # it is one function


X = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("function", "args", "out"),
    [
        (aten.div.Tensor, [X, X], X),
        (aten.add.Scalar, [X, 2.0], X),
        (aten.add.Tensor, [X.half(), 1 / 3], X.half()),
        (aten.mul.Tensor, [X.bfloat16(), 0.1], X.bfloat16()),
        (aten.pow.Tensor_Scalar, [X, 0.5], X),
        (aten.pow.Tensor_Scalar, [X, 4], X),
        (aten.pow.Tensor_Scalar, [X.half(), 3], X.half()),
        (aten.silu.default, [X.double()], X.double()),
        (aten._to_copy.default, [X], X.long()),
        (aten._to_copy.default, [X > 0], X),
        (aten.clone.default, [X.to(torch.complex128)], X.to(torch.complex128)),
        (aten.native_layer_norm.default, [X, [2, 3], None, None, 1e-5], X),
        (aten.native_layer_norm.default, [X.half(), [3], torch.ones(3), None, 1e-5], X.half()),
        (aten.native_layer_norm.default, [X[:, :0], [0], None, None, 1e-5], X[:, :0]),
        (rms_norm.OPERATOR, [X, X, torch.ones(3).half(), 1e-5, 0.0, False], X),
        (
            rms_norm.OPERATOR,
            [torch.zeros(2**14 + 1), torch.zeros(2**14 + 1), torch.ones(2**14 + 1), 1e-5, 0.0, True],
            None,
        ),
        (aten.add.Tensor, [X, X.double()], X.double()),
        (aten.add.Tensor, [X, X.bfloat16()], X),
        (aten.add.Tensor, [X.bfloat16(), torch.zeros(())], X.bfloat16()),
        (aten.neg.default, [X.double()], X.double()),
        (aten.neg.default, [torch.zeros(2**15)], torch.zeros(2**15)),
        (aten.neg.default, [X.view([1] * 7 + [2, 3])], X.view([1] * 7 + [2, 3])),
        (aten.cat.default, [[X, X.double()]], torch.zeros(4, 3).double()),
        (aten.cat.default, [[X, X.long()]], torch.zeros(4, 3)),
        (aten.cat.default, [[torch.zeros(0), X]], X),
    ],
    ids=lambda value: "" if not callable(value) else str(value),
)
def test_what_is_left_to_torch(function: Any, args: list[Any], out: Tensor) -> None:
    assert elementwise.instructions(function, args, {}, [out]) is None


def test_named_arguments_and_other_results() -> None:
    assert elementwise.instructions(aten.add.Tensor, [X, X], {"alpha": 2}, [X]) is None
    assert elementwise.instructions(aten.add.Tensor, [X, X], {"alpha": 1}, [X]) is not None
    norm = [X, [3], None, None, 1e-5]
    assert elementwise.instructions(aten.native_layer_norm.default, norm, {}, [X, None, None]) is not None
    assert elementwise.instructions(aten.native_layer_norm.default, norm, {}, [X, torch.zeros(2, 1), None]) is None
    assert elementwise.instructions(aten.native_layer_norm.default, norm, {}, [None, None, None]) is None


def added(out: Tensor) -> list[elementwise.Instruction]:
    return [elementwise.Instruction(2, out, (torch.ones(2, 3), torch.ones(2, 3)))]


def written(cache: Tensor) -> list[elementwise.Instruction]:
    new, caches = torch.ones(2, 3), [cache.view(1, 1, 2, 3), torch.zeros(1, 1, 2, 3)]
    arguments = [new[:1].view(1, 1, 3), new[1:].view(1, 1, 3), *caches, torch.zeros((), dtype=torch.int64)]
    return elementwise.instructions(torch.ops.fastgen.kv_write.default, arguments, {}, [])


# Where they are in an instruction: those of the result, where its operands begin, and where its position is.
DIMS, SIZE, MEMORY, TYPE, BEGIN, STRIDE, SECOND, AT = 1, 2, 17, 18, 19, 20, 39, 13
WRONG = {
    added: [
        (0, 13), (0, -1), (TYPE, 6), (TYPE, -1), (TYPE, 3), (TYPE, 4), (DIMS, 9), (DIMS, -1), (SIZE, 0), (SIZE, 4),
        (SIZE, 2**40), (MEMORY, 3), (MEMORY, -1), (MEMORY, -2), (BEGIN, -4), (BEGIN, 2), (BEGIN, 4),
        (BEGIN, 2**63 - 4), (STRIDE, -1), (STRIDE, 4), (STRIDE, 2**62), (SECOND, 7), (SECOND, -2), (SECOND + 1, 6),
        (SECOND + 1, 5), (SECOND + 2, 24), (SECOND + 2, 2**63 - 4), (SECOND + 3, 2**61),
    ],
    written: [
        (AT, 9), (AT, -2), (AT + 1, -8), (AT + 1, 8), (AT + 1, 2**62), (AT + 2, -1), (AT + 2, 9), (AT + 2, 2**62),
        (AT + 3, 0), (AT + 3, 5), (AT + 3, 2**62),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("make", "place", "value"), [(make, *wrong) for make, several in WRONG.items() for wrong in several]
)
def test_memory_of_others_is_not_touched(make: Any, place: int, value: int) -> None:
    """Whoever calls the operator itself with wrong numbers gets an error, and nothing has been written."""
    out = torch.zeros(2, 3)
    memory, code = elementwise.bound(make(out)).args
    assert code.shape[1] == 61 and (make is added or code[0, AT + 2 : AT + 4].tolist() == [3, 2])
    assert make is written or (code[0, SIZE] == 2 and code[0, STRIDE] == 3 and code[0, SECOND] == 2)
    code[0, place] = value
    with pytest.raises(RuntimeError, match="elementwise"):
        torch.ops.fastgen.elementwise(memory, code)
    assert not out.any()


POSITIONS = st.integers(-1, 4) | st.sampled_from([-(2**62), 2**62, 2**63 - 1])


@pytest.mark.parametrize("of_each_row", [False, True])
@pytest.mark.parametrize("dtype", [*TYPES, torch.float64, torch.int8], ids=str)
@settings(max_examples=20)
@given(
    sizes=st.tuples(*[st.integers(1, 3)] * 4),
    places=st.lists(POSITIONS, min_size=3, max_size=3),
    seed=st.integers(0, 9),
)
def test_keys_and_values_are_written(
    dtype: torch.dtype, of_each_row: bool, sizes: tuple[int, ...], places: list[int], seed: int
) -> None:
    """Wherever the positions say when it is executed."""
    rows, heads, dim, capacity = sizes
    generator = torch.Generator().manual_seed(seed)
    # Neither the new ones nor the cache need lie next to each other.
    keys, values = (torch.randn(rows, dim, heads, generator=generator).mul(9).to(dtype).transpose(1, 2) for _ in "kv")
    memory = [torch.zeros(heads, rows, capacity + 2, dim + 1).to(dtype) for _ in "kv"]
    caches = [each.transpose(0, 1)[:, :, 1:-1, :dim] for each in memory]
    position = torch.zeros(2 * rows if of_each_row else 2, dtype=torch.int64)[1::2]
    found = elementwise.instructions(torch.ops.fastgen.kv_write.default, [keys, values, *caches, position], {}, [])
    assert (found is None) == (position.numel() > 1)
    # Where each row has a position of its own, the operator is left to itself.
    apart = [torch.stack([each, each], 2)[:, :, 0] for each in (keys, values)]  # it takes only dims next to each other
    write = functools.partial(torch.ops.fastgen.kv_write, *apart, *caches, position)
    execute, expected = write if found is None else elementwise.bound(found), [each.clone() for each in memory]
    for turn in range(3):
        position.copy_(torch.tensor((places[turn:] + places[:turn])[: len(position)]))
        execute()
        for row, at in enumerate(position.expand(rows).tolist()):
            for new, each in zip((keys, values), expected, strict=True):
                if 0 <= at < capacity:
                    each[:, row, at + 1, :dim] = new[row]
        assert all(torch.equal(a, b) for a, b in zip(memory, expected, strict=True))


# More numbers than one thread takes.
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("shape", [(1, 40000), (130, 300), (2, 3, 17000), (40000, 1)])
def test_any_size(shape: tuple[int, ...], number: int) -> None:
    x = torch.randn(shape)
    weight, bias = torch.randn(shape[-1]), torch.randn(shape[-1])
    apart = torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]
    with threads(number):
        norm = executed(aten.native_layer_norm.default, [x, shape[-1:], weight, bias, 1e-5], torch.empty_like(x))
        last = x[-1:].clone()
        alone = executed(aten.native_layer_norm.default, [last, shape[-1:], weight, bias, 1e-5], torch.empty_like(last))
        assert torch.equal(norm[-1:], alone)
        exact = F.layer_norm(x.double(), shape[-1:], weight.double(), bias.double())
        torch.testing.assert_close(norm.double(), exact, rtol=1e-4, atol=1e-5)
        for numbers in (x, apart):
            silu = executed(aten.silu.default, [numbers], torch.empty_like(numbers))
            torch.testing.assert_close(silu, F.silu(numbers), rtol=1e-6, atol=1e-6)
            gelu = executed(aten.gelu.default, [numbers], torch.empty_like(numbers), approximate="tanh")
            torch.testing.assert_close(gelu, F.gelu(numbers, approximate="tanh"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(0,), (2, 3), (40, 1000), (2, 20, 1000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gelu_with_tanh(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for x in (torch.randn(shape).to(dtype), torch.randn(shape).to(dtype).transpose(0, -1)):
        expected = F.gelu(x, approximate="tanh")
        found = elementwise.gelu_tanh(x)
        assert found.shape == x.shape and found.dtype is dtype and found is not x
        rounding = 1e-2 if dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(found, expected, rtol=rounding, atol=1e-6)
