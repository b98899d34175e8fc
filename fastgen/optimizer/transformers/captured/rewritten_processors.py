"""Logits processors of the library for a step in a CUDA graph: rewritten, or its own where they look at scores alone.

In a captured step the tokens are in a buffer of a fixed size, and where they begin and end is on the device. Each class
gives the result of the library's own for such a buffer, bit for bit in float32. Nothing here waits for the device,
copies from the host, or has a shape or a branch that depends on values.
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
from fastgen.ops.top_p import EVERYTHING, top_p_
from fastgen.optimizer.transformers.captured.processor_data import Bucket, Buffer, Number


class StepTokens(NamedTuple):
    """The running sequences at a step, all on the device: a replay sees what is in these int64 tensors then."""

    tokens: Tensor  # [rows, capacity]: a sequence in each row at [start, length), -1 in front of it, anything behind it
    start: Tensor  # [rows, 1] or 0-dim, as the others: so many positions in front belong to no sequence
    length: Tensor  # where the sequences end: the library's current length is length - start
    prompt: Tensor  # where the prompt ends: the library's length of the prompt is prompt - start
    limit: Tensor  # the library's `max_length`, counted from `start`

    @classmethod
    def of(cls, search: Search, ahead: Tensor | int = 0) -> StepTokens:
        """Those of a search, with `ahead` tokens behind the ends of its sequences."""
        start, length, limit = (x.view(-1, 1) for x in (search.start, search.length, search.limit))
        length = length if type(ahead) is int and ahead == 0 else length + ahead
        return cls(search.running_tokens, start, length, search.prompt, limit - start)


class Unknown(Exception):
    """A parameter of a processor is of a kind that is not known."""


class CapturedProcessor:
    """A logits processor that can be captured.

    What differs between the processors of one signature is in buffers, which `refresh` fills, and in numbers.

    Attributes:
        reads_tokens: what it does has the length of the sequences' buffer in it.
        reads_source: it has the encoder's input of each sequence.
        reads_scores_alone: and these row by row.
        is_of_any_rows: it does the same for rows of any number, each of a length of its own.
        neutral: numbers with which it changes no bit of a row.
    """

    reads_tokens = reads_source = reads_scores_alone = is_of_any_rows = False
    neutral: tuple[float, ...] | None = None

    def __call__(self, scores: Tensor, step: StepTokens) -> Tensor:
        """`scores`, [rows, vocabulary] in float32, of what may continue the sequences, processed; maybe in place."""
        raise NotImplementedError

    def refresh(self, *data: Any) -> bool:
        """Takes over the data of a call's processor of this signature, as `processors.Signed` has them.

        False if they do not fit into the buffers that are there; then nothing has been changed.
        """
        return not data

    @property
    def numbers(self) -> list[Number]:
        """Those of a call's processor, in the order in which `processors.Signed` has them."""
        return [each for each in vars(self).values() if isinstance(each, Number)]

    def insert(self, other: CapturedProcessor, source: int, target: int) -> None:
        """Takes over the numbers of an input, at `source` in another processor of this signature."""
        for own, each in zip(self.numbers, other.numbers, strict=True):
            own.insert(each, source, target)

    def put(self, numbers: Sequence[float], target: int | None = None) -> None:
        """Takes over these numbers for an input, or for all."""
        for own, value in zip(self.numbers, numbers, strict=True):
            own.put(value, target)

    def of_batch(self, batch: int) -> CapturedProcessor:
        """One for so many inputs that a recording cannot tell from this one; it shares what has no rows."""
        other = copy.copy(self)
        kinds = Buffer, Number
        vars(other).update({k: each.of_batch(batch) for k, each in vars(self).items() if isinstance(each, kinds)})
        return other


# Tokens that are banned or forced ---------------------------------------------------------------------------------


class When(NamedTuple):
    """A comparison of the current length with a number that each call gives, such as `torch.lt`.

    The length is measured from the "start", from the end of the "prompt", or, with the next token, from the "limit".
    """

    compare: Callable[..., Tensor]
    origin: str

    def __call__(self, step: StepTokens, bound: Tensor) -> Tensor:
        position = step.length - (step.prompt if self.origin == "prompt" else step.start)
        return self.compare(position + 1 - step.limit if self.origin == "limit" else position, bound)


def _fill_columns(scores: Tensor, index: Tensor, value: float, due: Tensor) -> Tensor:
    return scores.index_copy_(1, index, scores.index_select(1, index).masked_fill_(due, value))


class _AtSomePositions(CapturedProcessor):
    """Tokens of which something is so at some positions, or, without `when`, at all of them.

    In `_columns`, [room], int64, the first is there again where there are fewer. `_is_any` says whether there is one in
    the vocabulary at all.
    """

    is_of_any_rows = True
    skips = False  # tokens outside the vocabulary; otherwise such a processor is not captured

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
        return self._is_any if self._when is None else self._is_any & self._when(step, self._bound.values)


class Ban(_AtSomePositions):
    """Tokens that cannot come at some positions, or at none."""

    skips = True

    def __call__(self, scores: Tensor, step: StepTokens) -> Tensor:
        return _fill_columns(scores, self._columns, -math.inf, self._is_due(step))


class Force(_AtSomePositions):
    """Tokens of which one must come at some position."""

    def __call__(self, scores: Tensor, step: StepTokens) -> Tensor:
        due = self._is_due(step)
        scores.masked_fill_(due, -math.inf)
        return _fill_columns(scores, self._columns, 0.0, due)


# Penalties --------------------------------------------------------------------------------------------------------


def _penalise(scores: Tensor, tokens: Tensor, penalty: Number) -> Tensor:
    """Multiplies or divides the score of each of `tokens`, [rows, any], once; other numbers are no tokens.

    As in the n-gram operator, every element writes: those that hold no token repeat what another one of their row
    writes, and where there is none, the score that is there.
    """
    tokens = torch.where(tokens < scores.shape[1], tokens, -1)
    spare = tokens.amax(dim=1, keepdim=True)
    index = torch.where(tokens >= 0, tokens, spare.clamp(min=0))
    found = scores.gather(1, index)
    changed = torch.where(found < 0, penalty * found, found / penalty)
    return scores.scatter_(1, index, torch.where(spare >= 0, changed, found))


class RepetitionPenalty(CapturedProcessor):
    """Keskar et al., "CTRL" (2019), section 4.1. With `leaves_out`, each row has a number of positions of padding."""

    reads_tokens = is_of_any_rows = True
    neutral = (1.0,)

    def __init__(self, bucket: Bucket, leaves_out: bool) -> None:
        self._penalty, self._leaves_out = Number(bucket), leaves_out
        self._ignored_rows = Buffer(bucket, bucket.per_input, fill=0)

    def __call__(self, scores: Tensor, step: StepTokens) -> Tensor:
        tokens = step.tokens
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        counts = positions < step.length  # those in front hold no tokens
        if self._leaves_out:
            counts = counts & (positions - step.start >= self._ignored_rows.tensor.unsqueeze(1))
        return _penalise(scores, torch.where(counts, tokens, -1), self._penalty)

    def refresh(self, ignored: Tensor | None) -> bool:
        return ignored is None or self._ignored_rows.refill(ignored)


# Sequences --------------------------------------------------------------------------------------------------------


class NoRepeatNGram(CapturedProcessor):
    # The -1 in front of a sequence are in no n-gram that one of its tokens begins or would complete.
    reads_tokens = is_of_any_rows = True

    def __init__(self, bucket: Bucket, n: int) -> None:
        self._n = n

    def __call__(self, scores: Tensor, step: StepTokens) -> Tensor:
        return no_repeat_ngram_(scores, step.tokens, self._n, step.length.view(-1).expand(len(scores)))


class EncoderNoRepeatNGram(CapturedProcessor):
    """With the tokens of the encoder's input, [inputs, length], and -1 behind them.

    An n-gram that has one of these ends with one, and that is no token.
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
    """Numbers added to the scores of tokens that would complete some sequences.

    Args:
        biases: each sequence, of at least one token, and its number, in the order in which the library adds them up.
        more: by how much a running sequence must be longer than what comes before the last token of one of `biases`.
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

        # All sequences are compared at once: a shorter one has -1 in front, which any token fits.
        long = [(sequence[:-1], columns[sequence[-1]], bias) for sequence, bias in biases if len(sequence) > 1]
        self._longest = max((len(prefix) for prefix, _, _ in long), default=0)
        self._prefixes = constant([(-1,) * (self._longest - len(prefix)) + prefix for prefix, _, _ in long])
        self._is_any = self._prefixes < 0
        self._least = constant([len(prefix) + more for prefix, _, _ in long])

        # Sums of different numbers depend on their order: in one round of additions a column gets one of them.
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
        """Which of the sequences lack but their last token, [rows, sequences of more than one token]."""
        positions = step.length - self._longest + torch.arange(self._longest, device=step.tokens.device)
        last = step.tokens.gather(1, positions.clamp(min=0).expand(len(step.tokens), -1)).unsqueeze(1)
        equal = ((last == self._prefixes) | self._is_any).all(dim=2)
        return equal & (step.length - step.start >= self._least)


# Scores alone ---------------------------------------------------------------------------------------------------


class _OfScores(CapturedProcessor):
    reads_scores_alone = is_of_any_rows = True


class Library(_OfScores):
    """The library's own processor: it looks at nothing but the scores, and its operations can be captured.

    Args:
        frozen: its attributes.
        names: of attributes that are numbers of each call.
    """

    # Not the mass of typical sampling: that sorts the whole vocabulary of each row, which takes longer than a row's
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
    """Fan et al., "Hierarchical Neural Story Generation" (2018), section 5.1: a number of tokens up to `room`."""

    ALL = 0  # in the place of the number
    neutral = (ALL,)

    def __init__(self, bucket: Bucket, room: int, filter_value: float) -> None:
        self._room, self._filter_value = room, filter_value
        self._kept = Number(bucket, torch.int64)

    def __call__(self, scores: Tensor, step: StepTokens) -> Tensor:
        best = scores.topk(min(self._room, scores.shape[1])).values
        kept = self._kept.values
        last = (kept - 1).clamp(0, best.shape[1] - 1).expand(len(scores), 1)
        goes = (scores < best.gather(1, last)) & (kept != self.ALL)
        return scores.masked_fill(goes, self._filter_value)


class TopP(_OfScores):
    """Holtzman et al., "The Curious Case of Neural Text Degeneration" (2020), section 3.1. On the CPU."""

    neutral = (EVERYTHING,)

    def __init__(self, bucket: Bucket, filter_value: float, least: int) -> None:
        self._share = Number(bucket)
        self._filter_value, self._least, self._orders_as_torch = filter_value, least, bucket.is_float32

    def __call__(self, scores: Tensor, step: StepTokens) -> Tensor:
        kept = self._filter_value, self._least
        return top_p_(scores, self._share.values, *kept, orders_as_torch=self._orders_as_torch)
