"""vLLM's paths beyond OpenAI's: classification, pair scores, reranking, tokenisation."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter, Request

from fastgen_serve.api import prompts
from fastgen_serve.api import vllm_schema as schema
from fastgen_serve.api.openai import ERRORS, check_batch, encoder_tokens, served_model, write_error
from fastgen_serve.api.openai_schema import Cutting
from fastgen_serve.api.schema import as_list
from fastgen_serve.concurrency import together
from fastgen_serve.errors import BadRequest
from fastgen_serve.jobs import Encode
from fastgen_serve.served import ServedModel

__all__ = ["router", "write_error"]

router = APIRouter(tags=["vLLM"], responses=ERRORS)


@router.post("/classify")
async def classify(body: schema.ClassifyRequest, request: Request) -> schema.ClassifyAnswer:
    """The likeliest label of each text, and the probabilities of all."""
    model = served_model(request, body.model, "labels")
    given = as_list(body.input)
    check_batch(request, given, "input")
    inputs = await encoder_tokens(model, given, body, "input")
    rows = await model.encode([Encode(tokens, "labels") for tokens in inputs])
    data = []
    for index, scores in enumerate(rows):
        numbers = _activated(model, scores, body.use_activation)
        label = model.info.labels[numbers.index(max(numbers))]
        data.append(schema.Classification(index=index, label=label, probs=numbers, num_classes=len(numbers)))
    return schema.ClassifyAnswer(
        id=_id("classify"), created=int(time.time()), model=model.name, data=data, usage=_usage(inputs)
    )


@router.post("/score")
@router.post("/v1/score")
async def score(body: schema.ScoreRequest, request: Request) -> schema.ScoreAnswer:
    """A number for each pair: of a cross-encoder, or how close the vectors of the two are (cosine)."""
    firsts, seconds = body.firsts, body.seconds
    firsts = firsts * len(seconds) if len(firsts) == 1 else firsts
    model, scores, usage = await _scores(request, body, list(zip(firsts, seconds, strict=True)))
    data = [schema.Score(index=index, score=value) for index, value in enumerate(scores)]
    return schema.ScoreAnswer(id=_id("score"), created=int(time.time()), model=model.name, data=data, usage=usage)


@router.post("/rerank", response_model_exclude_unset=True)
@router.post("/v1/rerank", response_model_exclude_unset=True)
@router.post("/v2/rerank", response_model_exclude_unset=True)
async def rerank(body: schema.RerankRequest, request: Request) -> schema.RerankAnswer:
    """The documents, best first, with their scores."""
    texts = body.texts
    model, scores, usage = await _scores(request, body, [(body.query, text) for text in texts])
    order = sorted(range(len(texts)), key=lambda index: scores[index], reverse=True)
    results = [schema.Ranked(index=index, relevance_score=scores[index]) for index in order[: body.top_n or None]]
    if body.return_documents is not False:
        for result in results:
            result.document = schema.RankedDocument(text=texts[result.index])
    return schema.RerankAnswer(id=_id("rerank"), model=model.name, usage=usage, results=results)


@router.post("/tokenize")
async def tokenize(body: schema.TokenizeRequest, request: Request) -> schema.TokenizeAnswer:
    """The tokens of a text, or of a conversation as the model's chat template writes it."""
    model = served_model(request, body.model)
    chat = prompts.Chat.of(model, body.messages or (), request.app.state.settings)
    text, adds = body.prompt or "", body.add_special_tokens
    if chat.messages:
        cut = Cutting(add_special_tokens=bool(adds))
        found, _ = await prompts.chat_inputs(model, chat, body, cut, any_length=True)
    else:
        cut = Cutting(add_special_tokens=adds is not False)
        work = partial(prompts.tokens_of, model, text, cut, "prompt", any_length=True)
        found = await prompts.in_turn(model, len(text), work)
    tokens = list(found)
    names = [str(name) for name in model.tokenizer.convert_ids_to_tokens(tokens)] if body.return_token_strs else None
    return schema.TokenizeAnswer(count=len(tokens), max_model_len=model.info.positions, tokens=tokens, token_strs=names)


@router.post("/detokenize")
async def detokenize(body: schema.DetokenizeRequest, request: Request) -> schema.DetokenizeAnswer:
    """The text of tokens, special ones among them."""
    model = served_model(request, body.model)

    def decode() -> str:
        prompts.check_ids(model, body.tokens, "tokens")
        return str(model.tokenizer.decode(body.tokens))

    return schema.DetokenizeAnswer(prompt=await prompts.in_turn(model, len(body.tokens), decode))


async def _scores(
    request: Request, body: schema.Pairing, pairs: list[tuple[str, str]]
) -> tuple[ServedModel, list[float], schema.PoolingUsage]:
    """Returns the model, a score for each pair, and the usage."""
    param = "documents" if isinstance(body, schema.RerankRequest) else "text_2"
    check_batch(request, pairs, param)
    model = served_model(request, body.model, "labels", "vector")
    if "vector" in model.info.tasks:
        return model, *await _closeness(model, body, pairs)
    if len(model.info.labels) != 1:
        raise BadRequest(
            f"model {model.name} has {len(model.info.labels)} labels: ask one that gives pairs one number, or one that "
            "makes vectors",
            param="model",
        )

    def tokenise() -> list[Encode]:
        jobs = []
        for pair in pairs:
            tokens, types = prompts.pair_of(model, pair, body, param)
            prompts.check_length(model, len(tokens), 0, param)
            jobs.append(Encode(tokens, "labels", types))
        return jobs

    jobs = await prompts.in_turn(model, sum(len(text) for pair in pairs for text in pair), tokenise)
    rows = await model.encode(jobs)
    scores = [_activated(model, row, body.use_activation)[0] for row in rows]
    return model, scores, _usage([job.tokens for job in jobs])


async def _closeness(
    model: ServedModel, body: schema.Pairing, pairs: list[tuple[str, str]]
) -> tuple[list[float], schema.PoolingUsage]:
    """Returns the cosine similarity of each pair. Encodes a text that is on a side of several pairs once."""
    if body.use_activation is not None:
        raise BadRequest("use_activation: a cosine has none, leave it out", param="use_activation")
    sides = [list(dict.fromkeys(side)) for side in zip(*pairs, strict=True)]
    inputs = [
        await encoder_tokens(model, [model.info.prompt + text for text in side], body, "documents") for side in sides
    ]
    made = await together(model.encode([Encode(tokens) for tokens in side]) for side in inputs)
    firsts, seconds = (dict(zip(side, vectors, strict=True)) for side, vectors in zip(sides, made, strict=True))
    scores = [_cosine(firsts[first], seconds[second]) for first, second in pairs]
    return scores, _usage([tokens for side in inputs for tokens in side])


def _cosine(first: Sequence[float], second: Sequence[float]) -> float:
    product = sum(one * other for one, other in zip(first, second, strict=True))
    return product / (math.hypot(*first) * math.hypot(*second) or 1.0)


def _activated(model: ServedModel, numbers: list[float], use_activation: bool | None) -> list[float]:
    """Returns a row as probabilities. Only the single number of a model with one label is still a logit."""
    if use_activation is False and model.info.scores != "raw":
        raise BadRequest("use_activation: this model's scores are probabilities, leave it out", param="use_activation")
    if model.info.scores != "raw" or len(numbers) != 1 or use_activation is False:
        return numbers
    return [1 / (1 + math.exp(-numbers[0])) if numbers[0] > -700 else 0.0]


def _usage(inputs: Sequence[Sequence[int]]) -> schema.PoolingUsage:
    used = sum(map(len, inputs))
    return schema.PoolingUsage(prompt_tokens=used, total_tokens=used)


def _id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"
