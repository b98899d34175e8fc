"""LibreTranslate's interface: translates texts and files.

A body is JSON or a form; without one, the query has the fields. The API key may be among them, as LibreTranslate's
clients send it, or in the header.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field, WithJsonSchema
from starlette.datastructures import ImmutableMultiDict, UploadFile

from fastgen_serve import keys
from fastgen_serve.api.schema import MULTIPART, Body, Text, Texts, error_responses, media_type, request_body, validated
from fastgen_serve.errors import BadRequest, ServeError, Unauthorized
from fastgen_serve.translation import files, languages, markup, sentences
from fastgen_serve.translation.detection import Detected
from fastgen_serve.translation.downloads import Downloads
from fastgen_serve.translation.sentences import Piece
from fastgen_serve.translation.translator import Translator

AUTO = "auto"
# Milliseconds after which LibreTranslate's page gives up, and its value for no limit.
_FRONTEND_TIMEOUT, _NO_LIMIT = 500, -1
# Characters of a file that language detection reads.
_SAMPLE = 4000
_FORM_FIELDS = 8


# ---- schemas


class TranslateRequest(Body):
    q: Texts = Field(description="Text, or texts, to translate.")
    source: Text = Field(description='Code of the language of the text, or "auto".')
    target: Text = Field(description="Code of the language to translate to.")
    format: Literal["text", "html", ""] | None = Field(
        "text", description='"html" keeps tags, and translates the text between two.'
    )
    alternatives: Annotated[int, Field(ge=0, strict=False)] = Field(0, description="Further translations of each text.")
    api_key: str | None = None


class DetectRequest(Body):
    q: Texts = Field(description="Text to detect the language of.")
    api_key: str | None = None


class FileRequest(Body):
    file: Annotated[
        Any, WithJsonSchema({"type": "string", "format": "binary", "description": ", ".join(files.FORMATS)})
    ]
    source: Text = Field(description='Code of the language of the file, or "auto".')
    target: Text = Field(description="Code of the language to translate to.")
    api_key: str | None = None


class Detection(BaseModel):
    confidence: float = Field(description="From 0 to 100.")
    language: str


class Translation(BaseModel):
    translatedText: str | list[str]
    detectedLanguage: Detection | list[Detection] | None = Field(None, description='Where the source is "auto".')
    alternatives: list[str] | list[list[str]] | None = Field(None, description="Where some were asked for.")


class Language(BaseModel):
    code: str
    name: str
    targets: list[str] = Field(description="Codes of the languages that it is translated to; none for a mere target.")


class TranslatedFile(BaseModel):
    translatedFileUrl: str


class CodeAndName(BaseModel):
    code: str
    name: str


class FrontendLanguages(BaseModel):
    source: CodeAndName
    target: CodeAndName


class FrontendSettings(BaseModel):
    apiKeys: bool
    charLimit: int
    filesTranslation: bool
    frontendTimeout: int
    keyRequired: bool
    language: FrontendLanguages
    suggestions: bool
    supportedFilesFormat: list[str]


class Refusal(BaseModel):
    error: str


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Finds out what the models translate, before the first request arrives."""
    await _translator(app)
    yield


router = APIRouter(
    tags=["LibreTranslate"],
    lifespan=_lifespan,
    responses=error_responses(
        Refusal,
        {400: "The request is refused: the message names the field.", 403: "There is no API key, or another one."},
    ),
)
# Either the key is in the body, or the content is public. A download's name is itself a secret.
WITHOUT_HEADER = frozenset(
    {
        "/translate",
        "/detect",
        "/translate_file",
        "/suggest",
        "/languages",
        "/frontend/settings",
        "/download_file/{name}",
    }
)


def write_error(error: ServeError) -> JSONResponse:
    """Returns LibreTranslate's error."""
    status = 403 if isinstance(error, Unauthorized) else error.status
    return JSONResponse({"error": error.message}, status)


_JSON, _FORM = "application/json", "application/x-www-form-urlencoded"


# ---- paths


@router.post(
    "/translate",
    response_model_exclude_none=True,
    openapi_extra=request_body(TranslateRequest, _JSON, _FORM, MULTIPART),
)
async def translate(request: Request) -> Translation:
    """Translates a text, or several."""
    body = await _read(request, TranslateRequest)
    settings, translator = request.app.state.settings, await _translator(request.app)
    texts = [body.q] if isinstance(body.q, str) else body.q
    if not any(texts):
        raise BadRequest("q: is empty, send a text", param="q")
    if len(texts) > settings.max_batch:
        raise BadRequest(f"q: {len(texts)} texts, this server takes {settings.max_batch} at the most", param="q")
    most = min(settings.max_beams, settings.slots) - 1
    if body.alternatives > most:
        raise BadRequest(f"alternatives: this server gives {most} at the most", param="alternatives")
    target = translator.target(body.target)
    detected = await _languages_of(translator, texts, body.source, target)
    form = markup if body.format == "html" else sentences
    pieces = await asyncio.to_thread(_cut, texts, form.cut)
    sources = [each.language for each in detected]
    versions = await translator.translate(pieces, sources, target, body.alternatives + 1)
    results = await asyncio.to_thread(lambda: [list(dict.fromkeys(map(form.join, each))) for each in versions])
    is_list, is_detected = isinstance(body.q, list), body.source == AUTO
    best, others, found = [each[0] for each in results], [each[1:] for each in results], list(map(_detection, detected))
    return Translation(
        translatedText=best if is_list else best[0],
        detectedLanguage=(found if is_list else found[0]) if is_detected else None,
        alternatives=(others if is_list else others[0]) if body.alternatives else None,
    )


@router.post("/detect", openapi_extra=request_body(DetectRequest, _JSON, _FORM, MULTIPART))
async def detect(request: Request) -> list[Detection]:
    """The likeliest languages of a text, best first, of those that are translated here."""
    body = await _read(request, DetectRequest)
    text = body.q if isinstance(body.q, str) else "\n".join(body.q)
    if not text:
        raise BadRequest("q: is empty, send a text", param="q")
    found = await asyncio.to_thread((await _translator(request.app)).detect, text)
    return [_detection(each) for each in found]


@router.get("/languages")
async def list_languages(request: Request) -> list[Language]:
    """The languages that are translated here, and to which. Of some there are translations only, and no targets."""
    found = (await _translator(request.app)).languages
    codes = {*found, *(target for targets in found.values() for target in targets)}
    return [
        Language(code=code, name=languages.name(code), targets=found.get(code, []))
        for code in sorted(codes, key=languages.name)
    ]


@router.post("/translate_file", openapi_extra=request_body(FileRequest, MULTIPART))
async def translate_file(request: Request) -> TranslatedFile:
    """Translates a file. The address of the result works for 20 minutes."""
    body, translator = await _read(request, FileRequest), await _translator(request.app)
    ending = _ending(body.file)
    upload = await body.file.read()
    target = translator.target(body.target)
    document = await asyncio.to_thread(files.read, upload, ending)
    sample = "\n".join(piece.text for piece in document.pieces if piece.is_sentence)[:_SAMPLE]
    (detected,) = await _languages_of(translator, [sample], body.source, target)
    ((best, *_),) = await translator.translate([document.pieces], [detected.language], target)
    name = _downloads(request).add(await asyncio.to_thread(document.write, best), ending)
    return TranslatedFile(translatedFileUrl=str(request.url_for("download_file", name=name)))


@router.get(
    "/download_file/{name}",
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": {}}}, 404: {"model": Refusal}},
)
async def download_file(name: str, request: Request) -> Response:
    """A file that was translated."""
    data = _downloads(request).get(name)
    if data is None:
        return JSONResponse(
            {"error": "there is no such file, or it has been here for too long: translate it again"}, 404
        )
    ending = os.path.splitext(name)[1]
    headers = {
        "Content-Disposition": f'attachment; filename="translation{ending}"',
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "private, no-store",
    }
    return Response(data, media_type=files.FORMATS[ending], headers=headers)


@router.get("/frontend/settings")
async def frontend_settings(request: Request) -> FrontendSettings:
    """What LibreTranslate's page would show."""
    found, has_keys = (await _translator(request.app)).languages, bool(request.app.state.settings.api_keys)
    target = next(iter(next(iter(found.values()), [])), "")
    return FrontendSettings(
        apiKeys=has_keys,
        charLimit=_NO_LIMIT,
        filesTranslation=True,
        frontendTimeout=_FRONTEND_TIMEOUT,
        keyRequired=has_keys,
        language=FrontendLanguages(
            source=CodeAndName(code=AUTO, name="Auto Detect"),
            target=CodeAndName(code=target, name=languages.name(target)),
        ),
        suggestions=False,
        supportedFilesFormat=list(files.FORMATS),
    )


@router.post("/suggest", status_code=403)
async def suggest() -> Refusal:
    """Suggestions for translations are not taken."""
    return Refusal(error="this server takes no suggestions")


# ---- internal

Read = TypeVar("Read", TranslateRequest, DetectRequest, FileRequest)


async def _read(request: Request, model: type[Read]) -> Read:
    """Reads a request's body, JSON or a form, or its query. Checks its API key before its fields.

    Raises:
        BadRequest: it is invalid.
        Unauthorized: its key is missing or wrong.
    """
    kind = media_type(request)
    if kind == _JSON:
        try:
            fields = await request.json()
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the body is no JSON: {error}") from error
        if not isinstance(fields, dict):
            raise BadRequest("the body is no JSON object")
    elif kind in (_FORM, MULTIPART):
        fields = await _form(request)
    elif not kind and request.query_params:  # for example `curl -X POST "http://.../translate?q=..."`
        fields = _by_name(request.query_params)
    else:
        raise BadRequest(f"the body is neither {_JSON} nor a form: name one as its content-type")
    return _checked(request, model, fields)


def _ending(file: Any) -> str:
    """Returns the extension of a file's name, if it is a known one. Raises BadRequest."""
    if not isinstance(file, UploadFile):
        raise BadRequest("file: is no file, send it as a part of multipart/form-data with a name", param="file")
    ending = os.path.splitext(file.filename or "")[1].lower()
    ending = ".html" if ending == ".htm" else ending
    if ending not in files.FORMATS:
        raise BadRequest(f"file: has none of the formats {', '.join(files.FORMATS)}", param="file")
    return ending


async def _form(request: Request) -> dict[str, Any]:
    """Returns the fields of a form; as a list if a field occurs more than once."""
    most = request.app.state.settings.max_body_bytes
    form = await request.form(
        max_files=1, max_fields=_FORM_FIELDS + request.app.state.settings.max_batch, max_part_size=most
    )
    return _by_name(form)


def _by_name(fields: ImmutableMultiDict[str, Any]) -> dict[str, Any]:
    values = {name: fields.getlist(name) for name in fields}
    return {name: each[0] if len(each) == 1 else each for name, each in values.items()}


def _checked(request: Request, model: type[Read], fields: dict[str, Any]) -> Read:
    key = fields.get("api_key")
    if not isinstance(key, str):
        key = keys.of_header(request.headers.get("authorization"))
    keys.check(key, request.app.state.settings.api_keys)
    return validated(model, fields, "the body")


async def _translator(app: FastAPI) -> Translator:
    """Returns the models that translate. Reads their files once, in a thread."""
    if not hasattr(app.state, "translator"):
        app.state.translator = await asyncio.to_thread(Translator, app.state.models, app.state.settings)
    return app.state.translator


def _downloads(request: Request) -> Downloads:
    state = request.app.state
    if not hasattr(state, "downloads"):
        state.downloads = Downloads()
    return state.downloads


async def _languages_of(translator: Translator, texts: Sequence[str], source: str, target: str) -> list[Detected]:
    """Returns the language of each text."""
    if source == AUTO:
        return await asyncio.to_thread(lambda: [translator.detect(text, target)[0] for text in texts])
    return [Detected(translator.source(source), 100.0)] * len(texts)


def _cut(texts: Sequence[str], cut: Callable[[str, int], list[Piece]]) -> list[list[Piece]]:
    """Cuts each text into pieces, which are limited in total. Raises BadRequest for more."""
    found, room = [], sentences.MOST_PIECES
    for text in texts:
        found.append(cut(text, room))
        room -= len(found[-1])
    return found


def _detection(detected: Detected) -> Detection:
    return Detection(confidence=detected.confidence, language=detected.language)
