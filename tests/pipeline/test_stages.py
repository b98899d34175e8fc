"""The stages: order, bounds, failures, interrupts, and workers that are forked."""

from __future__ import annotations

import os
import sys
import threading
import time
from queue import Queue

import pytest

from fastgen.pipeline import stages
from fastgen.pipeline.postprocess import PostProcessor
from fastgen.pipeline.stages import run_stages


def run(plan, recorded, *, model=lambda item: item * 10, read_ahead=True):
    return run_stages(iter(plan), model, lambda item: item + 1, recorded.append, read_ahead=read_ahead)


def failing(is_here, error, items, done=lambda item: item):
    """A stage that raises at some items, if it is the one that is meant."""

    def act(item):
        if is_here and item in items:
            raise error
        return done(item)

    return act


@pytest.mark.parametrize("read_ahead", [True, False])
def test_every_item_goes_through_all_stages_in_order(read_ahead):
    recorded: list[int] = []
    timing = run(range(1000), recorded, read_ahead=read_ahead)
    assert recorded == [item * 10 + 1 for item in range(1000)]
    assert timing.wall >= timing.waiting_for_input + timing.waiting_for_output > timing.waiting_for_input > 0
    assert timing.draining >= 0


@pytest.mark.parametrize("read_ahead", [True, False])
def test_the_plan_is_read_where_it_is_to_be_read(read_ahead):
    threads = set()

    def plan():
        for item in range(3):
            threads.add(threading.current_thread().name)
            yield item

    run(plan(), [], read_ahead=read_ahead)
    assert threads == ({"fastgen-plan"} if read_ahead else {threading.current_thread().name})


@pytest.mark.parametrize("read_ahead", [True, False])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("where", ["plan", "model"])
def test_what_the_model_has_finished_is_recorded_before_an_error_is_raised(read_ahead, error, where):
    if where == "plan" and read_ahead and error is KeyboardInterrupt:
        pytest.skip("an interrupt arrives in the thread of the model")
    recorded: list[int] = []
    plan, model = (failing(where == here, error, (5,)) for here in ("plan", "model"))
    with pytest.raises(error):
        items = map(plan, range(100))
        run(items, recorded, model=lambda item: model(item) * 10, read_ahead=read_ahead)
    expected = [item * 10 + 1 for item in range(5)]
    if where == "plan" and read_ahead:
        # What was planned and not begun is dropped.
        expected = expected[: len(recorded)]
    assert recorded == expected


@pytest.mark.parametrize("capacity", [1, 512])
@pytest.mark.parametrize("read_ahead", [True, False])
def test_a_failure_behind_the_model_ends_the_run(monkeypatch, capacity, read_ahead):
    monkeypatch.setattr(stages, "BATCHES_BEHIND", capacity)
    recorded: list[int] = []

    def record(item):
        if item == 31:
            raise OSError("the disk is full")
        recorded.append(item)

    with pytest.raises(OSError, match="disk is full"):
        run_stages(iter(range(10**9)), lambda item: item * 10, lambda item: item + 1, record, read_ahead=read_ahead)
    assert recorded == [1, 11, 21]


def raised_by(work):
    """What `work` raises in a thread of its own, which must come to an end."""
    raised: list[BaseException] = []

    def guarded():
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=guarded, name="model", daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    return raised


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("the disk is full")])
@pytest.mark.parametrize("where", ["model", "post", "record"])
def test_a_run_ends_while_its_plan_waits_for_input(where, error):
    more, recorded = threading.Event(), []

    def plan():
        yield from range(3)
        more.wait()

    model, post = (failing(where == here, error, (2,)) for here in ("model", "post"))
    record = failing(where == "record", error, (2,), recorded.append)
    try:
        assert raised_by(lambda: run_stages(plan(), model, post, record)) == [error]
    finally:
        more.set()
    # After a failure of `post`, what waits to be recorded is dropped.
    assert recorded == ([0, 1][: len(recorded)] if where == "post" else [0, 1])


def test_an_interrupt_that_takes_the_end_of_the_plan_with_it(monkeypatch):
    class Interrupted(Queue):
        def get(self, *options):
            item = super().get(*options)
            if item is stages._END and threading.current_thread().name == "model":
                raise KeyboardInterrupt
            return item

    monkeypatch.setattr(stages, "Queue", Interrupted)
    recorded: list[int] = []
    (error,) = raised_by(lambda: run(range(3), recorded))
    assert isinstance(error, KeyboardInterrupt)
    assert recorded == [1, 11, 21]


@pytest.mark.parametrize("where", ["model", "record"])
def test_the_thread_of_the_plan_ends_after_a_failure(monkeypatch, where):
    """Also where it waited at a full queue."""
    monkeypatch.setattr(stages, "BATCHES_AHEAD", 2)
    planners, full = [], threading.Event()

    def plan():
        planners.append(threading.current_thread())
        for item in range(10**9):
            if item == 3:
                full.set()
            yield item

    def fail(item):
        full.wait(60)
        raise ValueError

    stages_of = {"model": lambda item: item, "record": lambda item: item, where: fail}
    with pytest.raises(ValueError):
        run_stages(plan(), stages_of["model"], lambda item: item, stages_of["record"])
    planners[0].join(60)
    assert not planners[0].is_alive()


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux")
def test_a_forked_worker_has_what_is_there_already_and_one_thread():
    import torch

    state = {"made": "before"}

    def make():
        return lambda item: (state["made"], item + 1, os.getpid(), torch.get_num_threads())

    state_of_worker = PostProcessor(make, 1, "fork")
    state["made"] = "afterwards"
    try:
        made, item, process, threads = state_of_worker.submit(1).result()
    finally:
        state_of_worker.close()
    assert (made, item, threads) == ("before", 2, 1)
    assert process != os.getpid()
    assert PostProcessor(make, 0, "fork").submit(1).result()[:3] == ("afterwards", 2, os.getpid())


def test_what_is_read_and_not_recorded_yet_is_bounded(monkeypatch):
    for name in ("BATCHES_AHEAD", "BATCHES_BEHIND"):
        monkeypatch.setattr(stages, name, 1)
    read, waiting = [], []

    def plan():
        for item in range(50):
            read.append(item)
            yield item

    def record(item):
        time.sleep(0.001)
        waiting.append(len(read) - item)

    run_stages(plan(), lambda item: item, lambda item: item, record)
    # One in each of the four stages, and in each of the three queues between them.
    assert len(waiting) == 50 and max(waiting) <= 7
