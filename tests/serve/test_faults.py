"""A process of a model that dies, a model that cannot be loaded, a request that fails."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastgen.engine.continuous import ContinuousBatches
from fastgen_serve import metrics
from fastgen_serve.errors import BadRequest, Failed, Unavailable
from fastgen_serve.jobs import Delta, Encode, Generate, Generated
from fastgen_serve.settings import ServeSettings
from fastgen_serve.workers import messages, process, worker
from fastgen_serve.workers.encoding import EncodingWorker
from fastgen_serve.workers.local import LocalModel
from fastgen_serve.workers.remote import RemoteModel
from tests.pipeline import tiny
from tests.serve.servers import BART, GPT2, WAIT, damaged, happens

pytestmark = pytest.mark.usefixtures("forks")

SETTINGS = ServeSettings(models=(("gpt2", GPT2), ("bart", BART)), slots=8, warm_up=False)
LONG = {"num_beams": 1, "max_new_tokens": 200, "min_new_tokens": 200}


@asynccontextmanager
async def running(settings: ServeSettings = SETTINGS) -> AsyncIterator[RemoteModel]:
    model = RemoteModel("gpt2", settings)
    await model.start()
    try:
        await happens(lambda: model.is_ready)
        yield model
    finally:
        await model.stop()


def kill(model: RemoteModel) -> None:
    assert model._process is not None and model._process.pid is not None
    os.kill(model._process.pid, signal.SIGKILL)


async def test_a_process_that_dies_is_started_again_and_its_requests_are_run_again() -> None:
    async with running() as model:
        await check_what_waits_is_run_again(model)
        await check_what_kills_each_process_is_not_run_for_ever(model)
        await check_what_has_no_result_at_the_end_is_unavailable(model)


async def check_what_waits_is_run_again(model: RemoteModel) -> None:
    job = Generate((5, 6, 7), LONG)
    wanted = await model.generate(job)
    waits = [asyncio.ensure_future(model.generate(job)) for _ in range(12)]
    stream = model.stream_all([Generate((5, 6, 7), LONG, streams=True)])
    assert isinstance((await anext(stream))[1], Delta)
    kill(model)
    with pytest.raises(Unavailable, match="has died"):  # some of it is with the client
        async for _ in stream:
            pass
    with pytest.raises(Unavailable, match="not ready"):
        await model.generate(job)
    assert [result == wanted for result in await asyncio.gather(*waits)] == [True] * 12
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


async def test_a_model_that_cannot_be_loaded_says_why_and_is_not_tried_again(tmp_path: Path) -> None:
    folder = damaged(tmp_path)
    reasons: list[str] = []
    model = RemoteModel("gpt2", ServeSettings(models=(("gpt2", str(folder)),)), reasons.append)
    await model.start()
    await happens(lambda: reasons)
    assert "cannot be loaded" in reasons[0] and "\n" not in reasons[0]
    with pytest.raises(Unavailable, match="cannot be loaded"):
        await model.generate(Generate((5,)))
    await model.stop()


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
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "not enough memory"),
        (IndexError("beyond"), "IndexError: beyond"),
    ],
)
def test_a_request_that_fails_fails_alone(
    local: LocalModel, error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner: Any = local._worker._runner
    count = runner._generated

    def planted(job: Generate, *rest: Any) -> Any:
        if job.tokens == (5, 6):
            raise error
        return count(job, *rest)

    monkeypatch.setattr(runner, "_generated", planted)

    async def work() -> list[Any]:
        jobs = [Generate(tokens, {"max_new_tokens": 6}) for tokens in ((5, 6, 7), (5, 6), (8, 9))]
        return await asyncio.gather(*map(local.generate, jobs), return_exceptions=True)

    first, second, third = asyncio.run(work())
    assert isinstance(first, Generated) and isinstance(third, Generated)
    assert isinstance(second, Failed) and said in second.message


async def test_a_model_whose_processes_die_while_they_load_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
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
    assert caplog.messages[-1] == reasons[0]
    await model.stop()


# ---- threads that die


POISON = (5, 9, 5, 9)


def dying(connection: Connection, name: str, settings: ServeSettings) -> None:
    """`process.run`, where the thread of the engine dies of a prompt; but for that, a process as any other."""
    choose = ContinuousBatches.choose

    def planted(batches: Any, waiting: Any) -> Any:
        if any(request.token_list == list(POISON) for request in waiting):
            raise LookupError("planted")
        return choose(batches, waiting)

    ContinuousBatches.choose = planted
    process.run(connection, name, settings)


def restarts() -> float:
    return metrics.REGISTRY.get_sample_value("fastgen_restarts_total", {"model": "gpt2"}) or 0.0


async def test_a_thread_that_dies_ends_the_process_which_is_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """That of the engine, in the process; and here, that which reads what the process sends."""
    fails, receive, before = [False], RemoteModel.receive, restarts()

    def planted(model: RemoteModel, message: Any) -> None:
        if isinstance(message, messages.Done) and fails[0]:
            fails[0] = False
            raise LookupError("planted")
        receive(model, message)

    monkeypatch.setattr(RemoteModel, "receive", planted)
    job = Generate((5, 6, 7), {"num_beams": 1, "max_new_tokens": 5})
    with monkeypatch.context() as patch:
        patch.setattr(process, "run", dying)
        async with running() as model:
            patch.undo()
            wanted = await model.generate(job)
            # It is told that it has failed, or it is run again in the process that is started then.
            (found,) = await asyncio.gather(model.generate(Generate(POISON, job.options)), return_exceptions=True)
            assert isinstance(found, (Unavailable, Generated))
            await happens(lambda: restarts() == before + 1 and model.is_ready)
            fails[0] = True
            assert await model.generate(job) == wanted
            assert restarts() == before + 2 and model.is_ready and not model._pending
    assert "has died (3)" in caplog.text and "the pipe between" in caplog.text


def test_what_an_encoder_dies_of_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the process of a model, who sees it ends that."""
    deaths: list[threading.ExceptHookArgs] = []
    ended = threading.Event()
    runner = EncodingWorker(str(tiny.bert(tmp_path)), ServeSettings(warm_up=False))
    monkeypatch.setattr(threading, "excepthook", lambda death: (deaths.append(death), ended.set()))
    monkeypatch.setattr(runner._scheduler, "take", lambda: 1 / 0)
    runner.submit(Encode((2, 5, 3)), print, print)
    assert ended.wait(WAIT)
    (death,) = deaths
    assert death.exc_type is ZeroDivisionError and death.thread is not None and death.thread.name == "fastgen-encode"


def test_numbers_that_cannot_be_told_leave_the_thread_that_reads() -> None:
    sent: list[Any] = []
    made = worker.Worker("gpt2", SETTINGS, sent.append)
    made._runner = SimpleNamespace(stats=lambda: {}[1])
    made.receive(messages.AskStats(7))
    assert [(type(each), each.number) for each in sent] == [(messages.Failure, 7)]


def test_what_a_request_has_failed_with_has_a_status() -> None:
    """What is refused is a mistake of the client; what fails later is none, whatever its type."""
    assert [worker.as_serve_error(error).status for error in (ValueError("x"), RuntimeError("x"))] == [500, 500]
    sent: list[Any] = []
    made = worker.Worker("gpt2", SETTINGS, sent.append)

    def refuse(*given: Any) -> None:
        raise ValueError("`top_k` must not be 3")

    def fail(job: Any, on_done: Any, on_error: Any) -> None:
        on_error(ValueError("probabilities to draw from are not numbers"))

    for submit in (refuse, fail):
        made._runner = SimpleNamespace(submit=submit)
        made.receive(messages.Submit(1, Generate((5,), {"top_k": 3})))
    first, second = (each.error for each in sent)
    assert isinstance(first, BadRequest) and first.param == "top_k"
    assert isinstance(second, Failed)
