"""Runs a fixed list of requests in the calling thread: all exist at the beginning, and no others come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fastgen.engine.continuous import ContinuousBatches
from fastgen.engine.requests import Request


class Turn(NamedTuple):
    """What has happened since the previous turn.

    Attributes:
        finished: requests that have got a result.
        busy: rows that were in use meanwhile.
        waiting: requests that have not begun.
    """

    finished: list[Request]
    busy: int
    waiting: int


def turns(executor: ContinuousBatches, requests: Sequence[Request]) -> Iterator[Turn]:
    """Runs requests, and yields after each turn in which some began or finished. They may begin in the given order.

    Raises:
        BaseException: one that is not a request's failure, such as an interrupt. The remaining requests get no result.
    """
    left, finished = list(requests), list[Request]()
    rows, told = 0, len(left)  # rows of requests that run; requests that waited at the last turn

    def pass_on_interrupts() -> None:
        for error in (request.future.exception() for request in finished):
            if error is not None and not isinstance(error, Exception):
                raise error

    def more() -> list[Request]:
        nonlocal rows
        pass_on_interrupts()  # before others begin
        chosen = executor.choose(left) if left else []
        rows += sum(request.rows for request in chosen)
        return chosen

    for request in requests:
        request.future.add_done_callback(lambda done, request=request: finished.append(request))  # type: ignore[misc]
    for _ in executor.steps(more):
        pass_on_interrupts()
        if finished or len(left) < told:
            yield Turn([*finished], min(rows, executor.most_rows), len(left))
        told = len(left)
        rows -= sum(request.rows for request in finished)
        finished.clear()
