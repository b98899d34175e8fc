"""The server's side of a model: sends jobs to its process, and delivers the answers to asyncio."""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from fastgen_serve import limits, log, metrics
from fastgen_serve.concurrency import merged, together
from fastgen_serve.errors import BadRequest, Busy, ServeError, TimedOut, Unavailable
from fastgen_serve.jobs import Delta, Encode, Encoded, Generate, Generated, ModelInfo, Transcribe, Transcribed
from fastgen_serve.settings import ServeSettings
from fastgen_serve.workers import loading, messages

_log = logging.getLogger("fastgen_serve")

# Seconds within which a process must answer a request for statistics.
_STATS_PATIENCE = 2.0
# Limits the bytes of processed images or recordings that all waiting or running requests of a model hold.
_MOST_INPUT_BYTES = 2**30


@dataclass(eq=False)
class Pending:
    """A job without a result.

    Attributes:
        job: None for a request for statistics.
        has_streamed: whether some of its tokens have gone to the client: it must not run again.
        runs: number of processes that it was sent to.
        answers: the process's answers.
    """

    number: int
    job: Generate | Transcribe | Encode | None
    loop: asyncio.AbstractEventLoop
    answers: asyncio.Queue[messages.Answer] = field(default_factory=asyncio.Queue)
    has_streamed: bool = False
    runs: int = 0

    def put(self, answer: messages.Answer) -> None:
        """Delivers an answer. Any thread may call this."""
        self.has_streamed |= isinstance(answer, messages.Update)
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(self.answers.put_nowait, answer)


class ClientModel(ABC):
    """A `ServedModel` that a worker runs. Subclasses implement the transport of messages.

    Args:
        name: the name under which it is served.

    Raises:
        SetupError: its tokenizer cannot be loaded.
    """

    def __init__(self, name: str, settings: ServeSettings) -> None:
        self.name, self._settings = name, settings
        self.tokenizer = loading.read_tokenizer(settings.path(name))
        self.processor, self.no_images = loading.read_processor(settings.path(name))
        if self.processor is not None and not self.tokenizer.chat_template:
            self.tokenizer.chat_template = getattr(self.processor, "chat_template", None)
        self.feature_extractor = loading.read_feature_extractor(settings.path(name))
        self.is_ready = False
        self.info = ModelInfo(name, "", (), None)
        self.progress = "waiting to be loaded"
        self._pending: dict[int, Pending] = {}
        self._numbers = itertools.count()
        budget = None if settings.slo_ms is None else settings.slo_ms / 1000
        self._held = limits.Held(_MOST_INPUT_BYTES, "images" if self.feature_extractor is None else "recordings")
        self._admission = limits.Admission(settings.slots, settings.max_waiting, budget)
        metrics.IN_FLIGHT.labels(name).set_function(lambda: self._admission.rows)
        metrics.WAITING.labels(name).set_function(lambda: self._admission.waiting)

    @abstractmethod
    def _send(self, message: Any) -> None:
        """Sends a message to the worker, without waiting."""

    # ---- ServedModel

    @contextmanager
    def reserve(self, rows: int) -> Iterator[None]:
        with ExitStack() as place:
            with self._refusals_counted():
                place.enter_context(self._admission.reserve(rows))
            yield

    async def generate(self, job: Generate) -> Generated:
        (made,) = await self.generate_all([job])
        return made

    async def generate_all(self, jobs: Sequence[Generate]) -> list[Generated]:
        with self._let_in(jobs) as admitted:
            return await together(self._whole(job, place) for job, place in admitted)

    async def stream_all(self, jobs: Sequence[Generate]) -> AsyncGenerator[tuple[int, Delta | Generated], None]:
        with self._let_in(jobs) as admitted:
            streams = [self._generation(job, place) for job, place in admitted]
            async with aclosing(merged(streams)) as events:
                async for event in events:
                    yield event

    async def transcribe(self, job: Transcribe) -> Transcribed:
        self._log([job])
        log.note(audio_s=round(job.seconds, 1))
        with self._held.hold(job.input_bytes), self._admitted([self._rows(job)]) as (place,):
            made: Transcribed = await _result(self._generation(job, place))
            return made

    async def encode(self, jobs: Sequence[Encode]) -> list[list[float]]:
        self._log(jobs)
        with self._admitted([len(jobs)]):
            return await together(self._encoded(job) for job in jobs)

    async def stats(self) -> dict[str, Any]:
        if not self.is_ready:
            return {}
        pending = self._add(None)
        try:
            self._send(messages.AskStats(pending.number))
            answer = await asyncio.wait_for(pending.answers.get(), _STATS_PATIENCE)
        except asyncio.TimeoutError:
            return {}
        finally:
            self._pending.pop(pending.number, None)
        if isinstance(answer, messages.Failure):
            _log.warning("%s does not say what it has done: %s", self.name, answer.error)
        return answer.values if isinstance(answer, messages.Stats) else {}

    @abstractmethod
    async def start(self) -> None:
        """See `ServedModel`."""

    @abstractmethod
    async def stop(self) -> None:
        """See `ServedModel`."""

    # ---- the worker's messages; any thread may call these

    def receive(self, message: Any) -> None:
        """Handles a message of the worker."""
        if isinstance(message, messages.Progress):
            self.progress = message.text
        elif isinstance(message, messages.Ready):
            self.info, self.is_ready, self.progress = message.info, True, "ready"
            if message.info.kind == "encoder":
                self._admission.batch_all()
        elif isinstance(message, messages.Broken):
            self.progress = message.reason
        else:
            pending = self._pending.get(message.number)
            if pending is not None:  # otherwise nobody waits for it any more
                pending.put(message)

    # ---- internal

    @contextmanager
    def _let_in(self, jobs: Sequence[Generate]) -> Iterator[list[tuple[Generate, ExitStack]]]:
        """Admits a request to generate during a block. Yields its jobs, within limits, and their places."""
        jobs, tasks = [limits.bounded(job, self.info, self._settings) for job in jobs], self.info.tasks
        if self.is_ready and "generate" not in tasks:
            raise BadRequest(f"model {self.name} does not generate: it is one for {', '.join(tasks)}", param="model")
        self._log(jobs)
        size, rows = sum(job.input_bytes for job in jobs), [self._rows(job) for job in jobs]
        with self._held.hold(size), self._admitted(rows) as places:
            yield list(zip(jobs, places, strict=True))

    def _rows(self, job: Generate | Transcribe) -> int:
        options = {**self.info.defaults, **job.options}
        return max(options.get("num_beams") or 1, options.get("num_return_sequences") or 1)

    async def _whole(self, job: Generate, place: ExitStack) -> Generated:
        made: Generated = await _result(self._generation(job, place))
        return made

    async def _generation(self, job: Generate | Transcribe, place: ExitStack) -> AsyncGenerator[Any, None]:
        """Yields the answers to a job, which keeps its place until the last one."""
        begin, has_begun = time.perf_counter(), False
        with place:
            metrics.TOKENS.labels(self.name, "prompt").inc(len(job.tokens))
            async with aclosing(self._answers(job)) as answers:
                async for answer in answers:
                    seconds = time.perf_counter() - begin
                    if isinstance(answer, (Generated, Transcribed)):
                        self._count(answer, seconds)
                    elif not has_begun:
                        has_begun = True
                        metrics.FIRST_TOKEN.labels(self.name).observe(seconds)
                    yield answer

    def _log(self, jobs: Sequence[Generate | Transcribe | Encode]) -> None:
        log.note(model=self.name, prompt_tokens=sum(len(job.tokens) for job in jobs))
        if self._settings.log_texts:
            log.note(texts=[self.tokenizer.decode(job.tokens) for job in jobs])

    def _count(self, result: Generated | Transcribed, seconds: float) -> None:
        tokens = sum(result.lengths)
        metrics.TOKENS.labels(self.name, "generated").inc(tokens)
        longest = max(result.lengths, default=0)
        if longest:
            metrics.TOKEN_TIME.labels(self.name).observe(seconds / longest)
        log.note(tokens=tokens)

    async def _encoded(self, job: Encode) -> list[float]:
        if self.is_ready and job.what not in self.info.tasks:
            raise BadRequest(
                f"model {self.name} makes no {job.what}: it is one for {', '.join(self.info.tasks)}", param="model"
            )
        metrics.TOKENS.labels(self.name, "prompt").inc(len(job.tokens))
        made: Encoded = await _result(self._answers(job))
        self._admission.note(made.seconds)
        return list(made.values)

    @contextmanager
    def _refusals_counted(self) -> Iterator[None]:
        """Counts refusals in a block that admits a request. Raises Unavailable while the model is not ready."""
        try:
            if not self.is_ready:
                raise Unavailable(f"model {self.name} is not ready: {self.progress}", retry_after=5)
            yield
        except (Busy, Unavailable):
            metrics.JOBS.labels(self.name, "refused").inc()
            raise

    @contextmanager
    def _admitted(self, rows: Sequence[int]) -> Iterator[list[ExitStack]]:
        """Admits a request for the duration of a block. Raises Busy or Unavailable if the queue refuses it.

        Args:
            rows: of each of its parts. Each part has a place, which is released when it, or the block, is closed.
        """
        with self._refusals_counted():
            self._admission.enter(sum(rows))
        with ExitStack() as all_places:
            places = [all_places.enter_context(ExitStack()) for _ in rows]
            for place, count in zip(places, rows, strict=True):
                place.callback(self._admission.leave, count)
            yield places

    async def _answers(self, job: Generate | Transcribe | Encode) -> AsyncGenerator[Any, None]:
        """Yields the answers to a job: deltas, and the result. Cancels the job if the generator is closed earlier."""
        pending, outcome = self._add(job), "cancelled"
        late = TimedOut(f"the request took longer than {self._settings.request_timeout_s:g} s")
        failure = messages.Failure(pending.number, late)
        timer = pending.loop.call_later(self._settings.request_timeout_s, pending.answers.put_nowait, failure)
        try:
            self._send(messages.Submit(pending.number, job))
            while True:
                answer = await pending.answers.get()
                if isinstance(answer, messages.Update):
                    yield answer.delta
                elif isinstance(answer, messages.Done):
                    outcome = "finished"
                    yield answer.result
                    return
                elif isinstance(answer, messages.Failure):
                    outcome = "failed"
                    raise answer.error
        finally:
            timer.cancel()
            self._pending.pop(pending.number, None)
            metrics.JOBS.labels(self.name, outcome).inc()
            if outcome != "finished":
                self._send(messages.Cancel(pending.number))

    def _add(self, job: Generate | Transcribe | Encode | None) -> Pending:
        pending = Pending(next(self._numbers), job, asyncio.get_running_loop())
        self._pending[pending.number] = pending
        return pending

    def _fail_all(self, error: ServeError) -> None:
        """Makes every pending job fail."""
        for pending in list(self._pending.values()):
            pending.put(messages.Failure(pending.number, copy.copy(error)))  # each is raised in a different task


async def _result(answers: AsyncGenerator[Any, None]) -> Any:
    """Returns a job's result, which follows its deltas."""
    async with aclosing(answers):
        return [answer async for answer in answers][-1]
