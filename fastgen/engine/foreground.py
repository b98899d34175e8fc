"""Requests that run in the thread which asks for them: all are there at the beginning, and nothing else comes.

So which of them share a batch can be repeated, where costs are tokens and no seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastgen.engine.continuous import ContinuousBatches
from fastgen.engine.planning import Costs
from fastgen.engine.requests import Request

# Of beginnings that prompts share: what is free differs from run to run.
PREFIX_BYTES = 2**28


class TokenCosts(Costs):
    """What a call costs by its tokens alone, whatever calls have taken so far."""

    def note(self, length: int, rows: int, new_tokens: int, seconds: float) -> None:
        """Forgets it."""


@dataclass(frozen=True)
class Turn:
    """What has happened since the turn before.

    Attributes:
        begun: the requests that have begun.
        finished: those that have a result now.
        busy: rows that were in use meanwhile.
        waiting: requests that have not begun.
    """

    begun: list[Request]
    finished: list[Request]
    busy: int
    waiting: int


def executor_for(model: Any, rows: int) -> ContinuousBatches:
    """What runs requests of a model, in an order that depends on them alone.

    Args:
        rows: those that are in the model at the same time, at most: a request takes as many as it has beams.
    """
    return ContinuousBatches(model, rows, max_stall=None, costs=TokenCosts(), prefix_bytes=PREFIX_BYTES)


def turns(executor: ContinuousBatches, requests: Sequence[Request]) -> Iterator[Turn]:
    """Runs requests, and says what has come of them. They are in the order in which they may begin.

    Raises:
        BaseException: what no request has failed with, as an interrupt. Those that are left have no result then.
    """
    left, begun, finished = list(requests), list[Request](), list[Request]()
    rows = 0  # of those that have begun, and are not finished

    def more() -> list[Request]:
        nonlocal rows
        _pass_on_interrupts(finished)
        chosen = executor.choose(left) if left else []
        for request in chosen:
            left.remove(request)
        begun.extend(chosen)
        rows += sum(request.rows for request in chosen)
        return chosen

    for request in requests:
        request.future.add_done_callback(partial(_note, finished, request))
    while left:
        for _ in executor.steps(more(), more):
            _pass_on_interrupts(finished)
            if begun or finished:
                yield Turn([*begun], [*finished], min(rows, executor.most_rows), len(left))
            rows -= sum(request.rows for request in finished)
            begun.clear()
            finished.clear()


def _pass_on_interrupts(finished: list[Request]) -> None:
    for request in finished:
        error = request.future.exception()
        if error is not None and not isinstance(error, Exception):
            raise error


def _note(finished: list[Request], request: Request, future: Any) -> None:
    finished.append(request)
