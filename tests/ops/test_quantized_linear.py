"""Linear layers on weights in bfloat16 against float64, and which precisions a processor serves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastgen.ops import _library
from fastgen.ops.linear import grouped, quantized
from fastgen.ops.linear.quantized import PRECISIONS, TiledWeight
from tests.ops import quantized_reference
from tests.ops.instructions import instruction_set

# AMX tiles where the machine has them, vectors where it has those, and the reference.
BACKENDS = ["matrices", "vectors", "reference"]


@pytest.fixture(params=BACKENDS, scope="session")
def backend(request: pytest.FixtureRequest) -> str:
    missing = quantized._missing("bf16")
    if request.param != "reference" and missing is not None:
        pytest.skip(missing)
    return request.param


def _pack(backend: str, weight: torch.Tensor) -> TiledWeight:
    if backend != "reference":
        return quantized.pack(weight, "bf16")
    return TiledWeight(quantized_reference.pack_bf16(weight), weight.shape[0])


def _product(backend: str, x: torch.Tensor, packed: TiledWeight, bias: torch.Tensor | None) -> torch.Tensor:
    with instruction_set("avx512" if backend == "vectors" else None):
        if backend != "reference":
            return quantized.quantized_linear(x, packed, bias)
        return quantized_reference.bf16_linear(x, packed.panels, bias, packed.outputs)


def _check(backend: str, rows: int, inputs: int, outputs: int, biased: bool, layout: str, seed: int):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    weight = {
        "rows": lambda: random(outputs, inputs),
        "columns": lambda: random(inputs, outputs).t(),
        "part": lambda: random(outputs * 2 + 1, inputs + 3)[1::2, 2:-1],
    }[layout]()
    x, bias = random(rows, inputs), random(outputs) if biased else None
    result = _product(backend, x, _pack(backend, weight), bias)
    assert result.shape == (rows, outputs) and result.dtype == torch.float32
    added = bias.double() if bias is not None else 0.0
    exact = x.bfloat16().double() @ weight.bfloat16().double().t() + added
    error = (result.double() - exact).abs()
    assert (error <= 2e-6 * (inputs + 1) + 1e-5 * exact.abs()).all(), error.max()
    # And that is as near to the float32 layer as the number of bits makes it.
    true = x.double() @ weight.double().t()
    size = (true.norm() + (inputs * rows * outputs) ** 0.5).item()
    assert (result.double() - added - true).norm() <= 0.02 * size


@given(
    rows=st.integers(0, 70),
    inputs=st.integers(1, 150),
    outputs=st.integers(1, 100),
    biased=st.booleans(),
    layout=st.sampled_from(["rows", "columns", "part"]),
    seed=st.integers(0, 2**30),
)
def test_is_a_linear_layer(
    backend: str, rows: int, inputs: int, outputs: int, biased: bool, layout: str, seed: int
) -> None:
    _check(backend, rows, inputs, outputs, biased, layout, seed)


# More rows than a thread takes at a time, lines and panels that end exactly, one row more than a register has.
@pytest.mark.parametrize("rows, inputs, outputs", [(129, 257, 97), (256, 128, 64), (17, 1024, 33), (16, 64, 32)])
def test_shapes_beyond_one_block(backend: str, rows: int, inputs: int, outputs: int) -> None:
    for biased in (True, False):
        _check(backend, rows, inputs, outputs, biased, "rows", rows)


def test_every_kernel_has_the_layout_of_the_reference(backend: str) -> None:
    if backend == "reference":
        pytest.skip("it would be compared with itself")
    weight = torch.randn(75, 130)
    ours, reference = _pack(backend, weight), _pack("reference", weight)
    assert ours.outputs == reference.outputs and torch.equal(ours.panels, reference.panels)


def test_a_row_does_not_depend_on_the_others(backend: str) -> None:
    x, weight = torch.randn(50, 96), torch.randn(70, 96)
    packed = _pack(backend, weight)
    whole = _product(backend, x, packed, None)
    x[1:] *= 1000
    assert torch.equal(_product(backend, x, packed, None)[0], whole[0])
    for rows in (1, 16, 17, 33):
        torch.testing.assert_close(_product(backend, x[:rows], packed, None)[0], whole[0], atol=1e-5, rtol=1e-5)


def test_zeros_infinities_and_nan_stay_in_their_row_and_column(backend: str) -> None:
    x, weight, bias = torch.ones(40, 70), torch.ones(50, 70), torch.ones(50)
    x[3, 5], x[20, 6], weight[7, 2], x[30], weight[9] = float("nan"), float("inf"), float("inf"), 0, 0
    result = _product(backend, x, _pack(backend, weight), bias)
    assert result[3].isnan().all() and not result[20].isfinite().any()
    assert not result[:3, 7].isfinite().any()
    others = [row for row in range(40) if row not in (3, 20)]
    for output in (0, 9, 49):
        expected = torch.tensor([1.0 if output == 9 or row == 30 else 71.0 for row in others])
        torch.testing.assert_close(result[others, output], expected)


def test_more_dimensions_and_strides(backend: str) -> None:
    if backend == "reference":
        pytest.skip("it is called through the operator")
    weight, bias = torch.randn(70, 24), torch.randn(70)
    packed = quantized.pack(weight, "bf16")
    for x in (torch.randn(2, 3, 5, 24), torch.randn(24, 6).t(), torch.randn(3, 50)[:, 1:25], torch.randn(24)):
        expected = torch.nn.functional.linear(x, weight, bias)
        result = quantized.quantized_linear(x, packed, bias)
        assert result.shape == expected.shape and (result - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_does_not_matter(backend: str, threads: int) -> None:
    before = torch.get_num_threads()
    x, weight = torch.randn(140, 600), torch.randn(500, 600)
    expected = _product(backend, x, _pack(backend, weight), None)
    try:
        torch.set_num_threads(threads)
        result = _product(backend, x, _pack(backend, weight), None)
    finally:
        torch.set_num_threads(before)
    if backend == "reference":
        torch.testing.assert_close(result, expected)
    else:
        assert torch.equal(result, expected)


def test_what_does_not_fit_is_refused(backend: str) -> None:
    if backend == "reference":
        pytest.skip("it is called through the operator")
    packed = quantized.pack(torch.randn(20, 10), "bf16")
    for x, bias, outputs in (
        (torch.randn(3, 100), None, 20),
        (torch.randn(3, 10), None, 2000),
        (torch.randn(3, 10), torch.randn(19), 20),
        (torch.randn(3, 10).double(), None, 20),
    ):
        with pytest.raises(RuntimeError):
            quantized.quantized_linear(x, packed._replace(outputs=outputs), bias)
    for weight in (torch.randn(3), torch.randn(3, 4).half(), torch.zeros(0, 4)):
        with pytest.raises(RuntimeError, match="weight must be"):
            quantized.pack(weight, "bf16")


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_few_bits_are_in_groups_on_every_processor(precision: str) -> None:
    """A large weight costs digits of its own group alone."""
    if quantized._missing(precision) is not None:
        pytest.skip(quantized._missing(precision))
    weight, x = torch.rand(70, 96), torch.rand(3, 96)
    weight[:, 0], x[:, :32] = 1000, 0
    packed = quantized.pack(weight, precision, 32)
    assert isinstance(packed, grouped.PackedWeight) and packed.group_size == 32
    expected = torch.nn.functional.linear(x, weight)
    result = quantized.quantized_linear(x, packed, None)
    assert ((result - expected).norm() / expected.norm()).item() < {"int8": 0.01, "int4": 0.1}[precision]


@pytest.mark.skipif(not grouped.is_available(), reason="no kernels")
def test_large_inputs_cost_few_digits_in_8_bits() -> None:
    """Groups are rotated there, and only there."""
    weight, x = torch.randn(70, 256) * 0.1, torch.randn(40, 256)
    x[:, 7::64] *= 60
    exact = x.double() @ weight.double().t()

    def error(packed: grouped.PackedWeight) -> float:
        return float((quantized.quantized_linear(x, packed, None) - exact).norm())

    assert error(quantized.pack(weight, "int8")) < 0.5 * error(grouped.rounded(weight, 8, 64))
    assert error(quantized.pack(weight, "int4")) == error(grouped.rounded(weight, 4, 64))


@pytest.fixture
def timings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of this machine."""
    monkeypatch.setenv("FASTGEN_CACHE", str(tmp_path))
    monkeypatch.setattr(_timings, "_known", None)
    monkeypatch.setattr(_timings, "_waits", dict)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_processor_without_the_instructions(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if _library.load("CPU"):
        pytest.skip(_library.load("CPU"))
    if precision != "bf16":
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    for narrower in ("avx2", "default"):
        with instruction_set(narrower):
            assert "this processor does not have AVX" in quantized.unavailable(precision)
            assert f"no {precision}: this processor" in quantized.backend()


def test_a_processor_that_is_slow_in_it(monkeypatch: pytest.MonkeyPatch, timings: None) -> None:
    monkeypatch.setattr(quantized, "_missing", lambda precision: None)
    measured = []
    monkeypatch.setattr(quantized, "_measure", lambda precision: measured.append(precision) or (1.0, 2.0))
    assert "not faster" in quantized.unavailable("int8")
    assert "not faster" in quantized.unavailable("int8")
    monkeypatch.setattr(quantized, "_measure", lambda precision: (2.0, 1.0))
    assert quantized.unavailable("bf16") is None
    assert measured == ["int8"]  # once


@pytest.mark.parametrize("precision", PRECISIONS)
def test_measuring_leaves_the_random_state(precision: str, timings: None) -> None:
    if quantized._missing(precision) is not None:
        pytest.skip(quantized._missing(precision))
    state = torch.get_rng_state()
    quantized.unavailable(precision)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(0 < seconds < 10 for seconds in quantized._measure(precision))
    assert precision in quantized.backend()


def test_load_of_the_machine_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something else makes everything ten times slower in the second half of what is measured."""
    if quantized._missing("int4") is not None:
        pytest.skip(quantized._missing("int4"))
    calls, now = [], [0.0]

    def take(seconds: float) -> None:
        calls.append(seconds)
        late = len(calls) % (2 * quantized._ROUNDS) > quantized._ROUNDS
        now[0] += seconds * (10 if late else 1)

    monkeypatch.setattr(quantized.F, "linear", lambda *_: take(2.0))
    monkeypatch.setattr(quantized, "quantized_linear", lambda *_: take(1.0))
    monkeypatch.setattr(quantized, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    plain, quantized = quantized._measure("int4")
    assert (plain, quantized) == (4.0, 2.0)
