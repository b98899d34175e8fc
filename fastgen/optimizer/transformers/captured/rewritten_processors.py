"""The library's logits processors for a captured step: rewritten, or its own objects if they only read scores.

In a captured step, tokens are in a buffer of a fixed size, and only the device knows where sequences begin and end.
Each class gives the result of the library's processor for such a buffer, bit for bit in float32. Nothing here waits for
the device, copies from the host, or has a shape or a branch that depends on values. What differs between calls, or
between the inputs of a step, is in tensors whose addresses a recording keeps: `Number` and `Buffer`.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen.decoding.captured.search import Search
from fastgen.ops.no_repeat_ngram import no_repeat_ngram_
from fastgen.ops.search_step import EVERYTHING, top_p_


class StepTokens(NamedTuple):
    """The running sequences at a step, in int64 tensors on the device, whose present contents a replay reads."""

    tokens: Tensor  # [rows, capacity]: in each row a sequence at [start, length), -1 before it, anything after it
    start: Tensor  # [rows, 1] or 0-dim, like the others: number of positions before the sequence
    length: Tensor  # index at which the sequences end: the library's current length is length - start
    prompt: Tensor  # index at which the prompt ends: the library's prompt length is prompt - start
    limit: Tensor  # the library's `max_length`, counted from `start`

    @classmethod
    def of(cls, search: Search, ahead: Tensor | int = 0) -> StepTokens:
        """Returns those of a search, with `ahead` tokens after the ends of its sequences."""
        start, length, limit = (x.view(-1, 1) for x in (search.start, search.length, search.limit))
        length = length if type(ahead) is int and ahead == 0 else length + ahead
        return cls(search.running_tokens, start, length, search.prompt, limit - start)


class Bucket(NamedTuple):
    """What constants and buffers of processors are made for."""

    device: torch.device  # of the scores
    inputs: int  # number of inputs of the step; those of the call come first
    per_input: int  # rows of each input
    vocabulary: int  # number of scores of a row
    slots: bool = False  # inputs come and go: each has its own numbers
    is_float32: bool = True  # the model computes in float32, so that few scores are equal


class Buffer:
    """A tensor whose contents change from call to call, and whose address does not."""

    def __init__(self, bucket: Bucket, per_input: int, *width: int, fill: int | bool) -> None:
        self._per_input, self._fill, size = per_input, fill, (bucket.inputs * per_input, *width)
        self.tensor = torch.full(size, fill, device=bucket.device)  # of the type of `fill`

    def of(self, place: int) -> Tensor:
        """Returns the rows of an input."""
        return self.tensor[place * self._per_input : (place + 1) * self._per_input]

    def of_batch(self, batch: int) -> Buffer:
        """Returns a buffer for `batch` inputs."""
        other = copy.copy(self)
        other.tensor = self.tensor.new_full((batch * self._per_input, *self.tensor.shape[1:]), self._fill)
        return other

    def refill(self, values: Tensor) -> bool:
        """Writes `values` to the beginning of the buffer, and fills the rest. Returns False if they do not fit."""
        if any(size > capacity for size, capacity in zip(values.shape, self.tensor.shape, strict=True)):
            return False
        self.tensor.fill_(self._fill)
        self.tensor[tuple(slice(size) for size in values.shape)].copy_(values)
        return True


class Number(Buffer):
    """A number that each call sets, or each input of a step with slots.

    The operators that the library's processors use compute with it as with a Python number: in double precision with
    other numbers, and in a tensor's dtype with a tensor.

    Attributes:
        tensor: 0-dim, or [rows, 1] with slots.
    """

    def __init__(self, bucket: Bucket, dtype: torch.dtype = torch.float64) -> None:
        self._per_input, size = bucket.per_input, list[int]()
        if bucket.slots:
            assert bucket.device.type == "cpu", "slots are on the CPU"
            size = [bucket.inputs * bucket.per_input, 1]
        self.tensor = torch.zeros(size, dtype=dtype, device=bucket.device)
        # A GPU divides by a host number by multiplying with its inverse.
        self._inverse = torch.zeros((), dtype=torch.float32, device=bucket.device) if self.tensor.is_cuda else None

    def put(self, value: float, target: int | None) -> None:
        """Sets the number of an input, if each has its own, or of all inputs."""
        (self.tensor if target is None else self.of(target)).fill_(value)
        if self._inverse is not None:
            self._inverse.fill_(value).reciprocal_()

    def insert(self, other: Number, source: int, target: int) -> None:
        """Takes over the number of an input. Does nothing if all inputs share one number."""
        if self.tensor.dim():
            self.of(target).copy_(other.of(source))

    def of_batch(self, batch: int) -> Number:
        """Returns a number for `batch` inputs, with the value of the first input."""
        other = copy.copy(self)
        if self.tensor.dim():
            other.tensor = self.tensor[:1].repeat(batch * self._per_input, 1)
        return other

    def _like(self, x: Tensor) -> Tensor:
        return self.tensor.to(x.dtype) if self.tensor.dim() else self.tensor

    def __mul__(self, x: Tensor) -> Tensor:
        return x * self._like(x)

    __rmul__ = __mul__

    def __rtruediv__(self, x: Tensor) -> Tensor:
        return x / self._like(x) if self._inverse is None else x * self._inverse

    def __gt__(self, x: Tensor) -> Tensor:
        return x < self._like(x)


class CapturedProcessor:
    """A logits processor that can be captured.

    Buffers, which `refresh` fills, and numbers hold what differs between processors of one signature.

    Attributes:
        reads_tokens: its operations depend on the length of the sequences' buffer.
        reads_source: it holds the encoder's input of each sequence.
        reads_scores_alone: it reads only scores, row by row.
        is_of_any_rows: it does the same for any number of rows, and for rows of unequal lengths.
        neutral: numbers with which it changes no bit of a row.
    """

    reads_tokens = reads_source = reads_scores_alone = is_of_any_rows = False
    neutral: tuple[float, ...] | None = None

    def __call__(self, scores: Tensor, step: StepTokens) -> Tensor:
        """Processes the scores of the next tokens, [rows, vocabulary] in float32, maybe in place."""
        raise NotImplementedError

    def refresh(self, *data: Any) -> bool:
        """Takes over the data of a call's processor of this signature, as in `processors.Signed`.

        Returns False if they do not fit into the buffers. Nothing has been changed then.
        """
        return not data

    @property
    def numbers(self) -> list[Number]:
        """The numbers, in the order of those in `processors.Signed`."""
        return [each for each in vars(self).values() if isinstance(each, Number)]

    def insert(self, other: CapturedProcessor, source: int, target: int) -> None:
        """Takes over the numbers of the input at `source` in another processor of this signature."""
        for own, each in zip(self.numbers, other.numbers, strict=True):
            own.insert(each, source, target)

    def put(self, numbers: Sequence[float], target: int | None = None) -> None:
        """Sets the numbers of an input, or of all inputs."""
        for own, value in zip(self.numbers, numbers, strict=True):
            own.put(value, target)

    def of_batch(self, batch: int) -> CapturedProcessor:
        """Returns one for `batch` inputs that a recording cannot tell from this one. They share data without rows."""
        other = copy.copy(self)
        vars(other).update({k: each.of_batch(batch) for k, each in vars(self).items() if isinstance(each, Buffer)})
        return other


# Tokens that are banned or forced ---------------------------------------------------------------------------------


class When(NamedTuple):
    """A comparison, such as `torch.lt`, of the current length with a number that each call sets.

    The length is counted from the "start", from the end of the "prompt", or, with the next token, from the "limit".
    """

    compare: Callable[..., Tensor]
    origin: str

    def __call__(self, step: StepTokens, bound: Tensor) -> Tensor:
        position = step.length - (step.prompt if self.origin == "prompt" else step.start)
        return self.compare(position + 1 - step.limit if self.origin == "limit" else position, bound)


def _fill_columns(scores: Tensor, index: Tensor, value: float, due: Tensor) -> Tensor:
    return scores.index_copy_(1, index, scores.index_select(1, index).masked_fill_(due, value))


class _AtSomePositions(CapturedProcessor):
    """Tokens that are treated specially at some positions, or, without `when`, at all of them.

    `_columns`, [room], int64, repeats the first token if there are fewer. `_is_any` says whether any of the tokens is
    in the vocabulary.
    """

    is_of_any_rows = True
    skips = False  # whether tokens outside the vocabulary are skipped; otherwise such a processor is not captured

    def __init__(self, bucket: Bucket, room: int, when: When | None = None) -> None:
        self._vocabulary, self._when = bucket.vocabulary, when
        self._columns = torch.zeros(room, dtype=torch.int64, device=bucket.device)
        self._is_any = torch.zeros(1, dtype=torch.bool, device=bucket.device)
        self._bound = Number(bucket, torch.int64)

    def refresh(self, tokens: tuple[int, ...]) -> bool:
        known = tokens[: bisect_left(tokens, self._vocabulary)]
        if len(tokens) > len(self._columns) or (len(known) < len(tokens) and not self.skips):
            return False
        filled = known + known[:1] * (len(self._columns) - len(known)) if known else (0,) * len(self._columns)
        self._columns.copy_(torch.tensor(filled, dtype=torch.int64))
        self._is_any.fill_(bool(known))
        return True

    def _is_due(self, step: StepTokens) -> Tensor:
        return self._is_any if self._when is None else self._is_any & self._when(step, self._bound.tensor)


class Ban(_AtSomePositions):
    """Tokens that are banned at some positions, or at all."""

    skips = True

    def __call__(self, scores: Tensor, step: StepTokens) -> Tensor:
        return _fill_columns(scores, self._columns, -math.inf, self._is_due(step))


class Force(_AtSomePositions):
    """Tokens of which one is forced at some position."""

    def __call__(self, scores: Tensor, step: StepTokens) -> Tensor:
        due = self._is_due(step)
        scores.masked_fill_(due, -math.inf)
        return _fill_columns(scores, self._columns, 0.0, due)


# Penalties --------------------------------------------------------------------------------------------------------


def _penalise(scores: Tensor, tokens: Tensor, penalty: Number) -> Tensor:
    """Multiplies or divides the score of each of `tokens`, [rows, any], once. Ignores numbers outside the vocabulary.

    As in the n-gram operator, every element writes: elements without a token repeat the write of another element of
    their row. If a row has no token, they write the present score.
    """
    tokens = torch.where(tokens < scores.shape[1], tokens, -1)
    spare = tokens.amax(dim=1, keepdim=True)
    index = torch.where(tokens >= 0, tokens, spare.clamp(min=0))
    found = scores.gather(1, index)
    changed = torch.where(found < 0, penalty * found, found / penalty)
    return scores.scatter_(1, index, torch.where(spare >= 0, changed, found))


class RepetitionPenalty(CapturedProcessor):
    """Keskar et al., "CTRL" (2019), section 4.1. With `leaves_out`, each row ignores its own number of positions."""

    reads_tokens = is_of_any_rows = True
    neutral = (1.0,)

    def __init__(self, bucket: Bucket, leaves_out: bool) -> None:
        self._penalty, self._leaves_out = Number(bucket), leaves_out
        self._ignored_rows = Buffer(bucket, bucket.per_input, fill=0)

    def __call__(self, scores: Tensor, step: StepTokens) -> Tensor:
        positions = torch.arange(step.tokens.shape[1], device=step.tokens.device)
        counts = positions < step.length  # positions before the start hold no tokens
        if self._leaves_out:
            counts = counts & (positions - step.start >= self._ignored_rows.tensor.unsqueeze(1))
        return _penalise(scores, torch.where(counts, step.tokens, -1), self._penalty)

    def refresh(self, ignored: Tensor | None) -> bool:
        return ignored is None or self._ignored_rows.refill(ignored)


# Sequences --------------------------------------------------------------------------------------------------------


class NoRepeatNGram(CapturedProcessor):
    # The -1 before a sequence are in no n-gram that one of its tokens begins or would complete.
    reads_tokens = is_of_any_rows = True

    def __init__(self, bucket: Bucket, n: int) -> None:
        self._n = n

    def __call__(self, scores: Tensor, step: StepTokens) -> Tensor:
        return no_repeat_ngram_(scores, step.tokens, self._n, step.length.view(-1).expand(len(scores)))


class EncoderNoRepeatNGram(CapturedProcessor):
    """Uses the tokens of the encoder's input, [inputs, length], followed by -1.

    An n-gram that contains a -1 ends with one, which is no token.
    """

    reads_tokens = reads_source = True

    def __init__(self, bucket: Bucket, width: int, n: int) -> None:
        self._encoder, self._n = Buffer(bucket, 1, width, fill=-1), n

    def refresh(self, tokens: Tensor) -> bool:
        return self._encoder.refill(tokens)

    def __call__(self, scores: Tensor, step: StepTokens) -> Tensor:
        lengths = step.length.view(-1).expand(len(scores))
        return no_repeat_ngram_(scores, step.tokens, self._n, lengths, context=self._encoder.tensor)


class SequenceBias(CapturedProcessor):
    """Adds numbers to the scores of tokens that would complete given sequences.

    Args:
        biases: each sequence, of at least one token, and its number, in the order in which the library adds them.
        more: by how much a running sequence must be longer than the tokens before the last one of the biased sequence.
    """

    reads_tokens = is_of_any_rows = True

    def __init__(self, bucket: Bucket, biases: tuple[tuple[tuple[int, ...], float], ...], more: int) -> None:
        def constant(values: list[Any], dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=bucket.device)

        self._largest = max((token for sequence, _ in biases for token in sequence), default=-1)
        columns = {token: i for i, token in enumerate(sorted({sequence[-1] for sequence, _ in biases}))}
        single = {sequence[0]: bias for sequence, bias in biases if len(sequence) == 1}
        self._columns = constant(list(columns))
        self._single = constant([single.get(token, 0.0) for token in columns], torch.float32)

        # All sequences are compared at once. Shorter ones are preceded by -1, which matches any token.
        long = [(sequence[:-1], columns[sequence[-1]], bias) for sequence, bias in biases if len(sequence) > 1]
        self._longest = max((len(prefix) for prefix, _, _ in long), default=0)
        self._prefixes = constant([(-1,) * (self._longest - len(prefix)) + prefix for prefix, _, _ in long])
        self._is_any = self._prefixes < 0
        self._least = constant([len(prefix) + more for prefix, _, _ in long])

        # Sums of different numbers depend on their order, so a column gets only one of them in each round of additions.
        different: dict[int, list[float]] = {}
        rounds: dict[int, list[int]] = {}
        for i, (_, column, bias) in enumerate(long):
            before = different.setdefault(column, [])
            if before[-1:] != [bias]:
                before.append(bias)
            rounds.setdefault(len(before), []).append(i)
        self._rounds = [
            (
                constant(members),
                constant([long[i][1] for i in members]),
                constant([long[i][2] for i in members], torch.float32),
            )
            for members in rounds.values()
        ]

    def __call__(self, scores: Tensor, step: StepTokens) -> Tensor:
        rows, vocabulary = scores.shape
        if self._largest >= vocabulary:
            raise ValueError(f"token {self._largest} is biased, but the vocabulary has {vocabulary}")
        sums = self._single.repeat(rows, 1)
        if self._rounds:
            missing = ~self._completed(step)
            for members, columns, biases in self._rounds:
                sums.index_add_(1, columns, biases.repeat(rows, 1).masked_fill_(missing.index_select(1, members), 0.0))
        return scores.index_copy_(1, self._columns, scores.index_select(1, self._columns) + sums)

    def _completed(self, step: StepTokens) -> Tensor:
        """Returns which sequences lack only their last token, [rows, sequences of more than one token]."""
        positions = step.length - self._longest + torch.arange(self._longest, device=step.tokens.device)
        last = step.tokens.gather(1, positions.clamp(min=0).expand(len(step.tokens), -1)).unsqueeze(1)
        equal = ((last == self._prefixes) | self._is_any).all(dim=2)
        return equal & (step.length - step.start >= self._least)


# Scores alone ---------------------------------------------------------------------------------------------------


class _OfScores(CapturedProcessor):
    reads_scores_alone = is_of_any_rows = True


class Library(_OfScores):
    """The library's own processor, if it reads only scores, and its operations can be captured.

    Args:
        frozen: its attributes.
        names: names of attributes that are numbers of each call.
    """

    # Without the mass of typical sampling, which sorts the vocabulary of each row, and so takes longer than a row's
    # share of a step.
    NEUTRAL = {"temperature": 1.0, "min_p": 0.0, "epsilon": 0.0}

    def __init__(self, bucket: Bucket, kind: type, frozen: tuple[tuple[str, Any], ...], names: tuple[str, ...]) -> None:
        self._processor: Any = object.__new__(kind)
        self._processor.__dict__.update(frozen, **{name: Number(bucket) for name in names})
        self._names = names

    @property
    def numbers(self) -> list[Number]:
        return [self._processor.__dict__[name] for name in self._names]

    def of_batch(self, batch: int) -> CapturedProcessor:
        other = copy.copy(self)
        other._processor = copy.copy(self._processor)
        numbers = zip(self._names, self.numbers, strict=True)
        other._processor.__dict__.update({name: number.of_batch(batch) for name, number in numbers})
        return other

    def __call__(self, scores: Tensor, step: StepTokens) -> Tensor:
        return self._processor(step.tokens, scores)


class TopK(_OfScores):
    """Fan et al., "Hierarchical Neural Story Generation" (2018), section 5.1. Keeps at most `room` tokens."""

    ALL = 0  # as the number: keeps all tokens
    neutral = (ALL,)

    def __init__(self, bucket: Bucket, room: int, filter_value: float) -> None:
        self._room, self._filter_value = room, filter_value
        self._kept = Number(bucket, torch.int64)

    def __call__(self, scores: Tensor, step: StepTokens) -> Tensor:
        best = scores.topk(min(self._room, scores.shape[1])).values
        kept = self._kept.tensor
        last = (kept - 1).clamp(0, best.shape[1] - 1).expand(len(scores), 1)
        goes = (scores < best.gather(1, last)) & (kept != self.ALL)
        return scores.masked_fill(goes, self._filter_value)


class TopP(_OfScores):
    """Holtzman et al., "The Curious Case of Neural Text Degeneration" (2020), section 3.1. On a CPU."""

    neutral = (EVERYTHING,)

    def __init__(self, bucket: Bucket, filter_value: float, least: int) -> None:
        self._share = Number(bucket)
        self._filter_value, self._least, self._orders_as_torch = filter_value, least, bucket.is_float32

    def __call__(self, scores: Tensor, step: StepTokens) -> Tensor:
        kept = self._filter_value, self._least
        return top_p_(scores, self._share.tensor, *kept, orders_as_torch=self._orders_as_torch)
