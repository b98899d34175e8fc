"""float32 weights that are numbers of 16 bits, in recorded steps: no token and no bit of a logit changes."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import fastgen
from fastgen.decoding import derived_weights, lm_head
from fastgen.ops.linear import copies as packing
from fastgen.optimizer.transformers.captured import graph_cache
from tests.equivalence.captured import BEAMS, GREEDY, build, captures, reasons, record_programs, two
from tests.equivalence.check import check, run

pytestmark = pytest.mark.sampled(5)

CPU = torch.device("cpu")
SAMPLED = {"max_new_tokens": 24, "do_sample": True, "num_beams": 1}
WAYS = pytest.mark.parametrize("way", [GREEDY, BEAMS, SAMPLED], ids=["greedy", "beams", "samples"])
TYPES = pytest.mark.parametrize("dtype", packing.TYPES, ids=str)


@pytest.fixture(autouse=True)
def recorded(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is recorded for the first call already, and weights of any size have a copy."""
    record_programs(device, monkeypatch)
    monkeypatch.setattr(derived_weights, "MIN_PANELS", 0)
    monkeypatch.setattr(lm_head, "_LEAST_BYTES", 0)


def matrices(model: Any) -> list[torch.Tensor]:
    return [weight.data for weight in model.parameters() if weight.dim() == 2]


def round_to(dtype: torch.dtype, model: Any) -> None:
    """As a checkpoint of that type is loaded in float32."""
    for weight in matrices(model):
        weight.copy_(weight.to(dtype).float())


def copies() -> list[derived_weights.DerivedWeight]:
    """Those that there are."""
    gc.collect()
    return [each for each in derived_weights.known() if each.format is derived_weights.PANELS and each.copy is not None]


def reads() -> int:
    """Calls that have read weights in 16 bits."""
    return fastgen.stats().get(derived_weights.PANELS.counted_as, {"accelerated": 0})["accelerated"]


@two
@WAYS
@TYPES
def test_no_bit_changes(family: Any, way: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build(family, CPU)
    round_to(dtype, model)
    check(model, inputs, way)
    check(model, inputs, way)
    assert captures() == reads() == 2 and copies(), reasons()
    returned = {**way, "return_dict_in_generate": True, "output_logits": True}
    found = run(model, inputs, returned)
    assert reads() == 3
    with monkeypatch.context() as context:
        context.setattr(
            derived_weights, "PANELS", dataclasses.replace(derived_weights.PANELS, make=lambda weight: None)
        )
        graph_cache.drop_all()
        wanted = run(model, inputs, returned)
    assert reads() == 3 and captures() == 4, reasons()
    assert torch.equal(found.sequences, wanted.sequences)
    assert all(torch.equal(one, other) for one, other in zip(found.logits, wanted.logits, strict=True))


def _others_of_16_bits(weights: list[torch.Tensor], before: list[torch.Tensor]) -> None:
    for weight in weights:
        weight.copy_(weight.roll(1, 0))


def _of_float32(weights: list[torch.Tensor], before: list[torch.Tensor]) -> None:
    for weight in weights:
        weight.mul_(1.1)


def _one_number(weights: list[torch.Tensor], before: list[torch.Tensor]) -> None:
    weights[-1][-1, -1] += 8


def _as_before(weights: list[torch.Tensor], before: list[torch.Tensor]) -> None:
    for weight, value in zip(weights, before, strict=True):
        weight.copy_(value)


@pytest.mark.sampled(9)
@two
@WAYS
@pytest.mark.parametrize("change", [_others_of_16_bits, _of_float32, _one_number])
def test_weights_that_change_between_calls(family: Any, way: dict[str, Any], change: Callable[..., None]) -> None:
    """In a way that torch's count of versions does not show."""
    model, inputs = build(family, CPU)
    round_to(torch.bfloat16, model)
    weights = matrices(model)
    before = [weight.clone() for weight in weights]
    check(model, inputs, way)
    assert copies()
    for each in (change, _as_before, change):
        each(weights, before)
        for _ in range(3):
            check(model, inputs, way)
    assert captures() == 10, reasons()
    changed = run(model, inputs, way)
    _as_before(weights, before)
    assert not torch.equal(changed, run(model, inputs, way)), "a change that nobody could see"


class Writes(LogitsProcessor):
    """Of the user's: writes to weights while the model generates, behind torch's back."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        self.weights, self.calls = weights, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 5:
            _others_of_16_bits(self.weights, [])
        return scores


@two
@WAYS
def test_the_users_code_writes_to_weights(family: Any, way: dict[str, Any]) -> None:
    model, inputs = build(family, CPU)
    round_to(torch.bfloat16, model)
    weights = matrices(model)
    before = [weight.clone() for weight in weights]
    check(model, inputs, way)
    assert reads() == 1

    def options() -> dict[str, Any]:
        _as_before(weights, before)
        return {**way, "logits_processor": LogitsProcessorList([Writes(weights)])}

    for _ in range(2):
        check(model, inputs, options)
    changed = run(model, inputs, options)
    _as_before(weights, before)
    assert captures() == 4 and not torch.equal(changed, run(model, inputs, way)), reasons()
