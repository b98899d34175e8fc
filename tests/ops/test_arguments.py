"""Operators that anybody can call: whatever they are given, the process goes on, and nothing else is written.

What has once been wrong is here by name. test_every_argument.py changes each argument in turn, and the fuzzer
(tests/ops/fuzz) draws the rest.
"""

from __future__ import annotations

import json
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

from fastgen.decoding.kv.rows import StepState
from fastgen.ops import (
    _library,
    fingerprint,
    search_step,  # noqa: F401 (these define operators)
)
from fastgen.ops import no_repeat_ngram as ngram
from fastgen.ops.linear import copies
from tests.ops.fuzz import __main__ as fuzzer
from tests.ops.fuzz import cases

pytestmark = pytest.mark.skipif(bool(_library.load("CPU")), reason="there are no kernels in this process")

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
ops = torch.ops.fastgen
LARGEST = 2**63 - 1
# Draws of `make test` and of `make test-long`, which runs them in so many parts.
SAMPLE, ALL, PARTS = 500, 100_000, 20
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


def decode_arguments(**changed: Any) -> dict[str, Any]:
    prefix = {"prefix_keys": torch.randn(1, 1, 2, 4), "prefix_values": torch.randn(1, 1, 2, 4)}
    suffix = {"suffix_keys": torch.randn(2, 1, 3, 4), "suffix_values": torch.randn(2, 1, 3, 4)}
    return {
        "out": torch.zeros(2, 1, 1, 4), "query": torch.randn(2, 1, 1, 4), **prefix, **suffix, "mask": None,
        "scale": None, "starts": None, "ends": None, "suffix_lengths": torch.tensor(3), "ancestry": None,
        "window": None, "causal": False, "row_map": None, **changed,
    }  # fmt: skip


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
    weight = copies.rounded(torch.randn(5, 8), 8, 8)
    for line in (-1, 5, LARGEST, -(2**63)):
        which = torch.tensor([0, line])
        with pytest.raises(RuntimeError, match="index out of range"):
            ops.grouped_rows(torch.zeros(0), which, *weight[:4], 5, 8, 8, 8)


KV = torch.zeros(2, 1, 3, 12)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"values": torch.ones(5, 1, 4), "value_cache": torch.zeros(5, 1, 3, 4)}, "as many rows of values as of keys"),
        ({f"{of}_cache": torch.zeros(1, 1, 3, 4).expand(2, 1, 3, 4) for of in ("key", "value")}, "pass a copy"),
        *(({"row_map": torch.tensor(each)}, "row map") for each in ([0, 3], [-1, 0], [0], [1.0, 1.0])),
        # In one buffer, K and V may lie between each other, but not in each other.
        *(({"key_cache": KV[..., :4], "value_cache": KV[..., n : n + 4]}, "shares memory") for n in (0, 1, 3)),
        ({"key_cache": KV[..., :4], "value_cache": KV[..., 4:8]}, None),
        ({"key_cache": KV[..., :4], "value_cache": KV[..., 8:]}, None),
    ],
)
def test_kv_write(changes, match):
    args = {name: torch.ones(2, 1, 4) for name in ("keys", "values")}
    args |= {name: torch.zeros(2, 1, 3, 4) for name in ("key_cache", "value_cache")}
    args |= {"position": torch.tensor([2, 0]), "row_map": None} | changes
    if match is not None:
        assert_refused(ops.kv_write, args, match)
        return
    KV.zero_()
    ops.kv_write(*args.values())
    assert all(args[name][row, :, at].all() for name in ("key_cache", "value_cache") for row, at in ((0, 2), (1, 0)))
    assert KV.sum() == 16


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


def test_a_storage_that_is_too_small():
    x = torch.ones(1000)
    x.untyped_storage().resize_(8)
    with pytest.raises(RuntimeError, match="smaller than its sizes say"):
        fingerprint.fingerprint(x)


def test_numbers_that_are_not_aligned():
    x = torch.frombuffer(bytearray(41), dtype=torch.float32, offset=1, count=10)
    with pytest.raises(RuntimeError, match="not aligned"):
        fingerprint.fingerprint(x)


@pytest.mark.parametrize("lazy", [lambda x: torch.complex(x, -x).conj().imag, lambda x: torch.complex(x, x).conj()])
def test_views_that_negate_or_conjugate(lazy: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """They are read, and not written to. torch's own way with them would write to memory that has been given back."""
    out, written = torch.empty(1, 3), lazy(torch.rand(1, 3))
    columns = torch.empty(1, 3, dtype=torch.int64)
    x, weight = torch.tensor([[3.0, 1.0, 2.0]]), torch.rand(3, 3)
    assert written.is_neg() or written.is_conj()
    assert_refused(ops.sort_rows_out, {"values": written, "columns": columns, "x": x}, "values is a view that negates")
    batch = {"out": [written, out], "x": x, "weight": [weight, weight], "bias": [None, None]}
    assert_refused(ops.gemv_batch_out, batch, "out is a view that negates")
    if written.is_neg():
        ops.sort_rows_out(out, columns, lazy(x))
        assert torch.equal(out, x.sort().values) and torch.equal(columns, x.argsort())


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
    """Every operator, and at least that share of its draws fit and are accepted, where this processor has it."""
    for name, found in counts.items():
        serves = name not in ("pack_bf16", "bf16_gemm", "bf16x3_gemm_out") or found["accepted"]
        total = sum(found.values())
        assert total > 0 and (not serves or found["accepted"] >= share * total), (name, found)


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
