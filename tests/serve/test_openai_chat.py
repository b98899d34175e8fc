"""OpenAI's chat completions, log-probabilities and embeddings: what the library makes of each input alone.

Its Responses are the answers of chat completions, in other shapes.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import openai
import pytest
import torch
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from fastgen_serve.api import openai as interface
from fastgen_serve.errors import TimedOut
from tests.serve import checkpoints
from tests.serve.checkpoints import GREEDY, OTHER, PROMPT, USER, chat, complete, texts
from tests.serve.servers import GPT2


def test_a_chat_is_written_by_the_models_template(client: OpenAI, paths: dict[str, str]) -> None:
    _, tokenizer = checkpoints.loaded(paths["chat"])
    messages = [{"role": "system", "content": "be brief"}, USER]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    answer = chat(client, *messages, temperature=0, max_tokens=8, return_token_ids=True)
    assert answer.prompt_token_ids == tokenizer(prompt)["input_ids"]
    assert answer.choices[0].message.role == "assistant" and answer.object == "chat.completion"
    expected = texts(GPT2, prompt, num_beams=1, max_new_tokens=8)[0]
    assert answer.choices[0].message.content == expected.removeprefix(" "), "an answer begins a text"
    parts = {"role": "user", "content": [{"type": "text", "text": "what is"}, {"type": "text", "text": "the law"}]}
    joined = {"role": "user", "content": "what is\nthe law"}
    first, second = (chat(client, each, temperature=0, max_tokens=8) for each in (parts, joined))
    assert (first.choices[0].message, first.usage) == (second.choices[0].message, second.usage)


def test_a_developer_speaks_as_the_system_where_the_template_knows_no_developer(client: OpenAI) -> None:
    first, second = (
        chat(client, {"role": role, "content": "be brief"}, USER, max_tokens=2, return_token_ids=True)
        for role in ("developer", "system")
    )
    assert first.prompt_token_ids == second.prompt_token_ids


def test_variables_of_a_template(client: OpenAI, paths: dict[str, str]) -> None:
    tokenizer = checkpoints.loaded(paths["chat"])[1]

    def ask(variables: dict[str, Any]) -> Any:
        return chat(client, max_tokens=1, return_token_ids=True, chat_template_kwargs=variables)

    text = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True, brief=True)
    assert text.startswith("be brief")
    assert ask({"brief": True}).prompt_token_ids == tokenizer(text)["input_ids"]
    assert ask({"brief": False}).prompt_token_ids == ask({}).prompt_token_ids
    for name in ("chat_template", "messages", "tokenize", "conversation", "bos_token"):
        with pytest.raises(openai.BadRequestError, match=f"chat_template_kwargs has {name}"):
            ask({name: "{{ 1 }}"})
    with pytest.raises(openai.BadRequestError, match="is no text, number, true, false or null"):
        ask({"brief": ["a"]})


def test_the_last_message_is_continued(client: OpenAI, paths: dict[str, str]) -> None:
    tokenizer = checkpoints.loaded(paths["chat"])[1]
    said, left_open = {"role": "assistant", "content": "the law is"}, {"add_generation_prompt": False}
    answer = chat(client, USER, said, max_tokens=2, continue_final_message=True, return_token_ids=True, **left_open)
    assert tokenizer.decode(answer.prompt_token_ids).endswith("assistant said the law is")


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 1, "seed": 3, "n": 2}, {}], ids=str)
def test_chunks_of_a_chat(client: OpenAI, fields: dict[str, Any]) -> None:
    whole = chat(client, max_tokens=10, **fields)
    chunks = list(chat(client, max_tokens=10, stream=True, stream_options={"include_usage": True}, **fields))
    assert chunks[-1].usage == whole.usage
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert [part.delta.role for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
        assert "".join(part.delta.content for part in parts) == choice.message.content
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]


def test_each_chunk_of_a_chat_has_the_usage_until_then(client: OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = chat(client, max_tokens=8, temperature=0, stream=True, stream_options=options, ignore_eos=True)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert (counts[0], counts[-1], last.usage.completion_tokens) == (0, 8, 8)
    assert counts == sorted(counts) and len(set(counts)) > 2
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {last.usage.prompt_tokens}


def test_a_chat_has_as_many_tokens_as_the_model_says_or_as_fit(client: OpenAI) -> None:
    answer = chat(client, temperature=0, ignore_eos=True)
    assert answer.usage.completion_tokens == 64, "its generation config's max_new_tokens"
    answer = chat(client, {"role": "user", "content": "the law " * 240}, temperature=0, ignore_eos=True)
    assert answer.usage.total_tokens == 512, "what is left"


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
    """They are the model's in float64, before temperature and top-k: those of each token and of the three likeliest."""
    for drawn in ({"temperature": 0.5, "top_k": 5, "seed": 1, "n": 2, "prompt": [OTHER, PROMPT]}, {}):
        for choice in complete(client, logprobs=3, **{**FREE, **drawn}).choices:
            expected = log_probabilities(choice.token_ids, choice.prompt_token_ids)
            of_tokens = expected.gather(1, torch.tensor(choice.token_ids)[:, None])[:, 0]
            assert choice.logprobs.token_logprobs == pytest.approx(of_tokens.tolist(), abs=1e-4)
            for token, top, row in zip(choice.token_ids, choice.logprobs.top_logprobs, expected, strict=True):
                likeliest = row.topk(3).values.tolist()
                assert sorted(top.values(), reverse=True)[:3] == pytest.approx(likeliest, abs=1e-4)
                assert len(top) == 3 + (row[token] < likeliest[-1] - 1e-4)
    assert "".join(choice.logprobs.tokens) == choice.text
    begin = [len("".join(choice.logprobs.tokens[:count])) for count in range(12)]
    assert choice.logprobs.text_offset == begin
    named = complete(client, logprobs=0, return_tokens_as_token_ids=True, **FREE).choices[0]
    assert named.logprobs.tokens == [f"token_id:{token}" for token in choice.token_ids]
    assert [len(top) for top in named.logprobs.top_logprobs] == [1] * 12


def test_logprobs_of_chats(client: OpenAI, paths: dict[str, str]) -> None:
    answer = chat(
        client, max_completion_tokens=6, temperature=0, logprobs=True, top_logprobs=2, no_repeat_ngram_size=0,
        return_token_ids=True,
    )  # fmt: skip
    choice = answer.choices[0]
    expected = log_probabilities(choice.token_ids, answer.prompt_token_ids)
    assert [each.logprob for each in choice.logprobs.content] == pytest.approx(
        [row[token].item() for row, token in zip(expected, choice.token_ids, strict=True)], abs=1e-4
    )
    for each, row in zip(choice.logprobs.content, expected, strict=True):
        assert [top.logprob for top in each.top_logprobs] == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)
        assert bytes(each.bytes).decode() == each.token
    assert "".join(each.token for each in choice.logprobs.content).strip() == choice.message.content


def test_embeddings(client: OpenAI, paths: dict[str, str]) -> None:
    inputs, path = ["let there be light", "day"], paths["vectors"]
    expected = [checkpoints.states(path, text).mean(0).numpy() for text in inputs]
    floats = client.embeddings.create(model="vectors", input=inputs, encoding_format="float")
    for made, vector in zip(floats.data, expected, strict=True):
        np.testing.assert_allclose(made.embedding, vector, atol=1e-5)
    ids = [checkpoints.encoded(path, text)["input_ids"][0].tolist() for text in inputs]
    assert floats.usage.prompt_tokens == floats.usage.total_tokens == sum(map(len, ids))
    # The client asks for base64 by itself, and decodes it.
    for same in (inputs, ids):
        answer = client.embeddings.create(model="vectors", input=same)
        for made, other in zip(answer.data, floats.data, strict=True):
            np.testing.assert_allclose(made.embedding, other.embedding, atol=1e-6)
    alone = client.embeddings.create(model="vectors", input=inputs[1], dimensions=8)
    short = np.array(alone.data[0].embedding)
    np.testing.assert_allclose(short, expected[1][:8] / np.linalg.norm(expected[1][:8]), atol=1e-5)


def test_embeddings_behind_a_prompt_of_the_model(client: OpenAI) -> None:
    by_name = client.embeddings.create(model="vectors", input="light", extra_body={"prompt_name": "query"})
    assert by_name.data[0].embedding == client.embeddings.create(model="vectors", input="day light").data[0].embedding
    with pytest.raises(openai.BadRequestError, match="prompt_name is no prompt of vectors: it has query"):
        client.embeddings.create(model="vectors", input="light", extra_body={"prompt_name": "another"})


def test_embeddings_of_long_texts(client: OpenAI) -> None:
    long = "light " * 100
    with pytest.raises(openai.BadRequestError, match="maximum context length is 64 tokens") as refused:
        client.embeddings.create(model="vectors", input=long)
    assert refused.value.code == "context_length_exceeded"
    cut = client.embeddings.create(model="vectors", input=long, extra_body={"truncate_prompt_tokens": -1})
    assert cut.usage.prompt_tokens == 64


# ---- responses


RESPONSE: dict[str, Any] = {"model": "chat", "temperature": 0, "max_output_tokens": 8}
CHAT: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
LOGPROBS: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


def test_the_answer_is_that_of_a_chat(client: OpenAI) -> None:
    answer, expected = client.responses.create(**RESPONSE, input=USER["content"]), chat(client, **CHAT)
    assert answer.output_text == expected.choices[0].message.content and answer.output_text
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (
        expected.usage.prompt_tokens,
        expected.usage.completion_tokens,
    )
    assert answer.object == "response" and answer.error is None and answer.model == "chat"
    is_cut = expected.choices[0].finish_reason == "length"
    assert answer.status == ("incomplete" if is_cut else "completed")
    assert (answer.incomplete_details is not None) == is_cut


def test_a_conversation(client: OpenAI) -> None:
    """An answer goes on as the client sends it back, with instructions in front; items may have parts."""
    first = client.responses.create(**RESPONSE, instructions="be brief", input=[USER])
    items: list[Any] = [USER, *first.output, {"role": "user", "content": [{"type": "input_text", "text": "and then"}]}]
    answer = client.responses.create(**RESPONSE, instructions="be brief", input=items)
    messages = [
        {"role": "system", "content": "be brief"},
        USER,
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "and then"},
    ]
    expected = chat(client, *messages, **CHAT)
    assert answer.output_text == expected.choices[0].message.content
    assert answer.usage.input_tokens == expected.usage.prompt_tokens and answer.instructions == "be brief"


def test_shapes_are_those_of_openais_client(client: OpenAI) -> None:
    """Which does not check them itself: others do, with its types."""
    body = {**RESPONSE, "input": "light", **LOGPROBS}
    Response.model_validate_json(client.responses.with_raw_response.create(**body).text)
    kind: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    with client.responses.with_streaming_response.create(**body, stream=True) as sent:
        events = [json.loads(line[6:]) for line in sent.iter_lines() if line.startswith("data: ")]
    assert len(events) > 8
    for event in events:
        kind.validate_python(event)


def test_log_probabilities(client: OpenAI) -> None:
    answer = client.responses.create(**RESPONSE, input=[USER], **LOGPROBS)
    expected = chat(client, **CHAT, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    found = answer.output[0].content[0].logprobs
    assert [each.model_dump() for each in found] == [each.model_dump() for each in expected]


@pytest.mark.parametrize("more", [{}, LOGPROBS, {"max_output_tokens": 1}, {"metadata": {"a": "b"}}], ids=str)
def test_a_stream_is_the_answer_in_parts(client: OpenAI, more: dict[str, Any]) -> None:
    fields = {**RESPONSE, "input": [USER], **more}
    whole = client.responses.create(**fields)
    events = list(client.responses.create(**fields, stream=True))
    final = events[-1].response
    assert final.output_text == whole.output_text and final.usage == whole.usage and final.status == whole.status
    assert final.metadata == (more.get("metadata") or {})
    types = [event.type for event in events]
    assert types[:4] == ["response.created", "response.in_progress", "response.output_item.added",
                         "response.content_part.added"]  # fmt: skip
    assert types[-4:] == ["response.output_text.done", "response.content_part.done", "response.output_item.done",
                          f"response.{whole.status}"]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == whole.output_text
    if "include" in more:
        parts = [each.model_dump() for event in deltas for each in event.logprobs]
        assert parts == [each.model_dump() for each in whole.output[0].content[0].logprobs]


def test_what_asks_for_nothing_is_accepted(client: OpenAI) -> None:
    fields: dict[str, Any] = {"store": False, "tools": [], "tool_choice": "auto", "text": {"format": {"type": "text"}},
                              "parallel_tool_calls": True, "truncation": "disabled", "user": "me"}  # fmt: skip
    assert client.responses.create(**RESPONSE, input="light", **fields).output


def test_what_fails_in_a_stream_is_its_last_event(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = interface.Run.stream

    async def fails(run: Any) -> Any:
        async for item in stream(run):
            yield item
            raise TimedOut("planted")

    monkeypatch.setattr(interface.Run, "stream", fails)
    events = list(client.responses.create(**RESPONSE, input="light", stream=True))
    assert events[-1].type == "response.failed" and events[-1].response.error.message == "planted"
    assert events[-1].response.status == "failed"
