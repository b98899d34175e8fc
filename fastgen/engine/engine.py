"""The engine: any thread submits requests, one thread runs them with continuous batching."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import AsyncIterator, Iterable, Iterator
from functools import partial
from typing import Any

from fastgen import openmp
from fastgen.engine import requests, streams
from fastgen.engine.continuous import ContinuousBatches
from fastgen.engine.requests import EngineFull, Request, RequestFuture
from fastgen.engine.waiting import Waiting

__all__ = ["Engine", "EngineFull"]

# Rows of a batch, if the user says nothing: beyond these a captured step gains little on a CPU.
ROWS = 64


class Engine:
    """Runs requests for a model, each with options of its own: one enters as soon as others have left their slots.

    Its thread begins with the first request. A model can be used by others meanwhile.

    Args:
        model: a model of Transformers that generates.
        slots: rows of a decode step: a request takes as many as it has beams, or sequences to return. "auto": 64.
        max_waiting: requests that may wait: `submit` waits for room then.
        cache_gib: GiB of K and V that requests in slots may have stored; None for any number. A request enters where
            there is room for its prompt and some tokens. Where memory gets short, the last ones begin again later.
        max_stall_ms: milliseconds that requests in slots may wait for a prefill: longer prompts are read in chunks.

    Raises:
        ValueError: one of these is not a positive number.
    """

    def __init__(
        self,
        model: Any,
        *,
        slots: int | str = "auto",
        max_waiting: int = 1024,
        cache_gib: float | None = None,
        max_stall_ms: float = 1000.0,
    ) -> None:
        rows = ROWS if slots == "auto" else slots
        for name, number in (("slots", rows), ("max_waiting", max_waiting)):
            if not isinstance(number, int) or number < 1:
                raise ValueError(f"{name} is {number!r}: give a positive number")
        for name, value in (("cache_gib", 1.0 if cache_gib is None else cache_gib), ("max_stall_ms", max_stall_ms)):
            if not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"{name} is {value!r}: give a positive number")
        self._model, self._rows = model, int(rows)
        cache_bytes = None if cache_gib is None else int(cache_gib * 2**30)
        self._executor = ContinuousBatches(model, self._rows, cache_bytes, max_stall_ms / 1000)
        openmp.end_team()  # of who has loaded the model; requests may come from another thread
        executor = self._executor
        self._waiting = Waiting(max_waiting, executor.choose, executor.stop, executor.reset)
        # Nobody can submit any more once this object is gone. What waits is run: others have its futures.
        weakref.finalize(self, self._waiting.close).atexit = False

    def submit(
        self,
        inputs: Any,
        generation_config: Any = None,
        *,
        timeout: float | None = None,
        seed: int | None = None,
        **generate_kwargs: Any,
    ) -> RequestFuture:
        """A request, to be run as soon as there are slots for it.

        Args:
            inputs: token ids (a list, or a tensor [length] or [1, length]), or a mapping of the model's inputs of one
                row, as a tokenizer or a feature extractor returns it.
            generation_config: as `generate` takes it.
            timeout: seconds to wait while `max_waiting` requests wait; None for as long as it takes, 0 for not at all.
            seed: sampling draws what `torch.manual_seed(seed)` and a call of its own would draw.
            **generate_kwargs: other arguments of `generate`: options, processors, criteria, a streamer, ...

        Returns:
            A `concurrent.futures.Future` of what `model.generate` returns for this input alone: a LongTensor
            [num_return_sequences, length], or a ModelOutput with `return_dict_in_generate`. What it raises is raised
            by `result()`. `cancel()` works as long as there is no result.

        Raises:
            EngineFull: no room within `timeout`; in a callback of the engine's own thread at once.
            MemoryError: from `result()`: it may need more K and V than `cache_gib`.
            ValueError: what `generate` would refuse, an empty input, one with more tokens than the model has positions,
                more beams than rows, or a closed engine.
        """
        request = self._request(inputs, generation_config, seed, generate_kwargs)
        self._add([request], timeout)
        return request.future

    def generate(
        self, inputs: Iterable[Any], generation_config: Any = None, *, seed: int | None = None, **generate_kwargs: Any
    ) -> list[Any]:
        """The results of several requests with the same options, in order. Others may be in slots beside them.

        Raises:
            ValueError: as `submit`; none of them runs then.
            Exception: what the first of them that failed has raised; the others are cancelled.
        """
        if threading.current_thread() is self._waiting.thread:
            raise RuntimeError("generate would wait for the thread that calls it: submit the requests")
        made = [self._request(each, generation_config, seed, generate_kwargs) for each in inputs]
        self._add(made, None)
        try:
            return [request.future.result() for request in made]
        except BaseException:
            _cancel(request.future for request in made)
            raise

    def stream(
        self,
        inputs: Any,
        generation_config: Any = None,
        *,
        timeout: float | None = None,
        seed: int | None = None,
        **generate_kwargs: Any,
    ) -> Iterator[int]:
        """The generated tokens of a request as they come. It is cancelled when the iterator is closed, or gone.

        Such a request has no beams. Arguments and what is raised: as `submit`; what the
        request fails with is raised by the iterator.
        """
        streamer, tokens = streams.queued()
        options = {**generate_kwargs, "streamer": streamer}
        return streams.Tokens(self.submit(inputs, generation_config, timeout=timeout, seed=seed, **options), tokens)

    # ---- the same for asyncio

    async def asubmit(
        self,
        inputs: Any,
        generation_config: Any = None,
        *,
        timeout: float | None = None,
        seed: int | None = None,
        **generate_kwargs: Any,
    ) -> asyncio.Future[Any]:
        """As `submit`: waits for room without stopping the event loop, and returns a future of asyncio."""
        request = self._request(inputs, generation_config, seed, generate_kwargs)
        await self._aadd([request], timeout)
        return asyncio.wrap_future(request.future)

    async def agenerate(
        self, inputs: Iterable[Any], generation_config: Any = None, *, seed: int | None = None, **generate_kwargs: Any
    ) -> list[Any]:
        """As `generate`. The requests are cancelled if the task is."""
        made = [self._request(each, generation_config, seed, generate_kwargs) for each in inputs]
        await self._aadd(made, None)
        try:
            return list(await asyncio.gather(*(asyncio.wrap_future(request.future) for request in made)))
        except BaseException:
            _cancel(request.future for request in made)
            raise

    async def astream(
        self, inputs: Any, generation_config: Any = None, *, seed: int | None = None, **generate_kwargs: Any
    ) -> AsyncIterator[int]:
        """As `stream`, for `async for`."""
        streamer, tokens = streams.queued_for(asyncio.get_running_loop())
        future = await self.asubmit(inputs, generation_config, seed=seed, **{**generate_kwargs, "streamer": streamer})
        future.add_done_callback(lambda done: tokens.put_nowait(streams.END))
        try:
            while (token := await tokens.get()) is not streams.END:
                yield token
            await future
        finally:
            future.cancel()

    # ---- its life

    @property
    def failure(self) -> BaseException | None:
        """What the engine's own code has raised: all requests have failed with it, and no others are taken. None as
        long as there is no such fault.
        """
        return self._waiting.failure

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which no request runs, to change the model in: what runs is finished first, what waits waits."""
        with self._waiting.paused():
            try:
                yield
            finally:
                self._executor.prefills.forget()

    def close(self, wait: bool = True, *, cancel: bool = False) -> None:
        """Takes no more requests. Harmless to repeat.

        Args:
            wait: return when all requests have their results.
            cancel: cancel those that have none yet; what runs ends with its next step.
        """
        self._waiting.close()
        if cancel:
            self._waiting.cancel_all()
        thread = self._waiting.thread
        if wait and thread is not None and thread is not threading.current_thread():
            thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self.close(cancel=kind is not None)

    def stats(self) -> dict[str, Any]:
        """What has been done so far.

        Returns:
            "executor": "slots", or "static batches", and "why"; "slots", and how many of them are "busy".
            Requests: "submitted", "waiting", "running", "finished", "failed", "cancelled"; and "repeated": begun again
            after a failure, or as the model has changed.
            "steps": decode steps; "row_steps": slots in them; "busy_row_steps": those that were taken.
            "batches": prefills, and calls of static batches; their "rows"; "tokens" that were generated; "alone":
            requests that had a call of their own, by reason.
            "kv_bytes": the most K and V of requests in slots at a time; "preempted": requests that have begun again for
            want of room; "shared_positions": positions of prompts that others had prefilled; "shared_sources":
            sources that others had, and which were not encoded again; "chunks": parts of prefills after which the
            others went on.
        """
        executor, waiting = self._executor, self._waiting
        counts = executor.static.counts
        return {
            "executor": executor.name,
            "why": executor.why(),
            "submitted": waiting.submitted,
            "waiting": len(waiting.requests),
            "running": sum(not request.future.done() for request in list(waiting.running)),
            "cancelled": waiting.cancelled,
            **{name: counts[name] for name in ("finished", "failed", "batches", "rows", "tokens", "repeated")},
            "alone": dict(executor.static.alone),
            "slots": self._rows,
            "busy": executor.busy,
            **executor.stats(),
        }

    # ---- inside

    def _request(self, inputs: Any, generation_config: Any, seed: int | None, options: dict[str, Any]) -> Request:
        return requests.make(self._model, inputs, generation_config, options, seed, self._rows)

    def _add(self, made: list[Request], timeout: float | None) -> None:
        if threading.current_thread() is not self._waiting.thread:
            openmp.end_team()  # the work is that of the engine's thread
        self._waiting.start(partial(_serve, self._waiting, self._executor))
        self._waiting.put(made, timeout)

    async def _aadd(self, made: list[Request], timeout: float | None) -> None:
        try:
            await asyncio.to_thread(self._add, made, timeout)
        except asyncio.CancelledError:
            _cancel(request.future for request in made)  # which ends the thread, too
            raise


def _serve(waiting: Waiting, executor: ContinuousBatches) -> None:
    """What the thread of an engine does. It does not hold the engine, which may go while requests run."""
    try:
        while (batch := waiting.take()) is not None:
            executor.run(batch, waiting.take_more)
            waiting.settle_running()
            del batch  # and the results, while nothing is to do
    except BaseException as error:
        waiting.fail(error)
        raise


def _cancel(futures: Iterable[RequestFuture]) -> None:
    for future in futures:
        future.cancel()
