"""Helpers for handlers: they await several results at once, or merge several streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
Item = TypeVar("Item")


async def together(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns the results, in order. If one fails, cancels the others and raises its error."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _cancelled(tasks)


async def in_turns(work: Callable[[Item], Awaitable[T]], items: Sequence[Item], at_once: int) -> list[T]:
    """Returns the results of all items, in order; at most `at_once` items run at a time. Fails as `together` does."""
    waiting = iter(enumerate(items))
    results: dict[int, T] = {}

    async def run() -> None:
        for index, item in waiting:
            results[index] = await work(item)

    await together(run() for _ in range(min(at_once, len(items))))
    return [results[index] for index in range(len(items))]


class Turns:
    """Threads that run the requests' work, a limited number at a time.

    Args:
        at_once: the number of threads.
        name: the prefix of the threads' names.
    """

    def __init__(self, at_once: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(at_once, name)

    async def run(self, work: Callable[[], T]) -> T:
        """Runs `work` in a thread, once one is free, and returns its result."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


class ClosedStream(StreamingResponse):
    """A response that closes its generator when it ends, even if the generator has not finished."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.body_iterator.aclose()  # type: ignore[attr-defined]


async def merged(streams: Sequence[AsyncIterator[T]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yields the items of all streams as they arrive, with the stream's index. Closes all streams when it is closed.

    Raises the error of the first stream that fails.
    """
    arrived: asyncio.Queue[tuple[int, T] | asyncio.Future[None]] = asyncio.Queue()

    async def read(index: int, stream: Any) -> None:
        async with aclosing(stream):
            async for each in stream:
                arrived.put_nowait((index, each))

    tasks = [asyncio.ensure_future(read(index, stream)) for index, stream in enumerate(streams)]
    for task in tasks:
        task.add_done_callback(arrived.put_nowait)
    running = len(tasks)
    try:
        while running:
            item = await arrived.get()
            if isinstance(item, asyncio.Future):
                item.result()
                running -= 1
            else:
                yield item
    finally:
        await _cancelled(tasks)


async def _cancelled(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancels the tasks that have not ended, and waits for them. Ignores their errors."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
