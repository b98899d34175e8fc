"""Output constraints of requests: OpenAI's response format, and vLLM's structured outputs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from fastgen_serve.api.schema import Body, Text, Unused, described, off
from fastgen_serve.api.tools_schema import ANY_OBJECT, JsonObject


class NamedSchema(Body):
    """The schema of a result, as OpenAI's clients send it."""

    name: Unused = None
    description: Unused = None
    schema_: JsonObject | None = Field(default=None, alias="schema", description="By default, of any object.")
    strict: bool | None = Field(default=None, description="Accepted: results always have the schema.")

    def as_form(self) -> dict[str, Any]:
        """Returns the keywords of `fastgen.Grammar`."""
        return {"json_schema": ANY_OBJECT if self.schema_ is None else self.schema_}


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") is (self.json_schema is None):
            raise PydanticCustomError("schema", "is of type json_schema, and has one, or neither of both")
        return self

    @property
    def form(self) -> dict[str, Any] | None:
        """Keywords of `fastgen.Grammar`; None for no constraint."""
        return None if self.type == "text" else (self.json_schema or NamedSchema()).as_form()


class StructuredOutputs(Body):
    """The form of a result, as vLLM has it."""

    json_: Annotated[JsonObject | Text, described("is no JSON schema, as an object or text")] | None = Field(
        default=None, alias="json", description="A JSON schema."
    )
    regex: Text | None = Field(default=None, description="In the syntax of Rust's crate regex.")
    choice: Annotated[list[Text], Field(min_length=1, fail_fast=True)] | None = None
    grammar: Text | None = Field(default=None, description="In the syntax of Lark, or of llama.cpp (GBNF).")
    json_object: bool | None = None

    disable_fallback: Any = off(False, True)
    disable_any_whitespace: Any = off(False)
    disable_additional_properties: Any = off(False)
    whitespace_pattern: Any = off()
    structural_tag: Any = off()

    @model_validator(mode="after")
    def _is_one(self) -> StructuredOutputs:
        if len(self._given) != 1:
            raise PydanticCustomError("one_form", "has several forms, or none: give json, regex, choice or grammar")
        return self

    @property
    def _given(self) -> list[tuple[str, Any]]:
        given = {"json_schema": self.json_, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        found = [(kind, form) for kind, form in given.items() if form is not None]
        return [*found, *([("json_schema", ANY_OBJECT)] if self.json_object else [])]

    @property
    def form(self) -> dict[str, Any]:
        """Keywords of `fastgen.Grammar`."""
        return dict(self._given)
