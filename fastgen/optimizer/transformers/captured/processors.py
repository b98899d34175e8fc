"""Logits processors of Transformers in a form that a CUDA graph can capture.

The library's processors compare Python numbers with `input_ids.shape[-1]`. In a captured step the tokens are in a
buffer of a fixed size, and where they begin and end is on the device. So those that look at lengths or tokens are
written here for such a buffer, each with the result of the library's own, bit for bit in float32; those that look at
the scores alone are the library's. Nothing here waits for the device, copies from the host, or has a shape or a branch
that depends on values.

What is frozen in a capture is exactly what is in the signature. Numbers of a processor that follow one of the call's
(the prompt's length, the maximum length) are frozen as the difference from it, so that calls with other prompts share
a graph; tensors that change from call to call are copied into buffers that stay (`CapturedProcessor.refresh`).
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen.ops.no_repeat_ngram import no_repeat_ngram_
from fastgen.optimizer.transformers import logits

# Sizes of what is frozen are rounded up to a multiple of this, so that calls of about the same size share a graph.
_ROUNDING = 128


class StepTokens(NamedTuple):
    """The running sequences at a step, all on the device: a replay sees what is in these tensors then.

    Attributes:
        tokens: [rows, capacity], int64: a sequence in each row, in the places [start, length). Places in front of it
            hold -1, places behind it anything.
        start: 0-dim int64: how many places in front belong to no sequence (the filling of a bucket).
        length: 0-dim int64: where the sequences end. The library's current length is length - start.
        prompt: 0-dim int64: where the prompt ends. The library's length of the prompt is prompt - start.
        limit: 0-dim int64: the library's `max_length`, counted from `start`.
    """

    tokens: Tensor
    start: Tensor
    length: Tensor
    prompt: Tensor
    limit: Tensor


class CapturedProcessor:
    """A logits processor that can be captured."""

    def __call__(self, scores: Tensor, step: StepTokens) -> Tensor:
        """
        Args:
            scores: [rows, vocabulary], float32. They may be changed in place.
            step: the sequences that they continue.

        Returns:
            The processed scores, `scores` itself or a new tensor.
        """
        raise NotImplementedError

    def refresh(self, processor: Any) -> bool:
        """Takes over the tensors of another call's processor with the same signature.

        Returns:
            False if they do not fit into the buffers that are there; then nothing has been changed.
        """
        return True


def captured(
    processor: Any,
    device: torch.device,
    prompt_length: int,
    max_length: int,
    *,
    inputs: int | None = None,
    copies: int = 1,
) -> CapturedProcessor | None:
    """The capturable form of one of the library's processors.

    Args:
        processor: any logits processor. Its class must be one of the library's itself, not one derived from it.
        device: where the scores are going to be.
        prompt_length: the library's length of the prompt in this call, `StepTokens.prompt - StepTokens.start`.
        max_length: the library's `max_length` in this call, `StepTokens.limit`.
        inputs: inputs of the bucket, those that fill it included; the inputs of the call by default. Those come first.
        copies: rows of scores of each input: beams, or sequences that are returned.

    Returns:
        None if this processor cannot be captured: its class is not known, or it has parameters of an unknown kind.
    """
    plan = _plan(processor, prompt_length, max_length)
    if plan is None:
        return None
    made = plan.kind(_Place(device, inputs, copies), *plan.frozen)
    return made if made.refresh(processor) else None


def signature(processor: Any, prompt_length: int, max_length: int) -> Hashable | None:
    """All that is frozen in the capture of a processor: two of the same signature may share a graph.

    Arguments as of `captured`, the result of which may not fit for its buffers alone (`CapturedProcessor.refresh`).

    Returns:
        None if and only if this processor cannot be captured.
    """
    plan = _plan(processor, prompt_length, max_length)
    return None if plan is None else (type(processor).__name__, *plan.frozen)


class _Unknown(Exception):
    """A parameter of a kind that is not known."""


class _Plan(NamedTuple):
    """How a processor is captured: `kind(place, *frozen)`."""

    kind: Callable[..., CapturedProcessor]
    frozen: tuple[Any, ...]


class _Call(NamedTuple):
    """The numbers of a call that numbers of its processors follow."""

    prompt_length: int
    max_length: int


@dataclass(frozen=True)
class _Place:
    """Where constants and buffers are made, and for how many rows."""

    device: torch.device
    inputs: int | None
    copies: int


def _plan(processor: Any, prompt_length: int, max_length: int) -> _Plan | None:
    reader = _readers().get(type(processor))
    if reader is None:
        return None
    try:
        return reader(processor, _Call(prompt_length, max_length))
    except _Unknown:
        return None


def _attributes(processor: Any, *names: str, others: tuple[str, ...] = ()) -> tuple[Any, ...]:
    """The attributes of these names. There may be no more than these and `others`, which a release may have added."""
    found = vars(processor)
    if not set(names) <= found.keys() <= {*names, *others}:
        raise _Unknown
    return tuple(found[name] for name in names)


def _of_type(value: Any, *types: type) -> Any:
    if type(value) not in types:
        raise _Unknown
    return value


def _token_ids(value: Any) -> tuple[int, ...]:
    """Ids of tokens in order, each once. Negative ones are no tokens."""
    if not isinstance(value, Tensor) or (value.numel() and (value.is_floating_point() or value.is_complex())):
        raise _Unknown
    return tuple(sorted({int(token) for token in value.flatten().tolist() if token >= 0}))


# Where a step is, and what that is compared with ------------------------------------------------------------------


def _position(step: StepTokens, origin: str) -> Tensor:
    """The current length, measured from the start, from the prompt's end, or from the maximum length (negative)."""
    if origin == "prompt":
        return step.length - step.prompt
    length = step.length - step.start
    return length - step.limit if origin == "limit" else length


class _Columns:
    """The columns of the scores that belong to some tokens."""

    def __init__(self, place: _Place, tokens: tuple[int, ...]) -> None:
        self._tokens = tokens  # in order, so that those of a vocabulary come first
        self._index = torch.tensor(tokens, dtype=torch.int64, device=place.device)

    def known(self, scores: Tensor) -> Tensor:
        """Without tokens outside the vocabulary."""
        return self._index[: bisect_left(self._tokens, scores.shape[1])]

    def all(self, scores: Tensor) -> Tensor:
        known = self.known(scores)
        if len(known) < len(self._tokens):
            raise IndexError(f"token {self._tokens[-1]} is outside the vocabulary of {scores.shape[1]}")
        return known


def _fill_columns(scores: Tensor, index: Tensor, value: float, due: Tensor) -> Tensor:
    return scores.index_copy_(1, index, scores.index_select(1, index).masked_fill_(due, value))


class _Ban(CapturedProcessor):
    """Tokens that cannot come as long as the position is below a bound, or at one position."""

    def __init__(self, place: _Place, origin: str, below: bool, bound: int, tokens: tuple[int, ...]) -> None:
        self._origin, self._below, self._bound = origin, below, bound
        self._columns = _Columns(place, tokens)

    def __call__(self, scores: Tensor, step: StepTokens) -> Tensor:
        position = _position(step, self._origin)
        due = position < self._bound if self._below else position == self._bound
        return _fill_columns(scores, self._columns.known(scores), -math.inf, due)


class _BanAlways(CapturedProcessor):
    def __init__(self, place: _Place, tokens: tuple[int, ...]) -> None:
        self._columns = _Columns(place, tokens)

    def __call__(self, scores: Tensor, step: StepTokens) -> Tensor:
        return scores.index_fill_(1, self._columns.known(scores), -math.inf)


class _Force(CapturedProcessor):
    """Tokens of which one must come at one position."""

    def __init__(self, place: _Place, origin: str, at: int, tokens: tuple[int, ...]) -> None:
        self._origin, self._at = origin, at
        self._columns = _Columns(place, tokens)

    def __call__(self, scores: Tensor, step: StepTokens) -> Tensor:
        due = _position(step, self._origin) == self._at
        scores.masked_fill_(due, -math.inf)
        return _fill_columns(scores, self._columns.all(scores), 0.0, due)


def _min_length(processor: Any, call: _Call) -> _Plan:
    bound, ends = _attributes(processor, "min_length", "eos_token_id")
    return _Plan(_Ban, ("start", True, _of_type(bound, int), _token_ids(ends)))


def _min_new_tokens(processor: Any, call: _Call) -> _Plan:
    prompt, new, ends = _attributes(processor, "prompt_length_to_skip", "min_new_tokens", "eos_token_id")
    bound = _of_type(prompt, int) - call.prompt_length + _of_type(new, int)
    return _Plan(_Ban, ("prompt", True, bound, _token_ids(ends)))


def _suppress_at_begin(processor: Any, call: _Call) -> _Plan:
    tokens, begin = _attributes(processor, "begin_suppress_tokens", "begin_index")
    return _Plan(_Ban, ("prompt", False, _of_type(begin, int) - call.prompt_length, _token_ids(tokens)))


def _suppress(processor: Any, call: _Call) -> _Plan:
    (tokens,) = _attributes(processor, "suppress_tokens")
    return _Plan(_BanAlways, (_token_ids(tokens),))


def _forced_bos(processor: Any, call: _Call) -> _Plan:
    (token,) = _attributes(processor, "bos_token_id")
    if _of_type(token, int) < 0:
        raise _Unknown
    return _Plan(_Force, ("start", 1, (token,)))


def _forced_eos(processor: Any, call: _Call) -> _Plan:
    limit, ends = _attributes(processor, "max_length", "eos_token_id")
    return _Plan(_Force, ("limit", _of_type(limit, int) - call.max_length - 1, _token_ids(ends)))


# Penalties --------------------------------------------------------------------------------------------------------


class _Buffer:
    """A tensor that changes from call to call, at an address that does not."""

    def __init__(self, place: _Place, shape: tuple[int, ...], fill: int) -> None:
        self._fill = fill
        self.tensor = torch.full(shape, fill, dtype=torch.int64, device=place.device)

    def refill(self, values: Tensor) -> bool:
        """Whether `values` fit, which are then in the buffer, at its beginning."""
        if values.dim() != self.tensor.dim() or any(
            size > room for size, room in zip(values.shape, self.tensor.shape, strict=True)
        ):
            return False
        self.tensor.fill_(self._fill)
        self.tensor[tuple(slice(size) for size in values.shape)].copy_(values)
        return True


def _penalise(scores: Tensor, tokens: Tensor, penalty: float) -> Tensor:
    """Multiplies or divides the score of each of `tokens`, [rows, any], once; other numbers are no tokens.

    As in the n-gram operator, every place writes: those that hold no token repeat what another one of their row
    writes, and where there is none, the score that is there.
    """
    tokens = torch.where(tokens < scores.shape[1], tokens, -1)
    spare = tokens.amax(dim=1, keepdim=True)
    index = torch.where(tokens >= 0, tokens, spare.clamp(min=0))
    found = scores.gather(1, index)
    changed = torch.where(found < 0, found * penalty, found / penalty)
    return scores.scatter_(1, index, torch.where(spare >= 0, changed, found))


class _RepetitionPenalty(CapturedProcessor):
    """Keskar et al., "CTRL" (2019), section 4.1."""

    _ROWS = "rows"  # how much of the prompt is left out is a number of each row

    def __init__(self, place: _Place, penalty: float, ignored: int | str | None) -> None:
        self._place, self._penalty = place, penalty
        self._ignored = ignored
        self._ignored_rows: _Buffer | None = None

    def __call__(self, scores: Tensor, step: StepTokens) -> Tensor:
        tokens = step.tokens
        places = torch.arange(tokens.shape[1], device=tokens.device)
        counts = places < step.length  # those in front hold no tokens
        if isinstance(self._ignored, int):
            counts &= places - step.prompt >= self._ignored
        elif self._ignored_rows is not None:
            ignored = self._ignored_rows.tensor
            if len(ignored) != len(tokens):
                raise ValueError(f"prompt_ignore_length has {len(ignored)} elements for {len(tokens)} rows")
            counts = counts & (places - step.start >= ignored.unsqueeze(1))
        return _penalise(scores, torch.where(counts, tokens, -1), self._penalty)

    def refresh(self, processor: Any) -> bool:
        if self._ignored != self._ROWS:
            return True
        rows = processor.prompt_ignore_length
        if self._ignored_rows is None:
            inputs = self._place.inputs
            self._ignored_rows = _Buffer(
                self._place, (len(rows) if inputs is None else inputs * self._place.copies,), 0
            )
        return self._ignored_rows.refill(rows)


class _EncoderTokens(CapturedProcessor):
    """What processors that look at the encoder's input have in common: its tokens, [inputs, length], -1 behind them."""

    def __init__(self, place: _Place, width: int) -> None:
        self._place, self._width = place, width
        self._buffer: _Buffer | None = None

    @property
    def tokens(self) -> Tensor:
        assert self._buffer is not None  # filled by `captured`
        return self._buffer.tensor

    def refresh(self, processor: Any) -> bool:
        tokens = _encoder_tokens(processor)
        if self._buffer is None:
            inputs = self._place.inputs
            self._buffer = _Buffer(self._place, (len(tokens) if inputs is None else inputs, self._width), -1)
        return self._buffer.refill(tokens)


class _EncoderRepetitionPenalty(_EncoderTokens):
    def __init__(self, place: _Place, penalty: float, width: int) -> None:
        super().__init__(place, width)
        self._penalty = penalty
        self._all_rows = _all_rows_have_encoder_tokens()

    def __call__(self, scores: Tensor, step: StepTokens) -> Tensor:
        tokens = self.tokens
        if not self._all_rows:
            _penalise(scores[: len(tokens)], tokens, self._penalty)
            return scores
        return _penalise(scores, tokens.repeat_interleave(len(scores) // len(tokens), dim=0), self._penalty)


class _LengthPenalty(CapturedProcessor):
    """Scores of the end that grow exponentially with the length."""

    def __init__(self, place: _Place, start: int, factor: float, steps: int, tokens: tuple[int, ...]) -> None:
        self._start = start
        # As the library has them, in double precision; a power on the device may differ in the last place.
        factors = [pow(factor, step) - 1 for step in range(steps)]
        self._factors = torch.tensor(factors, dtype=torch.float32, device=place.device)
        self._columns = _Columns(place, tokens)
        self._finite_only = _length_penalty_is_finite()

    def __call__(self, scores: Tensor, step: StepTokens) -> Tensor:
        steps = _position(step, "prompt") - self._start
        factor = self._factors.index_select(0, steps.clamp(0, len(self._factors) - 1).view(1))
        index = self._columns.all(scores)
        found = scores.index_select(1, index)
        penalty = found.abs() * factor
        if self._finite_only:
            penalty = penalty.masked_fill(~found.isfinite(), 0.0)
        return scores.index_copy_(1, index, torch.where(steps > 0, found + penalty, found))


def _repetition_penalty(processor: Any, call: _Call) -> _Plan:
    # The other two are for the library's continuous batching, where scores have three dimensions.
    penalty, ignored, *unused = _attributes(
        processor, "penalty", "prompt_ignore_length", "logits_indices", "cu_seq_lens_q"
    )
    if any(value is not None for value in unused):
        raise _Unknown
    if isinstance(ignored, Tensor):
        if ignored.dim() != 1 or ignored.is_floating_point():
            raise _Unknown
        ignored = _RepetitionPenalty._ROWS
    elif ignored is not None:
        ignored = _of_type(ignored, int) - call.prompt_length
    return _Plan(_RepetitionPenalty, (_of_type(penalty, float), ignored))


def _encoder_tokens(processor: Any) -> Tensor:
    """The tokens of the encoder's input, [inputs, length], as the library or FastGen has kept them."""
    tokens = getattr(processor, "encoder_input_ids", getattr(processor, logits.ENCODER_TOKENS, None))
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.is_floating_point() or not tokens.numel():
        raise _Unknown
    return tokens


def _encoder_width(processor: Any) -> int:
    tokens = _encoder_tokens(processor)
    if tokens.amin() < 0:
        raise _Unknown
    return _rounded(tokens.shape[1])


def _rounded(size: int) -> int:
    return -(-size // _ROUNDING) * _ROUNDING


def _encoder_repetition_penalty(processor: Any, call: _Call) -> _Plan:
    penalty, _ = _attributes(processor, "penalty", "encoder_input_ids")
    return _Plan(_EncoderRepetitionPenalty, (_of_type(penalty, float), _encoder_width(processor)))


def _length_penalty(processor: Any, call: _Call) -> _Plan:
    start, factor, ends = _attributes(processor, "regulation_start", "regulation_factor", "eos_token_id")
    steps = _rounded(max(call.max_length - _of_type(start, int), 1))
    try:
        pow(_of_type(factor, float), steps)
    except OverflowError as error:  # which the library raises once it comes so far
        raise _Unknown from error
    return _Plan(_LengthPenalty, (start - call.prompt_length, factor, steps, _token_ids(ends)))


# Sequences --------------------------------------------------------------------------------------------------------


class _NoRepeatNGram(CapturedProcessor):
    # The -1 in front of a sequence are in no n-gram that one of its tokens begins or would complete.
    def __init__(self, place: _Place, n: int) -> None:
        self._n = n

    def __call__(self, scores: Tensor, step: StepTokens) -> Tensor:
        return no_repeat_ngram_(scores, step.tokens, self._n, step.length.expand(len(scores)))


class _EncoderNoRepeatNGram(_EncoderTokens):
    # Nor are those behind the encoder's tokens: an n-gram that has one of them ends with one, and that is no token.
    def __init__(self, place: _Place, n: int, width: int) -> None:
        super().__init__(place, width)
        self._n = n

    def __call__(self, scores: Tensor, step: StepTokens) -> Tensor:
        return no_repeat_ngram_(scores, step.tokens, self._n, step.length.expand(len(scores)), context=self.tokens)


_Biases = tuple[tuple[tuple[int, ...], float], ...]


class _SequenceBias(CapturedProcessor):
    """Numbers added to the scores of tokens that would complete some sequences.

    Args:
        biases: each sequence, of at least one token, and its number, in the order in which the library adds them up.
        more: by how much a running sequence must be longer than what comes before the last token of one of `biases`.
    """

    def __init__(self, place: _Place, biases: _Biases, more: int) -> None:
        device = place.device
        self._largest = max((token for sequence, _ in biases for token in sequence), default=-1)
        columns = sorted({sequence[-1] for sequence, _ in biases})
        column = {token: place for place, token in enumerate(columns)}
        self._columns = torch.tensor(columns, dtype=torch.int64, device=device)

        first = torch.zeros(len(columns))
        for sequence, bias in biases:
            if len(sequence) == 1:
                first[column[sequence[0]]] += bias
        self._first = first.to(device)

        # Sequences of one length are compared at once.
        long = [(sequence, bias) for sequence, bias in biases if len(sequence) > 1]
        by_length = sorted(range(len(long)), key=lambda i: len(long[i][0]))
        lengths = [len(long[i][0]) - 1 for i in by_length]
        self._longest = max(lengths, default=0)
        self._prefixes = [
            torch.tensor(
                [long[i][0][:-1] for i, n in zip(by_length, lengths, strict=True) if n == length], device=device
            )
            for length in sorted(set(lengths))
        ]
        self._least = torch.tensor([length + more for length in lengths], dtype=torch.int64, device=device)

        # Sums of different numbers depend on their order: in one round of additions a column gets one of them.
        place_of = {i: place for place, i in enumerate(by_length)}
        rounds: list[list[int]] = []
        seen: dict[int, list[float]] = {}
        for i, (sequence, bias) in enumerate(long):
            before = seen.setdefault(sequence[-1], [])
            if not before or before[-1] != bias:
                before.append(bias)
            if len(before) > len(rounds):
                rounds.append([])
            rounds[len(before) - 1].append(i)
        self._rounds = [
            (
                torch.tensor([place_of[i] for i in members], device=device),
                torch.tensor([column[long[i][0][-1]] for i in members], device=device),
                torch.tensor([long[i][1] for i in members], dtype=torch.float32, device=device),
            )
            for members in rounds
        ]

    def __call__(self, scores: Tensor, step: StepTokens) -> Tensor:
        rows, vocabulary = scores.shape
        if self._largest >= vocabulary:
            raise ValueError(f"token {self._largest} is biased, but the vocabulary has {vocabulary}")
        sums = self._first.repeat(rows, 1)
        if self._prefixes:
            completed = self._completed(step)
            for members, columns, biases in self._rounds:
                missing = ~completed.index_select(1, members)
                sums.index_add_(1, columns, biases.repeat(rows, 1).masked_fill_(missing, 0.0))
        return scores.index_copy_(1, self._columns, scores.index_select(1, self._columns) + sums)

    def _completed(self, step: StepTokens) -> Tensor:
        """Which of the sequences lack but their last token, [rows, sequences of more than one token]."""
        places = step.length - self._longest + torch.arange(self._longest, device=step.tokens.device)
        last = step.tokens.index_select(1, places.clamp(min=0)).unsqueeze(1)
        equal = [(last[:, :, -prefixes.shape[1] :] == prefixes).all(dim=2) for prefixes in self._prefixes]
        return torch.cat(equal, dim=1) & (step.length - step.start >= self._least)


def _no_repeat_ngram(processor: Any, call: _Call) -> _Plan:
    (n,) = _attributes(processor, "ngram_size")
    return _Plan(_NoRepeatNGram, (_of_type(n, int),))


def _encoder_no_repeat_ngram(processor: Any, call: _Call) -> _Plan:
    n, *_ = _attributes(processor, "ngram_size", "batch_size", "generated_ngrams", logits.ENCODER_TOKENS)
    return _Plan(_EncoderNoRepeatNGram, (_of_type(n, int), _encoder_width(processor)))


def _sequence_bias(processor: Any, call: _Call) -> _Plan:
    grouped = "multi_token_biases"
    (biases,) = _attributes(
        processor,
        "sequence_bias",
        others=("bad_word_ids", "length_1_bias", "prepared_bias_variables", grouped),
    )
    items = [(tuple(int(token) for token in sequence), _of_type(bias, float)) for sequence, bias in biases.items()]
    if not all(sequence for sequence, _ in items):
        raise _Unknown
    if not hasattr(processor, grouped):
        # Releases that go through the sequences one by one compare their whole length with that of the input.
        return _Plan(_SequenceBias, (tuple(items), 1))
    lengths = list(dict.fromkeys(len(sequence) for sequence, _ in items))
    return _Plan(_SequenceBias, (tuple(sorted(items, key=lambda item: lengths.index(len(item[0])))), 0))


# The library's own ------------------------------------------------------------------------------------------------


class _Library(CapturedProcessor):
    """A processor that looks at nothing but the scores, and consists of operations that can be captured."""

    def __init__(self, place: _Place, kind: type, values: tuple[tuple[str, Any], ...]) -> None:
        self._processor: Any = object.__new__(kind)
        self._processor.__dict__.update(values)

    def __call__(self, scores: Tensor, step: StepTokens) -> Tensor:
        return self._processor(step.tokens, scores)


class _Eta(CapturedProcessor):
    """Hewitt et al., "Truncation Sampling as Language Model Desmoothing" (2022), section 3."""

    def __init__(self, place: _Place, epsilon: float, filter_value: float, keep: int) -> None:
        self._epsilon = torch.tensor(epsilon, device=place.device)
        self._filter_value, self._keep = filter_value, keep

    def __call__(self, scores: Tensor, step: StepTokens) -> Tensor:
        # The library's distribution validates its arguments, which waits for the device.
        entropy = torch.distributions.Categorical(logits=scores, validate_args=False).entropy()
        eta = torch.min(self._epsilon, self._epsilon.sqrt() * torch.exp(-entropy)).unsqueeze(1)
        kept = scores.topk(min(self._keep, scores.shape[1])).values[:, -1:]
        return scores.masked_fill((scores.softmax(dim=-1) < eta) & (scores < kept), self._filter_value)


def _library(*names: str, others: tuple[str, ...] = ()) -> Callable[[Any, _Call], _Plan]:
    """The library's own, with numbers of these names."""

    def read(processor: Any, call: _Call) -> _Plan:
        values = _attributes(processor, *names, others=others)
        numbers = tuple(_of_type(value, int, float) for value in values)
        return _Plan(_Library, (type(processor), tuple(zip(names, numbers, strict=True))))

    return read


def _eta(processor: Any, call: _Call) -> _Plan:
    epsilon, filter_value, keep = _attributes(processor, "epsilon", "filter_value", "min_tokens_to_keep")
    if not isinstance(epsilon, Tensor) or epsilon.dim() or epsilon.dtype is not torch.float32:
        raise _Unknown
    return _Plan(_Eta, (epsilon.item(), _of_type(filter_value, int, float), _of_type(keep, int)))


@functools.cache
def _readers() -> dict[type, Callable[[Any, _Call], _Plan]]:
    from transformers.generation import logits_process

    kept = ("filter_value", "min_tokens_to_keep")
    readers = {
        "MinLengthLogitsProcessor": _min_length,
        "MinNewTokensLengthLogitsProcessor": _min_new_tokens,
        "SuppressTokensAtBeginLogitsProcessor": _suppress_at_begin,
        "SuppressTokensLogitsProcessor": _suppress,
        "ForcedBOSTokenLogitsProcessor": _forced_bos,
        "ForcedEOSTokenLogitsProcessor": _forced_eos,
        "RepetitionPenaltyLogitsProcessor": _repetition_penalty,
        "EncoderRepetitionPenaltyLogitsProcessor": _encoder_repetition_penalty,
        "ExponentialDecayLengthPenalty": _length_penalty,
        "NoRepeatNGramLogitsProcessor": _no_repeat_ngram,
        "EncoderNoRepeatNGramLogitsProcessor": _encoder_no_repeat_ngram,
        "SequenceBiasLogitsProcessor": _sequence_bias,
        "NoBadWordsLogitsProcessor": _sequence_bias,
        "TemperatureLogitsWarper": _library("temperature"),
        "TopKLogitsWarper": _library("top_k", "filter_value", others=("min_tokens_to_keep",)),
        "TopPLogitsWarper": _library("top_p", *kept),
        "MinPLogitsWarper": _library("min_p", *kept),
        "TypicalLogitsWarper": _library("mass", *kept),
        "EpsilonLogitsWarper": _library("epsilon", *kept),
        "EtaLogitsWarper": _eta,
        "InfNanRemoveLogitsProcessor": _library(),
        "LogitNormalization": _library(),
    }
    return {getattr(logits_process, name): reader for name, reader in readers.items() if hasattr(logits_process, name)}


# Releases that differ in more than names are asked on two scores ---------------------------------------------------


@functools.cache
def _all_rows_have_encoder_tokens() -> bool:
    """Whether beams share the encoder's tokens of their input, or only as many rows as there are inputs get some."""
    from transformers.generation import logits_process

    kind: Any = logits_process.EncoderRepetitionPenaltyLogitsProcessor
    processor = kind(2.0, torch.tensor([[0]]))
    return processor(torch.tensor([[0], [0]]), torch.ones(2, 1))[1, 0].item() != 1


@functools.cache
def _length_penalty_is_finite() -> bool:
    """Whether an end that is banned stays so, or becomes NaN."""
    from transformers.generation import logits_process

    kind: Any = logits_process.ExponentialDecayLengthPenalty
    processor = kind((0, 2.0), 0, 0)
    return not processor(torch.tensor([[0]]), torch.tensor([[-math.inf]])).isnan().item()
