"""Copies of a model's weights as its draft: what is made again when a weight changes, or a copy goes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fastgen import memory
from fastgen.decoding import derived_weights, layers
from fastgen.decoding.layers import LINEAR, FastLayers
from fastgen.decoding.speculation import draft_sources
from fastgen.decoding.speculation.draft_sources import BOUNDARY, DraftWeights, PromptLookup
from fastgen.ops.linear import choose, copies
from tests.noting import noted

pytestmark = pytest.mark.skipif(choose.unavailable("int8") is not None, reason="there are no kernels in this process")


@pytest.fixture(autouse=True)
def packed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """Layers of any size have a copy; the weights that are copied, in order."""
    monkeypatch.setattr(layers, "MIN_NARROW", 0)
    monkeypatch.setattr(layers, "MIN_WEIGHT", 0)
    found = noted(monkeypatch, copies, "pack", lambda weight, *form: weight)
    with torch.no_grad(), derived_weights.call():
        yield found
    derived_weights.drop_all()


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 60))


def draft(model: nn.Module, precision: str = "int8") -> DraftWeights:
    return DraftWeights.of(model, LINEAR, precision, 64)


def test_only_a_weight_that_has_changed_is_copied_again(model: nn.Sequential, packed: list[torch.Tensor]) -> None:
    before = draft(model)
    assert before.copy() and draft(model) is before and len(packed) == 2
    model[1].weight.mul_(2)
    after = draft(model)
    assert after.number != before.number and after.copy() and len(packed) == 3
    model[0].bias.mul_(2)  # which nothing is copied of
    assert draft(model) is after


def test_what_drafts_goes_with_a_copy(
    model: nn.Sequential, packed: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that were captured with it hold its memory."""
    freed: list[int] = []
    monkeypatch.setattr(memory, "free_captured_steps", lambda: freed.append(1))
    x = torch.randn(3, 40)
    before, expected = draft(model), model(x)
    before.copy()
    derived_weights.drop_all()
    assert len(freed) == 1
    with FastLayers.of(model), before.used():
        torch.testing.assert_close(model(x), expected)
    after = draft(model)
    assert after.number != before.number and after.copy() and len(packed) == 4


def test_copies_in_other_numbers_are_others(model: nn.Sequential, packed: list[torch.Tensor]) -> None:
    x, results = torch.randn(3, 40), []
    for precision in ("int8", "int4"):
        weights = draft(model, precision)
        assert weights.copy()
        with FastLayers.of(model), weights.used():
            results.append(model(x))
    assert len(packed) == 4 and not torch.equal(*results) and not torch.equal(results[0], model(x))


def test_a_model_without_weights_to_copy() -> None:
    with pytest.raises(ValueError, match="no weights for a low-bit self-draft"):
        draft(nn.Sequential(nn.ReLU())).copy()


TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def by_definition(tokens: list[int], max_ngram: int, most: int) -> list[int]:
    for size in range(min(max_ngram, len(tokens) - 1), 0, -1):
        for start in range(len(tokens) - 1, size - 1, -1):
            if tokens[start - size : start] == tokens[-size:]:
                period = tokens[start:]
                return [period[place % len(period)] for place in range(most)]
    return []


@given(
    st.lists(TOKENS, min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 9), st.sampled_from([[], [3], [2, 3]])
)
@settings(max_examples=60)
def test_as_defined(rows, max_ngram, most, eos):
    """At every length, rows of a batch each for itself."""
    lookup = PromptLookup(len(rows), max_ngram, most, eos)
    for length in range(1, max(map(len, rows)) + 1):
        for row, tokens in enumerate(rows):
            if length <= len(tokens):
                lookup.append(row, tokens[length - 1 : length])
                found = by_definition(tokens[:length], max_ngram, most)
                assert lookup.propose(row, most)[0] == list(takewhile(lambda token: token not in eos, found))


def test_most_and_eos():
    lookup = PromptLookup(1, 2, 10, eos=[4])
    lookup.append(0, [1, 2, 3, 4, 5, 1])
    assert lookup.propose(0, 20)[0] == [2, 3]
    assert lookup.propose(0, 1)[0] == [2]
    assert lookup.propose(0, 0) == lookup.propose(0, -3) == ([], 0)
    lookup.append(0, [2, 3])
    assert lookup.propose(0, 10)[0] == []  # what follows is the end


def test_texts_that_do_not_follow_one_another():
    lookup = PromptLookup(1, 2, 4)
    lookup.append(0, [1, 2, 3, BOUNDARY, 9])
    assert lookup.propose(0, 4)[0] == []
    lookup.append(0, [1, 2])
    assert lookup.propose(0, 4) == ([3], 2)
    lookup.append(0, [3])
    assert lookup.propose(0, 4)[0] == []


@given(TOKENS, st.sampled_from([1, 2, 3, 5, 9, 10**9]), st.integers(1, 6))
@settings(max_examples=60)
def test_more_than_is_indexed(tokens, max_ngram, most):
    """An index of every size would take memory for each of them, of which the library takes none. Sizes are limited."""
    with mock.patch.object(draft_sources, "_MOST_INDEXED", 2):
        lookup = PromptLookup(1, max_ngram, most)
    lookup.append(0, tokens)
    assert lookup.propose(0, most)[0] == by_definition(tokens, min(max_ngram, 2), most)
