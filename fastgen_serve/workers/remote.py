"""Runs a model in a process of its own, and restarts the process when it dies."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import logging
import math
import multiprocessing
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from typing import Any

from fastgen_serve import metrics
from fastgen_serve.errors import Unavailable
from fastgen_serve.settings import ServeSettings
from fastgen_serve.workers import messages, process
from fastgen_serve.workers.client import ClientModel
from fastgen_serve.workers.pipe import Pipe

_log = logging.getLogger("fastgen_serve")

# A request that was running when this many processes died does not run again: it may have caused it.
_MOST_RUNS = 2
# Seconds: the first and the longest delay before a restart, which doubles until a process lives for the third.
_FIRST_DELAY, _LONGEST_DELAY, _LONG_LIFE = 0.1, 30.0, 60.0
# The model is given up after this many processes have died before any was ready.
_MOST_STARTS = 3
# Seconds for a process to end after Stop, and between two polls of whether it has.
_PATIENCE, _LOOK = 5.0, 0.02


class RemoteModel(ClientModel):
    """A `ServedModel` in a process of its own.

    Args:
        on_broken: called once with the reason if the model cannot be loaded.

    Raises:
        SetupError: its tokenizer cannot be loaded.
    """

    def __init__(
        self, name: str, settings: ServeSettings, on_broken: Callable[[str], object] = lambda reason: None
    ) -> None:
        super().__init__(name, settings)
        self._on_broken = on_broken
        self._process: BaseProcess | None = None
        self._replacing: asyncio.Future[None] | None = None
        self._pipe: Pipe | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._begin = 0.0  # when the process started
        self._delay = _FIRST_DELAY
        self._was_ready = self._is_stopping = False
        self._starts = 0

    # ---- lifetime

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._start_process()

    async def stop(self) -> None:
        self._is_stopping, self.is_ready, self.progress = True, False, "the server stops"
        self._fail_all(Unavailable("the server stops"))
        if self._process is None or self._pipe is None:
            return
        ended, self._process = self._process, None
        self._pipe.send(messages.Stop())
        await _until_ended(ended, _PATIENCE)
        ended.kill()
        ended.join()

    def _start_process(self) -> None:
        if self._is_stopping:
            return
        self._starts += 1
        context, self._begin = multiprocessing.get_context("spawn"), time.monotonic()
        own, others = context.Pipe()
        # The model's process needs no secrets.
        settings = dataclasses.replace(self._settings, api_keys=(), cache=None)
        started = context.Process(
            target=process.run, args=(others, self.name, settings), name=f"fastgen-serve {self.name}", daemon=True
        )
        started.start()
        others.close()  # only the other process holds it open, so that its death closes the pipe
        self._process = started
        self._pipe = Pipe(own, self.receive, lambda error: self._in_loop(self._died, started))

    def _in_loop(self, function: Callable[..., object], *arguments: Any) -> None:
        """Calls a function in the event loop. Any thread may call this."""
        assert self._loop is not None, "it has been started"
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(function, *arguments)

    # ---- messages

    def _send(self, message: Any) -> None:
        if self._pipe is None:
            return
        pending = self._pending.get(message.number)
        if isinstance(message, messages.Submit) and pending is not None:
            pending.runs += 1
        self._pipe.send(message)

    def receive(self, message: Any) -> None:
        """Handles a message of the process, in the reader thread."""
        if isinstance(message, (messages.Progress, messages.Ready, messages.Broken)):
            self._in_loop(self._note, message)
        else:
            super().receive(message)

    def _note(self, message: Any) -> None:
        """Handles a process's message about its own state."""
        if self._is_stopping:
            return
        super().receive(message)
        if isinstance(message, messages.Broken):
            _log.error("%s", message.reason)
            if not self._was_ready:
                self._is_stopping = True  # a retry would not help
                self._on_broken(message.reason)
            return
        seconds = time.monotonic() - self._begin
        _log.info("%s: %s (%.1f s)", self.name, self.progress, seconds)
        if isinstance(message, messages.Ready):
            self._was_ready = True
            for pending in list(self._pending.values()):  # sent to the previous process
                if pending.job is not None:
                    self._send(messages.Submit(pending.number, pending.job))

    # ---- restarts

    def _died(self, ended: BaseProcess) -> None:
        if self._is_stopping or ended is not self._process:
            return
        ended.kill()  # it still runs if the pipe has failed
        self._process = self._pipe = None
        self.is_ready, self.progress = False, "its process has died and is started again"
        metrics.RESTARTS.labels(self.name).inc()
        died = Unavailable("the process of the model has died: try again", retry_after=5)
        for pending in list(self._pending.values()):
            if pending.job is None or pending.has_streamed or pending.runs >= _MOST_RUNS:
                pending.put(messages.Failure(pending.number, copy.copy(died)))
        self._replacing = asyncio.ensure_future(self._replace(ended))

    async def _replace(self, ended: BaseProcess) -> None:
        """Starts another process once the dead one has released its memory, which may take seconds."""
        await _until_ended(ended)
        if self._is_stopping:
            return
        if not self._was_ready and self._starts >= _MOST_STARTS:
            self._is_stopping = True
            reason = f"the process of model {self.name} dies while it is loaded ({ended.exitcode})"
            _log.error("%s", reason)
            self._on_broken(reason)
            return
        lived = time.monotonic() - self._begin
        self._delay = _FIRST_DELAY if self._was_ready and lived > _LONG_LIFE else min(self._delay * 2, _LONGEST_DELAY)
        _log.error(
            "%s: its process has died (%s): another one begins in %.1f s", self.name, ended.exitcode, self._delay
        )
        assert self._loop is not None, "it has been started"
        self._loop.call_later(self._delay, self._start_process)


async def _until_ended(process: BaseProcess, seconds: float = math.inf) -> None:
    """Waits at most this many seconds for a process to end. Polls, because all threads of the executor may be busy."""
    until = time.monotonic() + seconds
    while process.exitcode is None and time.monotonic() < until:
        await asyncio.sleep(_LOOK)
