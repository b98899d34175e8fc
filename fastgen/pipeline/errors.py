"""The ways in which a run can end early. Every message is one line that a user can act on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

# After a failed write, for files that belong to a run with a journal.
RESUMABLE = "what is done is kept: --resume continues"


class PipelineError(Exception):
    """A run that cannot go on; `status` is the exit status of the command line."""

    status = 2


class SetupError(PipelineError):
    """What the run was given cannot work: a missing model, an unwritable output, references that do not match."""

    status = 2


class StrictError(PipelineError):
    """The first bad record under `strict`."""

    status = 1


def cannot_write(name: object, error: OSError, remedy: str = "") -> PipelineError:
    """The error for a file that cannot be written, such as on a full disk."""
    reason = error.strerror or one_line(error)
    return PipelineError(f"cannot write {name}: {reason}" + (f" ({remedy})" if remedy else ""))


@contextlib.contextmanager
def writing(name: object) -> Iterator[None]:
    """Inside this block an OSError becomes the error of `cannot_write`; not that of a reader who has gone away."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise cannot_write(name, error) from error


def one_line(error: BaseException) -> str:
    """The message of an exception on one line; the type's name where it has no message."""
    text = " ".join(str(error).split())
    return text[:500] if text else type(error).__name__
