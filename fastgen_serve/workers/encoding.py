"""Runs the jobs of an encoder model in its process: batches, one after another, in a dedicated thread."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastgen import openmp
from fastgen_serve.errors import Unavailable
from fastgen_serve.jobs import Encode, Encoded
from fastgen_serve.scheduling import Limits, Scheduler, make_scheduler
from fastgen_serve.settings import ServeSettings
from fastgen_serve.workers.encoders import load_encoder


class EncodingWorker:
    """Runs the jobs of an encoder model.

    Args:
        path: the model's directory, or its hub name.
        settings: of the server.

    Attributes:
        info: the model's description.

    Raises:
        SetupError: the model cannot be loaded.
    """

    def __init__(self, path: str, settings: ServeSettings) -> None:
        self._encoder = load_encoder(path, settings)
        self.info = self._encoder.info
        self._scheduler: Scheduler[Request] = make_scheduler(settings, self._encoder, self._encoder.positions, Limits())
        self._changed = threading.Condition()
        self._running: list[Request] = []
        self._is_closed = False
        self._counts: Counter[str] = Counter()
        self._sizes: Counter[int] = Counter()
        openmp.end_team()  # the OpenMP threads of the thread that loaded the model
        self._thread = threading.Thread(target=self._serve, name="fastgen-encode", daemon=True)
        self._thread.start()

    def submit(
        self,
        job: Encode,
        on_done: Callable[[Encoded], object],
        on_error: Callable[[BaseException], object],
        on_delta: Callable[[Any], object] | None = None,
    ) -> Request:
        """Queues a job. The batch thread calls either `on_done` or `on_error`, or neither after a cancellation.

        Args:
            on_done: gets the result.
            on_delta: is not called.

        Raises:
            BadRequest: the model cannot run it.
            Unavailable: the worker is closed.
        """
        self._encoder.check(job)
        request = Request(job, on_done, on_error, self._cancel)
        with self._changed:
            if self._is_closed:
                raise Unavailable("the server stops")
            self._counts["submitted"] += 1
            self._scheduler.put(request, len(job.tokens))
            self._changed.notify()
        return request

    def stats(self) -> dict[str, Any]:
        """Returns statistics.

        Returns:
            Requests: "submitted", "waiting", "running", "finished", "failed", "cancelled". "batches", the "rows" and
            "tokens" in them, and "batch_sizes": the number of batches by their number of rows.
        """
        with self._changed:
            names = ("submitted", "finished", "failed", "cancelled", "batches", "rows", "tokens")
            counts = {name: self._counts[name] for name in names}
            now = {"waiting": len(self._scheduler), "running": len(self._running)}
            return {**counts, **now, "batch_sizes": dict(self._sizes)}

    def close(self) -> None:
        """Cancels unfinished requests, and ends the thread after its current batch. Harmless to repeat."""
        with self._changed:
            self._is_closed = True
            for request in [*self._scheduler.take_all(), *self._running]:
                self._give_up(request)
            self._changed.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    # ---- internal

    def _cancel(self, request: Request) -> None:
        with self._changed:
            if self._scheduler.discard(request) or request in self._running:
                self._give_up(request)

    def _give_up(self, request: Request) -> None:
        self._counts["cancelled"] += not request.is_cancelled
        request.is_cancelled = True

    def _serve(self) -> None:
        while batch := self._next_batch():
            self._run(batch)

    def _next_batch(self) -> list[Request]:
        """Waits for a batch that is due, and returns its requests; none once the worker is closed."""
        with self._changed:
            while not self._is_closed:
                seconds = self._scheduler.seconds_left()
                if seconds == 0:
                    self._running = self._scheduler.take()
                    return self._running
                self._changed.wait(seconds)
            return []

    def _run(self, batch: list[Request]) -> None:
        begin = time.perf_counter()
        results: list[Any]
        try:
            results = list(self._encoder.run([request.job for request in batch]))
        except Exception as error:  # of the whole batch: errors of single jobs are results
            results = [error] * len(batch)
        seconds = time.perf_counter() - begin
        self._count(batch, results, seconds)
        for request, result in zip(batch, results, strict=True):
            if request.is_cancelled:
                continue
            if isinstance(result, Exception):
                request.on_error(result)
            else:
                request.on_done(Encoded(result, seconds / len(batch)))

    def _count(self, batch: list[Request], results: list[Any], seconds: float) -> None:
        lengths = [len(request.job.tokens) for request in batch]
        failed = [isinstance(result, Exception) for result in results]
        with self._changed:
            self._running = []
            if not any(failed):
                self._scheduler.note(lengths, seconds)
            self._counts.update({"batches": 1, "rows": len(batch), "tokens": sum(lengths)})
            self._sizes[len(batch)] += 1
            for request, has_failed in zip(batch, failed, strict=True):
                if not request.is_cancelled:
                    self._counts["failed" if has_failed else "finished"] += 1


@dataclass(eq=False)
class Request:
    """A queued job, and its callbacks."""

    job: Encode
    on_done: Callable[[Any], object]
    on_error: Callable[[Any], object]
    on_cancel: Callable[[Request], object]
    is_cancelled: bool = False

    def cancel(self) -> None:
        """Cancels the request. Harmless after its result."""
        self.on_cancel(self)
