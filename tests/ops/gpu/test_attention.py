"""Decode attention against ordinary attention, written out row by row in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastgen.ops import gpu
from fastgen.ops.attention import composed, decode_attention, reference, shared_prefix_attention
from fastgen.ops.gpu.launches import plan, split_count

pytestmark = pytest.mark.sampled(3)

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}
TYPES = [torch.float32, torch.float16, torch.bfloat16]

cases = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(TYPES),
        "batch": st.integers(1, 2),
        "per_input": st.sampled_from([1, 3, 4]),
        "kv_heads": st.integers(1, 2),
        "group": st.sampled_from([1, 2, 7]),
        "prefix": st.integers(0, 90),
        "suffix": st.integers(0, 40),
        "dims": st.sampled_from([(32, 32), (64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (256, 256), (40, 24)]),
        "padding": st.sampled_from(["none", "left", "right", "all"]),
        "ancestry": st.booleans(),
        "row_lengths": st.booleans(),
        "bias": st.sampled_from(["none", "head", "row", "all"]),
        "window": st.sampled_from([None, 1, 17, 60]),
        "scale": st.sampled_from([None, 0.1]),
        "splits": st.sampled_from([None, 1, 2, 5]),
        "seed": st.integers(0, 2**31),
    }
)
PLAIN = {
    "dtype": torch.float32, "batch": 2, "per_input": 4, "kv_heads": 2, "group": 1, "prefix": 50, "suffix": 20,
    "dims": (64, 64), "padding": "none", "ancestry": True, "row_lengths": False, "bias": "none", "window": None,
    "scale": None, "splits": 1, "seed": 0,
}  # fmt: skip


def make(case, device):
    """Arguments as `case` describes them; wherever nothing may be read, there is NaN."""
    generator = torch.Generator().manual_seed(case["seed"])
    batch, per_input, kv_heads, (dim, value_dim) = (case[key] for key in ("batch", "per_input", "kv_heads", "dims"))
    rows, heads, prefix = batch * per_input, kv_heads * case["group"], case["prefix"]

    def tensor(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, case["dtype"])

    # A query between others in memory, as a fused projection leaves it.
    arguments = {"query": tensor(rows, 3, heads, dim)[:, 1].unsqueeze(2)}
    arguments["prefix_keys"] = tensor(batch, prefix, kv_heads, dim).transpose(1, 2)
    arguments["prefix_values"] = tensor(batch, kv_heads, prefix, value_dim)
    starts, ends = torch.zeros(batch, dtype=torch.int64), torch.full((batch,), prefix)
    missing = torch.randint(0, prefix + 1, (batch,), generator=generator)
    if case["padding"] == "all":
        missing[:] = prefix
    if case["padding"] == "right":
        ends -= missing
        arguments["ends"] = ends.to(device, torch.int32)
    elif case["padding"] != "none":
        starts += missing
        arguments["starts"] = starts.to(device)
    for b in range(batch):
        for name in ("prefix_keys", "prefix_values"):
            arguments[name][b, :, : starts[b]] = math.nan
            arguments[name][b, :, ends[b] :] = math.nan
    capacity, length = case["suffix"] + 3, case["suffix"]
    if length:
        for name, width in (("suffix_keys", dim), ("suffix_values", value_dim)):
            arguments[name] = tensor(rows, kv_heads, capacity, width)
        lengths = torch.randint(0, length + 1, (rows,), generator=generator) if case["row_lengths"] else [length] * rows
        sources = torch.arange(rows).unsqueeze(1).repeat(1, capacity + 2)
        if case["ancestry"]:
            first = sources // per_input * per_input
            sources = first + torch.randint(0, per_input, sources.shape, generator=generator)
            arguments["ancestry"] = sources.int().to(device)
        is_read = torch.zeros(rows, capacity, dtype=torch.bool)
        for row, filled in enumerate(lengths):
            is_read[sources[row, :filled], torch.arange(filled)] = True
            if case["ancestry"]:
                arguments["ancestry"][row, filled:] = 10**6
        for name in ("suffix_keys", "suffix_values"):
            arguments[name].transpose(1, 2)[~is_read.to(device)] = math.nan
        arguments["suffix_lengths"] = torch.as_tensor(lengths if case["row_lengths"] else [length], device=device)
    else:
        capacity = 0
    if case["bias"] != "none":
        shape = {"head": (1, heads, prefix + capacity), "row": (rows, 1, prefix + capacity)}
        bias = tensor(*shape.get(case["bias"], (rows, heads, prefix + capacity)))
        bias[..., torch.rand(prefix + capacity, generator=generator).to(device) < 0.2] = -math.inf
        arguments["mask"] = bias.unsqueeze(2)
    arguments |= {key: case[key] for key in ("scale", "window")}
    return arguments


def expected(arguments):
    """The definition for one query a row, a row at a time, in float64 on the CPU."""
    given = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    query, keys = given["query"].double(), given["prefix_keys"]
    rows, heads, _, dim = query.shape
    batch, kv_heads, prefix, _ = keys.shape
    lengths = given["suffix_lengths"].expand(rows).tolist() if "suffix_lengths" in given else [0] * rows
    out = torch.zeros(rows, heads, 1, given["prefix_values"].shape[3], dtype=torch.float64)
    scale = given["scale"] if given["scale"] is not None else dim**-0.5
    for row, length in enumerate(lengths):
        b, first = row // (rows // batch), 0
        low = int(given["starts"][b]) if "starts" in given else 0
        high = int(given["ends"][b]) if "ends" in given else prefix
        if given["window"] is not None:
            low, first = max(low, prefix + length - given["window"]), max(length - given["window"], 0)
        steps = torch.arange(first, length)
        sources = given["ancestry"][row, steps].long() if "ancestry" in given else torch.full_like(steps, row)
        seen = []  # keys, and values: [heads, positions, dim]
        for name in ("keys", "values"):
            parts = [given[f"prefix_{name}"][b, :, low:high]]
            if length:
                parts.append(given[f"suffix_{name}"][sources, :, steps].transpose(0, 1))
            seen.append(torch.cat(parts, dim=1).double().repeat_interleave(heads // kv_heads, dim=0))
        scores = (seen[0] @ query[row].transpose(1, 2)).squeeze(2) * scale
        if "mask" in given:
            places = [*range(low, high), *range(prefix + first, prefix + length)]
            scores += given["mask"].expand(rows, heads, 1, -1)[row, :, 0, places]
        if scores.shape[1]:
            is_seen = scores.amax(dim=1, keepdim=True) > -math.inf
            out[row] = torch.where(is_seen, scores.softmax(1), 0.0).unsqueeze(1) @ seen[1]
    return out


def assert_right(case, result, wanted):
    tolerance = TOLERANCE[case["dtype"]]
    torch.testing.assert_close(result.double().cpu(), wanted, rtol=tolerance, atol=tolerance)


@given(case=cases)
@example(case=PLAIN | {"prefix": 0, "suffix": 0})
@example(case=PLAIN | {"prefix": 0, "suffix": 1})
@example(case=PLAIN | {"per_input": 13, "group": 7, "kv_heads": 1, "prefix": 40})  # more rows than a tile has
@example(case=PLAIN | {"padding": "all", "suffix": 0, "splits": 3})
@example(case=PLAIN | {"padding": "left", "window": 30, "splits": 2})
@example(case=PLAIN | {"row_lengths": True, "splits": 2, "bias": "row"})
@example(case=PLAIN | {"row_lengths": True, "window": 30, "group": 7, "per_input": 3, "suffix": 40})
@settings(max_examples=6)
def test_kernel(case, device, kernels):
    arguments = make(case, device)
    assert_right(case, decode_attention(**arguments, splits=case["splits"]), expected(arguments))


@given(case=cases)
@settings(max_examples=12)
def test_reference(case, device):
    case = case | {"dtype": torch.float64}
    arguments = make(case, device)
    assert_right(case, reference(**arguments), expected(arguments))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_long_sequences_in_parts(dtype, device, kernels):
    """Parts whose maxima lie far apart, and scores that would overflow if they were not scaled."""
    case = PLAIN | {"dtype": dtype, "prefix": 300, "batch": 1, "kv_heads": 1, "seed": 3}
    arguments = make(case, device)
    arguments["prefix_keys"][:, :, 100:] *= 12
    wanted = expected(arguments)
    tolerance = 5 * TOLERANCE[dtype]
    for splits in (1, 4):
        result = decode_attention(**arguments, splits=splits).double().cpu()
        torch.testing.assert_close(result, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("ancestry", [False, True])
@pytest.mark.parametrize("per_input", [1, 4])
def test_a_row_gets_the_bits_that_its_length_gives_to_all(per_input, ancestry, device, kernels):
    case = PLAIN | {"per_input": per_input, "row_lengths": True, "suffix": 40, "ancestry": ancestry, "group": 3}
    arguments = make(case, device)
    for name in ("suffix_keys", "suffix_values"):
        arguments[name].nan_to_num_()  # other rows read further here
    if ancestry:
        arguments["ancestry"].clamp_(max=per_input - 1)
        arguments["ancestry"][per_input:].clamp_(min=per_input)
    found = decode_attention(**arguments, splits=1)
    for row, length in list(enumerate(arguments["suffix_lengths"]))[::3]:
        wanted = decode_attention(**(arguments | {"suffix_lengths": length}), splits=1)
        assert torch.equal(found[row], wanted[row])


def test_inputs_are_left_alone(device):
    arguments = make(PLAIN | {"bias": "all"}, device)
    before = {k: v.clone() for k, v in arguments.items() if isinstance(v, torch.Tensor)}
    decode_attention(**arguments)
    for name, old in before.items():
        torch.testing.assert_close(arguments[name], old, rtol=0, atol=0, equal_nan=True)


def test_true_float32(device, kernels):
    """Operands that differ where tf32 has no bits: the difference must not get lost."""
    query = torch.full((1, 1, 1, 32), 1.0, device=device)
    keys = torch.full((1, 1, 2, 32), 1.0, device=device)
    keys[0, 0, 1] += 2.0**-14
    values = torch.eye(2, device=device).repeat(1, 16).view(1, 1, 2, 32).contiguous()
    result = decode_attention(query, keys, values, scale=2.0**9)
    wanted = torch.softmax(torch.tensor([0.0, 1.0]), 0).to(device)  # (0.5, 0.5) if it does
    torch.testing.assert_close(result[0, 0, 0, :2], wanted, rtol=0, atol=1e-3)


def test_memory_in_any_order(device, kernels):
    """The kernel steps through a query, and through bounds, number by number."""
    torch.manual_seed(0)
    query = torch.randn(2, 16, 2, device=device).transpose(1, 2).unsqueeze(2)
    keys, values = torch.randn(2, 2, 2, 9, 16, device=device)
    starts, _, ends, _ = torch.tensor([[1, 0], [99, 99], [9, 7], [99, 99]], device=device).unbind()
    for bounds in ((starts, ends), torch.tensor([[1, 9], [0, 7]], device=device).unbind(1)):
        arguments = {"query": query, "prefix_keys": keys, "prefix_values": values, "scale": None, "window": None}
        arguments |= dict(zip(("starts", "ends"), bounds, strict=True))
        assert_right(PLAIN, decode_attention(**arguments), expected(arguments))


@pytest.mark.parametrize("name", ["starts", "ends", "suffix_lengths", "ancestry", "mask"])
def test_what_lies_on_another_device_is_not_for_the_kernel(name, monkeypatch):
    arguments = make(PLAIN | {"padding": "left", "bias": "all"}, torch.device("cpu"))
    arguments["ends"] = torch.full((2,), 50, dtype=torch.int32)
    foreign = arguments[name]
    monkeypatch.setattr(gpu, "available", lambda *tensors: not any(tensor is foreign for tensor in tensors))
    monkeypatch.setattr(gpu.launches, "launch_attention", lambda *args, **options: pytest.fail("the kernel reads it"))
    torch.testing.assert_close(decode_attention(**arguments), reference(**arguments), rtol=2e-5, atol=2e-5)


def test_the_reference_takes_small_tensors_from_another_device():
    arguments = make(PLAIN | {"padding": "left", "bias": "all"}, torch.device("cpu"))
    for name in ("query", "prefix_keys", "prefix_values", "suffix_keys", "suffix_values"):
        arguments[name] = arguments[name].to("meta")
    found = decode_attention(**arguments)
    assert found.is_meta and found.shape == (8, 2, 1, 64)


@pytest.mark.parametrize("interpreted", ["0", "1"])  # the kernel of the CPU, and Triton's
@pytest.mark.parametrize("suffix", [0, 4])
@pytest.mark.parametrize(
    ("shape", "batch", "kv_heads"),
    [((3, 0, 1, 8), 3, 0), ((4, 0, 1, 8), 2, 2), ((0, 2, 1, 8), 0, 2), ((4, 2, 0, 8), 2, 2)],
)
def test_results_without_a_number(shape, batch, kv_heads, suffix, interpreted, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    prefix, own = torch.randn(2, batch, kv_heads, 5, 8), torch.randn(2, shape[0], kv_heads, suffix, 8)
    given = torch.randn(shape), *prefix, *(own if suffix else ())
    for attend in (decode_attention, reference, shared_prefix_attention, composed):
        assert attend(*given).shape == shape


@pytest.mark.parametrize("interpreted", ["0", "1"])  # the kernel of the CPU, and Triton's
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.zeros(5, 2, 1, 8)}, "5 rows of the query must be a multiple of the 2"),
        ({"query": torch.zeros(4, 3, 1, 8)}, "3 heads of the query must be a multiple"),
        ({"query": torch.zeros(4, 2, 1, 16)}, "prefix_keys must be"),
        ({"query": torch.zeros(4, 2, 1, 8).double()}, "prefix_keys must be .*float64"),
        ({"suffix_values": None}, "both keys and values"),
        ({"suffix_keys": None, "suffix_values": None}, "of a suffix"),
        ({"prefix_values": torch.tensor(0.0)}, "the prefix must be"),
        ({"suffix_lengths": torch.ones(4, 1).long()}, "one for each row"),
        ({"ancestry": torch.zeros(4, 6).long()}, "int32"),
        ({"ancestry": torch.zeros(4, 5).int()}, "ancestry must be"),
        ({"suffix_keys": torch.zeros(2, 2, 6, 8)}, "suffix_keys must be"),
        ({"suffix_keys": torch.zeros(4, 2)}, "the suffix must be"),
        ({"suffix_keys": torch.tensor(0.0), "row_map": torch.zeros(4).long()}, "the suffix must be"),
        (
            {"suffix_keys": torch.zeros(0, 2, 6, 8), "suffix_values": torch.zeros(0, 2, 6, 8)}
            | {"row_map": torch.zeros(4).long()},
            "no rows",
        ),
        ({"mask": torch.zeros(4, 1, 1, 10)}, "cannot be expanded"),
        ({"mask": torch.zeros(11).long()}, "bool or floating"),
        ({"causal": True, "window": 3}, "no window"),
    ],
)
def test_wrong_arguments(changes, message, interpreted, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    arguments = {
        "query": torch.zeros(4, 2, 1, 8),
        "prefix_keys": torch.zeros(2, 2, 5, 8),
        "prefix_values": torch.zeros(2, 2, 5, 8),
        "suffix_keys": torch.zeros(4, 2, 6, 8),
        "suffix_values": torch.zeros(4, 2, 6, 8),
        "suffix_lengths": torch.tensor(3),
    }
    with pytest.raises(ValueError, match=message):
        decode_attention(**(arguments | changes))


class TestPlan:
    @given(
        st.integers(1, 512),
        st.integers(1, 64),
        st.integers(1, 300),
        st.integers(1, 256),
        st.integers(0, 10**6),
        st.sampled_from([2, 4]),
    )
    def test_fits_the_machine(self, batch, kv_heads, tile_rows, dim, positions, size):
        found = plan(batch, kv_heads, tile_rows, dim, positions, size, 132)
        assert found.block_m * found.m_tiles >= tile_rows and 16 <= found.block_m <= 64
        assert found.block_n in (16, 32, 64, 128) and 1 <= found.splits <= 32
        width = max(1 << (dim - 1).bit_length(), 16)
        assert 2 * found.stages * found.block_n * width * size <= 128 * 1024

    def test_fits_a_smaller_gpu(self):
        """With fewer blocks under way first, and then with shorter tiles."""
        assert plan(2, 4, 64, 256, 1000, 2, 84, 99 * 1024)[:3] == (64, 1, 32)
        assert plan(2, 4, 64, 256, 1000, 2, 84, 99 * 1024).stages == 2
        assert plan(2, 4, 64, 256, 1000, 4, 84, 99 * 1024)[:2] == (32, 2)
        for rows, dim, size in ((4, 64, 2), (16, 128, 2), (64, 128, 2), (4, 256, 4)):
            on_this = plan(32, 8, rows, dim, 1000, size, 132, 99 * 1024)
            assert on_this == plan(32, 8, rows, dim, 1000, size, 132), "what fits is left as it is"

    def test_few_programs_are_split_and_many_are_not(self):
        assert plan(1, 8, 4, 128, 4096, 2, 132).splits >= 16
        assert plan(128, 16, 4, 64, 1024, 2, 132).splits == 1

    def test_no_part_is_shorter_than_two_blocks(self):
        assert split_count(1, 1, 264) == 1
        assert split_count(1, 9, 264) == 4
