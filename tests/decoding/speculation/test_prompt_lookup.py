"""Drafts from an index of n-grams, against a search through all tokens."""

from __future__ import annotations

from itertools import takewhile
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen.decoding.speculation import draft_sources
from fastgen.decoding.speculation.draft_sources import BOUNDARY, PromptLookup

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
                assert lookup.propose(row, most) == list(takewhile(lambda token: token not in eos, found))


def test_most_and_eos():
    lookup = PromptLookup(1, 2, 10, eos=[4])
    lookup.append(0, [1, 2, 3, 4, 5, 1])
    assert lookup.propose(0, 20) == [2, 3]
    assert lookup.propose(0, 1) == [2]
    assert lookup.propose(0, 0) == lookup.propose(0, -3) == []
    lookup.append(0, [2, 3])
    assert lookup.propose(0, 10) == []  # what follows is the end


def test_texts_that_do_not_follow_one_another():
    lookup = PromptLookup(1, 2, 4)
    lookup.append(0, [1, 2, 3, BOUNDARY, 9])
    assert lookup.propose(0, 4) == []
    lookup.append(0, [1, 2])
    assert lookup.propose(0, 4) == [3]
    lookup.append(0, [3])
    assert lookup.propose(0, 4) == []


@given(TOKENS, st.sampled_from([1, 2, 3, 5, 9, 10**9]), st.integers(1, 6))
@settings(max_examples=60)
def test_more_than_is_indexed(tokens, max_ngram, most):
    """An index of every size would take memory for each of them, of which the library takes none."""
    with mock.patch.object(draft_sources, "_MOST_INDEXED", 2):
        lookup = PromptLookup(1, max_ngram, most)
    lookup.append(0, tokens)
    assert lookup.propose(0, most) == by_definition(tokens, max_ngram, most)
