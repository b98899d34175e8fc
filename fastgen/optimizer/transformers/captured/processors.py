"""Which logits processors of the library a captured step runs, and as what.

Those that are operations on the scores alone are the library's own objects; the others are rewritten.

What is frozen in a capture is exactly what is in the signature. Tokens are data: each call copies its own into buffers
that stay (`CapturedProcessor.refresh`), so that calls share a recording. So are numbers, such as lengths, penalties and
temperatures (`CapturedProcessor.fill`), which are those of each input where inputs come and go.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation import logits_process as library

from fastgen import releases
from fastgen.decoding import library_code
from fastgen.decoding.kv.view import CannotBeCaptured
from fastgen.ops.gpu import power_of_two
from fastgen.optimizer.transformers import logits, user_code
from fastgen.optimizer.transformers.captured import rewritten_processors as rewritten
from fastgen.optimizer.transformers.captured.forms import FormProcessor
from fastgen.optimizer.transformers.captured.rewritten_processors import Bucket, CapturedProcessor, Unknown

# Room for so many tokens, at least, where there may be any number of them.
_TOKENS = 4
# Top-k sampling keeps up to so many tokens, at least.
_KEPT_BY_TOP_K = 64
# No vocabulary has as many.
_MOST_BY_TOP_K = 2**31
# The encoder's input, at least.
_ENCODER_TOKENS = 512

# How a processor is captured: the class, and its arguments after the bucket, which are what is frozen.
Signature = tuple[Any, ...]


class Signed(NamedTuple):
    """A processor of a call: what of it is frozen, what its `refresh` gets, and its numbers.

    Two of the same signature may share a graph. In slots, what inputs share has no numbers: each has its own.
    """

    signature: Signature
    data: tuple[Any, ...] = ()
    numbers: tuple[float, ...] = ()

    def made(self, bucket: Bucket) -> CapturedProcessor:
        """The capturable form. CannotBeCaptured: it does not fit into its buffers (`CapturedProcessor.refresh`)."""
        kind, *frozen = self.signature
        made: CapturedProcessor = kind(bucket, *frozen)
        if not self.refresh(made):
            raise CannotBeCaptured("a processor does not fit into its buffers")
        return made

    def refresh(self, made: CapturedProcessor) -> bool:
        """Has a captured processor of this signature do what this one does; False if it does not fit."""
        if not made.refresh(*self.data):
            return False
        if self.numbers:
            made.put(self.numbers)
        return True

    def shared(self) -> Signed | None:
        """What it does to all inputs of a step with slots, of which each has numbers of its own.

        None if its capturable form does not do the same for rows of any number, each of a length of its own.
        """
        kind, *frozen = self.signature
        leaves_out = kind is rewritten.RepetitionPenalty and frozen != [False]
        if not kind.is_of_any_rows or leaves_out:
            return None
        return Signed(self.signature, tuple(x.tolist() if isinstance(x, Tensor) else x for x in self.data))

    @property
    def neutral(self) -> tuple[float, ...] | None:
        """Numbers with which it changes no bit of a row; None if there are none such."""
        kind, *_, last = self.signature
        if kind is rewritten.Library:
            known = rewritten.Library.NEUTRAL
            return tuple(known[name] for name in last) if last and known.keys() >= set(last) else None
        if kind in (rewritten.Ban, rewritten.Force):
            return None if last is None else (_NEVER[last.compare],)
        found: tuple[float, ...] | None = kind.neutral
        return found

    @property
    def rank(self) -> int:
        """Where the library has such a processor among those that options make."""
        kind, *frozen = self.signature
        has_when = kind in (rewritten.Ban, rewritten.Force)
        which = frozen[0] if kind is rewritten.Library else frozen[-1] if has_when else None
        return _RANKS.get((kind, which), len(_RANKS))


class Lengths(NamedTuple):
    """What the numbers of a call's processors follow; both are the library's.

    Attributes:
        prompt: `StepTokens.prompt - StepTokens.start`.
        most: `max_length`, which is `StepTokens.limit`.
        freezes: numbers of the library's own processors are frozen: on a GPU, torch computes with one on the device a
            little differently than with one of Python's.
        rows: of the call, as long as all are there.
    """

    prompt: int
    most: int
    freezes: bool = False
    rows: int | None = None


class _Reader(NamedTuple):
    """How to read a processor: `sign` gets it, the lengths of the call, and the attributes of these names.

    The processor may have no more attributes than these and `others`, which a release may have added.
    """

    sign: Callable[..., Signed]
    names: tuple[str, ...]
    others: tuple[str, ...] = ()


def signed(processor: Any, lengths: Lengths) -> Signed | None:
    """How a processor is captured.

    None if it cannot be: its class is not one of the library's itself, or it has parameters of an unknown kind.
    """
    reader = _READERS.get(type(processor)) if _is_the_librarys(type(processor)) else None
    found = vars(processor) if reader is not None else {}
    if reader is None or not set(reader.names) <= found.keys() <= {*reader.names, *reader.others}:
        return None
    try:
        return reader.sign(processor, lengths, *(found[name] for name in reader.names))
    except Unknown:
        return None


def all_known(given: Sequence[Signed | None]) -> tuple[Signed, ...] | None:
    """These, if there is none among them that cannot be captured."""
    known = tuple(each for each in given if each is not None)
    return known if len(known) == len(given) else None


def _is_the_librarys(kind: type) -> bool:
    """Whether nobody has put code of their own in the place of what a processor of this class does."""
    return library_code.is_own(inspect.getattr_static(kind, "__call__", None))


def all_made(given: Iterable[Signed], bucket: Bucket) -> list[CapturedProcessor]:
    """The capturable forms of processors. CannotBeCaptured: one of them does not fit into its buffers."""
    return [each.made(bucket) for each in given]


def refresh(made: Iterable[CapturedProcessor], given: Iterable[Signed]) -> bool:
    """Has captured processors do what those of the same signatures do; False if one does not fit."""
    return all(each.refresh(captured) for captured, each in zip(made, given, strict=True))


def with_temperature(given: Sequence[Any]) -> Any:
    """Processors of a call that samples, with a temperature: 1 changes no bit, and slots share a step with others."""
    kinds, neutral = [type(each) for each in given], library.TemperatureLogitsWarper(1.0)
    others = [type(each) for each in (*given, neutral) if user_code.kind_of(each) is not FormProcessor]
    if type(neutral) in kinds or not all(map(_is_the_librarys, others)):
        return given
    behind = (n for n, kind in enumerate(kinds) if kind.__name__.endswith(("LogitsWarper", "LogitNormalization")))
    place = next(behind, len(kinds))
    return library.LogitsProcessorList([*given[:place], neutral, *given[place:]])


def _of_type(value: Any, *types: type) -> Any:
    if type(value) not in types:
        raise Unknown
    return value


def _token_ids(value: Any) -> tuple[int, ...]:
    """Ids of tokens in order, each once. Negative ones are no tokens."""
    if not isinstance(value, Tensor) or (value.numel() and (value.is_floating_point() or value.is_complex())):
        raise Unknown
    return tuple(sorted({int(token) for token in value.flatten().tolist() if token >= 0}))


def _room(tokens: tuple[int, ...], least: int = _TOKENS) -> int:
    return power_of_two(max(len(tokens), least))


def _at(kind: type[CapturedProcessor], compare: Callable[..., Tensor], origin: str, *names: str) -> _Reader:
    """Tokens, the first attribute, banned or forced where the position compares so to the sum of the others."""

    # Of one token that is forced, the largest output is found without all of them (`fastgen.decoding.lm_head_pass`).
    least = 1 if kind is rewritten.Force else _TOKENS

    def sign(processor: Any, lengths: Lengths, tokens: Any, *numbers: Any) -> Signed:
        offset = {"start": 0, "prompt": lengths.prompt, "limit": lengths.most}[origin]
        bound = sum(_of_type(number, int) for number in numbers) - offset
        found = _token_ids(tokens)
        return Signed((kind, _room(found, least), rewritten.When(compare, origin)), (found,), (bound,))

    return _Reader(sign, names)


def _forced_bos(processor: Any, lengths: Lengths, token: Any) -> Signed:
    if _of_type(token, int) < 0:
        raise Unknown
    return Signed((rewritten.Force, 1, rewritten.When(torch.eq, "start")), ((token,),), (1,))


def _suppressed(processor: Any, lengths: Lengths, tokens: Any) -> Signed:
    found = _token_ids(tokens)
    return Signed((rewritten.Ban, _room(found), None), (found,), (0,))


def _repetition_penalty(processor: Any, lengths: Lengths, penalty: Any, ignored: Any, *unused: Any) -> Signed:
    if any(value is not None for value in unused):
        raise Unknown
    if ignored is not None and not (
        isinstance(ignored, Tensor) and ignored.dim() == 1 and not ignored.is_floating_point()
    ):
        raise Unknown
    if ignored is not None and lengths.rows not in (None, len(ignored)):
        raise Unknown  # the library refuses it
    return Signed((rewritten.RepetitionPenalty, ignored is not None), (ignored,), (_of_type(penalty, float),))


def _encoder_no_repeat_ngram(processor: Any, lengths: Lengths, n: Any, *others: Any) -> Signed:
    tokens = getattr(processor, logits.ENCODER_TOKENS, None)
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.is_floating_point() or not tokens.numel():
        raise Unknown
    if tokens.amin() < 0:
        raise Unknown
    width = power_of_two(max(tokens.shape[1], _ENCODER_TOKENS))
    return Signed((rewritten.EncoderNoRepeatNGram, width, _of_type(n, int)), (tokens,))


def _sequence_bias(processor: Any, lengths: Lengths, biases: Any) -> Signed:
    items = [(tuple(int(token) for token in sequence), _of_type(bias, float)) for sequence, bias in biases.items()]
    if not all(sequence and min(sequence) >= 0 for sequence, _ in items):
        raise Unknown
    if not hasattr(processor, releases.GROUPED_BIASES):
        # Releases that go through the sequences one by one compare their whole length with that of the input.
        return Signed((rewritten.SequenceBias, tuple(items), 1))
    groups = list(dict.fromkeys(len(sequence) for sequence, _ in items))
    return Signed((rewritten.SequenceBias, tuple(sorted(items, key=lambda item: groups.index(len(item[0])))), 0))


def _top_k(processor: Any, lengths: Lengths, kept: Any, filter_value: Any) -> Signed:
    most = min(_of_type(kept, int), _MOST_BY_TOP_K)
    room = power_of_two(max(most, _KEPT_BY_TOP_K))
    return Signed((rewritten.TopK, room, _of_type(filter_value, int, float)), numbers=(most,))


def _library(number: str | None = None, *names: str) -> _Reader:
    """The library's own: a number that each call gives, and others that are frozen, by name."""
    given_names = () if number is None else (number,)

    def sign(processor: Any, lengths: Lengths, *values: Any) -> Signed:
        known = {name: _of_type(value, int, float) for name, value in zip((*given_names, *names), values, strict=True)}
        given = tuple(name for name in given_names if not lengths.freezes)
        frozen = tuple((name, value) for name, value in known.items() if name not in given)
        return Signed((rewritten.Library, type(processor), frozen, given), numbers=tuple(known[name] for name in given))

    return _Reader(sign, (*given_names, *names))


def _top_p(processor: Any, lengths: Lengths, share: Any, filter_value: Any, least: Any) -> Signed:
    if lengths.freezes:
        return _library("top_p", *_KEPT).sign(processor, lengths, share, filter_value, least)
    frozen = _of_type(filter_value, int, float), _of_type(least, int)
    return Signed((rewritten.TopP, *frozen), numbers=(_of_type(share, int, float),))


_BIASES = _Reader(
    _sequence_bias,
    ("sequence_bias",),
    ("bad_word_ids", "length_1_bias", "prepared_bias_variables", releases.GROUPED_BIASES),
)
_KEPT = ("filter_value", "min_tokens_to_keep")
_READERS_BY_NAME = {
    "MinLengthLogitsProcessor": _at(rewritten.Ban, torch.lt, "prompt", "eos_token_id", "min_length"),
    "MinNewTokensLengthLogitsProcessor": _at(
        rewritten.Ban, torch.lt, "prompt", "eos_token_id", "prompt_length_to_skip", "min_new_tokens"
    ),
    "SuppressTokensAtBeginLogitsProcessor": _at(
        rewritten.Ban, torch.eq, "prompt", "begin_suppress_tokens", "begin_index"
    ),
    "SuppressTokensLogitsProcessor": _Reader(_suppressed, ("suppress_tokens",)),
    "ForcedBOSTokenLogitsProcessor": _Reader(_forced_bos, ("bos_token_id",)),
    "ForcedEOSTokenLogitsProcessor": _at(rewritten.Force, torch.eq, "limit", "eos_token_id", "max_length"),
    # The last two attributes are for the library's continuous batching, where scores have three dimensions.
    "RepetitionPenaltyLogitsProcessor": _Reader(
        _repetition_penalty, ("penalty", "prompt_ignore_length", "logits_indices", "cu_seq_lens_q")
    ),
    "NoRepeatNGramLogitsProcessor": _Reader(
        lambda processor, lengths, n: Signed((rewritten.NoRepeatNGram, _of_type(n, int))), ("ngram_size",)
    ),
    "EncoderNoRepeatNGramLogitsProcessor": _Reader(
        _encoder_no_repeat_ngram, ("ngram_size", "batch_size", "generated_ngrams", logits.ENCODER_TOKENS)
    ),
    "SequenceBiasLogitsProcessor": _BIASES,
    "NoBadWordsLogitsProcessor": _BIASES,
    "ClassifierFreeGuidanceLogitsProcessor": _library("guidance_scale"),
    "TemperatureLogitsWarper": _library("temperature"),
    "TopKLogitsWarper": _Reader(_top_k, ("top_k", "filter_value"), others=(releases.KEPT_BY_TOP_K,)),
    "TopPLogitsWarper": _Reader(_top_p, ("top_p", *_KEPT)),
    "MinPLogitsWarper": _library("min_p", *_KEPT),
    "TypicalLogitsWarper": _library("mass", *_KEPT),
    "EpsilonLogitsWarper": _library("epsilon", *_KEPT),
    "InfNanRemoveLogitsProcessor": _library(),
    "LogitNormalization": _library(),
}
_READERS = {getattr(library, name): reader for name, reader in _READERS_BY_NAME.items() if hasattr(library, name)}

# Numbers to which no position compares so.
_NEVER = {torch.lt: -(2**40), torch.eq: 2**40}

_RANKS: dict[tuple[Any, Any], int] = {
    each: number
    for number, each in enumerate(
        (
            (rewritten.RepetitionPenalty, None),
            (rewritten.NoRepeatNGram, None),
            (rewritten.SequenceBias, None),
            (rewritten.Ban, rewritten.When(torch.lt, "prompt")),
            (rewritten.Force, rewritten.When(torch.eq, "start")),
            (rewritten.Force, rewritten.When(torch.eq, "limit")),
            (rewritten.Library, getattr(library, "InfNanRemoveLogitsProcessor", None)),
            (rewritten.Ban, None),
            (rewritten.Ban, rewritten.When(torch.eq, "prompt")),
            (rewritten.Library, getattr(library, "TemperatureLogitsWarper", None)),
            (rewritten.TopK, None),
            (rewritten.TopP, None),
            (rewritten.Library, getattr(library, "MinPLogitsWarper", None)),
            (rewritten.Library, getattr(library, "TypicalLogitsWarper", None)),
            (rewritten.Library, getattr(library, "EpsilonLogitsWarper", None)),
        )
    )
}
