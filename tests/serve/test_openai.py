"""OpenAI's models, completions and streams, with its own client: the answers of `generate` for each input alone."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai import OpenAI

from tests.serve import checkpoints
from tests.serve.checkpoints import GREEDY, OTHER, PROMPT, SOURCE, complete, generated, texts
from tests.serve.servers import BART, GPT2


def test_models(client: OpenAI, paths: dict[str, str]) -> None:
    assert [model.id for model in client.models.list()] == list(paths)
    card = client.models.retrieve("gpt2")
    assert (card.id, card.object, card.max_model_len) == ("gpt2", "model", 512)
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("another/one")
    assert refused.value.code == "model_not_found"


def test_a_source_becomes_the_target_that_the_generation_config_asks_for(client: OpenAI) -> None:
    answer = complete(client, "bart", SOURCE)
    output = generated(BART, SOURCE, output_scores=True)
    assert [choice.text for choice in answer.choices] == texts(BART, SOURCE)
    assert answer.choices[0].score == pytest.approx(output.sequences_scores[0].item(), abs=1e-5)
    assert answer.choices[0].finish_reason == "stop" and answer.object == "text_completion"
    tokens = checkpoints.loaded(BART)[1](SOURCE)["input_ids"]
    assert answer.usage.prompt_tokens == len(tokens)
    assert answer.usage.completion_tokens == output.sequences.shape[1] - 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.parametrize(
    "fields", [{"n": 3}, {"n": 3, "use_beam_search": True}, {"num_return_sequences": 3, "num_beams": 5}]
)
def test_the_n_best_with_scores(client: OpenAI, fields: dict[str, Any]) -> None:
    beams = {"num_beams": fields.get("num_beams") or (3 if "use_beam_search" in fields else 4)}
    answer = complete(client, "bart", SOURCE, length_penalty=0.5, **fields)
    options = {**beams, "num_return_sequences": 3, "length_penalty": 0.5}
    assert [choice.text for choice in answer.choices] == texts(BART, SOURCE, **options)
    scores = [choice.score for choice in answer.choices]
    assert scores == sorted(scores, reverse=True)
    assert scores == pytest.approx(
        generated(BART, SOURCE, output_scores=True, **options).sequences_scores.tolist(), abs=1e-5
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]


def test_a_prompt_goes_on(client: OpenAI) -> None:
    answer = complete(client, **GREEDY)
    options = {"num_beams": 1, "do_sample": False, "max_new_tokens": 12}
    assert answer.choices[0].text == texts(GPT2, PROMPT, **options)[0]
    assert complete(client, prompt=OTHER, **GREEDY).choices[0].text.startswith(" "), "a word follows a word"
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 12
    assert complete(client, temperature=0).usage.completion_tokens == 16, "OpenAI's default"


def test_several_prompts(client: OpenAI) -> None:
    answer = complete(client, prompt=[PROMPT, OTHER], n=2, num_beams=2, max_tokens=8)
    options = {"num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 8}
    assert [choice.text for choice in answer.choices] == [
        *texts(GPT2, PROMPT, **options), *texts(GPT2, OTHER, **options)
    ]  # fmt: skip
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


def test_token_ids(client: OpenAI) -> None:
    tokenizer = checkpoints.loaded(GPT2)[1]
    ids = [tokenizer(text)["input_ids"] for text in (PROMPT, OTHER)]
    expected = [complete(client, prompt=text, **GREEDY).choices[0].text for text in (PROMPT, OTHER)]
    assert complete(client, prompt=ids[0], **GREEDY).choices[0].text == expected[0]
    answer = complete(client, prompt=ids, return_token_ids=True, **GREEDY)
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.prompt_token_ids for choice in answer.choices] == ids
    assert len(answer.choices[0].token_ids) == 12
    cut = complete(client, prompt=PROMPT, truncate_prompt_tokens=2, return_token_ids=True, **GREEDY)
    assert cut.choices[0].prompt_token_ids == ids[0][-2:]
    cut = complete(
        client, prompt=ids[0], truncate_prompt_tokens=2, truncation_side="right", return_token_ids=True, **GREEDY
    )
    assert cut.choices[0].prompt_token_ids == ids[0][:2]
    cut = complete(client, prompt=PROMPT * 200, truncate_prompt_tokens=-1, **GREEDY)
    assert cut.usage.prompt_tokens == 512 - 12


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"min_tokens": 12}, {"min_new_tokens": 12}),
        ({"repetition_penalty": 3.0}, {"repetition_penalty": 3.0}),
        ({"no_repeat_ngram_size": 1}, {"no_repeat_ngram_size": 1}),
        ({"logit_bias": {"20": 100}}, {"sequence_bias": [[[20], 100.0]]}),
        ({"temperature": None, "num_beams": 3, "early_stopping": "never"}, {"num_beams": 3, "early_stopping": "never"}),
    ],
)
def test_options(client: OpenAI, fields: dict[str, Any], options: dict[str, Any]) -> None:
    answer = complete(client, **{**GREEDY, **fields})
    assert answer.choices[0].text == texts(GPT2, PROMPT, **{"num_beams": 1, "max_new_tokens": 12, **options})[0]


def test_sampling(client: OpenAI) -> None:
    drawn = {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "max_tokens": 10, "seed": 7}
    options = {"do_sample": True, "temperature": 0.8, "top_k": 30, "top_p": 0.9, "max_new_tokens": 10, "num_beams": 1}
    answer = complete(client, n=2, **drawn)
    assert [choice.text for choice in answer.choices] == texts(GPT2, PROMPT, seed=7, num_return_sequences=2, **options)
    assert complete(client, n=2, **drawn).choices == answer.choices, "a seed decides"
    assert complete(client, n=2, **{**drawn, "seed": 8}).choices != answer.choices


def test_the_best_of_what_is_drawn(client: OpenAI) -> None:
    drawn = {"temperature": 1, "seed": 5, "max_tokens": 6, "logprobs": 0}
    everything = complete(client, n=4, **drawn).choices
    means = {choice.text: np.mean(choice.logprobs.token_logprobs) for choice in everything}
    answer = complete(client, n=2, best_of=4, **drawn)
    assert [choice.text for choice in answer.choices] == sorted(means, key=lambda text: -means[text])[:2]
    assert answer.usage.completion_tokens == 24, "all of them were generated"
    assert complete(client, best_of=4, **{**drawn, "logprobs": None}).choices[0].logprobs is None


def test_stop_strings(client: OpenAI) -> None:
    whole = complete(client, **GREEDY).choices[0].text
    word = whole.split()[3]
    answer = complete(client, stop=[word, "\n\n"], **GREEDY).choices[0]
    assert answer.text == whole[: whole.index(word)] and answer.finish_reason == "stop"
    assert answer.stop_reason == word
    answer = complete(client, stop=word, include_stop_str_in_output=True, **GREEDY).choices[0]
    assert answer.text == whole[: whole.index(word) + len(word)]


def test_stop_tokens_and_eos(client: OpenAI) -> None:
    tokens = complete(client, return_token_ids=True, **GREEDY).choices[0].token_ids
    answer = complete(client, stop_token_ids=[tokens[4]], return_token_ids=True, **GREEDY)
    assert answer.choices[0].token_ids == tokens[: tokens.index(tokens[4])]
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].stop_reason == tokens[4]
    *_, last = complete(client, stop_token_ids=[tokens[4]], stream=True, **GREEDY)
    assert last.choices[0].stop_reason == tokens[4]
    cut = complete(client, stop_token_ids=[tokens[4]], max_tokens=1, temperature=0).choices[0]
    assert cut.finish_reason == "length" and not hasattr(cut, "stop_reason")
    ended = complete(client, "bart", SOURCE, temperature=0, max_tokens=60, stop_token_ids=[tokens[4]]).choices[0]
    assert ended.finish_reason == "stop" and not hasattr(ended, "stop_reason")  # by its own EOS
    long = complete(client, "bart", SOURCE, ignore_eos=True, temperature=0, max_tokens=60)
    assert long.choices[0].finish_reason == "length" and long.usage.completion_tokens == 60


STREAMS: list[dict[str, Any]] = [
    {"temperature": 0}, {"temperature": 1, "seed": 1, "n": 2, "logprobs": 1}, {"num_beams": 3, "n": 2},
    {"temperature": 0, "prompt": [PROMPT, OTHER]}, {"temperature": 0, "stop": ["the", "lord"]},
    {"temperature": 0, "logprobs": 2}, {"num_beams": 3, "n": 2, "stop": ["the", "I"]},
    {"model": "bart", "prompt": SOURCE, "n": 2},
    {"model": "bart", "prompt": SOURCE, "stop": "unto", "include_stop_str_in_output": True},
]  # fmt: skip


@pytest.mark.parametrize("fields", STREAMS, ids=str)
def test_a_stream_is_what_is_not_streamed(client: OpenAI, fields: dict[str, Any]) -> None:
    whole = complete(client, max_tokens=12, return_token_ids=True, **fields)
    chunks = list(
        complete(
            client, max_tokens=12, return_token_ids=True, stream=True, stream_options={"include_usage": True}, **fields
        )
    )
    assert chunks[-1].usage == whole.usage and chunks[-1].choices == []
    assert {(chunk.id, chunk.created, chunk.object) for chunk in chunks} == {
        (chunks[0].id, chunks[0].created, "text_completion")
    }
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [token for part in parts for token in part.token_ids] == choice.token_ids
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]
        assert getattr(parts[-1], "score", None) == getattr(choice, "score", None)
        if choice.logprobs is not None:
            assert [x for part in parts for x in part.logprobs.tokens] == choice.logprobs.tokens
            assert [x for part in parts for x in part.logprobs.text_offset] == choice.logprobs.text_offset
            assert [x for part in parts for x in part.logprobs.token_logprobs] == pytest.approx(
                choice.logprobs.token_logprobs, abs=1e-5
            )
    if fields == STREAMS[0]:
        assert len(chunks) > 8, "tokens come one by one"


@pytest.mark.parametrize("fields", [STREAMS[0], STREAMS[2], STREAMS[3]], ids=str)
def test_each_chunk_has_the_usage_until_then(client: OpenAI, fields: dict[str, Any]) -> None:
    """As vLLM has it: of the choice of the chunk. GuideLLM asks for it with each of its streams."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = complete(
        client, max_tokens=9, stream=True, stream_options=options, return_token_ids=True, ignore_eos=True, **fields
    )
    prompts = fields.get("prompt", PROMPT)
    prompts = [prompts] if isinstance(prompts, str) else prompts
    read, written = [len(checkpoints.loaded(GPT2)[1](each)["input_ids"]) for each in prompts], [0, 0]
    for chunk in chunks:
        (choice,) = chunk.choices
        written[choice.index] += len(choice.token_ids)
        prompt = read[choice.index if len(read) > 1 else 0]
        assert chunk.usage.prompt_tokens == prompt
        assert chunk.usage.completion_tokens == written[choice.index]
        assert chunk.usage.total_tokens == prompt + written[choice.index]
    assert last.choices == [] and last.usage.completion_tokens == sum(written) > 0
    assert last.usage.prompt_tokens == sum(read)


def test_a_stream_of_events(url: str) -> None:
    body = {"model": "gpt2", "prompt": PROMPT, "max_tokens": 2, "temperature": 0, "stream": True}
    response = httpx.post(f"{url}/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    parsed = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert all("usage" not in each and len(each["choices"]) == 1 for each in parsed)
