"""The engine: any thread submits requests, one thread runs them with continuous batching."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from fastgen import openmp
from fastgen.engine.continuous import ContinuousBatches
from fastgen.engine.options import make
from fastgen.engine.requests import EngineFull, Request, RequestFuture
from fastgen.engine.waiting import Waiting, cancelled_together

__all__ = ["Engine", "EngineFull"]

# Rows of a batch, if the user says nothing: beyond these a captured step gains little on a CPU.
ROWS = 64
# Behind the last token of a stream.
_END: Any = object()


class Engine:
    """Runs requests for a model, each with options of its own: one enters as soon as others have left their slots.

    Its thread begins with the first request. A model can be used by others meanwhile.

    Args:
        model: a model of Transformers that generates, or one of peft around it, with the adapters that are active.
        slots: rows of a decode step: a request takes as many as it has beams, or sequences to return. "auto": 64.
        max_waiting: requests that may wait: `submit` waits for room then.
        cache_gib: GiB of K and V, and states, that requests in slots may have stored; None for any number. A request
            enters where there is room for its prompt and some tokens. Where memory gets short, the last ones begin
            again later. Their buffers may take more where requests differ in length.
        max_stall_ms: milliseconds that requests in slots may wait for a prefill: longer prompts are read in chunks.
        prompt_lookup_num_tokens: tokens that are drafted at once for each request without beams that does not say so
            itself: what followed the same words the last time. Tokens stay what they are, greedy or drawn. 0 for none.

    Raises:
        ValueError: one of these is no number, or not above zero; `prompt_lookup_num_tokens` may be 0.
    """

    def __init__(
        self,
        model: Any,
        *,
        slots: int | str = "auto",
        max_waiting: int = 1024,
        cache_gib: float | None = None,
        max_stall_ms: float = 1000.0,
        prompt_lookup_num_tokens: int = 0,
    ) -> None:
        rows = ROWS if slots == "auto" else slots
        whole: dict[str, Any] = {"slots": rows, "max_waiting": max_waiting}
        given = {**whole, "cache_gib": 1 if cache_gib is None else cache_gib, "max_stall_ms": max_stall_ms}
        for name, value in given.items():
            if not (isinstance(value, int if name in whole else (int, float)) and value > 0):
                raise ValueError(f"{name} is {value!r}: give a positive number")
        self._model, self._rows = model, int(rows)
        cache_bytes = None if cache_gib is None else int(cache_gib * 2**30)
        lookup = prompt_lookup_num_tokens
        if not isinstance(lookup, int) or lookup < 0:
            raise ValueError(f"prompt_lookup_num_tokens is {lookup!r}: give a number of tokens, or 0")
        self._executor = ContinuousBatches(model, self._rows, cache_bytes, max_stall_ms / 1000, lookup)
        openmp.end_team()  # of who has loaded the model; requests may come from another thread
        self._waiting = Waiting(max_waiting, self._executor)
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
            **generate_kwargs: other arguments of `generate`: options, processors, criteria, a streamer, ..., and for a
                model of peft `adapter_names`, of one name: the LoRA adapter of this request.

        Returns:
            A `concurrent.futures.Future` of what `model.generate` returns for this input alone: a LongTensor
            [num_return_sequences, length], or a ModelOutput with `return_dict_in_generate`. What it raises is raised
            by `result()`. `cancel()` works as long as there is no result.

        Raises:
            EngineFull: no room within `timeout`; in a callback of the engine's own thread at once.
            MemoryError: from `result()`: it may need more than `cache_gib`.
            ValueError: what `generate` would refuse, an empty input, one with more tokens than the model has positions,
                more beams than rows, an adapter that is not there, or a closed engine.
        """
        (request,) = self._made([inputs], generation_config, seed, **generate_kwargs)
        self._waiting.put([request], timeout)
        return request.future

    def generate(self, inputs: Iterable[Any], generation_config: Any = None, **options: Any) -> list[Any]:
        """The results of several requests with the same options, in order. Others may be in slots beside them.

        Options are those of `submit`, but for `timeout`: it waits for room as long as it takes.

        Raises:
            ValueError: as `submit`; none of them runs then.
            Exception: what the first of them that failed has raised; the others are cancelled.
        """
        if self._waiting.is_served_here:
            raise RuntimeError("generate would wait for the thread that calls it: submit the requests")
        made = self._made(inputs, generation_config, **options)
        self._waiting.put(made, None)
        with cancelled_together(made):
            return [request.future.result() for request in made]

    def stream(self, inputs: Any, generation_config: Any = None, **options: Any) -> Iterator[int]:
        """The generated tokens of a request as they come. It is cancelled when the iterator is closed, or gone.

        Such a request has no beams. Options are those of `submit`. The iterator raises what the request fails with.
        """
        tokens: SimpleQueue[int] = SimpleQueue()
        streamer = _Streamer(tokens.put)
        return _Tokens(self.submit(inputs, generation_config, **{**options, "streamer": streamer}), tokens)

    # ---- the same for asyncio

    async def asubmit(
        self, inputs: Any, generation_config: Any = None, *, timeout: float | None = None, **options: Any
    ) -> asyncio.Future[Any]:
        """As `submit`: waits for room without stopping the event loop, and returns a future of asyncio.

        The request is cancelled if the loop is closed, as nobody can get its result then.
        """
        made = self._made([inputs], generation_config, **options)
        await self._waiting.aput(made, timeout)
        return asyncio.wrap_future(made[0].future)

    async def agenerate(self, inputs: Iterable[Any], generation_config: Any = None, **options: Any) -> list[Any]:
        """As `generate`. The requests are cancelled if the task is."""
        made = self._made(inputs, generation_config, **options)
        with cancelled_together(made):
            await self._waiting.aput(made, None)
            return list(await asyncio.gather(*(asyncio.wrap_future(request.future) for request in made)))

    async def astream(self, inputs: Any, generation_config: Any = None, **options: Any) -> AsyncIterator[int]:
        """As `stream`, for `async for`."""
        tokens, loop = asyncio.Queue[int](), asyncio.get_running_loop()
        streamer = _Streamer(lambda token: loop.call_soon_threadsafe(tokens.put_nowait, token))
        future = await self.asubmit(inputs, generation_config, **{**options, "streamer": streamer})
        future.add_done_callback(lambda done: tokens.put_nowait(_END))
        try:
            while (token := await tokens.get()) is not _END:
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
        self._waiting.close(cancel, None if wait else 0.0)

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
            "kv_bytes": the most K and V, and states, of requests in slots at a time; "preempted": requests that have
            begun again for want of room; "shared_positions": positions of prompts that others had prefilled;
            "shared_sources": sources that others had, and which were not encoded again; "chunks": parts of prefills
            after which the others went on; "drafted_tokens": of drafts that were verified; "accepted_tokens": those of
            them that were right.
        """
        waiting = self._waiting
        now = {
            "waiting": len(waiting.requests),
            "running": sum(not request.future.done() for request in list(waiting.running)),
        }
        return {**self._executor.stats(), **waiting.counts, **now}

    def _made(
        self, inputs: Iterable[Any], generation_config: Any, seed: int | None = None, **options: Any
    ) -> list[Request]:
        return [make(self._model, each, generation_config, options, seed, self._rows) for each in inputs]


class _Streamer(BaseStreamer):
    """Hands on each token of a sequence, but not the prompt, which `generate` puts first."""

    def __init__(self, put: Callable[[int], object]) -> None:
        self._put, self._is_prompt = put, True

    def put(self, value: Tensor) -> None:
        for token in () if self._is_prompt else value.flatten().tolist():
            self._put(token)
        self._is_prompt = False

    def end(self) -> None:
        """The request's result tells that."""


class _Tokens(Iterator[int]):
    """The tokens of a request, as they come. It is cancelled when this is closed, or gone."""

    def __init__(self, future: RequestFuture, tokens: SimpleQueue[int]) -> None:
        self._future, self._tokens, self._is_over = future, tokens, False
        future.add_done_callback(lambda done: tokens.put(_END))

    def __next__(self) -> int:
        if not self._is_over:
            token = self._tokens.get()
            if token is not _END:
                return token
            self._is_over = True
            self._future.result()  # raises what the request has failed with
        raise StopIteration

    def close(self) -> None:
        """No more tokens are wanted."""
        self._is_over = True
        self._future.cancel()

    __del__ = close
