"""OpenAI's interface, with its own client: the answers are those of `generate` for each input alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from openai import AsyncOpenAI, OpenAI

from fastgen_serve.app import create_app
from fastgen_serve.errors import Failed
from fastgen_serve.jobs import Delta, Generated, ModelInfo, Sequence
from fastgen_serve.models import Models
from fastgen_serve.settings import ServeSettings
from tests.serve import checkpoints
from tests.serve.checkpoints import generated, texts
from tests.serve.servers import BART, GPT2, in_thread

PROMPT, OTHER = "and it came to pass", "fear not for"
SOURCE = "and the lord spake unto moses saying"
USER = {"role": "user", "content": "what is the law"}
GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return checkpoints.folders(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def url(paths: dict[str, str], enabled: None) -> Iterator[str]:
    settings, models = checkpoints.load(paths, max_batch=8, max_beams=8, max_tokens=200)
    with in_thread(create_app(settings, models)) as address:
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


def complete(client: OpenAI, model: str = "gpt2", prompt: Any = PROMPT, **fields: Any) -> Any:
    own = {name: fields.pop(name) for name in list(fields) if name not in OPENAI}
    return client.completions.create(model=model, prompt=prompt, extra_body=own, **fields)


# What the client has keywords for; vLLM's and Transformers' fields go into `extra_body`.
OPENAI = frozenset(
    "best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream stream_options "
    "suffix temperature top_p user".split()
)


# ---- models


def test_models(client: OpenAI, paths: dict[str, str]) -> None:
    assert [model.id for model in client.models.list()] == list(paths)
    card = client.models.retrieve("gpt2")
    assert (card.id, card.object, card.max_model_len) == ("gpt2", "model", 512)  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("another/one")
    assert refused.value.code == "model_not_found"


def test_the_first_model_is_the_default(url: str) -> None:
    assert httpx.post(f"{url}/v1/completions", json={"prompt": SOURCE}).json()["model"] == "bart"


# ---- completions


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
    assert answer.choices[0].text.startswith(" "), "it goes on behind a word"
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


def test_top_k_is_off_unless_someone_sets_it(client: OpenAI) -> None:
    answer = complete(client, temperature=1, max_tokens=10, seed=3)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 10, "num_beams": 1}
    assert answer.choices[0].text == texts(GPT2, PROMPT, seed=3, **options)[0]


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
    assert answer.choices[0].finish_reason == "stop"
    long = complete(client, "bart", SOURCE, ignore_eos=True, temperature=0, max_tokens=60)
    assert long.choices[0].finish_reason == "length" and long.usage.completion_tokens == 60


# ---- streams

STREAMS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1, "seed": 1, "n": 2},
    {"num_beams": 3, "n": 2},
    {"temperature": 0, "prompt": [PROMPT, OTHER]},
    {"temperature": 0, "stop": ["the", "lord"]},
    {"temperature": 0, "logprobs": 2},
]


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


def test_a_stream_of_events(url: str) -> None:
    body = {"model": "gpt2", "prompt": PROMPT, "max_tokens": 2, "temperature": 0, "stream": True}
    response = httpx.post(f"{url}/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    parsed = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert all("usage" not in each and len(each["choices"]) == 1 for each in parsed)


# ---- log-probabilities


def log_probabilities(tokens: list[int], prompt: list[int]) -> torch.Tensor:
    """[new, vocabulary], in float64."""
    model, _ = checkpoints.loaded(GPT2)
    with torch.no_grad():
        logits = model.double()(torch.tensor([prompt + tokens])).logits[0].log_softmax(-1)
    model.float()
    return logits[len(prompt) - 1 : -1]


# The model's own no_repeat_ngram_size would forbid some tokens.
FREE = {**GREEDY, "no_repeat_ngram_size": 0, "return_token_ids": True}


def test_logprobs_of_completions(client: OpenAI) -> None:
    choice = complete(client, logprobs=3, **FREE).choices[0]
    tokenizer = checkpoints.loaded(GPT2)[1]
    expected = log_probabilities(choice.token_ids, tokenizer(PROMPT)["input_ids"])
    of_tokens = expected.gather(1, torch.tensor(choice.token_ids)[:, None])[:, 0]
    assert choice.logprobs.token_logprobs == pytest.approx(of_tokens.tolist(), abs=1e-4)
    for top, row in zip(choice.logprobs.top_logprobs, expected, strict=True):
        assert sorted(top.values(), reverse=True) == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
    assert "".join(choice.logprobs.tokens) == choice.text
    begin = [len("".join(choice.logprobs.tokens[:count])) for count in range(12)]
    assert choice.logprobs.text_offset == begin
    named = complete(client, logprobs=0, return_tokens_as_token_ids=True, **FREE).choices[0]
    assert named.logprobs.tokens == [f"token_id:{token}" for token in choice.token_ids]
    assert [len(top) for top in named.logprobs.top_logprobs] == [1] * 12


def test_logprobs_of_chats(client: OpenAI, paths: dict[str, str]) -> None:
    answer = client.chat.completions.create(
        model="chat", messages=[USER], max_completion_tokens=6, temperature=0, logprobs=True, top_logprobs=2,
        extra_body={"no_repeat_ngram_size": 0, "return_token_ids": True},
    )  # fmt: skip
    choice: Any = answer.choices[0]
    expected = log_probabilities(choice.token_ids, answer.prompt_token_ids)  # type: ignore[attr-defined]
    assert [each.logprob for each in choice.logprobs.content] == pytest.approx(
        [row[token].item() for row, token in zip(expected, choice.token_ids, strict=True)], abs=1e-4
    )
    for each, row in zip(choice.logprobs.content, expected, strict=True):
        assert [top.logprob for top in each.top_logprobs] == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)
        assert bytes(each.bytes).decode() == each.token
    assert "".join(each.token for each in choice.logprobs.content).strip() == choice.message.content


# ---- chats


def test_a_chat_is_written_by_the_models_template(client: OpenAI, paths: dict[str, str]) -> None:
    _, tokenizer = checkpoints.loaded(paths["chat"])
    messages = [{"role": "system", "content": "be brief"}, USER]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    answer = client.chat.completions.create(
        model="chat",
        messages=messages,
        temperature=0,
        max_tokens=8,
        extra_body={"return_token_ids": True},  # type: ignore[arg-type]
    )
    assert answer.prompt_token_ids == tokenizer(prompt)["input_ids"]  # type: ignore[attr-defined]
    assert answer.choices[0].message.role == "assistant" and answer.object == "chat.completion"
    expected = texts(GPT2, prompt, num_beams=1, max_new_tokens=8)[0]
    assert answer.choices[0].message.content == expected.removeprefix(" "), "an answer begins a text"
    parts = [{"role": "user", "content": [{"type": "text", "text": "what is"}, {"type": "text", "text": "the law"}]}]
    joined = [{"role": "user", "content": "what is\nthe law"}]
    ask = lambda messages: client.chat.completions.create(model="chat", messages=messages, temperature=0, max_tokens=8)  # noqa: E731
    assert ask(parts).choices[0].message == ask(joined).choices[0].message
    assert ask(parts).usage == ask(joined).usage


def test_a_developer_speaks_as_the_system_where_the_template_knows_no_developer(client: OpenAI) -> None:
    ask = lambda role: client.chat.completions.create(  # noqa: E731
        model="chat",
        messages=[{"role": role, "content": "be brief"}, USER],
        max_tokens=2,
        extra_body={"return_token_ids": True},
    )
    assert ask("developer").prompt_token_ids == ask("system").prompt_token_ids


def test_the_last_message_is_continued(client: OpenAI, paths: dict[str, str]) -> None:
    tokenizer = checkpoints.loaded(paths["chat"])[1]
    messages = [USER, {"role": "assistant", "content": "the law is"}]
    answer = client.chat.completions.create(
        model="chat", messages=messages, temperature=0, max_tokens=2,  # type: ignore[arg-type]
        extra_body={"continue_final_message": True, "add_generation_prompt": False, "return_token_ids": True},
    )  # fmt: skip
    assert tokenizer.decode(answer.prompt_token_ids).endswith("assistant said the law is")  # type: ignore[attr-defined]


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 1, "seed": 3, "n": 2}, {}], ids=str)
def test_chunks_of_a_chat(client: OpenAI, fields: dict[str, Any]) -> None:
    options: dict[str, Any] = {"model": "chat", "messages": [USER], "max_tokens": 10, **fields}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options))
    assert chunks[-1].usage == whole.usage
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert [part.delta.role for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
        assert "".join(part.delta.content for part in parts) == choice.message.content
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]


def test_a_chat_has_as_many_tokens_as_the_model_says_or_as_fit(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="chat", messages=[USER], temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage.completion_tokens == 64, "its generation config's max_new_tokens"
    long = [{"role": "user", "content": "the law " * 240}]
    answer = client.chat.completions.create(model="chat", messages=long, temperature=0, extra_body={"ignore_eos": True})  # type: ignore[arg-type]
    assert answer.usage.total_tokens == 512, "what is left"


def test_many_clients_at_once(url: str) -> None:
    lines = (Path("examples/data/heldout.src.txt").read_text().splitlines())[:6]
    sources = [" ".join(line.split()[: 3 + 2 * number]) for number, line in enumerate(lines)]

    async def ask() -> list[Any]:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            works = [client.completions.create(model="bart", prompt=source, max_tokens=20) for source in sources]
            works += [client.completions.create(model="gpt2", prompt=source, **GREEDY) for source in sources]  # type: ignore[call-overload]
            streams = [
                client.completions.create(model="bart", prompt=each, max_tokens=20, stream=True) for each in sources
            ]

            async def read(stream: Any) -> str:
                return "".join([chunk.choices[0].text async for chunk in await stream])

            return await asyncio.gather(*works, *map(read, streams))

    answers = asyncio.run(ask())
    targets = [texts(BART, source, max_new_tokens=20)[0] for source in sources]
    assert [answer.choices[0].text for answer in answers[:6]] == targets
    assert [answer.choices[0].text for answer in answers[6:12]] == [
        texts(GPT2, source, num_beams=1, max_new_tokens=12)[0] for source in sources
    ]
    assert answers[12:] == targets


# ---- embeddings


def test_embeddings(client: OpenAI, paths: dict[str, str]) -> None:
    from transformers import AutoModel, AutoTokenizer

    inputs = ["let there be light", "day"]
    tokenizer = AutoTokenizer.from_pretrained(paths["vectors"])
    model = AutoModel.from_pretrained(paths["vectors"]).eval()
    with torch.no_grad():
        expected = [model(**tokenizer(text, return_tensors="pt"))[0][0].mean(0).numpy() for text in inputs]
    floats = client.embeddings.create(model="vectors", input=inputs, encoding_format="float")
    for made, vector in zip(floats.data, expected, strict=True):
        np.testing.assert_allclose(made.embedding, vector, atol=1e-5)
    ids = [tokenizer(text)["input_ids"] for text in inputs]
    assert floats.usage.prompt_tokens == floats.usage.total_tokens == sum(map(len, ids))
    # The client asks for base64 by itself, and decodes it.
    for same in (inputs, ids):
        answer = client.embeddings.create(model="vectors", input=same)
        for made, other in zip(answer.data, floats.data, strict=True):
            np.testing.assert_allclose(made.embedding, other.embedding, atol=1e-6)
    alone = client.embeddings.create(model="vectors", input=inputs[1], dimensions=8)
    short = np.array(alone.data[0].embedding)
    np.testing.assert_allclose(short, expected[1][:8] / np.linalg.norm(expected[1][:8]), atol=1e-5)


def test_embeddings_of_long_texts(client: OpenAI) -> None:
    long = "light " * 100
    with pytest.raises(openai.BadRequestError, match="maximum context length is 64 tokens") as refused:
        client.embeddings.create(model="vectors", input=long)
    assert refused.value.code == "context_length_exceeded"
    cut = client.embeddings.create(model="vectors", input=long, extra_body={"truncate_prompt_tokens": -1})
    assert cut.usage.prompt_tokens == 64


# ---- errors


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": []}, "tools"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": -1}, "frequency_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"logprobs": 100}, "logprobs"),
        ({"stop": [""]}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 201}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"num_beams": 9}, "num_beams"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": [1, 99999]}, "prompt"),
        ({"prompt": ["a"] * 9}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"tgt_lang": "de_DE"}, "tgt_lang"),
        ({"src_lang": "de_DE"}, "src_lang"),
        ({"model": "vectors"}, "model"),
        ({"no_such_field": 1}, "no_such_field"),
    ],
    ids=str,
)
def test_what_is_refused_is_named(url: str, fields: dict[str, Any], param: str) -> None:
    body = json.dumps({"model": "gpt2", "prompt": PROMPT, **fields})
    response = httpx.post(f"{url}/v1/completions", content=body, headers={"Content-Type": "application/json"})
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["param"] == param and error["type"] == "invalid_request_error"
    assert param in error["message"] or "context" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"messages": [USER, {"role": "system", "content": "late"}]}, "messages"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"model": "gpt2"}, "messages"),
        ({"seed": 2**63}, "seed"),
    ],
    ids=str,
)
def test_what_is_refused_of_a_chat_is_named(url: str, fields: dict[str, Any], param: str) -> None:
    body = {"model": "chat", "messages": [USER], **fields}
    response = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_values_that_ask_for_nothing_are_accepted(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="chat", messages=[USER], max_tokens=1, temperature=0, presence_penalty=0, frequency_penalty=0, tool_choice="none",
        response_format={"type": "text"}, store=False, service_tier="auto", modalities=["text"], user="me", logit_bias={},
        parallel_tool_calls=True, extra_body={"tools": [], "metadata": {}, "spaces_between_special_tokens": True},
    )  # fmt: skip
    assert answer.usage.completion_tokens == 1


def test_a_prompt_that_is_too_long(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, prompt=[5] * 500, max_tokens=13)
    assert refused.value.code == "context_length_exceeded" and refused.value.param == "prompt"
    assert str(refused.value.body["message"]).startswith(  # type: ignore[index]
        "This model's maximum context length is 512 tokens. However, you requested 513 tokens (500 in the prompt, 13 in "
        "the completion)."
    )
    assert complete(client, prompt=[5] * 510, temperature=0, ignore_eos=True).usage.completion_tokens == 2, (
        "what is left"
    )
    with pytest.raises(openai.BadRequestError, match="maximum context length is 256"):
        complete(client, "bart", prompt=[5] * 257)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512"):
        client.chat.completions.create(model="chat", messages=[{"role": "user", "content": "law " * 600}])


def test_an_unknown_model(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        complete(client, "no-such-model")
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")


class _Fails:
    """Streams some tokens, and fails; or at once."""

    name, is_ready = "fails", True
    info = ModelInfo("fails", "decoder-only", ("generate",), 64)

    def __init__(self, tokens: int) -> None:
        self.tokenizer, self._tokens, self.is_closed = checkpoints.loaded(GPT2)[1], tokens, False

    async def stream(self, job: Any) -> Any:
        try:
            for token in range(self._tokens):
                yield Delta(0, (20 + token,))
            raise Failed("there was no memory", retry_after=None)
        finally:
            self.is_closed = True

    async def generate(self, job: Any) -> Generated:
        if job.tokens[0] == 5:
            raise Failed("there was no memory")
        await asyncio.sleep(60)
        return Generated((Sequence((), "stop"),))

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


def post(model: _Fails, **fields: Any) -> httpx.Response:
    app = create_app(ServeSettings(models=(("fails", GPT2),)), Models([model]))  # type: ignore[list-item]

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.post("/v1/completions", json={"prompt": PROMPT, **fields})

    return asyncio.run(ask())


def test_what_fails_before_the_first_chunk_has_a_status() -> None:
    response = post(_Fails(0), stream=True)
    assert response.status_code == 500
    error = {"message": "there was no memory", "type": "server_error", "param": None, "code": "internal_error"}
    assert response.json() == {"error": error}


def test_what_fails_later_is_an_event() -> None:
    model = _Fails(3)
    response = post(model, stream=True)
    *_, error, done, _ = response.text.split("\n\n")
    assert response.status_code == 200 and done == "data: [DONE]"
    assert json.loads(error.removeprefix("data: "))["error"]["message"] == "there was no memory"
    assert model.is_closed


def test_a_prompt_that_fails_ends_the_others() -> None:
    assert post(_Fails(0), prompt=[[6], [5]]).status_code == 500
