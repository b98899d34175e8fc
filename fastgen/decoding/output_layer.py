"""The output layer of a greedy step: the largest output of each row, found with a copy of the weight in 8 bits.

`fastgen.decoding.largest_outputs` says which products of a recording are one. The result is the same as without the
copy (`fastgen.ops.largest_output`), as long as that stands for the weight (`fastgen.decoding.weight_copies`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastgen import memory, settings
from fastgen.decoding import linear_ops, weight_copies
from fastgen.ops import largest_output
from fastgen.ops.linear import choose
from fastgen.ops.linear.choose import Kernel

_aten = torch.ops.aten
# With more rows, computing all outputs is no longer bound by reading the weight.
_MOST_ROWS = 16
# A copy is not worth it for less than that. No copy is made where there is not so many times its size of free memory.
_LEAST_BYTES, _FREE_MEMORY = 2**22, 8
# If more than this part of all outputs is computed over so many steps, estimates do not help: the logits are too flat.
_MOST_COMPUTED, _STEPS = 1 / 16, 16


class Step:
    """A product of which the largest output of each row is asked for, with or without a copy of the weight.

    Args:
        outputs: [rows, outputs], float32: memory for all outputs or their estimates.
        x, weight, bias: [rows, inputs], [outputs, inputs] and [outputs] or None, float32.
    """

    def __init__(self, outputs: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self._outputs, self._x, self._bias = outputs, x, bias
        # With the copy, outputs have the bits of GEMV. A result must not depend on whether there is one.
        may_have_copy = _may_have_copy(x, weight, bias)
        self._multiply = _product(outputs, x, weight, bias, choose.GEMV if may_have_copy else None)
        has_memory = may_have_copy and weight.nbytes / 4 * _FREE_MEMORY <= memory.free_host_memory()
        self._layer: OutputLayer | None = OutputLayer.of(weight) if has_memory else None
        self._copy: largest_output.Copy | None = None  # that these estimates are from, until they are used

    def estimate(self) -> None:
        """Writes all outputs, or estimates of them."""
        self._copy = None if self._layer is None else self._layer.copy()
        if self._copy is None:
            self._multiply()
        else:
            largest_output.estimate_out(self._outputs, self._x, self._bias, self._copy)

    def find(self, out: Tensor) -> None:
        """Writes the number of the largest output of each row, [rows], int64; those that are -inf by now are banned."""
        copy, self._copy = self._copy, None
        if copy is None or self._layer is None:
            _aten.argmax.out(self._outputs, -1, False, out=out)
        else:
            self._layer.find(out, self._outputs, self._x, self._bias, copy)

    def find_two(self, out: Tensor, is_near: Tensor, masked: float, share: float) -> None:
        """The same, and whether another one is about as large, [rows], bool (`fastgen.ops.top_two`)."""
        copy, self._copy = self._copy, None
        if copy is None or self._layer is None:
            torch.ops.fastgen.top_two_out(out, is_near, self._outputs, masked, share)
        else:
            self._layer.find(out, self._outputs, self._x, self._bias, copy, is_near, masked, share)


def _product(
    outputs: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, kernel: Kernel | None
) -> Callable[[], Any]:
    """What computes all outputs: with this kernel, or the one that serves them."""
    op = linear_ops.linear_op(outputs, x, weight, bias)
    if op is not None:
        return linear_ops.single(op if kernel is None else op._replace(kernel=kernel))
    if bias is None:
        return partial(_aten.mm.out, x, weight.t(), out=outputs)
    return partial(_aten.addmm.out, bias, x, weight.t(), out=outputs)


def _may_have_copy(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a copy makes this faster: few rows, and a weight that does not stay in a cache."""
    # "never" says that products are torch's own, and that nothing is copied.
    return (
        settings.current().packed_weights != "never"
        and largest_output.serves(x, weight, bias)
        and x.shape[0] <= _MOST_ROWS
        and weight.nbytes >= _LEAST_BYTES
        and choose.kernel_for(x, weight, bias) is not None
    )


class OutputLayer(weight_copies.CopiedWeight):
    """A weight as it is, and its copy."""

    waits = weight_copies.STEPS_OF_COPY

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self._computed, self._steps = 0.0, 0

    def _copied(self, weight: Tensor) -> largest_output.Copy | None:
        self._computed, self._steps = 0.0, 0
        return largest_output.copy_of(weight)

    def find(
        self, out: Tensor, estimates: Tensor, x: Tensor, bias: Tensor | None, copy: largest_output.Copy, *near: Any
    ) -> None:
        """Writes the number of the largest output of each row to `out`; with more arguments of `largest_output_out`."""
        computed = largest_output.largest_output_out(out, estimates, x, self._weight, bias, copy, *near)
        self._computed, self._steps = self._computed + computed / x.shape[0], self._steps + 1
        if self._steps == _STEPS:
            if self._computed > _MOST_COMPUTED * _STEPS * self._weight.shape[0]:
                self._do_without()
            self._computed, self._steps = 0.0, 0
