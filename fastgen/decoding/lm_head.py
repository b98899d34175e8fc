"""The LM head of a greedy step: the argmax from approximate logits, computed with a low-bit copy of the weight.

Only logits that could be the largest are computed from the weight itself (`fastgen.ops.approximate_logits`). In a
captured step the copy has 8 bits and the argmax is exact. `fastgen.decoding.lm_head_pass` finds the products of a
recorded graph that are such a head. The head of a draft has 4 bits, and its argmax is likely.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastgen import settings
from fastgen.decoding import linear_ops
from fastgen.decoding.weights import cache, formats
from fastgen.ops import approximate_logits
from fastgen.ops.linear import as_rows, choose, grouped
from fastgen.ops.linear.choose import Kernel

_aten = torch.ops.aten
# With more rows, an exact product is no longer bound by reading the weight.
_MOST_ROWS = 16
# Smaller weights are not worth a copy.
_LEAST_BYTES = 2**22
# If more than this part of all logits is computed exactly over this many steps, they are too flat to approximate.
_MOST_COMPUTED, _STEPS = 1 / 16, 16


class GreedyHead:
    """A product of which only the argmax of each row is read, with or without a copy of the weight.

    Args:
        logits: [M, N], float32: memory for the logits, exact or approximate.
        x, weight, bias: [M, K], [N, K] and [N] or None, float32.
    """

    def __init__(self, logits: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self._logits, self._x, self._bias = logits, x, bias
        # With a copy, logits have the bits of GEMV, and a result must not depend on whether there is a copy.
        may_have_copy = _may_have_copy(x, weight, bias)
        self._multiply = _product(logits, x, weight, bias, choose.GEMV if may_have_copy else None)
        self._weight = cache.of(weight, formats.LM_HEAD) if may_have_copy else None
        self._copy: approximate_logits.ApproximateHead | None = None  # the copy whose logits wait for `find`
        self._computed, self._steps = 0.0, 0

    def multiply(self) -> None:
        """Writes the logits, or approximate ones."""
        self._copy = None if self._weight is None else self._weight.in_step()
        if self._copy is None:
            self._multiply()
        else:
            approximate_logits.logits_out(self._logits, self._x, self._bias, self._copy)

    def find(self, out: Tensor) -> None:
        """Writes the argmax of each row, [M], int64. A logit that is -inf by now is banned."""
        if not self._found(out):
            _aten.argmax.out(self._logits, -1, False, out=out)

    def find_two(self, out: Tensor, is_near: Tensor, masked: float, share: float) -> None:
        """Does the same, and writes whether another logit is about as large, [M], bool (`fastgen.ops.search_step`)."""
        if not self._found(out, is_near, masked, share):
            torch.ops.fastgen.top_two_out(out, is_near, self._logits, masked, share)

    def _found(self, out: Tensor, *near: Any) -> bool:
        """Finds the argmax if the logits are approximate; `near` are further arguments of `argmax_out`."""
        copy, self._copy = self._copy, None
        if copy is None or self._weight is None:
            return False
        weight, rows = self._weight.weight, self._x.shape[0]
        computed = approximate_logits.argmax_out(out, self._logits, self._x, weight, self._bias, copy, *near)
        self._computed, self._steps = self._computed + computed / rows, self._steps + 1
        if self._steps == _STEPS:
            if self._computed > _MOST_COMPUTED * _STEPS * weight.shape[0]:
                self._weight.back_off()
            self._computed, self._steps = 0.0, 0
        return True


def _product(
    logits: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, kernel: Kernel | None
) -> Callable[[], Any]:
    """Returns the call that computes all logits, with this kernel or the one that is chosen for them."""
    op = linear_ops.linear_op(logits, x, weight, bias)
    if op is not None:
        return linear_ops.single(op if kernel is None else op._replace(kernel=kernel))
    if bias is None:
        return partial(_aten.mm.out, x, weight.t(), out=logits)
    return partial(_aten.addmm.out, bias, x, weight.t(), out=logits)


def _may_have_copy(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a copy makes this faster: few rows, and a weight that does not stay in a cache."""
    # With "never", products are torch's own, and nothing is copied.
    return (
        settings.current().packed_weights != "never"
        and approximate_logits.serves(x, weight, bias)
        and x.shape[0] <= _MOST_ROWS
        and weight.nbytes >= _LEAST_BYTES
        and choose.kernel_for(x, weight, bias) is not None
    )


class DraftHead:
    """The LM head of a model that drafts for itself, which replaces the layer's forward pass.

    Attributes:
        weight: the layer's weight, [N, K], in `formats.DRAFT_HEAD`.
    """

    def __init__(
        self, module: nn.Module, weight: cache.DerivedWeight, copy: approximate_logits.ApproximateHead
    ) -> None:
        self.weight = weight
        self._module, self._copy = module, copy
        self._x: Tensor | None = None
        self._logits: Tensor | None = None

    @staticmethod
    def of(module: nn.Module, weight: Tensor) -> DraftHead | None:
        """Returns the head of a layer with this weight, [N, K]; None if no kernel serves it, or it has no copy."""
        if not approximate_logits.serves(weight[:1], weight, module._parameters.get("bias")):
            return None
        derived = cache.of(weight, formats.DRAFT_HEAD, module._parameters["weight"])
        copy = derived.optional()
        return None if copy is None else DraftHead(module, derived, copy)

    def logits(self, x: Tensor) -> Tensor:
        """Returns the approximate logits for x, [..., K]: [..., N]."""
        self._x = as_rows(x)
        self._logits = grouped.grouped_linear(x, self._copy.weight, self._module._parameters.get("bias"))
        return self._logits

    def argmax(self, logits: Tensor) -> Tensor | None:
        """Returns the most likely argmax of each row, [M]; None if `logits` are not those that `logits` returned."""
        x, ours, self._x, self._logits = self._x, self._logits, None, None
        if x is None or ours is None or not _are_same(logits, ours):
            return None
        found = torch.empty(len(x), dtype=torch.int64, device=x.device)
        bias = self._module._parameters.get("bias")
        approximate_logits.argmax_out(found, logits, x, self.weight.weight, bias, self._copy)
        return found


def _are_same(one: Tensor, other: Tensor) -> bool:
    """Whether two contiguous tensors have the same elements in the same memory."""
    same = one.untyped_storage()._cdata == other.untyped_storage()._cdata and one.dtype is other.dtype
    return same and one.numel() == other.numel() and one.is_contiguous() and other.is_contiguous()
