"""The main function of a model's process."""

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

# Seconds for the last message to reach the server.
_PATIENCE = 5.0
# Seconds without a job after which free memory is returned to the system. Under load it would be needed again.
_QUIET = 1.0
# The exit statuses of a process that cannot load its model, and of one that fails later.
_BROKEN, _FAILED = 2, 3


def run(connection: Connection, name: str, settings: ServeSettings) -> None:
    """Loads a model and runs its jobs until the server sends Stop, or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server handles Ctrl-C, and ends this process
    threading.excepthook = _end_with
    import torch

    import fastgen
    from fastgen import memory
    from fastgen.pipeline.errors import PipelineError, one_line
    from fastgen_serve.workers.pipe import Pipe
    from fastgen_serve.workers.worker import Worker

    # A server runs for long, so that every capture pays; and results then do not depend on earlier requests.
    fastgen.enable(captured_step="always", weight_dtype=settings.weight_dtype)
    threads = settings.threads or fewer_threads(torch.get_num_threads(), memory.processor_limit())
    if threads is not None:
        torch.set_num_threads(threads)
    torch.seed()  # otherwise all processes draw the same numbers

    def receive(message: Any) -> None:
        if isinstance(message, messages.Stop):
            _leave(0)
        worker.receive(message)

    # The worker sends nothing before the pipe exists, and the server sends no jobs before the model is ready.
    worker = Worker(name, settings, lambda message: pipe.send(message))
    pipe = Pipe(connection, receive, lambda error: _leave(0 if error is None else _FAILED))
    try:
        worker.load()
    except Exception as error:
        reason = one_line(error)
        if not isinstance(error, PipelineError):  # an unexpected error
            traceback.print_exc()
            reason = f"model {settings.path(name)} cannot be loaded: {type(error).__name__}: {reason}"
        pipe.send(messages.Broken(reason))
        pipe.close(_PATIENCE)
        _leave(_BROKEN)
    while True:
        memory.give_back_free()  # includes memory that loading the model used
        worker.wait_until_quiet(_QUIET)


def fewer_threads(cores: int, limit: int | None) -> int | None:
    """Returns a container's limit of processors, which torch ignores, if it is below the cores; otherwise None."""
    return limit if limit is not None and limit < cores else None


def _end_with(failure: threading.ExceptHookArgs) -> None:
    """Ends the process if a thread that runs jobs has died. The server then starts another process."""
    threading.__excepthook__(failure)
    if failure.thread is not None and failure.thread.name.startswith("fastgen-"):
        _leave(_FAILED)


def _leave(status: int) -> None:
    """Ends the process without waiting for its threads. It has no state to save."""
    sys.stderr.flush()
    os._exit(status)
