"""OpenAI's Responses: the answers of chat completions, in other shapes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from fastgen_serve.api import openai as interface
from fastgen_serve.errors import TimedOut
from tests.serve.checkpoints import USER, chat

GREEDY: dict[str, Any] = {"model": "chat", "temperature": 0, "max_output_tokens": 8}
CHAT: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
LOGPROBS: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


def test_the_answer_is_that_of_a_chat(client: OpenAI) -> None:
    answer, expected = client.responses.create(**GREEDY, input=USER["content"]), chat(client, **CHAT)
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
    first = client.responses.create(**GREEDY, instructions="be brief", input=[USER])
    items: list[Any] = [USER, *first.output, {"role": "user", "content": [{"type": "input_text", "text": "and then"}]}]
    answer = client.responses.create(**GREEDY, instructions="be brief", input=items)
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
    body = {**GREEDY, "input": "light", **LOGPROBS}
    Response.model_validate_json(client.responses.with_raw_response.create(**body).text)
    kind: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    with client.responses.with_streaming_response.create(**body, stream=True) as sent:
        events = [json.loads(line[6:]) for line in sent.iter_lines() if line.startswith("data: ")]
    assert len(events) > 8
    for event in events:
        kind.validate_python(event)


def test_log_probabilities(client: OpenAI) -> None:
    answer = client.responses.create(**GREEDY, input=[USER], **LOGPROBS)
    expected = chat(client, **CHAT, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    found = answer.output[0].content[0].logprobs
    assert [each.model_dump() for each in found] == [each.model_dump() for each in expected]


@pytest.mark.parametrize("more", [{}, LOGPROBS, {"max_output_tokens": 1}, {"metadata": {"a": "b"}}], ids=str)
def test_a_stream_is_the_answer_in_parts(client: OpenAI, more: dict[str, Any]) -> None:
    fields = {**GREEDY, "input": [USER], **more}
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
    assert client.responses.create(**GREEDY, input="light", **fields).output


def test_what_fails_in_a_stream_is_its_last_event(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = interface.Run.stream

    async def fails(run: Any) -> Any:
        async for item in stream(run):
            yield item
            raise TimedOut("planted")

    monkeypatch.setattr(interface.Run, "stream", fails)
    events = list(client.responses.create(**GREEDY, input="light", stream=True))
    assert events[-1].type == "response.failed" and events[-1].response.error.message == "planted"
    assert events[-1].response.status == "failed"
