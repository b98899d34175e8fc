"""A model's own weights in few bits, as the draft of the model itself: the same layers, but for their products.

Rounded to 8 bits, a model mostly chooses the tokens that it chooses with its own weights, and a step reads a quarter of
the bytes. What is drafted is checked with the weights as they are, so a copy that is out of date costs time, not truth.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn

from fastgen import caches
from fastgen.decoding import layer_forms, layers
from fastgen.decoding.modules import device_of
from fastgen.decoding.parameter_snapshot import is_plain
from fastgen.locks import forkable_lock
from fastgen.ops import largest_output, quantized_linear
from fastgen.ops.linear import as_rows, grouped

# Bytes of a number, without its share of a scale; and the part of the free memory that copies may take.
_BYTES, _MOST_MEMORY = {"int8": 1.0, "int4": 0.5}, 0.5

# What `quantized_linear.pack` makes.
_Packed = quantized_linear.PackedWeight | quantized_linear.TiledWeight | quantized_linear.LinedWeight


class OtherLogits(Exception):
    """The model makes other logits of its output layer's outputs: what was guessed from these counts for nothing."""


class DraftWeights:
    """Copies of the weights of a model's linear layers in few bits, which `copy` makes.

    Args:
        model: weights that are not plain parameters in float32, bfloat16 or float16 are left out.
        kinds: the classes of linear layers, and whether their weight is stored by inputs.
        head: the output layer, which `copy_head` copies.
        precision: "int8" or "int4".
        group_size: inputs that share a scale.

    Raises:
        ValueError: there is no weight to copy, or too little memory.
    """

    _lock = forkable_lock()
    _of: weakref.WeakKeyDictionary[nn.Module, dict[tuple[str, int], DraftWeights]] = weakref.WeakKeyDictionary()

    def __init__(
        self, model: nn.Module, kinds: layers.Kinds, precision: str, group_size: int, head: nn.Module | None = None
    ) -> None:
        self.versions = versions(model)
        self._form = precision, group_size
        self._products: dict[nn.Module, Callable[[Tensor], Tensor]] = {}
        self._packed: dict[int, _Packed] = {}  # by weight: tied ones are packed once
        self._left: list[tuple[nn.Module, Tensor, bool]] = []  # what is to be copied; whether it is stored by inputs
        device = device_of(model)
        for module in model.modules():
            transposed, weight = kinds.get(type(module)), module._parameters.get("weight")
            if transposed is None or weight is None or not is_plain(module, weight.dtype, device.type):
                continue
            if weight.numel() < layers.MIN_QUANTISED or weight.dtype not in quantized_linear.types(precision, device):
                continue
            self._left.append((module, weight, transposed))
        if not self._left:
            raise ValueError("the model has no weights to draft with in few bits")
        numbers = sum({id(weight): weight.numel() for _, weight, _ in self._left}.values())
        if numbers * _BYTES[precision] > _MOST_MEMORY * layer_forms.free_memory(device):
            raise ValueError("too little memory is free for a copy of the weights in few bits")
        self._head = next((each for each in self._left if each[0] is head), None)
        self._left = [each for each in self._left if each[0] is not head]
        self._rough_head: _RoughHead | None = None
        self._rough: _RoughHead | None = None  # that is in use
        self._head_is_plain = True  # its outputs are the logits, as far as is known

    @classmethod
    def of(
        cls, model: nn.Module, kinds: layers.Kinds, precision: str, group_size: int, head: nn.Module | None = None
    ) -> DraftWeights:
        """Those that are kept with the model, if it has not been changed since."""
        with cls._lock:
            kept = cls._of.setdefault(model, {})
            found = kept.get((precision, group_size))
            if found is None or found.versions != versions(model):
                kept.clear()
                found = kept[precision, group_size] = cls(model, kinds, precision, group_size, head)
            return found

    @classmethod
    def drop_all(cls) -> None:
        with cls._lock:
            cls._of.clear()

    def copy(self, seconds: float = math.inf) -> bool:
        """Copies weights for about so many seconds; says whether all but the head are. In one thread at a time."""
        end = time.perf_counter() + seconds
        while self._left and time.perf_counter() < end:
            self._copy(*self._left.pop())
        return not self._left

    def _copy(self, module: nn.Module, weight: Tensor, transposed: bool) -> None:
        if id(weight) not in self._packed:
            with torch.no_grad():
                rows = weight.t() if transposed else weight
                self._packed[id(weight)] = quantized_linear.pack(rows, *self._form)
        self._products[module] = partial(_multiply, self._packed[id(weight)], module)

    def copy_head(self, for_largest: bool = False) -> None:
        """Copies the output layer, if need be: before it is `used`, and not while a step is recorded.

        Args:
            for_largest: of the logits nobody wants to know more than the `largest`.
        """
        self._rough = None
        if self._head is None:
            return
        module, weight, transposed = self._head
        if for_largest and self._head_is_plain and _RoughHead.serves(module, weight, transposed):
            if self._rough_head is None:
                copy = largest_output.rough_copy_of(weight)
                self._rough_head = None if copy is None else _RoughHead(module, weight, copy)
                self._head_is_plain = copy is not None  # without one, it is not tried again
            self._rough = self._rough_head
        if self._rough is None and module not in self._products:
            self._copy(module, weight, transposed)

    def used(self) -> AbstractContextManager[None]:
        """Inside this, the calling thread's forward passes multiply with the copies that there are."""
        if self._rough is None or self._head is None:
            return layer_forms.override_linear(self._products)
        return layer_forms.override_linear({**self._products, self._head[0]: self._rough.estimate})

    def largest(self, logits: Tensor) -> Tensor:
        """The largest of each row, [rows], most of the time; the logits, [rows, vocabulary], come from inside `used`.

        Raises:
            OtherLogits: they are no outputs of the output layer. After another `copy_head`, that does not matter.
        """
        if self._rough is None:
            return logits.argmax(dim=-1)
        found = self._rough.largest(logits)
        if found is None:
            self._head_is_plain = False
            raise OtherLogits
        return found


class _RoughHead:
    """An output layer in 4 bits. The few outputs that may be the largest are computed from the weight as it is."""

    def __init__(self, module: nn.Module, weight: Tensor, copy: largest_output.Copy) -> None:
        self._module, self._weight, self._copy = module, weight.detach(), copy
        self._x: Tensor | None = None
        self._estimates: Tensor | None = None

    @staticmethod
    def serves(module: nn.Module, weight: Tensor, transposed: bool) -> bool:
        """Whether there is a kernel for this layer, whose weight may be stored by inputs."""
        bias = module._parameters.get("bias")
        return not transposed and largest_output.serves(weight[:1], weight, bias)

    def estimate(self, x: Tensor) -> Tensor:
        """In the place of the layer's forward pass."""
        self._x = as_rows(x)
        self._estimates = grouped.grouped_linear(x, self._copy.numbers, self._module._parameters.get("bias"))
        return self._estimates

    def largest(self, logits: Tensor) -> Tensor | None:
        """The largest output of each row, as far as the estimates say; None if these are not the logits."""
        x, estimates, self._x, self._estimates = self._x, self._estimates, None, None
        if x is None or estimates is None or not _are_same(logits, estimates):
            return None
        found = torch.empty(len(x), dtype=torch.int64, device=x.device)
        largest_output.largest_output_out(
            found, logits, x, self._weight, self._module._parameters.get("bias"), self._copy
        )
        return found


def _are_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same numbers in the same memory, in one order."""
    same = one.untyped_storage()._cdata == other.untyped_storage()._cdata and one.dtype is other.dtype
    return same and one.numel() == other.numel() and one.is_contiguous() and other.is_contiguous()


def versions(model: nn.Module) -> int:
    """Goes up whenever a parameter is written to."""
    return sum(parameter._version for parameter in model.parameters() if not parameter.is_inference())


def _multiply(packed: _Packed, module: nn.Module, x: Tensor) -> Tensor:
    return quantized_linear.quantized_linear(x, packed, module._parameters.get("bias"))


caches.register(DraftWeights.drop_all)
