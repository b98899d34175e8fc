"""What the commands have in common: exit statuses, errors on one line, interrupts, and closed streams."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fastgen import patching
from fastgen.counters import ENCODER, Outcome

DONE, SKIPPED, SETUP, INTERRUPTED = 0, 1, 2, 130


class UsageError(Exception):
    """The command line is not one."""


class Ended(Exception):
    """The command ends here, with a message and an exit status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def fail(program: str, message: str, status: int) -> int:
    """Reports an error; returns the exit status."""
    print(f"{program}: {message}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:
        # Python would try again when the process ends, print a traceback and change the status.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    return status


def renamed(program: str, words: Sequence[str]) -> list[str]:
    """The words of a command line with the names that options have now.

    Each old name gets a line on standard error, that of an environment variable as well.
    """
    from fastgen.settings import RENAMED

    options = list(words)

    def tell(old: str, new: str) -> None:
        print(f"{program}: DeprecationWarning: {old} is now called {new}", file=sys.stderr)

    for old_name, new_name in RENAMED.items():
        variable, old, new = (f"FASTGEN_{old_name.upper()}", *(_option(name) for name in (old_name, new_name)))
        if os.environ.get(variable, "").strip():
            tell(variable, f"FASTGEN_{new_name.upper()}")
        for position, word in enumerate(itertools.takewhile(lambda word: word != "--", words)):
            name, equals, value = word.partition("=")
            if name == old:
                tell(old, new)
                options[position] = new + equals + value
    return options


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def reported(program: str, work: Callable[[], int], debug: bool) -> int:
    """The status that `work` returns, or that of the error that ended it, which is reported on one line.

    Args:
        debug: let errors that are nobody's fault but the program's through, with their traceback.
    """
    try:
        return work()
    except KeyboardInterrupt:
        return fail(program, "interrupted", INTERRUPTED)
    except Ended as error:
        return fail(program, str(error), error.status)
    except UsageError as error:
        return fail(program, f"{error} (--help lists the options)", SETUP)
    except Exception as error:
        if debug:
            raise
        from fastgen.pipeline import PipelineError
        from fastgen.pipeline.errors import one_line

        if isinstance(error, PipelineError):
            return fail(program, one_line(error), error.status)
        if isinstance(error, BrokenPipeError):
            return fail(program, "the reader of the output has gone away", SKIPPED)
        return fail(program, f"{type(error).__name__}: {one_line(error)} (--debug shows where)", SETUP)


@contextlib.contextmanager
def interrupts_end(program: str) -> Iterator[None]:
    """Inside this block Ctrl-C ends the process with one line and status 130, until `allow_interrupts` is called.

    Imports take seconds, and libraries catch a KeyboardInterrupt or print it where it cannot be raised. Nothing is
    half-written then, so the process can end on the spot.
    """

    def end(*_: object) -> None:
        os.write(2, f"{program}: interrupted\n".encode())
        _give_semaphores_back()
        os._exit(INTERRUPTED)

    before = signal.getsignal(signal.SIGINT)
    # Whoever has a handler of their own, or runs this in a thread, keeps what they have.
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    _interrupts_before.append(before)
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        allow_interrupts()


def _give_semaphores_back() -> None:
    """Those that worker processes share have names in the system, and Python warns of each that is left at the end."""
    util, synchronize = (sys.modules.get(f"multiprocessing.{name}") for name in ("util", "synchronize"))
    with contextlib.suppress(Exception):  # none of this has a public name, and the process ends in any case
        for finalizer in list(util._finalizer_registry.values()):  # type: ignore[union-attr]
            if finalizer._callback == synchronize.SemLock._cleanup:  # type: ignore[union-attr]
                finalizer()


# The handler of Ctrl-C to go back to, while `interrupts_end` has its own.
_interrupts_before: list[Any] = []


def allow_interrupts() -> None:
    """From now on Ctrl-C is an exception again; see `interrupts_end`."""
    if _interrupts_before:
        signal.signal(signal.SIGINT, _interrupts_before.pop())


_closed: set[str] = set()


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """Inside this block the standard streams are there: one that was closed is the null device.

    Without, printing would fail, and a file that is opened later would be given the number of the closed stream.
    """
    streams = {
        name: mode for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")) if not getattr(sys, name)
    }
    for name, mode in streams.items():
        setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (closed below)
    _closed.update(streams)
    try:
        yield
    finally:
        for name in streams:
            getattr(sys, name).close()
            setattr(sys, name, None)
        _closed.clear()


def check_stream(name: str, needed: bool) -> None:
    """Raises `UsageError` where a standard stream is needed that was closed when the command began."""
    if needed and name in _closed:
        raise UsageError(f"{name} is closed: give a file")


@contextlib.contextmanager
def model_of_its_own() -> Iterator[None]:
    """Settings for a model that nobody else uses, whose output can be repeated to the last digit.

    Packed weights live as long as the model, because nobody writes to its weights between two batches. The products of
    linear layers are chosen by fixed rules. What the user asked for otherwise stays.
    """
    from fastgen import settings

    with settings.changed(**settings.unless_explicit(packed_weights="keep")):
        yield


_NOT_CALLED = "FastGen was not called (python -m fastgen says what it hooks)"
_NOT_COUNTED = {ENCODER: "FastGen does not know the layers of this model"}


def acceleration(stats: Mapping[str, Any], entry_point: str) -> str:
    """Whether FastGen accelerated, and why not: the last line of a command.

    Args:
        stats: what `fastgen.stats()` has counted for the command.
        entry_point: what the calls of its model are counted under.
    """
    if not patching.is_active():
        return "not accelerated: FastGen is disabled (--no-fastgen or FASTGEN_DISABLE=1)"
    outcome = Outcome.of(stats, entry_point)
    if not (outcome.accelerated or outcome.reasons):
        return f"not accelerated: {_NOT_COUNTED.get(entry_point, _NOT_CALLED)}"
    return str(outcome)


def timing_line(input_share: float, output_share: float, finish: float) -> str:
    """How well a pipeline did: what part of its time the model waited, and what was left to do after it."""
    return (
        f"the model waited {100 * input_share:.2f} % of the time for input and {100 * output_share:.2f} % for "
        f"post-processing; finishing took {finish:.2f} s more"
    )
