"""Captured steps that are kept for later calls: when they serve again, what they hold, and when they are evicted."""

from __future__ import annotations

import copy
import functools
import weakref
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import fastgen
from fastgen import memory
from fastgen.decoding.captured import graph
from fastgen.optimizer.transformers.captured import graph_cache
from fastgen.optimizer.transformers.captured.step import DecodeStep
from tests.equivalence.captured import BEAMS, GREEDY, build, captures, reasons
from tests.equivalence.check import assert_same, check, in_threads, run
from tests.equivalence.models import BY_NAME
from tests.noting import noted


def test_the_prompt_is_stored_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the step is captured, the K and V of the prefill are freed: the step has a copy."""
    held: list[weakref.ref[torch.Tensor]] = []

    def hold(step: DecodeStep, prompt: Any, *others: Any, **named: Any) -> None:
        held.extend(weakref.ref(part) for kv in (*prompt.own, *prompt.cross) for part in kv)

    noted(monkeypatch, DecodeStep, "begin", hold)
    alive = noted(monkeypatch, graph.Graph, "replay", lambda made: sum(part() is not None for part in held))
    run(*build(BY_NAME["bart"], device), {**BEAMS, "min_new_tokens": 12})
    assert held and alive[0] == len(held)
    assert not any(alive[1:])


def test_a_bias_of_scores_that_was_zero(device: torch.device) -> None:
    """T5 adds one to its mask. It had no effect when the step was captured."""
    model, inputs = build(BY_NAME["t5"], device)
    bias = model.decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    options = {**GREEDY, "min_new_tokens": 24}
    torch.nn.init.zeros_(bias)
    first = check(model, inputs, options).tolist()
    torch.nn.init.normal_(bias, std=9.0)
    assert check(model, inputs, options).tolist() != first and captures() == 2, reasons()


def test_another_default_dtype(device: torch.device) -> None:
    model, inputs = build(BY_NAME["llama"], device)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        check(model, inputs, BEAMS)
    finally:
        torch.set_default_dtype(before)
    assert captures() == 1, reasons()


def test_what_was_refused_does_not_fill_the_memory(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MOST_REMEMBERED", 2)
    model, inputs = build(BY_NAME["gpt2"], device)
    for number in range(6):
        graph_cache.refuse(model, number, "too large")
    check(model, inputs, GREEDY)
    assert len(graph_cache._of(model).refused) <= 2 and captures() == 1


def test_what_a_call_returns_of_each_step_counts(device: torch.device) -> None:
    """Scores take more memory than the KV cache of a small model."""
    model, inputs = build(BY_NAME["gpt2"], device)
    check(model, inputs, GREEDY)
    check(model, inputs, {**GREEDY, "output_scores": True, "output_logits": True, "return_dict_in_generate": True})
    plain, returning = (step.nbytes for step in graph_cache._of(model).steps.values())
    rows = len(inputs["input_ids"])
    assert returning - plain >= 2 * 4 * rows * model.config.vocab_size


def test_steps_that_take_much_memory_are_not_kept(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build(BY_NAME["bart"], device)
    one = {name: value[:1] for name, value in inputs.items()}
    check(model, one, BEAMS)
    (step,) = graph_cache._of(model).steps.values()
    monkeypatch.setattr(graph_cache, "_most_bytes", lambda device: step.nbytes * 1.5)
    check(model, one, {**BEAMS, "num_beams": 2})  # the memory is too small for both
    (other,) = graph_cache._of(model).steps.values()
    assert other is not step
    check(model, inputs, BEAMS)  # nor for this one alone
    assert not graph_cache._of(model).steps and captures() == 3


@pytest.mark.usefixtures("tests_are_the_librarys")
def test_the_original_code_gets_the_memory_of_kept_steps(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call does not fail if memory runs out because of them."""
    model, inputs = build(BY_NAME["gpt2"], device)
    check(model, inputs, BEAMS)
    forward, failed = type(model).forward, []

    def needs_memory(self: Any, *args: Any, **kwargs: Any) -> Any:
        if graph_cache._models:
            failed.append(None)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, *args, **kwargs)

    functools.update_wrapper(needs_memory, forward)
    monkeypatch.setattr(type(model), "forward", needs_memory)
    found = run(model, inputs, BEAMS)
    assert len(failed) == 1
    assert fastgen.stats()["transformers.generate"]["fallback"] == {"out of memory: captured steps were kept": 1}
    with fastgen.disabled():
        assert_same(found, run(model, inputs, BEAMS))


def test_a_limited_number_of_steps_is_kept(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_cache, "MOST", 2)
    models = [build(BY_NAME[name], device) for name in ("gpt2", "bart", "llama")]
    for _ in range(2):
        for model, inputs in models:
            check(model, inputs, BEAMS)
    assert captures() == 6
    assert sum(len(of_model.steps) for of_model in graph_cache._models.values()) == 2


def test_threads(device: torch.device) -> None:
    """Several models, and one model several times."""
    first, second = build(BY_NAME["gpt2"], device), build(BY_NAME["bart"], device)
    with fastgen.disabled():
        wanted = [run(*both, BEAMS) for both in (first, second)]
    found: dict[int, Any] = {}

    def work(number: int) -> None:
        model, inputs = (first, second)[number % 2]
        for _ in range(2):
            found[number] = model.generate(**copy.deepcopy(inputs), **BEAMS)

    in_threads(work, 4)
    for number, result in found.items():
        assert result.tolist() == wanted[number % 2].tolist()
    assert len(found) == 4 and captures() == 8


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(), ZeroDivisionError()], ids=repr)
def test_errors_of_a_call(error: Exception, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on without a step, and another call may try again. If memory runs out, all kept steps are freed."""
    model, inputs = build(BY_NAME["gpt2"], device)
    run(model, inputs, GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(DecodeStep, "begin", Mock(side_effect=error))
        check(model, inputs, BEAMS)
    assert list(reasons().values()) == [1]
    if isinstance(error, torch.OutOfMemoryError):
        assert reasons() == {"out of memory": 1} and not graph_cache._models
    check(model, inputs, BEAMS)
    assert captures() == 2


def test_with_and_without_inference_mode(device: torch.device) -> None:
    model, inputs = build(BY_NAME["bart"], device)
    for context in (torch.inference_mode(), torch.no_grad(), torch.inference_mode()):
        with context:
            check(model, inputs, BEAMS)
    assert captures() == 3, reasons()
