"""Many threads, cancellation, failures, back pressure, and the end of an engine. No time is asserted."""

from __future__ import annotations

import concurrent.futures
import gc
import os
import subprocess
import threading
import time
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import fastgen
from fastgen import memory
from tests.engine.conftest import PROMPTS, WAIT, Gate, StopsAt, alone, assert_alone, both_kinds, raising
from tests.equivalence.models import BY_NAME


def test_cancelled_while_it_waits(llama: Any, gate: Gate) -> None:
    with fastgen.Engine(llama) as engine:
        first = engine.submit(PROMPTS[0], logits_processor=[gate])
        assert gate.has_come.wait(WAIT)
        second, third = engine.submit(PROMPTS[1]), engine.submit(PROMPTS[2])
        assert second.cancel() and second.cancelled() and second.cancel()
        assert concurrent.futures.wait([second], WAIT).done == {second}
        assert engine.stats()["waiting"] == 1 and engine.stats()["running"] == 1
        gate.may_go.set()
        assert torch.equal(third.result(WAIT), alone(llama, PROMPTS[2]))
        assert torch.equal(first.result(WAIT), alone(llama, PROMPTS[0]))
        assert engine.stats()["cancelled"] == 1


def test_cancelled_while_it_runs(llama: Any, gate: Gate) -> None:
    """The call ends with the step."""
    with fastgen.Engine(llama) as engine:
        future = engine.submit(PROMPTS[0], logits_processor=[gate], max_new_tokens=300, eos_token_id=None)
        assert gate.has_come.wait(WAIT) and future.running() and not future.done()
        assert future.cancel() and not future.running()
        with pytest.raises(concurrent.futures.CancelledError):
            future.result(WAIT)
        gate.may_go.set()
        assert torch.equal(engine.submit(PROMPTS[1]).result(WAIT), alone(llama, PROMPTS[1]))
    assert gate.calls <= 2


def test_cancelled_when_it_is_done(llama: Any) -> None:
    with fastgen.Engine(llama) as engine:
        future = engine.submit(PROMPTS[0])
        future.result(WAIT)
        assert not future.cancel() and engine.stats()["cancelled"] == 0


class _Generating:
    """Stands for `generate` of a model, and waits before it is called. Then it does what the test says."""

    def __init__(self, model: Any) -> None:
        self.has_come, self.may_go, self.calls = threading.Event(), threading.Event(), list[dict[str, Any]]()
        self.before = lambda call: None
        self._generate, model.generate = model.generate, self

    def __call__(self, **call: Any) -> Any:
        self.calls.append(call)
        self.has_come.set()
        assert self.may_go.wait(WAIT)
        self.before(call)
        return self._generate(**call)


def test_one_of_a_running_batch_is_cancelled(llama: Any) -> None:
    generating = _Generating(llama)
    with fastgen.Engine(llama) as engine:
        with engine.paused():
            futures = [engine.submit(prompt) for prompt in PROMPTS[:3]]
        assert generating.has_come.wait(WAIT)
        assert futures[1].cancel()
        generating.may_go.set()
        assert torch.equal(futures[0].result(WAIT), alone(llama, PROMPTS[0]))
        assert torch.equal(futures[2].result(WAIT), alone(llama, PROMPTS[2]))
    assert [each.get("input_ids").shape[0] for each in generating.calls[:1]] == [3]


def test_all_of_a_running_batch_are_cancelled(llama: Any) -> None:
    """No step follows their prefill."""
    generating = _Generating(llama)
    with fastgen.Engine(llama) as engine:
        with engine.paused():
            futures = [engine.submit(prompt, max_new_tokens=300, eos_token_id=None) for prompt in PROMPTS[:3]]
        assert generating.has_come.wait(WAIT)
        assert all(future.cancel() for future in futures)
        generating.may_go.set()
        engine.close()
        assert engine.stats()["steps"] == engine.stats()["busy"] == 0


def test_what_fails_fails_alone(llama: Any) -> None:
    errors = [None, LookupError("mine"), SystemExit("mine"), None, LookupError("mine"), None]
    with fastgen.Engine(llama) as engine:
        futures = [
            engine.submit(prompt, **({} if error is None else {"logits_processor": [raising(error)]}))
            for prompt, error in zip(PROMPTS, errors, strict=True)
        ]
        for prompt, error, future in zip(PROMPTS, errors, futures, strict=True):
            assert future.exception(WAIT) is error
            assert error or torch.equal(future.result(WAIT), alone(llama, prompt))
        with pytest.raises(LookupError):
            engine.generate(PROMPTS, logits_processor=[raising(LookupError("mine"))])
        assert torch.equal(engine.submit(PROMPTS[0]).result(WAIT), alone(llama, PROMPTS[0]))
    stats = engine.stats()
    assert stats["failed"] >= 4 and stats["waiting"] == stats["running"] == 0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("a row")], ids=str)
def test_a_batch_that_fails_is_run_in_halves(llama: Any, error: Exception) -> None:
    generating = _Generating(llama)
    generating.may_go.set()

    def fails(call: dict[str, Any]) -> None:
        if (call.get("inputs", call.get("input_ids")) == 20).any():
            raise error

    generating.before = fails
    with fastgen.Engine(llama) as engine:
        with engine.paused():
            futures = [engine.submit(prompt) for prompt in PROMPTS]
        for prompt, future in zip(PROMPTS, futures, strict=True):
            if prompt == [20]:
                assert future.exception(WAIT) is error
            else:
                assert torch.equal(future.result(WAIT), alone(llama, prompt))
        assert engine.stats()["failed"] == 1 and engine.stats()["repeated"] >= 1
    assert len(generating.calls) < 2 * len(PROMPTS) + 6


def test_the_queue_is_full(llama: Any, gate: Gate) -> None:
    with fastgen.Engine(llama, max_waiting=2) as engine:
        engine.submit(PROMPTS[0], logits_processor=[gate])
        assert gate.has_come.wait(WAIT)
        waiting = [engine.submit(prompt) for prompt in PROMPTS[:2]]
        for timeout in (0, 0.01):
            with pytest.raises(fastgen.EngineFull, match="2 requests"):
                engine.submit(PROMPTS[2], timeout=timeout)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            blocked = pool.submit(engine.submit, PROMPTS[2])
            many = pool.submit(engine.generate, PROMPTS)  # more than may wait at all
            waiting[0].cancel()
            gate.may_go.set()
            assert torch.equal(blocked.result(WAIT).result(WAIT), alone(llama, PROMPTS[2]))
            assert_alone(llama, PROMPTS, many.result(WAIT))
        assert torch.equal(waiting[1].result(WAIT), alone(llama, PROMPTS[1]))


def test_callbacks_may_submit_but_not_wait(llama: Any, gate: Gate) -> None:
    raised: list[BaseException] = []

    def callback(done: Any) -> None:
        for call in (lambda: engine.submit(PROMPTS[2]), lambda: engine.generate(PROMPTS)):
            try:
                call()
            except BaseException as error:
                raised.append(error)

    with fastgen.Engine(llama, slots=1, max_waiting=1) as engine:
        first = engine.submit(PROMPTS[0], logits_processor=[gate])
        first.add_done_callback(callback)
        assert gate.has_come.wait(WAIT)
        second = engine.submit(PROMPTS[1])
        gate.may_go.set()
        assert torch.equal(second.result(WAIT), alone(llama, PROMPTS[1]))
    assert [type(error) for error in raised] == [fastgen.EngineFull, RuntimeError]


def test_closing(llama: Any, gate: Gate) -> None:
    """What waits is run; nothing can be added."""
    engine = fastgen.Engine(llama, max_waiting=2)
    engine.submit(PROMPTS[0], logits_processor=[gate])
    assert gate.has_come.wait(WAIT)
    waiting = [engine.submit(prompt) for prompt in PROMPTS[:2]]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        blocked = pool.submit(engine.submit, PROMPTS[2])
        engine.close(wait=False)
        with pytest.raises(ValueError, match="closed"):
            blocked.result(WAIT)
    with pytest.raises(ValueError, match="closed"):
        engine.submit(PROMPTS[2])
    gate.may_go.set()
    engine.close()
    engine.close()
    assert_alone(llama, PROMPTS[:2], [future.result(0) for future in waiting])


def test_closing_with_cancellation(llama: Any, gate: Gate) -> None:
    with pytest.raises(LookupError, match="of the block"), fastgen.Engine(llama) as engine:
        futures = [engine.submit(PROMPTS[0], logits_processor=[gate]), engine.submit(PROMPTS[1])]
        assert gate.has_come.wait(WAIT)
        gate.may_go.set()
        raise LookupError("of the block")
    assert futures[1].cancelled() and futures[0].done()


def test_streams(llama: Any, gate: Gate) -> None:
    for name in ("llama", "bart"):
        model = BY_NAME[name].build()
        with fastgen.Engine(model) as engine:
            made = alone(model, PROMPTS[0])[0].tolist()
            assert list(engine.stream(PROMPTS[0])) == made[1 if name == "bart" else len(PROMPTS[0]) :]
    with fastgen.Engine(llama) as engine:
        for end in ("closed", "gone"):
            tokens: Any = engine.stream(PROMPTS[0], max_new_tokens=400, eos_token_id=None)
            next(tokens)
            if end == "closed":
                tokens.close()
                assert list(tokens) == []
            del tokens
            gc.collect()
        with pytest.raises(ValueError, match="num_beams"):
            engine.stream(PROMPTS[0], num_beams=2)
        stopped = engine.stream(PROMPTS[0], stopping_criteria=[lambda *args, **kwargs: 1 / 0])
        with pytest.raises(ZeroDivisionError):
            list(stopped)
    assert engine.stats()["cancelled"] == 2 and engine.stats()["tokens"] < 800


@pytest.mark.parametrize("at", ["items", "append"])
def test_streams_that_are_collected_while_others_come_in(llama: Any, at: str, caplog: pytest.LogCaptureFixture) -> None:
    """Their requests give way to those that wait for room. From Python 3.12 on, that happens at any line: no more wait
    than may, they come in in their turn, and nothing fails that is logged.
    """

    def collect() -> None:
        if streams:
            streams.pop().close()  # as its `__del__` does

    class Outside(OrderedDict[Any, Any]):
        def items(self) -> Any:
            collect()
            return super().items()

    class Requests(list[Any]):
        def append(self, request: Any) -> None:
            collect()
            super().append(request)

    streams: list[Any] = []
    with fastgen.Engine(llama, max_waiting=2) as engine, ThreadPoolExecutor(6) as threads:
        with engine.paused():
            first, stream = engine.submit(PROMPTS[0]), engine.stream(PROMPTS[1])
            waiting, others = engine._waiting, []
            if at == "items":
                waiting._outside = Outside(waiting._outside)
            for prompt in PROMPTS[:4]:
                others.append(threads.submit(engine.submit, prompt))
                while len(waiting._outside) < len(others):
                    time.sleep(0.001)
            outside = [left[0] for left in waiting._outside.values()]
            if at == "append":
                waiting.requests = Requests(waiting.requests)
            streams.append(stream)
            first.cancel()
            assert not streams and waiting.requests == outside[:2] and not caplog.records
        assert_alone(llama, PROMPTS[:4], [other.result(WAIT).result(WAIT) for other in others])


def test_an_engine_that_is_gone(llama: Any) -> None:
    """What was submitted is run, and then the thread and the model go."""
    engine = fastgen.Engine(llama)
    future = engine.submit(PROMPTS[0])
    thread, model = engine._waiting.thread, weakref.ref(llama)
    expected = alone(llama, PROMPTS[0])
    del engine
    gc.collect()
    assert torch.equal(future.result(WAIT), expected)
    assert thread is not None
    thread.join(WAIT)
    assert not thread.is_alive() and model() is llama


def test_results_are_not_kept(llama: Any) -> None:
    """They go with their futures, and do not wait until Python looks for garbage: between two looks are thousands."""
    with fastgen.Engine(llama) as engine, memory.no_collection():
        with engine.paused():  # so that the first two share a call
            futures = [engine.submit(prompt, **options) for prompt in PROMPTS[:2] for options in ({}, {"num_beams": 2})]
        results = [weakref.ref(future.result(WAIT)) for future in futures]
        with engine.paused():  # nothing runs
            del futures
            assert [result() for result in results] == [None] * 4


def test_a_future_does_not_keep_what_its_request_was_given(llama: Any) -> None:
    with fastgen.Engine(llama) as engine, memory.no_collection():
        criterion = StopsAt(3)
        future, given = engine.submit(PROMPTS[0], stopping_criteria=[criterion]), weakref.ref(criterion)
        del criterion
        future.result(WAIT)
        with engine.paused():
            assert given() is None


def test_what_the_engine_itself_fails_with_reaches_everybody(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda error: None)  # which would print it, too
    engine = fastgen.Engine(llama, slots=2)
    with engine.paused():
        futures = [engine.submit(prompt) for prompt in PROMPTS]
        choose = engine._executor.choose
        fails = lambda waiting: 1 / 0 if engine._executor.busy else choose(waiting)  # noqa: E731
        monkeypatch.setattr(engine._executor, "choose", fails)
    for future in futures:
        assert isinstance(future.exception(WAIT), ZeroDivisionError) and future.exception() is engine.failure
    assert engine.stats()["busy"] == engine.stats()["running"] == 0
    with pytest.raises(ValueError, match="closed"):
        engine.submit(PROMPTS[0])
    engine.close()


# ---- a model that changes


def _negate(model: Any) -> None:
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(-1.0)


class _Changing:
    """A processor that changes the model's weights in the third step."""

    def __init__(self, model: Any) -> None:
        self.model, self.calls = model, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            _negate(self.model)
        return scores


def test_weights_that_change_while_a_batch_runs(llama: Any) -> None:
    """It is run again: what it gives is of one model."""
    generating = _Generating(llama)

    def changes(call: dict[str, Any]) -> None:
        generating.before = lambda call: None
        call["logits_processor"] = [_Changing(llama)]

    generating.may_go.set()
    generating.before = changes
    with fastgen.Engine(llama) as engine:
        results = engine.generate(PROMPTS)
        assert engine.stats()["repeated"] == 1
    assert_alone(llama, PROMPTS, results)


def test_weights_that_change_while_user_code_looks_on(llama: Any) -> None:
    with fastgen.Engine(llama) as engine:
        with pytest.raises(RuntimeError, match="has changed while the request ran"):
            engine.submit(PROMPTS[0], logits_processor=[_Changing(llama)]).result(WAIT)
        assert torch.equal(engine.submit(PROMPTS[1]).result(WAIT), alone(llama, PROMPTS[1]))


def test_a_pause_to_change_the_model_in(llama: Any, gate: Gate) -> None:
    expected = alone(llama, PROMPTS[0])
    with fastgen.Engine(llama) as engine:
        first = engine.submit(PROMPTS[0], logits_processor=[gate])
        assert gate.has_come.wait(WAIT)
        second = engine.submit(PROMPTS[1])
        threading.Timer(0.05, gate.may_go.set).start()
        with engine.paused():
            assert torch.equal(first.result(0), expected)  # it was finished first
            _negate(llama)
            assert not second.done()
        assert torch.equal(second.result(WAIT), alone(llama, PROMPTS[1]))


def test_training_mode(llama: Any) -> None:
    """Dropout draws for each row: the requests do not share a batch."""
    llama.train()
    with fastgen.Engine(llama) as engine:
        assert_alone(llama, PROMPTS[:3], engine.generate(PROMPTS[:3]))
        assert engine.stats()["batches"] == 3 and "training" in engine.stats()["why"]


@both_kinds
def test_disabled_while_requests_run(model: Any, gate: Gate) -> None:
    with fastgen.Engine(model) as engine:
        first = engine.submit(PROMPTS[0], logits_processor=[gate], num_beams=2)
        assert gate.has_come.wait(WAIT)
        rest = [engine.submit(prompt, num_beams=2) for prompt in PROMPTS]
        fastgen.disable()
        gate.may_go.set()
        results = [future.result(WAIT) for future in (first, *rest)]
    assert_alone(model, [PROMPTS[0], *PROMPTS], results, num_beams=2)


# ---- processes


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_and_a_program_that_ends_while_requests_run(programs: Path) -> None:
    """The parent's requests are not the child's; the engine works in both."""
    program = """
import os, torch, fastgen
from tests.equivalence.models import BY_NAME
torch.set_num_threads(1)
model = BY_NAME["gpt2"].build()
engine = fastgen.Engine(model)
expected = model.generate(torch.tensor([[5, 6, 7]]))
with engine.paused():
    future = engine.submit([5, 6, 7])
    child = os.fork()
    if child == 0:
        try:
            future.result(30)
        except RuntimeError as error:
            assert "forked" in str(error)
            assert torch.equal(engine.submit([5, 6, 7]).result(60), expected)
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert torch.equal(future.result(60), expected)
futures = [engine.submit([5, 6, n + 7], max_new_tokens=500, eos_token_id=None) for n in range(100)]
"""
    done = subprocess.run([programs / "python", "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "Error" not in done.stderr, done.stderr
