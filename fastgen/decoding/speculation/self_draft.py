"""A self-draft: the model drafts with low-bit copies of its own weights.

With weights rounded to 8 bits, a model mostly chooses the same tokens as with its own weights, and a step reads a
quarter of the bytes. Drafts are verified with the weights themselves, so a stale copy costs time, but changes no token.
"""

from __future__ import annotations

import itertools
import math
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor, nn

from fastgen import memory
from fastgen.decoding import layer_forms, layers
from fastgen.decoding.lm_head import DraftHead
from fastgen.decoding.modules import device_of, is_plain
from fastgen.decoding.weights import cache, formats
from fastgen.interrupts import forkable_lock


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
    _of: weakref.WeakKeyDictionary[nn.Module, dict[cache.Format, DraftWeights]] = weakref.WeakKeyDictionary()
    _numbers = itertools.count()

    def __init__(
        self, model: nn.Module, kinds: layers.Kinds, precision: str, group_size: int, head: nn.Module | None = None
    ) -> None:
        self.number = next(self._numbers)
        self._device = device_of(model)
        self._format = formats.low_bit(precision, group_size)
        self._weights: dict[nn.Module, cache.DerivedWeight] = {}  # tied weights share a copy
        self._overrides: dict[nn.Module, Callable[[Tensor], Tensor]] = {}
        for module in model.modules():
            transposed, weight = kinds.get(type(module)), module._parameters.get("weight")
            if transposed is None or weight is None or not is_plain(module, weight.dtype, self._device.type):
                continue
            if weight.numel() < layers.MIN_NARROW or not formats.has_low_bit(weight, precision):
                continue
            found = self._weights[module] = cache.of(weight.t() if transposed else weight, self._format, weight)
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
        format = formats.low_bit(precision, group_size)
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
        if missing and not cache.has_memory(sum(self._format.nbytes(each.weight) for each in missing), self._device):
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
    return formats.multiply_low_bit(x, copy, module._parameters.get("bias"))


memory.register(DraftWeights.drop_all)
