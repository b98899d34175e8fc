"""OpenAI's interface: models, completions, chat completions and embeddings."""

from __future__ import annotations

import base64
import logging
import math
import struct
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from fastgen import releases
from fastgen_serve.api import openai_answers as answers
from fastgen_serve.api import prompts, tools
from fastgen_serve.api.messages_schema import Message
from fastgen_serve.api.openai_choices import Choices, Piece, Writer
from fastgen_serve.api.openai_decoding import Decoding, decoding, make_job, named_by
from fastgen_serve.api.openai_schema import (
    ChatRequest,
    CompletionRequest,
    Conversation,
    Cutting,
    EmbeddingRequest,
    Generation,
)
from fastgen_serve.api.schema import as_list, error_responses
from fastgen_serve.concurrency import ClosedStream
from fastgen_serve.errors import BadRequest, Failed, ServeError, Unavailable
from fastgen_serve.jobs import Delta, Encode, Generate, Generated
from fastgen_serve.limits import bounded
from fastgen_serve.served import ServedModel
from fastgen_serve.text import TextStream

# Default of new tokens for a completion.
_COMPLETION_TOKENS = 16
_log = logging.getLogger("fastgen_serve")
_STARTED = int(time.time())
ERRORS = error_responses(
    answers.ErrorAnswer,
    {
        400: "The request is refused: `param` names the field.",
        401: "There is no API key, or another one.",
        404: "No such model is served.",
        "4XX": "Another mistake of the client, such as a method that the path does not have.",
    },
)
STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "The answer, or its chunks."}
}

router = APIRouter(tags=["OpenAI"], responses=ERRORS)


def write_error(error: ServeError) -> JSONResponse:
    """Returns OpenAI's error object."""
    return JSONResponse(_error_object(error).model_dump(), error.status)


def _error_object(error: ServeError) -> answers.ErrorAnswer:
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(error.status, kind)
    made = answers.ErrorObject(message=error.message, type=kind, param=error.param, code=error.code)
    return answers.ErrorAnswer(error=made)


def served_model(request: Request, name: str | None, *tasks: str) -> ServedModel:
    """Returns the model of a request.

    Args:
        name: of the model; the first one for None or "".
        tasks: the model must support one of these.

    Raises:
        ModelNotFound: no model has this name.
        Unavailable: it is not ready.
        BadRequest: it supports other tasks only.
    """
    model: ServedModel = request.app.state.models.get(name or None)
    if not model.is_ready:
        raise Unavailable(f"model {model.name} is not ready: try again", retry_after=5)
    if tasks and not set(tasks) & set(model.info.tasks):
        raise BadRequest(f"model {model.name} is one for {', '.join(model.info.tasks)}: ask another one", param="model")
    return model


def check_batch(request: Request, inputs: Sequence[Any], param: str) -> None:
    """Raises BadRequest if a request has more inputs than the server accepts."""
    most = request.app.state.settings.max_batch
    if len(inputs) > most:
        raise BadRequest(f"{param} has {len(inputs)} inputs: this server takes {most} at the most", param=param)


# ---- models


@router.get("/v1/models")
@router.get("/v1/models/", include_in_schema=False)
async def list_models(request: Request) -> answers.ModelList:
    """The models that are served."""
    return answers.ModelList(object="list", data=[_card(model) for model in request.app.state.models])


@router.get("/v1/models/{name:path}")
async def get_model(name: str, request: Request) -> answers.ModelCard:
    """A model that is served."""
    return _card(request.app.state.models.get(name))


def _card(model: ServedModel) -> answers.ModelCard:
    positions = model.info.positions if model.is_ready else None
    return answers.ModelCard(
        id=model.name, object="model", created=_STARTED, owned_by="fastgen-serve", max_model_len=positions
    )


# ---- completions and chat completions


@dataclass(frozen=True)
class Run:
    """A request to generate, with one job per input."""

    id: str
    created: int
    model: ServedModel
    body: Generation
    prompts: list[tuple[int, ...]]
    """The tokens of each input."""
    decoding: Decoding
    jobs: list[Generate]
    choices: Choices

    @cached_property
    def writer(self) -> Writer:
        return Writer(self.model.tokenizer, self.body)

    @property
    def head(self) -> dict[str, Any]:
        """The first fields of each answer and chunk."""
        return {"id": self.id, "created": self.created, "model": self.model.name}

    def usage(self, generated: int) -> answers.Usage:
        return _usage(sum(map(len, self.prompts)), generated)

    def usage_until(self, piece: Piece, generated: int) -> dict[str, answers.Usage]:
        """Returns the usage of a piece's choice as a field of its chunk, if the request wants it in each chunk."""
        if not self.body.sends_usage_always:
            return {}
        return {"usage": _usage(len(self.prompts[piece.index // self.decoding.results]), generated)}

    async def whole(self) -> tuple[list[Piece], answers.Usage]:
        """Returns the choices, each in one piece."""
        with named_by(self.body):
            results = await self.model.generate_all(self.jobs)
        pieces = [
            piece
            for index, result in enumerate(results)
            for piece in self.choices.pieces(index * self.decoding.results, self.decoding.best(result))
        ]
        for piece in pieces:
            piece.prompt = results[piece.index // self.decoding.results].prompt_logprobs
        return pieces, self.usage(sum(each.generated for result in results for each in result.sequences))

    async def stream(self) -> AsyncGenerator[Piece | answers.Usage, None]:
        """Yields the pieces of the choices, and finally the usage."""
        generated = 0
        with named_by(self.body):
            async with aclosing(self.model.stream_all(self.jobs)) as events:
                async for index, event in events:
                    if isinstance(event, Generated):
                        generated += sum(each.generated for each in event.sequences)
                    new = event if isinstance(event, Delta) else self.decoding.best(event)
                    for piece in self.choices.pieces(index * self.decoding.results, new):
                        yield piece
        yield self.usage(generated)


def _usage(prompt: int, generated: int) -> answers.Usage:
    return answers.Usage(prompt_tokens=prompt, completion_tokens=generated, total_tokens=prompt + generated)


def _decoding(model: ServedModel, body: Generation) -> Decoding:
    """Returns how to decode the inputs of a request. Raises BadRequest as `decoding`, and for unknown token ids."""
    how = decoding(body, model.info)
    prompts.check_ids(model, body.stop_token_ids or (), "stop_token_ids")
    prompts.check_ids(model, [int(token) for token in body.logit_bias or ()], "logit_bias")
    if body.tgt_lang is None:
        return how
    token = prompts.language_token(model, body.tgt_lang, "tgt_lang")
    return replace(how, options={**how.options, "forced_bos_token_id": token})


def _make_run(
    request: Request,
    model: ServedModel,
    body: Generation,
    how: Decoding,
    inputs: list[tuple[int, ...]],
    limits: list[int | None],
    more: Mapping[str, Any] | None = None,
    answer: Callable[[], tools.Answer] | None = None,
) -> Run:
    jobs = [make_job(how, body, tokens, limit, more) for tokens, limit in zip(inputs, limits, strict=True)]
    with named_by(body):  # before anything is allocated per result: the request may ask for any number
        jobs = [bounded(job, model.info, request.app.state.settings) for job in jobs]
    # A decoder-only model continues its prompt; an answer, or a target, starts a new text.
    goes_on = isinstance(body, CompletionRequest) and model.info.kind == "decoder-only"
    texts = [
        TextStream(
            model.tokenizer,
            body.skip_special_tokens and answer is None,  # special tokens may mark calls
            body.stops,
            body.include_stop_str_in_output,
            tokens if goes_on else (),
        )
        for tokens in inputs
        for _ in range(how.results)
    ]
    name = f"{body.prefix}{uuid.uuid4().hex}"
    return Run(name, int(time.time()), model, body, inputs, how, jobs, Choices(model.tokenizer, texts, answer))


def _new_tokens(model: ServedModel, body: Generation, prompt: int, most: int, param: str) -> int | None:
    """Returns the limit of new tokens after a prompt; None to use the model's generation config.

    Raises:
        BadRequest: they do not fit, or are fewer than `min_tokens`.
    """
    limit, positions = body.limit, model.info.positions
    if model.info.kind == "encoder-decoder":
        prompts.check_length(model, prompt, 0, param)
    else:
        if limit is None:
            wanted = _COMPLETION_TOKENS if param == "prompt" else model.info.defaults.get("max_new_tokens") or most
            limit = max(min(wanted, most, most if positions is None else positions - prompt), 1)
        prompts.check_length(model, prompt, max(limit, 1), param)
    if limit is not None and (body.min_tokens or 0) > limit:
        raise BadRequest(f"min_tokens is {body.min_tokens}, max_tokens {limit}: give fewer", param="min_tokens")
    return limit


async def conversation_run(body: Conversation, messages: Sequence[Message], request: Request, param: str) -> Run:
    """Makes the run of a conversation. Its only input is the output of the model's chat template.

    Args:
        param: field of the request that has the messages.

    Raises:
        BadRequest: the model refuses it, or this release of Transformers would mix up its images.
    """
    model, settings = served_model(request, body.model, "generate"), request.app.state.settings
    given, how = prompts.Chat.of(model, messages, settings), _decoding(model, body)
    rows = max(how.candidates, how.beams)
    if rows > 1 and len(given.images) > 1 and not releases.repeats_images_together():
        raise BadRequest("n, num_beams: this server's Transformers makes one sequence for several images", param="n")
    with model.reserve(rows) if given.images else nullcontext():
        inputs = prompts.chat_inputs(model, given, body, body, body.limit or 1, language=body.src_lang)
        tokens, more = await inputs
    limit = _new_tokens(model, body, len(tokens), settings.max_tokens, param)
    answer = tools.answer_of(model.tokenizer, body, tokens)
    run = _make_run(request, model, body, how, [tokens], [limit], more, answer)
    return replace(run, jobs=[tools.with_calls(model.tokenizer, body, job) for job in run.jobs])


@router.post("/v1/completions", response_model=answers.Completion, response_model_exclude_unset=True, responses=STREAM)
async def complete(body: CompletionRequest, request: Request) -> Any:
    """What comes behind a prompt; of an encoder-decoder model, the target of a source."""
    model, most = served_model(request, body.model, "generate"), request.app.state.settings.max_tokens
    given = as_list(body.prompt)
    check_batch(request, given, "prompt")

    if body.echo and model.info.kind == "encoder-decoder":
        raise BadRequest("echo: the target of this model is not behind its source, leave it out", param="echo")
    how, room = _decoding(model, body), _COMPLETION_TOKENS if body.limit is None else max(body.limit, 1)

    def tokenise() -> list[tuple[int, ...]]:
        return [prompts.tokens_of(model, each, body, "prompt", room) for each in given]

    inputs = await prompts.in_turn(model, sum(map(len, given)), tokenise, body.src_lang)
    limits = [_new_tokens(model, body, len(each), most, "prompt") for each in inputs]
    run = _make_run(request, model, body, how, inputs, limits)

    def written(pieces: Sequence[Piece], **more: Any) -> answers.Completion:
        choices = []
        for piece in pieces:
            number = piece.index // run.decoding.results
            begins = body.echo and piece.is_first
            echoed = prompts.text_of(model, given[number], inputs[number], body) if begins else ""
            choices.append(run.writer.completion(piece, inputs[number], echoed))
        return answers.Completion(object="text_completion", choices=choices, **run.head, **more)

    def chunks(piece: Piece) -> list[BaseModel]:
        return [written([piece], **run.usage_until(piece, piece.generated))]

    if body.stream:
        return await _chunked(run, chunks, written([]))
    pieces, usage = await run.whole()
    answer = written(pieces)
    answer.usage = usage
    return answer


@router.post(
    "/v1/chat/completions", response_model=answers.ChatCompletion, response_model_exclude_unset=True, responses=STREAM
)
async def chat(body: ChatRequest, request: Request) -> Any:
    """The answer to a conversation."""
    run = await conversation_run(body, body.messages, request, "messages")
    prompt: dict[str, Any] = {"prompt_token_ids": list(run.prompts[0])} if body.return_token_ids else {}

    def chunk(choices: list[answers.ChunkChoice], **more: Any) -> answers.ChatCompletionChunk:
        return answers.ChatCompletionChunk(object="chat.completion.chunk", choices=choices, **run.head, **more)

    def chunks(piece: Piece) -> list[BaseModel]:
        said = chunk([run.writer.chunk(piece)], **run.usage_until(piece, piece.generated))
        if not piece.is_first:
            return [said]
        role = answers.DeltaMessage(role="assistant", content="")
        start = answers.ChunkChoice(index=piece.index, delta=role, logprobs=None, finish_reason=None)
        return [chunk([start], **prompt, **run.usage_until(piece, 0)), said]

    if body.stream:
        return await _chunked(run, chunks, chunk([]))
    pieces, usage = await run.whole()
    choices = [run.writer.message(piece) for piece in pieces]
    return answers.ChatCompletion(object="chat.completion", choices=choices, usage=usage, **run.head, **prompt)


async def streamed(
    run: Run, events: AsyncGenerator[str, None], write_error: Callable[[ServeError], str], end: str = ""
) -> ClosedStream:
    """Returns the response that streams events. An error before the first event is raised here, with its own status.

    Args:
        write_error: makes the event of a later error, when the status has been sent.
        end: text after all events.
    """
    try:
        first = await anext(events)
    except BaseException:
        await events.aclose()
        raise

    async def all_events() -> AsyncGenerator[str, None]:
        async with aclosing(events):
            yield first
            try:
                async for event in events:
                    yield event
            except ServeError as error:
                yield write_error(error)
            except Exception:
                _log.exception("%s has failed", run.id)
                yield write_error(Failed("the server has failed: its log says why"))
            yield end

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # the latter turns off nginx' default buffering
    return ClosedStream(all_events(), media_type="text/event-stream", headers=headers)


async def _chunked(run: Run, write: Callable[[Piece], list[BaseModel]], last: Any) -> ClosedStream:
    """Returns the response that streams chunks."""
    events = _events(run, write, last)
    return await streamed(run, events, lambda error: _event(_error_object(error)), "data: [DONE]\n\n")


async def _events(run: Run, write: Callable[[Piece], list[BaseModel]], last: Any) -> AsyncGenerator[str, None]:
    async with aclosing(run.stream()) as items:
        async for item in items:
            if isinstance(item, Piece):
                yield "".join(map(_event, write(item)))
            elif run.body.sends_usage:
                last.usage = item
                yield _event(last)


def _event(data: BaseModel) -> str:
    return f"data: {data.model_dump_json(exclude_unset=True)}\n\n"


# ---- embeddings


@router.post("/v1/embeddings")
async def embed(body: EmbeddingRequest, request: Request) -> answers.EmbeddingList:
    """A vector for each text."""
    model = served_model(request, body.model, "vector")
    given = as_list(body.input)
    check_batch(request, given, "input")
    size = model.info.vector_size
    if body.dimensions is not None and body.dimensions > size:
        raise BadRequest(f"dimensions is {body.dimensions}: the model's vectors have {size}", param="dimensions")
    prompt = _prompt(model, body.prompt_name)
    texts = [prompt + each if isinstance(each, str) else each for each in given]
    inputs = await encoder_tokens(model, texts, body, "input")
    vectors = await model.encode([Encode(tokens) for tokens in inputs])
    write = _as_base64 if body.encoding_format == "base64" else list
    data = [
        answers.Embedding(object="embedding", index=index, embedding=write(_cut(vector, body.dimensions)))
        for index, vector in enumerate(vectors)
    ]
    used = sum(map(len, inputs))
    usage = answers.EmbeddingUsage(prompt_tokens=used, total_tokens=used)
    return answers.EmbeddingList(object="list", data=data, model=model.name, usage=usage)


def _prompt(model: ServedModel, name: str | None) -> str:
    """Returns the prompt that precedes each text."""
    if name is None:
        return model.info.prompt
    if name not in model.info.prompts:
        known = ", ".join(model.info.prompts) or "none"
        raise BadRequest(f"prompt_name is no prompt of {model.name}: it has {known}", param="prompt_name")
    return model.info.prompts[name]


async def encoder_tokens(
    model: ServedModel, texts: Sequence[str | Sequence[int]], cut: Cutting, param: str
) -> list[tuple[int, ...]]:
    """Returns the tokens of an encoder's inputs. Raises BadRequest, for example if one is too long."""

    def tokenise() -> list[tuple[int, ...]]:
        inputs = [prompts.tokens_of(model, text, cut, param) for text in texts]
        for tokens in inputs:
            prompts.check_length(model, len(tokens), 0, param)
        return inputs

    return await prompts.in_turn(model, sum(map(len, texts)), tokenise)


def _cut(vector: list[float], dimensions: int | None) -> list[float]:
    if dimensions is None:
        return vector
    length = math.sqrt(sum(number * number for number in vector[:dimensions])) or 1.0
    return [number / length for number in vector[:dimensions]]


def _as_base64(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
