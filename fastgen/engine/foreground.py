"""Requests that run in the thread which asks for them: all are there at the beginning, and nothing else comes.

So which of them share a batch can be repeated, where costs are tokens and no seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastgen.engine.executor import StaticBatches
from fastgen.engine.planning import Costs
from fastgen.engine.requests import Request


class TokenCosts(Costs):
    """What a call costs by its tokens alone, whatever calls have taken so far."""

    def note(self, length: int, rows: int, new_tokens: int, seconds: float) -> None:
        """Forgets it."""


@dataclass(frozen=True)
class Turn:
    """What has happened since the turn before.

    Attributes:
        finished: the requests that have a result now.
        busy: rows that were in use meanwhile.
        waiting: requests that have not begun.
    """

    finished: list[Request]
    busy: int
    waiting: int


def executor_for(model: Any, rows: int) -> StaticBatches:
    """What runs requests of a model, in an order that depends on them alone.

    Args:
        rows: those that are in the model at the same time, at most: a request takes as many as it has beams.
    """
    return StaticBatches(model, rows, TokenCosts())


def turns(executor: StaticBatches, requests: Sequence[Request]) -> Iterator[Turn]:
    """Runs requests, and says what has come of them. They are in the order in which they may begin.

    Raises:
        BaseException: what no request has failed with, as an interrupt. Those that are left have no result then.
    """
    left = list(requests)
    while left:
        chosen = executor.choose(left)
        executor.run(chosen, can_stop=False)
        for request in chosen:
            error = request.future.exception()
            if error is not None and not isinstance(error, Exception):
                raise error
        left = [request for request in left if not request.future.done()]
        yield Turn(chosen, sum(request.rows for request in chosen), len(left))
