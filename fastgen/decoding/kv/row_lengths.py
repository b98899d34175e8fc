"""A length of each row, where a model has one number: the number of positions in front of those that it reads.

Many models compute positions from the length of their cache, which is one for all rows. A `RowLengths` stands for that
number. What a model computes from it, it computes for each row: operations on it run under `torch.vmap`. Where the
result meets what the model computes of its tokens, row by row, each row gets its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from fastgen.decoding.kv.symbolic_length import SymbolicLength
from fastgen.decoding.kv.view import CannotBeCaptured

# What is asked of a tensor without looking at its numbers.
_QUESTIONS = frozenset(
    {"__get__", "size", "dim", "numel", "is_floating_point", "is_complex", "element_size", "get_device"}
)
# Hidden states and scores have at least so many dimensions, of which the first are the rows; masks have one more.
_DIMENSIONS_OF_STATES = 3


class RowLengths(Tensor):
    """A tensor of any shape that is another one for each row.

    Anything that does not come through `__torch_function__` raises: there are no numbers in the tensor itself.

    Attributes:
        by_row: [rows, *shape].
        bounds: what all rows are not longer than, of which the host knows bounds; None for what was made of it.
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
        """An ordinary tensor of so many dimensions, of which the first are the rows: each with what is its own."""
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
    """`torch.arange`, which does not ask the classes of its arguments.

    A range from one such length to another has the size that their distance says.
    """
    count = _distance(*args) if len(args) == 2 else None
    return torch.arange(*args, **options) if count is None else torch.arange(count, **options) + args[0]


def getitem(tensor: Tensor, index: Any) -> Any:
    """`Tensor.__getitem__`, which takes slices from one such length to another one, as `table[:, length : length + 1]`:
    the size of what they give is what the distance says.
    """
    parts = index if isinstance(index, tuple) else (index,)
    # Beside an index of another kind, one of numbers would be another axis.
    for at, part in enumerate(parts if all(type(part) is slice for part in parts) else ()):
        count = _distance(part.start, part.stop) if part.step is None else None
        if count is not None:
            places = torch.arange(count, device=tensor.device) + part.start
            return tensor[tuple([*parts[:at], places, *parts[at + 1 :]])]
    return Tensor.__getitem__(tensor, index)


def _distance(start: Any, end: Any) -> int | None:
    """By how much a length is more than another one; None where the host does not know."""
    first, last = (each.bounds if isinstance(each, RowLengths) else each for each in (start, end))
    if isinstance(first, SymbolicLength) and isinstance(last, SymbolicLength) and first.origin is last.origin:
        return last.offset - first.offset
    return None
