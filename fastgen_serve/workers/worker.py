"""The model's side of the server: runs its jobs, in a process of its own or, for tests, in a thread."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil

import fastgen
from fastgen import memory
from fastgen.engine.planning import ExceedsBudget
from fastgen.grammar import FormError
from fastgen.pipeline.errors import one_line
from fastgen_serve.errors import BadRequest, Busy, Failed, ServeError, TooLong, Unavailable
from fastgen_serve.settings import ServeSettings
from fastgen_serve.workers import loading, messages

if TYPE_CHECKING:
    from fastgen_serve.workers.encoding import EncodingWorker, Request
    from fastgen_serve.workers.engine import EngineWorker


def load(path: str, settings: ServeSettings, progress: Callable[[str], object]) -> EngineWorker | EncodingWorker:
    """Loads the model at a path, and returns the worker that runs its jobs: it transcribes, generates or encodes, as
    its configuration says.

    Warms it up, unless the settings disable that.

    Args:
        progress: called with a short description of each stage.

    Raises:
        SetupError: it cannot be loaded.
    """
    if loading.transcribes(path):
        from fastgen_serve.workers.speech import SpeechWorker

        return SpeechWorker(path, settings, progress)
    if loading.generates(path):
        from fastgen_serve.workers.generation import GenerationWorker

        return GenerationWorker(path, settings, progress)
    from fastgen_serve.workers.encoding import EncodingWorker

    return EncodingWorker(path, settings)


class Worker:
    """Runs the jobs of a model, and sends their results.

    Args:
        name: the name under which the model is served.
        send: sends a message to the server. Any thread may call it; it does not wait.
    """

    def __init__(self, name: str, settings: ServeSettings, send: Callable[[Any], object]) -> None:
        self._name, self._settings, self._send = name, settings, send
        self._lock = threading.Lock()
        # Of unfinished jobs; None while one is being submitted.
        self._handles: dict[int, Future[Any] | Request | None] = {}
        self._runner: EngineWorker | EncodingWorker | None = None
        self._has_come = threading.Event()

    def load(self) -> None:
        """Loads the model, warms it up, and reports that it is ready.

        Raises:
            SetupError: it cannot be loaded.
        """

        def tell(text: str) -> None:
            self._send(messages.Progress(text))

        tell("reading the model")
        self._runner = runner = load(self._settings.path(self._name), self._settings, tell)
        self._send(messages.Ready(replace(runner.info, name=self._name)))

    def receive(self, message: Any) -> None:
        """Handles a message of the server."""
        if isinstance(message, messages.Submit):
            self._submit(message.number, message.job)
        elif isinstance(message, messages.Cancel):
            with self._lock:
                handle = self._handles.pop(message.number, None)
            if handle is not None:
                handle.cancel()
        elif isinstance(message, messages.AskStats):
            self._send(self._stats_for(message.number))

    def wait_until_quiet(self, seconds: float) -> None:
        """Waits for a job, and then until none is left and none has come for this many seconds."""
        self._has_come.wait()
        while self._has_come.is_set() or self._handles:
            self._has_come.clear()
            self._has_come.wait(seconds)

    def stats(self) -> dict[str, Any]:
        own = {} if self._runner is None else self._runner.stats()
        own["memory_bytes"] = psutil.Process().memory_info().rss
        return {**own, "fastgen": {name: dict(entry) for name, entry in fastgen.stats().items()}}

    def _stats_for(self, number: int) -> messages.Stats | messages.Failure:
        try:
            return messages.Stats(number, self.stats())
        except Exception as error:  # jobs matter more than statistics: the server logs that it got none
            return messages.Failure(number, as_serve_error(error))

    def close(self) -> None:
        """Cancels unfinished requests, and ends the threads."""
        if self._runner is not None:
            self._runner.close()

    def _submit(self, number: int, job: Any) -> None:
        with self._lock:
            self._handles[number] = None
        self._has_come.set()
        callbacks = [partial(self._done, number), partial(self._fail, number)]
        if getattr(job, "streams", False):
            callbacks.append(partial(self._update, number))
        try:
            if self._runner is None:
                raise Unavailable("the model is loading: try again")
            handle = self._runner.submit(job, *callbacks)
        except ValueError as error:
            self._fail(number, refused(error, job))
            return
        except Exception as error:
            self._fail(number, error)
            return
        with self._lock:
            if number in self._handles:  # otherwise it has finished already
                self._handles[number] = handle

    def _done(self, number: int, result: Any) -> None:
        if self._is_wanted(number):
            self._send(messages.Done(number, result))

    def _fail(self, number: int, error: BaseException) -> None:
        if self._is_wanted(number):
            self._send(messages.Failure(number, as_serve_error(error)))

    def _update(self, number: int, delta: Any) -> None:
        self._send(messages.Update(number, delta))

    def _is_wanted(self, number: int) -> bool:
        with self._lock:
            return self._handles.pop(number, self) is not self


def refused(error: ValueError, job: Any) -> BadRequest:
    """Returns why a job was refused. `param` is what the reason names first: an option of the job, or its prompt."""
    reason = one_line(error)
    known = {"input": "prompt", **{name: name for name in getattr(job, "options", ())}}
    named = (known[word] for word in re.findall(r"\w+", reason) if word in known)
    return BadRequest(reason, param=next(named, None))


def as_serve_error(error: BaseException) -> ServeError:
    """Converts an exception to the error that the interfaces write."""
    if isinstance(error, ServeError):
        return error
    if isinstance(error, fastgen.EngineFull):
        return Busy(f"{one_line(error)}: try again", retry_after=1)
    if isinstance(error, CancelledError):
        return Unavailable("the server stops")
    if isinstance(error, ExceedsBudget):
        return TooLong("the request may need more K and V than --cache-gib: ask for fewer tokens", param="max_tokens")
    if isinstance(error, FormError):  # in the middle of a result
        return BadRequest(one_line(error), param="form")
    if memory.is_out(error):
        return Failed("there is not enough memory for the request: ask for fewer tokens or beams")
    return Failed(f"the model has failed: {type(error).__name__}: {one_line(error)}")
