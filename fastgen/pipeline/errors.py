"""Why a record is skipped, and the ways in which a run can end early. Every message is one line to act on."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass

# Added after a failed write of files that belong to a run with a journal.
RESUMABLE = "what is done is kept: --resume continues"


class PipelineError(Exception):
    """A run that cannot go on; `status` is the exit status of the command line."""

    status = 2


class SetupError(PipelineError):
    """What the run was given cannot work: a missing model, an unwritable output, references that do not match."""


class StrictError(PipelineError):
    """The first bad record under `strict`."""

    status = 1


@dataclass(frozen=True)
class Problem:
    """Why a record is skipped: a kind, which is a short word for programs, and a message for people."""

    kind: str
    message: str


@contextlib.contextmanager
def writing(name: object, remedy: str = "") -> Iterator[None]:
    """Turns an OSError in this block, such as a full disk, into a PipelineError; lets that of a closed pipe through."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        reason = error.strerror or one_line(error)
        raise PipelineError(f"cannot write {name}: {reason}" + (f" ({remedy})" if remedy else "")) from error


@contextlib.contextmanager
def explained(what: str, reason: Callable[[Exception], str] | None = None) -> Iterator[None]:
    """Turns any failure in this block into a SetupError that tells what could not be done, and why, on one line."""
    try:
        yield
    except PipelineError:
        raise
    except Exception as error:
        raise SetupError(f"{what}: {(reason or one_line)(error)}") from error


def check_installed(package: str, purpose: str, remedy: str = "") -> None:
    """Raises `SetupError` if a package, named as it is imported, is not installed. The remedy is a command."""
    if importlib.util.find_spec(package) is None:
        how = f": {remedy}" if remedy else ""
        raise SetupError(f"{purpose} needs the package {package.replace('_', '-')}, which is not installed{how}")


def one_line(error: BaseException) -> str:
    """Returns an exception's message on one line; with its type if the message is empty, or only names a key."""
    message = " ".join(str(error).split())[:500]
    kind = type(error).__name__
    return f"{kind}: {message}" if isinstance(error, KeyError) and message else message or kind
