"""The report on captured steps, on a tiny model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

import fastgen
from benchmarks import steps
from benchmarks.workload import Generation
from benchmarks.workloads import models
from fastgen.decoding.captured.program import Program
from fastgen.ops import gpu as operators
from fastgen.ops import thread_pool
from tests.benchmarks.tiny_configs import CONFIGS


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Generation:
    monkeypatch.setattr(operators, "is_interpreted", lambda: False)
    (found,) = [each for each in models.WORKLOADS if each.name == "opus-mt-b1"]
    assert isinstance(found, Generation)
    made = replace(found, new_tokens=9, length=7, config=CONFIGS["opus"])
    monkeypatch.setattr(steps, "all_workloads", lambda: [made])
    return made


def test_steps_of_a_workload(tiny: Generation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Timed steps are replays, with all that a program does around its operators."""
    calls, entered, execute, for_replay = Program.calls, [False], steps.Steps.execute, thread_pool.for_replay

    @contextmanager
    def watched() -> Iterator[None]:
        entered[0] = True
        with for_replay():
            yield
        entered[0] = False

    def checked(seen: steps.Steps, call: Callable[[], object]) -> None:
        assert entered[0] and torch.is_inference_mode_enabled()
        execute(seen, call)

    monkeypatch.setattr(thread_pool, "for_replay", watched)
    monkeypatch.setattr(steps.Steps, "execute", checked)
    seen = steps.measure_steps(tiny, calls=2)
    assert Program.calls is calls
    assert len(seen.seconds) == len(seen.operators) and len(seen.seconds) % 2 == 0
    names = [name for name, _ in seen.rows()]
    assert names == [steps.PRODUCTS, "attention", "small operators", steps.SEARCH, "the step"]
    assert all(each[steps.PRODUCTS] for each in seen.operators)


def test_no_captured_steps(tiny: Generation) -> None:
    with fastgen.disabled(), pytest.raises(RuntimeError, match="opus-mt-b1 has no captured steps"):
        steps.measure_steps(tiny, calls=1)


def test_command(tiny: Generation, capsys: pytest.CaptureFixture[str]) -> None:
    assert steps.main([tiny.name, "--calls", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"### {tiny.title}" in lines and lines[-1].startswith("| the step | ")
    with pytest.raises(SystemExit, match="2"):
        steps.main(["unknown"])
