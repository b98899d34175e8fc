"""A budget of time ends blocks, backends and workloads, and leaves no alarm behind."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import replace

import pytest

from benchmarks import backends
from benchmarks.__main__ import run_workload
from benchmarks.budget import Budget
from benchmarks.measure import summary
from benchmarks.workloads.gpu_host_time import HostTime
from tests.benchmarks.tiny_gpu import ON_CPU, WORKLOADS, tiny


class TestBudget:
    def test_a_block_is_ended(self):
        with pytest.raises(TimeoutError, match="compiling took longer than"), Budget(0.2).limit("compiling"):
            try:
                time.sleep(60)
            except Exception:  # as FastGen has around an accelerated call
                pytest.fail("the alarm was taken for an error")

    def test_nothing_is_left(self):
        with pytest.raises(TimeoutError, match="no time was left for it"), Budget(0).limit("it"):
            pytest.fail("it was begun")

    def test_nested(self):
        outer, inner = Budget(0.3), Budget(60)
        with pytest.raises(TimeoutError, match="outer took"), outer.limit("outer"):
            with inner.limit("inner"):
                pass
            time.sleep(60)
        with pytest.raises(TimeoutError, match="inner took"), Budget(60).limit("outer"), Budget(0.1).limit("inner"):
            time.sleep(60)
        time.sleep(0.2)  # no alarm is left

    def test_a_workload_that_does_not_look_at_its_time(self, monkeypatch):
        class Endless(HostTime):
            def run(self, context, record):
                record.backends.update(measured)
                time.sleep(60)

        monkeypatch.setattr("benchmarks.__main__._GRACE_SECONDS", 0.1)
        fields = {
            "name": "endless",
            "title": "Endless",
            "seconds": 0.1,
            "work": tiny(WORKLOADS["gpu-gpt2-b32"]),
            "short": 1,
        }
        measured = {}
        assert "the time is spent" in run_workload(Endless(**fields), ON_CPU).errors[0]
        measured = {"fastgen": summary([1.0])}
        record = run_workload(Endless(**fields), ON_CPU)
        assert record.errors == [] and "endless took longer" in record.notes[0]

    def test_no_time_for_all_parts(self, monkeypatch):
        workload = WORKLOADS["gpu-bart-large-parts"]
        monkeypatch.setattr(Budget, "is_spent", property(lambda self: True))
        record = run_workload(replace(workload, work=tiny(workload.work)), ON_CPU)
        assert record.errors == [] and len(record.skipped) == 6

    def test_without_a_limit_and_in_other_threads(self):
        with Budget().limit("it"):
            pass
        found = []

        def work():
            with Budget(100).limit("it"):
                found.append(True)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert found == [True]

    def test_a_backend_that_takes_too_long_costs_its_row(self, monkeypatch):
        def endless(backend):
            # All but a moment of the time is over by now.
            left, _ = signal.setitimer(signal.ITIMER_REAL, 0.01)
            assert left > 0
            time.sleep(60)

        monkeypatch.setattr(type(backends.make("compiled-loop")), "warm_up", endless)
        work = tiny(WORKLOADS["gpu-llama-7b-b1-compiled"], seconds=60)
        record = run_workload(work, replace(ON_CPU, backends=("transformers", "fastgen", "compiled-loop")))
        assert record.errors == [] and record.metrics["ratio"] > 0
        assert "getting ready took longer" in record.skipped["compiled-loop"]

    def test_repetitions_end_with_the_time(self, monkeypatch):
        work = tiny(WORKLOADS["gpu-gpt2-b32"], repetitions=3)
        monkeypatch.setattr(Budget, "is_spent", property(lambda self: True))
        record = run_workload(work, ON_CPU)
        assert record.errors == [] and [len(backend["seconds"]) for backend in record.backends.values()] == [1, 1]
