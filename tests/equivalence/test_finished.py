"""Inputs that are finished leave the batch: the same tokens from fewer rows. They stay where that could be seen."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria

import fastgen
from fastgen.optimizer.transformers.finished import LiveRows
from tests.equivalence.cases import BEAM, BEAM_SAMPLE, SAMPLE
from tests.equivalence.check import accelerated, check
from tests.equivalence.models import BY_NAME, EOS, FAMILIES, FIRST_WORD, SHORT, Family

# Sequences end early and at different steps: several tokens end one.
ENDS = {"eos_token_id": [EOS, *range(FIRST_WORD, FIRST_WORD + 70)], "max_new_tokens": 30}
DECODINGS = {
    "greedy": {},
    "sample": {"do_sample": True},
    "samples": SAMPLE,
    "beam": BEAM,
    "early": {**BEAM, "early_stopping": True},
    "never": {**BEAM, "early_stopping": "never", "length_penalty": 0.5},
    "beam-sample": {**BEAM_SAMPLE, "early_stopping": True},
}
decodings = pytest.mark.parametrize("decoding", DECODINGS.values(), ids=DECODINGS)

pytestmark = pytest.mark.usefixtures("strict")


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows the model got in each step of the accelerated call, the first pass left out."""
    found: list[int] = []
    select = LiveRows.select

    def counting_select(live: LiveRows, inputs: dict[str, Any]) -> dict[str, Any]:
        selected = select(live, inputs)
        ids = selected.get("decoder_input_ids", selected.get("input_ids"))
        found.append(ids.shape[0])
        return selected

    monkeypatch.setattr(LiveRows, "select", counting_select)
    return found


@decodings
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_every_model(family: Family, decoding: dict[str, Any], rows: list[int]) -> None:
    if family.exceeds_window({**decoding, "max_new_tokens": 30}):
        pytest.skip("one sequence per input beyond a sliding window is left to the original code")
    check(family.build(), family.make_inputs(batch=7), {**decoding, **ENDS})
    assert accelerated() == 1
    assert rows == sorted(rows, reverse=True)


@decodings
@pytest.mark.parametrize("length", [SHORT, 44])
@pytest.mark.parametrize("name", ["bart", "t5", "gpt2", "llama"])
def test_inputs_leave(name: str, decoding: dict[str, Any], length: int, rows: list[int]) -> None:
    family = BY_NAME[name]
    check(family.build(), family.make_inputs(batch=9, length=length), {**decoding, **ENDS})
    assert rows[-1] < 9 * max(decoding.get("num_beams", 1), decoding.get("num_return_sequences", 1))


@pytest.mark.parametrize("decoding", [{}, BEAM], ids=["greedy", "beam"])
def test_a_few_that_end_together_wait(decoding: dict[str, Any], rows: list[int]) -> None:
    family = BY_NAME["gpt2"]
    check(family.build(), family.make_inputs(batch=16), {**decoding, **ENDS})
    present = [16 * decoding.get("num_beams", 1), *rows]
    for before, after in itertools.pairwise(present):
        assert after == before or after <= 0.75 * before


class _Same(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


class _Never(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


SEEN = {
    "return_dict": {"return_dict_in_generate": True},
    "scores": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
    "attentions": {"return_dict_in_generate": True, "output_attentions": True, "output_hidden_states": True},
    "processor": {"logits_processor": [_Same()]},
    "criterion": {"stopping_criteria": [_Never()]},
    "prefix": {"prefix_allowed_tokens_fn": lambda batch, tokens: list(range(150))},
}


@pytest.mark.parametrize("decoding", [{}, BEAM], ids=["greedy", "beam"])
@pytest.mark.parametrize("option", SEEN)
def test_all_stay_where_they_are_seen(option: str, decoding: dict[str, Any], rows: list[int]) -> None:
    family = BY_NAME["bart"]
    options = {**decoding, **ENDS, **SEEN[option]}
    if "output_attentions" in options:
        options["max_new_tokens"] = 6
    check(family.build("eager"), family.make_inputs(batch=9), options)
    assert accelerated() == 1 and rows == []


def test_rows_go_on_where_nothing_pads_them(rows: list[int]) -> None:
    """Without an end token the library fills a row that met a time limit or a stop string with real tokens."""
    family = BY_NAME["gpt2"]
    model = family.build()
    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = None
    try:
        check(model, family.make_inputs(batch=6), {"max_new_tokens": 8})
    finally:
        model.generation_config.eos_token_id = before
    assert set(rows) == {6}


def test_a_failure_after_rows_have_left(monkeypatch: pytest.MonkeyPatch, rows: list[int]) -> None:
    fastgen.enable(strict=False)
    family = BY_NAME["bart"]
    model, inputs = family.build(), family.make_inputs(batch=9)
    spread = LiveRows.spread

    def failing(live: LiveRows, logits: torch.Tensor) -> torch.Tensor:
        if logits.shape[0] < 9:
            raise RuntimeError("planted")
        return spread(live, logits)

    monkeypatch.setattr(LiveRows, "spread", failing)
    with pytest.warns(RuntimeWarning, match="planted"):
        check(model, inputs, ENDS)
    assert rows[-1] < 9


def test_other_calls_of_the_same_method_are_left_alone() -> None:
    """`prepare_inputs_for_generation` is public: outside of a call it gives what it always gave."""
    model = BY_NAME["gpt2"].build()
    ids = torch.tensor([[5, 6]])
    with fastgen.disabled():
        expected = model.prepare_inputs_for_generation(ids)
    assert inspect.signature(model.prepare_inputs_for_generation).parameters["input_ids"]
    assert model.prepare_inputs_for_generation(ids).keys() == expected.keys()
