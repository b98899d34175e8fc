"""The captured step on the CPU in several threads, and while the user's code runs: whose turn it is."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

import fastgen
from fastgen.decoding.captured import graph
from fastgen.decoding.captured.program import Program
from tests.equivalence.captured import BEAMS, FAMILIES, GREEDY, build, captures, reasons
from tests.equivalence.check import accelerated, check, run
from tests.equivalence.test_programs import CPU, LogitsProcessorList, Rotated, programs, replays  # noqa: F401 (fixtures)


def test_a_call_that_always_has_a_captured_step_waits() -> None:
    """For another thread's call; and while user code runs, others do not wait for it."""
    model, inputs = build(FAMILIES[0], CPU)
    wanted = run(model, inputs, BEAMS)
    fastgen.reset_stats()
    fastgen.enable(captured_step="always")
    found: list[torch.Tensor] = []
    other = threading.Thread(target=lambda: found.append(run(model, inputs, BEAMS)))
    with graph.taken(CPU):
        other.start()
        other.join(timeout=0.5)
        assert other.is_alive() and not found

    class Calling(Rotated):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            other.join(timeout=600)
            return scores

    run(model, inputs, {**GREEDY, "logits_processor": LogitsProcessorList([Calling()])})
    assert not other.is_alive() and torch.equal(found[0], wanted)
    assert captures() == 2, reasons()


def test_a_call_waits_for_nobody() -> None:
    model, inputs = build(FAMILIES[0], CPU)
    with graph.taken(CPU):
        other = threading.Thread(target=lambda: run(model, inputs, BEAMS))
        other.start()
        other.join(timeout=600)
        assert not other.is_alive()
    assert accelerated() == 1 and "another thread" in next(iter(reasons()))


def test_the_turn_is_kept_while_user_code_runs() -> None:
    """Another thread goes on without; it does not take what the first would then wait for."""
    model, inputs = build(FAMILIES[0], CPU)
    others: list[dict[str, int]] = []

    class Calling(Rotated):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if self.calls == 4:
                other = threading.Thread(target=lambda: run(model, inputs, BEAMS))
                other.start()
                other.join(timeout=600)
                others.append(reasons())
            return super().__call__(input_ids, scores)

    run(model, inputs, {**GREEDY, "logits_processor": LogitsProcessorList([Calling()])})
    assert captures() == 1 and "another thread" in next(iter(others[0]))


def test_a_call_within_a_call(replays: list[Program]) -> None:  # noqa: F811
    """Between two programs of a step, the user's code makes calls whose programs have the same memory."""
    outer, inner = build(FAMILIES[0], CPU), build(FAMILIES[2], CPU)
    found: list[torch.Tensor] = []

    class Calling(Rotated):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if self.calls % 7 == 3:
                found.append(run(*inner, GREEDY))
            return super().__call__(input_ids, scores)

    check(*outer, lambda: {**BEAMS, "logits_processor": LogitsProcessorList([Calling()])})
    assert captures() == 1 + len(found) // 2 and len(found) >= 4, reasons()
    assert all(torch.equal(each, found[-1]) for each in found)
    chunks = [made._chunks for made in set(replays)]
    assert len(chunks) == 3 and len(set.union(*chunks)) < sum(map(len, chunks))


def test_a_call_of_a_signal_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a program: the call does without one, which would overwrite what this one has computed."""
    outer, inner = build(FAMILIES[0], CPU), build(FAMILIES[2], CPU)
    found, wanted = [run(*inner, GREEDY)], run(*outer, BEAMS)
    calls, replayed = Program.calls, list[Program]()

    def handler() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(Program, "calls", calls)
            found.append(run(*inner, GREEDY))

    def interrupted(program: Program, planned: bool) -> list[Callable[[], object]]:
        made = list(calls(program, planned=False))
        replayed.append(program)
        return made if len(replayed) % 5 else [*made[: len(made) // 2], handler, *made[len(made) // 2 :]]

    fastgen.reset_stats()
    monkeypatch.setattr(Program, "calls", interrupted)
    assert torch.equal(run(*outer, BEAMS), wanted)
    assert len(found) >= 4 and all(torch.equal(each, found[0]) for each in found)
    assert captures() == 1
    assert reasons() == {"a call inside a captured step of another one, on the CPU": len(found) - 1}
