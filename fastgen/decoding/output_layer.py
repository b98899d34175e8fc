"""The output layer of a greedy step: the largest output of each row, found with a copy of the weight in 8 bits.

`fastgen.decoding.largest_outputs` says which products of a recording are one. The result is the same as without the
copy (`fastgen.ops.largest_output`). The copy lives as long as the programs that use it. Whether it still stands for the
weight is looked at once in each call, by the contents of the weight.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastgen import memory, settings
from fastgen.decoding import products
from fastgen.ops import _timings, largest_output
from fastgen.ops.linear import shortest_times

_aten = torch.ops.aten
# Timings are those of this kernel: to be renamed when it changes.
_KERNEL = "largest output 1"
# A copy is not worth it for less than that. No copy is made where there is not so many times its size of free memory.
_LEAST_BYTES, _FREE_MEMORY = 2**22, 8
# If more than this part of all outputs is computed over some steps, estimates do not help: the logits are too flat.
_MOST_COMPUTED, _STEPS = 1 / 16, 16

_call = 0  # number of the present call


def begin_call() -> None:
    """From here on, weights may be others than before."""
    global _call
    _call += 1


class Step:
    """A product of which the largest output of each row is asked for, with or without a copy of the weight.

    Args:
        outputs: [rows, outputs], float32: memory for all outputs or their estimates.
        x, weight, bias: [rows, inputs], [outputs, inputs] and [outputs] or None, float32.
    """

    def __init__(self, outputs: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self._outputs, self._x, self._bias = outputs, x, bias
        self._multiply = _product(outputs, x, weight, bias)
        self._layer = _layer(x, weight, bias)
        self._copy: largest_output.Copy | None = None  # that these estimates are from

    def estimate(self) -> None:
        """Writes all outputs, or estimates of them."""
        self._copy = None if self._layer is None else self._layer.copy()
        if self._copy is None:
            self._multiply()
        else:
            largest_output.estimate_out(self._outputs, self._x, self._bias, self._copy)

    def find(self, out: Tensor) -> None:
        """Writes the number of the largest output of each row, [rows], int64; those that are -inf by now are banned."""
        if self._copy is None or self._layer is None:
            _aten.argmax.out(self._outputs, -1, False, out=out)
        else:
            self._layer.find(out, self._outputs, self._x, self._bias, self._copy)

    def find_two(self, out: Tensor, is_near: Tensor, masked: float, share: float) -> None:
        """The same, and whether another one is about as large, [rows], bool (`fastgen.ops.best_two`)."""
        if self._copy is None or self._layer is None:
            torch.ops.fastgen.best_two_out(out, is_near, self._outputs, masked, share)
        else:
            self._layer.find(out, self._outputs, self._x, self._bias, self._copy, is_near, share)


def _product(outputs: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Callable[[], Any]:
    """What computes all outputs."""
    product = products.faster(outputs, x, weight, bias)
    if product is not None:
        return products.together([product])[0]
    if bias is None:
        return partial(_aten.mm.out, x, weight.t(), out=outputs)
    return partial(_aten.addmm.out, bias, x, weight.t(), out=outputs)


def _layer(x: Tensor, weight: Tensor, bias: Tensor | None) -> OutputLayer | None:
    """The weight with its copy, where that is faster."""
    size = weight.numel() * weight.itemsize
    # "never" says that products are torch's own, and that nothing is copied.
    if settings.current().packed_weights == "never" or not largest_output.serves(x, weight, bias):
        return None
    if size < _LEAST_BYTES or size / 4 * _FREE_MEMORY > memory.free_host_memory():
        return None
    key = f"{x.shape[0]}x{x.shape[1]}x{weight.shape[0]}"
    is_measured = settings.current().linear_products != "fixed"
    if is_measured and _is_faster(_timings.get(_KERNEL, key, 2, None)) is False:
        return None
    layer = OutputLayer.of(weight)
    if is_measured and not _is_faster(_timings.get(_KERNEL, key, 2, partial(layer.measure, x.shape[0]))):
        return None
    return layer


def _is_faster(known: _timings.Timing | None) -> bool | None:
    return None if known is None else known[1] < known[0]


class OutputLayer:
    """A weight as it is, and its copy."""

    _layers: weakref.WeakValueDictionary[tuple[Any, ...], OutputLayer] = weakref.WeakValueDictionary()

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self._make_copy(largest_output.fingerprint(weight))

    @classmethod
    def of(cls, weight: Tensor) -> OutputLayer:
        """The one of a weight, which all programs share that use it."""
        # A layer holds its weight, so that no other one can come to lie there.
        key = weight.data_ptr(), tuple(weight.shape)
        found = cls._layers.get(key)
        if found is None:
            found = cls._layers[key] = cls(weight)
        return found

    def _make_copy(self, fingerprint: int) -> None:
        self._fingerprint, self._checked_in = fingerprint, _call
        self._copy = largest_output.copy_of(self._weight)
        self._computed = self._steps = 0

    def copy(self) -> largest_output.Copy | None:
        """The copy, of the weight as it is in this call; None where it does not help."""
        if self._checked_in != _call:
            fingerprint = largest_output.fingerprint(self._weight)
            if fingerprint != self._fingerprint:
                self._make_copy(fingerprint)
            self._checked_in = _call
        return self._copy

    def find(
        self, out: Tensor, estimates: Tensor, x: Tensor, bias: Tensor | None, copy: largest_output.Copy, *near: Any
    ) -> None:
        """Writes the number of the largest output of each row to `out`; with more arguments of `largest_output_out`."""
        computed = largest_output.largest_output_out(out, estimates, x, self._weight, bias, copy, *near)
        self._computed, self._steps = self._computed + computed / x.shape[0], self._steps + 1
        if self._steps >= _STEPS and self._computed > _MOST_COMPUTED * self._steps * self._weight.shape[0]:
            self._copy = None

    def measure(self, rows: int) -> tuple[float, float]:
        """Seconds without the copy and with it, for so many rows, with the weight and the copy out of the caches."""
        copy, weight = self._copy, self._weight
        if copy is None:
            return 0.0, 0.0  # nothing is faster
        x = torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        out, outputs = x.new_empty(rows, dtype=torch.int64), x.new_empty(rows, weight.shape[0])
        multiply = _product(outputs, x, weight, None)

        def plain(_: Tensor) -> None:
            multiply()
            _aten.argmax.out(outputs, -1, False, out=out)

        def with_copy(_: Tensor) -> None:
            largest_output.estimate_out(outputs, x, None, copy)
            largest_output.largest_output_out(out, outputs, x, weight, None, copy)

        first, second = shortest_times([(plain, [weight]), (with_copy, [copy.numbers.numbers])])
        return first, second
