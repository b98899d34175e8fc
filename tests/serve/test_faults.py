"""A process of a model that dies, a model that cannot be loaded, a request that fails."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from fastgen_serve.errors import Failed, Unavailable
from fastgen_serve.jobs import Delta, Generate, Generated
from fastgen_serve.settings import ServeSettings
from fastgen_serve.workers import worker
from fastgen_serve.workers.local import LocalModel
from fastgen_serve.workers.remote import RemoteModel
from tests.serve.servers import BART, GPT2, WAIT

SETTINGS = ServeSettings(models=(("gpt2", GPT2), ("bart", BART)), slots=8, warm_up=False)
LONG = {"num_beams": 1, "max_new_tokens": 400, "min_new_tokens": 400}


@asynccontextmanager
async def running(settings: ServeSettings = SETTINGS) -> AsyncIterator[RemoteModel]:
    model = RemoteModel("gpt2", settings)
    await model.start()
    try:
        await happens(lambda: model.is_ready)
        yield model
    finally:
        await model.stop()


async def happens(condition: Callable[[], Any]) -> None:
    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.02)

    await asyncio.wait_for(wait(), WAIT)


def kill(model: RemoteModel) -> None:
    assert model._process is not None and model._process.pid is not None
    os.kill(model._process.pid, signal.SIGKILL)


def test_a_process_that_dies_is_started_again_and_its_requests_are_run_again() -> None:
    async def work() -> None:
        async with running() as model:
            await check_what_waits_is_run_again(model)
            await check_what_kills_each_process_is_not_run_for_ever(model)
            await check_what_has_no_result_at_the_end_is_unavailable(model)

    asyncio.run(work())


async def check_what_waits_is_run_again(model: RemoteModel) -> None:
    job = Generate((5, 6, 7), LONG)
    wanted = await model.generate(job)
    waits = [asyncio.ensure_future(model.generate(job)) for _ in range(20)]
    stream = model.stream(Generate((5, 6, 7), LONG, streams=True))
    assert isinstance(await anext(stream), Delta)
    kill(model)
    with pytest.raises(Unavailable, match="has died"):  # some of it is with the client
        async for _ in stream:
            pass
    with pytest.raises(Unavailable, match="not ready"):
        await model.generate(job)
    assert [result == wanted for result in await asyncio.gather(*waits)] == [True] * 20
    assert model.is_ready and not model._pending and model._admission.rows == 0


async def check_what_kills_each_process_is_not_run_for_ever(model: RemoteModel) -> None:
    doomed = asyncio.ensure_future(model.generate(Generate((5, 6, 7), LONG)))
    for _ in range(2):
        await happens(lambda: model.is_ready and model._pending)
        kill(model)
        await happens(lambda: not model.is_ready)
    with pytest.raises(Unavailable, match="has died"):
        await doomed
    await happens(lambda: model.is_ready)
    assert isinstance(await model.generate(Generate((5,), {"num_beams": 1, "max_new_tokens": 2})), Generated)


async def check_what_has_no_result_at_the_end_is_unavailable(model: RemoteModel) -> None:
    waits = [asyncio.ensure_future(model.generate(Generate((5, 6, 7), LONG))) for _ in range(3)]
    await happens(lambda: model._pending)
    ended = model._process
    await model.stop()
    assert all(isinstance(each, Unavailable) for each in await asyncio.gather(*waits, return_exceptions=True))
    assert ended is not None and ended.exitcode == 0


def test_a_model_that_cannot_be_loaded_says_why_and_is_not_tried_again(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in Path(GPT2).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "model.safetensors").write_bytes(b"no weights")

    async def work() -> None:
        reasons: list[str] = []
        model = RemoteModel("gpt2", ServeSettings(models=(("gpt2", str(folder)),)), reasons.append)
        await model.start()
        await happens(lambda: reasons)
        assert "cannot be loaded" in reasons[0] and "\n" not in reasons[0]
        with pytest.raises(Unavailable, match="cannot be loaded"):
            await model.generate(Generate((5,)))
        await model.stop()

    asyncio.run(work())


@pytest.fixture(scope="module")
def local(enabled: None) -> Iterator[LocalModel]:
    made = LocalModel("bart", SETTINGS)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "not enough memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried"), "not enough memory"),
        (IndexError("beyond"), "IndexError: beyond"),
    ],
)
def test_a_request_that_fails_fails_alone(
    local: LocalModel, error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner: Any = local._worker._runner
    count = runner._sequences

    def planted(job: Generate, *rest: Any) -> Any:
        if job.tokens == (5, 6):
            raise error
        return count(job, *rest)

    monkeypatch.setattr(runner, "_sequences", planted)

    async def work() -> list[Any]:
        jobs = [Generate(tokens, {"max_new_tokens": 6}) for tokens in ((5, 6, 7), (5, 6), (8, 9))]
        return await asyncio.gather(*map(local.generate, jobs), return_exceptions=True)

    first, second, third = asyncio.run(work())
    assert isinstance(first, Generated) and isinstance(third, Generated)
    assert isinstance(second, Failed) and said in second.message


def test_a_model_whose_processes_die_while_they_load_is_given_up() -> None:
    async def work() -> None:
        reasons: list[str] = []
        model = RemoteModel("gpt2", SETTINGS, reasons.append)
        await model.start()
        killed: set[int | None] = set()
        while not reasons:
            if model._process is not None and model._process.pid not in killed:
                killed.add(model._process.pid)
                kill(model)
            await asyncio.sleep(0.02)
        assert len(killed) == 3 and "gpt2 dies while it is loaded" in reasons[0]
        await model.stop()

    asyncio.run(work())


def test_what_a_request_has_failed_with_has_a_status() -> None:
    assert [worker.as_serve_error(error).status for error in (ValueError("x"), RuntimeError("x"))] == [400, 500]
