"""Which logits processors of the library a captured step runs, and as what.

Those that are operations on the scores alone are the library's own objects; the others are rewritten.

What is frozen in a capture is exactly what is in the signature. Numbers of a processor that follow one of the call's
(the prompt's length, the maximum length) are frozen as the difference from it, so that calls with other prompts share
a graph; tensors that change from call to call are copied into buffers that stay (`CapturedProcessor.refresh`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation import logits_process as library

from fastgen import releases
from fastgen.optimizer.transformers import logits
from fastgen.optimizer.transformers.captured import rewritten_processors as rewritten
from fastgen.optimizer.transformers.captured.rewritten_processors import Bucket, CapturedProcessor, Unknown

# Sizes of what is frozen are rounded up to a multiple of this, so that calls of about the same size share a graph.
_ROUNDING = 128


# How a processor is captured: the class, and its arguments after the bucket, which are what is frozen.
Signature = tuple[Any, ...]


class _Call(NamedTuple):
    """A processor in a call, and the numbers of the call that its own follow."""

    processor: Any
    prompt_length: int
    max_length: int


class _Reader(NamedTuple):
    """How to read a processor: `sign` gets the call and the attributes of these names.

    The processor may have no more attributes than these and `others`, which a release may have added.
    """

    sign: Callable[..., Signature]
    names: tuple[str, ...]
    others: tuple[str, ...] = ()


def signature(processor: Any, prompt_length: int, max_length: int) -> Signature | None:
    """All that is frozen in the capture of a processor: two of the same signature may share a graph.

    None if it cannot be captured: its class is not one of the library's itself, or it has parameters of an unknown
    kind. The lengths are the library's: `StepTokens.prompt - StepTokens.start`, and `StepTokens.limit`.
    """
    reader = _READERS.get(type(processor))
    found = vars(processor) if reader is not None else {}
    if reader is None or not set(reader.names) <= found.keys() <= {*reader.names, *reader.others}:
        return None
    try:
        return reader.sign(_Call(processor, prompt_length, max_length), *(found[name] for name in reader.names))
    except Unknown:
        return None


def captured(processor: Any, bucket: Bucket, prompt_length: int, max_length: int) -> CapturedProcessor | None:
    """The capturable form of a processor.

    None if it has no `signature`, or does not fit into its buffers (`CapturedProcessor.refresh`).
    """
    signed = signature(processor, prompt_length, max_length)
    if signed is None:
        return None
    kind, *frozen = signed
    made = kind(bucket, *frozen)
    return made if made.refresh(processor) else None


def _of_type(value: Any, *types: type) -> Any:
    if type(value) not in types:
        raise Unknown
    return value


def _token_ids(value: Any) -> tuple[int, ...]:
    """Ids of tokens in order, each once. Negative ones are no tokens."""
    if not isinstance(value, Tensor) or (value.numel() and (value.is_floating_point() or value.is_complex())):
        raise Unknown
    return tuple(sorted({int(token) for token in value.flatten().tolist() if token >= 0}))


def round_up(size: int, multiple: int = _ROUNDING) -> int:
    return -(-size // multiple) * multiple


def _encoder_width(processor: Any) -> int:
    tokens = rewritten.encoder_tokens(processor)
    if tokens.amin() < 0:
        raise Unknown
    return round_up(tokens.shape[1])


def _at(kind: type[CapturedProcessor], compare: Callable[..., Tensor], origin: str, *names: str) -> _Reader:
    """Tokens, the first attribute, banned or forced where the position compares so to the sum of the others."""

    def sign(call: _Call, tokens: Any, *numbers: Any) -> Signature:
        offset = {"start": 0, "prompt": call.prompt_length, "limit": call.max_length}[origin]
        bound = sum(_of_type(number, int) for number in numbers) - offset
        return kind, _token_ids(tokens), rewritten.When(compare, origin, bound)

    return _Reader(sign, names)


def _forced_bos(call: _Call, token: Any) -> Signature:
    if _of_type(token, int) < 0:
        raise Unknown
    return rewritten.Force, (token,), rewritten.When(torch.eq, "start", 1)


def _repetition_penalty(call: _Call, penalty: Any, ignored: Any, *unused: Any) -> Signature:
    if any(value is not None for value in unused):
        raise Unknown
    if isinstance(ignored, Tensor):
        if ignored.dim() != 1 or ignored.is_floating_point():
            raise Unknown
        ignored = rewritten.RepetitionPenalty.ROWS
    elif ignored is not None:
        ignored = _of_type(ignored, int) - call.prompt_length
    return rewritten.RepetitionPenalty, _of_type(penalty, float), ignored


def _encoder_repetition_penalty(call: _Call, penalty: Any, tokens: Any) -> Signature:
    width, all_rows = _encoder_width(call.processor), releases.encoder_penalty_is_for_all_beams()
    return rewritten.EncoderRepetitionPenalty, width, _of_type(penalty, float), all_rows


def _length_penalty(call: _Call, start: Any, factor: Any, ends: Any) -> Signature:
    steps = round_up(max(call.max_length - _of_type(start, int), 1))
    try:
        pow(_of_type(factor, float), steps)
    except OverflowError as error:  # which the library raises once it comes so far
        raise Unknown from error
    start -= call.prompt_length
    return rewritten.LengthPenalty, _token_ids(ends), start, factor, steps, releases.length_penalty_keeps_bans()


def _encoder_no_repeat_ngram(call: _Call, n: Any, *others: Any) -> Signature:
    return rewritten.EncoderNoRepeatNGram, _encoder_width(call.processor), _of_type(n, int)


def _sequence_bias(call: _Call, biases: Any) -> Signature:
    items = [(tuple(int(token) for token in sequence), _of_type(bias, float)) for sequence, bias in biases.items()]
    if not all(sequence and min(sequence) >= 0 for sequence, _ in items):
        raise Unknown
    if not hasattr(call.processor, releases.GROUPED_BIASES):
        # Releases that go through the sequences one by one compare their whole length with that of the input.
        return rewritten.SequenceBias, tuple(items), 1
    lengths = list(dict.fromkeys(len(sequence) for sequence, _ in items))
    return rewritten.SequenceBias, tuple(sorted(items, key=lambda item: lengths.index(len(item[0])))), 0


def _eta(call: _Call, epsilon: Any, filter_value: Any, keep: Any) -> Signature:
    if not isinstance(epsilon, Tensor) or epsilon.dim() or epsilon.dtype is not torch.float32:
        raise Unknown
    return rewritten.Eta, epsilon.item(), _of_type(filter_value, int, float), _of_type(keep, int)


def _library(*names: str, others: tuple[str, ...] = ()) -> _Reader:
    """The library's own, with numbers of these names."""

    def sign(call: _Call, *values: Any) -> Signature:
        numbers = tuple((name, _of_type(value, int, float)) for name, value in zip(names, values, strict=True))
        return rewritten.Library, type(call.processor), numbers

    return _Reader(sign, names, others)


_BIASES = _Reader(
    _sequence_bias,
    ("sequence_bias",),
    ("bad_word_ids", "length_1_bias", "prepared_bias_variables", releases.GROUPED_BIASES),
)
_KEPT = ("filter_value", "min_tokens_to_keep")
_READERS_BY_NAME = {
    "MinLengthLogitsProcessor": _at(rewritten.Ban, torch.lt, "start", "eos_token_id", "min_length"),
    "MinNewTokensLengthLogitsProcessor": _at(
        rewritten.Ban, torch.lt, "prompt", "eos_token_id", "prompt_length_to_skip", "min_new_tokens"
    ),
    "SuppressTokensAtBeginLogitsProcessor": _at(
        rewritten.Ban, torch.eq, "prompt", "begin_suppress_tokens", "begin_index"
    ),
    "SuppressTokensLogitsProcessor": _Reader(
        lambda call, tokens: (rewritten.Ban, _token_ids(tokens), None), ("suppress_tokens",)
    ),
    "ForcedBOSTokenLogitsProcessor": _Reader(_forced_bos, ("bos_token_id",)),
    "ForcedEOSTokenLogitsProcessor": _at(rewritten.Force, torch.eq, "limit", "eos_token_id", "max_length"),
    # The last two attributes are for the library's continuous batching, where scores have three dimensions.
    "RepetitionPenaltyLogitsProcessor": _Reader(
        _repetition_penalty, ("penalty", "prompt_ignore_length", "logits_indices", "cu_seq_lens_q")
    ),
    "EncoderRepetitionPenaltyLogitsProcessor": _Reader(_encoder_repetition_penalty, ("penalty", "encoder_input_ids")),
    "ExponentialDecayLengthPenalty": _Reader(
        _length_penalty, ("regulation_start", "regulation_factor", "eos_token_id")
    ),
    "NoRepeatNGramLogitsProcessor": _Reader(
        lambda call, n: (rewritten.NoRepeatNGram, _of_type(n, int)), ("ngram_size",)
    ),
    "EncoderNoRepeatNGramLogitsProcessor": _Reader(
        _encoder_no_repeat_ngram, ("ngram_size", "batch_size", "generated_ngrams", logits.ENCODER_TOKENS)
    ),
    "SequenceBiasLogitsProcessor": _BIASES,
    "NoBadWordsLogitsProcessor": _BIASES,
    "TemperatureLogitsWarper": _library("temperature"),
    "TopKLogitsWarper": _library("top_k", "filter_value", others=("min_tokens_to_keep",)),
    "TopPLogitsWarper": _library("top_p", *_KEPT),
    "MinPLogitsWarper": _library("min_p", *_KEPT),
    "TypicalLogitsWarper": _library("mass", *_KEPT),
    "EpsilonLogitsWarper": _library("epsilon", *_KEPT),
    "EtaLogitsWarper": _Reader(_eta, ("epsilon", *_KEPT)),
    "InfNanRemoveLogitsProcessor": _library(),
    "LogitNormalization": _library(),
}
_READERS = {getattr(library, name): reader for name, reader in _READERS_BY_NAME.items() if hasattr(library, name)}
