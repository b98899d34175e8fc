"""Weights of 4 to 8 bits in groups: their formats, how they are rounded and rotated, and products with them.

What they have in common with other kernels is in test_kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastgen.ops.linear import choose, copies, weights
from fastgen.ops.linear import on_gpu as in_rows
from fastgen.ops.linear.kernels import GEMM
from fastgen.ops.linear.weights import PackedWeight, SuperBlockScales
from tests.ops.instructions import each_set, instruction_set, needs_amx
from tests.ops.linear import dequantizing
from tests.quantization.definitions import by_definition, random_weight

pytestmark = pytest.mark.skipif(not choose.is_available(), reason="no kernels")

FORMS = ("middle", "zeros", "mins")


# None: with AMX tiles, where the processor has them.
@pytest.fixture(params=each_set(None, "avx512", "avx-vnni", "avx2", "default"), scope="session")
def vectors(request: pytest.FixtureRequest) -> str | None:
    return request.param


def _weight(
    outputs: int, inputs: int, bits: int, group_size: int, form: str, seed: int, ordered: bool = False, **size: Any
) -> tuple[PackedWeight, Tensor]:
    """A weight in groups, and what it stands for in float64, by the definition."""
    kind = {"symmetric": form != "zeros", "mins": form == "mins", "act_order": ordered}
    weight = random_weight(outputs, inputs, bits, group_size, **kind, **({"scale": 0.1} | size), seed=seed)
    packed = weights.pack(*weight[:4], bits=bits, group_size=group_size, order=weight.order)
    return packed, by_definition(weight)


@settings(max_examples=25)
@given(
    rows=st.integers(0, 70),
    inputs=st.integers(1, 600),
    outputs=st.integers(1, 140),
    bits=st.sampled_from([4, 5, 6, 8]),
    group_size=st.sampled_from([8, 16, 32, 64, 128, 256]),
    form=st.sampled_from(FORMS),
    ordered=st.booleans(),
    biased=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**30),
)
# Two tiles of rows that multiply different numbers of vectors; rows that are laid out in two parts.
@example(29, 513, 100, 4, 32, "mins", False, True, torch.float32, 0)
@example(15, 300, 33, 5, 32, "middle", False, False, torch.float32, 0)
@example(230, 40, 65, 6, 16, "zeros", True, True, torch.float32, 0)
def test_floats_have_the_bits_of_gemm(
    vectors, rows, inputs, outputs, bits, group_size, form, ordered, biased, dtype, seed
) -> None:
    """With rows that are not next to each other; nothing else is written."""
    group_size = max(group_size, {5: 32, 6: 16}.get(bits, 8))
    packed, _ = _weight(outputs, inputs, bits, group_size, form, seed, ordered)
    assert weights.keeps_floats(packed)
    meant = dequantizing.dequantized(packed._replace(order=None), torch.float32)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs + 3, generator=generator).to(dtype)[:, :inputs]
    bias = torch.randn(outputs, generator=generator).to(dtype) if biased else None
    around = torch.full((rows + 2, outputs), torch.nan, dtype=dtype)
    with instruction_set(vectors):
        arguments = *packed[:5], bias, bits, group_size, False, True
        torch.ops.fastgen.grouped_linear_out.default(around[1:-1], x, *arguments)
        columns = x.float() if packed.order is None else x.float()[:, packed.order]
        wide = None if bias is None else bias.float()
        expected = GEMM.multiply(columns, meant, wide).to(dtype)
    assert torch.equal(around[1:-1], expected) and around[[0, -1]].isnan().all()


def test_which_weights_take_floats() -> None:
    packed, _ = _weight(40, 96, 4, 32, "zeros", 2)
    assert weights.keeps_floats(packed)
    assert not weights.keeps_floats(packed._replace(rotated=True))
    assert not weights.keeps_floats(packed._replace(group_size=96))
    wide = packed._replace(scales=packed.scales.float() * 1.2345678)
    assert not weights.keeps_floats(wide) and weights.keeps_floats(wide._replace(zeros=None))
    with pytest.raises(RuntimeError, match="stay floats"):
        choose.linear(torch.randn(3, 96), packed._replace(group_size=96), floats=True)
    with pytest.raises(RuntimeError, match="stay floats"):
        rotated = copies.rounded(torch.randn(40, 96), 8, 32, rotated=True)
        choose.linear(torch.randn(3, 96), rotated, floats=True)


@pytest.mark.parametrize("rounded", [copies.rounded, in_rows.rounded], ids=["panels", "rows"])
@pytest.mark.parametrize("bits", [4, 8])
def test_rows_and_groups_of_zeros(bits: int, rounded: Callable[..., PackedWeight]) -> None:
    """They stay zeros, and no other row has other scales for them."""
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(0))
    weight[7], weight[9, 32:64] = 0.0, 0.0
    qweight, (scales, *_) = weights.unpacked(rounded(weight, bits, 32))
    others, (other_scales, *_) = weights.unpacked(rounded(weight[10:], bits, 32))
    assert scales is not None and other_scales is not None and scales.dtype is torch.float16
    assert torch.equal(qweight[10:], others) and torch.equal(scales[10:], other_scales)
    meant = (qweight.float() - 2 ** (bits - 1)) * scales.float().repeat_interleave(32, dim=1)
    assert not meant[7].any() and not meant[9, 32:64].any()
    step = scales.float().repeat_interleave(32, dim=1).abs()
    # With 4 bits, what has the other sign than the largest is cut off at 7 eighths of it.
    assert bool(((meant - weight).abs() <= step * (0.502 if bits == 8 else 1.002)).all())


def _rounded(x: Tensor, group_size: int, order: Tensor | None) -> Tensor:
    x = x.double() if order is None else x.double()[:, order]
    wide = F.pad(x, (0, -x.shape[1] % group_size)).unflatten(1, (-1, group_size))
    step = wide.abs().amax(dim=2, keepdim=True) / 127
    rounded = (torch.where(step > 0, wide / step, 0.0).round() * step).flatten(1)[:, : x.shape[1]]
    return rounded if order is None else rounded[:, order.argsort()]


@settings(max_examples=25)
@given(
    rows=st.integers(0, 50),
    inputs=st.integers(1, 300),
    outputs=st.integers(1, 100),
    bits=st.sampled_from([4, 5, 6, 8]),
    group_size=st.sampled_from([8, 24, 32, 40, 64, 96, 128]),
    form=st.sampled_from(FORMS),
    ordered=st.booleans(),
    tiny=st.booleans(),
    biased=st.booleans(),
    seed=st.integers(0, 2**30),
)
def test_is_a_linear_layer(vectors, rows, inputs, outputs, bits, group_size, form, ordered, tiny, biased, seed) -> None:
    group_size += -group_size % {5: 32, 6: 16}.get(bits, 8)
    # What float16 cannot hold stays float32.
    size = {"dtype": torch.float32, "scale": 1e-4} if tiny else {}
    packed, meant = _weight(outputs, inputs, bits, group_size, form, seed, ordered, **size)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=generator)
    bias = torch.randn(outputs, generator=generator) if biased else None
    y = torch.full((rows, outputs), torch.nan)
    with instruction_set(vectors):
        torch.ops.fastgen.grouped_linear_out.default(y, x, *packed[:5], bias, bits, group_size, False, False)
    assert y.shape == (rows, outputs) and y.dtype is torch.float32
    exact = _rounded(x, group_size, packed.order) @ meant.t() + (0.0 if bias is None else bias.double())
    # A number in the middle of two may be rounded to either; sums of groups are rounded to float32.
    size = x.double().abs() @ meant.abs().t() + 1.0
    assert ((y.double() - exact).abs() <= 1e-5 * size + _ties(x, group_size, packed.order) @ meant.abs().t()).all()
    # And that is what the page says of the product with x as it is.
    if ordered or not rows:
        return
    wide = F.pad(x.double(), (0, -inputs % group_size)).unflatten(1, (-1, group_size)).abs().amax(dim=2)
    weights = F.pad(meant.abs(), (0, -inputs % group_size)).unflatten(1, (-1, group_size)).sum(dim=2)
    added = 0.0 if bias is None else bias.double()
    assert ((y.double() - added - x.double() @ meant.t()).abs() <= wide @ weights.t() / 253 + 1e-5 * size).all()


@settings(max_examples=25)
@given(
    rows=st.integers(1, 40),
    inputs=st.integers(1, 300),
    outputs=st.integers(1, 70),
    bits=st.sampled_from([4, 8]),
    group_size=st.sampled_from([32, 64, 128]),
    ordered=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**30),
)
def test_rotated_groups(vectors, rows, inputs, outputs, bits, group_size, ordered, dtype, seed) -> None:
    """Weights and inputs times the same matrix: their product stays, and inputs are rounded after it."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator) * 0.1
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    order = torch.randperm(inputs, generator=generator) if ordered else None
    with instruction_set(vectors):
        packed = copies.rounded(weight, bits, group_size, rotated=True)._replace(order=order)
        y = choose.linear(x, packed)
    wide = x.double() if order is None else x.double()[:, order]
    turned = dequantizing.rotated(F.pad(wide, (0, -inputs % group_size)), group_size) / group_size
    numbers = weights.values(*weights.unpacked(packed), bits, group_size).double()
    exact = _rounded(turned, group_size, None) @ numbers.t()
    # Sums that are rounded to float32 may come to the other one of two numbers.
    size = turned.abs() @ numbers.abs().t() + 1.0
    most = 1e-5 * size + _ties(turned, group_size, None) @ numbers.abs().t()
    half = 0.0 if dtype is torch.float32 else 2.0**-8 * exact.abs()
    assert ((y.double() - exact).abs() <= most + half).all()


def _ties(x: Tensor, group_size: int, order: Tensor | None) -> Tensor:
    """The step where a number is about in the middle of two, and 0 elsewhere, [rows, inputs]."""
    x = x.double() if order is None else x.double()[:, order]
    wide = F.pad(x, (0, -x.shape[1] % group_size)).unflatten(1, (-1, group_size))
    step = (wide.abs().amax(dim=2, keepdim=True) / 127).clamp(min=1e-300)
    is_tie = ((wide / step).frac().abs() - 0.5).abs() < 1e-4
    found = (is_tie * step).flatten(1)[:, : x.shape[1]]
    return found if order is None else found[:, order.argsort()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bits", [4, 8])
def test_what_it_stands_for(bits: int, form: str, dtype: torch.dtype) -> None:
    packed, meant = _weight(70, 100, bits, 32, form, 3, ordered=form == "zeros")
    assert torch.equal(dequantizing.dequantized(packed, torch.float64).float(), meant.float())
    some = torch.tensor([69, 0, 33, 33])
    assert torch.equal(dequantizing.dequantized(packed, dtype, some), meant.float().to(dtype)[some])
    assert torch.equal(weights.rows(packed, some, dtype), meant.float().to(dtype)[some])
    for wrong in (-1, 70, 95):
        with pytest.raises(IndexError):
            weights.rows(packed, torch.tensor([3, wrong]), dtype)


@needs_amx
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bits", [4, 8])
def test_amx_gives_the_same_bits(bits: int, form: str) -> None:
    """Whichever of the two multiplies, by the number of rows."""
    for group_size in (32, 64, 96, 128):
        packed, _ = _weight(77, 300, bits, group_size, form, group_size, ordered=form == "middle")
        x = torch.randn(41, 300)
        x[3, 5], x[4] = torch.inf, 0.0
        y = choose.linear(x, packed)
        with instruction_set("avx512"):
            assert torch.equal(choose.linear(x, packed).nan_to_num(), y.nan_to_num())
        assert y[3].isnan().all() and y[[*range(3), *range(4, 41)]].isfinite().all()


# Groups of a block, and whether there are mins.
BLOCKS = [(8, True), (16, True), (16, False)]


def _multiples(
    outputs: int, groups: int, seed: int, per_block: int = 8, has_mins: bool = True
) -> tuple[SuperBlockScales, tuple[Tensor, Tensor | None]]:
    """SuperBlockScales, and the scales and mins that they are, by the definition."""
    generator = torch.Generator().manual_seed(seed)
    bytes_of = [torch.randint(0, 256, (outputs, groups), generator=generator, dtype=torch.uint8) for _ in range(2)]
    units = [(torch.randn(outputs, groups // per_block, generator=generator) * 1e-3).half() for _ in range(2)]
    meant = [torch.empty(outputs, groups) for _ in range(2)]
    for which in range(2):
        for group in range(groups):
            each = bytes_of[which][:, group].float() - (0 if has_mins else 128)
            meant[which][:, group] = units[which][:, group // per_block].float() * each
    if not has_mins:
        return SuperBlockScales(bytes_of[0], None, units[0], None), (meant[0], None)
    return SuperBlockScales(*bytes_of, *units), (meant[0], meant[1])


@settings(max_examples=25)
@given(
    rows=st.integers(0, 50),
    blocks=st.integers(1, 3),
    kind=st.sampled_from(BLOCKS),
    outputs=st.integers(1, 100),
    bits=st.sampled_from([4, 5, 6, 8]),
    group_size=st.sampled_from([8, 16, 32, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    biased=st.booleans(),
    floats=st.booleans(),
    seed=st.integers(0, 2**30),
)
def test_multiples_are_the_scales_that_they_stand_for(
    vectors, rows, blocks, kind, outputs, bits, group_size, dtype, biased, floats, seed
) -> None:
    generator = torch.Generator().manual_seed(seed)
    group_size = max(group_size, {5: 32, 6: 16}.get(bits, 8))
    per_block, has_mins = kind
    inputs = blocks * per_block * group_size
    qweight = torch.randint(0, 2**bits, (outputs, inputs), generator=generator, dtype=torch.uint8)
    super_blocks, (scales, mins) = _multiples(outputs, per_block * blocks, seed, *kind)
    packed = weights.pack_super_blocks(qweight, super_blocks, bits=bits, group_size=group_size)
    wide = weights.pack(qweight, scales, None, mins, bits=bits, group_size=group_size)
    found, (scales_back, zeros, mins_back) = weights.unpacked(packed)
    assert torch.equal(found, qweight) and torch.equal(scales_back, scales) and zeros is None
    assert (mins is None and mins_back is None) or torch.equal(mins_back, mins)
    assert torch.equal(dequantizing.dequantized(packed, dtype), dequantizing.dequantized(wide, dtype))
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator) if biased else None
    with instruction_set(vectors):
        ours, theirs = (choose.linear(x, each, bias, floats) for each in (packed, wide))
        assert torch.equal(ours, theirs)
    some = torch.randint(0, outputs, (rows,), generator=generator)
    assert torch.equal(weights.rows(packed, some, dtype), dequantizing.dequantized(packed, dtype)[some])
    # Bytes of each group and numbers of each block, and outputs in full panels.
    sizes = packed.qweight.nbytes + packed.scales.nbytes
    factors = (2 if has_mins else 1) * (8 + 16 / per_block)
    assert sizes * 8 == -(-outputs // 32) * 32 * inputs * (bits + factors / group_size)


def test_multiples_that_do_not_fit() -> None:
    qweight = torch.zeros(40, 256, dtype=torch.uint8)
    super_blocks, _ = _multiples(40, 8, 0)
    packed = weights.pack_super_blocks(qweight, super_blocks, bits=4, group_size=32)
    for wrong in (
        packed._replace(scales=packed.scales[:, :, :-1].contiguous()),
        packed._replace(zeros=packed.scales),
        packed._replace(scales=packed.scales.transpose(0, 2)),
    ):
        with pytest.raises(RuntimeError, match="not packed for this product"):
            choose.linear(torch.randn(3, 256), wrong)


@pytest.mark.parametrize(
    ("group_size", "rotated"), [(32, False), (32, True), (64, True), (96, False), (128, False), (128, True)]
)
def test_weights_and_inputs_are_rounded_alike(group_size: int, rotated: bool) -> None:
    """In registers and in loops over memory, whole groups and not, the same bits; also what cannot be rounded."""
    generator = torch.Generator().manual_seed(group_size)
    for inputs in (group_size, 3 * group_size - 5):
        x = torch.randn(60, inputs, generator=generator) * torch.logspace(-38, 30, 60).unsqueeze(1)
        x[3], x[4], x[5, 0], x[6, 7], x[7, 1] = 0.0, 1e-31, torch.inf, torch.nan, -torch.inf
        # Weights that are one input each: results say what the inputs are rounded to.
        eye, weight = torch.eye(inputs), torch.randn(70, inputs, generator=generator)
        packed, found = copies.rounded(eye, 8, group_size, rotated), []
        for name in (None, "avx512", "avx-vnni", "avx2"):
            with instruction_set(name):
                of_4, of_8 = (copies.rounded(weight, bits, group_size, rotated)[:2] for bits in (4, 8))
                found.append([choose.linear(x, packed).nan_to_num(nan=-77.0), *of_4, *of_8])
        for each in found[1:]:
            assert all(map(torch.equal, each, found[0]))
        is_nan = found[0][0] == -77.0
        assert is_nan[5:8].any(dim=1).all() and not found[0][0][3].any()
        assert inputs > group_size or not is_nan[[0, 1, 2, 3, 4, 8]].any()


@settings(max_examples=25)
@given(
    inputs=st.integers(1, 200),
    outputs=st.integers(1, 70),
    bits=st.sampled_from([4, 8]),
    group_size=st.sampled_from([32, 64, 128]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    layout=st.sampled_from(["rows", "columns"]),
    rotated=st.booleans(),
    seed=st.integers(0, 2**30),
)
def test_rounding_to_the_nearest(vectors, inputs, outputs, bits, group_size, dtype, layout, rotated, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (outputs, inputs) if layout == "rows" else (inputs, outputs)
    weight = (torch.randn(shape, generator=generator) * 0.1).to(dtype)
    weight = weight if layout == "rows" else weight.t()
    with instruction_set(vectors):
        packed = copies.rounded(weight, bits, group_size, rotated)
    # In the groups as they are rounded.
    meant = F.pad(weight.double(), (0, -inputs % group_size))
    result = weights.values(*weights.unpacked(packed), bits, group_size).double()
    if rotated:
        meant = dequantizing.rotated(meant, group_size)
        back = dequantizing.rotated(result, group_size)[:, :inputs] / group_size
        torch.testing.assert_close(dequantizing.dequantized(packed, torch.float64), back, rtol=1e-5, atol=1e-5)
    else:
        meant = meant[:, :inputs]
    groups = -(-inputs // group_size)
    step = packed.scales.transpose(1, 2).flatten(0, 1)[:outputs].double().abs().repeat_interleave(group_size, dim=1)
    # Half a step, or a whole one at the end of 4 bits, where there are seven numbers on one side and eight opposite.
    most = 0.502 if bits == 8 else 1.01
    assert groups * group_size == step.shape[1] and result.shape == meant.shape
    assert ((result - meant).abs() <= most * step[:, : meant.shape[1]] + (1e-6 if rotated else 1e-9)).all()


def test_the_compiler(bits: int = 4) -> None:
    """What torch.compile and torch.export ask for, without computing it. A number of rows is left open: read as a
    number, it would make the compiled function one for that number alone.
    """
    packed, scales = copies.rounded(torch.randn(70, 100), bits, 64), torch.full((70, 2), 0.1)
    rounded = torch.randn(70, 100)

    def use(weight: Tensor, x: Tensor, which: Tensor) -> tuple[Tensor, ...]:
        out = x.new_zeros(len(x), 70)
        torch.ops.fastgen.grouped_linear_out(out, x, *packed[:5], None, bits, 64, False, False)
        return (
            torch.ops.fastgen.group_extremes(weight, 64, True),
            torch.ops.fastgen.round_to_panels(rounded, scales, bits, 64, True),
            choose.linear(x, packed),
            out,
            torch.ops.fastgen.grouped_rows(x, which, packed.qweight, packed.scales, None, None, 70, 100, bits, 64),
        )

    compiled = torch.compile(use, fullgraph=True, backend="aot_eager")
    for rows, outputs, which in ((3, 40, [1, 69]), (5, 50, [1, 69, 2, 7])):
        tensors = torch.randn(outputs, 100), torch.randn(rows, 100), torch.tensor(which)
        for each in tensors:
            torch._dynamo.mark_dynamic(each, 0)  # what makes it one of this size alone is an error
        assert all(map(torch.equal, compiled(*tensors), use(*tensors)))


@pytest.mark.parametrize("rotated", [False, True])
def test_weights_of_nothing_and_of_no_numbers(rotated: bool) -> None:
    weight = torch.randn(40, 64)
    weight[3], weight[5, 40], weight[7, 3] = 0.0, torch.inf, torch.nan
    packed = copies.rounded(weight, 4, 32, rotated)
    y = choose.linear(torch.ones(2, 64), packed)
    assert (y[:, 3] == 0).all() and not y[:, [5, 7]].isfinite().any()
    assert y[:, [0, 1, 2, 4, 6, 8]].isfinite().all()


def test_what_does_not_fit_is_refused() -> None:
    packed, _ = _weight(40, 96, 4, 32, "middle", 2)
    x = torch.randn(3, 96)
    for wrong in (
        packed._replace(n=1000),
        packed._replace(bits=8),
        packed._replace(bits=5),
        packed._replace(group_size=64),
        packed._replace(order=torch.full((96,), 96)),
        packed._replace(group_size=96, rotated=True),
    ):
        with pytest.raises(RuntimeError, match="grouped_linear"):
            choose.linear(x, wrong)
    with pytest.raises(RuntimeError, match="linear: x is"):
        choose.linear(torch.randn(3, 95), packed)
    for group_size in (16, 96, 256):
        with pytest.raises(RuntimeError, match="rotated groups"):
            copies.rounded(torch.randn(4, 512), 8, group_size, rotated=True)
    with pytest.raises(ValueError, match="rotated"):
        weights.rows(packed._replace(rotated=True), torch.tensor([0]), torch.float32)
