"""Requests that run in the thread which asks for them: all are there at the beginning, and nothing else comes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fastgen.engine.continuous import ContinuousBatches
from fastgen.engine.requests import Request


class Turn(NamedTuple):
    """What has happened since the turn before.

    Attributes:
        finished: the requests that have a result now.
        busy: rows that were in use meanwhile.
        waiting: requests that have not begun.
    """

    finished: list[Request]
    busy: int
    waiting: int


def turns(executor: ContinuousBatches, requests: Sequence[Request]) -> Iterator[Turn]:
    """Runs requests, and says what has come of them. They are in the order in which they may begin.

    Raises:
        BaseException: what no request has failed with, as an interrupt. Those that are left have no result then.
    """
    left, finished = list(requests), list[Request]()
    rows, told = 0, len(left)  # of those that have begun, and are not finished; that waited at the last turn

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
