"""Tools: what a model is told of them, calls that it writes in its own way, and calls that must be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

import fastgen
from fastgen_serve.api import tools
from fastgen_serve.api.tools_schema import Function, Tool, form_of_calls
from fastgen_serve.app import create_app
from fastgen_serve.models import Models
from fastgen_serve.settings import ServeSettings
from fastgen_serve.workers.local import LocalModel
from tests.serve.checkpoints import USER
from tests.serve.servers import in_thread

needs_parser = pytest.mark.skipif(tools._Parser is None, reason="this release has no parser of responses")
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Ur", "Nod"]}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 0, "maximum": 99}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
CALLED = {"id": "a", "function": {"name": "weather", "arguments": "{}"}}
WRONG = {"id": "a", "function": {"name": "weather", "arguments": "["}}
CALL = r'<tool_call>\n{"name": "weather", "arguments": {"city": "Ur", "days": 3}}\n</tool_call>'.replace(r"\n", "\n")
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.reasoning_content or '' }}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.arguments.city }}</tool_call>{% endfor %}"
    "{{ message.tool_call_id or '' }}\n{% endfor %}assistant:"
)


def _client(chat: str, template: str, under: Path) -> Iterator[OpenAI]:
    folder = Path(shutil.copytree(chat, under / "tools"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    settings = ServeSettings(models=(("tools", str(folder)),), warm_up=False, max_tokens=200)
    with (
        in_thread(create_app(settings, Models([LocalModel("tools", settings)]))) as address,
        OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def client(paths: dict[str, str], enabled: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """Of a server whose model is told of tools."""
    yield from _client(paths["chat"], TEMPLATE, tmp_path_factory.mktemp("models"))


def _tool(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "any", "parameters": parameters}}


def _calling(arguments: str, **more: Any) -> dict[str, Any]:
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": arguments, **more}}
    return {"role": "assistant", "tool_calls": [call]}


DEEP: dict[str, Any] = {}
for _ in range(150):
    DEEP = {"a": DEEP}


def ask(client: OpenAI, **fields: Any) -> Any:
    fields = {"messages": [USER], "tools": TOOLS, "temperature": 1.0, "seed": 1, "max_tokens": 150, **fields}
    return client.chat.completions.create(model="tools", **fields)


def streamed(client: OpenAI, **fields: Any) -> tuple[str, list[Any], str]:
    """Content, calls and why it ended, of a stream."""
    content, calls, reason = "", [], ""
    for chunk in ask(client, stream=True, **fields):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                assert call.index == len(calls) and call.type == "function" and call.id
                calls.append(call.function)
            reason = choice.finish_reason or reason
    return content, calls, reason


def check_weather(arguments: str) -> None:
    found = json.loads(arguments)
    assert found.keys() == {"city", "days"} and found["city"] in ("Ur", "Nod") and 0 <= found["days"] < 100


def test_a_call_by_name(client: OpenAI) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    (answer,) = ask(client, tool_choice=choice).choices
    (call,) = answer.message.tool_calls
    assert call.function.name == "weather" and call.type == "function" and len(call.id) == 9
    assert answer.message.content is None and answer.finish_reason == "stop"
    check_weather(call.function.arguments)
    content, (again,), reason = streamed(client, tool_choice=choice)
    assert (content, again.arguments, reason) == ("", call.function.arguments, "stop")


def test_a_call_of_any(client: OpenAI) -> None:
    answer = ask(client, tool_choice="required", parallel_tool_calls=False, tools=TOOLS[:1], n=2)
    for choice in answer.choices:
        (call,) = choice.message.tool_calls
        assert call.function.name == "weather" and choice.finish_reason == "tool_calls"
        check_weather(call.function.arguments)


def test_a_call_that_is_cut_off_is_text(client: OpenAI) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    (answer,) = ask(client, tool_choice=choice, max_tokens=3).choices
    assert answer.finish_reason == "length" and answer.message.tool_calls is None
    assert answer.message.content.strip().startswith("{")


def _written(text: str) -> dict[str, Any]:
    """Has the model write this text."""
    return {"extra_body": {"structured_outputs": {"choice": [text]}}}


@needs_parser
def test_calls_that_the_model_writes(client: OpenAI) -> None:
    (answer,) = ask(client, **_written(f"so{CALL}\n{CALL}")).choices
    assert answer.message.content == "so" and answer.finish_reason == "tool_calls"
    assert [call.function.name for call in answer.message.tool_calls] == ["weather"] * 2
    assert json.loads(answer.message.tool_calls[1].function.arguments) == {"city": "Ur", "days": 3}
    content, calls, reason = streamed(client, **_written(f"so{CALL}\n{CALL}"))
    assert (content, len(calls), reason) == ("so", 2, "tool_calls")
    (answer,) = ask(client, **_written("no calls")).choices
    assert (answer.message.content, answer.message.tool_calls, answer.finish_reason) == ("no calls", None, "stop")


@pytest.mark.parametrize(
    "parameters", [{}, {"type": "array"}, {"type": ["object", "null"]}, {"properties": {}}], ids=str
)
def test_arguments_are_an_object(client: OpenAI, parameters: dict[str, Any]) -> None:
    choice = {"type": "function", "function": {"name": "any"}}
    sent = {"tools": [_tool({**parameters, "maxProperties": 0, "additionalProperties": False})]}
    for fields in {"tool_choice": choice}, {"tool_choice": "required", "parallel_tool_calls": False}:
        (call,) = ask(client, **sent, **fields).choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {}


@pytest.mark.parametrize(
    "more", [{}, {"$id": "https://example.org/a", "$schema": "https://json-schema.org/draft/2020-12/schema"}]
)
def test_schemas_that_refer_to_themselves(client: OpenAI, more: dict[str, Any]) -> None:
    """Wherever in themselves: among others they mean the same."""
    day = {"enum": [1, 2]}
    own = {"day": day, "to": {"$ref": "#/properties/day"}, "by": {"$ref": "#/definitions/by"}, "in": {"$ref": "#"}}
    parameters = {
        "type": "object", "properties": own, "required": ["day", "to", "by"], "additionalProperties": False,
        "definitions": {"by": {"enum": [3]}}, **more,
    }  # fmt: skip
    given = {"tools": [TOOLS[0], _tool(parameters)], "tool_choice": "required", "parallel_tool_calls": False}
    names = set()
    for seed in range(4):
        (choice,) = ask(client, **given, seed=seed, max_tokens=200).choices
        for call in choice.message.tool_calls or ():
            found = json.loads(call.function.arguments)
            names.add(call.function.name)
            while call.function.name == "any" and found:
                assert found["day"] in (1, 2) and found["to"] in (1, 2) and found["by"] == 3
                found = found.get("in")
    assert "any" in names


def test_references_by_name_are_left() -> None:
    parameters = {"properties": {"a": {"$ref": "#b"}}, "$defs": {"b": {"$anchor": "b"}}}
    form = form_of_calls([Function(name="a", parameters=parameters)], None)
    assert form["$defs"]["0"] == {**parameters, "type": "object"}


def test_calls_that_must_be_come_before_another_form(client: OpenAI) -> None:
    """Frameworks send what they want at the end with each request."""
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    named = {"type": "json_schema", "json_schema": {"name": "end", "schema": schema}}
    (answer,) = ask(client, tools=TOOLS[:1], tool_choice="required", response_format=named).choices
    check_weather(answer.message.tool_calls[0].function.arguments)
    flat = {"format": {"type": "json_schema", "name": "end", "schema": schema}}
    check_weather(respond(client, tools=FLAT[:1], tool_choice="required", text=flat).output[0].arguments)


@needs_parser
def test_calls_as_clients_send_them_back(client: OpenAI) -> None:
    """With what streams, and OpenAI's client, add to them, and without arguments."""
    plain = ask(client, messages=[USER, _calling("{}")], max_tokens=1).usage
    message = _calling(" ", parsed_arguments={"a": 1}) | {"content": None, "parsed": None, "refusal": None}
    message["tool_calls"][0]["index"] = 0
    assert ask(client, messages=[USER, message], max_tokens=1).usage == plain


def test_without_tools_an_answer_is_text(client: OpenAI) -> None:
    for fields in {"tool_choice": "none"}, {"tools": []}:
        (answer,) = ask(client, **fields, **_written(CALL)).choices
        assert answer.message.content == CALL and answer.message.tool_calls is None


@needs_parser
def test_what_the_model_is_told(client: OpenAI) -> None:
    """Tools, calls of earlier answers with their arguments as objects, and results."""
    answer = ask(client, **_written(CALL)).choices[0].message
    messages: list[Any] = [USER, answer, {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "dry"}]
    expected = (
        f"[weather][now]user: {USER['content']}\nassistant: (so)<tool_call>Ur</tool_call>\n"
        f"tool: dry{answer.tool_calls[0].id}\nassistant:"
    )
    body = [each if isinstance(each, dict) else each.model_dump(exclude_none=True) for each in messages]
    body[1]["reasoning_content"] = "(so)"
    sent = {"model": "tools", "messages": body, "tools": TOOLS}
    address = str(client.base_url).removesuffix("/v1/")
    tokens = httpx.post(f"{address}/tokenize", json=sent).json()["tokens"]
    told = httpx.post(f"{address}/detokenize", json={"model": "tools", "tokens": tokens}).json()["prompt"]
    assert told.strip() == expected
    assert ask(client, messages=body, max_tokens=1).usage.prompt_tokens == len(tokens)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required", "tools": [_tool({"uniqueItems": True})]}, "tools"),
        ({"tools": [_tool({"$defs": DEEP})]}, "tools.0.function.parameters"),
        ({"messages": [_calling('{"a": "\\ud800"}')]}, "messages.0.tool_calls.0.function.arguments"),
        ({"messages": [_calling(json.dumps(DEEP))]}, "messages.0.tool_calls.0.function.arguments"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"extra_body": {"structured_outputs": {"json": DEEP}}}, "structured_outputs.json"),
        ({"extra_body": {"structured_outputs": {"json": '{"a": ' * 5000}}}, "structured_outputs"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0"),
        ({"messages": [USER | {"tool_call_id": "a"}]}, "messages.0"),
        (
            {"messages": [USER | {"tool_calls": [{"id": "a", "function": {"name": "a", "arguments": "{}"}}]}]},
            "messages.0",
        ),
        ({"messages": [_calling("[")]}, "messages.0.tool_calls.0.function.arguments"),
        ({"tools": [_tool({"description": "\ud800"})]}, "tools.0.function.parameters"),
    ],
    ids=lambda value: str(value)[:80],
)
@needs_parser
def test_what_is_refused(client: OpenAI, fields: dict[str, Any], param: str) -> None:
    """The body is written here: OpenAI's client cannot send half of a surrogate pair."""
    body = {"model": "tools", "messages": [USER], "tools": TOOLS, **fields}
    body |= body.pop("extra_body", {})
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{client.base_url}chat/completions", content=json.dumps(body), headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]


def respond(client: OpenAI, **fields: Any) -> Any:
    given = {"input": "light", "tools": FLAT, "temperature": 1.0, "max_output_tokens": 150, **fields}
    return client.responses.create(model="tools", **given)


@needs_parser
def test_responses(client: OpenAI) -> None:
    """Calls are items of the output, and of the input that goes on from them."""
    answer = respond(client, **_written(f"so{CALL}"))
    message, call = answer.output
    assert (message.content[0].text, call.type, call.name) == ("so", "function_call", "weather")
    assert [tool.name for tool in answer.tools] == ["weather", "now"] and answer.tool_choice == "auto"
    Response.model_validate(answer.model_dump())
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "dry"}
    called = {"id": call.call_id, "type": "function", "function": {"name": "weather", "arguments": call.arguments}}
    messages: list[Any] = [
        USER,
        {"role": "assistant", "content": "so", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "dry"},
    ]
    expected = ask(client, messages=messages, temperature=0, max_tokens=8)
    found = respond(client, input=[USER, *answer.output, output], temperature=0, max_output_tokens=8)
    assert found.output_text == expected.choices[0].message.content
    assert found.usage.input_tokens == expected.usage.prompt_tokens
    alone = respond(client, tool_choice={"type": "function", "name": "weather"})
    check_weather(alone.output[0].arguments)
    assert len(alone.output) == 1 and alone.tool_choice.name == "weather"
    assert [each.type for each in respond(client, **_written("no calls")).output] == ["message"]
    with pytest.raises(openai.BadRequestError) as refused:  # it has one form
        respond(client, text={"format": {"type": "json_object"}}, **_written("so"))
    assert refused.value.param == "text"


@pytest.mark.parametrize("text", [f"so{CALL}", f"{CALL}\n{CALL}", "no calls"])
@needs_parser
def test_streams_of_responses(client: OpenAI, text: str) -> None:
    kind: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    with client.responses.with_streaming_response.create(
        model="tools", input="light", tools=FLAT, stream=True, **_written(text)
    ) as sent:
        lines = [line.removeprefix("data: ") for line in sent.iter_lines() if line.startswith("data: ")]
    events = [kind.validate_json(line) for line in lines]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    done = [event for event in events if event.type == "response.output_item.done"]
    whole = events[-1].response
    assert sorted(event.output_index for event in done) == list(range(len(whole.output)))
    for event in done:
        assert event.item == whole.output[event.output_index]
    begun = [event.output_index for event in events if event.type == "response.output_item.added"]
    assert sorted(begun) == list(range(len(whole.output)))
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == whole.output_text
    assert len(whole.output) == text.count("<tool_call>") + (not text.startswith("<tool_call>"))


@needs_parser
def test_a_form_of_answers_that_are_no_calls(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model may call, or answer in the form; here it is made to want to call."""
    schema = {
        "type": "object", "properties": {"dry": {"type": "boolean"}}, "required": ["dry"],
        "additionalProperties": False,
    }  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    (answer,) = ask(client, response_format=form, tool_choice="auto", temperature=0).choices
    assert answer.finish_reason in ("stop", "length") and (answer.message.tool_calls or answer.message.content)
    begin = fastgen.Grammar.__init__

    def wants(self: Any, tokenizer: Any, eos: Any = None, **given: Any) -> None:
        assert given == {"json_schema": schema, "unless": "<tool_call>"}
        begin(self, tokenizer, eos, choice=[CALL])

    schema["title"] = "another one, which is not kept"
    with monkeypatch.context() as patch:
        patch.setattr(fastgen.Grammar, "__init__", wants)
        (answer,) = ask(client, response_format=form).choices
    assert answer.message.tool_calls[0].function.name == "weather" and answer.finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("template", "message"),
    [("{{ messages[0].content }}", "does not tell it"), ("{{ tools }}{{ messages[0].content }}", "not known how")],
)
def test_models_without_tools(paths: dict[str, str], tmp_path: Path, template: str, message: str) -> None:
    for client in _client(paths["chat"], template, tmp_path):
        with pytest.raises(openai.BadRequestError, match=message) as refused:
            ask(client)
        assert refused.value.param == "tools"
        if "tools" in template:
            assert ask(client, tool_choice="required").choices[0].finish_reason in ("tool_calls", "length")


# ---- how models write calls


FORMATS = {
    "hermes": ("<tool_call>", CALL, ""),
    "xml": (
        "<tool_call><function=",
        "<tool_call>\n<function=weather>\n<parameter=city>\nUr\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        "",
    ),
    "gemma": ("<|tool_call>call:", '<|tool_call>call:weather{city:<|"|>Ur<|"|>,days:3}<tool_call|>', ""),
    "lfm": ("<|tool_call_start|>", '<|tool_call_start|>[weather(city="Ur", days=3)]<|tool_call_end|>', ""),
    "mistral": ("[TOOL_CALLS]", '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Ur", "days": 3}}]', None),
    "llama": ('<|python_tag|>"parameters"', '{"name": "weather", "parameters": {"city": "Ur", "days": 3}}', None),
}


def _answer(marks: str, prompt: str = "", **more: Any) -> tools.FreeAnswer:
    template = f"{{{{ tools }}}}{marks}"
    given = [Tool.model_validate(TOOLS[0] | {"function": TOOLS[0]["function"] | {"parameters": _PLAIN}})]
    return tools.FreeAnswer(_Tokenizer(chat_template=template, **more), prompt, given)


class _Tokenizer(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]


_PLAIN = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}


def read(answer: tools.Answer, text: str, size: int) -> tools.Part:
    """All that comes of a text which is pushed in pieces of this size."""
    parts = [answer.push(text[begin : begin + size]) for begin in range(0, len(text), size)]
    return sum([*parts, answer.finish()], tools.Part())


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("name", FORMATS)
@needs_parser
def test_formats(name: str, size: int) -> None:
    marks, call, between = FORMATS[name]
    if tools._template_of(_Tokenizer(chat_template=marks)) is None:
        pytest.skip("this release cannot read such calls")
    found = read(_answer(marks), call, size)
    assert [(each.name, json.loads(each.arguments)) for each in found.calls] == [("weather", {"city": "Ur", "days": 3})]
    assert found.content == ""
    if name != "llama":
        assert read(_answer(marks), f"so {call}", size).content.strip() == "so"
    if between is not None:
        assert len(read(_answer(marks), call * 2, size).calls) == 2
    said = "three < four, [TOOL and <tool, {}"
    assert read(_answer(marks), said, size) == tools.Part(said)


@pytest.mark.parametrize("size", [1, 5, 1000])
@needs_parser
def test_what_only_looks_like_a_call_is_text(size: int) -> None:
    for wrong in "<tool_call>{no}</tool_call>", '<tool_call>{"name": 3}</tool_call>', "<tool_call>[]</tool_call>":
        found = read(_answer("<tool_call>"), f"a {wrong} b {CALL}", size)
        assert found == tools.Part(f"a {wrong} b {CALL}")
    for arguments in '"no JSON"', '"[]"', '{"a": NaN}', "[" * 5000:
        wrong = f'<tool_call>{{"name": "a", "arguments": {arguments}}}</tool_call>'
        assert read(_answer("<tool_call>"), wrong, size) == tools.Part(wrong)
    found = read(_answer("<tool_call>"), f"a{CALL}<tool_call>{{", size)
    assert len(found.calls) == 1 and found.content.startswith("a") and found.content.endswith("<tool_call>{")


@needs_parser
def test_arguments_that_are_written_otherwise() -> None:
    """As text; with half of a surrogate pair, which answers cannot have."""
    for arguments, expected in ('"{\\"a\\": 1}"', '{"a": 1}'), ('""', "{}"), ('{"a": "\\ud800"}', '{"a": "\\ud800"}'):
        call = f'<tool_call>{{"name": "a", "arguments": {arguments}}}</tool_call>'
        assert read(_answer("<tool_call>"), call, 1000).calls[0].arguments == expected


@pytest.mark.parametrize("size", [1, 4, 1000])
@needs_parser
def test_thoughts(size: int) -> None:
    """They are no content, whether the prompt or the model begins them."""
    for prompt, text in ("user: a\n<think>\n", "so\n</think>\n\nyes"), ("user: a\n", "<think>\nso\n</think>\n\nyes"):
        found = read(_answer("<think></think><tool_call>", prompt), text + CALL, size)
        assert found.reasoning.strip() == "so" and found.content == "yes" and len(found.calls) == 1
    assert read(_answer("<think></think><tool_call>", "<think>\n\n</think>\n\n"), "yes", size) == tools.Part("yes")


@needs_parser
def test_the_tokenizers_own_words_count() -> None:
    own = {
        "start_anchor": "assistant:",
        "fields": {
            "tool_calls": {
                "open": "CALL ", "close": ";", "content": "json", "repeats": True,
                "transform": {"type": "function", "function": {"name": "{content.f}", "arguments": "{content.a}"}},
            },
            "content": {"content": "text"},
        },
    }  # fmt: skip
    found = read(_answer("<tool_call>", "user: a\nassistant:", response_template=own), 'x CALL {"f": "g", "a": {}};', 2)
    assert [(each.name, each.arguments) for each in found.calls] == [("g", "{}")] and found.content.strip() == "x"
