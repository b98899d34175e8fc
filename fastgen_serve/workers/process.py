"""The process that a model runs in."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

from fastgen_serve.settings import ServeSettings
from fastgen_serve.workers import messages

# Seconds in which the last message gets to the server.
_PATIENCE = 5.0
# Seconds without a job behind which memory goes back to the system. Under load it is used again.
_QUIET = 1.0
# The exit statuses of a process that cannot load its model, and of one in which something has failed.
_BROKEN, _FAILED = 2, 3


def run(connection: Connection, name: str, settings: ServeSettings) -> None:
    """Loads a model and runs its jobs until the server says so, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which says when to end
    threading.excepthook = _end_with
    import torch

    import fastgen
    from fastgen import memory
    from fastgen.pipeline.errors import PipelineError, one_line
    from fastgen_serve.workers.pipe import Pipe
    from fastgen_serve.workers.worker import Worker

    # A server runs for long: whatever is captured pays, and results do not depend on what was asked before.
    fastgen.enable(captured_step="always", weight_dtype=settings.weight_dtype)
    threads = settings.threads or fewer_threads(torch.get_num_threads(), memory.processor_limit())
    if threads is not None:
        torch.set_num_threads(threads)
    torch.seed()  # otherwise each process draws the same

    def receive(message: Any) -> None:
        if isinstance(message, messages.Stop):
            _leave(0)
        worker.receive(message)

    # It sends nothing before there is a pipe, and the server nothing before the model is ready.
    worker = Worker(name, settings, lambda message: pipe.send(message))
    pipe = Pipe(connection, receive, lambda error: _leave(0 if error is None else _FAILED))
    try:
        worker.load()
    except Exception as error:
        reason = one_line(error)
        if not isinstance(error, PipelineError):  # nobody has thought of it
            traceback.print_exc()
            reason = f"model {settings.path(name)} cannot be loaded: {type(error).__name__}: {reason}"
        pipe.send(messages.Broken(reason))
        pipe.close(_PATIENCE)
        _leave(_BROKEN)
    while True:
        memory.give_back_free()  # of what has loaded the model, too
        worker.wait_until_quiet(_QUIET)


def fewer_threads(cores: int, limit: int | None) -> int | None:
    """As many as a container's limit of processors, which torch does not know; None where there are no more cores."""
    return limit if limit is not None and limit < cores else None


def _end_with(failure: threading.ExceptHookArgs) -> None:
    """A thread has ended that runs jobs: nobody is left to answer. The server starts another process."""
    threading.__excepthook__(failure)
    if failure.thread is not None and failure.thread.name.startswith("fastgen-"):
        _leave(_FAILED)


def _leave(status: int) -> None:
    """Ends the process, whatever its threads do. There is nothing to be kept."""
    sys.stderr.flush()
    os._exit(status)
