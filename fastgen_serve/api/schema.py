"""Building blocks of request bodies, for all JSON interfaces."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from fastapi import Request
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from fastgen_serve.errors import BadRequest

Model = TypeVar("Model", bound=BaseModel)


def _more_is_null(schema: dict[str, Any]) -> None:
    schema["additionalProperties"] = {"type": "null"}


class Body(BaseModel):
    """A JSON object of a request. Unknown fields, and values of another type, are refused.

    Unknown fields may be null, because some clients send all fields that they know. 5.0 is the integer 5, as in JSON.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, json_schema_extra=_more_is_null)

    @model_validator(mode="before")
    @classmethod
    def _as_sent(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        names = {field.alias or name for name, field in cls.model_fields.items()}
        known = {name: value for name, value in fields.items() if name in names}
        # One unknown field is enough for an error: validating thousands would take as long as a request.
        wrong = next((name for name, value in fields.items() if value is not None and name not in known), None)
        known |= {} if wrong is None else {wrong: fields[wrong]}
        return {
            name: int(value) if isinstance(value, float) and value.is_integer() else value
            for name, value in known.items()
        }

    @field_validator("*", mode="before")
    @classmethod
    def _asks_for_nothing(cls, value: Any, info: ValidationInfo) -> Any:
        schema = cls.model_fields[str(info.field_name)].json_schema_extra
        accepted = schema.get("enum") if isinstance(schema, dict) else None
        if isinstance(accepted, list) and not any(_equals(value, each) for each in accepted):
            raise PydanticCustomError("unsupported", "is not supported: leave it out")
        return value


def said(error: ErrorDetails) -> str:
    """Returns what is wrong with a field, for the client."""
    return "is not known here: leave it out" if error["type"] == "extra_forbidden" else error["msg"]


def validated(model: type[Model], fields: Mapping[str, Any], whole: str) -> Model:
    """Validates a body of these fields. Raises BadRequest for the first invalid one, or for `whole` itself."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        name = str(first["loc"][0]) if first["loc"] else None  # None for an error of the whole body
        raise BadRequest(f"{name or whole}: {said(first)}", param=name) from error


def media_type(request: Request) -> str:
    """Returns the media type of a request's body."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _equals(value: Any, other: Any) -> bool:
    """Compares as JSON does, where false is not 0."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def off(*values: Any) -> Any:
    """Declares an unsupported field: null, and these values, which ask for nothing, are accepted."""
    return Field(None, description="Not supported.", json_schema_extra={"enum": [*values, None]})


def unused() -> Any:
    """Declares a field whose value is accepted and ignored."""
    return Field(description="Accepted, and not used.")


def at_most(count: int) -> Any:
    """Limits an object's fields. A larger object is not validated, because each invalid field adds an error."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise PydanticCustomError(
                "many", "has {size} fields: give {count} at the most", {"size": len(value), "count": count}
            )
        return value

    return BeforeValidator(check)


def encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("text", "has half of a surrogate pair: send characters") from None
    return text


_DEEPEST = 100  # levels of JSON: fewer than llguidance reads, and than pickle, jinja and others can process


def plain(value: Any) -> Any:
    """Checks arbitrary JSON that is passed on: it can be traversed, sent to a worker, and written."""
    level, depth = [value], 0
    while level:
        level = [each for part in level for each in (part.values() if isinstance(part, dict) else part)]
        level, depth = [each for each in level if isinstance(each, (dict, list))], depth + 1
        if depth > _DEEPEST:
            raise PydanticCustomError("deep", f"has more than {_DEEPEST} levels")
    encodable(json.dumps(value, ensure_ascii=False, allow_nan=False))
    return value


def described(message: str) -> Any:
    """Gives a field of several types a single error message, in place of one for each type."""

    def check(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(value)
        except ValidationError as error:
            own = [each for each in error.errors() if each["type"] in ("text", "deep")]
            raise PydanticCustomError("one_of", "{what}", {"what": own[0]["msg"] if own else message}) from None

    return WrapValidator(check)


Text = Annotated[str, AfterValidator(encodable)]
Unused = Annotated[Text | None, unused()]
ModelName = Annotated[str | None, Field(description="Name of a model that is served; the first one without it.")]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
# Validation of a list stops at the first invalid element: errors for all could take minutes.
Texts = Text | Annotated[list[Text], Field(min_length=1, fail_fast=True)]
# A text, or token ids, or a list of either.
Inputs = Annotated[
    Texts
    | Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
    | Annotated[
        list[Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]], Field(min_length=1, fail_fast=True)
    ],
    described("is no text, no list of texts, no list of token ids and no list of such lists"),
]


MULTIPART = "multipart/form-data"


def request_body(model: type[BaseModel], *types: str) -> dict[str, Any]:
    """Returns the documentation of a body that FastAPI does not parse itself, for each of these media types."""
    schema = {"schema": model.model_json_schema()}
    return {"requestBody": {"required": True, "content": dict.fromkeys(types, schema)}}


# The errors that every interface may answer with.
_FAILURES: dict[int | str, str] = {
    413: "The body is too large.",
    429: "Too many requests wait: try again.",
    500: "The request has failed.",
    503: "The model is not ready.",
    504: "The request took too long.",
}


def error_responses(model: type[BaseModel], own: dict[int | str, str]) -> dict[int | str, dict[str, Any]]:
    """Returns the errors of an interface for its documentation: their schema, and their meaning by status."""
    return {status: {"model": model, "description": text} for status, text in {**own, **_FAILURES}.items()}


def as_list(inputs: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """Returns the inputs as a list: each a text, or token ids."""
    if isinstance(inputs, str):
        return [inputs]
    if isinstance(inputs[0], int):
        return [inputs]
    return list(inputs)
