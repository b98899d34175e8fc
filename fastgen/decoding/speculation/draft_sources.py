"""What drafts without another model: low-bit copies of the model's weights (a self-draft), or earlier text.

With weights rounded to 8 bits, a model mostly chooses the same tokens as with its own weights, and a step reads a
quarter of the bytes. Drafts are verified with the weights themselves, so a stale copy costs time, but changes no token.

Prompt lookup drafts the tokens that followed an earlier occurrence of the last tokens, in prompt or output. It is from
Saxena, "Prompt Lookup Decoding" (2023), which searches all tokens at each step. Here, an index of n-grams makes the
cost of a step independent of the length of the text.
"""

from __future__ import annotations

import itertools
import math
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor, nn

from fastgen import memory
from fastgen.decoding import derived_weights, layer_forms, layers
from fastgen.decoding.layer_forms import is_plain
from fastgen.decoding.lm_head import DraftHead
from fastgen.interrupts import forkable_lock
from fastgen.ops.linear import choose

# Separates texts of a row that do not follow one another. No draft crosses it.
BOUNDARY = -1
# The largest n-gram that is looked up, because each indexed size takes memory for every token.
_MOST_INDEXED = 16


class OtherLogits(Exception):
    """The model changes the output of its LM head, so that a draft from it is invalid."""


class DraftWeights:
    """Low-bit copies of the weights of a model's linear layers, which `copy` makes.

    Args:
        model: weights that are not plain parameters in float32, bfloat16 or float16 are left out.
        kinds: the classes of linear layers, and whether their weight is [K, N].
        head: the LM head, which `copy_head` copies.
        precision: "int8" or "int4".
        group_size: number of elements along K that share a scale.

    Attributes:
        number: unique in this process. A capture with these copies holds them.
    """

    _lock = forkable_lock()
    _of: weakref.WeakKeyDictionary[nn.Module, dict[derived_weights.Format, DraftWeights]] = weakref.WeakKeyDictionary()
    _numbers = itertools.count()

    def __init__(
        self, model: nn.Module, kinds: layers.Kinds, precision: str, group_size: int, head: nn.Module | None = None
    ) -> None:
        self.number = next(self._numbers)
        self._device = layers.device_of(model)
        self._format = derived_weights.low_bit(precision, group_size)
        self._weights: dict[nn.Module, derived_weights.DerivedWeight] = {}  # tied weights share a copy
        self._overrides: dict[nn.Module, Callable[[Tensor], Tensor]] = {}
        for module in model.modules():
            transposed, weight = kinds.get(type(module)), module._parameters.get("weight")
            if transposed is None or weight is None or not is_plain(module, weight.dtype, self._device.type):
                continue
            if weight.numel() < layers.MIN_NARROW or weight.dtype not in choose.types(precision, weight.device):
                continue
            found = self._weights[module] = derived_weights.of(
                weight.t() if transposed else weight, self._format, weight
            )
            found.tell(self)
        self._head = head if head in self._weights else None
        self._left = [module for module in self._weights if module is not head]
        self._draft_head: DraftHead | None = None
        self._used_head: DraftHead | None = None
        self._head_is_plain = True  # the head returns the logits themselves, as far as is known
        self._is_dropped = False

    @classmethod
    def of(
        cls, model: nn.Module, kinds: layers.Kinds, precision: str, group_size: int, head: nn.Module | None = None
    ) -> DraftWeights:
        """Returns the draft weights that are kept with the model, or new ones if the model has changed since."""
        format = derived_weights.low_bit(precision, group_size)
        with cls._lock:
            kept = cls._of[model] = {each: of for each, of in cls._of.get(model, {}).items() if of._is_current()}
            if format not in kept:
                kept[format] = cls(model, kinds, precision, group_size, head)
            return kept[format]

    @classmethod
    def drop_all(cls) -> None:
        """Drops the draft weights of all models."""
        with cls._lock:
            cls._of.clear()

    def _is_current(self) -> bool:
        of = [(module._parameters.get("weight"), weight) for module, weight in self._weights.items()]
        return not self._is_dropped and all(own is not None and weight.is_of(own) for own, weight in of)

    def forget(self) -> None:
        """Drops everything that drafts with the copies, or is captured with them, because a copy is gone."""
        if not self._is_dropped:
            self._is_dropped = True
            self._overrides, self._draft_head, self._used_head = {}, None, None
            memory.free_captured_steps()

    def copy(self, seconds: float = math.inf) -> bool:
        """Copies weights for about this many seconds. Returns whether all but the head are copied. Not thread-safe.

        Raises:
            ValueError: there is no weight to copy, or too little memory.
        """
        if not self._weights:
            raise ValueError("the model has no weights for a low-bit self-draft")
        for weight in self._weights.values():
            weight.note_use()  # first, so that making room for other copies does not evict one of these
        missing = {weight for weight in map(self._weights.__getitem__, self._left) if weight.current() is None}
        if missing and not derived_weights.has_memory(
            sum(self._format.nbytes(each.weight) for each in missing), self._device
        ):
            raise ValueError("too little memory is free for low-bit copies of the weights")
        end = time.perf_counter() + seconds
        while self._left and time.perf_counter() < end:
            self._copy(self._left.pop())
        return not (self._left or self._is_dropped)

    def _copy(self, module: nn.Module) -> None:
        copy = self._weights[module].optional()
        if copy is not None:
            self._overrides[module] = partial(_multiply, copy, module)

    def copy_head(self, for_argmax: bool = False) -> None:
        """Copies the LM head if needed. To be called before `used`, and not while a step is recorded.

        Args:
            for_argmax: only the `argmax` of the logits is read.
        """
        self._used_head = None
        if self._head is None:
            return
        if for_argmax and self._head_is_plain:
            if self._draft_head is None:
                self._draft_head = DraftHead.of(self._head, self._weights[self._head].weight)
                self._head_is_plain = self._draft_head is not None  # without a draft head, it is not tried again
            if self._draft_head is not None:
                self._draft_head.weight.tell(self)
                self._draft_head.weight.note_use()
            self._used_head = self._draft_head
        if self._used_head is None and self._head not in self._overrides:
            self._copy(self._head)

    def used(self) -> AbstractContextManager[None]:
        """Makes the calling thread's forward passes multiply with the existing copies, inside this context."""
        if self._used_head is None or self._head is None:
            return layer_forms.override_linear(self._overrides)
        return layer_forms.override_linear({**self._overrides, self._head: self._used_head.logits})

    def argmax(self, logits: Tensor) -> Tensor:
        """Returns the likely argmax of each row, [rows], of logits, [rows, vocabulary], computed inside `used`.

        Raises:
            OtherLogits: the LM head has not returned these logits. After another `copy_head`, `argmax` accepts any.
        """
        if self._used_head is None:
            return logits.argmax(dim=-1)
        found = self._used_head.argmax(logits)
        if found is None:
            self._head_is_plain = False
            raise OtherLogits
        return found


def _multiply(copy: Any, module: nn.Module, x: Tensor) -> Tensor:
    return choose.linear(x, copy, module._parameters.get("bias"))


memory.register(DraftWeights.drop_all)


# ---- prompt lookup


class PromptLookup:
    """Drafts for the rows of a batch, each from its own tokens.

    The longest n-gram that has occurred before is used, at its last occurrence. Transformers'
    `PromptLookupCandidateGenerator` uses the first, which is less often right. If fewer tokens follow the occurrence
    than the draft is long, the draft continues with its own beginning, as in a loop. It ends before `eos`: a token that
    ends the sequence is left to the model.

    Args:
        rows: number of rows of the batch.
        max_ngram: the largest n, at least 1. More than 16 is the same as 16.
        most: the maximum number of tokens of a draft.
        eos: tokens that end a sequence.
    """

    def __init__(self, rows: int, max_ngram: int, most: int, eos: Iterable[int] = ()) -> None:
        self._most = most
        self._ends = frozenset((*eos, BOUNDARY))
        self._rows = [_Row(min(max_ngram, _MOST_INDEXED)) for _ in range(rows)]

    def append(self, row: int, tokens: Iterable[int]) -> None:
        """Appends tokens to a row. `BOUNDARY` separates texts, such as a source and its translation."""
        self._rows[row].append(tokens)

    def propose(self, row: int, most: int) -> tuple[list[int], int]:
        """Returns a draft of at most `most` following tokens, and how many tokens before it have occurred before.

        Without an earlier occurrence of the last token, the draft is empty, and the number is 0.
        """
        tokens, size = self._rows[row].followed(min(most, self._most))
        return list(itertools.takewhile(lambda token: token not in self._ends, tokens)), size


class _Row:
    """Tokens, and for each n from 1 to `max_ngram` the last two positions after each n-gram."""

    def __init__(self, max_ngram: int) -> None:
        self._tokens: list[int] = []
        self._positions: list[dict[tuple[int, ...], tuple[int, int]]] = [{} for _ in range(max_ngram)]

    def append(self, tokens: Iterable[int]) -> None:
        known = self._tokens
        for token in tokens:
            known.append(token)
            end = len(known)
            for size, positions in enumerate(self._positions[:end], 1):
                ngram = tuple(known[end - size :])
                positions[ngram] = positions.get(ngram, (0, 0))[1], end

    def followed(self, most: int) -> tuple[list[int], int]:
        """Returns the `most` tokens after the last earlier occurrence of the longest known n-gram; and n."""
        known = self._tokens
        for size in range(min(len(self._positions), len(known) - 1), 0, -1) if most > 0 else ():
            begin, _ = self._positions[size - 1][tuple(known[-size:])]  # the last occurrence is the end itself
            if begin:
                found = known[begin : begin + most]
                return (found * -(-most // len(found)))[:most], size
        return [], 0
