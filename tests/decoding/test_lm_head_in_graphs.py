"""Which products of a recording become estimates, and which stay as they are because somebody sees their outputs."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastgen.decoding import lm_head, recorded_graph
from fastgen.decoding.captured.program import Program
from fastgen.decoding.captured.recording import record
from fastgen.decoding.lm_head import APPROXIMATE_LOGITS, ARGMAX, TOP_TWO
from fastgen.ops import approximate_logits, search_step
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


def is_estimated(function: Callable[[], Tensor]) -> bool:
    """Whether the largest outputs are found from estimates; replays find what calls do."""

    def step() -> None:
        found = function()
        OUT.view(-1)[: found.numel()].copy_(found.view(-1))

    with torch.inference_mode():
        recording, _ = record(step)
        names = [each.function for each in lm_head.with_greedy_heads(recorded_graph.run_passes(recording).operations)]
        program = Program()
        program.capture(step)
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
        step()
        assert torch.equal(found, OUT)
    return APPROXIMATE_LOGITS in names


def best(scores: Tensor) -> Tensor:
    return scores.argmax(dim=-1)


def change(scores: Tensor, columns: Tensor, due: Tensor, value: float) -> Tensor:
    return scores.index_copy_(1, columns, scores.index_select(1, columns).masked_fill_(due, value))


def ruled_out() -> Tensor:
    return logits().masked_fill_(DUE, -math.inf)


def top_two_of(scores: Tensor) -> Tensor:
    tokens, is_near = search_step.top_two(scores, 0.1)
    return tokens + 1000 * is_near


ESTIMATED: dict[str, Callable[[], Tensor]] = {
    "with a bias": lambda: best(logits()),
    "without a bias": lambda: F.linear(X, WEIGHT).argmax(dim=1),
    "banned": lambda: best(logits().index_fill_(1, COLUMNS, -math.inf)),
    "banned if due": lambda: best(change(change(logits(), COLUMNS, DUE, -math.inf), COLUMN, OTHER, -math.inf)),
    "n-grams": lambda: best(no_repeat_ngram_(logits(), TOKENS, 2)),
    "forced": lambda: best(change(ruled_out(), COLUMN, DUE, 0.0)),
    "the two best": lambda: top_two_of(logits()),
}


@pytest.mark.parametrize("name", ESTIMATED)
def test_estimated(name: str) -> None:
    assert is_estimated(ESTIMATED[name])


def logits_are_kept() -> Tensor:
    scores = logits()
    SEEN.copy_(scores)
    return best(scores)


def kept_after_all() -> Tensor:
    scores = logits()
    OUT.copy_(best(scores))
    SEEN.copy_(scores)
    return OUT


def columns_of_others() -> Tensor:
    scores = logits()
    return best(scores.index_copy_(1, COLUMNS, SEEN.index_select(1, COLUMNS)))


def penalised() -> Tensor:
    scores = logits()
    return best(scores.scatter_(1, TOKENS, scores.gather(1, TOKENS) / 2))


def input_is_changed() -> Tensor:
    x = X * 2
    scores = F.linear(x, WEIGHT)
    x.zero_()
    SEEN.copy_(x[:, :1])
    return best(scores)


def weight_is_written_before() -> Tensor:
    WRITTEN.copy_(WEIGHT * X[:1])
    return best(F.linear(X, WRITTEN))


def weight_is_written_afterwards() -> Tensor:
    OUT.copy_(best(F.linear(X, WRITTEN)))
    WRITTEN.copy_(WEIGHT * X[:1])
    return OUT


def a_row_is_filled() -> Tensor:
    scores, row = logits(), COLUMN * 0
    return best(scores.index_copy_(0, row, scores.index_select(0, row).masked_fill_(DUE, -math.inf)))


def the_condition_is_written_in_between() -> Tensor:
    due = DUE.clone()
    scores = logits().masked_fill_(due, -math.inf)
    due.logical_or_(OTHER[:1])
    return best(change(scores, COLUMN, due, 1e3))


NOT_ESTIMATED: dict[str, Callable[[], Tensor]] = {
    "logits are kept": logits_are_kept,
    "kept after all": kept_after_all,
    "added to": lambda: best(logits() * 2 + SEEN),
    "the two best of others": lambda: top_two_of(logits() * 2),
    "of columns": lambda: logits().argmax(dim=0)[:1],
    "of everything": lambda: logits().argmax(),
    "of some columns": lambda: best(logits()[:, :500]),
    "filled with a number": lambda: best(logits().index_fill_(1, COLUMNS, 1e3)),
    "two forced": lambda: best(change(ruled_out(), COLUMNS, DUE, 0.0)),
    "forced under another condition": lambda: best(change(ruled_out(), COLUMN, OTHER, 1e3)),
    "rows are filled": lambda: best(logits().index_fill_(0, OUT[:1] * 0, -math.inf)),
    "columns of others": columns_of_others,
    "penalised": penalised,
    "input is changed": input_is_changed,
    "weight is made": lambda: best(F.linear(X, F.normalize(WEIGHT + X[:1]))),
    "weight is written before": weight_is_written_before,
    "weight is written afterwards": weight_is_written_afterwards,
    "a row is filled": a_row_is_filled,
    "the condition is written in between": the_condition_is_written_in_between,
    "half precision": lambda: best(F.linear(X.bfloat16(), WEIGHT.bfloat16())),
}


@pytest.mark.parametrize("name", NOT_ESTIMATED)
def test_not_estimated(name: str) -> None:
    assert not is_estimated(NOT_ESTIMATED[name])
