"""What is left out of a recording, and what is not. Replays are compared in tests/decoding/captured/test_program.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastgen.decoding import recorded_graph
from fastgen.decoding.captured.program import Program
from fastgen.decoding.captured.recording import record
from fastgen.ops import packed_attention

aten = torch.ops.aten
X = torch.randn(3, 5)
OUT = torch.zeros(3, 5)
SQUARE = torch.arange(25.0).view(5, 5)


def names(function: Callable[[], Any]) -> list[str]:
    with torch.inference_mode():
        recording, _ = record(function)
        found = [
            each.function.overloadpacket._qualified_op_name for each in recorded_graph.run_passes(recording).operations
        ]
    return [name.removeprefix("aten::") for name in found]


def left(function: Callable[[], Any]) -> list[str]:
    """These names; and replays do what calls do."""
    with torch.inference_mode():
        program = Program()
        program.capture(function)
    for _ in range(2):
        x = X.normal_().clone()
        OUT.zero_()
        program.replay()
        results = X.clone(), OUT.clone()
        X.copy_(x)
        OUT.zero_()
        function()
        torch.testing.assert_close((X, OUT), results, rtol=0, atol=0)
    return names(function)


def of_constants() -> None:
    ones = X.new_ones(5) + torch.arange(5.0) * 2
    OUT.copy_(X + ones)


def nobody_reads() -> None:
    unread = (X * 2).exp()
    unread.add_(1.0)
    OUT.copy_(X.topk(5).values)


def copies_that_never_differ() -> None:
    same = X.clone().contiguous().to(torch.float32, copy=True)
    OUT.copy_(same.clone().t().sin().t() + same[1])


def last_reader_writes_to_the_original() -> None:
    torch.mm(X.clone(), SQUARE, out=X)


def original_changes_behind_the_last_reader() -> None:
    OUT.copy_(X.clone() * 2)
    X.mul_(3.0)


def part_of_a_copy_of_a_part() -> None:
    """The copy's numbers are next to each other, those of the part are not."""
    part = X[1:, 2:].clone(memory_format=torch.preserve_format)
    OUT[:1, :2].copy_(part.t()[1:, :1].t())


def part_of_a_copy_of_rows() -> None:
    OUT[1:].copy_(X[1:].clone()[1:, 2:3])


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (of_constants, ["add", "copy_"]),
        (nobody_reads, ["topk", "copy_"]),
        (copies_that_never_differ, ["sin", "add", "copy_"]),
        (last_reader_writes_to_the_original, ["clone", "mm"]),
        (original_changes_behind_the_last_reader, ["mul", "copy_", "mul_"]),
        (part_of_a_copy_of_a_part, ["clone", "copy_"]),
        (part_of_a_copy_of_rows, ["copy_"]),
    ],
)
def test_what_is_left(function: Callable[[], None], expected: list[str]) -> None:
    assert left(function) == expected


def test_a_constant_lives_as_long_as_the_program() -> None:
    program = Program()
    program.capture(lambda: OUT.copy_(torch.arange(15.0).view(3, 5)))
    for _ in range(2):
        torch.full((3, 5), 7.0)
        program.replay()
        assert OUT.flatten().tolist() == list(range(15))
        OUT.zero_()


def written() -> None:
    ones = torch.ones(3, 5)
    ones.add_(X)
    OUT.copy_(ones)


def written_through_a_view() -> None:
    ones = torch.ones(3, 5)
    first = ones * 2
    ones[1:].t().mul_(3.0)
    OUT.copy_(ones + first)


def written_as_out() -> None:
    ones = torch.ones(3, 5)
    torch.add(X, ones, out=ones)
    OUT.copy_(ones)


def filled() -> None:
    """Memory that is allocated and filled is written by an operator that changes it."""
    OUT.copy_(torch.empty(3, 5).fill_(3.0) + X)


@pytest.mark.parametrize(
    ("function", "count"), [(written, 3), (written_through_a_view, 5), (written_as_out, 3), (filled, 3)]
)
def test_what_is_written_later_is_no_constant(function: Callable[[], None], count: int) -> None:
    assert len(left(function)) == count


def test_what_was_there_before_is_no_constant() -> None:
    given = torch.ones(5)
    program = Program()
    program.capture(lambda: OUT.copy_((given * 2).expand(3, 5)))
    given.fill_(4.0)
    program.replay()
    assert (OUT == 8).all()


def test_numbers_of_a_sparse_tensor_are_no_constant() -> None:
    sparse = torch.eye(3).to_sparse()
    result = torch.zeros(3, 3)
    program = Program()
    program.capture(lambda: result.copy_(sparse.to_dense()))
    sparse._values().mul_(5)
    program.replay()
    assert result.equal(5 * torch.eye(3))


def test_random_numbers_are_drawn_though_nobody_reads_them() -> None:
    def steps() -> None:
        torch.rand(3)
        torch.zeros(3).uniform_()
        OUT.copy_(X)

    assert names(steps) == ["rand", "zeros", "uniform_", "copy_"]


def original_changes() -> None:
    copy = X.clone()
    X.add_(1.0)
    OUT.copy_(copy)


def copy_changes() -> None:
    copy = X.clone()
    copy[1] = X[2]
    OUT.copy_(copy + X)


def original_of_a_copy_of_a_copy_changes() -> None:
    copy = X.clone().clone()
    X[2].mul_(2.0)
    OUT.copy_(copy)


def other_layout() -> None:
    OUT.copy_(X.t().clone(memory_format=torch.contiguous_format).view(3, 5))


def other_type() -> None:
    OUT.copy_(X.to(torch.float64).to(torch.float32))


def other_view() -> None:
    OUT.copy_(X.clone().view(torch.int32))


@pytest.mark.parametrize(
    ("function", "copies"),
    [
        (original_changes, 1),
        (copy_changes, 1),
        (original_of_a_copy_of_a_copy_changes, 1),
        (other_layout, 1),
        (other_type, 2),
        (other_view, 1),
    ],
)
def test_copies_that_are_needed(function: Callable[[], None], copies: int) -> None:
    names = left(function)
    assert names.count("clone") + names.count("_to_copy") == copies


WEIGHT, BIAS = torch.arange(10.0).view(5, 2) - 4, torch.tensor([[3.0, -7.0]])
RESULT = torch.zeros(3, 2)


def test_what_is_added_to_a_product_is_its_bias() -> None:
    assert left(lambda: OUT[:, :2].copy_((X.round() @ WEIGHT).view(3, 1, 2).add(BIAS).view(3, 2))) == [
        "round", "addmm", "copy_"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "added",
    [
        lambda product: product.add(BIAS, alpha=2),
        lambda product: product.add(RESULT),
        lambda product: product.add(BIAS[:, :1]),
        lambda product: product.add(BIAS.expand(2, 2)[:, 0]),
        lambda product: product.add(product),
        lambda product: product.add(BIAS).mul(product),
        lambda product: product[:2].add(BIAS),
        lambda product: product.t().contiguous().view(3, 2).add(BIAS),
        lambda product: product.view(2, 3).add(torch.ones(1)),
    ],
)
def test_what_is_no_bias(added: Callable[[Tensor], Tensor]) -> None:
    def steps() -> None:
        result = added(X.round() @ WEIGHT)
        OUT.view(-1)[: result.numel()].copy_(result.reshape(-1))

    assert "mm" in left(steps)


def test_in_half_precision_both_results_are_rounded() -> None:
    weight, bias = WEIGHT.bfloat16(), BIAS.bfloat16()
    assert "mm" in left(lambda: OUT[:, :2].copy_(X.bfloat16() @ weight + bias))


IDS, LINES = torch.tensor([[4, 0, 6], [6, 6, 1]]), torch.randn(7, 5)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (IDS[0], "index_select"),
        (IDS[:1], "index_select"),
        (IDS.int(), "index_select"),
        (IDS[0, :0], "index_select"),
        (IDS[:, :0], "embedding"),
        (IDS[:, 1], "embedding"),
        (IDS.t(), "embedding"),
        (IDS[0, 2], "embedding"),
    ],
)
def test_lines_of_an_embedding(ids: Tensor, expected: str) -> None:
    result = torch.zeros(*ids.shape, 5)

    def step() -> None:
        result.copy_(torch.nn.functional.embedding(ids, LINES, padding_idx=0))

    assert expected in left(step)
    step()
    once = result.clone()
    program = Program()
    program.capture(step)
    program.replay()
    assert torch.equal(result, once) and torch.equal(result, LINES[ids.long()])


def test_an_embedding_of_what_is_no_line_fails() -> None:
    ids, result = torch.tensor([1, 2]), torch.zeros(2, 5)
    program = Program()
    program.capture(lambda: result.copy_(torch.nn.functional.embedding(ids, LINES)))
    ids[1] = 7
    with pytest.raises((IndexError, RuntimeError)):
        program.replay()


def attended(query: Tensor, keys: Tensor, values: Tensor, **options: Any) -> tuple[list[str], float]:
    """The operators that are left of attention, and how far a replay is from what the function gives."""
    out = torch.zeros(2, 5, 4 * 16)

    def steps() -> None:
        result = torch.nn.functional.scaled_dot_product_attention(query, keys, values, **options)
        out.copy_(result.transpose(1, 2).flatten(2))

    with torch.inference_mode():
        found_names, program = names(steps), Program()
        program.capture(steps)
        for part in (query, keys, values):
            part.normal_()
        program.replay()
        found = out.clone()
        steps()
    return found_names, float((found - out).abs().max())


def of_tokens() -> list[Tensor]:
    """As linear layers give them: [texts, heads, length, dim]."""
    return [torch.randn(2, 5, 4, 16).transpose(1, 2) for _ in range(3)]


@pytest.mark.skipif(not packed_attention.is_available(), reason="there are no kernels with vectors in this process")
def test_attention_of_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    for options in ({}, {"scale": 0.5}):
        found, difference = attended(*of_tokens(), **options)
        assert found == ["fastgen::packed_attention", "copy_"] and difference < 1e-6
    torchs = "_scaled_dot_product_flash_attention_for_cpu"
    query, keys, values = of_tokens()
    for options in ({"attn_mask": torch.zeros(5, 5)}, {"is_causal": True}):
        assert attended(query, keys, values, **options) == ([torchs, "copy_"], 0.0)
    # Another number of keys, and texts that do not follow one another in memory.
    assert attended(query, keys[:, :, :3], values[:, :, :3]) == ([torchs, "copy_"], 0.0)
    assert attended(query, *(torch.randn(2, 4, 7, 16)[:, :, :5] for _ in range(2))) == ([torchs, "copy_"], 0.0)
    monkeypatch.setattr(packed_attention, "is_available", lambda: False)
    assert attended(*of_tokens()) == ([torchs, "copy_"], 0.0)
