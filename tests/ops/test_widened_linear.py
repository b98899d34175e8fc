"""Products in half precision that are multiplied in float32, against float64, and what is measured of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fastgen.ops.linear import upcast

TYPES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@given(
    rows=st.integers(17, 60),
    inputs=st.integers(1, 70),
    outputs=st.integers(0, 200),
    biased=st.booleans(),
    seed=st.integers(0, 2**30),
)
@example(rows=1, inputs=5, outputs=3, biased=True, seed=0)
# More rows and lines than are taken at once.
@example(rows=1100, inputs=70, outputs=4000, biased=True, seed=0)
@example(rows=2048, inputs=3, outputs=65, biased=False, seed=0)
@example(rows=20, inputs=5000, outputs=130, biased=True, seed=0)
def test_is_a_linear_layer(dtype: torch.dtype, rows: int, inputs: int, outputs: int, biased: bool, seed: int) -> None:
    """With rows and lines of a weight that are not next to each other."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    x, weight = random(rows, inputs + 3)[:, :inputs], random(outputs, inputs + 2)[:, :inputs]
    bias = random(outputs) if biased else None
    y = upcast.upcast_gemm(x, weight, bias)
    exact = x.double() @ weight.double().t() + (bias.double() if bias is not None else 0)
    assert y.dtype is dtype
    torch.testing.assert_close(y.double(), exact, atol=2e-6 * (inputs + 1), rtol=torch.finfo(dtype).eps / 2 + 1e-5)


def test_takes_little_memory() -> None:
    """However large the weight and however many the rows: some lines and some rows of them."""
    x, weight = torch.zeros(5000, 256, dtype=torch.float16), torch.zeros(8192, 256, dtype=torch.float16)
    with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profile:
        upcast.upcast_gemm(x, weight, None)
    held = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    assert most <= 5000 * 8192 * 2 + 1024 * 256 * 4 + 1024 * 1024 * 4 + 2 * 2**20


@pytest.mark.parametrize(
    ("x", "weight", "bias"),
    [
        (torch.zeros(16, 4), torch.zeros(3, 4), None),
        (torch.zeros(4, 4, 4), torch.zeros(3, 4), None),
        (torch.zeros(0, 4), torch.zeros(3, 4), None),
        (torch.zeros(17, 4), torch.zeros(3, 5), None),
        (torch.zeros(17, 4), torch.zeros(4, 3).t(), None),
        (torch.zeros(17, 4), torch.zeros(4), None),
        (torch.zeros(17, 4), torch.zeros(3, 4), torch.zeros(4)),
        (torch.zeros(17, 4), torch.zeros(3, 4), torch.zeros(3).double()),
        (torch.zeros(17, 4), torch.zeros(3, 4).bfloat16(), None),
        (torch.zeros(17, 4).double(), torch.zeros(3, 4), None),
    ],
)
def test_what_it_does_not_serve(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    single = (torch.float32, torch.float16)
    x, weight, bias = (
        tensor.to(single[1]) if tensor is not None and tensor.dtype is single[0] else tensor
        for tensor in (x, weight, bias)
    )
    assert not upcast.serves(x, weight, bias)
    good = torch.zeros(17, 4).half(), torch.zeros(3, 4).half(), torch.zeros(3).half()
    assert upcast.serves(*good) and not upcast.serves(*(tensor.float() for tensor in good))


def test_products_in_less_than_float32_are_left_to_torch() -> None:
    x, weight = torch.zeros(17, 4).half(), torch.zeros(3, 4).half()
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert not upcast.serves(x, weight, None)
    finally:
        torch.set_float32_matmul_precision(before)
    assert upcast.serves(x, weight, None)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_costs_are_measured_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def measure(*shape: object) -> upcast.Costs:
        measured.append(shape)
        return upcast.Costs(2.0, 1.0)

    measure_truly = upcast._measure
    monkeypatch.setattr(upcast, "_measure", measure)
    monkeypatch.setattr(_timings, "_known", {})
    monkeypatch.setattr(_timings, "_waits", dict)
    monkeypatch.setenv("FASTGEN_CACHE", "")
    for rows in (17, 90, 91, 256, 5000):
        known = rows in (90, 256, 5000)
        assert upcast.costs(rows, 16, 24, dtype, measure=False) == ((2.0, 1.0) if known else None)
        assert upcast.costs(rows, 16, 24, dtype) == (2.0, 1.0)
    assert measured == [(32, 16, 24, dtype), (256, 16, 24, dtype)]
    for rows in (32, 256):
        assert all(seconds > 0 for seconds in measure_truly(rows, 16, 24, dtype))
