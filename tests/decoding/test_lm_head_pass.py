"""Which products of a recording become approximate logits, and which stay exact because somebody reads them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.decoding import graph_passes, lm_head
from fastgen.decoding.captured.program import Program
from fastgen.decoding.captured.recording import record
from fastgen.decoding.lm_head_pass import APPROXIMATE_LOGITS, ARGMAX, TOP_TWO
from fastgen.ops import approximate_logits, top_two
from fastgen.ops.no_repeat_ngram import no_repeat_ngram_

pytestmark = pytest.mark.skipif(not approximate_logits.is_available(), reason="there are no kernels in this process")

ROWS, INPUTS, OUTPUTS = 3, 40, 700
X, WEIGHT, BIAS = torch.randn(ROWS, INPUTS), torch.randn(OUTPUTS, INPUTS), torch.randn(OUTPUTS)
OUT = torch.zeros(ROWS, dtype=torch.int64)
SEEN, WRITTEN = torch.zeros(ROWS, OUTPUTS), torch.randn(OUTPUTS, INPUTS)
TOKENS = torch.randint(OUTPUTS, (ROWS, 12))
COLUMNS, COLUMN = torch.tensor([3, 5, 699]), torch.tensor([5])
DUE = torch.zeros(1, 1, dtype=torch.bool)
OTHER = torch.zeros(ROWS, 1, dtype=torch.bool)


@pytest.fixture(autouse=True)
def with_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_head, "_LEAST_BYTES", 0)


def logits() -> Tensor:
    return F.linear(X.view(ROWS, 1, INPUTS), WEIGHT, BIAS)[:, -1]


def is_estimated(function: Callable[[], Any]) -> bool:
    """Whether the argmax is found from approximate logits; replays find what calls do."""
    with torch.inference_mode():
        recording, _ = record(function)
        names = [each.function for each in graph_passes.run(recording).operations]
        program = Program()
        program.capture(function)
    assert (APPROXIMATE_LOGITS in names) == (ARGMAX in names or TOP_TWO in names)
    for due in (False, True, False):
        X.normal_()
        DUE.fill_(due)
        OTHER.copy_(torch.rand(ROWS, 1) < 0.5)
        written = WRITTEN.clone()
        OUT.fill_(-1)
        program.replay()
        found = OUT.clone()
        OUT.fill_(-1)
        WRITTEN.copy_(written)
        function()
        assert torch.equal(found, OUT)
    return APPROXIMATE_LOGITS in names


def change(scores: Tensor, columns: Tensor, due: Tensor, value: float) -> Tensor:
    return scores.index_copy_(1, columns, scores.index_select(1, columns).masked_fill_(due, value))


def with_bias() -> None:
    OUT.copy_(logits().argmax(dim=-1))


def without_bias() -> None:
    OUT.copy_(F.linear(X, WEIGHT).argmax(dim=1))


def banned() -> None:
    OUT.copy_(logits().index_fill_(1, COLUMNS, -math.inf).argmax(dim=-1))


def banned_if_due() -> None:
    OUT.copy_(change(change(logits(), COLUMNS, DUE, -math.inf), COLUMN, OTHER, -math.inf).argmax(dim=-1))


def n_grams() -> None:
    OUT.copy_(no_repeat_ngram_(logits(), TOKENS, 2).argmax(dim=-1))


def forced() -> None:
    OUT.copy_(change(logits().masked_fill_(DUE, -math.inf), COLUMN, DUE, 0.0).argmax(dim=-1))


@pytest.mark.parametrize("function", [with_bias, without_bias, banned, banned_if_due, n_grams, forced])
def test_estimated(function: Callable[[], None]) -> None:
    assert is_estimated(function)


def top_two_of(scores: Tensor) -> None:
    tokens, is_near = top_two.top_two(scores, 0.1)
    OUT.copy_(tokens + 1000 * is_near)


def test_top_two_are_estimated() -> None:
    assert is_estimated(lambda: top_two_of(logits()))
    assert not is_estimated(lambda: top_two_of(logits() * 2))


def logits_are_kept() -> None:
    scores = logits()
    SEEN.copy_(scores)
    OUT.copy_(scores.argmax(dim=-1))


def kept_after_all() -> None:
    scores = logits()
    OUT.copy_(scores.argmax(dim=-1))
    SEEN.copy_(scores)


def added_to() -> None:
    OUT.copy_((logits() * 2 + SEEN).argmax(dim=-1))


def of_columns() -> None:
    OUT[0].copy_(logits().argmax(dim=0)[0])


def of_everything() -> None:
    OUT[0].copy_(logits().argmax())


def of_some_columns() -> None:
    OUT.copy_(logits()[:, :500].argmax(dim=-1))


def filled_with_a_number() -> None:
    OUT.copy_(logits().index_fill_(1, COLUMNS, 1e3).argmax(dim=-1))


def two_forced() -> None:
    OUT.copy_(change(logits().masked_fill_(DUE, -math.inf), COLUMNS, DUE, 0.0).argmax(dim=-1))


def forced_under_another_condition() -> None:
    OUT.copy_(change(logits().masked_fill_(DUE, -math.inf), COLUMN, OTHER, 1e3).argmax(dim=-1))


def rows_are_filled() -> None:
    OUT.copy_(logits().index_fill_(0, OUT[:1] * 0, -math.inf).argmax(dim=-1))


def columns_of_others() -> None:
    scores = logits()
    OUT.copy_(scores.index_copy_(1, COLUMNS, SEEN.index_select(1, COLUMNS)).argmax(dim=-1))


def penalised() -> None:
    scores = logits()
    scores.scatter_(1, TOKENS, scores.gather(1, TOKENS) / 2)
    OUT.copy_(scores.argmax(dim=-1))


def input_is_changed() -> None:
    x = X * 2
    scores = F.linear(x, WEIGHT)
    x.zero_()
    SEEN.copy_(x[:, :1])
    OUT.copy_(scores.argmax(dim=-1))


def weight_is_made() -> None:
    OUT.copy_(F.linear(X, F.normalize(WEIGHT + X[:1])).argmax(dim=-1))


def weight_is_written_before() -> None:
    WRITTEN.copy_(WEIGHT * X[:1])
    OUT.copy_(F.linear(X, WRITTEN).argmax(dim=-1))


def weight_is_written_afterwards() -> None:
    OUT.copy_(F.linear(X, WRITTEN).argmax(dim=-1))
    WRITTEN.copy_(WEIGHT * X[:1])


def a_row_is_filled() -> None:
    scores = logits()
    row = COLUMN * 0
    OUT.copy_(scores.index_copy_(0, row, scores.index_select(0, row).masked_fill_(DUE, -math.inf)).argmax(dim=-1))


def the_condition_is_written_in_between() -> None:
    due = DUE.clone()
    scores = logits().masked_fill_(due, -math.inf)
    due.logical_or_(OTHER[:1])
    OUT.copy_(change(scores, COLUMN, due, 1e3).argmax(dim=-1))


def half_precision() -> None:
    OUT.copy_(F.linear(X.bfloat16(), WEIGHT.bfloat16()).argmax(dim=-1))


@pytest.mark.parametrize(
    "function",
    [
        logits_are_kept, kept_after_all, added_to, of_columns, of_everything, of_some_columns, filled_with_a_number,
        two_forced, forced_under_another_condition, rows_are_filled, columns_of_others, penalised, input_is_changed,
        half_precision, weight_is_made, weight_is_written_before, weight_is_written_afterwards, a_row_is_filled,
        the_condition_is_written_in_between,
    ],
)  # fmt: skip
def test_not_estimated(function: Callable[[], None]) -> None:
    assert not is_estimated(function)
