"""Which of the library's logits processors a captured step runs, and in which form.

A processor that only computes with the scores is the library's own object. The others are rewritten.

A signature contains exactly what a capture freezes. Tokens are data: each call copies its own into buffers that stay
(`CapturedProcessor.refresh`), so that calls share a recording. Numbers are data, too, such as lengths, penalties and
temperatures (`CapturedProcessor.put`). In slots, each input has its own.
"""

from __future__ import annotations

import copy
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
from fastgen.optimizer.transformers.captured.rewritten_processors import Bucket, CapturedProcessor

# Least room for tokens of a processor that may have any number of them.
_TOKENS = 4
# Least room for the tokens that top-k sampling keeps.
_KEPT_BY_TOP_K = 64
# More than any vocabulary has.
_MOST_BY_TOP_K = 2**31
# Least room for the tokens of the encoder's input.
_ENCODER_TOKENS = 512

# How a processor is captured: its class, and those arguments after the bucket that are frozen.
Signature = tuple[Any, ...]


class Signed(NamedTuple):
    """A processor of a call: its signature, the data for `refresh`, and its numbers.

    Processors of equal signatures may share a graph. In slots, a processor that inputs share has no numbers.
    """

    signature: Signature
    data: tuple[Any, ...] = ()
    numbers: tuple[float, ...] = ()

    def made(self, bucket: Bucket) -> CapturedProcessor:
        """Returns the capturable form. Raises CannotBeCaptured if the data do not fit into its buffers."""
        kind, *frozen = self.signature
        made: CapturedProcessor = kind(bucket, *frozen)
        if not self.refresh(made):
            raise CannotBeCaptured("a processor does not fit into its buffers")
        return made

    def refresh(self, made: CapturedProcessor) -> bool:
        """Has a captured processor of this signature do what this one does. Returns False if the data do not fit."""
        if not made.refresh(*self.data):
            return False
        if self.numbers:
            made.put(self.numbers)
        return True

    def shared(self) -> Signed | None:
        """Returns what the processor does to all inputs of a step with slots, without the numbers of each input.

        None if its capturable form depends on the number of rows, or needs rows of equal lengths.
        """
        kind, *frozen = self.signature
        leaves_out = kind is rewritten.RepetitionPenalty and frozen != [False]
        if not kind.is_of_any_rows or leaves_out:
            return None
        return Signed(self.signature, tuple(x.tolist() if isinstance(x, Tensor) else x for x in self.data))

    @property
    def neutral(self) -> tuple[float, ...] | None:
        """Numbers with which the processor changes no bit of a row; None if there are none."""
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
        """Position of such a processor in the library's order."""
        kind, *frozen = self.signature
        has_when = kind in (rewritten.Ban, rewritten.Force)
        which = frozen[0] if kind is rewritten.Library else frozen[-1] if has_when else None
        return _RANKS.get((kind, which), len(_RANKS))


class Unknown(Exception):
    """A parameter of a processor has an unknown type or value."""


class Lengths(NamedTuple):
    """The lengths that the numbers of a call's processors depend on; both are the library's.

    Attributes:
        prompt: `StepTokens.prompt - StepTokens.start`.
        most: `max_length`, which is `StepTokens.limit`.
        freezes: numbers of the library's own processors are frozen: on a GPU, torch computes slightly differently with
            a number on the device than with a Python number.
        rows: rows of the call; None once some may have left.
    """

    prompt: int
    most: int
    freezes: bool = False
    rows: int | None = None


class _Reader(NamedTuple):
    """How to read a processor: `sign` gets it, the lengths of the call, and the attributes of these names.

    The processor may have no attributes but these and `others`, which a release may have added.
    """

    sign: Callable[..., Signed]
    names: tuple[str, ...]
    others: tuple[str, ...] = ()


def signed(processor: Any, lengths: Lengths) -> Signed | None:
    """Returns how a processor is captured.

    None if it cannot be: its class is not one of the library's, or a parameter has an unknown type.
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
    """Returns the given processors, or None if one of them cannot be captured."""
    known = tuple(each for each in given if each is not None)
    return known if len(known) == len(given) else None


def _is_the_librarys(kind: type) -> bool:
    """Whether the call method of this class is the library's own, not replaced by user code."""
    return library_code.is_own(inspect.getattr_static(kind, "__call__", None))


def all_made(given: Iterable[Signed], bucket: Bucket) -> list[CapturedProcessor]:
    """Returns the capturable forms of processors. Raises CannotBeCaptured if one does not fit into its buffers."""
    return [each.made(bucket) for each in given]


def refresh(made: Iterable[CapturedProcessor], given: Iterable[Signed]) -> bool:
    """Has captured processors do what the given ones of equal signatures do. Returns False if one does not fit."""
    return all(each.refresh(captured) for captured, each in zip(made, given, strict=True))


def of_rows(processors: Iterable[Any], rows: Tensor) -> list[Any]:
    """Returns the processors of a call that continues with these of its rows."""
    found = []
    for processor in processors:
        if isinstance(getattr(processor, "prompt_ignore_length", None), Tensor):  # one per row
            processor = copy.copy(processor)
            given = processor.prompt_ignore_length
            processor.prompt_ignore_length = given[rows.to(given.device)]
        found.append(processor)
    return found


def with_temperature(given: Sequence[Any]) -> Any:
    """Adds a temperature of 1 to processors that sample, which changes no bit, so that more inputs share a step."""
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
    """Returns token ids, sorted and unique. Negative ids are no tokens."""
    if not isinstance(value, Tensor) or (value.numel() and (value.is_floating_point() or value.is_complex())):
        raise Unknown
    return tuple(sorted({int(token) for token in value.flatten().tolist() if token >= 0}))


def _room(tokens: tuple[int, ...], least: int = _TOKENS) -> int:
    return power_of_two(max(len(tokens), least))


def _at(kind: type[CapturedProcessor], compare: Callable[..., Tensor], origin: str, *names: str) -> _Reader:
    """Reads a processor whose first attribute, tokens, is banned or forced while the position compares so to the sum of
    its other attributes.
    """

    # If one token is forced, the greedy LM head need not compute all logits (`fastgen.decoding.lm_head`).
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
        # Releases that go through the sequences one by one compare the whole length of each with that of the input.
        return Signed((rewritten.SequenceBias, tuple(items), 1))
    groups = list(dict.fromkeys(len(sequence) for sequence, _ in items))
    return Signed((rewritten.SequenceBias, tuple(sorted(items, key=lambda item: groups.index(len(item[0])))), 0))


def _top_k(processor: Any, lengths: Lengths, kept: Any, filter_value: Any) -> Signed:
    most = min(_of_type(kept, int), _MOST_BY_TOP_K)
    room = power_of_two(max(most, _KEPT_BY_TOP_K))
    return Signed((rewritten.TopK, room, _of_type(filter_value, int, float)), numbers=(most,))


def _library(number: str | None = None, *names: str) -> _Reader:
    """Reads one of the library's own processors: a number of each call, and attributes that are frozen, by name."""
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
    # The last two attributes serve the library's continuous batching, where scores have three dimensions.
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

# Bounds for which the comparison is never true.
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
