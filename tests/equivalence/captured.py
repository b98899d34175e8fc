"""The captured step on the CPU: a graph is simulated, and everything else is what runs on a GPU."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import LogitsProcessor

import fastgen
from fastgen import settings
from fastgen.decoding.captured import graph
from fastgen.decoding.captured.program import Program
from fastgen.ops import gpu as operators
from fastgen.optimizer.transformers import loop
from fastgen.optimizer.transformers.captured import any_batch, graph_cache, pays
from fastgen.optimizer.transformers.captured.decoding import Decoding
from fastgen.optimizer.transformers.captured.step import DecodeStep
from tests.equivalence.models import BY_NAME, Family
from tests.equivalence.options import FAMILIES, every  # noqa: F401
from tests.equivalence.others import KNOWN  # noqa: F401  (for the tests)
from tests.recorded_graph import RecordedGraph

# Models whose steps can be captured in some releases of Transformers.
BY_RELEASE = {"gpt-bigcode", "switch"}


def record_from(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Recording a step pays from so many steps on."""
    monkeypatch.setattr(pays.Ledger, "_repaid_by", lambda self, rows, specializes: steps)
    monkeypatch.setattr(pays, "ASKED_FOR", steps)


def need_programs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps and passes can be recorded as programs in this test, which is skipped where they cannot."""
    monkeypatch.setattr(operators, "is_interpreted", lambda: False)
    if device.type != "cpu" or graph.unavailable(device) is not None:
        pytest.skip("programs are for the CPU, and need the compiled operators")


def record_programs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are recorded as programs, in the first call already."""
    need_programs(device, monkeypatch)
    record_from(monkeypatch, 0)
    graph_cache.drop_all()


def leave_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs that have ended leave captured steps, whatever that costs."""
    monkeypatch.setattr(any_batch, "_FEW_ROWS", 1)
    monkeypatch.setattr(any_batch, "_EVERY", 1)
    monkeypatch.setattr(any_batch, "_MOVE", 0.0)
    monkeypatch.setattr(pays, "_RECORDINGS", 0)
    monkeypatch.setattr(pays.Ledger, "specializing", 0.0)


def fail_at(monkeypatch: pytest.MonkeyPatch, step: int | None, error: type[BaseException] = RuntimeError) -> list[None]:
    """This captured step of the calls that come fails, counted from 1. From an Exception the library's loop can go on.

    Returns:
        an entry for each step so far.
    """
    verify, steps = DecodeStep.verify, list[None]()

    def fails(self: DecodeStep, *given: Any) -> None:
        steps.append(None)
        if len(steps) == step:
            raise error("planted")
        verify(self, *given)

    monkeypatch.setattr(DecodeStep, "verify", fails)
    if issubclass(error, Exception):
        monkeypatch.setattr(Decoding, "_may_release", lambda *_: False)
    return steps


def spoil_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs may have used the memory between two replays: nothing that was in it counts."""
    replay = Program.replay

    def after_others(made: Program) -> None:
        for chunk in made._chunks:
            torch.empty(0, dtype=torch.uint8).set_(chunk.storage).fill_(255)
        replay(made)

    monkeypatch.setattr(Program, "replay", after_others)


class Graph(RecordedGraph):
    """Transformers asks torch whether a capture is going on, and does not look at masks then."""

    made = 0
    follows = False

    def __init__(self, device):
        super().__init__()
        type(self).made += 1

    def capture(self, function):
        with mock.patch("torch.cuda.is_current_stream_capturing", return_value=True):
            super().capture(function)


class CalledGraph:
    """Calls the function again instead of replaying it: for kernels that a simulated graph does not see (Triton's)."""

    follows = False

    def __init__(self, device):
        pass

    def capture(self, function):
        self.replay = function


class LateFlag(graph.LateFlag):
    """The host knows of a step when `late` more have been started."""

    def reset(self):
        super().reset()
        self._known = []

    def is_set(self):
        self._known.append(bool(self._flag))
        return len(self._known) > self._late and self._known[-1 - self._late]


@contextlib.contextmanager
def on_the_cpu():
    """Steps are captured in this block, on whatever device.

    The kernels' references serve: a simulated graph does not see Triton's kernels. Weights are not packed, which is a
    matter of CPUs, and of one call: a graph cannot be replayed without them.
    """
    with (
        # In all threads, unlike `settings.changed`.
        mock.patch.object(settings, "_current", dataclasses.replace(settings._current, packed_weights="never")),
        mock.patch.object(operators, "is_interpreted", lambda: False),
        mock.patch.object(loop, "_check_on_cpu", lambda *call: None),
        mock.patch.object(pays.Ledger, "_repaid_by", lambda self, rows, specializes: 0),
        mock.patch.object(graph, "unavailable", lambda device: None),
        mock.patch.object(graph, "new", lambda device, growing: graph.Graph(device)),
        mock.patch.object(graph, "is_recorded", lambda device: False),
        mock.patch.object(graph, "Graph", Graph),
        mock.patch.object(graph, "LateFlag", LateFlag),
    ):
        graph_cache.drop_all()
        yield
        graph_cache.drop_all()


def reasons():
    """Why calls did without a captured step."""
    return fastgen.stats().get(loop.ENTRY_POINT, {}).get("not used", {})


NEW = {"max_new_tokens": 24, "do_sample": False}


BEAMS = {**NEW, "num_beams": 3}


GREEDY = {**NEW, "num_beams": 1}


two = pytest.mark.parametrize("family", [BY_NAME["bart"], BY_NAME["llama"]], ids=str)


def captures() -> int:
    """Calls with a captured step since the counts were set to zero."""
    return fastgen.stats().get(loop.ENTRY_POINT, {"accelerated": 0})["accelerated"]


def build(family: Family, device: torch.device) -> tuple[Any, dict[str, Any]]:
    """A model of the test's own, and inputs."""
    return copy.deepcopy(family.build()).to(device), to(device, family.make_inputs())


def to(device: torch.device, inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(device) for name, value in inputs.items()}


class Counting(LogitsProcessor):
    """A processor of the user's, with state: bans a token that depends on how often it has been called."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.lengths.append(input_ids.shape[1])
        scores = scores.clone()
        scores[:, (input_ids[:, -1].sum() + len(self.lengths)) % scores.shape[1]] = -float("inf")
        return scores
