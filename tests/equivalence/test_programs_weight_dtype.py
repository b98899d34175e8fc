"""The captured step on the CPU with copies of weights that are not kept, kept from call to call or not."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import fastgen
from fastgen import settings
from fastgen.decoding import layers
from fastgen.decoding.captured.program import Program
from fastgen.ops.linear import choose
from fastgen.optimizer.transformers.captured import graph_cache
from tests.equivalence.captured import BEAMS, FAMILIES, GREEDY, KNOWN, build, captures, every, reasons
from tests.equivalence.check import run
from tests.equivalence.test_programs import CPU, programs, replays  # noqa: F401 (fixtures)

pytestmark = pytest.mark.sampled(6)


def test_weights_in_other_numbers_that_are_not_kept_free_what_was_recorded() -> None:
    model, inputs = build(FAMILIES[0], CPU)
    run(model, inputs, BEAMS)
    step = weakref.ref(next(iter(graph_cache._of(model).steps.values())))
    fastgen.enable(weight_dtype="int8")
    fastgen.reset_stats()
    run(model, inputs, BEAMS)
    gc.collect()
    assert step() is None
    assert captures() == 0 and "copies of weights that are not kept" in next(iter(reasons()))


@pytest.fixture(params=choose.PRECISIONS)
def kept_weights(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Weights in this precision, which are kept from call to call; that of every layer."""
    if choose.missing(request.param):
        pytest.skip(choose.missing(request.param))
    monkeypatch.setattr(choose, "unavailable", lambda *asked: None)
    monkeypatch.setattr(layers, "MIN_WEIGHT", 0)
    fastgen.enable(weight_dtype=request.param, packed_weights="keep")
    return request.param


def _by_the_library_loop(model: Any, inputs: dict[str, torch.Tensor], options: dict[str, Any]) -> torch.Tensor:
    with settings.changed(captured_step="never"):
        return run(model, inputs, options)


@pytest.mark.parametrize("options", [GREEDY, BEAMS], ids=["greedy", "beams"])
@every
def test_weights_in_other_numbers_that_are_kept(
    family: Any,
    options: dict[str, Any],
    kept_weights: str,
    replays: list[Program],  # noqa: F811
) -> None:
    """Programs multiply with what layers multiply with, and see a weight that changes."""
    model, inputs = build(family, CPU)
    expected = _by_the_library_loop(model, inputs, options)
    for _ in range(3):
        assert torch.equal(run(model, inputs, options), expected)
    assert captures() == 3 and len(set(replays)) == 1, reasons()
    with torch.no_grad():
        weights = [each for each in model.parameters() if each.dim() == 2]
        for weight in weights:
            weight.mul_(-0.7)
    changed = _by_the_library_loop(model, inputs, options)
    assert not torch.equal(changed, expected)
    assert torch.equal(run(model, inputs, options), changed)
    assert len(set(replays)) == 2


@pytest.mark.parametrize("kept_weights", ["int4"], indirect=True)
def test_products_in_few_bits_with_one_input_are_one_call(kept_weights: str) -> None:
    model, inputs = build(KNOWN["llama"], CPU)
    run(model, inputs, GREEDY)
    (step,) = graph_cache._models[model].steps.values()
    names = [call.func for made, _ in step.parts[1].made for call in made.calls(planned=False) if hasattr(call, "func")]
    several = names.count(torch.ops.fastgen.grouped_linear_batch_out.default)
    alone = names.count(torch.ops.fastgen.grouped_linear_out.default)
    # Queries, keys and values, and gate and up; what attention gives, what the gate lets through, and the logits.
    count = model.config.num_hidden_layers
    assert (several, alone) == (2 * count, 2 * count + 1)
