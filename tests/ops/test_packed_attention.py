"""Attention within each text of a row, with each instruction set, against its definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastgen.ops import _library
from fastgen.ops import packed_attention as module
from fastgen.ops.packed_attention import packed_attention
from tests.ops.instructions import each_set, instruction_set, threads

pytestmark = pytest.mark.skipif(bool(_library.load("CPU")), reason="there are no kernels in this process")
instruction_sets = pytest.mark.parametrize("name", each_set("default", "avx2", "avx512"))

cases = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.integers(0, 70), min_size=1, max_size=5),
        "kv_heads": st.integers(1, 3),
        "group": st.integers(1, 2),
        "dims": st.tuples(st.integers(1, 70), st.integers(1, 70)),
        "scale": st.sampled_from([None, 0.3, 10.0]),
        "is_by_token": st.booleans(),
        "seed": st.integers(0, 1000),
    }
)
PLAIN: dict[str, Any] = {
    "lengths": [200],
    "kv_heads": 2,
    "group": 1,
    "dims": (32, 32),
    "scale": None,
    "is_by_token": True,
    "seed": 0,
}


def made(case: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(case["seed"])
    tokens, heads = sum(case["lengths"]), case["kv_heads"] * case["group"]

    def some(heads: int, dim: int) -> Tensor:
        if case["is_by_token"]:  # as a linear layer gives them
            return torch.randn(tokens, heads, dim, generator=generator).transpose(0, 1)
        return torch.randn(heads, tokens, dim + 3, generator=generator)[..., :dim]

    dim, value_dim = case["dims"]
    parts = some(heads, dim), some(case["kv_heads"], dim), some(case["kv_heads"], value_dim)
    return *parts, torch.tensor(case["lengths"])


def defined(query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, scale: float | None) -> Tensor:
    query, keys, values = query.double(), keys.double(), values.double()
    group, found = query.shape[0] // keys.shape[0], []
    for text in torch.arange(query.shape[1]).split(lengths.tolist()):
        own, other = (part[:, text].repeat_interleave(group, dim=0) for part in (keys, values))
        scores = query[:, text] @ own.transpose(1, 2) * (scale or query.shape[2] ** -0.5)
        found.append((scores.softmax(-1) @ other).transpose(0, 1))
    return torch.cat(found)


@instruction_sets
@given(case=cases)
@example(case=PLAIN)
@example(case=PLAIN | {"lengths": [129], "dims": (64, 64)})  # two blocks of positions
@example(case=PLAIN | {"lengths": [3, 300, 1], "kv_heads": 1})  # more queries than a task has
@settings(max_examples=30, deadline=None)
def test_result(name, case):
    given = made(case)
    with instruction_set(name):
        found = packed_attention(*given, case["scale"])
    wanted = defined(*given, case["scale"])
    assert found.dtype is torch.float32
    # Scores of a few hundred keep about five digits in float32.
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-3 if case["scale"] == 10.0 else 3e-6)


@instruction_sets
def test_large_scores(name):
    """Blocks with ever larger scores, and scores whose exponential would be beyond float32."""
    query, keys, values, lengths = made(PLAIN | {"lengths": [400]})
    keys *= torch.linspace(1, 60, 400)[:, None]
    with instruction_set(name):
        found = packed_attention(query, keys, values, lengths, 1.0)
    torch.testing.assert_close(found.double(), defined(query, keys, values, lengths, 1.0), rtol=1e-3, atol=1e-3)


@instruction_sets
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_text(name, number):
    query, keys, values, lengths = made(PLAIN | {"lengths": [20, 150, 7]})
    keys[:, 25] = number
    with instruction_set(name):
        found = packed_attention(query, keys, values, lengths, None)
    assert found[20:170].isnan().any(dim=2).all()
    assert found[:20].isfinite().all() and found[170:].isfinite().all()


@instruction_sets
def test_a_text_does_not_depend_on_the_others(name):
    case = PLAIN | {"lengths": [40, 333, 5]}
    query, keys, values, lengths = made(case)
    with instruction_set(name):
        together = packed_attention(query, keys, values, lengths, None)
        begin = 0
        for length in case["lengths"]:
            some = [x[:, begin : begin + length] for x in (query, keys, values)]
            assert packed_attention(*some, torch.tensor([length]), None).equal(together[begin : begin + length])
            begin += length


def test_threads():
    given, found = made(PLAIN | {"lengths": [400, 90, 13]}), []
    for number in (1, 3):
        with threads(number):
            found.append(packed_attention(*given, None))
    assert found[0].equal(found[1])


@pytest.mark.parametrize("lengths", [[199], [201], [-1, 201], [150, 51], [2**62, 2**62]])
def test_lengths_that_do_not_fit(lengths):
    with pytest.raises(RuntimeError, match="packed_attention: lengths"):
        packed_attention(*made(PLAIN)[:3], torch.tensor(lengths), None)


def test_shapes_that_do_not_fit():
    query, keys, values, lengths = made(PLAIN)
    transposed = values.transpose(1, 2).contiguous().transpose(1, 2)
    for parts, message in (
        ((query, keys[:, :-1], values), "do not fit together"),
        ((query[:1], keys, values), "do not fit together"),
        ((query, keys, transposed), "contiguous"),
    ):
        with pytest.raises(RuntimeError, match=message):
            packed_attention(*parts, lengths, None)
        assert not module.serves(*parts)
    assert module.serves(query, keys, values) == module.is_available()
    assert not module.serves(query.double(), keys.double(), values.double())
