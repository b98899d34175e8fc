"""Tools that a model may call, and its calls, as OpenAI's interface has them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from fastgen_serve.api.schema import Body, Text

MOST_TOOLS = 128
ANY_OBJECT = {"type": "object"}
JsonObject = Annotated[dict[str, Any], Field(description="A JSON schema.")]
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
        """What Transformers' chat templates get."""
        own = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": "function", "function": {"parameters": {**ANY_OBJECT, "properties": {}}, **own}}


class ChosenName(Body):
    name: Text


class ChosenTool(Body):
    type: Literal["function"]
    function: ChosenName


def _check_arguments(text: str) -> str:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise PydanticCustomError("arguments", "is no JSON object")
    return text


Arguments = Annotated[Text, AfterValidator(_check_arguments), Field(description="A JSON object.")]


class CalledFunction(Body):
    name: Text
    arguments: Arguments


class ToolCall(Body):
    """A call in an earlier answer."""

    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction

    def as_template_reads(self) -> dict[str, Any]:
        arguments = json.loads(self.function.arguments or "{}")
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


def form_of_arguments(function: Function) -> dict[str, Any]:
    """The schema of the arguments of one function."""
    return ANY_OBJECT if function.parameters is None else function.parameters


def form_of_calls(functions: Sequence[Function], most: int | None) -> dict[str, Any]:
    """The schema of a list of calls of some functions, `most` at the most: each with its name and parameters."""
    shared: dict[str, Any] = {}
    calls = []
    for number, function in enumerate(functions):
        arguments = _moved(form_of_arguments(function), f"{number}.", shared)
        properties = {"name": {"const": function.name}, "parameters": arguments}
        calls.append(
            {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        )
    limit = {} if most is None else {"maxItems": most}
    return {"type": "array", "minItems": 1, "items": {"anyOf": calls}, **limit, "$defs": shared}


def _moved(schema: dict[str, Any], prefix: str, shared: dict[str, Any]) -> dict[str, Any]:
    """A schema as a part of another one, whose definitions `shared` gets, under other names."""

    def renamed(part: Any) -> Any:
        if isinstance(part, list):
            return [renamed(each) for each in part]
        if not isinstance(part, dict):
            return part
        found = {name: renamed(each) for name, each in part.items()}
        place = found.get("$ref")
        if isinstance(place, str) and place.startswith(("#/$defs/", "#/definitions/")):
            found["$ref"] = f"#/$defs/{prefix}{place.split('/', 2)[2]}"
        return found

    own = {name: each for name, each in schema.items() if name not in ("$defs", "definitions")}
    for name, each in {**(schema.get("definitions") or {}), **(schema.get("$defs") or {})}.items():
        shared[prefix + name] = renamed(each)
    moved: dict[str, Any] = renamed(own)
    return moved
