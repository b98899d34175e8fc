"""Linear layers against their definition in float64, and what is measured of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastgen.ops.linear import gemm
from tests.ops.instructions import instruction_set, zen5

pytestmark = pytest.mark.skipif(not gemm.is_available(), reason="the extension was not built")

# The instruction sets that the kernels are compiled for. Where the machine lacks one, the next narrower one is used.
INSTRUCTION_SETS = ["avx512", "avx2", "default"]


def _product(backend: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    with instruction_set(backend):
        return gemm.packed_linear(x, gemm.pack(weight), bias, weight.shape[0])


def _check(backend: str, rows: int, inputs: int, outputs: int, biased: bool, layout: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    weight = {
        "rows": lambda: random(outputs, inputs),
        "columns": lambda: random(inputs, outputs).t(),
        "part": lambda: random(outputs * 2 + 1, inputs + 3)[1::2, 2:-1],
    }[layout]()
    x, bias = random(rows, inputs), random(outputs) if biased else None
    result = _product(backend, x, weight, bias)
    with instruction_set(backend):
        assert torch.equal(gemm.gemm(x, weight, bias), result)
        memory = torch.full((rows * outputs + 2,), torch.nan)
        out = memory[1:-1].view(rows, outputs)
        torch.ops.fastgen.streamed_linear_out(out, x, weight, bias)
        assert torch.equal(out, result) and memory[[0, -1]].isnan().all()
        out.fill_(torch.nan)
        torch.ops.fastgen.folded_linear_out(out, x, weight, bias)
        assert memory[[0, -1]].isnan().all()
        folded = gemm.folded_linear(x, weight, bias)
        assert torch.equal(folded, out)
    exact = x.double() @ weight.double().t() + (bias.double() if bias is not None else 0)
    assert result.shape == (rows, outputs) and result.dtype == torch.float32
    for found in (result, folded):
        torch.testing.assert_close(found.double(), exact, atol=2e-6 * (inputs + 1), rtol=1e-5)


@pytest.mark.parametrize("backend", INSTRUCTION_SETS)
@given(
    rows=st.integers(0, 70),
    inputs=st.integers(1, 80),
    outputs=st.integers(1, 130),
    biased=st.booleans(),
    layout=st.sampled_from(["rows", "columns", "part"]),
    seed=st.integers(0, 2**30),
)
def test_is_a_linear_layer(
    backend: str, rows: int, inputs: int, outputs: int, biased: bool, layout: str, seed: int
) -> None:
    _check(backend, rows, inputs, outputs, biased, layout, seed)


# More rows than a thread takes at a time, more inputs than are multiplied in one go, panels that end exactly.
@pytest.mark.parametrize(
    "rows, inputs, outputs",
    [(97, 513, 97), (128, 300, 50), (200, 256, 96), (8, 1024, 48), (193, 300, 1), (1030, 260, 97)],
)
@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("backend", INSTRUCTION_SETS)
def test_shapes_beyond_one_block(backend: str, rows: int, inputs: int, outputs: int, biased: bool, layout: str) -> None:
    _check(backend, rows, inputs, outputs, biased, layout, 0)


@pytest.mark.parametrize("backend", INSTRUCTION_SETS)
def test_every_way_to_divide_rows_among_tiles(backend: str) -> None:
    """Rows side by side in vectors: whole ones, and half of one behind them."""
    weight, bias = torch.randn(37, 20), torch.randn(37)
    x = torch.randn(140, 20)
    for rows in range(1, len(x) + 1):
        expected = _product(backend, x[:rows], weight, bias)
        with instruction_set(backend):
            assert torch.equal(gemm.gemm(x[:rows], weight, bias), expected), rows


@pytest.mark.parametrize("rows", [1, 5, 9, 16, 18, 20, 24, 28, 32, 40, 49, 56])
@pytest.mark.parametrize("inputs", [37, 39, 300])
@pytest.mark.parametrize("backend", INSTRUCTION_SETS)
def test_weights_are_loaded_in_several_ways_with_the_same_result(backend: str, inputs: int, rows: int) -> None:
    """One element of a line at a time, or four as on Zen 5. With AVX-512; otherwise both are the same."""
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(size, inputs, generator=generator) for size in (rows, 75))
    with instruction_set(backend):
        results = []
        for is_so in (True, False):
            with zen5(is_so):
                results.append([gemm.gemm(x, weight, None), gemm.folded_linear(x, weight, None)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    torch.testing.assert_close(results[0][1].double(), x.double() @ weight.double().t(), atol=2e-6 * inputs, rtol=1e-5)


@given(
    rows=st.integers(0, 70),
    outputs=st.lists(st.tuples(st.integers(0, 60), st.booleans(), st.booleans()), max_size=4),
    seed=st.integers(0, 2**30),
)
def test_several_with_one_input(rows: int, outputs: list[tuple[int, bool, bool]], seed: int) -> None:
    """The bits of each alone, and nothing is written besides."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 33, generator=generator)
    weights = [
        torch.randn(33, each, generator=generator).t() if is_by_inputs else torch.randn(each, 33, generator=generator)
        for each, _, is_by_inputs in outputs
    ]
    biases = [torch.randn(each, generator=generator) if biased else None for each, biased, _ in outputs]
    around = torch.full((sum(rows * each + 1 for each, *_ in outputs) + 1,), torch.nan)
    results, end = [], 1
    for each, *_ in outputs:
        results.append(around[end : end + rows * each].view(rows, each))
        end += rows * each + 1
    for several, alone in (
        (torch.ops.fastgen.streamed_linears_out, gemm.gemm),
        (torch.ops.fastgen.folded_linears_out, gemm.folded_linear),
    ):
        around.fill_(torch.nan)
        several(results, x, weights, biases)
        for result, weight, bias in zip(results, weights, biases, strict=True):
            assert torch.equal(result, alone(x, weight, bias))
        assert around.isnan().sum() == len(outputs) + 1


@pytest.mark.parametrize("backend", INSTRUCTION_SETS)
@pytest.mark.parametrize("inputs", [64, 67])
def test_a_row_that_is_no_number_stays_alone(backend: str, inputs: int) -> None:
    """Where several inputs of a row share a vector with other rows."""
    weight, bias = torch.randn(37, inputs), torch.randn(37)
    with instruction_set(backend):
        for rows in range(2, 50):
            x = torch.randn(rows, inputs)
            expected = gemm.folded_linear(x, weight, bias)
            x[rows // 2] = torch.nan
            found = gemm.folded_linear(x, weight, bias)
            others = [row for row in range(rows) if row != rows // 2]
            assert found[rows // 2].isnan().all() and torch.equal(found[others], expected[others])


def test_several_that_do_not_fit_together() -> None:
    x, weight, results = torch.rand(2, 4), torch.rand(3, 4), [torch.ones(2, 3), torch.ones(2, 4)]
    with pytest.raises(RuntimeError, match="as many"):
        torch.ops.fastgen.streamed_linears_out(results[:1], x, [weight, weight], [None, None])
    with pytest.raises(RuntimeError, match="result"):
        torch.ops.fastgen.streamed_linears_out(results, x, [weight, weight], [None, None])
    assert all((result == 1).all() for result in results)


def test_a_weight_of_any_strides() -> None:
    weight, x = torch.randn(60, 3, 1800), torch.randn(5, 600)
    for part in (
        weight[:, 1, ::3],
        weight[::2, 0, 10:610],
        weight[:, 2, ::3].clone().t().contiguous().t()[::2],
        torch.randn(7, 1).expand(7, 600),
        torch.randn(1, 600).expand(70, 600),
        torch.randn(700).unfold(0, 600, 1),
    ):
        result = gemm.gemm(x, part, None)
        assert torch.equal(result, gemm.packed_linear(x, gemm.pack(part), None, len(part)))
        torch.testing.assert_close(result, gemm.gemm(x, part.clone(), None), atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(result.double(), x.double() @ part.t().double(), atol=1e-3, rtol=1e-5)


def test_more_dimensions_and_strides() -> None:
    weight, bias = torch.randn(70, 24), torch.randn(70)
    packed = gemm.pack(weight)
    for x in (torch.randn(2, 3, 5, 24), torch.randn(24, 6).t(), torch.randn(3, 50)[:, 1:25], torch.randn(24)):
        expected = torch.nn.functional.linear(x, weight, bias)
        torch.testing.assert_close(gemm.packed_linear(x, packed, bias, 70), expected, atol=1e-4, rtol=1e-5)
        assert torch.equal(gemm.gemm(x, weight, bias), gemm.packed_linear(x, packed, bias, 70))


def test_infinities_and_nan_stay_in_their_row_and_column() -> None:
    weight, x = torch.ones(50, 20), torch.ones(9, 20)
    x[3, 5], weight[7, 2] = float("nan"), float("inf")
    result = gemm.packed_linear(x, gemm.pack(weight), None, 50)
    assert result[3].isnan().all()
    assert result[:3, 7].isinf().all()
    assert result[4:, :7].eq(20).all() and result[4:, 8:].eq(20).all()


# Several blocks of rows, and more inputs than are taken at a time.
@pytest.mark.parametrize(("rows", "inputs"), [(20, 600), (97, 600), (200, 2500), (385, 3000), (193, 5)])
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_the_number_of_threads_does_not_matter(rows: int, inputs: int, threads: int) -> None:
    before = torch.get_num_threads()
    x, weight, bias = torch.randn(rows, inputs), torch.randn(500, inputs), torch.randn(500)
    packed = gemm.pack(weight)
    expected = gemm.packed_linear(x, packed, bias, 500)
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    assert (expected - exact).norm() < 1e-6 * exact.norm()
    # A row's result is the same, whatever other rows there are.
    assert torch.equal(gemm.packed_linear(x[-3:], packed, bias, 500), expected[-3:])
    try:
        torch.set_num_threads(threads)
        assert torch.equal(gemm.packed_linear(x, gemm.pack(weight), bias, 500), expected)
        assert torch.equal(gemm.gemm(x, weight, bias), expected)
        assert torch.equal(gemm.gemm(x, weight.t().contiguous().t(), bias), expected)
    finally:
        torch.set_num_threads(before)


def test_what_does_not_fit_is_refused() -> None:
    packed = gemm.pack(torch.randn(20, 10))
    for x, bias, outputs in (
        (torch.randn(3, 11), None, 20),
        (torch.randn(3, 10), None, 2000),
        (torch.randn(3, 10), torch.randn(19), 20),
        (torch.randn(3, 10).double(), None, 20),
    ):
        with pytest.raises(RuntimeError):
            gemm.packed_linear(x, packed, bias, outputs)
    for weight in (torch.randn(3), torch.randn(3, 4).half()):
        with pytest.raises(RuntimeError):
            gemm.pack(weight)
    for x, weight, bias in (
        (torch.randn(3, 11), torch.randn(20, 10), None),
        (torch.randn(3, 10), torch.randn(20, 10).double(), None),
        (torch.randn(3, 10), torch.randn(20, 10), torch.randn(19)),
        (torch.randn(3, 10), torch.randn(20), None),
    ):
        with pytest.raises(RuntimeError):
            gemm.gemm(x, weight, bias)


@pytest.mark.parametrize(
    "out",
    [
        torch.ones(3, 21),
        torch.ones(4, 20),
        torch.ones(60),
        torch.ones(1, 3, 20),
        torch.ones(20, 3).t(),
        torch.ones(3, 40)[:, ::2],
        torch.ones(3, 21)[:, :20],
        torch.ones(1, 20).expand(3, 20),
        torch.ones(3, 20).double(),
        torch.ones(3, 20).half(),
    ],
    ids=lambda out: f"{list(out.shape)} {out.stride()} {out.dtype}",
)
def test_a_result_that_does_not_fit_is_refused(out: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="the result must be|share memory"):
        torch.ops.fastgen.streamed_linear_out(out, torch.randn(3, 10), torch.randn(20, 10), torch.randn(20))
    assert (out == 1).all()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and nothing known yet; other processes do not disturb what is measured."""
    monkeypatch.setenv("FASTGEN_CACHE", str(tmp_path))
    monkeypatch.setattr(_timings, "_known", None)
    monkeypatch.setattr(_timings, "_waits", dict)
    return tmp_path / "timings.json"


def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_timings, "_known", None)


def test_costs_are_measured_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = torch.get_rng_state()
    costs = gemm.costs(13, 64, 100, False)
    assert all(0 < seconds < 10 for seconds in costs[:-1]) and 0 <= costs.keeping < 1
    assert torch.equal(torch.get_rng_state(), state)
    assert cache.exists()
    monkeypatch.setattr(gemm, "_measure", lambda *shape: pytest.fail("measured again"))
    _forget(monkeypatch)
    assert gemm.costs(16, 64, 100, False) == costs  # 13 rows are measured as 16
    assert gemm.backend().endswith("shapes")


@pytest.mark.parametrize(
    ("seconds", "rounds"),
    [([5.0, 4.1, 4.0], 3), ([9.0, 6.0, 8.0, 4.0, 4.2, 1.0], 5), ([0.8**n for n in range(13)], 12)],
    ids=["steady", "noisy", "never steady"],
)
def test_costs_are_measured_until_the_shortest_time_is_met_twice(
    seconds: list[float], rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm, "_STEADY", 1.06)
    monkeypatch.setattr(gemm, "_seconds_of_new_memory", lambda size: 0.0)
    for busy in range(5):  # each product: the others take as long each time
        turns = (time if product == busy else 2.0 for time in seconds for product in range(5))
        monkeypatch.setattr(gemm, "_seconds", lambda *product, turns=turns: next(turns))
        costs = gemm._measure(2, 8, 8, False)
        expected = [min(seconds[:rounds]) if product == busy else 2.0 for product in range(5)]
        assert [costs.packing, costs.plain, costs.packed, costs.streamed, costs.dots] == expected


def test_a_packed_weight_that_is_kept_costs_new_memory(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "MAX_BYTES", 4 * 64 * 50)
    monkeypatch.setattr(gemm, "_seconds_of_new_memory", float)
    for rows in (4, 5000):  # what products take grows with rows, memory does not; half of the outputs are measured
        assert gemm.costs(rows, 64, 100, False).keeping == 4 * 64 * 100


def test_many_rows_with_the_weight_as_it_is_are_measured(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = gemm.costs(300, 16, 24, False)
    assert all(0 < seconds < 1 for seconds in costs[:4])
    assert costs.dots == float("inf")
    _forget(monkeypatch)
    assert gemm.costs(300, 16, 24, False) == costs  # in the file as well


def test_costs_of_another_layout_or_number_of_threads_are_other_costs(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []
    monkeypatch.setattr(
        linear, "_measure", lambda *shape: measured.append(shape) or gemm.Costs(2.0, 1.0, 3.0, 1.5, 0.5)
    )
    gemm.costs(4, 10, 20, False)
    gemm.costs(4, 10, 20, True)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        gemm.costs(4, 10, 20, False)
    finally:
        torch.set_num_threads(before)
    assert measured == [(4, 10, 20, False), (4, 10, 20, True), (4, 10, 20, False)]
    assert gemm.costs(2048, 10, 20, False) == (4.0, 2.0, 3.0, 3.0, 1.0, 0.0)  # in proportion to 1,024 rows
    measured.clear()
    for rows in (3, 5, 9, 10, 12, 13, 16, 17, 40):
        gemm.costs(rows, 5, 5, False)
    assert [rows for rows, *_ in measured] == [3, 5, 9, 12, 16, 20, 64]


@pytest.mark.parametrize("content", ["", "[]", '{"a": 1}', '{"a": {"b": ["x"]}}', "\x00"])
def test_a_broken_file_is_replaced(cache: Path, content: str) -> None:
    cache.write_text(content)
    gemm.costs(2, 16, 16, False)
    assert any("2x16x16" in entries for entries in json.loads(cache.read_text()).values())


def test_entries_of_the_wrong_length_are_measured_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gemm.costs(2, 16, 16, False)
    known = json.loads(cache.read_text())
    cache.write_text(json.dumps({section: {key: [1.0] for key in entries} for section, entries in known.items()}))
    _forget(monkeypatch)
    assert gemm.costs(2, 16, 16, False).streamed > 0


def test_what_other_processes_wrote_is_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gemm.costs(2, 16, 16, False)
    _forget(monkeypatch)
    assert _timings.all(gemm._KERNEL)
    cache.write_text(json.dumps({"other": {"key": [1.0]}}))
    gemm.costs(2, 32, 16, False)
    assert set(json.loads(cache.read_text())) == {"other", _timings._section(gemm._KERNEL)}


def test_without_a_folder_nothing_is_written(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTGEN_CACHE", "")
    gemm.costs(2, 16, 16, False)
    monkeypatch.setenv("FASTGEN_CACHE", "/proc/nowhere")
    gemm.costs(2, 32, 16, False)
    assert len(_timings.all(gemm._KERNEL)) == 2 and not cache.exists()


@pytest.mark.parametrize("can_evict", [True, False])
def test_measured_weights_come_from_memory(can_evict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    evicted: list[int] = []
    monkeypatch.setattr(gemm, "evict", lambda weight: evicted.append(weight.data_ptr()) or can_evict)
    assert gemm.count_of_cold(2**20, 64) == (8 if can_evict else 32)
    assert gemm.count_of_cold(2**20, 4) == 4 and gemm.count_of_cold(2**30, 4) == 1
    weights = [torch.ones(8, 8), torch.ones(8, 8)]

    def product(weight: torch.Tensor) -> None:
        assert evicted == [each.data_ptr() for each in weights]

    evicted.clear()
    gemm._seconds(product, weights)


def test_a_tensor_that_is_evicted_keeps_its_numbers() -> None:
    x = torch.arange(1000.0)[3:]
    assert gemm.evict(x) in (True, False)
    assert torch.equal(x, torch.arange(3.0, 1000.0))
