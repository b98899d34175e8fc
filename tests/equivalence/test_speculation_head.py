"""The LM head of a greedy self-draft: approximate logits, if only the largest one is needed."""

from __future__ import annotations

from typing import Any

import pytest

import fastgen
from fastgen import settings
from fastgen.decoding import lm_head
from fastgen.decoding.speculation.draft_length import DraftLength
from fastgen.decoding.speculation.draft_sources import DraftWeights
from fastgen.ops import approximate_logits
from fastgen.optimizer.transformers.call import LINEAR_LAYERS
from tests.equivalence.speculation import GREEDY, LOOKUP, all_speculate, assert_speculates, counts, of_its_own, same
from tests.noting import noted

pytestmark = [
    pytest.mark.usefixtures("speculates_at_once", "any_lengths"),
    pytest.mark.skipif(not approximate_logits.is_available(), reason="there are no kernels in this process"),
]
PENALTY = {"repetition_penalty": 1.2}


def estimates(model: Any, precision: str) -> bool:
    """Whether the last draft step that was recorded has approximate logits."""
    return DraftWeights.of(model, LINEAR_LAYERS, precision, settings.current().weight_group_size)._used_head is not None


@pytest.mark.parametrize(
    "name, precision, options, estimated",
    [("llama", "int8", {}, True), ("gpt2", "int4", {}, True), ("llama", "int4", PENALTY, False),
     ("bart", "int8", {}, False)],
)  # fmt: skip
def test_the_largest_is_found_from_estimates(
    name: str, precision: Any, options: dict[str, Any], estimated: bool
) -> None:
    """BART adds a bias to the logits, so it drafts with the exact ones, from the first token on."""
    model, inputs = of_its_own(name)
    fastgen.enable(self_speculation=precision)
    for batch in (3, 3, 1):
        same(model, {each: value[:batch] for each, value in inputs.items()}, options)
        assert estimates(model, precision) == estimated
    assert_speculates(3)
    assert counts()["accepted"] > (0.5 if precision == "int8" else 0.2) * counts()["drafted"] > 0


def test_calls_with_and_without_estimates_take_turns() -> None:
    model, inputs = of_its_own("llama", 2)
    fastgen.enable(self_speculation="int8")
    for _ in range(2):
        same(model, inputs, {})
        model.generate(**inputs, **{**GREEDY, "do_sample": True})
        same(model, inputs, PENALTY)
    assert_speculates(6)


def test_models_in_half_precision_have_no_estimates() -> None:
    model = of_its_own("llama")[0].bfloat16()
    weights = DraftWeights(model, LINEAR_LAYERS, "int8", 64, model.get_output_embeddings())
    weights.copy_head(for_argmax=True)
    assert weights._used_head is None and model.get_output_embeddings() in weights._overrides


@pytest.mark.parametrize("options", [{}, {"min_new_tokens": 12}, {"no_repeat_ngram_size": 3}])
def test_a_verify_of_one_position_has_them(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """As a plain step does, whatever processors ban."""
    found = noted(monkeypatch, lm_head.GreedyHead, "find_two", lambda step, out, *more: len(out))
    monkeypatch.setattr(DraftLength, "choose", lambda *_, **__: 0)
    all_speculate(*of_its_own("llama", 1), options, calls=1, **LOOKUP)
    assert found and set(found) == {1}
