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

# Default rows of a batch: on a CPU, a captured step gains little from more.
ROWS = 64
# Marks the end of a stream.
_END: Any = object()


class Engine:
    """Runs requests for a model, each with its own options. A request enters as soon as others have freed enough slots.

    The engine's thread starts with the first request. Other code can use the model meanwhile.

    Args:
        model: a Transformers model that generates, or a peft model around one, with its active adapters.
        slots: rows of a decode step: a request takes one per beam, or per sequence to return. "auto": 64.
        max_waiting: requests that may wait; beyond that, `submit` waits for room.
        cache_gib: the most GiB of K and V, and states, that requests in slots may store; None for no limit. A request
            enters when there is room for its prompt and some tokens. If memory runs short, the latest requests are
            preempted and begin again later. Buffers may take more than this if requests differ in length.
        max_stall_ms: milliseconds that requests in slots may wait for a prefill; longer prompts are prefilled in
            chunks.
        prompt_lookup_num_tokens: tokens to draft at once, by prompt lookup, for each request without beams that does
            not set it itself. The result is the same, greedy or sampled. 0 for none.

    Raises:
        ValueError: an argument is not a positive number (`prompt_lookup_num_tokens` may be 0).
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
        openmp.end_team()  # of the thread that loaded the model; requests may come from another one
        self._waiting = Waiting(max_waiting, self._executor)
        # Nobody can submit once this object is gone. Waiting requests still run, because callers hold their futures.
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
        """Submits a request, which runs as soon as there are slots for it.

        Args:
            inputs: token ids (a list, or a tensor [length] or [1, length]), or a mapping of the model's inputs with one
                row, as a tokenizer or a feature extractor returns it.
            generation_config: as for `generate`.
            timeout: seconds to wait for room while `max_waiting` requests wait; None for no limit, 0 for no wait.
            seed: sampling draws what `torch.manual_seed(seed)` followed by a call for this input alone would draw.
            **generate_kwargs: other arguments of `generate`: options, processors, criteria, a streamer, ..., and for a
                peft model `adapter_names` with one name: the LoRA adapter of this request.

        Returns:
            A `concurrent.futures.Future` of what `model.generate` returns for this input alone: a LongTensor
            [num_return_sequences, length], or a ModelOutput with `return_dict_in_generate`. `result()` raises what
            `generate` raises. `cancel()` works until there is a result.

        Raises:
            EngineFull: no room within `timeout`; in a callback of the engine's own thread, immediately.
            MemoryError: from `result()`: the request may need more than `cache_gib`.
            ValueError: `generate` would refuse the request, the input is empty or has more tokens than the model has
                positions, there are more beams than slots, the adapter does not exist, or the engine is closed.
        """
        (request,) = self._made([inputs], generation_config, seed, **generate_kwargs)
        self._waiting.put([request], timeout)
        return request.future

    def generate(self, inputs: Iterable[Any], generation_config: Any = None, **options: Any) -> list[Any]:
        """Returns the results of several requests with the same options, in order. Other requests may run in slots
        beside them.

        Takes the options of `submit` except `timeout`: it waits for room without a limit.

        Raises:
            ValueError: as for `submit`; none of the requests runs then.
            Exception: what the first failed request raised; the other requests are cancelled.
        """
        if self._waiting.is_served_here:
            raise RuntimeError("generate would wait for the thread that calls it: submit the requests")
        made = self._made(inputs, generation_config, **options)
        self._waiting.put(made, None)
        with cancelled_together(made):
            return [request.future.result() for request in made]

    def stream(self, inputs: Any, generation_config: Any = None, **options: Any) -> Iterator[int]:
        """Yields the generated tokens of a request as they come. Closing or dropping the iterator cancels the request.

        Such a request has no beams. Takes the options of `submit`. The iterator raises what the request fails with.
        """
        tokens: SimpleQueue[int] = SimpleQueue()
        streamer = _Streamer(tokens.put)
        return _Tokens(self.submit(inputs, generation_config, **{**options, "streamer": streamer}), tokens)

    # ---- the same for asyncio

    async def asubmit(
        self, inputs: Any, generation_config: Any = None, *, timeout: float | None = None, **options: Any
    ) -> asyncio.Future[Any]:
        """As `submit`: waits for room without blocking the event loop, and returns an asyncio future.

        The request is cancelled if the loop is closed, because nobody can get its result then.
        """
        made = self._made([inputs], generation_config, **options)
        await self._waiting.aput(made, timeout)
        return asyncio.wrap_future(made[0].future)

    async def agenerate(self, inputs: Iterable[Any], generation_config: Any = None, **options: Any) -> list[Any]:
        """As `generate`. Cancelling the task cancels the requests."""
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

    # ---- its lifetime

    @property
    def failure(self) -> BaseException | None:
        """The exception that the engine's own code has raised; None if there is none. All requests have then failed
        with it, and the engine accepts no others.
        """
        return self._waiting.failure

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which no request runs, to change the model in. Running requests finish first; others wait."""
        with self._waiting.paused():
            try:
                yield
            finally:
                self._executor.prefills.forget()

    def close(self, wait: bool = True, *, cancel: bool = False) -> None:
        """Stops accepting requests. May be called repeatedly.

        Args:
            wait: return only when all requests have their results.
            cancel: cancel requests without a result; running ones end with their next step.
        """
        self._waiting.close(cancel, None if wait else 0.0)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self.close(cancel=kind is not None)

    def stats(self) -> dict[str, Any]:
        """Returns counts of what the engine has done so far.

        Returns:
            "executor": "slots" or "static batches", and "why"; "slots", and how many of them are "busy".
            Requests: "submitted", "waiting", "running", "finished", "failed", "cancelled"; "repeated": begun again
                after a failure, or because the model changed.
            "steps": decode steps; "row_steps": slots in them; "busy_row_steps": occupied slots in them.
            "batches": prefills, and calls of static batches; their "rows"; generated "tokens"; "alone": requests that
                had a call of their own, by reason.
            "kv_bytes": peak bytes of K and V, and states, in slots; "preempted": requests that began again for lack of
                room; "shared_positions": prompt positions that earlier requests had prefilled; "shared_sources":
                sources that earlier requests had encoded; "chunks": parts of prefills after which other requests
                advanced;
            "drafted_tokens": tokens of drafts that were verified; "accepted_tokens": those that were right.
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
    """Passes on each token of a sequence, but not the prompt, which `generate` puts first."""

    def __init__(self, put: Callable[[int], object]) -> None:
        self._put, self._is_prompt = put, True

    def put(self, value: Tensor) -> None:
        for token in () if self._is_prompt else value.flatten().tolist():
            self._put(token)
        self._is_prompt = False

    def end(self) -> None:
        """Does nothing: the request's result marks the end."""


class _Tokens(Iterator[int]):
    """The tokens of a request, as they come. Closing or dropping this iterator cancels the request."""

    def __init__(self, future: RequestFuture, tokens: SimpleQueue[int]) -> None:
        self._future, self._tokens, self._is_over = future, tokens, False
        future.add_done_callback(lambda done: tokens.put(_END))

    def __next__(self) -> int:
        if not self._is_over:
            token = self._tokens.get()
            if token is not _END:
                return token
            self._is_over = True
            self._future.result()  # raises what the request failed with
        raise StopIteration

    def close(self) -> None:
        """Stops the iteration and cancels the request."""
        self._is_over = True
        self._future.cancel()

    __del__ = close
