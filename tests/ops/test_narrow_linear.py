"""Products with a weight of few bits in panels: bits of packed products, and what is measured."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fastgen.ops import _timings, linear, narrow, narrow_linear
from tests.ops.instructions import instruction_set

pytestmark = pytest.mark.skipif(not narrow_linear.is_available(), reason="the extension was not built")

INSTRUCTION_SETS = ["avx512", "avx2", "default"]
CODES = pytest.mark.parametrize("codes", narrow_linear.CODES, ids=str)
TYPES = pytest.mark.parametrize("dtype", narrow.TYPES, ids=str)


def coded(codes: int, outputs: int, groups: int, seed: int = 0) -> torch.Tensor:
    """A weight as it is unpacked from codes, some of whose groups have a scale of zero."""
    generator = torch.Generator().manual_seed(seed)
    shape, most = (outputs, groups, 1), 2**codes - 1
    scales = torch.randn(shape, generator=generator).clamp(min=-0.4).add_(0.5).mul_(0.01).half().float()
    scales[torch.rand(shape, generator=generator) < 0.1] = 0
    minimums = torch.randn(shape, generator=generator).mul_(2**8).round_().div_(2**8)
    numbers = torch.randint(0, most + 1, (outputs, groups, narrow_linear.GROUP), generator=generator)
    numbers[..., :2] = torch.tensor([0, most])  # so that nothing has fewer bits
    return (numbers * scales + minimums).view(outputs, -1)


def check_bits(packed: torch.Tensor, weight: torch.Tensor, rows: int, biased: bool, seed: int) -> None:
    """Those of a product with the weight, signs of zeros too, with rows that are not next to each other.

    Nothing else is written.
    """
    generator = torch.Generator().manual_seed(seed)
    outputs, inputs = weight.shape
    x = torch.randn(rows, inputs + 3, generator=generator)[:, :inputs]
    bias = torch.randn(outputs, generator=generator) if biased else None
    around, expected = torch.full((rows + 2, outputs), torch.nan), torch.zeros(rows, outputs)
    torch.ops.fastgen.narrow_linears_out([around[1:-1]], x, [packed], [bias])
    torch.ops.fastgen.streamed_linear_out(expected, x, weight, bias)
    assert torch.equal(around[1:-1].view(torch.int32), expected.view(torch.int32))
    assert around[[0, -1]].isnan().all()


@TYPES
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
@given(
    rows=st.integers(0, 70),
    inputs=st.integers(1, 90),
    outputs=st.integers(0, 150),
    biased=st.booleans(),
    seed=st.integers(0, 2**30),
)
# One row and many outputs, a sum in several parts, two tiles of rows that multiply different numbers of panels.
@example(rows=1, inputs=600, outputs=1290, biased=True, seed=0)
@example(rows=20, inputs=1711, outputs=53, biased=True, seed=0)
@example(rows=29, inputs=513, outputs=300, biased=False, seed=0)
@example(rows=64, inputs=256, outputs=64, biased=False, seed=0)
def test_the_bits_of_a_packed_product(
    name: str, dtype: torch.dtype, rows: int, inputs: int, outputs: int, biased: bool, seed: int
) -> None:
    """With lines that are not next to each other."""
    weight = torch.randn(outputs, inputs + 2, generator=torch.Generator().manual_seed(seed)).to(dtype)[:, :inputs]
    with instruction_set(name):
        check_bits(narrow_linear.pack(weight), weight.float(), rows, biased, seed + 1)


@TYPES
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_rows_do_not_depend_on_each_other(name: str, dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(64, 300), torch.randn(77, 300).to(dtype), torch.randn(77)
    with instruction_set(name):
        packed = narrow_linear.pack(weight)
        expected = narrow_linear.narrow_linear(x, packed, bias, 77)
        for rows in range(1, 64):
            assert torch.equal(narrow_linear.narrow_linear(x[:rows], packed, bias, 77), expected[:rows])
    assert narrow_linear.narrow_linear(x.view(8, 8, 300), narrow_linear.pack(weight), bias, 77).shape == (8, 8, 77)


@CODES
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
@given(
    rows=st.integers(0, 70),
    groups=st.integers(1, 5),
    outputs=st.integers(1, 150),
    biased=st.booleans(),
    seed=st.integers(0, 2**30),
)
# As above: one row and many outputs, a sum in several parts, two tiles of rows.
@example(rows=1, groups=18, outputs=1290, biased=True, seed=0)
@example(rows=20, groups=53, outputs=53, biased=True, seed=0)
@example(rows=29, groups=16, outputs=300, biased=False, seed=0)
def test_the_bits_of_a_packed_product_with_codes(
    name: str, codes: int, rows: int, groups: int, outputs: int, biased: bool, seed: int
) -> None:
    weight = coded(codes, outputs, groups, seed)
    with instruction_set(name):
        packed = narrow_linear.pack_codes(weight, codes)
        assert packed is not None
        assert packed.nbytes * 4 <= (outputs + 15) // 16 * 16 * weight.shape[1] * (3 if codes == 4 else 5)
        check_bits(packed, weight, rows, biased, seed + 1)


@CODES
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_every_code(name: str, codes: int) -> None:
    """In the place of each input: with a scale, and with a minimum below zero."""
    most = 2**codes
    weight = torch.zeros(most, narrow_linear.GROUP)
    for place in range(narrow_linear.GROUP):
        weight[:] = torch.tensor([0, most - 1]).repeat(narrow_linear.GROUP // 2)
        weight[:, place] = torch.arange(most)
        wanted = weight * 2**-9 - 0.125
        with instruction_set(name):
            packed = narrow_linear.pack_codes(wanted, codes)
            assert packed is not None
            out = narrow_linear.narrow_linear(torch.eye(narrow_linear.GROUP), packed, None, most)
        assert torch.equal(out.t(), wanted)


def test_which_codes_stand_for_a_weight() -> None:
    """All of its numbers, exactly; looked at in the first group and the last."""
    both, bytes_alone = [4, 8], [8]
    scale = torch.tensor(0.0123).half().float()
    numbers = torch.arange(narrow_linear.GROUP).float().repeat(2, 2)
    for weight, wanted in (
        (coded(4, 5, 3), both),
        (coded(8, 5, 3), bytes_alone),
        (torch.zeros(2, 64), both),
        (torch.full((2, 64), 0.7).half().float(), both),
        ((numbers % 16) * scale, both),
        ((numbers % 16 - 8) * -scale, both),  # with negative zeros, as Q4_0 has them
        ((numbers % 17) * scale, bytes_alone),
        (numbers * 8 * scale, bytes_alone),  # 0 to 31
        ((numbers % 2) * 255 * scale, both),  # two numbers are two codes, however far they are from each other
        (numbers * 2.0**-24, bytes_alone),  # the smallest scale
        ((numbers % 16) * 2.0**-25, []),
        ((numbers % 16) * 0.1, []),  # each is rounded
        ((numbers % 16) * scale + 2.0**-22, both),
        ((numbers % 16) * 4.0, both),
        ((numbers % 16) * 5.0, []),  # 75 is too large
        (torch.randn(2, 64), []),
        (torch.randn(2, 64).bfloat16().float(), []),
    ):
        assert narrow_linear.codes_of(weight.contiguous()) == wanted
        packed = [narrow_linear.pack_codes(weight.contiguous(), codes) for codes in both]
        assert [codes for codes, found in zip(both, packed, strict=True) if found is not None] == wanted


@CODES
@pytest.mark.parametrize("place", [(0, 0), (4, 70)])
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf, 1e30, 64.0, 1e-30, 0.12345678])
def test_one_number_that_has_no_code(codes: int, place: tuple[int, int], odd: float) -> None:
    weight = coded(codes, 5, 3)
    assert codes in narrow_linear.codes_of(weight)
    weight[place] = odd
    assert not narrow_linear.codes_of(weight)
    assert narrow_linear.pack_codes(weight, 8) is None


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_what_gguf_unpacks(kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    dtype = getattr(gguf.GGMLQuantizationType, kind)
    data = gguf.quants.quantize(torch.randn(64, 96).mul_(0.05).numpy(), dtype)
    weight = torch.from_numpy(gguf.quants.dequantize(data, dtype))
    codes = narrow_linear.codes_of(weight)
    assert codes == [4, 8][0 if "4" in kind else 1 :]
    packed, x = narrow_linear.pack_codes(weight, codes[0]), torch.randn(3, 96)
    assert packed is not None
    found = narrow_linear.narrow_linear(x, packed, None, 64)
    assert torch.equal(found, linear.streamed_linear(x, weight, None))


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K"])
def test_what_gguf_unpacks_of_blocks_that_share_two_scales(kind: str) -> None:
    """Of random bytes, but for these two scales."""
    gguf = pytest.importorskip("gguf")
    dtype = getattr(gguf.GGMLQuantizationType, kind)
    numbers, size = gguf.GGML_QUANT_SIZES[dtype]
    blocks = torch.randint(256, (6, size), dtype=torch.uint8)
    blocks[:, :4] = torch.tensor([0.0123, 0.0456]).half().view(torch.uint8)
    blocks[:, 4:16] &= 0x3F  # scales of groups: small ones, as in files whose weights are below 1
    blocks[:, 4:16] >>= 2
    weight = torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), dtype)).view(6, numbers).contiguous()
    bits = 4 if kind == "Q4_K" else 8
    packed, x = narrow_linear.pack_codes(weight, bits), torch.randn(3, numbers)
    assert packed is not None and narrow_linear.codes_of(weight)[0] == bits
    found = narrow_linear.narrow_linear(x, packed, None, 6)
    assert torch.equal(found, linear.streamed_linear(x, weight, None))


def test_limits_of_codes() -> None:
    """Differences of 24 bits, numbers below 64, and divisors that the first numbers do not have."""
    group = torch.zeros(1, narrow_linear.GROUP)

    def changed(**at: float) -> torch.Tensor:
        found = group.clone()
        for place, number in at.items():
            found[0, int(place[1:])] = number
        return found

    unit = 2.0**-20
    for weight, wanted in (
        (changed(_5=(2**24 - 1) * unit), [4, 8]),
        (changed(_5=-(2**24 - 1) * unit), [4, 8]),
        (changed(_5=2**23 * unit, _6=-(2**23 - 1) * unit), []),  # two codes with a divisor of 1
        (changed(_5=2**23 * unit, _6=-(2**23 + 1) * unit), []),
        (changed(_0=64 - 2.0**-18, _1=-(64 - 2.0**-18)).clamp(min=-64), []),
        (changed(_0=63.5, _1=-63.5), [4, 8]),
        (changed(_0=63.5, _31=-63.5), [4, 8]),
        (changed(_30=0.5, _31=0.75), [4, 8]),  # the first ones are equal
        (changed(_0=8.0, _7=16.0, _31=0.5), [8]),  # they have a larger divisor than the rest
        (changed(_0=8.0, _7=16.0, _31=0.0625), []),
        (changed(_0=15 * unit, _1=unit), [4, 8]),
        (changed(_0=16 * unit, _1=unit), [8]),
        (changed(_0=255 * unit, _1=unit), [8]),
        (changed(_0=256 * unit, _1=unit), []),
    ):
        assert narrow_linear.codes_of(weight) == wanted
        for bits in wanted:
            packed = narrow_linear.pack_codes(weight, bits)
            assert packed is not None
            found = narrow_linear.narrow_linear(torch.eye(narrow_linear.GROUP), packed, None, 1)
            assert torch.equal(found.t(), weight)


def test_subnormal_numbers_are_no_zeros() -> None:
    weight = coded(4, 5, 3)
    weight[3, 40] = 1e-40
    torch.set_flush_denormal(True)
    try:
        assert not narrow_linear.codes_of(weight) and narrow_linear.pack_codes(weight, 8) is None
    finally:
        torch.set_flush_denormal(False)
    assert not narrow_linear.codes_of(weight)


@CODES
def test_refuses_codes_that_do_not_fit(codes: int) -> None:
    packed = narrow_linear.pack_codes(coded(codes, 40, 2), codes)
    assert packed is not None
    for inputs, outputs in ((63, 40), (65, 40), (32, 40), (64, 8), (64, 100)):
        with pytest.raises(RuntimeError, match="not packed for this product"):
            narrow_linear.narrow_linear(torch.zeros(2, inputs), packed, None, outputs)


@CODES
def test_refuses_to_pack_codes(codes: int) -> None:
    for weight in (torch.zeros(2, 33), torch.zeros(64), torch.zeros(2, 64).half(), torch.zeros(64, 64)[:, :32]):
        with pytest.raises(RuntimeError, match="codes: the weight"):
            narrow_linear.pack_codes(weight, codes)
        with pytest.raises(RuntimeError, match="codes: the weight"):
            narrow_linear.codes_of(weight)
    with pytest.raises(RuntimeError, match="4 or 8"):
        torch.ops.fastgen.pack_codes(torch.zeros(2, 64), 5)


@TYPES
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
@pytest.mark.parametrize("inputs", [1, 2, 33])
def test_every_number(name: str, dtype: torch.dtype, inputs: int) -> None:
    """In the place of each of two inputs; with one input alone, what fills up the pair changes nothing."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for place in {0, inputs - 1}:
        weight = torch.zeros(2**16, inputs, dtype=dtype)
        weight[:, place] = numbers
        with instruction_set(name):
            out = narrow_linear.narrow_linear(torch.ones(1, inputs), narrow_linear.pack(weight), None, 2**16)
        torch.testing.assert_close(out[0], numbers.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("threads", [1, 3])
def test_several_weights_with_one_input(threads: int) -> None:
    """Of all types, and one without outputs: the bits of each alone, with any number of threads."""
    before = torch.get_num_threads()
    x, sizes = torch.randn(5, 64), (50, 7, 0, 400, 33, 21)
    weights = [torch.randn(n, 64).to(narrow.TYPES[n % 2]) for n in sizes[:4]]
    packed = [*map(narrow_linear.pack, weights)]
    for codes, n in zip(narrow_linear.CODES, sizes[4:], strict=True):
        weights.append(coded(codes, n, 2))
        packed.append(narrow_linear.pack_codes(weights[-1], codes))
    biases = [torch.randn(n) if n != 7 else None for n in sizes]
    results = [torch.full((5, n), torch.nan) for n in sizes]
    try:
        torch.set_num_threads(threads)
        torch.ops.fastgen.narrow_linears_out(results, x, packed, biases)
    finally:
        torch.set_num_threads(before)
    for result, weight, bias in zip(results, weights, biases, strict=True):
        assert torch.equal(result, linear.streamed_linear(x, weight.float(), bias))


@pytest.mark.parametrize(
    "changes",
    [
        {"x": torch.zeros(2, 4).double()},
        {"x": torch.zeros(2, 6)},
        {"x": torch.zeros(4, 2).t()},
        {"x": torch.zeros(3, 4)},
        {"packed": torch.zeros(3, 4, dtype=torch.bfloat16)},
        {"packed": torch.zeros(1, 2, 32)},
        {"packed": narrow_linear.pack(torch.zeros(33, 4).half()) if narrow_linear.is_available() else None},
        {"packed": narrow_linear.pack_codes(torch.zeros(3, 32), 4) if narrow_linear.is_available() else None},
        {"packed": torch.zeros(1, 1, 7, dtype=torch.uint8)},
        {"out": torch.zeros(3, 2).t()},
        {"out": torch.zeros(2, 3).double()},
        {"bias": torch.zeros(4)},
        {"bias": torch.zeros(6)[::2]},
        {"bias": torch.zeros(3, dtype=torch.bfloat16)},
    ],
)
def test_refuses_what_it_does_not_take(changes: dict[str, torch.Tensor]) -> None:
    given = {"out": torch.zeros(2, 3), "x": torch.rand(2, 4), "bias": torch.rand(3)}
    given["packed"] = narrow_linear.pack(torch.rand(3, 4).half())

    def multiply(out: torch.Tensor, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor) -> None:
        torch.ops.fastgen.narrow_linears_out([out], x, [packed], [bias])

    multiply(**given)
    with pytest.raises(RuntimeError, match="narrow_linear"):
        multiply(**{**given, **changes})
    with pytest.raises(RuntimeError, match="as many"):
        torch.ops.fastgen.narrow_linears_out([given["out"]], given["x"], [], [])


@pytest.mark.parametrize(
    "weight", [torch.zeros(2, 3), torch.zeros(4).half(), torch.zeros(3, 2).half().t(), torch.zeros(1, 2, 3).bfloat16()]
)
def test_refuses_to_pack(weight: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="pack_narrow"):
        narrow_linear.pack(weight)


def test_what_is_served() -> None:
    x, weight, bias = torch.zeros(3, 8), torch.zeros(5, 8), torch.zeros(5)
    assert narrow_linear.serves(x, weight, bias) and narrow_linear.serves(x, weight, None)
    assert narrow_linear.serves(torch.zeros(narrow_linear.MAX_ROWS, 8), weight, None)
    for others in (
        (torch.zeros(narrow_linear.MAX_ROWS + 1, 8), weight, bias),
        (torch.zeros(0, 8), weight, bias),
        (torch.zeros(8, 3).t(), weight, bias),
        (x.double(), weight, bias),
        (x, weight.half(), bias),
        (x, torch.zeros(8, 5).t(), bias),
        (x, torch.zeros(5, 9), bias),
        (x, weight, torch.zeros(6)),
        (x, weight, torch.zeros(10)[::2]),
    ):
        assert not narrow_linear.serves(*others)


@pytest.mark.parametrize("fastest", ["plain", "dots", "streamed"])
def test_is_measured_beside_all_products_with_the_weight_as_it_is(
    fastest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one measurement: another one, of a time at which the machine was slower, would not tell which is faster."""
    given = []

    def shortest_times(products: list[tuple[object, list[torch.Tensor]]]) -> list[float]:
        given.extend(weights[0].dtype for _, weights in products)
        seconds = {"narrow": 2.0, "plain": 4.0, "streamed": 6.0, "dots": 5.0} | {fastest: 3.0}
        return [*seconds.values()] + [7.0] * (len(products) - len(seconds))

    monkeypatch.setattr(narrow_linear, "shortest_times", shortest_times)
    assert narrow_linear._measure(9, 16, 24, torch.bfloat16) == (3.0, 2.0)
    assert given[:4] == [torch.bfloat16, torch.float32, torch.float32, torch.float32]


@pytest.mark.parametrize("dtype", [*narrow.TYPES, *narrow_linear.CODES], ids=str)
def test_costs_are_measured_once(dtype: torch.dtype | int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_timings, "_known", {})
    monkeypatch.setattr(_timings, "_waits", dict)
    monkeypatch.setenv("FASTGEN_CACHE", "")
    for rows in (2, 26):
        assert narrow_linear.costs(rows, 32, 24, dtype, measure=False) is None
        found = narrow_linear.costs(rows, 32, 24, dtype)
        assert found is not None and min(found) > 0
        assert narrow_linear.costs(rows, 32, 24, dtype, measure=False) == found
    assert narrow_linear.costs(25, 32, 24, dtype, measure=False) is not None  # measured with 32 rows, as 26 were
    assert narrow_linear.costs(33, 32, 24, dtype, measure=False) is None
