"""Tokens on their way from the thread that generates them to whom they are for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

# Behind the last token.
END: Any = object()


class _Streamer(BaseStreamer):
    """Hands on each token of a sequence, but not the prompt, which `generate` puts first."""

    def __init__(self, put: Callable[[int], object]) -> None:
        self._put = put
        self._is_first = True

    def put(self, value: Tensor) -> None:
        if self._is_first:
            self._is_first = False
            return
        for token in value.flatten().tolist():
            self._put(token)

    def end(self) -> None:
        """The request's result tells that."""


def queued() -> tuple[BaseStreamer, SimpleQueue[int]]:
    """A streamer, and the queue that its tokens come to."""
    tokens: SimpleQueue[int] = SimpleQueue()
    return _Streamer(tokens.put), tokens


def queued_for(loop: asyncio.AbstractEventLoop) -> tuple[BaseStreamer, asyncio.Queue[int]]:
    """The same for an event loop."""
    tokens: asyncio.Queue[int] = asyncio.Queue()
    return _Streamer(lambda token: loop.call_soon_threadsafe(tokens.put_nowait, token)), tokens


class Tokens(Iterator[int]):
    """The tokens of a request, as they come. It is cancelled when this is closed, or gone."""

    def __init__(self, future: Future[Any], tokens: SimpleQueue[int]) -> None:
        self._future, self._tokens, self._is_over = future, tokens, False
        future.add_done_callback(lambda done: tokens.put(END))

    def __next__(self) -> int:
        if not self._is_over:
            token = self._tokens.get()
            if token is not END:
                return token
            self._is_over = True
            self._future.result()  # raises what the request has failed with
        raise StopIteration

    def close(self) -> None:
        """No more tokens are wanted."""
        self._is_over = True
        self._future.cancel()

    def __enter__(self) -> Tokens:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._future.cancel()
