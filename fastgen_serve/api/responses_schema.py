"""The requests and answers of OpenAI's Responses: what there is of them without tools, reasoning and kept answers."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from fastgen_serve.api.openai_answers import TokenLogprobs
from fastgen_serve.api.openai_schema import (
    MOST_LOGPROBS,
    ContentPart,
    Conversation,
    Count,
    Detail,
    ImagePart,
    Message,
    StreamOptions,
)
from fastgen_serve.api.schema import Body, Text, Unused, at_most, described, encodable, off, unused
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

    type: Literal["message"] = "message"  # refused first: items of other types have other fields
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
        """The same in a chat completion."""
        if isinstance(self.content, str):
            return Message(role=self.role, content=self.content)
        parts = [
            ContentPart(type="text", text=part.text)
            if isinstance(part, InputPart)
            else ImagePart(type="image_url", image_url=part.image_url)
            for part in self.content
        ]
        return Message(role=self.role, content=parts)


class TextOptions(Body):
    format: Any = off({"type": "text"})
    verbosity: Any = off("medium")


def _as_items(value: Any) -> Any:
    """A text is what the user says. A field for two types would not name the item that is wrong."""
    if isinstance(value, str):
        return [InputItem(role="user", content=encodable(value))]
    if not isinstance(value, list):
        raise PydanticCustomError("one_of", "is no text, and no list of messages {{'role': ..., 'content': ...}}")
    return value


class ResponseStreamOptions(StreamOptions):
    continuous_usage_stats: Any = off(False)


class ResponseRequest(Conversation):
    """A conversation that the model answers."""

    prefix: ClassVar[str] = "resp_"

    input: Annotated[
        list[InputItem],
        Field(min_length=1, fail_fast=True),
        BeforeValidator(_as_items, json_schema_input_type=str | list[InputItem]),
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

    @model_validator(mode="after")
    def _agree(self) -> ResponseRequest:
        if self.top_logprobs is not None and not self.include:
            raise BadRequest(f'top_logprobs: give include=["{_LOGPROBS}"] with it', param="top_logprobs")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_output_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.include else None

    def messages(self) -> list[Message]:
        """Those of a chat completion."""
        said = [] if self.instructions is None else [Message(role="system", content=self.instructions)]
        return [*said, *(item.as_message() for item in self.input)]


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


class TextFormat(BaseModel):
    type: Literal["text"] = "text"


class TextAnswer(BaseModel):
    format: TextFormat = TextFormat()


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
    output: list[OutputMessage] = []
    parallel_tool_calls: Literal[False] = False
    previous_response_id: None = None
    store: Literal[False] = False
    temperature: float | None = None
    text: TextAnswer = TextAnswer()
    tool_choice: Literal["none"] = "none"
    tools: list[None] = []
    top_p: float | None = None
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
