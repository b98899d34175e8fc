"""The web page at `/`, and the state of models and queues that it shows."""

from __future__ import annotations

import asyncio
from importlib import resources
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from fastgen_serve.api.operations import write_error
from fastgen_serve.served import ServedModel
from fastgen_serve.translation import languages, pairs

__all__ = ["WITHOUT_HEADER", "router", "write_error"]

router = APIRouter(tags=["page"])
# By path, the file and its media type.
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
# The page itself asks for a key if the server needs one.
WITHOUT_HEADER = frozenset(_FILES)
# Allows only this server's scripts, styles and images, and no embedding in other pages.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Language(BaseModel):
    code: str = Field(description="The tokenizer's: `src_lang` and `tgt_lang` of a request take it.")
    name: str


class ModelState(BaseModel):
    name: str
    ready: bool
    kind: str = Field(description='"decoder-only", "encoder-decoder" or "encoder"; "" while it is loading.')
    generates: bool
    chats: bool = Field(description="It has a chat template.")
    languages: list[Language] = Field(description="Those that the model is told by tokens.")
    beams: int = Field(description="Beams of a request that says nothing.")
    new_tokens: int = Field(description="New tokens of a request that says nothing.")
    positions: int | None = Field(description="Tokens that an input may have.")
    slots: int
    busy: int = Field(description="Slots that are taken.")
    waiting: int = Field(description="Requests that wait for slots.")
    tokens: int = Field(description="New tokens since the model was loaded.")


class ServerState(BaseModel):
    models: list[ModelState]
    max_beams: int
    max_tokens: int


@router.get("/stats")
async def stats(request: Request) -> ServerState:
    """The models, and how many requests run and wait."""
    models, settings = list(request.app.state.models), request.app.state.settings
    counts = await asyncio.gather(*(model.stats() for model in models))
    return ServerState(
        models=[_state(model, counted) for model, counted in zip(models, counts, strict=True)],
        max_beams=min(settings.max_beams, settings.slots),
        max_tokens=settings.max_tokens,
    )


def _state(model: ServedModel, counts: dict[str, Any]) -> ModelState:
    info = model.info
    return ModelState(
        name=model.name,
        ready=model.is_ready,
        kind=info.kind,
        generates="generate" in info.tasks,
        chats=info.kind == "decoder-only" and bool(model.tokenizer.chat_template),
        languages=_languages(model.tokenizer),
        beams=int(info.defaults.get("num_beams") or 1),
        new_tokens=info.max_new_tokens,
        positions=info.positions,
        slots=info.slots,
        busy=int(counts.get("busy") or 0),
        waiting=int(counts.get("waiting") or 0),
        tokens=int(counts.get("tokens") or 0),
    )


def _languages(tokenizer: Any) -> list[Language]:
    known = languages.shortest(pairs.language_tokens(tokenizer))
    return sorted(
        (Language(code=own, name=languages.name(code)) for code, own in known.items()), key=lambda it: it.name
    )


def _serve(path: str, name: str, media_type: str) -> None:
    """Serves a file of the page at this path."""

    def send() -> Response:
        data = resources.files("fastgen_serve").joinpath("page").joinpath(name).read_bytes()
        return Response(data, media_type=media_type, headers=_HEADERS)

    router.add_api_route(path, send, include_in_schema=False)


for _path, _file in _FILES.items():
    _serve(_path, *_file)
