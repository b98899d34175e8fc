"""A number on the device whose bounds the host knows."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


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


def _forms(name: str) -> tuple[Any, ...]:
    """Returns torch's functions for an operation: the method, and the one of the operator sign."""
    return tuple(getattr(Tensor, form) for form in (name, f"__{name}__"))


_COMPARISONS: dict[Any, Callable[[int, int], bool]] = {
    form: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne") for form in _forms(name)
}
_SHIFTS = {form: sign for name, sign in (("add", 1), ("sub", -1)) for form in _forms(name)} | {Tensor.__radd__: 1}
