"""What the interfaces of OpenAI and vLLM refuse, and how it says so; what fails before and after the first chunk."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from fastgen_serve.api.openai_decoding import named_by
from fastgen_serve.api.openai_schema import ChatRequest
from fastgen_serve.app import create_app
from fastgen_serve.errors import BadRequest, Failed
from fastgen_serve.jobs import Delta, Generated, ModelInfo
from fastgen_serve.models import Models
from fastgen_serve.settings import ServeSettings
from fastgen_serve.workers.local import LocalModel
from tests.serve import checkpoints
from tests.serve.checkpoints import PROMPT, USER, chat, complete
from tests.serve.servers import BART, GPT2, in_thread

# Requests that are answered: where there is none for a path, those of its rows are complete.
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "gpt2", "prompt": PROMPT},
    "/v1/chat/completions": {"model": "chat", "messages": [USER]},
    "/v1/responses": {"model": "chat", "input": "light", "max_output_tokens": 8},
}
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "/v1/completions": [
        ({"tools": []}, "tools"), ({"model": "bart", "echo": True}, "echo"),
        ({"echo": True, "stream": True, "logprobs": 1}, "echo"), ({"echo": "maybe"}, "echo"),
        ({"suffix": "x"}, "suffix"), ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"response_format": {"type": "json"}}, "response_format.type"), ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"": 1}}, "logit_bias"), ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"stop_token_ids": [99999]}, "stop_token_ids"), ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"), ({"top_p": 0}, "top_p"), ({"n": 0}, "n"),
        ({"n": 2, "temperature": 0}, "n"), ({"logprobs": 100}, "logprobs"), ({"stop": [""]}, "stop"),
        ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 201}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"), ({"num_beams": 9}, "num_beams"),
        ({"best_of": 2, "stream": True}, "best_of"), ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 2**64}, "truncate_prompt_tokens"),
        ({"no_repeat_ngram_size": 10**30}, "no_repeat_ngram_size"),
        ({"model": "bart", "encoder_no_repeat_ngram_size": 10**30}, "encoder_no_repeat_ngram_size"),
        ({"prompt": ""}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": [1, 99999]}, "prompt"), ({"prompt": ["a"] * 9}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"tgt_lang": "de_DE"}, "tgt_lang"), ({"src_lang": "de_DE"}, "src_lang"), ({"model": "vectors"}, "model"),
        ({"no_such_field": 1}, "no_such_field"), ({"priority": 1}, "priority"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 2}, "min_tokens"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 7}}}}, "response_format"),
        ({"bad_words": ["the"]}, "bad_words"),
    ],
    "/v1/chat/completions": [
        ({"tools": [{"type": "function"}]}, "tools.0.function"), ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format"), ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"), ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"messages": [USER, {"role": "system", "content": "late"}]}, "messages"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"), ({"continue_final_message": True}, "continue_final_message"),
        ({"reasoning_effort": "high"}, "reasoning_effort"), ({"modalities": ["audio"]}, "modalities"),
        ({"model": "gpt2"}, "messages"), ({"seed": 2**63}, "seed"),
    ],
    "/v1/responses": [
        ({"store": True}, "store"), ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"), ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"reasoning": {"effort": "low"}}, "reasoning"), ({"text": {"format": {"type": "json"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": 7}}}}, "text"),
        ({"truncation": "auto"}, "truncation"), ({"include": ["reasoning.encrypted_content"]}, "include.0"),
        ({"top_logprobs": 2}, "top_logprobs"), ({"input": []}, "input"), ({"input": {"role": "user"}}, "input"),
        ({"input": [USER, {"type": "item_reference", "id": "a"}]}, "input.1.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input.0.content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        ({"max_output_tokens": 10**6}, "input"), ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "light " * 5000}, "input"), ({"model": "gpt2"}, "input"), ({"n": 2}, "n"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"include": ["message.output_text.logprobs"], "num_beams": 2}, "include"),
    ],
    "/classify": [
        ({"model": "vectors", "input": "a"}, "model"),
        ({"model": "classes", "input": "a", "use_activation": False}, "use_activation"),
        ({"model": "classes", "input": "light " * 80}, "input"),
        ({"model": "classes", "input": ["a"] * 9}, "input"),
    ],
    "/score": [
        ({"model": "classes", "text_1": "a", "text_2": "b"}, "model"),
        ({"model": "chat", "text_1": "a", "text_2": "b"}, "model"),
        ({"model": "pairs", "text_1": "a"}, "text_1"),
        ({"model": "pairs", "text_1": "a", "data_2": "b"}, "text_1"),
        ({"model": "pairs", "text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ({"model": "pairs", "text_1": "a", "text_2": ["b"] * 9}, "text_2"),
        ({"model": "pairs", "text_1": "light " * 80, "text_2": "b"}, "text_2"),
        ({"model": "vectors", "text_1": "a", "text_2": "b", "use_activation": True}, "use_activation"),
    ],
    "/rerank": [
        ({"model": "pairs", "query": "a", "documents": []}, "documents"),
        ({"model": "pairs", "query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
    ],
    "/tokenize": [
        ({"model": "vectors"}, "prompt"),
        ({"model": "vectors", "messages": [USER]}, "messages"),
        ({"model": "chat", "messages": [USER], "continue_final_message": True}, "continue_final_message"),
    ],
    "/detokenize": [
        ({"model": "vectors", "tokens": [99999]}, "tokens"),
        ({"model": "vectors", "tokens": ["a"]}, "tokens.0"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "fields", "param"), [(path, *each) for path, several in REFUSED.items() for each in several], ids=str
)
def test_what_is_refused_is_named(url: str, path: str, fields: dict[str, Any], param: str) -> None:
    body = json.dumps({**GOOD.get(path, {}), **fields})
    response = httpx.post(f"{url}{path}", content=body, headers={"Content-Type": "application/json"})
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), error
    says = param, "new tokens", "the form of the result"
    assert path != "/v1/completions" or any(each in error["message"] for each in says)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_results_that_are_refused_take_no_memory(url: str, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """A request may want any number of them."""
    monkeypatch.delattr("fastgen_serve.api.openai.TextStream")
    inputs = {"messages": [USER]} if "chat" in path else {"prompt": PROMPT}
    response = httpx.post(f"{url}/v1/{path}", json={"model": "chat", "n": 9, "stream": True, **inputs})
    assert response.status_code == 400 and response.json()["error"]["param"] == "n"


def test_beams_need_a_token_to_go_on_with(client: OpenAI, paths: dict[str, str]) -> None:
    size = len(checkpoints.loaded(paths["gpt2"])[1])
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, stop_token_ids=list(range(size)), num_beams=2)
    assert refused.value.param == "stop_token_ids"


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "the body is no JSON"), ("[1]", "the body: "), ("", "the body: "), ("NaN", "the body: ")],
)
def test_a_body_that_is_no_object(url: str, content: str, message: str) -> None:
    response = httpx.post(f"{url}/v1/completions", content=content, headers={"Content-Type": "application/json"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, None) and error["message"].startswith(message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "\xff"}', "the body is not UTF-8"),
        (b"[" * 100_000, "the body is nested too deeply"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "the body cannot be read: Exceeds the limit"),
    ],
)
def test_a_body_that_cannot_be_parsed_says_why(url: str, content: bytes, message: str) -> None:
    response = httpx.post(f"{url}/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400 and response.json()["error"]["message"].startswith(message)


def test_a_body_of_another_type(url: str) -> None:
    """curl says that it is a form, unless it is told."""
    response = httpx.post(f"{url}/v1/completions", content='{"prompt": "a"}', headers={"Content-Type": "text/plain"})
    assert response.status_code == 400 and "application/json" in response.json()["error"]["message"]


# Clients that fill in all fields send vLLM's own defaults.
NOTHING_OF_VLLM = {
    "allowed_token_ids": None, "bad_words": [], "prompt_logprobs": None, "structured_outputs": None,
    "logits_processors": None, "priority": 0, "cache_salt": None, "kv_transfer_params": None, "vllm_xargs": None,
}  # fmt: skip


def test_values_that_ask_for_nothing_are_accepted(client: OpenAI) -> None:
    answer = chat(
        client, max_tokens=1, temperature=0, presence_penalty=0, frequency_penalty=0, tool_choice="none",
        response_format={"type": "text"}, store=False, service_tier="auto", modalities=["text"], user="me",
        logit_bias={}, parallel_tool_calls=True, tools=[], metadata={}, spaces_between_special_tokens=True,
        **NOTHING_OF_VLLM,
    )  # fmt: skip
    assert answer.usage.completion_tokens == 1
    written = complete(client, max_tokens=1, prompt_embeds=None, **NOTHING_OF_VLLM)
    assert written.usage.completion_tokens == 1


def test_a_prompt_that_is_too_long(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, prompt=[5] * 500, max_tokens=13)
    assert refused.value.code == "context_length_exceeded" and refused.value.param == "prompt"
    assert str(refused.value.body["message"]).startswith(
        "This model's maximum context length is 512 tokens. However, you requested 513 tokens (500 in the prompt, "
        "13 in the completion)."
    )
    assert complete(client, prompt=[5] * 510, temperature=0, ignore_eos=True).usage.completion_tokens == 2, (
        "what is left"
    )
    with pytest.raises(openai.BadRequestError, match="maximum context length is 256"):
        complete(client, "bart", prompt=[5] * 257)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512"):
        chat(client, {"role": "user", "content": "law " * 600})


def test_what_the_engine_refuses_has_the_name_of_the_field() -> None:
    settings = ServeSettings(models=(("bart", BART),), warm_up=False)
    with in_thread(create_app(settings, Models([LocalModel("bart", settings)]))) as url:
        for stream in (False, True):
            body = {"prompt": "fear not", "max_tokens": 300, "stream": stream}
            response = httpx.post(f"{url}/v1/completions", json=body)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, "max_tokens") and "256 positions" in error["message"]


@pytest.mark.parametrize(
    ("option", "fields", "param"),
    [
        ("max_new_tokens", {"messages": [USER], "max_completion_tokens": 3}, "max_completion_tokens"),
        ("min_new_tokens", {"messages": [USER], "min_tokens": 3}, "min_tokens"),
        ("num_beams", {"messages": [USER], "n": 3, "use_beam_search": True}, "n"),
        ("num_return_sequences", {"messages": [USER], "num_return_sequences": 3}, "num_return_sequences"),
        ("eos_token_id", {"messages": [USER], "stop_token_ids": [3]}, "stop_token_ids"),
        ("sequence_bias", {"messages": [USER], "logit_bias": {"3": 1.0}}, "logit_bias"),
        ("top_k", {"messages": [USER], "top_k": 3}, "top_k"),
        ("prompt", {"messages": [USER]}, "messages"),
        (None, {"messages": [USER]}, None),
    ],
    ids=str,
)
def test_options_have_the_names_of_the_request(option: str | None, fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises(BadRequest) as refused, named_by(ChatRequest.model_validate(fields)):
        raise BadRequest("no", param=option)
    assert refused.value.param == param


class _Fails:
    """Streams some tokens, and fails; or at once."""

    name, is_ready = "fails", True
    info = ModelInfo("fails", "decoder-only", ("generate",), 64)

    def __init__(self, tokens: int, error: Exception | None = None) -> None:
        self._error = error or Failed("there was no memory", retry_after=None)
        self.tokenizer, self._tokens, self.is_closed = checkpoints.loaded(GPT2)[1], tokens, False

    async def stream_all(self, jobs: Any) -> Any:
        try:
            for token in range(self._tokens):
                yield 0, Delta(0, (20 + token,))
            raise self._error
        finally:
            self.is_closed = True

    async def generate_all(self, jobs: Any) -> list[Generated]:
        raise Failed("there was no memory")

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


def post(model: _Fails, **fields: Any) -> httpx.Response:
    app = create_app(ServeSettings(models=(("fails", GPT2),)), Models([model]))

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


def test_what_nobody_has_thought_of_is_an_event_as_well() -> None:
    *_, error, done, _ = post(_Fails(3, KeyError("a secret")), stream=True).text.split("\n\n")
    assert done == "data: [DONE]" and "secret" not in error
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "internal_error"
