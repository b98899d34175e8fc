"""Rounding to nearest and GPTQ, against their definitions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastgen.quantization import rounding as module
from fastgen.quantization.checkpoint import dequantized
from fastgen.quantization.rounding import Grid, Kind, best_grid, make_grid, output_error, round_to_nearest


def layer(outputs, inputs, samples=200, seed=0):
    """A weight, and a Hessian of inputs that depend on each other and are of different sizes; float64."""
    source = torch.Generator().manual_seed(seed)
    mixed = torch.randn(inputs, inputs, generator=source, dtype=torch.float64)
    sizes = torch.rand(inputs, generator=source, dtype=torch.float64) * 3
    x = torch.randn(samples, inputs, generator=source, dtype=torch.float64) @ mixed * sizes
    return torch.randn(outputs, inputs, generator=source, dtype=torch.float64), x.T @ x


def gptq(weight, hessian, grid, **options):
    return module.gptq(weight, grid, module.plan(hessian, **options))


def plain_rounding(value, scale, zero, bits):
    return min(max(round(value / scale + zero), 0), 2**bits - 1)  # Python rounds halves to even, as torch does


def obq(weight, hessian, grid, damping, order):
    """Optimal Brain Quantization of the columns in this order: the paper's equations (2) and (3), element by element.

    The inverse of the Hessian of what is left is brought up to date after each column, by Gaussian elimination.
    """
    inputs = weight.shape[1]
    inverse = torch.linalg.inv(hessian + damping * hessian.diagonal().mean() * torch.eye(inputs, dtype=torch.float64))
    values, numbers = weight.clone(), torch.zeros_like(weight, dtype=torch.uint8)
    left = list(order)
    for column in order:
        group = column // grid.group_size
        change = torch.zeros_like(values)
        for row in range(len(values)):
            scale = float(grid.scales[row, group])
            zero = 2 ** (grid.bits - 1) if grid.zeros is None else int(grid.zeros[row, group])
            number = plain_rounding(float(values[row, column]), scale, zero, grid.bits)
            numbers[row, column] = number
            lost = (values[row, column] - (number - zero) * scale) / inverse[column, column]
            change[row, left] = -lost * inverse[column, left]
        values += change
        left.remove(column)
        inverse = inverse - torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return numbers


CASES = [
    (4, 32, 8, True, 4), (3, 40, 8, False, 4), (5, 24, 24, True, 8), (1, 8, 8, False, 8), (2, 300, 4, True, 4),
    (2, 256, 128, False, 4),
]  # fmt: skip


@pytest.mark.parametrize(("outputs", "inputs", "group", "symmetric", "bits"), CASES)
def test_gptq_is_optimal_brain_quantization(outputs, inputs, group, symmetric, bits):
    weight, hessian = layer(outputs, inputs, samples=2 * inputs)
    grid = make_grid(weight, Kind(bits, group, symmetric, torch.float32))
    order = torch.argsort(hessian.diagonal(), descending=True).tolist()
    found = gptq(weight, hessian, grid, damping=0.01)
    assert torch.equal(found.qweight, obq(weight, hessian, grid, 0.01, order))
    assert (found.bits, found.group_size, found.order) == (bits, group, None)
    assert (found.zeros is None) == symmetric


def test_inputs_that_are_always_zero():
    weight, hessian = layer(4, 32)
    hessian[5] = hessian[:, 5] = hessian[31] = hessian[:, 31] = 0
    grid = make_grid(weight, Kind(4, 8))
    found = gptq(weight, hessian, grid)
    nearest = round_to_nearest(weight, grid)
    assert torch.equal(found.qweight[:, [5, 31]], nearest.qweight[:, [5, 31]])
    assert not torch.equal(found.qweight, nearest.qweight)
    nothing = torch.zeros(32, 32)
    assert torch.equal(gptq(weight, nothing, grid).qweight, nearest.qweight)
    assert output_error(weight, weight, nothing) == 0


def test_fewer_samples_than_inputs():
    weight, hessian = layer(4, 64, samples=3)
    grid = make_grid(weight, Kind(4, 16))
    found, nearest = (
        dequantized(w, torch.float64) for w in (gptq(weight, hessian, grid), round_to_nearest(weight, grid))
    )
    assert output_error(weight, found, hessian) < output_error(weight, nearest, hessian)
    # Not positive definite, as rounding errors may leave it: the damping grows until it is.
    indefinite = hessian - 1e-5 * hessian.diagonal().mean() * torch.eye(64)
    grown = gptq(weight, indefinite, grid, damping=1e-6)
    assert torch.equal(grown.qweight, gptq(weight, indefinite, grid, damping=1e-6 * 10 * 10).qweight)


def test_float32_and_half_weights():
    weight, hessian = layer(16, 64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        grid = make_grid(weight.to(dtype), Kind(4, 32))
        one = gptq(weight.to(dtype), hessian.float(), grid)
        other = gptq(weight.to(dtype).double(), hessian, grid)
        assert (one.qweight != other.qweight).float().mean() < 0.01  # ties in rounding


dtypes = st.sampled_from([torch.float16, torch.bfloat16])
kinds = st.builds(Kind, st.sampled_from([4, 8]), st.sampled_from([4, 8, 16]), st.booleans(), dtypes)


@given(kinds, st.integers(1, 5), st.integers(1, 3), st.integers(0, 10**6), st.sampled_from([1e-7, 1e-3, 1.0, 1e4]))
def test_a_weight_on_its_grid_is_near(kind, outputs, groups, seed, size):
    weight, _ = layer(outputs, groups * kind.group_size, seed=seed)
    weight *= size
    grid = make_grid(weight, kind)
    off = (dequantized(round_to_nearest(weight, grid), torch.float64) - weight).abs()
    # Half a step, and as much as the least or largest number lacks because the scale was rounded.
    steps = grid.scales.double().repeat_interleave(kind.group_size, 1)
    reach = 2**kind.bits * (torch.finfo(kind.scale_dtype).eps if size > 1e-6 else 1)
    assert bool((off <= steps * (0.5001 + reach)).all())


@given(kinds, st.integers(0, 10**6))
def test_the_best_grid_is_not_worse_than_the_one_that_covers_all(kind, seed):
    weight, hessian = layer(5, 2 * kind.group_size, seed=seed)
    importance = hessian.diagonal()

    def error(grid: Grid):
        return (
            ((dequantized(round_to_nearest(weight, grid), torch.float64) - weight).square() * importance)
            .view(5, 2, -1)
            .sum(2)
        )

    full, best = make_grid(weight, kind), best_grid(weight, kind, importance)
    assert bool((error(best) <= error(full) * (1 + 1e-5)).all())
    assert bool((error(best) < error(full)).any()) or kind.bits == 8


def test_zeros_and_constants():
    for symmetric in (True, False):
        for value in (0.0, 3.0, -3.0):
            weight = torch.full((2, 16), value)
            grid = make_grid(weight, Kind(4, 8, symmetric))
            assert torch.allclose(dequantized(round_to_nearest(weight, grid), torch.float32), weight, rtol=1e-3)


def test_what_cannot_be_on_a_grid():
    with pytest.raises(ValueError, match="10 in_features are not whole groups of 4"):
        make_grid(torch.zeros(2, 10), Kind(4, 4))
    with pytest.raises(ValueError, match="the Hessian has elements that are NaN"):
        module.plan(torch.full((2, 2), float("nan")))
    with pytest.raises(ValueError, match="NaN"):
        make_grid(torch.tensor([[1.0, float("nan")]]), Kind(4, 2))
