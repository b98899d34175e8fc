"""A model's own weights in few bits, as the draft of the model itself: the same layers, but for their products.

Rounded to 8 bits, a model mostly chooses the tokens that it chooses with its own weights, and a step reads a quarter of
the bytes. What is drafted is checked with the weights as they are, so a copy that is out of date costs time, not truth.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn

from fastgen import caches
from fastgen.decoding import layers
from fastgen.decoding.seen_weight import is_plain
from fastgen.ops import quantized_linear


class OwnWeights:
    """Copies of the weights of a model's linear layers in few bits.

    Args:
        model: weights that are not plain parameters in float32, bfloat16 or float16 are left out.
        kinds: the classes of linear layers, and whether their weight is stored by inputs.
        precision: "int8" or "int4".
        group_size: inputs that share a scale.

    Raises:
        ValueError: there is no weight to copy.
    """

    _lock = threading.Lock()
    _of: weakref.WeakKeyDictionary[nn.Module, dict[tuple[str, int], OwnWeights]] = weakref.WeakKeyDictionary()

    def __init__(self, model: nn.Module, kinds: layers.Kinds, precision: str, group_size: int) -> None:
        self._products: dict[nn.Module, Callable[[Tensor], Tensor]] = {}
        self.versions = versions(model)
        packed: dict[int, object] = {}  # tied weights are packed once
        for module in model.modules():
            transposed = kinds.get(type(module))
            if transposed is None or not is_plain(module, module.weight.dtype, model.device.type):
                continue
            weight = module._parameters["weight"]
            if (
                weight is None
                or weight.numel() < layers.MIN_QUANTISED
                or weight.dtype not in quantized_linear.types(precision, weight.device)
            ):
                continue
            if id(weight) not in packed:
                rows = weight.t() if transposed else weight
                with torch.no_grad():
                    packed[id(weight)] = quantized_linear.pack(rows, precision, group_size)
            self._products[module] = partial(_multiply, packed[id(weight)], module)
        if not self._products:
            raise ValueError("the model has no weights to draft with in few bits")

    @classmethod
    def of(cls, model: nn.Module, kinds: layers.Kinds, precision: str, group_size: int) -> OwnWeights:
        """Those that are kept with the model, if it has not been changed since."""
        with cls._lock:
            kept = cls._of.setdefault(model, {})
            found = kept.get((precision, group_size))
            if found is None or found.versions != versions(model):
                kept.clear()
                found = kept[precision, group_size] = cls(model, kinds, precision, group_size)
            return found

    @classmethod
    def drop_all(cls) -> None:
        with cls._lock:
            cls._of.clear()

    def used(self) -> AbstractContextManager[None]:
        """Inside this, the calling thread's forward passes multiply with the copies."""
        return layers.instead(self._products)


def versions(model: nn.Module) -> int:
    """Goes up whenever a parameter is written to."""
    return sum(parameter._version for parameter in model.parameters() if not parameter.is_inference())


def _multiply(packed: quantized_linear.PackedWeight, module: nn.Module, x: Tensor) -> Tensor:
    return quantized_linear.quantized_linear(x, packed, module._parameters.get("bias"))


caches.register(OwnWeights.drop_all)
