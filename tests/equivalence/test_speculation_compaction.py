"""Rows that have finished leave a batch with a draft: the tokens of the others stay those of the original code."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest

import fastgen
from fastgen.optimizer.transformers.captured import graph_cache
from fastgen.optimizer.transformers.speculation import batch_compaction
from fastgen.optimizer.transformers.speculation.decoding import ENTRY_POINT
from tests.equivalence.models import LONG, SHORT
from tests.equivalence.others import made
from tests.equivalence.speculation import GREEDY, KNOWN, assert_speculates, disturbed, draft_of, same, speculates
from tests.equivalence.user_code import Listens

pytestmark = [pytest.mark.usefixtures("speculates_at_once"), pytest.mark.sampled(6)]
TOKENS = 36
MODELS = ["llama", "gpt2", "bloom", "bart", "t5", "m2m100"]


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    yield
    fastgen.enable(self_speculation="off", captured_step="auto")


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows leave as soon as there is a smaller batch that the others fit into."""
    monkeypatch.setattr(batch_compaction, "pays", lambda *_: True)


def rows_left() -> int:
    return fastgen.stats()[ENTRY_POINT].get("rows_left", 0)


@functools.cache
def ends(name: str, batch: int, length: int, padding: str | None = "natural", **options: Any) -> tuple[int, ...]:
    """Tokens that, taken as ends, end the rows of a call at very different times; at least one goes on to the limit."""
    family = KNOWN[name]
    with fastgen.disabled():
        found = family.build().generate(
            **family.make_inputs(batch, length, padding),
            **{**GREEDY, "max_new_tokens": TOKENS, "eos_token_id": None, **options},
        )
    rows = found[:, -TOKENS:].tolist()

    def spread(tokens: tuple[int, ...]) -> tuple[bool, int, int]:
        places = [next((place for place, token in enumerate(row) if token in tokens), TOKENS) for row in rows]
        return max(places) > TOKENS // 2, len(set(places)), -sum(places)

    known = sorted({token for row in rows for token in row})
    best: tuple[int, ...] = ()
    for _ in range(5):
        best = max([best, *((*best, token) for token in known)], key=spread)
    return best


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("draft", ["int8", "lookup"])
def test_greedy(name: str, draft: str, at_once: None, any_lengths: None) -> None:
    """Calls of several sizes, of which the smaller steps are used again, padded on either side or not at all."""
    family, asked = KNOWN[name], draft_of(draft)
    calls = ((9, LONG, "right"), (5, SHORT, "left"), (9, LONG, None))
    for call in calls:
        options = {**GREEDY, "max_new_tokens": TOKENS, "eos_token_id": [*ends(name, *call)]}
        same(family.build(), family.make_inputs(*call), options, **asked)
    assert_speculates(len(calls))
    assert rows_left() > 0


@pytest.mark.parametrize(
    "more",
    [
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 4},
        {"bad_words_ids": [[7], [12, 13]], "forced_eos_token_id": 5},
        {"max_new_tokens": 300},  # so that buffers grow after rows have left
    ],
)
@pytest.mark.parametrize("draft", ["int8", "lookup"])
def test_options(more: dict[str, Any], draft: str, at_once: None, any_lengths: None) -> None:
    others = {name: value for name, value in more.items() if name in ("repetition_penalty", "no_repeat_ngram_size")}
    tokens = [*ends("llama", 8, SHORT, **others)]
    speculates("llama", draft, {"max_new_tokens": TOKENS, "eos_token_id": tokens, **more}, (8, 8), SHORT)
    assert rows_left() > 0


def test_rows_that_end_at_once(at_once: None, any_lengths: None) -> None:
    """All rows but one end with their first token, before anything is drafted."""
    family, asked = KNOWN["llama"], draft_of("lookup")
    model, inputs = family.build(), family.make_inputs(4, SHORT, None)
    with fastgen.disabled():
        first = model.generate(**inputs, **{**GREEDY, "max_new_tokens": 1, "eos_token_id": None})[:, -1].tolist()
    assert first.count(first[2]) == 1
    tokens = sorted({*first} - {first[2]})
    same(model, inputs, {**GREEDY, "max_new_tokens": TOKENS, "eos_token_id": tokens}, **asked)
    assert_speculates(1)
    assert rows_left() == 3


@pytest.mark.parametrize("name, draft", [("llama", "int8"), ("t5", "assistant")])
def test_copies_of_an_input_leave_together(name: str, draft: str, at_once: None, any_lengths: None) -> None:
    """`num_return_sequences`: with so low a temperature each copy is what greedy search finds."""
    model, inputs = made(name, 5, SHORT)
    asked = draft_of(draft, model)
    cold = {"do_sample": True, "temperature": 1e-4, "num_return_sequences": 2}
    options = {"max_new_tokens": TOKENS, "eos_token_id": [*ends(name, 5, SHORT)]}
    with fastgen.disabled():
        wanted = model.generate(**inputs, **{**GREEDY, **options})
    for _ in range(2):
        found = model.generate(**inputs, **{**GREEDY, **options, **cold}, **asked)
        assert found.tolist() == wanted.repeat_interleave(2, dim=0).tolist()
    assert_speculates(2)
    assert rows_left() % 2 == 0 and (rows_left() > 0) == (draft != "assistant")


@pytest.mark.parametrize("way", ["strings", "streamer", "cache", "encoder processor", "assistant"])
def test_all_rows_stay(way: str, at_once: None, any_lengths: None, tokenizer: Any) -> None:
    """Where something looks at all rows at each position, or keeps something for each."""
    name = "bart" if way == "encoder processor" else "llama"
    model, inputs = made(name, 4, SHORT)
    options = {**GREEDY, "max_new_tokens": TOKENS, "eos_token_id": [*ends(name, 4, SHORT)]}
    asked = draft_of("lookup")
    if way == "strings":
        options |= {"stop_strings": ["bc"], "tokenizer": tokenizer}
    if way == "streamer":
        asked = {**asked, "streamer": Listens()}
    if way == "cache":
        options |= {"return_dict_in_generate": True, "eos_token_id": None}
    if way == "encoder processor":
        options |= {"encoder_no_repeat_ngram_size": 2}
    if way == "assistant":
        asked = {"assistant_model": disturbed(model, 0.0)}
    for _ in range(2):
        same(model, inputs, options, **asked)
    assert_speculates(2)
    assert rows_left() == 0


def test_always_a_step_need_not_pay_first() -> None:
    family, asked = KNOWN["gpt2"], draft_of("lookup")
    model = copy.deepcopy(family.build())
    options = {**GREEDY, "max_new_tokens": TOKENS, "eos_token_id": [*ends("gpt2", 9, LONG)]}
    fastgen.enable(captured_step="always")
    same(model, family.make_inputs(9), options, **asked)
    assert rows_left() > 0


def test_smaller_steps_are_kept(at_once: None, any_lengths: None) -> None:
    """And are those of a call of so many inputs."""
    family, asked = KNOWN["llama"], draft_of("lookup")
    model = copy.deepcopy(family.build())
    options = {**GREEDY, "max_new_tokens": TOKENS, "eos_token_id": [*ends("llama", 9, LONG)]}
    same(model, family.make_inputs(9), options, **asked)
    kept = {key.batch: step for key, step in graph_cache._models[model].steps.items() if key.draft is not None}
    assert len(kept) > 2
    same(model, family.make_inputs(9), options, **asked)
    again = {key.batch: step for key, step in graph_cache._models[model].steps.items() if key.draft is not None}
    assert all(again[batch] is step for batch, step in kept.items())
