"""Copies of weights that recorded steps multiply with, and whether they still stand for the weights.

A copy lives as long as the programs that use it. Whether it still stands for the weight is looked at once in each call,
by the contents of the weight (`fastgen.ops.fingerprint`). During a call, only code of others could change it: where
such code runs, the rest of the call does without copies. What a copy is, a class says for itself.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from fastgen import counters
from fastgen.interrupts import undoing
from fastgen.ops import fingerprint

# So many calls do without a copy that does not help, or that cannot be made.
PAUSE = 64
# Steps that take about as long as making a copy: one of a weight that has changed must pay first.
STEPS_OF_COPY = 32


class _Call:
    """A call that uses programs, with those inside of it."""

    def __init__(self) -> None:
        self.others_ran = False  # code of others has run inside of it
        self.used: set[str] = set()  # what it has used, by the name in `fastgen.stats()`


class _Calls(threading.local):
    """Those of this thread."""

    def __init__(self) -> None:
        self.outermost, self.is_inside = _Call(), False

    def leave(self, call: _Call) -> None:
        """The outermost one is over."""
        self.is_inside = False
        while call.used:
            counters.count_accelerated(call.used.pop())


_calls = _Calls()


@contextlib.contextmanager
def call() -> Iterator[None]:
    """A call that uses programs; one may run inside another. Before the outermost one, weights may have changed."""
    if _calls.is_inside:
        yield
        return
    own = _Call()
    with undoing(partial(_calls.leave, own)):
        _calls.outermost, _calls.is_inside = own, True
        yield


def now() -> _Call:
    """The outermost call of this thread: of another one, it is another object."""
    return _calls.outermost


def others_run() -> None:
    """Code of others is about to run inside the call. It might write to weights."""
    _calls.outermost.others_ran = True


class CopiedWeight:
    """A weight as it is, and its copy.

    Attributes:
        looks_at: a call looks whether the copy stands for the weight when it needs it for this time, and does without
            it before. The look costs as much as reading the weight.
        waits: the first copy is made in the step of this number.
        counted_as: calls that use copies are counted under this name in `fastgen.stats()`, if there is one.
    """

    looks_at: ClassVar[int] = 1
    waits: ClassVar[int] = 1
    counted_as: ClassVar[str | None] = None
    _known: ClassVar[weakref.WeakValueDictionary[tuple[Any, ...], Any]]

    def __init_subclass__(cls) -> None:
        cls._known = weakref.WeakValueDictionary()

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self._copy: Any = None
        self._fingerprint: int | None = None  # of what the copy was made of
        self._seen_in: _Call | None = None  # the last call that needed the copy, and how often it has
        self._uses = 0
        self._pause = 0  # calls that will not look at it
        self._waits = self.waits  # steps until there will be a copy

    @classmethod
    def of(cls, weight: Tensor) -> Any:
        """The one of a weight, which all programs share that use it."""
        # It holds the weight, so that no other one can come to lie there.
        key = weight.data_ptr(), tuple(weight.shape)
        found = cls._known.get(key)
        if found is None:
            found = cls._known[key] = cls(weight)
        return found

    def copy(self) -> Any:
        """The copy, of the weight as it is in this call; None where there is none, or it does not help."""
        call = _calls.outermost
        if call.others_ran:
            return None
        if self._seen_in is not call:
            self._seen_in, self._uses = call, 0
        self._uses += 1
        if self._uses < self.looks_at:
            return None
        if self._uses == self.looks_at:
            self._look_again()
        if self._waits > 0:
            self._waits -= 1
            if self._waits == 0:
                self._make_copy()
        if self.counted_as is not None and self._copy is not None:
            call.used.add(self.counted_as)
        return self._copy

    @property
    def is_settled(self) -> bool:
        """Whether `copy` gives the same from now on, up to the end of the call or to where code of others runs."""
        return self._seen_in is _calls.outermost and self._uses >= self.looks_at and self._waits == 0

    @property
    def held(self) -> Any:
        """The copy, even if the weight has changed since; None where there is none."""
        return self._copy

    def _look_again(self) -> None:
        """In a new call: whether the copy still stands for the weight."""
        if self._pause > 0:
            self._pause -= 1
        elif self._copy is None:
            self._waits = self._waits or STEPS_OF_COPY
        elif fingerprint.fingerprint(self._weight) != self._fingerprint:
            self._copy, self._waits = None, STEPS_OF_COPY

    def _make_copy(self) -> None:
        # In this order: a copy of what is written meanwhile has another fingerprint.
        self._fingerprint = fingerprint.fingerprint(self._weight)
        self._copy, self._waits = self._copied(self._weight), 0
        if self._copy is None:
            self._pause = PAUSE

    def _copied(self, weight: Tensor) -> Any:
        """A copy of the weight; None where there can be none, or memory is short."""
        raise NotImplementedError

    def _do_without(self) -> None:
        """The copy does not help: it is freed, and some calls do without one."""
        self._copy, self._pause = None, PAUSE
