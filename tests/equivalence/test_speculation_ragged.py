"""Ragged verifies, in which each row has its own number of tokens: the tokens stay those of the original code."""

from __future__ import annotations

import pytest

from fastgen.optimizer.transformers.captured import graph_cache
from fastgen.optimizer.transformers.speculation.drafting import RaggedDrafting
from tests.equivalence.models import LONG, SHORT
from tests.equivalence.others import made
from tests.equivalence.speculation import GREEDY, KNOWN, LOOKUP, assert_speculates, counts, same

pytestmark = [pytest.mark.usefixtures("speculates_at_once"), pytest.mark.sampled(4)]
MODELS = ["llama", "gpt2", "qwen2", "gemma", "gpt-neox", "mixtral"]


@pytest.fixture
def verifies(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The number of tokens of each row in each ragged verify."""
    found: list[list[int]] = []
    verify = RaggedDrafting.verify

    def counted(self: RaggedDrafting, model: object, drafted: int) -> None:
        if drafted:
            found.append((self.counts + self.search.unfinished.view(-1)).tolist())
        else:
            assert not self.counts.any(), "those of an earlier draft"
        verify(self, model, drafted)

    monkeypatch.setattr(RaggedDrafting, "verify", counted)
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padding", ["left", "right", None])
def test_rows_share_the_tokens_of_a_verify(
    name: str, padding: str | None, any_lengths: None, verifies: list[list[int]]
) -> None:
    """The library's option may ask for more tokens than an iteration drafts of a row."""
    for batch, length, tokens in ((5, LONG, 20), (5, LONG, 8), (3, SHORT, 3)):
        same(*made(name, batch, length, padding), {"max_new_tokens": 48}, prompt_lookup_num_tokens=tokens)
    assert_speculates(3)
    assert counts()["accepted"] > 0 or name == "qwen2"
    assert any(len({count for count in rows if count}) > 1 for rows in verifies), "rows have different numbers"


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.3}, {"do_sample": True}])
def test_what_has_as_many_tokens_of_each_row(options: dict, any_lengths: None, verifies: list[list[int]]) -> None:
    """Processors look at one row after the other, and so does sampling."""
    model, inputs = made("llama", 3)
    for _ in range(2):
        if "do_sample" in options:
            model.generate(**inputs, **{**GREEDY, **options, **LOOKUP})
        else:
            same(model, inputs, options, **LOOKUP)
    assert_speculates(2)
    assert not verifies


def test_attention_that_is_not_one_operator(any_lengths: None, verifies: list[list[int]]) -> None:
    """The first call finds out. The next ones, of any shapes, have as many tokens of each row."""
    family = KNOWN["llama"]
    model = family.build("eager")
    for rows in (3, 3, 4):
        same(model, family.make_inputs(rows), {}, **LOOKUP)
    assert [key.draft.is_ragged for key in graph_cache._models[model].refused] == [True]
    assert counts()["accelerated"] == 2
