"""Interrupts (Ctrl-C) at chosen and at random moments, and whether one has left something taken."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import overrides
from torch.utils import _python_dispatch

import fastgen
from fastgen import interrupts, patching
from fastgen.decoding import host_memory, layers
from fastgen.decoding.captured import recording
from fastgen.optimizer.transformers.call import Call

PACKAGE = Path(fastgen.__file__).parent
# Called instead of a function in Python, in which the signal would be looked at: it is set, and the code that is traced
# meets it where it looks for signals itself.
_set_interrupt = ctypes.pythonapi["PyErr_SetInterrupt"]
_set_interrupt.restype, _set_interrupt.argtypes = None, [ctypes.py_object] * 3  # which it ignores


class Interrupter:
    """Interrupts the main thread at one instruction of some functions.

    Args:
        is_chosen: whether the instructions of a function count.
        point: the number of the instruction, from 1 on; 0 for none, which counts them.
    """

    def __init__(self, is_chosen: Callable[[CodeType], bool], point: int) -> None:
        self._is_chosen, self._point = is_chosen, point
        self._known: dict[CodeType, bool] = {}
        self.seen, self.has_come, self.place = 0, False, ""
        self.was_in_destructor = False  # of garbage that was collected meanwhile: Python drops what is raised there
        self.error: KeyboardInterrupt | None = None  # with the frames that it came through

    def run(self, call: Callable[[], Any]) -> Any:
        """What `call` returns; None where the interrupt has ended it, which is in `error` then."""
        before = signal.signal(signal.SIGINT, self._interrupt)
        hook, sys.unraisablehook = sys.unraisablehook, self._note_dropped
        try:
            sys.settrace(self._begin)
            result = call()
            sys.settrace(None)  # behind which Python looks for signals: one that came last is met here
            return result
        except KeyboardInterrupt as error:
            self.error = error
        finally:
            sys.settrace(None)
            signal.signal(signal.SIGINT, before)
            sys.unraisablehook = hook
        return None

    def _note_dropped(self, dropped: Any) -> None:
        self.was_in_destructor |= isinstance(dropped.exc_value, KeyboardInterrupt)

    def _begin(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        chosen = self._known.get(code)
        if chosen is None:
            chosen = self._known[code] = self._is_chosen(code)
        if not chosen:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._step

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            self.seen += 1
            if self.seen == self._point:
                self.place = f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_lasti})"
                return _set_interrupt
        return self._step

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if not self.has_come:
            sys.settrace(None)
            self.has_come = True
            raise KeyboardInterrupt(self.place)


def points(call: Callable[[], object], is_chosen: Callable[[CodeType], bool], most: int | None) -> Iterable[int]:
    """The instructions to interrupt at: all, or `most` of them drawn at random."""
    counting = Interrupter(is_chosen, 0)
    counting.run(call)
    assert counting.seen > 0
    found = range(1, counting.seen + 1)
    return found if most is None or len(found) <= most else sorted(random.Random(0).sample(found, most))


def in_files(*names: str) -> Callable[[CodeType], bool]:
    """Whether a function is of one of these files of the package: "file.py", or "file.py:function"."""
    wanted = {(str(PACKAGE / name.partition(":")[0]), name.partition(":")[2]) for name in names}

    def is_chosen(code: CodeType) -> bool:
        return bool(wanted & {(code.co_filename, ""), (code.co_filename, code.co_name)})

    return is_chosen


def what_is_taken(*models: torch.nn.Module) -> list[str]:
    """What an interrupt has left behind; nothing, as it should be."""
    checks = {
        "patches are suspended": patching.is_active(),
        "a call is open": Call.current() is None,
        "something is recorded": threading.get_ident() not in recording._recording,
        "memory is kept": not host_memory._inside,
        "no gradients": torch.is_grad_enabled(),
        "inference mode": not torch.is_inference_mode_enabled(),
        "no garbage is collected": gc.isenabled(),
        "a dispatch mode": not _python_dispatch._get_current_dispatch_mode_stack(),
        "a function mode": not overrides._get_current_function_mode_stack(),
        "a plan is open": _has_no_plan(),
        "layers in use": not any(layers.FastLayers.of(model)._users for model in models),
        "layers changed": not any("forward" in vars(module) for model in models for module in model.modules()),
    }
    return [name for name, is_free in checks.items() if not is_free] + _locks_taken()


def _has_no_plan() -> bool:
    try:
        torch.ops.fastgen.open_plan.default()
    except RuntimeError:
        return False
    finally:
        torch.ops.fastgen.close_plan.default(-1)
    return True


def _locks_taken() -> list[str]:
    """In another thread: this one can take what it has."""
    found: list[str] = []

    def look() -> None:
        for lock in (*interrupts._made, layers.FastLayers._lock):
            if lock.acquire(timeout=60):
                lock.release()
            else:
                found.append(f"the lock {lock}")

    other = threading.Thread(target=look)
    other.start()
    other.join()
    return found


@contextlib.contextmanager
def signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
