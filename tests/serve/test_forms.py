"""Results of a given form: `response_format`, vLLM's `structured_outputs`, and `text.format` of responses."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

import pytest
import torch
from openai import OpenAI
from pydantic import BaseModel, Field

import fastgen
from fastgen.grammar import FormError
from fastgen_serve.workers.worker import as_serve_error
from tests.serve import checkpoints
from tests.serve.checkpoints import PROMPT, SOURCE, USER, complete

SCHEMA = {
    "type": "object",
    "properties": {"who": {"enum": ["Moses", "Aaron"]}, "years": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["who", "years"],
    "additionalProperties": False,
}
NAMED = {"name": "person", "strict": True, "schema": SCHEMA}
FORMS: dict[str, dict[str, Any]] = {
    "schema": {"response_format": {"type": "json_schema", "json_schema": NAMED}},
    "vLLM's schema": {"structured_outputs": {"json": SCHEMA}},
    "as text": {"structured_outputs": {"json": json.dumps(SCHEMA)}},
}
PATTERNS: dict[str, dict[str, Any]] = {
    "regex": {"regex": "(Moses|Aaron)[0-9]{2}"},
    "choice": {"choice": ["Moses11", "Aaron22"]},
    "grammar": {"grammar": 'root ::= ("Moses" | "Aaron") [0-9] [0-9]'},
}


class Person(BaseModel):
    who: Annotated[str, Field(max_length=8)]
    years: Annotated[int, Field(ge=0, le=999)]


def check(text: str) -> None:
    person = json.loads(text)
    assert person.keys() == {"who", "years"} and person["who"] in ("Moses", "Aaron") and 0 <= person["years"] < 1000


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_json_of_a_schema(client: OpenAI, form: dict[str, Any]) -> None:
    for more in {"temperature": 0}, {"n": 3, "temperature": 1.5, "seed": 1}, {"n": 2, "num_beams": 2}:
        answer = complete(client, "gpt2", PROMPT, max_tokens=60, **form, **more)
        for choice in answer.choices:
            check(choice.text)
            assert choice.finish_reason == "stop"


def test_a_form_that_fails_in_the_middle(paths: dict[str, str]) -> None:
    """Its request raises, in slots and in a call; the server tells such an error from the model's."""
    model, tokenizer = checkpoints.loaded(paths["gpt2"])
    form = fastgen.Grammar(tokenizer, model.generation_config.eos_token_id, regex="[a-z ]{40}")

    class Limited:
        def __init__(self, matcher: Any, left: int) -> None:
            self._matcher, self._left = matcher, left

        def __getattr__(self, name: str) -> Any:
            return getattr(self._matcher, name)

        def deep_copy(self) -> Limited:
            return Limited(self._matcher.deep_copy(), self._left - 1)

        def is_error(self) -> bool:
            return self._left == 0

        def get_error(self) -> str:
            return "too many states"

    form._begin._matcher = Limited(form._begin._matcher, 3)
    prompt = torch.tensor([[5, 6, 7]])
    options = {"num_beams": 1, "num_return_sequences": 1, "do_sample": False, "max_new_tokens": 20}
    said = "cannot be followed: too many states"
    with pytest.raises(FormError, match=said):
        model.generate(prompt, logits_processor=[form.processor()], **options)
    with fastgen.Engine(model, slots=2) as engine, pytest.raises(FormError, match=said) as raised:
        engine.generate([{"input_ids": prompt}], logits_processor=[form.processor()], **options)
    error = as_serve_error(raised.value)
    assert (error.status, error.param) == (400, "form") and said in error.message


def test_the_result_is_that_of_generate(client: OpenAI, paths: dict[str, str]) -> None:
    model, tokenizer = checkpoints.loaded(paths["gpt2"])
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    grammar = fastgen.Grammar(tokenizer, model.generation_config.eos_token_id, json_schema=SCHEMA)
    options = {"num_beams": 1, "do_sample": False, "max_new_tokens": 60}
    made = model.generate(ids, attention_mask=torch.ones_like(ids), logits_processor=[grammar.processor()], **options)
    answer = complete(client, "gpt2", PROMPT, max_tokens=60, temperature=0, **FORMS["schema"])
    assert answer.choices[0].text == tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("form", PATTERNS.values(), ids=PATTERNS.keys())
def test_other_forms_in_a_stream(client: OpenAI, form: dict[str, Any]) -> None:
    sent = complete(client, "gpt2", PROMPT, max_tokens=20, temperature=0, structured_outputs=form, stream=True)
    text = "".join(chunk.choices[0].text for chunk in sent if chunk.choices)
    assert re.fullmatch("(Moses|Aaron)[0-9]{2}", text)


def test_chats_and_responses(client: OpenAI) -> None:
    """In the shapes in which OpenAI's client sends a class of pydantic's."""
    options: dict[str, Any] = {"model": "chat", "temperature": 1, "seed": 3}
    answer = client.chat.completions.parse(messages=[USER], response_format=Person, max_tokens=150, **options)
    assert isinstance(answer.choices[0].message.parsed, Person)
    any_object = client.chat.completions.create(
        messages=[USER], response_format={"type": "json_object"}, max_tokens=3, **options
    )
    assert any_object.choices[0].message.content.lstrip().startswith("{")  # type: ignore[union-attr]
    del options["seed"]
    response = client.responses.parse(input="who", text_format=Person, max_output_tokens=150, **options)
    assert isinstance(response.output_parsed, Person)
    assert response.text is not None and response.text.format.type == "json_schema"  # type: ignore[union-attr]
    assert response.text.format.schema_["properties"].keys() == {"who", "years"}  # type: ignore[union-attr]


def test_beside_others_with_probabilities(client: OpenAI) -> None:
    """Log-probabilities are the model's; targets of an encoder-decoder model have a form, too."""
    answer = complete(client, "gpt2", PROMPT, max_tokens=60, temperature=0, logprobs=2, **FORMS["schema"])
    check(answer.choices[0].text)
    assert max(answer.choices[0].logprobs.token_logprobs) < -0.1, "some are certain by the form, not to the model"
    check(complete(client, "bart", SOURCE, **FORMS["schema"]).choices[0].text)


def test_penalties_of_what_was_generated(client: OpenAI, paths: dict[str, str]) -> None:
    """By hand: they are those of OpenAI's documentation, and do not count the prompt."""
    model, tokenizer = checkpoints.loaded(paths["gpt2"])
    for frequency, presence in (0.7, 0.0), (0.0, 1.5), (-1.0, 0.3):
        tokens = tokenizer(PROMPT)["input_ids"]
        generated: list[int] = []
        for _ in range(16):
            scores = model(torch.tensor([[*tokens, *generated]])).logits[0, -1].float()
            for token in set(generated):
                scores[token] -= frequency * generated.count(token) + presence
            generated.append(int(scores.argmax()))
        answer = complete(
            client, "gpt2", PROMPT, max_tokens=16, temperature=0, frequency_penalty=frequency,
            presence_penalty=presence, ignore_eos=True, no_repeat_ngram_size=0,
        )  # fmt: skip
        assert answer.choices[0].text == tokenizer.decode([*tokens, *generated]).removeprefix(tokenizer.decode(tokens))
        assert complete(client, "gpt2", PROMPT, max_tokens=16, n=2, num_beams=2, presence_penalty=presence).choices
