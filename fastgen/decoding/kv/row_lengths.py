"""A separate length for each row, for models that expect one number: the number of positions before those they read.

Many models compute positions from the length of their cache, which is one number for all rows. A `RowLengths` replaces
that number. What a model computes from it is computed for each row, under `torch.vmap`. Once a result meets tensors
that have a row dimension, such as hidden states, each row gets its own value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from fastgen.decoding.kv.symbolic_length import SymbolicLength
from fastgen.decoding.kv.view import CannotBeCaptured

# Questions about a tensor that do not read its values.
_QUESTIONS = frozenset(
    {"__get__", "size", "dim", "numel", "is_floating_point", "is_complex", "element_size", "get_device"}
)
# Hidden states and scores have at least this many dimensions, rows first. Masks have one more.
_DIMENSIONS_OF_STATES = 3


class RowLengths(Tensor):
    """A tensor of any shape with a separate value for each row.

    Any access that bypasses `__torch_function__` raises, because the tensor itself has no values.

    Attributes:
        by_row: [rows, *shape].
        bounds: an upper limit of all rows, whose bounds the host knows; None for most derived values.
    """

    by_row: Tensor
    bounds: SymbolicLength | None

    @staticmethod
    def of(by_row: Tensor, bounds: SymbolicLength | None = None) -> RowLengths:
        made = Tensor._make_wrapper_subclass(RowLengths, by_row.shape[1:], dtype=by_row.dtype, device=by_row.device)
        made.by_row, made.bounds = by_row, bounds
        return made

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", None) in _QUESTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is torch.result_type:
            return func(*(x.by_row if isinstance(x, RowLengths) else x for x in args))
        if len(args) == 2 and type(args[1]) is int and isinstance(args[0], RowLengths) and args[0].bounds is not None:
            bounds = func(args[0].bounds, args[1])
            if type(bounds) is bool:
                return bounds
            if isinstance(bounds, SymbolicLength):
                return RowLengths.of(func(args[0].by_row, args[1]), bounds)
        flat, structure = _pytree.tree_flatten((args, kwargs))
        ordinary = (x for x in flat if isinstance(x, Tensor) and not isinstance(x, RowLengths))
        states = [x.dim() for x in ordinary if x.dim() >= _DIMENSIONS_OF_STATES + (not x.is_floating_point())]
        if states:
            flat = [x._of_own_row(max(states)) if isinstance(x, RowLengths) else x for x in flat]
            args, kwargs = _pytree.tree_unflatten(flat, structure)
            return func(*args, **kwargs)
        return cls._for_each_row(func, flat, structure)

    @classmethod
    def _for_each_row(cls, func: Callable, flat: list[Any], structure: Any) -> Any:
        ours = [place for place, x in enumerate(flat) if isinstance(x, RowLengths)]

        def run(*values: Tensor) -> Any:
            parts = list(flat)
            for place, value in zip(ours, values, strict=True):
                parts[place] = value
            args, kwargs = _pytree.tree_unflatten(parts, structure)
            return func(*args, **kwargs)

        with torch._C.DisableTorchFunctionSubclass():
            found = torch.vmap(run)(*(flat[place].by_row for place in ours))
        return RowLengths.of(found)

    def _of_own_row(self, dimensions: int) -> Tensor:
        """Returns an ordinary tensor of this many dimensions, rows first, with each row's own value."""
        values = self.by_row
        values = values.reshape(values.shape[0], *[1] * (dimensions - values.dim() + 1), *values.shape[1:])
        if values.shape[1] == 1:
            return values[:, 0]
        if values.shape[1] != values.shape[0]:
            raise CannotBeCaptured("a model whose positions are not those of its rows")
        return values.diagonal(dim1=0, dim2=1).movedim(-1, 0)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is no class method
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        raise CannotBeCaptured(f"{func} of a length that is another one for each row")


def arange(*args: Any, **options: Any) -> Tensor:
    """Replaces `torch.arange`, which does not dispatch on the classes of its arguments.

    A range from one such length to another has a known size if their distance is known.
    """
    count = _distance(*args) if len(args) == 2 else None
    return torch.arange(*args, **options) if count is None else torch.arange(count, **options) + args[0]


def getitem(tensor: Tensor, index: Any) -> Any:
    """Replaces `Tensor.__getitem__`, and accepts slices from one such length to another, as in
    `table[:, length : length + 1]`. Their distance is the size of the result.
    """
    parts = index if isinstance(index, tuple) else (index,)
    # Beside an index that is not a slice, a tensor of indices would create another axis.
    for at, part in enumerate(parts if all(type(part) is slice for part in parts) else ()):
        count = _distance(part.start, part.stop) if part.step is None else None
        if count is not None:
            places = torch.arange(count, device=tensor.device) + part.start
            return tensor[tuple([*parts[:at], places, *parts[at + 1 :]])]
    return Tensor.__getitem__(tensor, index)


def _distance(start: Any, end: Any) -> int | None:
    """Returns the difference of two lengths; None if the host does not know it."""
    first, last = (each.bounds if isinstance(each, RowLengths) else each for each in (start, end))
    if isinstance(first, SymbolicLength) and isinstance(last, SymbolicLength) and first.origin is last.origin:
        return last.offset - first.offset
    return None
