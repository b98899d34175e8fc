"""Converts the fields of a request to options of `generate`: chooses greedy search, beam search or sampling.

The model's own generation config applies to all that a request leaves open, as in a call of `generate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fastgen_serve.api.openai_schema import Generation
from fastgen_serve.errors import BadRequest
from fastgen_serve.jobs import Generate, Generated, ModelInfo
from fastgen_serve.jobs import Sequence as Result

# The options of `generate` with the same name as their field, and the values that switch them off.
_DRAWING: Mapping[str, tuple[Any, ...]] = {"top_p": (1.0,), "top_k": (0, -1), "min_p": (0.0,), "typical_p": (1.0,)}
_OF_BEAMS: Mapping[str, tuple[Any, ...]] = {"length_penalty": (1.0,), "early_stopping": (False,)}
_OTHERS = {
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size": "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty": "encoder_repetition_penalty",
    "min_tokens": "min_new_tokens",
}
# By the name in a job, the fields that a value may come from, if their names differ.
_FIELDS: Mapping[str, tuple[str, ...]] = {
    **{option: (field,) for field, option in _OTHERS.items()},
    "prompt": ("prompt", "messages"),
    "max_new_tokens": ("max_tokens", "max_completion_tokens"),
    "num_beams": ("num_beams", "best_of", "n", "num_return_sequences"),
    "num_return_sequences": ("n", "num_return_sequences", "best_of"),
    "eos_token_id": ("stop_token_ids", "ignore_eos"),
    "sequence_bias": ("logit_bias",),
    "forced_bos_token_id": ("tgt_lang",),
    "form": ("response_format", "structured_outputs", "text", "tools"),
}


@dataclass(frozen=True)
class Decoding:
    """How the inputs of a request are decoded.

    Attributes:
        options: of `generate`, without the number of new tokens.
        results: number of sequences that each input gets.
        candidates: number of sequences to generate; if more than `results`, those with the best mean log-probability
            are returned.
        beams: of a search; 1 for none.
    """

    options: Mapping[str, Any]
    results: int
    candidates: int
    beams: int

    def best(self, generated: Generated) -> tuple[Result, ...]:
        """Returns the sequences that the request gets."""
        if self.candidates == self.results:
            return generated.sequences
        return tuple(sorted(generated.sequences, key=_mean_logprob, reverse=True)[: self.results])


def decoding(fields: Generation, info: ModelInfo) -> Decoding:
    """Returns how a model decodes a request with these fields.

    - Beam search, if it asks for beams (`num_beams`, or `use_beam_search`, with which `n` is the width).
    - Sampling, if it sets a temperature above 0, or another option of sampling. `top_k` is then off, unless the request
      or the model's files set it.
    - Greedy search with temperature 0.
    - Otherwise as the model's generation config says. Several results are the best of its beams, or sampled if it has
      no beams.

    Raises:
        BadRequest: fields contradict each other, or ask for more than the model supports.
    """
    results = _agreed(fields, "n", "num_return_sequences") or 1
    if fields.best_of is not None and fields.best_of < results:
        raise BadRequest(f"best_of is {fields.best_of}, for {results} results: give {results} or more", param="best_of")
    candidates = fields.best_of or results
    own_beams = int(info.defaults.get("num_beams") or 1)
    if fields.num_beams is not None or fields.use_beam_search:
        width = _agreed(fields, "num_beams", "best_of") or _agreed(fields, "n", "num_return_sequences") or own_beams
        found = _beams(fields, results, width)
    elif _is_drawn(fields, info, candidates, own_beams):
        found = Decoding({"num_beams": 1, **_drawing(fields, info)}, results, candidates, 1)
    elif fields.temperature == 0:
        found = Decoding({"num_beams": 1, "do_sample": False}, results, candidates, 1)
    else:
        found = _left_to_model(fields, info, results, candidates, own_beams)
    _check_sequences(found)
    options = {**found.options, **_beam_options(fields, found), **_other_options(fields, info)}
    if found.candidates != (info.defaults.get("num_return_sequences") or 1):
        options["num_return_sequences"] = found.candidates
    return Decoding(options, found.results, found.candidates, found.beams)


def make_job(
    decoding: Decoding,
    body: Generation,
    tokens: tuple[int, ...],
    max_tokens: int | None,
    inputs: Mapping[str, Any] | None = None,
) -> Generate:
    """Makes the job of one input.

    Args:
        decoding: how it is decoded.
        tokens: of the input.
        max_tokens: the limit of new tokens; None to use the model's generation config.
        inputs: the model's inputs other than tokens.
    """
    logprobs = body.wanted_logprobs
    if decoding.candidates > decoding.results and logprobs is None:
        logprobs = 0
    limit = {} if max_tokens is None else {"max_new_tokens": max_tokens}
    return Generate(
        tokens,
        {**decoding.options, **limit},
        body.seed,
        tuple(body.stops),
        logprobs,
        bool(body.stream),
        inputs or {},
        body.form,
        (body.frequency_penalty or 0.0, body.presence_penalty or 0.0),
        body.wanted_prompt_logprobs,
    )


@contextmanager
def named_by(fields: object) -> Iterator[None]:
    """Renames the parameter of a BadRequest in a block from its name in a job to the request's field."""
    try:
        yield
    except BadRequest as error:
        names = _FIELDS.get(error.param or "", (error.param,))
        error.param = next((name for name in names if name and getattr(fields, name, None)), names[0])
        raise


def _agreed(fields: Generation, *names: str) -> int | None:
    """Returns the value of fields that mean the same; None if none is set."""
    given = {name: value for name in names if (value := getattr(fields, name)) is not None}
    if len(set(given.values())) > 1:
        said = ", ".join(f"{name} is {value}" for name, value in given.items())
        raise BadRequest(f"{said}: they mean the same, give one of them", param=names[-1])
    return next(iter(given.values()), None)


def _beams(fields: Generation, results: int, width: int) -> Decoding:
    if results > width:
        raise BadRequest(f"n is {results}, num_beams {width}: give as many beams as results, or more", param="n")
    if fields.do_sample:
        return Decoding({"num_beams": width, "do_sample": True, **_given(fields)}, results, results, width)
    for name, off in {"temperature": (0.0, 1.0), **_DRAWING}.items():
        if getattr(fields, name) not in (None, *off):
            raise BadRequest(f"{name} has no effect on beams: leave it out, or draw them with do_sample", param=name)
    return Decoding({"num_beams": width, "do_sample": False}, results, results, width)


def _left_to_model(fields: Generation, info: ModelInfo, results: int, candidates: int, own_beams: int) -> Decoding:
    options: dict[str, Any] = {} if fields.do_sample is None else {"do_sample": fields.do_sample}
    if info.defaults.get("do_sample") and fields.do_sample is None:
        options = _given(fields)  # an explicit "off" value may replace a value of the model's files
    if own_beams == 1:
        return Decoding(options, results, candidates, 1)
    width = max(own_beams, candidates)
    return Decoding({"num_beams": width, **options}, results, results, width)


def _is_drawn(fields: Generation, info: ModelInfo, candidates: int, own_beams: int) -> bool:
    """Returns whether the request asks for sampling. It does not if it leaves that to the model's files."""
    if fields.temperature == 0:
        if fields.do_sample:
            raise BadRequest("temperature is 0, and do_sample true: give a temperature above 0", param="temperature")
        return False
    asked = [name for name, off in _DRAWING.items() if getattr(fields, name) not in (None, *off)]
    asked += ["temperature"] if fields.temperature is not None else []
    if fields.do_sample is False:
        if asked and (asked != ["temperature"] or fields.temperature != 1):
            raise BadRequest(f"{asked[0]} has no effect without sampling: leave it or do_sample out", param=asked[0])
        return False
    searches = not info.defaults.get("do_sample") and own_beams == 1
    return bool(fields.do_sample or asked or (candidates > 1 and searches))


def _given(fields: Generation) -> dict[str, Any]:
    """Returns the sampling options that the request sets."""
    given = {name: value for name in ("temperature", *_DRAWING) if (value := getattr(fields, name)) is not None}
    if "top_k" in given:
        given["top_k"] = max(given["top_k"], 0)
    return given


def _drawing(fields: Generation, info: ModelInfo) -> dict[str, Any]:
    """Returns the options for sampling without beams. `generate` defaults to top_k=50, which clients do not expect."""
    top_k = {} if info.defaults.get("top_k") is not None else {"top_k": 0}
    return {**top_k, "do_sample": True, **_given(fields)}


def _check_sequences(found: Decoding) -> None:
    if found.candidates > 1 and found.beams == 1 and found.options.get("do_sample") is False:
        raise BadRequest(
            f"n, best_of: {found.candidates} results of greedy search would be the same: give a temperature above "
            "0, or num_beams",
            param="n",
        )


def _beam_options(fields: Generation, found: Decoding) -> dict[str, Any]:
    options = {}
    for name, off in _OF_BEAMS.items():
        value = getattr(fields, name)
        if found.beams > 1 and value is not None:
            options[name] = value
        elif value not in (None, *off):
            raise BadRequest(f"{name} has an effect on beams only: leave it out, or give num_beams", param=name)
    return options


def _other_options(fields: Generation, info: ModelInfo) -> dict[str, Any]:
    options = {option: value for name, option in _OTHERS.items() if (value := getattr(fields, name)) is not None}
    for name in ("encoder_no_repeat_ngram_size", "encoder_repetition_penalty"):
        if name in options and info.kind != "encoder-decoder":
            raise BadRequest(f"{name}: this model has no encoder, leave it out", param=name)
    if fields.logit_bias:
        options["sequence_bias"] = [[[int(token)], float(bias)] for token, bias in fields.logit_bias.items()]
    if fields.ignore_eos:
        options["eos_token_id"] = None
    if fields.stop_token_ids:
        own = [] if fields.ignore_eos else info.defaults.get("eos_token_id") or []
        own = own if isinstance(own, (list, tuple)) else [own]
        options["eos_token_id"] = list(dict.fromkeys([*own, *fields.stop_token_ids]))
    return options


def _mean_logprob(sequence: Result) -> float:
    logprobs = sequence.logprobs or ()
    return sum(each.logprob for each in logprobs) / max(len(logprobs), 1)
