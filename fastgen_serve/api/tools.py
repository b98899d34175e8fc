"""Parses tool calls in a model's output while it is generated, with Transformers' response parser.

The tokenizer defines how a model writes a call (`response_template`); otherwise the marks in its chat template tell.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

from fastgen_serve.api.openai_schema import Conversation
from fastgen_serve.api.tools_schema import Tool
from fastgen_serve.errors import BadRequest
from fastgen_serve.jobs import Generate

_Parser: Any = None  # None in older releases: forced calls do not need it
with contextlib.suppress(ImportError):
    from transformers.utils.chat_parsing import ResponseParser as _Parser

_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}}
_PYTHON = "<|python_tag|>"  # Llama 3 may write it before a call
# By the marks of a chat template, the format of calls, in that parser's terms. The first entry whose marks all occur
# applies.
_FORMATS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (  # Qwen3-Coder, Qwen3.5
        ("<tool_call>", "<function="),
        {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            "repeats": True,
        },
    ),
    (  # Hermes, Qwen2.5, Qwen3, SmolLM3, Granite
        ("<tool_call>",),
        {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
            "repeats": True,
        },
    ),
    (  # Gemma 4
        ("<|tool_call>call:",),
        {
            "open_pattern": r"\s*<\|tool_call>call:(?P<name>[\w.-]+)",
            "close": "<tool_call|>",
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            "repeats": True,
        },
    ),
    (  # LFM2
        ("<|tool_call_start|>",),
        {
            "open_pattern": r"\s*<\|tool_call_start\|>",
            "close": "<|tool_call_end|>",
            "content": "python-call-list",
            "transform": _CALL,
            "transform_each": True,
        },
    ),
    (  # Mistral
        ("[TOOL_CALLS]",),
        {"open_pattern": r"\s*\[TOOL_CALLS\]", "content": "json", "transform": _CALL, "transform_each": True},
    ),
    (  # Llama 3: a call is the whole answer
        (_PYTHON, '"parameters"'),
        {
            "open_pattern": r"\A\s*(?:<\|python_tag\|>)?(?=\{)",
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{content.name}", "arguments": "{content.parameters}"},
            },
        },
    ),
)
_THINK = "<think>"
# Names of the fields with a model's reasoning in response templates.
_REASONING = ("reasoning_content", "thinking")


@dataclass(frozen=True)
class Call:
    """A tool call; the arguments are JSON."""

    name: str
    arguments: str
    id: str

    @classmethod
    def of(cls, name: Any, arguments: Any) -> Call:
        """Makes a call. ValueError or RecursionError: it is not a call, or cannot be written as JSON."""
        found = json.loads(arguments.strip() or "{}") if isinstance(arguments, str) else arguments
        if not isinstance(name, str) or not isinstance(found, dict):
            raise ValueError("a call without a name, or without arguments")
        name.encode()  # UnicodeEncodeError for a lone surrogate, which JSON can express but nobody can send
        text = json.dumps(found, ensure_ascii=False, allow_nan=False)
        if any("\ud800" <= each <= "\udfff" for each in text):
            text = json.dumps(found)
        return cls(name, text, uuid.uuid4().hex[:9])  # nine characters, as Mistral's templates require


@dataclass
class Part:
    """The part of an answer that has become final."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def __add__(self, other: Part) -> Part:
        return Part(self.content + other.content, self.reasoning + other.reasoning, self.calls + other.calls)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


def check_template(tokenizer: Any, needs_parser: bool) -> None:
    """Raises BadRequest if a model is not told about tools, or the format of its calls is unknown."""
    if "tools" not in str(tokenizer.chat_template):
        raise BadRequest("tools: the model's chat template does not tell it of any, leave them out", param="tools")
    if needs_parser and _template_of(tokenizer) is None:
        raise BadRequest(
            "tools: it is not known how this model writes calls; ask for one with tool_choice 'required', or by name",
            param="tools",
        )


@lru_cache(maxsize=64)
def _template_of(tokenizer: Any) -> dict[str, Any] | None:
    """Returns the response template of a model for Transformers' parser; None if its format is unknown."""
    if _Parser is None:
        return None
    template: dict[str, Any] | None = getattr(tokenizer, "response_template", None) or _template_by_marks(tokenizer)
    try:
        _Parser(template, prefix="")
    except ValueError:  # there is none, or it needs a newer release
        return None
    return template


def _template_by_marks(tokenizer: Any) -> dict[str, Any] | None:
    """Returns the response template for a tokenizer without one, by the marks in its chat template."""
    text = str(tokenizer.chat_template)
    calls = next((calls for marks, calls in _FORMATS if all(mark in text for mark in marks)), None)
    if calls is None:
        return None
    thinks = {"reasoning_content": {"open": _THINK, "close": "</think>", "content": "text"}} if _THINK in text else {}
    fields = {**thinks, "tool_calls": calls, "content": {"content": "text"}}
    return {"start_anchor_pattern": r"\A", "fields": fields}


def mark_of_calls(tokenizer: Any) -> str | None:
    """Returns the mark that starts a model's calls; None if other answers may start alike, or it is unknown."""
    template = _template_of(tokenizer) or {}
    own = template.get("fields", {}).get("tool_calls", {})
    if isinstance(own.get("open"), str):
        return str(own["open"])
    return next((marks[0] for marks, calls in _FORMATS if calls is own and marks[0] != _PYTHON), None)


class FreeAnswer:
    """Parses an answer in which the model may call tools.

    Args:
        tokenizer: of the model.
        prompt: text that precedes the answer, and may contain its beginning.
        tools: the available tools.
    """

    is_named = False

    def __init__(self, tokenizer: Any, prompt: str, tools: list[Tool]) -> None:
        template = _template_of(tokenizer)
        assert template is not None, "checked before"
        if getattr(tokenizer, "response_template", None) is None:
            last = prompt.rfind(_THINK)
            prompt = "" if last < 0 or prompt[last + len(_THINK) :].strip() else prompt[last:]
        self._parser = _Parser(template, prefix=prompt, tools=[each.as_template_reads() for each in tools])
        # The text so far, the end of its part that has been emitted, and the parser's position.
        self._raw, self._read, self._parsed = "", 0, 0
        self._has_content, self._is_text = False, False

    def push(self, text: str) -> Part:
        """Returns the part that this text makes final."""
        self._raw += text
        return self._part(lambda: self._parser.feed(text))

    def finish(self) -> Part:
        """Returns the rest, after the end."""
        return self._part(lambda: self._parser.finalize()[1])

    def _part(self, events: Callable[[], list[dict[str, Any]]]) -> Part:
        part = Part()
        if not self._is_text:
            try:
                for event in events():
                    self._take(event, part)
            except (ValueError, KeyError, TypeError, RecursionError):
                self._is_text = True  # what looked like a call is text, and so is the rest
        if self._is_text:
            part.content, self._read = part.content + self._raw[self._read :], len(self._raw)
        if not self._has_content:  # templates have line breaks between the parts of an answer
            part.content = part.content.lstrip()
        self._has_content = self._has_content or bool(part.content)
        return part

    def _take(self, event: dict[str, Any], part: Part) -> None:
        kind, field = event["type"], event.get("field")
        if kind == "region_chunk":
            begin = max(self._read, self._parsed)
            self._parsed = max(self._raw.find(event["text"], begin), begin) + len(event["text"])
            if field == "content":
                part.content += event["text"]
            elif field in _REASONING:
                part.reasoning += event["text"]
        elif kind == "region_close" and field == "tool_calls":
            values = event["value"] if isinstance(event["value"], list) else [event["value"]]
            part.calls += [Call.of(each["function"]["name"], each["function"]["arguments"]) for each in values]
        if field != "tool_calls" or kind == "region_close":
            self._read = self._parsed


class ForcedAnswer:
    """Parses an answer that is constrained to the form of calls.

    Args:
        name: of the function whose arguments the answer is; None for a list of calls.
    """

    def __init__(self, name: str | None) -> None:
        self._name, self._text = name, ""
        self.is_named = name is not None

    def push(self, text: str) -> Part:
        self._text += text
        return Part()

    def finish(self) -> Part:
        """Returns the calls. Output that was cut off is text."""
        try:
            value = json.loads(self._text)
        except ValueError:
            return Part(self._text)
        if self._name is not None:
            return Part(calls=[Call.of(self._name, value)])
        return Part(calls=[Call.of(each["name"], each["parameters"]) for each in value])


Answer = FreeAnswer | ForcedAnswer


def answer_of(tokenizer: Any, body: Conversation, prompt: tuple[int, ...]) -> Callable[[], Answer] | None:
    """Returns the factory of parsers for the answers to a conversation with tools; None without tools.

    Raises:
        BadRequest: the model is not told about tools, or the format of its calls is unknown.
    """
    if not body.usable_tools:
        return None
    check_template(tokenizer, needs_parser=not body.must_call)
    if body.must_call:
        return partial(ForcedAnswer, body.chosen_name)
    return partial(FreeAnswer, tokenizer, tokenizer.decode(prompt), body.usable_tools)


def with_calls(tokenizer: Any, body: Conversation, job: Generate) -> Generate:
    """Allows calls besides the job's JSON form, if the model may decide between the two."""
    form = None if body.must_call or not body.usable_tools else job.form
    mark = mark_of_calls(tokenizer) if form is not None and "json_schema" in form else None
    return job if form is None or mark is None else replace(job, form={**form, "unless": mark})
