"""The ways in which a run can end early. Every message is one line that a user can act on."""

from __future__ import annotations


class PipelineError(Exception):
    """A run that cannot go on; `status` is the exit status of the command line."""

    status = 2


class SetupError(PipelineError):
    """What the run was given cannot work: a missing model, an unwritable output, references that do not match."""

    status = 2


class StrictError(PipelineError):
    """The first bad record under `strict`."""

    status = 1


def one_line(error: BaseException) -> str:
    """The message of an exception on one line; the type's name where it has no message."""
    text = " ".join(str(error).split())
    return text[:500] if text else type(error).__name__
