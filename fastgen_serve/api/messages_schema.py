"""The messages of a conversation, and the options of the model's chat template."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from fastgen_serve.api.schema import Body, Text, at_most, described, off, unused
from fastgen_serve.api.tools_schema import MOST_TOOLS, Tool, ToolCall
from fastgen_serve.errors import BadRequest

_VARIABLES = 64


class ContentPart(Body):
    type: Literal["text"]
    text: Text


Detail = Annotated[Literal["auto", "low", "high", "original"] | None, unused()]


class ImageUrl(Body):
    url: Text = Field(description="A data: URI, such as data:image/png;base64,... Nothing is fetched.")
    detail: Detail = None


class ImagePart(Body):
    type: Literal["image_url"]
    image_url: Text | ImageUrl = Field(description="The same URI, or an object with it.")

    @property
    def url(self) -> str:
        return self.image_url if isinstance(self.image_url, str) else self.image_url.url


# Other keys that chat templates read, if a message has them.
_OF_MESSAGES = ("name", "tool_call_id", "reasoning_content")


class Message(Body):
    role: Literal["developer", "system", "user", "assistant", "tool"]
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = Field(
        default=None, description="Of an earlier answer."
    )
    tool_call_id: Text | None = Field(default=None, description="The call whose result a message of a tool is.")
    function_call: Any = off()
    content: Annotated[
        Text | Annotated[list[ContentPart | ImagePart], Field(min_length=1, fail_fast=True)],
        described(
            "is no text, and no list of parts {'type': 'text', 'text': ...} or {'type': 'image_url', 'image_url': "
            "{'url': 'data:...'}}: other parts are not supported"
        ),
    ]
    name: Text | None = None

    refusal: Any = off()
    audio: Any = off()
    parsed: Any = Field(default=None, description="Accepted, and not used: OpenAI's client has it.")
    annotations: Any = off([])
    reasoning_content: Text | None = Field(
        default=None, description="Of an earlier answer, for templates that read it."
    )

    @model_validator(mode="before")
    @classmethod
    def _may_have_calls_alone(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and fields.get("tool_calls") and fields.get("content") is None:
            return {**fields, "content": ""}
        return fields

    @model_validator(mode="after")
    def _is_whole(self) -> Message:
        if (self.role == "tool") is (self.tool_call_id is None):
            raise PydanticCustomError("tool", "is of the role tool, and has a tool_call_id, or neither of both")
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("calls", "has tool_calls, which only an assistant has")
        return self

    @property
    def images(self) -> list[str]:
        """The URIs of its images."""
        return (
            [] if isinstance(self.content, str) else [part.url for part in self.content if isinstance(part, ImagePart)]
        )

    def as_template_reads(self) -> dict[str, Any]:
        """Returns the role, the content as one text (as parts if there are images), and other keys with a value."""
        content: str | list[dict[str, str]]
        if isinstance(self.content, str):
            content = self.content
        elif self.images:
            content = [
                {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": part.text}
                for part in self.content
            ]
        else:
            content = "\n".join(part.text for part in self.content if isinstance(part, ContentPart))
        more: dict[str, Any] = {name: value for name in _OF_MESSAGES if (value := getattr(self, name)) is not None}
        if self.tool_calls:
            more["tool_calls"] = [call.as_template_reads() for call in self.tool_calls]
        return {"role": self.role, "content": content, **more}


TemplateVariable = Annotated[bool | int | float | Text | None, described("is no text, number, true, false or null")]


class Templating(Body):
    """The options of the model's chat template."""

    add_generation_prompt: bool = Field(
        default=True, description="The template's beginning of an answer ends the prompt."
    )
    continue_final_message: bool = Field(default=False, description="The last message is left open, and continued.")
    chat_template_kwargs: Annotated[dict[Text, TemplateVariable], at_most(_VARIABLES)] | None = Field(
        default=None, description="Variables that the model's chat template reads, such as enable_thinking."
    )

    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = Field(
        default=None, description="Functions that the model may call."
    )
    chat_template: Any = off()
    documents: Any = off([])

    @property
    def usable_tools(self) -> list[Tool]:
        """The tools that the model is told about."""
        return self.tools or []

    @model_validator(mode="after")
    def _continues_or_starts(self) -> Templating:
        if self.continue_final_message and self.add_generation_prompt:
            raise BadRequest(
                "continue_final_message: give add_generation_prompt=false with it", param="continue_final_message"
            )
        return self
