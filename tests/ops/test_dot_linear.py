"""Products as dot products with the lines of a weight, against float64, and what is measured of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fastgen.ops.linear import bf16x3, gemv
from tests.ops.instructions import instruction_set

pytestmark = pytest.mark.skipif(not gemv.is_available(), reason="the extension was not built")

# None: those that multiply pairs of bfloat16, where the machine has them. Of a set that it lacks, the next narrower one
# is used.
INSTRUCTION_SETS = [None, "avx512", "avx2", "default"]
TYPES = [torch.float32, torch.bfloat16, torch.float16]
# Rows of bfloat16 that are multiplied in AMX tiles, where sums have an order of their own.
IN_MATRICES = range(8, 17)
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11 + 1e-5}


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
@given(
    rows=st.integers(0, 18),
    inputs=st.integers(1, 90),
    outputs=st.integers(0, 70),
    biased=st.booleans(),
    transposed=st.booleans(),
    seed=st.integers(0, 2**30),
)
@example(rows=1, inputs=600, outputs=129, biased=True, transposed=False, seed=0)
@example(rows=7, inputs=64, outputs=1000, biased=False, transposed=True, seed=0)
@example(rows=3, inputs=45, outputs=1100, biased=True, transposed=True, seed=0)
# More rows and inputs than are taken at once.
@example(rows=18, inputs=1700, outputs=53, biased=True, transposed=False, seed=0)
@example(rows=13, inputs=1700, outputs=153, biased=True, transposed=False, seed=0)
def test_is_a_linear_layer(
    name: str | None,
    dtype: torch.dtype,
    rows: int,
    inputs: int,
    outputs: int,
    biased: bool,
    transposed: bool,
    seed: int,
) -> None:
    """With rows and lines of a weight that are not next to each other. Nothing else is written."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    x, weight = random(rows, inputs + 3)[:, :inputs], random(outputs, inputs + 2)[:, :inputs]
    if transposed and dtype is torch.float32:
        weight = random(inputs, outputs + 2)[:, :outputs].t()
    bias = random(outputs) if biased else None
    around = torch.full((rows + 2, outputs), torch.nan, dtype=dtype)
    with instruction_set(name):
        torch.ops.fastgen.dot_linear_out(around[1:-1], x, weight, bias)
    exact = x.double() @ weight.double().t() + (bias.double() if bias is not None else 0)
    # In half precision too, sums are in float32: what is rounded is the result.
    torch.testing.assert_close(around[1:-1].double(), exact, atol=2e-6 * (inputs + 1), rtol=ROUNDING[dtype])
    assert around[[0, -1]].isnan().all()


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
@pytest.mark.parametrize("rows", [1, 16, 17, 24, 25, 49])
def test_multiples_of_lines_are_added_in_parts(name: str | None, rows: int) -> None:
    """Parts of the outputs, the last of which is smaller, and rows that are multiplied after others."""
    generator = torch.Generator().manual_seed(rows)
    outputs = 1083 * torch.get_num_threads()  # which share them out
    x, lines = torch.randn(rows, 43, generator=generator), torch.randn(43, outputs, generator=generator)
    out, bias = torch.full((rows, outputs), torch.nan), torch.randn(outputs, generator=generator)
    alone = torch.full((1, outputs), torch.nan)
    with instruction_set(name):
        torch.ops.fastgen.dot_linear_out(out, x, lines.t(), bias)
        torch.ops.fastgen.dot_linear_out(alone, x[-1:], lines.t(), bias)
    torch.testing.assert_close(out.double(), x.double() @ lines.double() + bias, atol=1e-4, rtol=1e-5)
    assert torch.equal(out[-1:], alone)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("rows", [2, 11])
def test_what_is_no_number_stays_so(name: str | None, dtype: torch.dtype, odd: float, rows: int) -> None:
    x, weight = torch.ones(rows, 70, dtype=dtype), torch.ones(9, 70, dtype=dtype)
    x[1, 3] = weight[4, 69] = odd
    out = torch.zeros(rows, 9, dtype=dtype)
    with instruction_set(name):
        torch.ops.fastgen.dot_linear_out(out, x, weight, None)
    torch.testing.assert_close(out, x @ weight.t(), equal_nan=True)


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_every_number_of_float16(name: str | None) -> None:
    """Denormal numbers, infinities and NaN too, read from a weight and written as a result."""
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    for place in (0, 17, 34):  # the last of 35 inputs are in no vector
        x, weight = torch.zeros(2, 35, dtype=torch.float16), torch.zeros(2**16, 35, dtype=torch.float16)
        x[1, place], weight[:, place] = 1, numbers
        out = torch.zeros(2, 2**16, dtype=torch.float16)
        with instruction_set(name):
            torch.ops.fastgen.dot_linear_out(out, x, weight, None)
        torch.testing.assert_close(out[1], numbers, rtol=0, atol=0, equal_nan=True)
    bias, weight = numbers, torch.zeros_like(weight)
    with instruction_set(name):
        torch.ops.fastgen.dot_linear_out(out, x, weight, bias)
    torch.testing.assert_close(out[0], numbers, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("narrow", TYPES[1:], ids=str)
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
@given(
    rows=st.integers(0, 18),
    inputs=st.integers(1, 90),
    outputs=st.integers(0, 70),
    biased=st.booleans(),
    seed=st.integers(0, 2**30),
)
@example(rows=1, inputs=600, outputs=129, biased=True, seed=0)
@example(rows=16, inputs=1711, outputs=53, biased=True, seed=0)
@example(rows=18, inputs=3100, outputs=9, biased=False, seed=0)
def test_a_weight_in_16_bits_changes_no_bit(
    name: str | None, narrow: torch.dtype, rows: int, inputs: int, outputs: int, biased: bool, seed: int
) -> None:
    """The result is that of the same weight in float32, with rows and lines that are not next to each other."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs + 3, generator=generator)[:, :inputs]
    weight = torch.randn(outputs, inputs + 2, generator=generator).to(narrow)[:, :inputs]
    bias = torch.randn(outputs, generator=generator) if biased else None
    around, expected = torch.full((rows + 2, outputs), torch.nan), torch.zeros(rows, outputs)
    with instruction_set(name):
        torch.ops.fastgen.dot_linear_out(around[1:-1], x, weight, bias)
        torch.ops.fastgen.dot_linear_out(expected, x, weight.float(), bias)
    assert torch.equal(around[1:-1], expected)
    assert around[[0, -1]].isnan().all()


@pytest.mark.parametrize("narrow", TYPES[1:], ids=str)
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_every_number_of_a_weight_in_16_bits(name: str | None, narrow: torch.dtype) -> None:
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(narrow)
    for inputs in (1, 32):
        weight = torch.zeros(2**16, inputs, dtype=narrow)
        weight[:, 0] = numbers
        out = torch.zeros(1, 2**16)
        with instruction_set(name):
            torch.ops.fastgen.dot_linear_out(out, torch.ones(1, inputs), weight, None)
        torch.testing.assert_close(out[0], numbers.float(), rtol=0, atol=0, equal_nan=True)


def test_weights_of_several_types_with_one_input() -> None:
    """The bits of each alone."""
    x, weights = torch.randn(3, 33), [torch.randn(outputs, 33) for outputs in (50, 7, 0, 120)]
    weights = [weight.to(dtype) for weight, dtype in zip(weights, [*TYPES, TYPES[1]], strict=True)]
    results = [torch.zeros(3, weight.shape[0]) for weight in weights]
    torch.ops.fastgen.dot_linears_out(results, x, weights, [None] * 4)
    for result, weight in zip(results, weights, strict=True):
        assert torch.equal(result, gemv.gemv(x, weight.float(), None))


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_float16_is_rounded_once_to_the_nearest(name: str | None) -> None:
    """Sums of two numbers: ties, what is denormal, and what is too large."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-(2**15), 2**15, (2, 20000), generator=generator).to(torch.int16).view(torch.float16)
    numbers = numbers.where(numbers.isfinite(), 65504.0)
    numbers[1, ::2] = numbers[0, ::2] * 2**-11  # about half a unit in the last place, which is a tie
    for inputs in (2, 32):
        weight = torch.zeros(20000, inputs, dtype=torch.float16)
        weight[:, :2] = numbers.t()
        out = torch.zeros(1, 20000, dtype=torch.float16)
        with instruction_set(name):
            torch.ops.fastgen.dot_linear_out(out, torch.ones(1, inputs, dtype=torch.float16), weight, None)
        assert torch.equal(out[0], (numbers[0].float() + numbers[1].float()).half())


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_a_row_has_the_same_bits_whatever_the_number_of_rows(name: str | None, dtype: torch.dtype) -> None:
    x, lines = torch.randn(26, 1700).to(dtype), torch.randn(53, 1700).to(dtype)
    for weight in (lines, lines.t().contiguous().t())[: 2 if dtype is torch.float32 else 1]:
        with instruction_set(name):
            alone = torch.cat([gemv.gemv(row[None], weight, None) for row in x])
            found = {rows: gemv.gemv(x[:rows], weight, None) for rows in (2, 3, 5, 7, 8, 9, 12, 16, 24, 26)}
            for rows, some in found.items():
                if rows in IN_MATRICES and dtype is torch.bfloat16 and name is None and bf16x3.is_available():
                    torch.testing.assert_close(some, alone[:rows], rtol=2**-7, atol=1e-3)
                    assert torch.equal(some, found[16][:rows])
                else:
                    assert torch.equal(some, alone[:rows])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@given(rows=st.integers(0, 17), outputs=st.lists(st.integers(0, 120), max_size=4), seed=st.integers(0, 2**30))
def test_several_with_one_input(dtype: torch.dtype, rows: int, outputs: list[int], seed: int) -> None:
    """The bits of each alone, and nothing is written besides."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 33, generator=generator).to(dtype)
    weights = [torch.randn(each, 33, generator=generator).to(dtype) for each in outputs]
    biases = [weight[:, 0].contiguous() if each % 2 else None for each, weight in zip(outputs, weights, strict=True)]
    around = torch.full((sum(outputs) * rows + len(outputs) + 1,), torch.nan, dtype=dtype)
    results, end = [], 1
    for each in outputs:
        results.append(around[end : end + rows * each].view(rows, each))
        end += rows * each + 1
    torch.ops.fastgen.dot_linears_out(results, x, weights, biases)
    for result, weight, bias in zip(results, weights, biases, strict=True):
        assert torch.equal(result, gemv.gemv(x, weight, bias))
    assert around.isnan().sum() == len(outputs) + 1


def test_several_that_do_not_fit_together() -> None:
    x, weight = torch.rand(2, 4), torch.rand(3, 4)
    with pytest.raises(RuntimeError, match="as many"):
        torch.ops.fastgen.dot_linears_out([torch.zeros(2, 3)], x, [weight, weight], [None, None])
    with pytest.raises(RuntimeError, match="result"):
        torch.ops.fastgen.dot_linears_out([torch.zeros(2, 3), torch.zeros(2, 4)], x, [weight, weight], [None, None])
    with pytest.raises(RuntimeError, match="one way"):
        columns = weight.t().contiguous().t()
        torch.ops.fastgen.dot_linears_out([torch.zeros(2, 3) for _ in range(2)], x, [weight, columns], [None, None])


@pytest.mark.parametrize(
    "changes",
    [
        {"x": torch.zeros(2, 5)},
        {"x": torch.rand(2, 2, 4)},
        {"x": torch.zeros(2, 0), "weight": torch.zeros(3, 0)},
        {"x": torch.rand(4, 2).t()},
        {"x": torch.zeros(2, 4, dtype=torch.float16)},
        {"x": torch.zeros(2, 4, dtype=torch.bfloat16)},
        {name: torch.zeros(3, 4, dtype=torch.float64) for name in ("x", "weight")},
        {"weight": torch.zeros(6, 8)[::2, ::2]},
        {"weight": torch.zeros(4)},
        {"weight": torch.zeros(3, 4, dtype=torch.float64)},
        {"weight": torch.zeros(4, 3, dtype=torch.bfloat16).t()},
        {"weight": torch.zeros(3, 4, dtype=torch.bfloat16), "bias": torch.zeros(3, dtype=torch.bfloat16)},
        {"weight": torch.zeros(3, 4, dtype=torch.float16), "x": torch.zeros(2, 4, dtype=torch.bfloat16)},
        {"out": torch.zeros(2, 4)},
        {"out": torch.zeros(3, 2).t()},
        {"out": torch.zeros(2, 3).double()},
        {"bias": torch.zeros(4)},
        {"bias": torch.zeros(6)[::2]},
        {"bias": torch.zeros(3, dtype=torch.bfloat16)},
    ],
    ids=lambda changes: " ".join(f"{name} {list(x.shape)} {x.stride()} {x.dtype}" for name, x in changes.items()),
)
def test_refuses_what_it_does_not_take(changes: dict[str, torch.Tensor]) -> None:
    given = {"out": torch.zeros(2, 3), "x": torch.rand(2, 4), "weight": torch.rand(3, 4), "bias": torch.rand(3)}
    torch.ops.fastgen.dot_linear_out(**given)
    given |= changes
    with pytest.raises(RuntimeError, match="dot_linear"):
        torch.ops.fastgen.dot_linear_out(**given)
    given.pop("out")
    if gemv.serves(**given):
        torch.testing.assert_close(gemv.gemv(**given), torch.nn.functional.linear(**given))
    elif "out" not in changes:
        with pytest.raises(RuntimeError):
            gemv.gemv(**given)


@pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
def test_costs_are_measured_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def measure(*shape: object) -> gemv.Costs:
        measured.append(shape)
        return gemv.Costs(2.0, 1.0)

    measure_truly = gemv._measure
    monkeypatch.setattr(gemv, "_measure", measure)
    monkeypatch.setattr(_timings, "_known", {})
    monkeypatch.setattr(_timings, "_waits", dict)
    monkeypatch.setenv("FASTGEN_CACHE", "")
    for rows in (3, 4, 5, 8, 9, 16, 15):
        assert gemv.costs(rows, 16, 24, dtype, measure=False) == ((2.0, 1.0) if rows == 15 else None)
        assert gemv.costs(rows, 16, 24, dtype) == (2.0, 1.0)
    assert measured == [(rows, 16, 24, dtype) for rows in (3, 4, 5, 8, 9, 16)]
    assert all(seconds > 0 for seconds in measure_truly(2, 16, 24, dtype))
