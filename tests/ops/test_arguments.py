"""Operators that anybody can call: whatever they are given, the process goes on, and nothing else is written.

What has once been wrong is here by name. The fuzzer (tests/ops/fuzz) draws the rest.
"""

from __future__ import annotations

import json
import random
import re
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fastgen.decoding.captured.beam_search import BeamSearch
from fastgen.decoding.kv.rows import StepState
from fastgen.ops import _library
from fastgen.ops import no_repeat_ngram as ngram
from fastgen.ops.linear import grouped, tune  # noqa: F401 (defines evict)
from tests.ops.fuzz import __main__ as fuzzer
from tests.ops.fuzz import cases
from tests.ops.test_search_step import arguments as arguments_of_beams

pytestmark = pytest.mark.skipif(bool(_library.load("CPU")), reason="there are no kernels in this process")

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
ops = torch.ops.fastgen
LARGEST = 2**63 - 1
# Draws of `make test` and of `make test-long`, which runs them in so many parts.
SAMPLE, ALL, PARTS = 460, 100_000, 20
SECONDS_OF_A_DRAW = 60


def advance_arguments() -> dict[str, Any]:
    state = StepState(1, 2, 4, CPU)
    return {
        "parents": torch.tensor([0, 1]), "taken": torch.ones(2, dtype=torch.int64), "stored": torch.tensor(0),
        "numbers": state.position_table, "ancestry": state.ancestry, "seen": torch.tensor(0),
        "positions": [torch.zeros(2, 1, dtype=torch.int64)], "masks": [torch.zeros(2, 9, dtype=torch.int64)],
    }  # fmt: skip


def tensors_of(args: dict[str, Any]) -> list[torch.Tensor]:
    flat = [each for arg in args.values() for each in (arg if isinstance(arg, list) else [arg])]
    return [each for each in flat if isinstance(each, torch.Tensor)]


def assert_refused(operator: Any, args: dict[str, Any], match: str) -> None:
    """Nothing has been written then."""
    before = [tensor.clone() for tensor in tensors_of(args)]
    with pytest.raises(RuntimeError, match=match):
        operator(*args.values())
    assert all(torch.equal(*pair) for pair in zip(before, tensors_of(args), strict=True))


@pytest.mark.parametrize("number", [LARGEST, -(2**63), 2**62])
@pytest.mark.parametrize("name", ["taken", "numbers", "stored", "positions", "width"])
def test_advance_with_counts_that_overflow(name, number):
    args = advance_arguments()
    if name == "width":
        args[name] = number
    else:
        tensor = args[name][0] if isinstance(args[name], list) else args[name]
        tensor.view(-1)[-1] = number
    assert_refused(ops.advance_, args, "search_step")


@pytest.mark.parametrize("written", ["numbers", "ancestry", "seen", "positions", "masks"])
@pytest.mark.parametrize("read", ["parents", "taken", "stored"])
def test_advance_into_what_it_reads(written, read):
    args = advance_arguments()
    target = args[written][0] if isinstance(args[written], list) else args[written]
    memory = torch.zeros(32, dtype=torch.int64)
    memory[: args[read].numel()].copy_(args[read].view(-1))
    args[read] = memory[: args[read].numel()].view(args[read].shape)
    shared = memory.view(target.dtype)[: target.numel()].view(target.shape)
    args[written] = [shared] if isinstance(args[written], list) else shared
    assert_refused(ops.advance_, args, "shares memory")


# Candidates' beams, tokens and ends; then every buffer that is written.
@pytest.mark.parametrize("read", [1, 2, 4, 8, 24])
@pytest.mark.parametrize("written", range(10, 24))
def test_take_beams_into_what_it_reads(written, read):
    search = BeamSearch(2, 3, 4, 6, CPU, (2, 5))
    search.begin(torch.ones(2, 3, dtype=torch.int64), 6)
    args = arguments_of_beams(search)
    source, target = args[read], args[written]
    memory = torch.zeros(64 + source.numel() + target.numel(), dtype=torch.int64)
    memory[: source.numel()].copy_(source.view(-1))
    args[read] = memory[: source.numel()].view(source.shape)
    args[written] = memory.view(target.dtype)[: target.numel()].view(target.shape)
    assert_refused(ops.take_beams_, dict(enumerate(args)), "shares memory")


def decode_arguments(**changed: Any) -> dict[str, Any]:
    prefix = {"prefix_keys": torch.randn(1, 1, 2, 4), "prefix_values": torch.randn(1, 1, 2, 4)}
    suffix = {"suffix_keys": torch.randn(2, 1, 3, 4), "suffix_values": torch.randn(2, 1, 3, 4)}
    return {
        "out": torch.zeros(2, 1, 1, 4), "query": torch.randn(2, 1, 1, 4), **prefix, **suffix, "mask": None,
        "scale": None, "starts": None, "ends": None, "suffix_lengths": torch.tensor(3), "ancestry": None,
        "window": None, "causal": False, "row_map": None, **changed,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["ancestry", "row_map", "suffix_lengths", "starts", "ends"])
def test_decode_attention_into_its_indices(name):
    memory = torch.zeros(8, dtype=torch.int64)
    as_int32 = memory.view(torch.int32)
    indices = {
        "ancestry": as_int32[:6].view(2, 3), "row_map": memory[:2], "suffix_lengths": memory[0],
        "starts": as_int32[:1], "ends": as_int32[:1],
    }  # fmt: skip
    out = memory.view(torch.float32)[:8].view(2, 1, 1, 4)
    assert_refused(ops.decode_attention_out, decode_arguments(out=out, **{name: indices[name]}), "shares memory")


@pytest.mark.parametrize("dim", [2**40, 2**62])
def test_decode_attention_without_keys_but_with_a_huge_head(dim):
    empty = torch.empty(1, 1, 0, dim)
    query = torch.zeros(1, 1, 1, 1).expand(1, 1, 1, dim)
    args = decode_arguments(
        out=torch.zeros(1, 1, 1, 4), query=query, prefix_keys=empty, prefix_values=torch.empty(1, 1, 0, 4),
        suffix_keys=None, suffix_values=None, suffix_lengths=None,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="a head of more than"):
        ops.decode_attention_out(*args.values())
    assert not args["out"].any()


def test_evict_tensors_that_are_expanded_or_have_gaps():
    one = torch.ones(1)
    for x in (one.expand(2**40), one.expand(2**20, 2**30), one.expand(3, 4), torch.ones(8, 8)[::3, 1::2], one[:0]):
        assert ops.evict(x) == ops.evict(torch.ones(3))


@pytest.mark.parametrize(
    ("outputs", "inputs"), [(2**62, 8), (8, 2**62), (2**32, 2**32), (LARGEST, LARGEST), (2**58, 32), (LARGEST, 8)]
)
@pytest.mark.parametrize("count", [0, 1])
def test_grouped_rows_whose_sizes_overflow(outputs, inputs, count):
    """Products of sizes that come to nothing must not fit a weight that is nothing."""
    which, nothing = torch.zeros(count, dtype=torch.int64), torch.empty(0, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="grouped_linear"):
        ops.grouped_rows(torch.zeros(0), which, nothing, torch.empty(0), None, None, outputs, inputs, 8, 8)


def test_grouped_rows_of_a_line_that_is_not_there():
    weight = grouped.rounded(torch.randn(5, 8), 8, 8)
    for line in (-1, 5, LARGEST, -(2**63)):
        which = torch.tensor([0, line])
        with pytest.raises(RuntimeError, match="index out of range"):
            ops.grouped_rows(torch.zeros(0), which, *weight[:4], 5, 8, 8, 8)


def test_kv_write_with_more_rows_of_values_than_positions():
    keys, values, position = torch.ones(2, 1, 4), torch.ones(5, 1, 4), torch.zeros(2, dtype=torch.int64)
    caches = torch.zeros(2, 1, 3, 4), torch.zeros(5, 1, 3, 4)
    args = dict(enumerate((keys, values, *caches, position)))
    assert_refused(ops.kv_write, args, "as many rows of values as of keys")


def test_kv_write_into_a_cache_whose_rows_overlap():
    """That is how rows of different lengths lie (decoding/kv/fixed.py): each at places of its own."""
    new, caches = torch.randn(2, 1, 4), torch.zeros(2, 1, 1, 3, 4)
    ops.kv_write(new, new + 1, *caches.expand(2, 2, 1, 3, 4), torch.tensor([2, 0]))
    for cache, wanted in zip(caches, (new, new + 1), strict=True):
        assert torch.equal(cache[0, 0], torch.stack([wanted[1, 0], torch.zeros(4), wanted[0, 0]]))


@pytest.mark.parametrize(("begin", "fits"), [(4, True), (8, True), (0, False), (1, False), (3, False)])
def test_kv_write_into_one_buffer(begin, fits):
    """K and V of it may lie between each other, but not in each other."""
    both, new = torch.zeros(2, 1, 3, 12), torch.ones(2, 1, 4)
    args = dict(enumerate((new, new, both[..., :4], both[..., begin : begin + 4], torch.tensor(1))))
    if not fits:
        assert_refused(ops.kv_write, args, "shares memory")
        return
    ops.kv_write(*args.values())
    assert both[:, :, 1, :4].all() and both[:, :, 1, begin : begin + 4].all() and both.sum() == 16


@pytest.mark.parametrize("operator", [ops.no_repeat_ngram_, ngram.reference], ids=["kernel", "reference"])
@pytest.mark.parametrize("of", ["tokens", "context", "scores"])
def test_no_repeat_ngram_sizes_beyond_32_bits(operator, of):
    given = {"scores": torch.zeros(1, 4), "tokens": torch.ones(1, 4, dtype=torch.int64), "context": None}
    tensor = torch.ones(1, 1, dtype=torch.int64 if of != "scores" else torch.float32)
    given[of] = tensor.expand(1, 2**31) if of != "scores" else torch.empty(0, 1).expand(0, 2**40)
    if of == "scores":
        given["tokens"] = given["tokens"][:0]
    with pytest.raises(RuntimeError, match="beyond 32 bits"):
        operator(given["scores"], given["tokens"], None, 2, context=given["context"])


@pytest.mark.parametrize("operator", [ops.no_repeat_ngram_, ngram.reference], ids=["kernel", "reference"])
@pytest.mark.parametrize("n", [2**31, 2**33, LARGEST])
def test_no_repeat_ngram_of_more_than_there_are(operator, n):
    scores = torch.randn(2, 5)
    before = scores.clone()
    assert torch.equal(operator(scores, torch.ones(2, 9, dtype=torch.int64), None, n), before)


@pytest.mark.parametrize("operator", [ops.no_repeat_ngram_, ngram.reference], ids=["kernel", "reference"])
def test_no_repeat_ngram_over_its_tokens(operator):
    memory = torch.zeros(8, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="shares memory"):
        operator(memory.view(2, 4), memory.view(torch.int64).view(2, 4), None, 2)


def test_a_storage_that_is_too_small():
    x = torch.ones(1000)
    x.untyped_storage().resize_(8)
    with pytest.raises(RuntimeError, match="smaller than its sizes say"):
        ops.fingerprint(x)


def test_numbers_that_are_not_aligned():
    x = torch.frombuffer(bytearray(41), dtype=torch.float32, offset=1, count=10)
    with pytest.raises(RuntimeError, match="not aligned"):
        ops.fingerprint(x)


def test_a_team_of_more_threads_than_a_process_has():
    assert not ops.take_team(LARGEST)
    assert not ops.take_team(10**6)
    assert ops.take_team(2)
    ops.give_team_back()


# ---- all arguments


def fuzz(seed: int, draws: int) -> dict[str, dict[str, int]]:
    """Counts of each operator. Fails with the seed where the process ends or hangs, or an operator is wrong."""
    command = [sys.executable, "-m", "tests.ops.fuzz", "--seed", str(seed), "--draws", str(draws)]
    with tempfile.TemporaryDirectory() as folder:
        progress = Path(folder, "progress")
        progress.write_bytes(bytes(8))
        with Path(folder, "output").open("w+") as output:
            process = subprocess.Popen(
                [*command, "--progress", str(progress)], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, text=True
            )
            last, since = -1, time.monotonic()
            while process.poll() is None:
                time.sleep(0.1)
                number = struct.unpack("q", progress.read_bytes())[0]
                if number != last:
                    last, since = number, time.monotonic()
                elif time.monotonic() - since > SECONDS_OF_A_DRAW:
                    process.kill()
            output.seek(0)
            printed = output.read()
        number = struct.unpack("q", progress.read_bytes())[0]
    again = f"python -m tests.ops.fuzz --seed {seed} --only {number}"
    assert process.returncode == 0, f"exit code {process.returncode} at {again}\n{printed}"
    counts: dict[str, dict[str, int]] = json.loads(re.findall(r"^\{.*\}$", printed, re.MULTILINE)[-1])
    return counts


def assert_reached(counts: dict[str, dict[str, int]], share: float) -> None:
    """Every operator, and at least that share of its draws accepted and right, where this processor has it."""
    for name, found in counts.items():
        serves = name not in ("pack_bf16", "bf16_gemm", "bf16x3_gemm_out") or found["right"]
        total = sum(found.values())
        assert total > 0 and (not serves or found["right"] >= share * total), (name, found)


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "another type": lambda x: x.to(torch.complex64),
    "a dimension more": lambda x: x.unsqueeze(0),
    "a row more": lambda x: torch.cat([x, x[-1:]]) if x.dim() and len(x) else x.expand(3),
}
# These take numbers of any type and shape.
OF_ANY = {"evict", "fingerprint", "elementwise"}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", sorted(cases.CASES.keys() - OF_ANY))
def test_each_argument_is_checked(name, change):
    """Of arguments that fit, one is changed at a time: an error, and nothing has been written."""
    operator = fuzzer.overload(name)
    schema = operator._schema.arguments
    for seed in range(3):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        case = cases.CASES[name](rng)
        for place, arg in enumerate(case.args):
            several = isinstance(arg, list)
            for number, x in enumerate(arg if several else [arg]):
                if not isinstance(x, torch.Tensor):
                    continue
                other = CHANGES[change](x)
                args = list(case.args)
                args[place] = [*arg[:number], other, *arg[number + 1 :]] if several else other
                plain = [each for each, about in zip(args, schema, strict=True) if not about.kwarg_only]
                named = {about.name: each for each, about in zip(args, schema, strict=True) if about.kwarg_only}
                before = [tensor.clone() for tensor in tensors_of(dict(enumerate(args)))]
                with pytest.raises((RuntimeError, NotImplementedError)):
                    operator(*plain, **named)
                    pytest.fail(f"{schema[place].name} is taken with {change}")
                after = tensors_of(dict(enumerate(args)))
                assert all(torch.equal(*pair) for pair in zip(before, after, strict=True)), schema[place].name


def test_every_operator_has_a_generator():
    assert set(fuzzer.operators()) == set(cases.CASES)


def test_a_sample_of_all_arguments():
    counts = fuzz(0, SAMPLE)
    assert sum(sum(found.values()) for found in counts.values()) == SAMPLE
    assert_reached(counts, 0.05)


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_all_arguments(part):
    counts = fuzz(part + 1, ALL // PARTS)
    assert_reached(counts, 0.25)
