"""What the commands have in common: exit statuses, errors on one line, and the line about waiting."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

DONE, SKIPPED, SETUP, INTERRUPTED = 0, 1, 2, 130


class UsageError(Exception):
    """The command line is not one."""


def fail(program: str, message: str, status: int) -> int:
    """Reports an error; returns the exit status."""
    print(f"{program}: {message}", file=sys.stderr)
    return status


def reported(program: str, work: Callable[[], int], debug: bool) -> int:
    """The status that `work` returns, or that of the error that ended it, which is reported on one line.

    Args:
        debug: let errors that are nobody's fault but the program's through, with their traceback.
    """
    try:
        return work()
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
def model_of_its_own() -> Iterator[None]:
    """Inside this block packed weights live as long as the model: nobody writes to its weights between two batches."""
    from fastgen import settings

    asked_for = settings.current().packed_weights != "call" or bool(os.environ.get("FASTGEN_PACKED_WEIGHTS"))
    with contextlib.nullcontext() if asked_for else settings.changed(packed_weights="keep"):
        yield


def timing_line(input_share: float, output_share: float, finish: float) -> str:
    """How well a pipeline did: what part of its time the model waited, and what was left to do after it."""
    return (
        f"the model waited {100 * input_share:.2f} % of the time for input and {100 * output_share:.2f} % for "
        f"post-processing; finishing took {finish:.2f} s more"
    )
