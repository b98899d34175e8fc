"""What is refused at submit, with one line, and leaves the others alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

import fastgen
from fastgen.engine.requests import inputs_of
from tests.engine.conftest import PROMPTS, WAIT, Streamer, alone, assert_alone
from tests.equivalence.models import BY_NAME, EOS

_LONG = list(range(3, 150)) * 4


@pytest.fixture(scope="module")
def engine() -> Iterator[fastgen.Engine]:
    with fastgen.Engine(BY_NAME["gpt2"].build(), slots=8) as made:
        yield made


@pytest.mark.parametrize(
    ("inputs", "options", "says"),
    [
        ([], {}, "empty"),
        ({}, {}, "empty"),
        (torch.zeros(1, 0, dtype=torch.long), {}, "empty"),
        ({"input_ids": []}, {}, "empty"),
        ([[1, 2], [3, 4]], {}, "one row"),
        (torch.ones(2, 3, dtype=torch.long), {}, "one row"),
        (torch.ones(3), {}, "whole numbers"),
        ("a text", {}, "str"),
        (["a text"], {}, "numbers"),
        (_LONG, {}, "512 positions"),
        (PROMPTS[0], {"max_new_tokens": 600}, "512 positions"),
        (PROMPTS[0], {"max_new_tokens": 0}, "max_new_tokens"),
        (PROMPTS[1], {"max_new_tokens": None, "max_length": 5}, "no room"),
        (PROMPTS[0], {"num_beans": 4}, "num_beans"),
        (PROMPTS[0], {"do_sample": True, "temperature": -1.0}, "temperature"),
        (PROMPTS[0], {"do_sample": True, "top_k": -1}, "top_k"),
        (PROMPTS[0], {"bad_words_ids": []}, "bad_words_ids"),
        (PROMPTS[0], {"repetition_penalty": "much"}, "penalty"),
        ({"input_ids": PROMPTS[0], "pixel_values": torch.ones(1, 3)}, {}, "pixel_values"),
        ({"input_ids": PROMPTS[0], "attention_mask": [1] * 4}, {"attention_mask": torch.ones(1, 4)}, "attention_mask"),
        (PROMPTS[0], {"num_return_sequences": 2}, "num_return_sequences"),
        (PROMPTS[0], {"num_beams": 9}, "9 rows, the engine has 8"),
        (PROMPTS[0], {"num_beams": 2, "streamer": Streamer()}, "num_beams"),
        (PROMPTS[0], {"do_sample": True, "num_return_sequences": 2, "streamer": Streamer()}, "streamer"),
        (PROMPTS[0], {"generation_config": GenerationConfig(num_beams=9)}, "9 rows"),
        (PROMPTS[0], {"num_beams": 2.0}, "num_beams is 2.0: give a whole number"),
        (PROMPTS[0], {"num_beams": 0}, "num_beams is 0: give a positive number"),
        (PROMPTS[0], {"do_sample": True, "num_return_sequences": 2.5}, "num_return_sequences"),
        (PROMPTS[0], {"max_new_tokens": 4.5}, "max_new_tokens is 4.5: give a whole number"),
        (PROMPTS[0], {"seed": "seven"}, "seed is 'seven'"),
        (PROMPTS[0], {"seed": 2**64}, "64 bits"),
        (PROMPTS[0], {"stop_strings": ["."]}, "tokenizer"),
        (PROMPTS[0], {"penalty_alpha": 0.5, "top_k": 4}, "trust_remote_code"),
    ],
)
def test_refused(engine: fastgen.Engine, inputs: Any, options: dict[str, Any], says: str) -> None:
    submitted, before = engine.stats()["submitted"], engine.submit(PROMPTS[1], max_new_tokens=4)
    with pytest.raises(ValueError, match=says) as raised:
        engine.submit(inputs, **options)
    with pytest.raises(ValueError, match=says):
        engine.generate([PROMPTS[0], inputs], **options)
    assert "\n" not in str(raised.value)
    assert torch.equal(before.result(), alone(BY_NAME["gpt2"].build(), PROMPTS[1], max_new_tokens=4))
    assert engine.stats()["submitted"] == submitted + 1


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": np.int64(5)},
        {"max_new_tokens": torch.tensor(5)},
        {"max_new_tokens": None, "max_length": np.int64(9)},
        {"num_beams": np.int64(2), "max_new_tokens": 5},
        {"eos_token_id": np.int64(EOS), "max_new_tokens": 5},
        {"pad_token_id": None, "max_new_tokens": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("model", ["gpt2", "bart"], indirect=True)
def test_numbers_as_generate_takes_them(model: Any, options: dict[str, Any]) -> None:
    """Whatever their types, they do not get into the way of others."""
    with fastgen.Engine(model, slots=8) as engine:
        others = [engine.submit(prompt, max_new_tokens=6) for prompt in PROMPTS[:2]]
        assert torch.equal(engine.submit(PROMPTS[0], **options).result(WAIT), alone(model, PROMPTS[0], **options))
        assert_alone(model, PROMPTS[:2], [each.result(WAIT) for each in others], max_new_tokens=6)


def test_a_model_without_a_padding_token() -> None:
    """As GPT-2 has none: its prompts need no attention mask either."""
    model = copy.deepcopy(BY_NAME["gpt2"].build())
    model.generation_config.pad_token_id = model.config.pad_token_id = None
    with fastgen.Engine(model) as engine:
        assert_alone(model, PROMPTS, engine.generate(PROMPTS, max_new_tokens=6), max_new_tokens=6)
    outputs, expected = model.generate_batch(PROMPTS, max_new_tokens=6), alone(model, PROMPTS[0], max_new_tokens=6)
    assert PROMPTS[0] + outputs["req_0"].generated_tokens == expected[0].tolist()


@pytest.mark.parametrize("inputs", [[5, 6], {"input_ids": [5, 6]}], ids=["tokens", "mapping"])
def test_numbers_for_a_model_whose_weights_are_elsewhere(inputs: Any) -> None:
    """As accelerate leaves those of a model that does not fit: on no device that keeps numbers."""
    made = inputs_of(copy.deepcopy(BY_NAME["llama"].build()).to("meta"), inputs)
    assert [each.tolist() for each in made.values()] == [[[5, 6]]]


def test_positions_of_an_encoder() -> None:
    with fastgen.Engine(BY_NAME["bart"].build()) as engine:
        with pytest.raises(ValueError, match="512 positions"):
            engine.submit(_LONG)
        with pytest.raises(ValueError, match="512 positions"):
            engine.submit(PROMPTS[0], max_new_tokens=513)


def test_as_long_as_the_model() -> None:
    """The last new token is not read: as many as there are positions, and one more."""
    model, prompt = BY_NAME["gpt2"].build(), list(range(3, 150)) * 3
    with fastgen.Engine(model) as engine:
        result = engine.submit(prompt, max_new_tokens=513 - len(prompt)).result()
    assert torch.equal(result, alone(model, prompt, max_new_tokens=513 - len(prompt)))


def test_models_with_relative_positions_have_no_longest_input() -> None:
    model = BY_NAME["t5"].build()
    with fastgen.Engine(model) as engine:
        assert torch.equal(engine.submit(_LONG).result(), alone(model, _LONG))


@pytest.mark.parametrize("arguments", [{"slots": 0}, {"slots": "many"}, {"max_waiting": 0}], ids=str)
def test_arguments_of_the_engine(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="give a positive number"):
        fastgen.Engine(BY_NAME["gpt2"].build(), **arguments)


def test_more_rows_than_a_batch_usually_has() -> None:
    model = BY_NAME["bart"].build()
    with fastgen.Engine(model, slots=100) as engine:
        assert torch.equal(engine.submit(PROMPTS[0], num_beams=80).result(), alone(model, PROMPTS[0], num_beams=80))
