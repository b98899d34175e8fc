"""What is taken for a while is given back wherever an interrupt comes, and no interrupt is swallowed."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fastgen import interrupts
from fastgen.interrupts import forkable_lock, guarded, undoing
from tests.interrupted import Interrupter, in_files, points, signals


def interrupted_everywhere(call: Callable[[], None], *functions: Any) -> Iterator[Interrupter]:
    """Calls, each interrupted at another instruction of these functions, or of interrupts.py."""
    codes, own = {function.__code__ for function in functions}, in_files("interrupts.py")
    for point in points(call, lambda code: code in codes or own(code), None):
        interrupter = Interrupter(lambda code: code in codes or own(code), point)
        interrupter.run(call)
        yield interrupter


def test_what_is_taken_is_given_back_at_every_instruction() -> None:
    lock, taken, undone = forkable_lock(), [], []

    def undo() -> None:
        taken.clear()
        undone.append(True)

    @guarded
    def call() -> None:
        with undoing(undo):
            taken.append(1)
            with lock:
                taken.append(2)
            inner()

    @guarded
    def inner() -> None:
        with undoing(undo):
            taken.append(3)

    came = 0
    for interrupter in interrupted_everywhere(call, call.__wrapped__, inner.__wrapped__, undo):
        if interrupter.error is None:
            assert not interrupter.has_come, interrupter.place
            continue
        came += 1
        found: list[bool] = []  # whether another thread may take the lock
        thread = threading.Thread(target=lambda found=found: found.append(lock.acquire(blocking=False)))
        thread.start()
        thread.join()
        assert found == [True] and not taken and not interrupts._here.taken, interrupter.place
        lock._at_fork_reinit()  # the thread is gone
    assert came > 50 and undone


def test_what_is_inside_is_undone_first() -> None:
    """Wherever the interrupt comes, also where the inner context waits in its end: in the end all is as outside."""
    state = ["outside"]

    def put(value: str) -> None:
        state[0] = value

    @guarded
    def call() -> None:
        with undoing(functools.partial(put, "outside")):
            put("outer")
            with undoing(functools.partial(put, "outer")):
                put("inner")

    came = 0
    for interrupter in interrupted_everywhere(call, call.__wrapped__, put):
        came += interrupter.error is not None
        assert state == ["outside"] and not interrupts._here.taken, interrupter.place
    assert came > 50


def test_an_undo_that_fails_stops_no_other() -> None:
    calls = []

    def fail() -> None:
        raise ValueError("mine")

    @guarded
    def call() -> None:
        undoing(lambda: calls.append(1)).__enter__()
        undoing(fail).__enter__()
        raise KeyboardInterrupt

    with pytest.raises(ValueError, match="mine"):
        call()
    assert calls == [1]


def test_what_is_behind_an_error() -> None:
    assert interrupts.behind(ValueError()) is None
    interrupt = KeyboardInterrupt()
    assert interrupts.behind(interrupt) is interrupt
    for is_cause in (True, False):
        try:
            try:
                try:
                    raise interrupt
                except KeyboardInterrupt as first:
                    if is_cause:
                        raise ValueError from first
                    raise ValueError  # noqa: B904
            except ValueError:
                raise RuntimeError("cannot release") from None
        except RuntimeError as error:
            assert interrupts.behind(error) is interrupt
            with pytest.raises(KeyboardInterrupt):
                interrupts.pass_on(error)


def test_what_was_handled_before_is_not_behind_it() -> None:
    @guarded
    def call() -> BaseException | None:
        try:
            raise ValueError
        except ValueError as error:
            return interrupts.behind(error)

    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert call() is None


class TimeLimit(Exception):
    """What a handler of signals raises to end a call."""


def _limit(*_: object) -> None:
    raise TimeLimit


class _Object:
    def __call__(self, *_: object) -> None:
        raise TimeLimit

    def method(self, *_: object) -> None:
        raise TimeLimit


@pytest.mark.parametrize(
    "handler", [_limit, functools.partial(_limit, 1), _Object(), _Object().method, lambda *_: _limit()]
)
def test_what_a_handler_of_signals_raises_is_behind_an_error(handler: Any) -> None:
    with signals(handler):
        try:
            signal.raise_signal(signal.SIGINT)
        except TimeLimit as error:
            limit = error
        assert interrupts.behind(limit) is limit
        failure = ValueError()
        failure.__context__ = limit
        assert interrupts.behind(failure) is limit
        with pytest.raises(TimeLimit):
            interrupts.pass_on(failure)
    assert interrupts.behind(limit) is None  # an error like any other


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("times", [1, 2, 10**6])
def test_an_undo_that_is_interrupted_is_done_again(error: type[BaseException], times: int) -> None:
    """Also by a handler of SIGTERM that calls `sys.exit`; but not for ever."""
    calls = []

    def undo() -> None:
        calls.append(1)
        if len(calls) <= times:
            raise error

    @guarded
    def call() -> None:
        with undoing(lambda: calls.append(0)), undoing(undo):
            pass

    with pytest.raises(error):
        call()
    assert calls == [1] * (times + 1) + [0] or times > 2


def test_a_decorated_handler_is_told_from_what_has_the_same_decorator() -> None:
    import torch

    with signals(torch.no_grad()(_limit)):
        try:
            signal.raise_signal(signal.SIGINT)
        except TimeLimit as error:
            assert interrupts.behind(error) is error
        try:
            torch.no_grad()(int)("x")
        except ValueError as error:
            assert interrupts.behind(error) is None
