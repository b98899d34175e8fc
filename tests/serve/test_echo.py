"""Completions that begin with their prompt, and the log-probabilities of its tokens, as evaluations ask for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from openai import OpenAI

from tests.serve import checkpoints
from tests.serve.checkpoints import GREEDY, OTHER, PROMPT, complete
from tests.serve.servers import GPT2


def tokens_of(text: str) -> list[int]:
    return list(checkpoints.loaded(GPT2)[1](text)["input_ids"])


def expected(tokens: list[int]) -> torch.Tensor:
    """Log-probabilities, [tokens - 1, vocabulary], of what follows each token but the last."""
    with torch.inference_mode():
        return torch.log_softmax(checkpoints.loaded(GPT2)[0](torch.tensor([tokens])).logits[0, :-1], dim=-1)


@pytest.mark.parametrize("max_tokens", [0, 1, 12])
@pytest.mark.parametrize("is_text", [True, False], ids=["text", "ids"])
def test_log_probabilities_are_those_of_a_forward_pass(client: OpenAI, max_tokens: int, is_text: bool) -> None:
    tokens, tokenizer = tokens_of(PROMPT), checkpoints.loaded(GPT2)[1]
    fields = {**GREEDY, "max_tokens": max_tokens, "prompt": PROMPT if is_text else tokens}
    answer = complete(client, echo=True, logprobs=3, **fields)
    choice, told = answer.choices[0], answer.choices[0].logprobs
    alone = complete(client, logprobs=3, **{**fields, "max_tokens": max(max_tokens, 1)}).choices[0]
    new = len(alone.logprobs.tokens) if max_tokens else 0
    assert choice.text == (PROMPT if is_text else tokenizer.decode(tokens)) + (alone.text if max_tokens else "")
    assert len(told.tokens) == len(told.text_offset) == len(told.top_logprobs) == len(tokens) + new
    assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
    scores = expected(tokens)
    wanted = [scores[position, token].item() for position, token in enumerate(tokens[1:])]
    assert told.token_logprobs[1 : len(tokens)] == pytest.approx(wanted, abs=1e-4)
    assert told.token_logprobs[len(tokens) :] == pytest.approx(alone.logprobs.token_logprobs[:new], abs=1e-4)
    for position, top in enumerate(told.top_logprobs[1 : len(tokens)]):
        assert max(top.values()) == pytest.approx(scores[position].max().item(), abs=1e-4)
        assert 3 <= len(top) <= 4 and told.tokens[position + 1] in top
    assert told.text_offset[0] == 0
    ends = [offset + len(token) for offset, token in zip(told.text_offset, told.tokens, strict=True)]
    assert ends[:-1] == told.text_offset[1:]
    assert answer.usage.prompt_tokens == len(tokens) and answer.usage.completion_tokens == new
    assert choice.finish_reason == "length"


def test_the_chosen_of_a_question_is_the_likeliest(client: OpenAI) -> None:
    """How an evaluation with multiple choices scores: the sum over the tokens of an ending, after a context."""
    context, endings = tokens_of(PROMPT), [tokens_of(OTHER)[:3], tokens_of(PROMPT)[:2]]
    prompts = [context + ending for ending in endings]
    answer = complete(client, prompt=prompts, temperature=0, max_tokens=1, logprobs=1, echo=True, seed=1234)
    for choice, prompt in zip(answer.choices, prompts, strict=True):
        scores = expected(prompt)[len(context) - 1 :].gather(1, torch.tensor(prompt[len(context) :])[:, None])
        told = choice.logprobs.token_logprobs[len(context) : -1]
        assert sum(told) == pytest.approx(scores.sum().item(), abs=1e-3)


def test_each_result_has_the_prompt(client: OpenAI) -> None:
    fields = {"prompt": [PROMPT, OTHER], "n": 2, "temperature": 1, "seed": 3, "max_tokens": 4}
    plain = complete(client, **fields).choices
    for fields in ({"echo": True}, {"echo": True, "logprobs": 0}):
        answer = complete(client, prompt=[PROMPT, OTHER], n=2, temperature=1, seed=3, max_tokens=4, **fields)
        for number, (choice, without) in enumerate(zip(answer.choices, plain, strict=True)):
            assert choice.text == (PROMPT, OTHER)[number // 2] + without.text
    tokens = [len(tokens_of(text)) for text in (PROMPT, OTHER)]
    assert [len(choice.logprobs.tokens) - tokens[index // 2] for index, choice in enumerate(answer.choices)] == [4] * 4


def test_what_was_cut_off_is_not_there(client: OpenAI) -> None:
    tokens = tokens_of(PROMPT)[-3:]
    fields = {"prompt": PROMPT, "truncate_prompt_tokens": 3, "temperature": 0, "max_tokens": 0}
    answer = complete(client, echo=True, logprobs=0, **fields)
    assert answer.choices[0].text == checkpoints.loaded(GPT2)[1].decode(tokens)
    scores = expected(tokens)
    wanted = [scores[position, token].item() for position, token in enumerate(tokens[1:])]
    told = answer.choices[0].logprobs.token_logprobs
    assert told[0] is None and told[1:] == pytest.approx(wanted, abs=1e-4)


def test_a_prompt_is_cut_to_what_leaves_room_for_one_token(client: OpenAI) -> None:
    most = max(model.max_model_len for model in client.models.list().data)
    fields = {"prompt": PROMPT * most, "truncate_prompt_tokens": -1, "temperature": 0, "max_tokens": 0}
    answer = complete(client, echo=True, **fields)
    assert answer.usage.prompt_tokens == client.models.retrieve(answer.model).max_model_len - 1


def test_a_prompt_of_one_token(client: OpenAI) -> None:
    token = tokens_of(PROMPT)[0]
    fields = {"return_tokens_as_token_ids": True, "temperature": 0, "max_tokens": 0}
    answer = complete(client, prompt=[token], echo=True, logprobs=2, **fields)
    told = answer.choices[0].logprobs
    assert (told.tokens, told.token_logprobs, told.top_logprobs, told.text_offset) == (
        [f"token_id:{token}"], [None], [None], [0]
    )  # fmt: skip


@pytest.mark.parametrize("fields", [{}, {"num_beams": 3}, {"n": 2, "temperature": 1, "seed": 5}])
def test_a_stream_begins_with_it(client: OpenAI, fields: dict[str, Any]) -> None:
    fields = {"temperature": 0, "max_tokens": 6, **fields} if "num_beams" not in fields else {"max_tokens": 6, **fields}
    whole = complete(client, echo=True, **fields)
    found = [""] * len(whole.choices)
    for chunk in complete(client, echo=True, stream=True, **fields):
        for choice in chunk.choices:
            found[choice.index] += choice.text
    assert found == [choice.text for choice in whole.choices] and all(text.startswith(PROMPT) for text in found)
