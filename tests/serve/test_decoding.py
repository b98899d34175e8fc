"""What the fields of a request come to: greedy search, beams or sampling."""

from __future__ import annotations

from typing import Any

import pytest

from fastgen_serve.api.openai_decoding import decoding, make_job
from fastgen_serve.api.openai_schema import CompletionRequest
from fastgen_serve.errors import BadRequest
from fastgen_serve.jobs import Generated, ModelInfo, Sequence, TokenLogprob

PLAIN: dict[str, Any] = {}
BEAMS = {"num_beams": 4, "eos_token_id": 2}
DRAWS = {"do_sample": True, "top_k": 20, "eos_token_id": [2, 3]}


def info(defaults: dict[str, Any], kind: str = "decoder-only") -> ModelInfo:
    return ModelInfo("m", kind, ("generate",), 100, defaults=defaults)


def asked(defaults: dict[str, Any], kind: str = "decoder-only", **fields: Any) -> Any:
    return decoding(CompletionRequest.model_validate({"prompt": "a", **fields}), info(defaults, kind))


@pytest.mark.parametrize(
    ("defaults", "fields", "options"),
    [
        # What the request does not say is left to the model.
        (PLAIN, {}, {}),
        (BEAMS, {}, {"num_beams": 4}),
        (DRAWS, {}, {}),
        (BEAMS, {"n": 3}, {"num_beams": 4, "num_return_sequences": 3}),
        (BEAMS, {"n": 6}, {"num_beams": 6, "num_return_sequences": 6}),
        (DRAWS, {"n": 2}, {"num_return_sequences": 2}),
        (PLAIN, {"n": 2}, {"num_beams": 1, "do_sample": True, "top_k": 0, "num_return_sequences": 2}),
        (DRAWS, {"top_p": 1.0}, {"top_p": 1.0}),
        (DRAWS, {"top_k": -1, "min_p": 0.0}, {"top_k": 0, "min_p": 0.0}),
        ({**BEAMS, "do_sample": True}, {"typical_p": 1.0}, {"num_beams": 4, "typical_p": 1.0}),
        ({**BEAMS, "num_return_sequences": 3}, {}, {"num_beams": 4, "num_return_sequences": 1}),
        ({**BEAMS, "num_return_sequences": 3}, {"n": 3}, {"num_beams": 4}),
        # Greedy search.
        ({**BEAMS, "num_return_sequences": 3}, {"temperature": 0},
         {"num_beams": 1, "do_sample": False, "num_return_sequences": 1}),
        (BEAMS, {"temperature": 0}, {"num_beams": 1, "do_sample": False}),
        (DRAWS, {"temperature": 0, "top_p": 0.5}, {"num_beams": 1, "do_sample": False}),
        (DRAWS, {"do_sample": False}, {"do_sample": False}),
        # Sampling.
        (PLAIN, {"temperature": 1}, {"num_beams": 1, "do_sample": True, "top_k": 0, "temperature": 1.0}),
        (BEAMS, {"top_p": 0.5}, {"num_beams": 1, "do_sample": True, "top_k": 0, "top_p": 0.5}),
        (DRAWS, {"temperature": 0.5}, {"num_beams": 1, "do_sample": True, "temperature": 0.5}),
        (DRAWS, {"temperature": 0.5, "top_k": -1}, {"num_beams": 1, "do_sample": True, "temperature": 0.5, "top_k": 0}),
        (PLAIN, {"do_sample": True}, {"num_beams": 1, "do_sample": True, "top_k": 0}),
        (PLAIN, {"top_p": 1.0, "top_k": 0}, {}),
        # Beams.
        (PLAIN, {"use_beam_search": True, "n": 3}, {"num_beams": 3, "do_sample": False, "num_return_sequences": 3}),
        (DRAWS, {"use_beam_search": True, "best_of": 5}, {"num_beams": 5, "do_sample": False}),
        (BEAMS, {"use_beam_search": True}, {"num_beams": 4, "do_sample": False}),
        (PLAIN, {"num_beams": 2, "temperature": 0}, {"num_beams": 2, "do_sample": False}),
        (PLAIN, {"num_beams": 2, "do_sample": True, "top_p": 0.5}, {"num_beams": 2, "do_sample": True, "top_p": 0.5}),
        (BEAMS, {"length_penalty": 2.0}, {"num_beams": 4, "length_penalty": 2.0}),
        (BEAMS, {"early_stopping": "never"}, {"num_beams": 4, "early_stopping": "never"}),
        (PLAIN, {"length_penalty": 1.0, "early_stopping": False}, {}),
        # Others.
        (PLAIN, {"min_tokens": 3, "repetition_penalty": 1.5}, {"min_new_tokens": 3, "repetition_penalty": 1.5}),
        (PLAIN, {"logit_bias": {"7": -100}}, {"sequence_bias": [[[7], -100.0]]}),
        (PLAIN, {"ignore_eos": True}, {"eos_token_id": None}),
        (DRAWS, {"stop_token_ids": [9]}, {"eos_token_id": [2, 3, 9]}),
        (BEAMS, {"stop_token_ids": [9]}, {"num_beams": 4, "eos_token_id": [2, 9]}),
        (BEAMS, {"stop_token_ids": [9, 2, 9]}, {"num_beams": 4, "eos_token_id": [2, 9]}),
        (DRAWS, {"stop_token_ids": [9], "ignore_eos": True}, {"eos_token_id": [9]}),
    ],
)  # fmt: skip
def test_options(defaults: dict[str, Any], fields: dict[str, Any], options: dict[str, Any]) -> None:
    assert dict(asked(defaults, **fields).options) == options


@pytest.mark.parametrize(
    ("defaults", "fields", "param"),
    [
        (PLAIN, {"n": 2, "temperature": 0}, "n"), (PLAIN, {"n": 2, "do_sample": False}, "n"),
        (PLAIN, {"n": 2, "num_return_sequences": 3}, "num_return_sequences"), (PLAIN, {"n": 3, "num_beams": 2}, "n"),
        (PLAIN, {"n": 3, "best_of": 2}, "best_of"), (PLAIN, {"num_beams": 4, "best_of": 5}, "best_of"),
        (PLAIN, {"num_beams": 2, "temperature": 0.7}, "temperature"), (PLAIN, {"num_beams": 2, "top_k": 10}, "top_k"),
        (PLAIN, {"do_sample": True, "temperature": 0}, "temperature"),
        (PLAIN, {"do_sample": False, "temperature": 0.5}, "temperature"),
        (PLAIN, {"do_sample": False, "min_p": 0.5}, "min_p"), (PLAIN, {"length_penalty": 2.0}, "length_penalty"),
        (BEAMS, {"temperature": 0, "early_stopping": True}, "early_stopping"),
        (PLAIN, {"encoder_no_repeat_ngram_size": 3}, "encoder_no_repeat_ngram_size"),
    ],
)  # fmt: skip
def test_contradictions(defaults: dict[str, Any], fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        asked(defaults, **fields)
    assert refused.value.param == param and param in refused.value.message


def test_options_of_an_encoder() -> None:
    assert asked(PLAIN, "encoder-decoder", encoder_no_repeat_ngram_size=3).options == {
        "encoder_no_repeat_ngram_size": 3
    }


def test_best_of_chooses_by_mean_log_probability() -> None:
    found = asked(PLAIN, n=2, best_of=3)
    assert found.options["num_return_sequences"] == 3 and found.results == 2
    job = make_job(found, CompletionRequest(prompt="a"), (1,), 5)
    assert job.logprobs == 0, "they decide"

    def drawn(*logprobs: float) -> Sequence:
        return Sequence((5,) * len(logprobs), "length", None, tuple(TokenLogprob(5, each) for each in logprobs))

    low, high, middle = drawn(-3.0), drawn(-1.0, -1.0, -1.0), drawn(-2.0)
    assert found.best(Generated((low, high, middle))) == (high, middle)
