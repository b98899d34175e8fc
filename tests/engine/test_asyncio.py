from __future__ import annotations

import asyncio
import concurrent.futures
from typing import Any

import pytest
import torch

import fastgen
from tests.engine.conftest import PROMPTS, WAIT, Gate, alone, assert_alone


def _run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, WAIT))


def test_generate_and_submit(llama: Any) -> None:
    async def run() -> None:
        future = await engine.asubmit(PROMPTS[3], num_beams=2)
        results = await asyncio.gather(engine.agenerate(PROMPTS[:2]), engine.agenerate(PROMPTS[2:], seed=None))
        assert_alone(llama, PROMPTS, [*results[0], *results[1]])
        assert torch.equal(await future, alone(llama, PROMPTS[3], num_beams=2))

    with fastgen.Engine(llama) as engine:
        _run(run())


def test_streams(llama: Any) -> None:
    async def run() -> list[int]:
        return [token async for token in engine.astream(PROMPTS[0])]

    async def breaks_off() -> int:
        stream = engine.astream(PROMPTS[0], max_new_tokens=400, eos_token_id=None)
        async for token in stream:
            await stream.aclose()
            return token
        raise AssertionError("no token")

    async def fails() -> None:
        async for _ in engine.astream(PROMPTS[0], stopping_criteria=[lambda *args, **kwargs: 1 / 0]):
            pass

    expected = alone(llama, PROMPTS[0])[0, len(PROMPTS[0]) :].tolist()
    with fastgen.Engine(llama) as engine:
        assert _run(run()) == expected
        assert _run(breaks_off()) == expected[0]
        with pytest.raises(ZeroDivisionError):
            _run(fails())
    assert engine.stats()["cancelled"] == 1


def test_waiting_for_room_does_not_stop_the_loop(llama: Any, gate: Gate) -> None:
    async def run() -> None:
        first = await engine.asubmit(PROMPTS[0], logits_processor=[gate])
        while not gate.has_come.is_set():
            await asyncio.sleep(0)
        second = await engine.asubmit(PROMPTS[1])
        third = asyncio.ensure_future(engine.asubmit(PROMPTS[2]))
        fourth = asyncio.ensure_future(engine.asubmit(PROMPTS[3]))
        with pytest.raises(fastgen.EngineFull):
            await engine.asubmit(PROMPTS[4], timeout=0)
        await asyncio.sleep(0.05)
        assert not third.done()
        third.cancel()  # while it waits for room: it is never run
        with pytest.raises(asyncio.CancelledError):
            await third
        gate.may_go.set()
        assert_alone(llama, [PROMPTS[n] for n in (0, 1, 3)], [await first, await second, await (await fourth)])

    with fastgen.Engine(llama, max_waiting=1) as engine:
        _run(run())
        assert engine.stats()["finished"] == 3


def test_threads_of_the_loop_do_not_wait_for_room(llama: Any) -> None:
    """A loop has few, and looks up names, reads files and waits for others in them."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(1))
        with engine.paused():
            tasks = [asyncio.ensure_future(engine.asubmit(prompt)) for prompt in PROMPTS]
            await asyncio.sleep(0)
            with pytest.raises(fastgen.EngineFull):
                await engine.asubmit(PROMPTS[0], timeout=0.05)
            assert await asyncio.wait_for(asyncio.to_thread(lambda: "done"), WAIT) == "done"
            assert [task.done() for task in tasks] == [True, *[False] * (len(PROMPTS) - 1)]
        assert_alone(llama, PROMPTS, [await (await task) for task in tasks])
        with engine.paused():
            tasks = [asyncio.ensure_future(engine.asubmit(prompt)) for prompt in PROMPTS[:2]]
            await asyncio.sleep(0.01)
            engine.close(wait=False)
            with pytest.raises(ValueError, match="closed"):
                await tasks[1]

    with fastgen.Engine(llama, max_waiting=1) as engine:
        _run(run())


def test_those_that_wait_for_room_do_not_wake_each_other(llama: Any) -> None:
    """Each is told when it is in, and when it has its result, however many wait."""
    told: list[Any] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        tell = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *given, **options: (told.append(given), tell(*given, **options))[1]
        with engine.paused():
            tasks = [asyncio.ensure_future(engine.asubmit(PROMPTS[n % 3], max_new_tokens=1)) for n in range(40)]
            await asyncio.sleep(0.01)
        results = [await (await task) for task in tasks]
        assert_alone(llama, [PROMPTS[n % 3] for n in range(40)], results, max_new_tokens=1)

    with fastgen.Engine(llama, max_waiting=1) as engine:
        _run(run())
    assert len(told) <= 3 * 40


def test_a_task_that_is_cancelled_when_there_is_room(llama: Any) -> None:
    """In the same turn of the loop. Then it does not go on, nor does its request."""

    async def run() -> None:
        with engine.paused():
            first = await engine.asubmit(PROMPTS[0])
            task = asyncio.ensure_future(engine.asubmit(PROMPTS[1], timeout=WAIT))
            await asyncio.sleep(0.05)
            first.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
                if engine.stats()["waiting"]:
                    break
            if not task.cancel():  # it was over
                (await task).cancel()
                return
            with pytest.raises(asyncio.CancelledError):
                await task

    with fastgen.Engine(llama, max_waiting=1) as engine:
        _run(run())
        assert engine.stats()["finished"] == 0 and engine.stats()["waiting"] == 0


@pytest.mark.parametrize("timeout", [0, -1, None])
def test_no_time_to_wait_for_room(llama: Any, timeout: float | None) -> None:
    """Where there is room, none is needed."""

    async def run() -> Any:
        return await (await engine.asubmit(PROMPTS[0], timeout=timeout))

    with fastgen.Engine(llama, max_waiting=1) as engine:
        assert torch.equal(_run(run()), alone(llama, PROMPTS[0]))


def test_a_task_that_is_cancelled_cancels_its_requests(llama: Any, gate: Gate) -> None:
    async def run() -> None:
        task = asyncio.ensure_future(engine.agenerate(PROMPTS, logits_processor=[gate]))
        while not gate.has_come.is_set():
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.may_go.set()

    with fastgen.Engine(llama) as engine:
        _run(run())
        stats = engine.stats()
        assert stats["cancelled"] == len(PROMPTS) and stats["waiting"] == 0
        assert torch.equal(engine.submit(PROMPTS[0]).result(WAIT), alone(llama, PROMPTS[0]))


def test_a_loop_that_is_closed_takes_its_requests_with_it(llama: Any, gate: Gate) -> None:
    """Whether they run, wait, or wait for room: nobody can get their results any more."""
    loop = asyncio.new_event_loop()

    async def run() -> None:
        long = {"max_new_tokens": 400, "eos_token_id": None}
        futures.append(await engine.asubmit(PROMPTS[0], logits_processor=[gate], **long))
        while not gate.has_come.is_set():
            await asyncio.sleep(0)
        futures.append(await engine.asubmit(PROMPTS[1]))
        tasks.extend(loop.create_task(engine.asubmit(prompt)) for prompt in PROMPTS[2:4])
        await asyncio.sleep(0.01)

    futures: list[Any] = []
    tasks: list[Any] = []
    with fastgen.Engine(llama, max_waiting=1) as engine:
        loop.run_until_complete(run())
        loop.close()
        gate.may_go.set()
        assert torch.equal(engine.submit(PROMPTS[4]).result(WAIT), alone(llama, PROMPTS[4]))
        stats = engine.stats()
    assert (stats["submitted"], stats["cancelled"], stats["finished"], stats["waiting"]) == (3, 2, 1, 0)
    assert stats["tokens"] < 400


def test_one_that_fails_cancels_the_others(llama: Any, gate: Gate) -> None:
    async def run() -> None:
        with pytest.raises(ZeroDivisionError):
            await engine.agenerate(PROMPTS, stopping_criteria=[lambda *args, **kwargs: 1 / 0])

    with fastgen.Engine(llama) as engine:
        _run(run())
    stats = engine.stats()
    assert stats["failed"] >= 1 and stats["finished"] == 0


def test_refused_at_once(llama: Any) -> None:
    async def run() -> None:
        with pytest.raises(ValueError, match="empty"):
            await engine.asubmit([])
        engine.close()
        with pytest.raises(ValueError, match="closed"):
            await engine.agenerate(PROMPTS)

    with fastgen.Engine(llama) as engine:
        _run(run())


def test_futures_of_threads_can_be_waited_for(llama: Any) -> None:
    with fastgen.Engine(llama) as engine:
        futures = [engine.submit(prompt) for prompt in PROMPTS]
        done = [future.result() for future in concurrent.futures.as_completed(futures, WAIT)]
    assert len(done) == len(PROMPTS)
