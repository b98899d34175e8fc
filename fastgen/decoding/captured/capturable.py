"""Makes the code of models capturable: it runs without copies between host and device, and waits for neither.

A model's code sees lengths whose values only the device knows. `SymbolicLength` is one for all rows, with bounds that
the host knows. `RowLengths` replaces it where each row has its own: what a model computes from the length of its cache,
such as positions, is then computed for each row, under `torch.vmap`. Once a result meets tensors that have a row
dimension, such as hidden states, each row gets its own value.

Inside `Capturable`, tensors of numbers that the host knows are made on the device.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import EllipsisType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from fastgen.decoding.kv.view import CannotBeCaptured

# The most numbers of which a tensor is made on the device, with one call for each.
_MOST_NUMBERS = 256


class SymbolicLength(Tensor):
    """One integer on the device. The host answers comparisons that its bounds decide, without waiting for the device.

    Models compare the length of their cache with zero, or with the size of their table of positions. If the bounds do
    not decide a comparison, its result is a tensor, as for any tensor.

    Attributes:
        low, high: the bounds, both inclusive.
        origin, offset: the number is `origin` + `offset`.
        answers: the answers given so far, also by numbers derived from this one. A recording made meanwhile stays valid
            as long as all of them hold.
    """

    low: int
    high: int
    origin: Tensor
    offset: int
    answers: set[tuple[Any, int, bool]]

    @staticmethod
    def of(number: Tensor, low: int, high: int) -> SymbolicLength:
        """Returns `number`, a 0-dim integer tensor, with bounds. The result shares its memory."""
        made = number.as_subclass(SymbolicLength)
        made.low, made.high = low, high
        made.origin, made.offset, made.answers = number, 0, set()
        return made

    def move(self, low: int, high: int) -> bool:
        """Sets other bounds. Returns whether all answers so far still hold."""
        self.low, self.high = low, high
        return self.accept(self.answers)

    def accept(self, answers: set[tuple[Any, int, bool]]) -> bool:
        """Whether these answers hold with the present bounds. If so, they become answers of this number, too."""
        are_true = all(self._answer(compare, other) is answer for compare, other, answer in answers)
        if are_true:
            self.answers |= answers
        return are_true

    def _answer(self, compare: Callable[[int, int], bool], other: int) -> bool | None:
        """Returns the result of a comparison; None if the bounds do not decide it."""
        telling = (self.low, self.high, min(max(other, self.low), self.high))
        found = {compare(value, other) for value in telling}
        return found.pop() if len(found) == 1 else None

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        number = args[0] if args and isinstance(args[0], SymbolicLength) else None
        if func is Tensor.__bool__:
            return bool(number != 0)
        other = args[1] if len(args) == 2 and type(args[1]) is int else None
        if number is not None and other is not None:
            if func in _COMPARISONS:
                answer = number._answer(_COMPARISONS[func], other)
                if answer is not None:
                    number.answers.add((_COMPARISONS[func], other - number.offset, answer))
                    return answer
            elif func in _SHIFTS:
                count = _SHIFTS[func] * other
                with torch._C.DisableTorchFunctionSubclass():
                    made = SymbolicLength.of(torch.add(number, count), number.low + count, number.high + count)
                made.origin, made.offset, made.answers = number.origin, number.offset + count, number.answers
                return made
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _torch_forms(name: str) -> tuple[Any, ...]:
    """Returns torch's functions for an operation: the method, and the one of the operator sign."""
    return tuple(getattr(Tensor, form) for form in (name, f"__{name}__"))


_COMPARISONS: dict[Any, Callable[[int, int], bool]] = {
    form: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne") for form in _torch_forms(name)
}
_SHIFTS = {form: sign for name, sign in (("add", 1), ("sub", -1)) for form in _torch_forms(name)} | {Tensor.__radd__: 1}


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


def _arange(*args: Any, **options: Any) -> Tensor:
    """Replaces `torch.arange`, which does not dispatch on the classes of its arguments.

    A range from one such length to another has a known size if their distance is known.
    """
    count = _distance(*args) if len(args) == 2 else None
    return torch.arange(*args, **options) if count is None else torch.arange(count, **options) + args[0]


def _getitem_of_lengths(tensor: Tensor, index: Any) -> Any:
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


def capturable(function: Callable[[], object]) -> Callable[[], None]:
    """Returns the function with avoidable host copies and waits replaced (`Capturable`)."""

    def run() -> None:
        with Capturable():
            function()

    return run


class Capturable(TorchFunctionMode):
    """Makes tensors on the device from values that the host knows, where torch would copy or ask the device.

    One mode does all of it, because each mode adds a microsecond to every torch call of a model.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        func = _CAPTURABLE.get(func, func)
        return func(*args, **kwargs) if kwargs else func(*args)


def _where(*args: Any, **options: Any) -> Any:
    """Replaces `torch.where`, and makes tensors of numbers."""
    if len(args) == 3:
        condition, x, y = args
        args = condition, _tensor(x, y, condition.device), _tensor(y, x, condition.device)
    return torch.where(*args, **options)


def _where_of(*args: Any, **options: Any) -> Any:
    """Replaces `Tensor.where`, whose first argument is the tensor."""
    if len(args) == 3:
        x, condition, y = args
        return _where(condition, x, y, **options)
    return Tensor.where(*args, **options)


def _tensor_of(*args: Any, **options: Any) -> Tensor:
    """Replaces `torch.tensor` of a number, and of a few numbers.

    The numbers become arguments of recorded operators: they are frozen, and compared with sizes, like all others.
    """
    if len(args) != 1 or not options.keys() <= {"device", "dtype"}:
        return torch.tensor(*args, **options)
    numbers = args[0]
    if isinstance(numbers, (bool, int, float)):
        return torch.full((), numbers, **options)
    kinds = set(map(type, numbers)) if isinstance(numbers, (list, tuple)) and len(numbers) <= _MOST_NUMBERS else ()
    if len(kinds) == 1 and kinds <= {bool, int, float}:
        return torch.stack([torch.full((), number, **options) for number in numbers])
    return torch.tensor(*args, **options)


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """Replaces `one_hot`, which on a CPU looks for numbers that are no class."""
    if num_classes < 1:
        return F.one_hot(tensor, num_classes)
    return tensor.new_zeros(*tensor.shape, num_classes).scatter(-1, tensor.unsqueeze(-1), 1)


def _getitem(tensor: Tensor, index: Any) -> Any:
    """Replaces `Tensor.__getitem__`, with a slice for a list of one index, of which torch would make a tensor."""
    parts = index if type(index) is tuple else (index,)
    lists = [at for at, part in enumerate(parts) if type(part) is list]
    if len(lists) != 1 or not all(type(part) in (list, slice, EllipsisType) for part in parts):
        return _getitem_of_lengths(tensor, index)
    (at,) = lists
    if len(parts[at]) != 1 or type(parts[at][0]) is not int:
        return _getitem_of_lengths(tensor, index)
    (place,) = parts[at]
    found = Tensor.__getitem__(tensor, (*parts[:at], slice(place, place + 1 or None), *parts[at + 1 :]))
    axis = at - len(parts) if any(part is Ellipsis for part in parts[:at]) else at
    if found.shape[axis] != 1:  # the index is out of range, for which a slice raises no error
        return _getitem_of_lengths(tensor, index)
    return found.clone()  # indexing with a list gives no view


_CAPTURABLE: dict[Any, Callable[..., Any]] = {
    torch.where: _where,
    Tensor.where: _where_of,
    torch.tensor: _tensor_of,
    torch.arange: _arange,
    F.one_hot: _one_hot,
    Tensor.__getitem__: _getitem,
}


def _tensor(x: Any, other: Any, device: torch.device) -> Any:
    """Returns a number as a tensor, of the dtype that it and `other` promote to."""
    if isinstance(x, Tensor):
        return x
    return torch.full((), x, dtype=torch.result_type(x, other), device=device)
