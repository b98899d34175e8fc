"""The FastAPI application: the interfaces, the models, and the handling that all requests share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from types import ModuleType
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

import fastgen
from fastgen.pipeline.errors import one_line
from fastgen_serve.api import audio, libretranslate, openai, operations, page, responses, vllm
from fastgen_serve.api.schema import said
from fastgen_serve.cache import keep_responses
from fastgen_serve.errors import BadRequest, ServeError
from fastgen_serve.guard import Guard, Traffic
from fastgen_serve.models import Models
from fastgen_serve.settings import ServeSettings

# The order of lookup: the most requested paths first. OpenAI's interface shapes the error for an unknown path.
_INTERFACES: tuple[ModuleType, ...] = (openai, responses, audio, vllm, libretranslate, page, operations)


def create_app(
    settings: ServeSettings, models: Models | None = None, on_broken: Callable[[str], object] = lambda reason: None
) -> FastAPI:
    """Creates the application that serves models.

    Its `state` has `settings`, `models`, and `traffic`, which counts the requests in progress.

    Args:
        models: models that exist already; by default, each of `settings.models` in a process of its own, which
            starts and ends with the application.
        on_broken: called with the reason if such a model cannot be loaded.
    """
    if models is None:
        from fastgen_serve.workers.remote import RemoteModel

        models = Models([RemoteModel(name, settings, on_broken) for name, _ in settings.models])
    served = keep_responses(models, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await served.start()
        try:
            yield
        finally:
            await served.stop()

    app = FastAPI(title="fastgen-serve", version=fastgen.__version__, lifespan=lifespan)
    app.state.settings, app.state.models, app.state.traffic = settings, served, Traffic()
    for module in _INTERFACES:
        app.include_router(module.router)

    @app.exception_handler(ServeError)
    async def refuse(request: Request, error: ServeError) -> Response:
        return write_error(request.url.path, error)

    @app.exception_handler(RequestValidationError)
    async def refuse_values(request: Request, error: RequestValidationError) -> Response:
        return write_error(request.url.path, as_bad_request(error))

    @app.exception_handler(HTTPException)
    async def refuse_path(request: Request, error: HTTPException) -> Response:
        failure = ServeError(_why_not_parsed(error) or str(error.detail))
        failure.status, failure.code = error.status_code, "invalid_request"
        if error.status_code == 404:
            failure.message, failure.code = "there is no such path: /docs lists those that there are", "not_found"
        response = write_error(request.url.path, failure)
        response.headers.update(error.headers or {})
        return response

    app.add_middleware(
        Guard,
        settings=settings,
        path_of=path_of,
        needs_header=needs_header,
        most_bytes=partial(most_bytes, settings),
        write_error=write_error,
        traffic=app.state.traffic,
    )
    if settings.cors_origins:  # outermost, so that web pages can read the guard's refusals too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return app


def _found(path: str) -> tuple[ModuleType, str] | None:
    """Returns the interface that has this path, and the path as declared in its route."""
    for module in _INTERFACES:
        for route in module.router.routes:
            if route.path_regex.match(path):
                return module, route.path
    return None


def path_of(path: str) -> str | None:
    """Returns a path as its route declares it; None for an unknown path."""
    found = _found(path)
    return None if found is None else found[1]


def needs_header(path: str) -> bool:
    """Returns whether a request must have its API key in the header. Paths in the interface's `WITHOUT_HEADER` need
    none, nor do paths of no interface, such as the documentation.
    """
    found = _found(path)
    return found is not None and found[1] not in getattr(found[0], "WITHOUT_HEADER", ())


def most_bytes(settings: ServeSettings, path: str) -> int:
    """Returns the limit in bytes of a request's body: the interface's `most_bytes` if it has one, or the setting."""
    found = _found(path)
    own = None if found is None else getattr(found[0], "most_bytes", None)
    return settings.max_body_bytes if own is None else int(own(settings))


def write_error(path: str, error: ServeError) -> JSONResponse:
    """Returns the error in the shape of the interface that the path belongs to."""
    found = _found(path)
    response: JSONResponse = (openai if found is None else found[0]).write_error(error)
    if error.retry_after is not None:
        response.headers["Retry-After"] = str(error.retry_after)
    return response


def _why_not_parsed(error: HTTPException) -> str | None:
    """Why a body could not be parsed, where FastAPI says only that; None for other errors."""
    match error.__cause__:
        case UnicodeDecodeError():
            return "the body is not UTF-8"
        case RecursionError():
            return "the body is nested too deeply"
        case ValueError() as cause:  # a number of too many digits
            return f"the body cannot be read: {one_line(cause)}"
    return None


def as_bad_request(error: RequestValidationError) -> BadRequest:
    """Converts the first error of an invalid request, with the field that it is about."""
    first: Any = error.errors()[0]
    if first["type"] == "json_invalid":
        return BadRequest(f"the body is no JSON: {first['ctx']['error']}")
    where = [str(part) for part in first["loc"][1:]]
    if not where and first["type"] in ("model_attributes_type", "model_type"):  # plain text or a form, for example
        return BadRequest("the body: it is no JSON object, send one, with application/json as its content-type")
    param = ".".join(where) or None
    return BadRequest(f"{param or 'the body'}: {said(first).removeprefix('Value error, ')}", param=param)
