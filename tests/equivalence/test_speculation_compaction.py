"""Finished rows leave a batch with a draft: the tokens of the others stay those of the original code."""

from __future__ import annotations

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
from tests.equivalence.speculation import (
    GREEDY,
    all_speculate,
    assert_speculates,
    disturbed,
    draft_of,
    of_its_own,
    same,
    speculates,
)
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
    """Rows leave as soon as the others fit into a smaller batch."""
    monkeypatch.setattr(batch_compaction, "pays", lambda *_: True)


def rows_left() -> int:
    return fastgen.stats()[ENTRY_POINT].get("rows_left", 0)


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
def test_greedy(name: str, draft: str, at_once: None, any_lengths: None) -> None:
    """Calls of several sizes, padded on either side or not at all, use the smaller steps again."""
    asked = draft_of(draft)
    calls = ((9, LONG, "right"), (5, SHORT, "left"), (9, LONG, None))
    for call in calls:
        same(*made(name, *call), ends(name, *call), **asked)
    assert_speculates(len(calls))
    assert rows_left() > 0


BANS = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}
OTHER_PROCESSORS = {"min_new_tokens": 4, "bad_words_ids": [[7], [12, 13]], "forced_eos_token_id": 5}


@pytest.mark.parametrize("more", [{**BANS, **OTHER_PROCESSORS}, {"max_new_tokens": 300}], ids=["processors", "growth"])
@pytest.mark.parametrize("draft", ["int8", "lookup"])
def test_options(more: dict[str, Any], draft: str, at_once: None, any_lengths: None) -> None:
    """Also if buffers grow after rows have left."""
    bans = BANS if "max_new_tokens" not in more else {}
    speculates("llama", draft, {**ends("llama", 8, SHORT, **bans), **more}, (8, 8), SHORT)
    assert rows_left() > 0


def test_rows_that_end_at_once(at_once: None, any_lengths: None) -> None:
    """All rows but one end with their first token, before anything is drafted."""
    model, inputs = made("llama", 4, SHORT, None)
    with fastgen.disabled():
        first = model.generate(**inputs, **{**GREEDY, "max_new_tokens": 1, "eos_token_id": None})[:, -1].tolist()
    assert first.count(first[2]) == 1
    options = {"max_new_tokens": TOKENS, "eos_token_id": sorted({*first} - {first[2]})}
    all_speculate(model, inputs, options, calls=1, **draft_of("lookup"))
    assert rows_left() == 3


@pytest.mark.parametrize("name, draft", [("llama", "int8"), ("t5", "assistant")])
def test_copies_of_an_input_leave_together(name: str, draft: str, at_once: None, any_lengths: None) -> None:
    """`num_return_sequences`: at so low a temperature each copy is what greedy search finds."""
    model, inputs = made(name, 5, SHORT)
    asked, options = draft_of(draft, model), {**GREEDY, **ends(name, 5, SHORT)}
    with fastgen.disabled():
        wanted = model.generate(**inputs, **options).repeat_interleave(2, dim=0).tolist()
    options |= {"do_sample": True, "temperature": 1e-4, "num_return_sequences": 2}
    for _ in range(2):
        assert model.generate(**inputs, **options, **asked).tolist() == wanted
    assert_speculates(2)
    assert rows_left() % 2 == 0 and (rows_left() > 0) == (draft != "assistant")


def _seen_by(way: str, model: Any, tokenizer: Any) -> dict[str, Any]:
    """What looks at all rows at each position, or keeps something of each."""
    return {
        "strings": {"stop_strings": ["bc"], "tokenizer": tokenizer},
        "streamer": {"streamer": Listens()},
        "cache": {"return_dict_in_generate": True, "eos_token_id": None},
        "encoder processor": {"encoder_no_repeat_ngram_size": 2},
        "assistant": {"assistant_model": disturbed(model, 0.0)},
    }[way]


@pytest.mark.parametrize("way", ["strings", "streamer", "cache", "encoder processor", "assistant"])
def test_all_rows_stay(way: str, at_once: None, any_lengths: None, tokenizer: Any) -> None:
    name = "bart" if way == "encoder processor" else "llama"
    model, inputs = made(name, 4, SHORT)
    seen_by = _seen_by(way, model, tokenizer)
    draft = seen_by if way == "assistant" else draft_of("lookup")
    more = {} if way == "assistant" else seen_by
    all_speculate(model, inputs, {**ends(name, 4, SHORT), **more}, **draft)
    assert rows_left() == 0


def test_always_a_step_need_not_pay_first() -> None:
    model, inputs = of_its_own("gpt2", 9)
    fastgen.enable(captured_step="always")
    same(model, inputs, ends("gpt2", 9, LONG), **draft_of("lookup"))
    assert rows_left() > 0


def test_smaller_steps_are_kept(at_once: None, any_lengths: None) -> None:
    """They also serve a call of so many inputs."""
    model, inputs = of_its_own("llama", 9)
    found = []
    for _ in range(2):
        same(model, inputs, ends("llama", 9, LONG), **draft_of("lookup"))
        steps = graph_cache._models[model].steps
        found.append({key.batch: step for key, step in steps.items() if key.draft is not None})
    assert len(found[0]) > 2
    assert all(found[1][batch] is step for batch, step in found[0].items())
