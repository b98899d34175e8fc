"""Tools that a model may call, and its calls, in OpenAI's schema."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from fastgen_serve.api.schema import Body, Text, plain

MOST_TOOLS = 128
ANY_OBJECT = {"type": "object"}
JsonObject = Annotated[dict[str, Any], AfterValidator(plain), Field(description="A JSON schema.")]
Name = Annotated[Text, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(Body):
    name: Name
    description: Text | None = None
    parameters: JsonObject | None = Field(default=None, description="By default, any object.")
    strict: bool | None = Field(default=None, description="Accepted: arguments of calls that must be have the schema.")


class Tool(Body):
    type: Literal["function"]
    function: Function

    def as_template_reads(self) -> dict[str, Any]:
        """Returns the tool as Transformers' chat templates read it."""
        own = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": "function", "function": {"parameters": {**ANY_OBJECT, "properties": {}}, **own}}


class ChosenName(Body):
    name: Text


class ChosenTool(Body):
    type: Literal["function"]
    function: ChosenName


def _check_arguments(text: str) -> str:
    """Returns arguments that a template can read: some models write none for a function without parameters."""
    try:
        found = json.loads(text.strip() or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise PydanticCustomError("arguments", "is no JSON object")
    plain(found)
    return text.strip() or "{}"


Arguments = Annotated[Text, AfterValidator(_check_arguments), Field(description="A JSON object.")]


class CalledFunction(Body):
    name: Text
    arguments: Arguments
    parsed_arguments: Any = Field(default=None, description="Accepted, and not used: OpenAI's client has it.")


class ToolCall(Body):
    """A call in an earlier answer."""

    id: Text
    index: int | None = Field(default=None, description="Accepted, and not used: calls of streams have it.")
    type: Literal["function"] = "function"
    function: CalledFunction

    def as_template_reads(self) -> dict[str, Any]:
        arguments = json.loads(self.function.arguments)
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


def form_of_arguments(function: Function) -> dict[str, Any]:
    """Returns the schema of a function's arguments, which must be an object."""
    return {**(function.parameters or {}), **ANY_OBJECT}


def form_of_calls(functions: Sequence[Function], most: int | None) -> dict[str, Any]:
    """Returns the schema of a list of at most `most` calls of some functions, each with its name and parameters."""
    calls, shared = [], {}
    for number, function in enumerate(functions):
        place = f"#/$defs/{number}"
        shared[str(number)] = _moved(form_of_arguments(function), place)
        properties = {"name": {"const": function.name}, "parameters": {"$ref": place}}
        calls.append(
            {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        )
    limit = {} if most is None else {"maxItems": most}
    return {"type": "array", "minItems": 1, "items": {"anyOf": calls}, **limit, "$defs": shared}


def _moved(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """Rewrites the schema's references to its own parts for its place in another schema."""

    def moved(part: Any) -> Any:
        if isinstance(part, list):
            return [moved(each) for each in part]
        if not isinstance(part, dict):
            return part
        found = {name: moved(each) for name, each in part.items()}
        own = found.get("$ref")
        if isinstance(own, str) and (own == "#" or own.startswith("#/")):
            found["$ref"] = place + own[1:]
        return found

    # References would be relative to an `$id`.
    whole: dict[str, Any] = moved({name: each for name, each in schema.items() if name != "$id"})
    return whole
