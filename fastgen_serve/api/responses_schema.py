"""The requests and answers of OpenAI's Responses API, without reasoning and stored answers."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field, WrapValidator, field_validator, model_validator
from pydantic_core import PydanticCustomError

from fastgen_serve.api.forms_schema import NamedSchema
from fastgen_serve.api.messages_schema import ContentPart, Detail, ImagePart, Message
from fastgen_serve.api.openai_answers import TokenLogprobs
from fastgen_serve.api.openai_schema import MOST_LOGPROBS, Conversation, Count, StreamOptions
from fastgen_serve.api.schema import Body, Text, Unused, at_most, described, encodable, off, unused
from fastgen_serve.api.tools_schema import Arguments, CalledFunction, ToolCall
from fastgen_serve.errors import BadRequest

_LOGPROBS = "message.output_text.logprobs"
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputPart(Body):
    type: Literal["input_text", "output_text"]
    text: Text
    annotations: Any = off([])
    logprobs: Any = Field(default=None, description="Of an earlier answer: accepted, and not used.")


class InputImage(Body):
    type: Literal["input_image"]
    image_url: Text = Field(description="A data: URI, such as data:image/png;base64,... Nothing is fetched.")
    detail: Detail = None
    file_id: Any = off()


class InputItem(Body):
    """A message; those of earlier answers are taken as they were sent."""

    type: Literal["message"] = "message"  # its error comes first: items of other types have other fields
    role: Literal["developer", "system", "user", "assistant"]
    content: Annotated[
        Text | Annotated[list[InputPart | InputImage], Field(min_length=1, fail_fast=True)],
        described(
            "is no text, and no list of parts {'type': 'input_text', 'text': ...} or {'type': 'input_image', "
            "'image_url': 'data:...'}: other parts are not supported"
        ),
    ]
    id: Unused = None
    status: Annotated[ItemStatus | None, unused()] = None
    phase: Any = off("commentary", "final_answer")

    def as_message(self) -> Message:
        """Returns the equal message of a chat completion."""
        if isinstance(self.content, str):
            return Message(role=self.role, content=self.content)
        parts = [
            ContentPart(type="text", text=part.text)
            if isinstance(part, InputPart)
            else ImagePart(type="image_url", image_url=part.image_url)
            for part in self.content
        ]
        return Message(role=self.role, content=parts)


class CallItem(Body):
    """A call of a tool in an earlier answer."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Arguments
    id: Unused = None
    status: Annotated[ItemStatus | None, unused()] = None
    namespace: Any = off()

    def as_call(self) -> ToolCall:
        """Returns the equal call of a chat completion."""
        return ToolCall(id=self.call_id, function=CalledFunction(name=self.name, arguments=self.arguments))


class CallOutputItem(Body):
    """What a call has given."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Text | Annotated[list[InputPart], Field(min_length=1, fail_fast=True)]
    id: Unused = None
    status: Annotated[ItemStatus | None, unused()] = None

    def as_message(self) -> Message:
        """Returns the equal message of a chat completion."""
        text = self.output if isinstance(self.output, str) else "\n".join(part.text for part in self.output)
        return Message(role="tool", tool_call_id=self.call_id, content=text)


class TextFormat(NamedSchema):
    type: Literal["text", "json_object", "json_schema"]

    @property
    def form(self) -> dict[str, Any] | None:
        """Keywords of `fastgen.Grammar`; None for no constraint."""
        return None if self.type == "text" else self.as_form()


class TextOptions(Body):
    format: TextFormat | None = Field(default=None, description="JSON, of any schema or of this one.")
    verbosity: Any = off("medium")


_KINDS: dict[Any, type[Body]] = {"function_call": CallItem, "function_call_output": CallOutputItem}


def _by_type(value: Any, validate: Any) -> Any:
    """Validates an item by its type: the errors of a union would name its classes."""
    if isinstance(value, Body):
        return value
    kind = value.get("type") if isinstance(value, dict) else None
    return _KINDS.get(kind if isinstance(kind, str) else None, InputItem).model_validate(value)


Item = Annotated[InputItem | CallItem | CallOutputItem, WrapValidator(_by_type)]


def _as_items(value: Any) -> Any:
    """Makes a text the user's message. A field with a union of two types would not name the invalid item."""
    if isinstance(value, str):
        return [InputItem(role="user", content=encodable(value))]
    if not isinstance(value, list):
        raise PydanticCustomError(
            "one_of", "is no text, and no list of messages {{'role': ..., 'content': ...}} or calls"
        )
    return value


class ResponseStreamOptions(StreamOptions):
    continuous_usage_stats: Any = off(False)


class ResponseRequest(Conversation):
    """A conversation that the model answers."""

    prefix: ClassVar[str] = "resp_"

    input: Annotated[
        list[Item],
        Field(min_length=1, fail_fast=True),
        BeforeValidator(_as_items, json_schema_input_type=str | list[InputItem | CallItem | CallOutputItem]),
    ]
    instructions: Text | None = Field(default=None, description="What the system says, in front of the input.")
    max_output_tokens: Count | None = Field(
        default=None, description="New tokens, at the most; without it, as many as fit."
    )
    include: Annotated[list[Literal["message.output_text.logprobs"]], Field(fail_fast=True)] | None = Field(
        default=None, description="Log-probabilities of the new tokens."
    )
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = Field(
        default=None,
        description="Log-probabilities of so many of the likeliest tokens at each position; with `include` for them.",
    )
    metadata: Annotated[dict[Text, Text], Field(max_length=16), at_most(16)] | None = Field(
        default=None, description="The answer has it, too."
    )
    text: TextOptions | None = None
    stream_options: ResponseStreamOptions | None = None

    return_token_ids: Any = off(False)
    n: Any = off(1)
    best_of: Any = off(1)
    num_return_sequences: Any = off(1)
    background: Any = off(False)
    conversation: Any = off()
    max_tool_calls: Any = off()
    previous_response_id: Any = off()
    prompt: Any = off()
    reasoning: Any = off({})
    truncation: Any = off("disabled")

    @field_validator("tools", mode="before")
    @classmethod
    def _as_in_a_chat(cls, value: Any) -> Any:
        """Converts functions, which the Responses API does not nest."""
        return [_nested(each) for each in value] if isinstance(value, list) else value

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _choice_as_in_a_chat(cls, value: Any) -> Any:
        return _nested(value)

    @property
    def _format(self) -> TextFormat:
        """The format of the answer's text that `text` sets."""
        return (self.text and self.text.format) or TextFormat(type="text")

    def _form(self) -> dict[str, Any] | None:
        asked = None if self.must_call else self._format.form
        return super()._form() if asked is None else asked

    @model_validator(mode="after")
    def _agree(self) -> ResponseRequest:
        if self._format.form is not None and (self.structured_outputs or self.response_format):
            raise BadRequest("text: a result has one form, leave structured_outputs and the like out", param="text")
        if self.top_logprobs is not None and not self.include:
            raise BadRequest(f'top_logprobs: give include=["{_LOGPROBS}"] with it', param="top_logprobs")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_output_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.include else None

    @property
    def text_answer(self) -> TextAnswer:
        """The answer's field for the format of its text."""
        return TextAnswer(format=self._format.model_dump(by_alias=True, exclude_none=True))

    @property
    def tools_answer(self) -> dict[str, Any]:
        """The answer's fields for its tools."""
        if not self.tools:
            return {}
        chosen = self.chosen_name
        return {
            "tools": [
                {"type": "function", "strict": False, "parameters": None, **tool.function.model_dump(exclude_none=True)}
                for tool in self.tools
            ],
            "tool_choice": {"type": "function", "name": chosen} if chosen else self.tool_choice or "auto",
            "parallel_tool_calls": self.parallel_tool_calls is not False,
        }

    def messages(self) -> list[Message]:
        """Returns the equal messages of a chat completion."""
        said = [] if self.instructions is None else [Message(role="system", content=self.instructions)]
        for item in self.input:
            if not isinstance(item, CallItem):
                said.append(item.as_message())
            elif said and said[-1].role == "assistant":  # an assistant's calls belong to its message
                said[-1].tool_calls = [*(said[-1].tool_calls or ()), item.as_call()]
            else:
                said.append(Message(role="assistant", content="", tool_calls=[item.as_call()]))
        return said


def _nested(value: Any) -> Any:
    """Nests a function, or its name, as in chat completions."""
    if not isinstance(value, dict) or value.get("type") != "function" or "function" in value:
        return value
    return {"type": "function", "function": {name: each for name, each in value.items() if name != "type"}}


# ---- answers


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[None] = []
    logprobs: list[TokenLogprobs] = []


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    content: list[OutputText]


class OutputCall(BaseModel):
    id: str
    type: Literal["function_call"] = "function_call"
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class CachedTokens(BaseModel):
    cached_tokens: Literal[0] = 0
    cache_write_tokens: Literal[0] = 0


class ReasoningTokens(BaseModel):
    reasoning_tokens: Literal[0] = 0


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: CachedTokens = CachedTokens()
    output_tokens: int
    output_tokens_details: ReasoningTokens = ReasoningTokens()
    total_tokens: int


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(BaseModel):
    code: Literal["server_error"] = "server_error"
    message: str


class TextAnswer(BaseModel):
    format: dict[str, Any] = {"type": "text"}


class Response(BaseModel):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ItemStatus | Literal["failed"]
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    model: str
    output: list[OutputMessage | OutputCall] = []
    parallel_tool_calls: bool = False
    previous_response_id: None = None
    store: Literal[False] = False
    temperature: float | None = None
    text: TextAnswer = TextAnswer()
    tool_choice: str | dict[str, Any] = "none"
    tools: list[dict[str, Any]] = []
    top_p: float | None = None
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
