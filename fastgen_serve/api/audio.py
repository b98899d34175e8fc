"""OpenAI's interface for recordings: transcription, and translation to English."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse
from starlette.datastructures import UploadFile

from fastgen.pipeline.errors import one_line
from fastgen_serve import audio
from fastgen_serve.api import openai, prompts
from fastgen_serve.api.audio_schema import (
    AudioUsage,
    SpeechRequest,
    Transcription,
    TranscriptionSegment,
    VerboseTranscription,
)
from fastgen_serve.api.schema import MULTIPART, media_type, request_body, validated
from fastgen_serve.errors import BadRequest, Busy, ModelNotFound, TooLarge, Unavailable
from fastgen_serve.jobs import Speech, Transcribe, Transcribed
from fastgen_serve.limits import Held
from fastgen_serve.served import ServedModel
from fastgen_serve.settings import ServeSettings

router = APIRouter(tags=["OpenAI"], responses=openai.ERRORS)
write_error = openai.write_error
# Limits of a form: the number of fields, the bytes of each, and the bytes around the file.
_MOST_FIELDS, _LONGEST_FIELD, _AROUND_FILE = 64, 2**15, 2**16
# Limits the bytes of all uploads in progress.
_MOST_UPLOADED = 2**30
# Longest recording, in seconds, for a model that reads it all at once.
_LONGEST_WITHOUT_WINDOWS = 60.0
# As in OpenAI's code: a window that fails a threshold is decoded again at a temperature that is higher by this.
_WARMER, _HOTTEST = 0.2, 1.0
_LEAST_TEMPERATURE = 1e-5
_BODY: dict[str, Any] = {
    "response_model": Transcription | VerboseTranscription,
    "responses": {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    "openapi_extra": request_body(SpeechRequest, MULTIPART),
}


def most_bytes(settings: ServeSettings) -> int:
    """Returns the limit in bytes of a request's body."""
    return settings.max_audio_bytes + _AROUND_FILE


@router.post("/v1/audio/transcriptions", **_BODY)
async def transcribe(request: Request) -> Any:
    """What a recording says."""
    return await _answer(request, "transcribe")


@router.post("/v1/audio/translations", **_BODY)
async def translate(request: Request) -> Any:
    """What a recording says, in English."""
    return await _answer(request, "translate")


async def _answer(request: Request, task: str) -> Any:
    model, body, job = await _asked(request, task)
    made = await model.transcribe(job)
    return await prompts.in_turn(model, len(made.tokens), lambda: _written(model, body, task, job, made))


async def _asked(request: Request, task: str) -> tuple[ServedModel, SpeechRequest, Transcribe]:
    """Returns the model of a request, its fields, and its job. The file has been released when this returns."""
    _check_room(request)
    settings: ServeSettings = request.app.state.settings
    with _uploads(request).hold(_length(request, settings)):
        body, data = await _read(request)
        model = openai.served_model(request, body.model, "transcribe")
        options = _options(model, body, task)
        prompt = await _prompt(model, body.prompt)
        with model.reserve(1):
            job = await audio.in_turn(lambda: _job(model, body, data, settings, options, prompt))
            return model, body, job


# ---- reading requests


def _check_room(request: Request) -> None:
    """Raises the error with which all models that transcribe would refuse a request, before its body is read."""
    refusal: Exception = ModelNotFound("no model that is served transcribes", param="model")
    for model in request.app.state.models:
        if model.feature_extractor is None:
            continue
        try:
            with model.reserve(1):
                return
        except (Busy, Unavailable) as error:
            refusal = error
    raise refusal


def _uploads(request: Request) -> Held:
    """Returns the counter of bytes of uploads in progress."""
    state = request.app.state
    if not hasattr(state, "uploads"):
        state.uploads = Held(_MOST_UPLOADED, "uploads")
    held: Held = state.uploads
    return held


def _length(request: Request, settings: ServeSettings) -> int:
    """Returns the most bytes that a body may have."""
    declared = request.headers.get("content-length", "")
    return int(declared) if declared.isdecimal() else most_bytes(settings)


async def _read(request: Request) -> tuple[SpeechRequest, bytes]:
    """Returns the fields of a form, and its file. Raises BadRequest, or TooLarge."""
    kind = media_type(request)
    if kind != MULTIPART:
        raise BadRequest(f"the body is no form with a file: send it as {MULTIPART}")
    most = request.app.state.settings.max_audio_bytes
    async with request.form(max_files=1, max_fields=_MOST_FIELDS, max_part_size=_LONGEST_FIELD) as form:
        fields: dict[str, list[Any]] = {}
        for name, value in form.multi_items():
            if value != "":  # some clients send "" for a missing value
                fields.setdefault(name.removesuffix("[]"), []).append(value)
        body = _checked({name: each[0] if len(each) == 1 else each for name, each in fields.items()})
        if body.file.size > most:
            raise TooLarge(f"the file has more than {most} bytes: send less, or in parts", param="file")
        return body, await body.file.read()


def _checked(fields: Mapping[str, Any]) -> SpeechRequest:
    body = validated(SpeechRequest, fields, "the form")
    if not isinstance(body.file, UploadFile):
        raise BadRequest("file: is no file, send it as a part of the form with a name", param="file")
    return body


# ---- making jobs


def _options(model: ServedModel, body: SpeechRequest, task: str) -> dict[str, Any]:
    """Returns keywords of `generate`. Raises BadRequest for what the model cannot do."""
    speech = _speech(model)
    if task == "translate" and not speech.translates:
        raise BadRequest(f"model {model.name} does not translate: ask another one", param="model")
    if body.needs_segments and not speech.has_windows:
        raise BadRequest(
            f"model {model.name} does not say when what is spoken: ask for json or text", param="response_format"
        )
    options: dict[str, Any] = {"task": task} if speech.translates else {}
    if body.language is not None and not speech.is_english:  # an English-only model treats all speech as English
        options["language"] = _language(model, body.language)
    return options | _temperatures(model, body)


def _speech(model: ServedModel) -> Speech:
    assert model.info.speech is not None, "the model transcribes"
    return model.info.speech


def _language(model: ServedModel, given: str) -> str:
    """Returns the code of a language to set. Raises BadRequest for one that the model does not know."""
    known = _speech(model).languages
    if not known:
        raise BadRequest(f"model {model.name} is told no language: leave it out", param="language")
    code = _codes().get(given.strip().lower(), given.strip().lower())
    if code not in known:
        raise BadRequest(f"language is none of {model.name}: it has {', '.join(sorted(known))}", param="language")
    return code


def _codes() -> Mapping[str, str]:
    """Returns the codes of languages by their English names."""
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    codes: Mapping[str, str] = TO_LANGUAGE_CODE
    return codes


def _temperatures(model: ServedModel, body: SpeechRequest) -> dict[str, Any]:
    temperature = body.temperature or 0.0
    temperature = 0.0 if temperature < _LEAST_TEMPERATURE else temperature
    if body.thresholds:
        if not _speech(model).has_windows:
            raise BadRequest(f"model {model.name} has no thresholds: leave them out", param=next(iter(body.thresholds)))
        count = math.floor((_HOTTEST - temperature) / _WARMER + 1e-6) + 1
        return {"temperature": tuple(temperature + _WARMER * number for number in range(count)), **body.thresholds}
    if not temperature:
        return {}
    if _speech(model).has_windows:
        return {"temperature": temperature}
    return {"do_sample": True, "num_beams": 1, "temperature": temperature}


async def _prompt(model: ServedModel, text: str | None) -> tuple[int, ...]:
    """Returns the last tokens of a preceding text, as many as the model reads. Raises BadRequest."""
    if text is None:
        return ()
    most = _speech(model).prompt
    if not most or not hasattr(model.tokenizer, "get_prompt_ids"):
        raise BadRequest(f"model {model.name} reads no prompts: leave it out", param="prompt")
    try:
        tokens = await prompts.in_turn(model, len(text), lambda: model.tokenizer.get_prompt_ids(text).tolist())
    except ValueError as error:
        raise BadRequest(one_line(error), param="prompt") from error
    return (tokens[0], *tokens[1:][-most:])


def _job(
    model: ServedModel,
    body: SpeechRequest,
    data: bytes,
    settings: ServeSettings,
    options: Mapping[str, Any],
    prompt: tuple[int, ...],
) -> Transcribe:
    """Returns the job of a recording. Raises BadRequest as `audio.decoded`."""
    extractor, has_windows = model.feature_extractor, _speech(model).has_windows
    rate = extractor.sampling_rate
    # A window of Whisper; other models read all at once, which takes memory quadratic in its length.
    window = getattr(extractor, "n_samples", _LONGEST_WITHOUT_WINDOWS * rate)
    longest = settings.max_audio_seconds
    samples = audio.decoded(data, rate, longest if has_windows else min(longest, window / rate))
    is_long = has_windows and len(samples) > window
    inputs = extractor(
        samples,
        sampling_rate=rate,
        return_tensors="np",
        return_attention_mask=True,
        **({"truncation": False, "padding": "longest"} if is_long else {}),
    )
    draws = "temperature" in options
    return Transcribe(
        inputs=dict(inputs),
        seconds=len(samples) / rate,
        options={**options, "return_timestamps": True} if is_long else options,
        tokens=prompt,
        seed=body.seed if draws else None,
        segments=body.needs_segments,
    )


# ---- writing answers


def _written(model: ServedModel, body: SpeechRequest, task: str, job: Transcribe, made: Transcribed) -> Any:
    """Returns the answer to a request."""

    def text_of(tokens: Sequence[int]) -> str:
        return str(model.tokenizer.decode(list(tokens), skip_special_tokens=True))

    text, usage = text_of(made.tokens).strip(), AudioUsage(type="duration", seconds=math.ceil(job.seconds))
    if body.response_format == "json":
        return Transcription(text=text, usage=usage)
    if body.response_format == "text":
        return PlainTextResponse(text + "\n")
    segments = [
        TranscriptionSegment(
            id=number,
            # Times may exceed the recording, because the last window is padded with silence.
            start=round(min(each.start, job.seconds), 3),
            end=round(min(each.end, job.seconds), 3),
            text=text_of(each.tokens),
            tokens=list(each.tokens),
        )
        for number, each in enumerate(made.segments)
    ]
    if body.response_format != "verbose_json":
        return PlainTextResponse(_SUBTITLES[body.response_format](segments))
    return VerboseTranscription(
        task=task,  # type: ignore[arg-type]
        language="english" if task == "translate" else _language_name(model, made.language),
        duration=round(job.seconds, 3),
        text=text,
        segments=segments,
        usage=usage,
    )


def _language_name(model: ServedModel, code: str | None) -> str:
    """Returns OpenAI's name of a language: the English one."""
    if code is None:
        return "english" if _speech(model).is_english else "unknown"
    return next((name for name, each in _codes().items() if each == code), code)


def srt(segments: Sequence[TranscriptionSegment]) -> str:
    """Returns the segments in SubRip format."""
    return "".join(f"{number}\n{cue}\n" for number, cue in enumerate(_cues(segments, ","), 1))


def vtt(segments: Sequence[TranscriptionSegment]) -> str:
    """Returns the segments in WebVTT format."""
    return "WEBVTT\n\n" + "".join(f"{cue}\n" for cue in _cues(segments, "."))


_SUBTITLES: dict[str, Callable[[Sequence[TranscriptionSegment]], str]] = {"srt": srt, "vtt": vtt}


def _cues(segments: Sequence[TranscriptionSegment], point: str) -> list[str]:
    """Returns the times and the text of each non-empty segment. Joins its lines and removes arrows, which end a cue."""
    texts = [" ".join(each.text.split()).replace("-->", "->") for each in segments]
    return [
        f"{_time(each.start, point)} --> {_time(each.end, point)}\n{text}\n"
        for each, text in zip(segments, texts, strict=True)
        if text
    ]


def _time(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest // 1000:02d}{point}{rest % 1000:03d}"
