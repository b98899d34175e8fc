"""Several results at once, and several streams as one: what fails, or is left, ends the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from fastgen_serve.concurrency import in_turns, merged, together


class Stream:
    """Yields numbers until it is to fail, and notes that it was closed."""

    def __init__(self, count: int, fails: bool = False, waits: bool = False) -> None:
        self._count, self._fails, self._waits, self.is_closed = count, fails, waits, False

    async def items(self) -> AsyncGenerator[int, None]:
        try:
            for number in range(self._count):
                await asyncio.sleep(0)
                yield number
            if self._waits:
                await asyncio.Event().wait()
            if self._fails:
                raise ValueError("it fails")
        finally:
            self.is_closed = True


def test_streams_are_merged() -> None:
    async def run() -> list[tuple[int, int]]:
        return [each async for each in merged([Stream(3).items(), Stream(0).items(), Stream(2).items()])]

    found = asyncio.run(run())
    assert sorted(found) == [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1)]
    assert [number for index, number in found if index == 0] == [0, 1, 2], "each in its order"


def test_a_stream_that_fails_closes_the_others() -> None:
    other = Stream(1, waits=True)

    async def run() -> list[tuple[int, int]]:
        found = []
        with pytest.raises(ValueError, match="it fails"):
            async for each in merged([other.items(), Stream(2, fails=True).items()]):
                found.append(each)
        assert other.is_closed
        return found

    assert sorted(asyncio.run(run())) == [(0, 0), (1, 0), (1, 1)]


async def test_streams_are_closed_with_what_merges_them() -> None:
    streams = [Stream(1, waits=True), Stream(1, waits=True)]
    made = merged([stream.items() for stream in streams])
    await anext(made)
    await made.aclose()
    assert all(stream.is_closed for stream in streams)


def test_results_are_in_order_and_end_with_the_first_failure() -> None:
    ended = []

    async def work(number: int) -> int:
        try:
            await asyncio.sleep(0.01 * (3 - number) if number < 3 else 60)
        finally:
            ended.append(number)
        if number == 2:
            raise ValueError("it fails")
        return number

    assert asyncio.run(together(work(number) for number in range(2))) == [0, 1]
    ended.clear()
    with pytest.raises(ValueError, match="it fails"):
        asyncio.run(together(work(number) for number in (2, 3)))
    assert ended == [2, 3]


def test_items_are_worked_on_so_many_at_a_time() -> None:
    running, most, tasks = 0, 0, 0

    async def work(number: int) -> int:
        nonlocal running, most, tasks
        running += 1
        most, tasks = max(most, running), max(tasks, len(asyncio.all_tasks()))
        await asyncio.sleep(0.001 * (number % 3))
        running -= 1
        if number == 1000:
            raise ValueError("it fails")
        return number

    assert asyncio.run(in_turns(work, range(100), 3)) == list(range(100))
    assert (most, tasks) == (3, 4)
    assert asyncio.run(in_turns(work, [], 3)) == []
    with pytest.raises(ValueError, match="it fails"):
        asyncio.run(in_turns(work, [0, 1000, 1], 2))
