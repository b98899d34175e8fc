"""Rows of a batch with a draft that end at very different times: the tokens stay those of the original code."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest

import fastgen
from tests.equivalence.models import LONG, SHORT
from tests.equivalence.others import made
from tests.equivalence.speculation import (
    GREEDY,
    all_speculate,
    assert_speculates,
    draft_of,
    same,
)

pytestmark = [pytest.mark.usefixtures("speculates_at_once"), pytest.mark.sampled(6)]
TOKENS = 36
MODELS = ["llama", "gpt2", "bloom", "bart", "t5", "m2m100"]


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    yield
    fastgen.enable(self_speculation="off", captured_step="auto")


@functools.cache
def ends(name: str, batch: int, length: int, padding: str | None = "natural", **options: Any) -> dict[str, Any]:
    """Options with tokens that end the rows of a call at very different times; at least one row reaches the limit."""
    model, inputs = made(name, batch, length, padding)
    limit = {"max_new_tokens": TOKENS}
    with fastgen.disabled():
        found = model.generate(**inputs, **{**GREEDY, **limit, "eos_token_id": None, **options})
    rows = found[:, -TOKENS:].tolist()

    def spread(tokens: tuple[int, ...]) -> tuple[bool, int, int]:
        places = [next((place for place, token in enumerate(row) if token in tokens), TOKENS) for row in rows]
        return max(places) > TOKENS // 2, len(set(places)), -sum(places)

    known = sorted({token for row in rows for token in row})
    best: tuple[int, ...] = ()
    for _ in range(5):
        best = max([best, *((*best, token) for token in known)], key=spread)
    return {**limit, "eos_token_id": [*best]}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("draft", ["int8", "lookup"])
def test_greedy(name: str, draft: str, any_lengths: None) -> None:
    """In calls of several sizes, padded on either side or not at all."""
    asked = draft_of(draft)
    calls = ((9, LONG, "right"), (5, SHORT, "left"), (9, LONG, None))
    for call in calls:
        same(*made(name, *call), ends(name, *call), **asked)
    assert_speculates(len(calls))


def test_rows_that_end_at_once(any_lengths: None) -> None:
    """All rows but one end with their first token, before anything is drafted."""
    model, inputs = made("llama", 4, SHORT, None)
    with fastgen.disabled():
        first = model.generate(**inputs, **{**GREEDY, "max_new_tokens": 1, "eos_token_id": None})[:, -1].tolist()
    assert first.count(first[2]) == 1
    options = {"max_new_tokens": TOKENS, "eos_token_id": sorted({*first} - {first[2]})}
    all_speculate(model, inputs, options, calls=1, **draft_of("lookup"))
