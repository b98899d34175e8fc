"""Decode attention against ordinary attention in float64 on the repeated tensors, on every backend there is."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fastgen.ops import attention
from fastgen.ops.attention import (
    composed,
    on_cpu,
    reference,
)
from tests.ops.instructions import instruction_set

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
KERNEL_TYPES = [torch.float32, torch.float16, torch.bfloat16]


# ---- the operator: every instruction set that the kernel is compiled for, and the reference


def has_kernel() -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key("fastgen::decode_attention_out", "CPU")


@pytest.fixture(params=["avx512", "avx2", "default", "reference"], scope="session")
def operator(request):
    """The operator on one instruction set. Where the machine lacks it, the next narrower one is used instead."""
    if request.param == "reference":
        return reference
    if not has_kernel():
        pytest.skip(f"no CPU kernel in this process: {attention.backend()}")

    def kernel(*args, **kwargs):
        with instruction_set(request.param):
            return on_cpu(*args, **kwargs)

    return kernel


def expected(query, pk, pv, sk, sv, mask=None, scale=None, ancestry=None):
    """The definition, in float64, on the full tensors."""
    query, pk, pv, sk, sv = (x if x is None else x.double() for x in (query, pk, pv, sk, sv))
    rows, heads = query.shape[:2]

    def full(prefix, suffix):
        full = prefix.repeat_interleave(rows // prefix.shape[0], dim=0)
        if suffix is not None:
            if ancestry is not None:
                suffix = torch.stack([suffix[owners, :, range(suffix.shape[2])] for owners in ancestry.tolist()])
                suffix = suffix.transpose(1, 2)
            full = torch.cat([full, suffix], dim=2)
        return full.repeat_interleave(heads // prefix.shape[1], dim=1)

    keys, values = full(pk, sk), full(pv, sv)
    scores = query @ keys.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if mask is None:
        mask = torch.ones(scores.shape, dtype=torch.bool)
    mask = mask.expand(scores.shape)
    allowed = mask if mask.dtype == torch.bool else ~mask.isneginf()
    if mask.dtype != torch.bool:
        scores = scores + mask.double()
    weights = scores.masked_fill(~allowed, -math.inf).softmax(-1)
    return weights.masked_fill(~allowed.any(-1, keepdim=True), 0.0) @ values


def laid_out(layout: str, generator: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random [rows, heads, length, dim] as a view into memory that is NaN everywhere else."""
    rows, heads, length, dim = shape
    if layout == "contiguous":
        memory = view = torch.full(shape, math.nan, dtype=dtype)
    elif layout == "with capacity":
        memory = torch.full((rows, heads, length + 5, dim), math.nan, dtype=dtype)
        view = memory[:, :, :length]
    elif layout == "swapped":  # as projections come: positions before heads
        memory = torch.full((rows, length, heads, dim), math.nan, dtype=dtype)
        view = memory.transpose(1, 2)
    else:  # between others in every dimension
        memory = torch.full((rows + 2, 2 * heads + 1, length + 2, dim + 3), math.nan, dtype=dtype)
        view = memory[1 : rows + 1, 1 : 2 * heads + 1 : 2, 1 : length + 1, 2 : dim + 2]
    view.copy_(torch.randn(shape, generator=generator, dtype=torch.float64))
    return view


@st.composite
def problems(draw):
    """Arguments of the operator, of any shape, layout and mask."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from(KERNEL_TYPES))
    batch, per_input, kv_heads, group = (draw(st.integers(1, most)) for most in (3, 5, 3, 4))
    queries = draw(st.integers(1, 3))
    # Around the kernel's blocks of 64 positions, and the chunks of 256 and more that a prefix is divided into.
    prefix = draw(st.sampled_from([0, 1, 2, 3, 5, 17, 63, 64, 65, 127, 129, 200, 257, 530]))
    suffix = draw(st.sampled_from([None, 0, 1, 2, 3, 7, 16, 65]))
    dim = draw(st.sampled_from([1, 3, 8, 15, 16, 17, 32, 40, 64, 72, 80, 128, 256]))
    value_dim = draw(st.sampled_from([dim, 1, 5, 31, 32, 64, 80, 100]))
    rows, heads, length = batch * per_input, kv_heads * group, prefix + (suffix or 0)

    layouts = st.sampled_from(["contiguous", "with capacity", "swapped", "between others"])
    query = laid_out(draw(layouts), generator, dtype, rows, heads, queries, dim)
    parts = [laid_out(draw(layouts), generator, dtype, batch, kv_heads, prefix, dim)]
    parts.append(laid_out(draw(layouts), generator, dtype, batch, kv_heads, prefix, value_dim))
    if suffix is None:
        parts += [None, None]
    else:
        parts.append(laid_out(draw(layouts), generator, dtype, rows, kv_heads, suffix, dim))
        parts.append(laid_out(draw(layouts), generator, dtype, rows, kv_heads, suffix, value_dim))

    mask = None
    kind = draw(st.sampled_from(["none", "bool", "additive", "additive float32"]))
    if kind != "none":
        whole = (rows, heads, queries, length)
        shape = [size if draw(st.booleans()) else 1 for size in whole]
        shape = shape[draw(st.integers(0, 4)) :] if draw(st.booleans()) else shape
        chance = draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
        mask = torch.rand(shape, generator=generator) < chance
        if draw(st.booleans()) and shape and shape[-1] == length:
            mask[..., : length // 2] = False  # padding in front: whole blocks that nothing may attend to
        if kind != "bool":
            # Both ways in which libraries write a mask.
            lowest = draw(st.sampled_from([-math.inf, torch.finfo(torch.float32).min]))
            lowest = -math.inf if dtype == torch.float16 else lowest  # does not fit
            bias = torch.randn(shape, generator=generator).masked_fill_(~mask, lowest)
            mask = bias.to(dtype if kind == "additive" else torch.float32)
        if mask.dim() >= 2 and draw(st.booleans()):
            mask = mask.transpose(-1, -2).contiguous().transpose(-1, -2)
        if draw(st.booleans()):
            mask = mask.expand(whole)  # the same elements, seen through strides of zero
    ancestry = None
    if suffix and draw(st.booleans()):
        owner = torch.randint(0, per_input, (rows, suffix), generator=generator, dtype=torch.int32)
        ancestry = owner + (torch.arange(rows, dtype=torch.int32) // per_input * per_input).unsqueeze(1)
    scale = draw(st.sampled_from([None, 1.0, 0.3, 0.0]))
    return (query, *parts, mask, scale), {"ancestry": ancestry}


class TestOperator:
    @settings(max_examples=50)
    @given(problem=problems())
    def test_any_problem(self, operator, problem):
        args, kwargs = problem
        query, dtype = args[0], args[0].dtype
        wanted = expected(*args, **kwargs)
        unchanged = [x.clone() if isinstance(x, torch.Tensor) else None for x in args]
        result = operator(*args, **kwargs)
        assert result.dtype == dtype and result.shape == wanted.shape
        # The reference rounds scores and weights of half precision; the kernel only what it reads and writes.
        tolerance = TOLERANCE[dtype] * (3 if operator is reference and dtype.itemsize == 2 else 1)
        scale = max(1.0, float(query.shape[-1]) ** 0.5 * (args[6] or 0)) if dtype.itemsize == 2 else 1.0
        if operator is not reference or scale == 1.0:
            torch.testing.assert_close(result.double(), wanted, rtol=tolerance, atol=tolerance)
        for argument, old in zip(args, unchanged, strict=True):
            if old is not None:
                torch.testing.assert_close(argument, old, rtol=0, atol=0)

    @settings(max_examples=50)
    @given(problem=problems(), wide=st.booleans())
    def test_any_problem_in_operations_of_torch(self, problem, wide):
        """What hooks do where the kernel does not pay, in float64 too."""
        args, kwargs = problem
        assume(args[1].shape[2])
        if wide:
            args = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args]
        dtype, wanted = args[0].dtype, expected(*args, **kwargs)
        result = composed(*args, **kwargs)
        assert result.dtype == dtype and result.shape == wanted.shape
        # Scores of half precision are rounded, which decides where they are large.
        if dtype.itemsize > 2 or args[6] != 1.0:
            tolerance = TOLERANCE[dtype] * (3 if dtype.itemsize == 2 else 1)
            torch.testing.assert_close(result.double(), wanted, rtol=tolerance, atol=tolerance)

    @pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 1e2, 1e4, 1e18])
    def test_is_stable(self, operator, magnitude):
        """The largest score may come first, last, in the prefix or in the suffix, and be of any size."""
        torch.manual_seed(1)
        query, prefix, suffix = torch.randn(4, 2, 1, 8), torch.randn(2, 2, 600, 8), torch.randn(4, 2, 9, 8)
        values, own = torch.randn(2, 2, 600, 8), torch.randn(4, 2, 9, 8)
        keys = prefix * magnitude
        # Exact products, so that the rounding of large scores is no part of the comparison.
        query, keys, suffix = query.sign(), keys.sign() * magnitude, suffix.sign() * magnitude
        result = operator(query, keys, values, suffix, own, None, 1.0)
        torch.testing.assert_close(
            result.double(), expected(query, keys, values, suffix, own, None, 1.0), rtol=2e-5, atol=2e-5
        )
        assert result.isfinite().all()

    def test_weights_are_exact_to_a_few_units_in_the_last_place(self, operator):
        """Two positions with scores x and 0 give e^x / (e^x + 1) from values 1 and 0."""
        x = torch.cat([-torch.rand(4000) * 87.0, torch.linspace(-87, 0, 4000), torch.tensor([-0.0, -1e-30, -87.3])])
        query = x.view(-1, 1, 1, 1)
        pk, pv = torch.tensor([1.0, 0.0]).view(1, 1, 2, 1), torch.tensor([1.0, 0.0]).view(1, 1, 2, 1)
        result = operator(query, pk, pv, None, None, None, 1.0).flatten().double()
        wanted = x.double().exp() / (x.double().exp() + 1)
        assert float(((result - wanted) / wanted).abs().max()) < 4 * 2**-24
        far = operator(torch.tensor([-88.0, -1e3, -1e38]).view(-1, 1, 1, 1), pk, pv, None, None, None, 1.0)
        assert far.max() <= 1e-38

    def test_nan_and_infinity_are_those_of_softmax(self, operator):
        query, prefix, suffix = torch.ones(4, 1, 1, 4), torch.rand(2, 1, 70, 4), torch.rand(4, 1, 3, 4)
        for bad in (math.nan, math.inf, -math.inf):
            keys, own = prefix.clone(), suffix.clone()
            keys[1, :, 66] = bad
            own[1, :, 2] = bad
            result = operator(query, keys, prefix, own, suffix)
            wanted = expected(query, keys, prefix, own, suffix)
            torch.testing.assert_close(result.double(), wanted, rtol=2e-5, atol=2e-5, equal_nan=True)

    def test_positions_that_are_masked_for_all_are_not_read(self, operator):
        if operator is reference:
            pytest.skip("the reference multiplies by weights of zero")
        query, keys, values = torch.randn(4, 2, 1, 16), torch.randn(2, 2, 300, 16), torch.randn(2, 2, 300, 16)
        mask = torch.ones(4, 1, 1, 300, dtype=torch.bool)
        mask[:2, ..., :128] = False
        padded = keys.clone(), values.clone()
        for part in padded:
            part[0, :, :128] = math.nan
        assert torch.equal(operator(query, *padded, None, None, mask), operator(query, keys, values, None, None, mask))
