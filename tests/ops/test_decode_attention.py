"""Decode attention on the CPU, with each instruction set, against its reference in plain torch."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastgen.ops import _library
from fastgen.ops import gpu as package
from fastgen.ops.attention import composed, decode_attention, reference
from tests.ops.gpu.test_attention import PLAIN, TOLERANCE, assert_right, make
from tests.ops.gpu.test_attention import cases as gpu_cases
from tests.ops.instructions import each_set, instruction_set, threads

needs_kernel = pytest.mark.skipif(bool(_library.load("CPU")), reason="there are no kernels in this process")
instruction_sets = pytest.mark.parametrize("name", each_set("default", "avx2", "avx512"))
CPU = torch.device("cpu")

# What the kernel for the CPU takes beyond what the cases of the one for GPUs have.
MORE = {
    "per_input": st.integers(1, 4),
    "queries": st.integers(1, 3),
    # Around the kernel's blocks of 64 positions, and the chunks of 256 and more that a prefix is divided into.
    "prefix": st.integers(0, 70) | st.sampled_from([127, 129, 200, 257, 530]),
    "dims": st.sampled_from([(1, 1), (7, 7), (33, 5), (16, 31), (64, 64), (65, 130), (80, 80), (128, 100), (256, 1)]),
    "padding": st.sampled_from(["none", "left", "right", "all", "both"]),
    "filled": st.sampled_from([None, 0, 1, 2, 10**6, -1]),  # None: as many as the case has
    "bias": st.sampled_from(
        ["none", "bool", "a number", "positions", "heads", "rows", "rows and heads", "all", "all masked"]
    ),
    "bias_type": st.sampled_from(["float32", "query"]),
    "window": st.sampled_from([None, 0, 1, 17, 60, 10**6]),
    "embedded": st.booleans(),
}
cases = st.tuples(gpu_cases, st.fixed_dictionaries(MORE)).map(lambda parts: parts[0] | parts[1])
SIMPLE = PLAIN | {"queries": 1, "filled": None, "bias_type": "query", "embedded": False}


def embedded(tensor):
    shape = [2 * size + 3 for size in tensor.shape]
    memory = torch.full(shape, math.nan, dtype=tensor.dtype)
    view = memory[tuple(slice(1, 1 + 2 * size, 2) for size in tensor.shape[:-1])][..., 2 : 2 + tensor.shape[-1]]
    return view.copy_(tensor)


def arguments_of(case):
    arguments = make(case | {"bias": "none", "padding": case["padding"].replace("both", "none")}, CPU)
    if "starts" in arguments:
        arguments["starts"] = arguments["starts"].int()
    generator = torch.Generator().manual_seed(case["seed"])
    batch, _, prefix, _ = arguments["prefix_keys"].shape
    if case["padding"] == "both":  # some of the ranges are empty, some of the bounds lie outside
        arguments["starts"], arguments["ends"] = torch.randint(-2, prefix + 3, (2, batch), generator=generator).int()
        for b, (start, end) in enumerate(zip(arguments["starts"].tolist(), arguments["ends"].tolist(), strict=True)):
            for name in ("prefix_keys", "prefix_values"):
                arguments[name][b, :, : max(start, 0)] = math.nan
                arguments[name][b, :, max(end, 0) :] = math.nan
    capacity = arguments["suffix_keys"].shape[2] if "suffix_keys" in arguments else 0
    if capacity and case["filled"] is not None:
        filled = min(max(case["filled"], 0), capacity)
        arguments["suffix_lengths"].fill_(case["filled"])
        for name in ("suffix_keys", "suffix_values"):
            arguments[name].normal_(generator=generator)[:, :, filled:] = math.nan
        if "ancestry" in arguments:
            own = torch.arange(len(arguments["query"]), dtype=torch.int32).unsqueeze(1)
            arguments["ancestry"][:] = own // case["per_input"] * case["per_input"]
            arguments["ancestry"][:, filled:] = -1
    rows, heads, _, dim = arguments["query"].shape
    positions, queries = prefix + capacity, case["queries"]
    if queries > 1:
        arguments["query"] = torch.randn(rows, heads, queries, dim, generator=generator).to(case["dtype"])
    shape = {
        "a number": (1,), "positions": (positions,), "heads": (heads, 1, positions), "rows": (rows, 1, 1, positions),
        "rows and heads": (rows, heads, 1, 1), "all": (rows, heads, queries, positions),
        "bool": (rows, 1, 1, positions), "all masked": (1, 1, 1, positions),
    }.get(case["bias"])  # fmt: skip
    if shape is not None:
        bias = torch.randn(shape, generator=generator)
        bias[torch.rand(shape, generator=generator) < (2 if case["bias"] == "all masked" else 0.2)] = -math.inf
        arguments["mask"] = bias.to(case["dtype"] if case["bias_type"] == "query" else torch.float32)
        if case["bias"] == "bool":
            arguments["mask"] = ~bias.isneginf()
    if case["embedded"]:
        for name in ("query", "prefix_keys", "prefix_values", "suffix_keys", "suffix_values", "mask"):
            if name in arguments and arguments[name].is_floating_point():
                arguments[name] = embedded(arguments[name])
    return arguments


FLOATS = ("query", "prefix_keys", "prefix_values", "suffix_keys", "suffix_values")
NAMES = ("query", "prefix_keys", "prefix_values", "suffix_keys", "suffix_values", "mask", "scale", "starts", "ends",
         "suffix_lengths", "ancestry", "window", "causal", "row_map")  # fmt: skip


def kernel(out=None, **arguments):
    """The operator itself, into memory that holds NaN."""
    if out is None:
        query, values = arguments["query"], arguments["prefix_values"]
        out = query.new_full((*query.shape[:3], values.shape[3]), math.nan)
    torch.ops.fastgen.decode_attention_out(
        out, *[arguments.get(name, False if name == "causal" else None) for name in NAMES]
    )
    return out


@needs_kernel
@instruction_sets
@given(case=cases)
@example(case=SIMPLE | {"prefix": 0, "suffix": 0})
@example(case=SIMPLE | {"prefix": 0, "suffix": 1})
@example(case=SIMPLE | {"filled": 0})
@example(case=SIMPLE | {"padding": "all", "suffix": 0})
@example(case=SIMPLE | {"padding": "left", "window": 30})
@example(case=SIMPLE | {"padding": "both", "bias": "rows", "embedded": True})
@example(case=SIMPLE | {"bias": "all masked"})
@example(case=SIMPLE | {"prefix": 600, "padding": "right", "window": 300, "bias": "all"})  # the prefix in chunks
@example(case=SIMPLE | {"prefix": 600, "padding": "left", "dtype": torch.bfloat16, "embedded": True})
@example(case=SIMPLE | {"prefix": 600, "filled": 0, "padding": "both"})
@example(case=SIMPLE | {"prefix": 3, "suffix": 200, "window": 70})  # suffixes are tasks of their own
@example(case=SIMPLE | {"row_lengths": True, "prefix": 600, "window": 300, "suffix": 40})
@example(case=SIMPLE | {"row_lengths": True, "prefix": 3, "suffix": 200, "window": 70, "ancestry": False})
@example(case=SIMPLE | {"row_lengths": True, "bias": "all", "embedded": True, "padding": "both"})
@settings(max_examples=30)
def test_kernel(name, case):
    arguments = arguments_of(case)
    with instruction_set(name):
        found = kernel(**arguments)
    assert not found.isnan().any()
    assert_right(case, found, reference(**arguments).double())


@given(case=cases)
@settings(max_examples=50)
def test_operations_of_torch(case):
    """What hooks do where the kernel does not pay."""
    plain = {"prefix": case["prefix"] + 1, "padding": "none", "window": None, "row_lengths": False, "filled": None}
    args, length = arguments_of(case | plain), case["suffix"]
    parts = {name: args[name][:, :, :length] for name in ("suffix_keys", "suffix_values") if name in args}
    if "ancestry" in args:
        parts["ancestry"] = args["ancestry"][:, :length]
    if "mask" in args:
        parts["mask"] = args["mask"][..., : case["prefix"] + 1 + length]
    parts |= {name: args[name] for name in ("query", "prefix_keys", "prefix_values", "scale")}
    wanted = reference(**{name: x.double() if name in FLOATS else x for name, x in parts.items()})
    tolerance = TOLERANCE[case["dtype"]] * (3 if case["dtype"].itemsize == 2 else 1)
    found = composed(**parts)
    assert found.dtype is case["dtype"]
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


@needs_kernel
@instruction_sets
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"prefix": 600, "padding": "both", "bias": "rows"},
        {"prefix": 600, "window": 300, "dtype": torch.bfloat16},
        {"prefix": 3, "suffix": 200, "window": 70, "group": 7},
        {"prefix": 40, "suffix": 200, "ancestry": False, "per_input": 1, "batch": 5},
    ],
    ids=str,
)
def test_a_row_gets_the_bits_that_its_length_gives_to_all(name, changes):
    """One that is empty, too; with memory of which other lengths see more, or less."""
    arguments = arguments_of(SIMPLE | {"row_lengths": True} | changes)
    rows = len(arguments["query"])
    for part in ("suffix_keys", "suffix_values"):
        arguments[part].nan_to_num_()
    if "ancestry" in arguments:
        own = torch.arange(rows, dtype=torch.int32).unsqueeze(1)
        arguments["ancestry"][:] = torch.where(arguments["ancestry"] < rows, arguments["ancestry"], own)
    arguments["suffix_lengths"][0] = 0
    with instruction_set(name):
        found = kernel(**arguments)
        for row, length in enumerate(arguments["suffix_lengths"]):
            wanted = kernel(**(arguments | {"suffix_lengths": length}))
            assert torch.equal(found[row], wanted[row])


@needs_kernel
@instruction_sets
@pytest.mark.parametrize("prefix", [0, 20, 600])
def test_rows_that_see_nothing_give_zeros(name, prefix):
    """One that is masked, among others that are not, and an input that is padding."""
    arguments = arguments_of(SIMPLE | {"prefix": prefix, "suffix": 10})
    mask = torch.zeros(8, 1, 1, prefix + 13)
    mask[2] = -math.inf
    with instruction_set(name):
        found = kernel(**arguments, mask=mask)
        assert not found[2].any() and found[[0, 1, 3]].any(-1).all()
        arguments["starts"] = torch.tensor([prefix, 0], dtype=torch.int32)
        arguments["suffix_lengths"].zero_()
        found = kernel(**arguments)
    assert not found[:4].any() and found[4:].any(-1).all() == (prefix > 0)


@needs_kernel
@pytest.mark.parametrize("changes", [{}, {"prefix": 3, "suffix": 300}, {"prefix": 2000, "batch": 1, "kv_heads": 1}])
def test_the_number_of_threads_does_not_matter(changes):
    arguments = arguments_of(SIMPLE | {"prefix": 600, "dims": (80, 80), "group": 7} | changes)
    found = []
    for number in (1, 2, 3, 7):
        with threads(number):
            found.append(kernel(**arguments))
    for other in found[1:]:
        # Whether suffixes are tasks of their own, and are added up in another order, depends on the threads.
        torch.testing.assert_close(other, found[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[0], reference(**arguments), rtol=2e-5, atol=2e-5)


@needs_kernel
@instruction_sets
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_room_beside_a_prefix_changes_no_bit(name, dtype):
    """Buffers are as large as any call so far has needed: a prefix may be anywhere in them."""
    arguments = arguments_of(SIMPLE | {"prefix": 600, "padding": "none", "bias": "none", "dtype": dtype})
    batch, heads, length, _ = arguments["prefix_keys"].shape
    arguments |= {"starts": torch.tensor([0, 40]).int(), "ends": torch.tensor([600, 600]).int()}
    arguments["prefix_values"] = torch.randn_like(arguments["prefix_values"], dtype=torch.float32).to(dtype)
    with instruction_set(name):
        wanted = kernel(**arguments)
        for before, behind in ((0, 50), (1500, 0), (700, 900)):
            moved = {bound: arguments[bound] + before for bound in ("starts", "ends")}
            for part in ("prefix_keys", "prefix_values"):
                dim = arguments[part].shape[3]
                moved[part] = torch.full((batch, heads, before + length + behind, dim), math.nan, dtype=dtype)
                moved[part][:, :, before : before + length] = arguments[part]
            assert torch.equal(kernel(**arguments | moved), wanted)


ROWS, HEADS, DIM, CAPACITY = 4, 2, 8, 6


@needs_kernel
@instruction_sets
@pytest.mark.parametrize(("per_input", "suffix"), [(1, 20), (3, 20), (1, 0)])
def test_rows_that_read_any_row_of_the_store(name, per_input, suffix):
    """The same bits as with a store of what each of them reads; rows may be more than those of the store, or fewer."""
    case = SIMPLE | {"per_input": per_input, "suffix": suffix, "ancestry": False, "padding": "both", "group": 2}
    stored = arguments_of(case)
    for count in (1, 4, 11):
        row_map = torch.randint(0, len(stored["query"]), (count,))
        given = stored | {"query": torch.randn(count, *stored["query"].shape[1:]), "row_map": row_map}
        each = {part: tensor[row_map // per_input] for part, tensor in given.items() if part.startswith("prefix")}
        each |= {bound: given[bound][row_map // per_input] for bound in ("starts", "ends")}
        if suffix:
            given["suffix_lengths"] = torch.randint(0, suffix + 1, (count,))
            each |= {part: given[part][row_map] for part in ("suffix_keys", "suffix_values")}
        with instruction_set(name):
            found = decode_attention(**given)
            assert torch.equal(found, kernel(**(given | each | {"row_map": None})))
        torch.testing.assert_close(found, reference(**given), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({}, TOLERANCE[torch.float32]),
        ({"starts": torch.tensor([3, 0]), "ends": torch.tensor([50, 20])}, 0),
        ({"starts": torch.tensor([3, 9, 0, 9]).int()[::2]}, 0),
        ({"suffix_lengths": torch.tensor([20]).int()}, 0),
        ({"mask": torch.randn(2, 1, 73).double()}, 0),
        ({"mask": torch.randn(2, 1, 73).half()}, 0),
        ({"mask": torch.randn(73)}, TOLERANCE[torch.float32]),
        ("double", 0),
    ],
)
def test_what_the_kernel_does_not_take_is_computed_by_torch(changes, tolerance):
    arguments = arguments_of(SIMPLE)
    if changes == "double":
        changes = {
            name: value.double() for name, value in arguments.items() if getattr(value, "is_floating_point", bool)()
        }
    arguments |= changes
    with mock.patch.object(package, "available", lambda *tensors: False):
        found = decode_attention(**arguments)
    torch.testing.assert_close(found, reference(**arguments), rtol=tolerance, atol=tolerance)
