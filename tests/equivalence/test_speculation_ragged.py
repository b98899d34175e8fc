"""Checks in which each row has its own number of tokens: the tokens stay those of the original code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import fastgen
from fastgen.optimizer.transformers.captured import graph_cache
from fastgen.optimizer.transformers.speculation.ragged_drafting import RaggedDrafting
from tests.equivalence.models import LONG, SHORT
from tests.equivalence.speculation import GREEDY, KNOWN, assert_speculates, counts, same

pytestmark = [pytest.mark.usefixtures("speculates_at_once"), pytest.mark.sampled(4)]
MODELS = ["llama", "gpt2", "qwen2", "gemma", "gpt-neox", "mixtral"]


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """How many tokens each row has had in each ragged check."""
    found: list[list[int]] = []
    verify = RaggedDrafting.verify

    def counted(self: RaggedDrafting, model: object, drafted: int) -> None:
        if drafted:
            found.append((self.counts + self.search.unfinished.view(-1)).tolist())
        else:
            assert not self.counts.any(), "those of a draft before"
        verify(self, model, drafted)

    monkeypatch.setattr(RaggedDrafting, "verify", counted)
    yield found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padding", ["left", "right", None])
def test_rows_share_the_tokens_of_a_check(
    name: str, padding: str | None, any_lengths: None, checks: list[list[int]]
) -> None:
    """Drafts of the library may be longer than what a round drafts of a row."""
    family = KNOWN[name]
    for batch, length, tokens in ((5, LONG, 20), (5, LONG, 8), (3, SHORT, 3)):
        inputs = family.make_inputs(batch, length, padding)
        same(family.build(), inputs, {**GREEDY, "max_new_tokens": 48}, prompt_lookup_num_tokens=tokens)
    assert_speculates(3)
    assert counts()["accepted"] > 0 or name == "qwen2"
    assert any(len({count for count in rows if count}) > 1 for rows in checks), "rows have different numbers of tokens"


def test_one_row_is_left_of_a_batch(checks: list[list[int]]) -> None:
    """The step of one row has other lengths, and goes on with drafts."""
    family, model = KNOWN["llama"], KNOWN["llama"].build()
    inputs = family.make_inputs(4)
    with fastgen.disabled():
        rows = model.generate(**inputs, **GREEDY, prompt_lookup_num_tokens=None).tolist()
    last = rows[-1][len(inputs["input_ids"][0]) :]
    ends = sorted({row[len(inputs["input_ids"][0]) + 1] for row in rows[:-1]} - set(last))
    fastgen.enable(captured_step="always")
    for _ in range(3):
        same(model, inputs, {**GREEDY, "max_new_tokens": 64, "eos_token_id": ends}, prompt_lookup_num_tokens=8)
    assert_speculates(3)
    assert checks and counts().get("rows_left", 0) > 0


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.3}, {"do_sample": True}])
def test_what_has_as_many_tokens_of_each_row(options: dict, any_lengths: None, checks: list[list[int]]) -> None:
    """Processors look at one row after the other, and so does sampling."""
    family, model = KNOWN["llama"], KNOWN["llama"].build()
    call = {**GREEDY, **options, "prompt_lookup_num_tokens": 4}
    for _ in range(2):
        if "do_sample" in options:
            torch.manual_seed(0)
            model.generate(**family.make_inputs(3), **call)
        else:
            same(model, family.make_inputs(3), {**GREEDY, **options}, prompt_lookup_num_tokens=4)
    assert_speculates(2)
    assert not checks


def test_attention_that_is_not_one_operator(any_lengths: None, checks: list[list[int]]) -> None:
    """It is found out in the first call. The next ones, of any shapes, have as many tokens of each row."""
    family = KNOWN["llama"]
    model = family.build("eager")
    for rows in (3, 3, 4):
        same(model, family.make_inputs(rows), GREEDY, prompt_lookup_num_tokens=4)
    assert [key.draft.is_ragged for key in graph_cache._models[model].refused] == [True]
    assert counts()["accelerated"] == 2
