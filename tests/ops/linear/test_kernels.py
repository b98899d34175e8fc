"""Every kernel of linear layers by the same rules: format, M, instruction set, layout and bias vary (kernels.py)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastgen.ops.linear.kernels import GEMM
from tests.ops.instructions import instruction_set, threads, zen5
from tests.ops.linear.kernels import (
    EVERY,
    F16,
    F32,
    WITH_CHECKS,
    WITH_SEVERAL,
    Draw,
    Kernel,
    as_it_is,
    cases,
)


def _check(kernel: Kernel, x: Tensor, weight: Tensor, layout: str, bias: Tensor | None) -> None:
    """Against float64; the operator that writes to a result gives the same bits, and writes nothing around it."""
    packed, meant = kernel.pack(weight)
    y = kernel.multiply(x, packed, bias)
    added = torch.zeros(len(meant), dtype=torch.float64) if bias is None else bias.double()
    wide, exact = x.double(), x.double() @ meant.double().t() + added
    largest = wide.abs().amax(dim=1, keepdim=True) if wide.numel() else wide.new_zeros(len(x), 1)
    most = kernel.error * (largest * meant.double().abs().sum(dim=1) + added.abs())
    # Sums are in float32: what is rounded to the type is the result.
    most += 1e-6 + torch.finfo(kernel.dtype).eps / 2 * exact.abs()
    assert y.shape == exact.shape and y.dtype is kernel.dtype and y.is_contiguous()
    assert ((y.double() - exact).abs() <= most).all(), ((y.double() - exact).abs() / most).max()
    if layout not in kernel.by_layout:
        assert torch.equal(
            y, kernel.multiply(x, kernel.pack(weight.clone(memory_format=torch.contiguous_format))[0], bias)
        )
    if kernel.as_gemm:  # the signs of zeros, too
        alike = GEMM.multiply(x.float(), meant.float(), None if bias is None else bias.float()).to(kernel.dtype)
        bits = torch.int32 if kernel.dtype is F32 else torch.int16
        assert torch.equal(y.view(bits), alike.view(bits))
    if kernel.out is not None:
        around = torch.full((len(x) + 2, len(meant)), torch.nan, dtype=kernel.dtype)
        kernel.out(around[1:-1], x, packed, bias)
        assert torch.equal(around[1:-1], y) and around[[0, -1]].isnan().all()


@EVERY
@settings(max_examples=15)
@given(
    m=st.integers(0, 70),
    n=st.integers(0, 150),
    k=st.integers(1, 100),
    gap=st.sampled_from([0, 3]),
    biased=st.booleans(),
    data=st.data(),
    seed=st.integers(0, 2**30),
)
def test_is_a_linear_layer(
    kernel: Kernel, vectors: str | None, m: int, n: int, k: int, gap: int, biased: bool, data: st.DataObject, seed: int
) -> None:
    """With rows of x that are not next to each other, and a weight in any layout, whose bits are those of its copy."""
    m, n, layout = min(m, kernel.most), max(n, kernel.least), data.draw(st.sampled_from(kernel.layouts))
    draw = Draw(kernel, seed)
    x, bias = draw.numbers(m, k + gap)[:, :k], draw.numbers(n) if biased else None
    with instruction_set(vectors):
        _check(kernel, x, draw.weight(n, k, layout), layout, bias)


# M, N, K: more rows than a thread takes at a time, more inputs than are multiplied in one go, panels and tiles that end
# exactly, one row and many outputs, tiles of rows that multiply different numbers of panels, more rows than are split
# or in float32 at once.
BLOCKS = [
    (97, 97, 513), (200, 96, 256), (8, 48, 1024), (193, 1, 300), (1030, 97, 260), (1, 1290, 600), (3, 1100, 45),
    (18, 153, 1700), (29, 300, 513), (64, 64, 256), (20, 130, 3000), (2100, 40, 70), (17, 33, 1024), (129, 97, 37),
]  # fmt: skip


@EVERY
def test_shapes_beyond_one_block(kernel: Kernel, vectors: str | None) -> None:
    for number, (m, n, k) in enumerate(BLOCKS):
        draw = Draw(kernel, number)
        x = draw.numbers(min(m, kernel.most), k)
        for layout in kernel.layouts:
            with instruction_set(vectors):
                _check(kernel, x, draw.weight(n, k, layout), layout, draw.numbers(n) if number % 2 else None)


@EVERY
def test_a_row_has_the_same_bits_whatever_the_other_rows_are(kernel: Kernel, vectors: str | None) -> None:
    # All numbers of rows that fill tiles or parts of them, and sums in several parts.
    many = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 25, 31, 32, 33, 41, 48, 49, 64, 65, 97, 128, 129, 140)
    for k, sizes in ((300, many), (1700, (1, 2, 5, 8, 9, 16, 17, 26, 49))):
        draw, sizes = Draw(kernel), [m for m in sizes if m <= kernel.most]
        x, bias = draw.numbers(sizes[-1], k), draw.numbers(53)
        others = torch.cat((x[:1] * 1000, x[1:7], -x[7:]))
        for layout in kernel.layouts:
            with instruction_set(vectors):
                weight = draw.packed(53, k, layout)
                whole: dict[int, Tensor] = {}
                for m in reversed(sizes):
                    y = kernel.multiply(x[:m], weight, bias)
                    assert torch.equal(y, whole.setdefault(kernel.order(m), y)[:m]), (layout, m)
                assert torch.equal(kernel.multiply(others, weight, bias)[1:7], whole[kernel.order(sizes[-1])][1:7])


@EVERY
@pytest.mark.parametrize(("n", "k"), [(500, 600), (75, 37)])
def test_neither_threads_nor_the_processor_change_a_bit(kernel: Kernel, vectors: str | None, n: int, k: int) -> None:
    """On Zen 5, with AVX-512, four elements of a line of the weight are loaded at a time, elsewhere one."""
    draw = Draw(kernel)
    x, bias = draw.numbers(193, k), draw.numbers(n)
    for layout in kernel.layouts:
        weight, found = draw.weight(n, k, layout), []
        for number, is_zen5 in ((1, False), (3, False), (1, True)):
            with threads(number), instruction_set(vectors), zen5(is_zen5):
                packed = kernel.pack(weight).weight
                found.append([kernel.multiply(x[:m], packed, bias) for m in (1, 5, 9, 20, 28, 40, 49, kernel.most)])
        for other in found[1:]:
            assert all(map(torch.equal, found[0], other)), layout


@EVERY
def test_more_dimensions_and_strides_of_x(kernel: Kernel, vectors: str | None) -> None:
    draw = Draw(kernel)
    weight, bias = draw.weight(70, 24), draw.numbers(70)
    for x in (
        draw.numbers(2, 3, 5, 24), draw.numbers(24, 6).t(), draw.numbers(3, 50)[:, 1:25], draw.numbers(24),
        draw.numbers(3, 1, 24).expand(3, 4, 24), draw.numbers(2, 0, 24), draw.numbers(5, 48)[:, ::2],
    ):  # fmt: skip
        with instruction_set(vectors):
            packed = kernel.pack(weight).weight
            y = kernel.multiply(x, packed, bias)
            assert torch.equal(y, kernel.multiply(x.reshape(-1, 24).contiguous(), packed, bias).view(y.shape))
        assert y.shape == (*x.shape[:-1], 70)


@EVERY
@pytest.mark.parametrize("odd", [torch.nan, -torch.inf])
def test_what_is_no_number_stays_in_its_row_and_column(kernel: Kernel, vectors: str | None, odd: float) -> None:
    """Also where rows share a vector, and in the inputs that fill none."""
    draw = Draw(kernel)
    for k in (64, 67):
        weight, bias = draw.weight(37, k), draw.numbers(37)
        strange = weight.clone()
        strange[9, k - 1] = odd
        with instruction_set(vectors):
            (plain, meant), (packed, others) = kernel.pack(weight), kernel.pack(strange)
            # In groups, one weight that is no number changes the type of all scales.
            kept, columns = (meant == others).all(dim=1), torch.arange(37) != 9
            for m in (2, 3, 8, 11, 17, 33, 49):
                x = draw.numbers(m, k)
                expected = kernel.multiply(x, plain, bias)
                rows = torch.arange(m) != m // 2
                x[m // 2, k - 1] = odd
                found, both = kernel.multiply(x, plain, bias), kernel.multiply(x, packed, bias)
                assert torch.equal(found[rows], expected[rows])
                assert torch.equal(both[rows][:, kept], expected[rows][:, kept])
                assert both[rows][:, columns].isfinite().all()
                for each in (found[~rows], both[~rows], both[:, ~columns]):
                    assert each.isnan().all() if odd != odd else not each.isfinite().any()


@cases(WITH_SEVERAL)
@settings(max_examples=8)
@given(
    m=st.integers(0, 70),
    sizes=st.lists(st.tuples(st.integers(0, 120), st.booleans()), max_size=4),
    data=st.data(),
    seed=st.integers(0, 2**30),
)
def test_several_with_one_x(
    kernel: Kernel, vectors: str | None, m: int, sizes: list[tuple[int, bool]], data: st.DataObject, seed: int
) -> None:
    """The bits of each alone, and nothing is written besides."""
    assert kernel.several is not None
    draw, m, sizes = Draw(kernel, seed), min(m, kernel.most), [(max(n, kernel.least), biased) for n, biased in sizes]
    layouts = [data.draw(st.sampled_from(kernel.layouts)) for _ in sizes]
    around = torch.full((sum(m * n + 1 for n, _ in sizes) + 1,), torch.nan, dtype=kernel.dtype)
    ys, end = [], 1
    for n, _ in sizes:
        ys.append(around[end : end + m * n].view(m, n))
        end += m * n + 1
    x, biases = draw.numbers(m, 33), [draw.numbers(n) if biased else None for n, biased in sizes]
    with instruction_set(vectors):
        weights = [
            draw.packed(n, 33, layout if kernel.mixes else layouts[0])
            for (n, _), layout in zip(sizes, layouts, strict=True)
        ]
        kernel.several(ys, x, weights, biases)
        for y, weight, bias in zip(ys, weights, biases, strict=True):
            assert torch.equal(y, kernel.multiply(x, weight, bias))
    assert around.isnan().sum() == len(sizes) + 1


@cases(WITH_SEVERAL, once=True)
def test_several_that_do_not_fit_together(kernel: Kernel, vectors: str | None) -> None:
    assert kernel.several is not None
    draw = Draw(kernel)
    with instruction_set(vectors):
        x, weight = draw.numbers(2, 32), draw.packed(3, 32)
        fitting, wrong = torch.ones(2, 3, dtype=kernel.dtype), torch.ones(4, 3, dtype=kernel.dtype)
        with pytest.raises(RuntimeError, match="as many"):
            kernel.several([fitting], x, [weight, weight], [None, None])
        with pytest.raises(RuntimeError, match="as many"):
            kernel.several([fitting], x, [weight], [])
        with pytest.raises(RuntimeError, match="result"):
            kernel.several([fitting, wrong], x, [weight, weight], [None, None])
        with pytest.raises(RuntimeError, match="share"):
            kernel.several([fitting, fitting], x, [weight, weight], [None, None])
    assert (fitting == 1).all() and (wrong == 1).all()


# What is not as it must be, for x as [3, 32], a weight [20, 32], a bias [20] and the result [3, 20]. More is in
# tests/ops/test_every_argument.py.
MISFITS: dict[str, Callable[[torch.dtype], dict[str, Tensor]]] = {
    "x with other inputs": lambda dtype: {"x": torch.ones(3, 33, dtype=dtype)},
    "inputs of x apart": lambda dtype: {"x": torch.ones(32, 3, dtype=dtype).t()},
    "a bias of other size": lambda dtype: {"bias": torch.ones(19, dtype=dtype)},
    "a bias with gaps": lambda dtype: {"bias": torch.ones(40, dtype=dtype)[::2]},
    "more outputs": lambda dtype: {"y": torch.ones(3, 21, dtype=dtype)},
    "outputs apart": lambda dtype: {"y": torch.ones(20, 3, dtype=dtype).t()},
    "outputs with gaps": lambda dtype: {"y": torch.ones(3, 40, dtype=dtype)[:, ::2]},
    "rows with gaps": lambda dtype: {"y": torch.ones(3, 21, dtype=dtype)[:, :20]},
    "rows in one place": lambda dtype: {"y": torch.ones(1, 20, dtype=dtype).expand(3, 20)},
    "a result of another type": lambda dtype: {"y": torch.ones(3, 20, dtype=F16 if dtype is F32 else F32)},
}
WEIGHT_MISFITS: dict[str, Callable[[torch.dtype], dict[str, Tensor]]] = {
    "a weight with other inputs": lambda dtype: {"weight": torch.ones(20, 33, dtype=dtype)},
    "a weight of another type": lambda dtype: {"weight": torch.ones(20, 32, dtype=F16 if dtype is F32 else F32)},
    "nothing to add up": lambda dtype: {"x": torch.ones(3, 0, dtype=dtype), "weight": torch.ones(20, 0, dtype=dtype)},
}


@cases(WITH_CHECKS, once=True)
def test_what_does_not_fit_is_refused(kernel: Kernel, vectors: str | None) -> None:
    assert kernel.out is not None
    draw = Draw(kernel)
    misfits = MISFITS | (WEIGHT_MISFITS if kernel.pack is as_it_is else {})
    for name, misfit in misfits.items():
        with instruction_set(vectors):
            given = {"y": torch.ones(3, 20, dtype=kernel.dtype), "x": draw.numbers(3, 32), "bias": draw.numbers(20)}
            given |= {"weight": draw.packed(20, 32)} | misfit(kernel.dtype)
            with pytest.raises(RuntimeError, match="linear|gem[mv]"):
                kernel.out(given["y"], given["x"], given["weight"], given["bias"])
                pytest.fail(f"{name} is not refused")
        assert (given["y"] == 1).all(), name
