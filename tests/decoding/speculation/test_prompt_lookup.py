"""Drafts from an index of n-grams, against Transformers' search through all tokens."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen.decoding.speculation import prompt_lookup
from fastgen.decoding.speculation.prompt_lookup import BOUNDARY, PromptLookup

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def of_the_library(tokens: list[int], max_ngram: int, most: int, eos: list[int], processor=None) -> list[int]:
    library = pytest.importorskip("transformers.generation.candidate_generator")
    generator = library.PromptLookupCandidateGenerator(
        eos_token_id=torch.tensor(eos) if eos else None,
        num_output_tokens=most,
        max_matching_ngram_size=max_ngram,
        max_length=len(tokens) + 1000,
        logits_processor=processor,
        vocab_size=8,
    )
    return generator.get_candidates(torch.tensor([tokens]))[0][0, len(tokens) :].tolist()


@given(
    st.lists(TOKENS, min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 6), st.sampled_from([[], [3], [2, 3]])
)
@settings(max_examples=60)
def test_like_the_library(rows, max_ngram, most, eos):
    """At every length, rows of a batch each for itself."""
    lookup = PromptLookup(len(rows), max_ngram, most, eos)
    for row, tokens in enumerate(rows):
        lookup.append(row, tokens[:1])
    for length in range(1, max(map(len, rows)) + 1):
        for row, tokens in enumerate(rows):
            if length <= len(tokens):
                assert lookup.propose(row) == of_the_library(tokens[:length], max_ngram, most, eos)
                lookup.append(row, tokens[length : length + 1])


@given(TOKENS, st.integers(1, 3), st.integers(1, 6), st.sampled_from([[], [3]]))
@settings(max_examples=60)
def test_banned_tokens_like_the_library(tokens, max_ngram, most, eos):
    """A processor that bans a token after another one: what is banned depends on the draft itself."""

    def banned(before: int) -> int:
        return (before + 1) % 4

    def processor(input_ids, scores):
        return scores.clone().index_fill(1, torch.tensor([banned(int(input_ids[0, -1]))]), -torch.inf)

    def allowed(draft: list[int]) -> int:
        before = [tokens[-1], *draft]
        return next((place for place, token in enumerate(draft) if token == banned(before[place])), len(draft))

    lookup = PromptLookup(1, max_ngram, most, eos)
    lookup.append(0, tokens)
    assert lookup.propose(0, allowed=allowed) == of_the_library(tokens, max_ngram, most, eos, processor)


def latest_by_definition(tokens: list[int], max_ngram: int, most: int) -> list[int]:
    for size in range(min(max_ngram, len(tokens) - 1), 0, -1):
        for start in range(len(tokens) - 1, size - 1, -1):
            if tokens[start - size : start] == tokens[-size:]:
                period = tokens[start:]
                return [period[place % len(period)] for place in range(most)]
    return []


@given(TOKENS, st.integers(1, 4), st.integers(1, 9))
@settings(max_examples=60)
def test_latest(tokens, max_ngram, most):
    lookup = PromptLookup(1, max_ngram, most, latest=True)
    lookup.append(0, tokens)
    assert lookup.propose(0) == latest_by_definition(tokens, max_ngram, most)


def test_most_and_eos():
    lookup = PromptLookup(1, 2, 10, eos=[4])
    lookup.append(0, [1, 2, 3, 4, 5, 1])
    assert lookup.propose(0) == [2, 3]
    assert lookup.propose(0, most=1) == [2]
    assert lookup.propose(0, most=0) == lookup.propose(0, most=-3) == []
    lookup.append(0, [2, 3])
    assert lookup.propose(0) == []  # what follows is the end


@pytest.mark.parametrize("latest", [False, True])
def test_texts_that_do_not_follow_one_another(latest):
    lookup = PromptLookup(1, 2, 4, latest=latest)
    lookup.append(0, [1, 2, 3, BOUNDARY, 9])
    assert lookup.propose(0) == []
    lookup.append(0, [1, 2])
    assert lookup.propose(0) == [3]
    lookup.append(0, [3])
    assert lookup.propose(0) == []


def test_padding_and_rows_that_leave():
    input_ids = torch.tensor([[0, 0, 0, 5, 6], [1, 2, 1, 0, 0], [0, 0, 0, 0, 0]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]])
    lookup = PromptLookup(3)
    lookup.begin(input_ids, mask)
    assert [lookup.propose(row) for row in range(3)] == [[], [2, 1], []]
    lookup.append(0, [0])
    assert lookup.propose(0) == [5, 6, 0]
    lookup.keep([1, 0])
    assert len(lookup) == 2
    lookup.append(0, [2])
    assert lookup.propose(0) == [1, 2]
    assert lookup.propose(1) == [5, 6, 0]
    lookup.begin(torch.tensor([[3], [3]]))
    assert lookup.propose(1) == []


def test_what_cannot_be():
    for sizes in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least one token"):
            PromptLookup(1, *sizes)


@given(TOKENS, st.sampled_from([1, 2, 3, 5, 9, 10**9]), st.integers(1, 6))
@settings(max_examples=60)
def test_more_than_is_indexed(tokens, max_ngram, most):
    """An index of every size would take memory for each of them, of which the library takes none."""
    with mock.patch.object(prompt_lookup, "_MOST_INDEXED", 2):
        lookup = PromptLookup(1, max_ngram, most)
    lookup.append(0, tokens)
    assert lookup.propose(0) == of_the_library(tokens, max_ngram, most, [])
