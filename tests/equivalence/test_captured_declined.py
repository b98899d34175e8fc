"""Calls without a captured step: what is declined, and what goes on without when a capture fails."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from transformers import EosTokenCriteria, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList

import fastgen
from fastgen.decoding.captured import graph
from fastgen.decoding.captured.graph import CapturedPart
from tests.equivalence.captured import BEAMS, GREEDY, KNOWN, NEW, Counting, build, captures, reasons, to, two
from tests.equivalence.check import accelerated, check, run
from tests.equivalence.models import BY_NAME, EOS, Family

Inputs = dict[str, torch.Tensor]


def _as_they_are(inputs: Inputs) -> None:
    pass


def _with_a_hole(inputs: Inputs) -> None:
    inputs["attention_mask"][:, 0], inputs["attention_mask"][:, 1] = 1, 0


def _with_a_masked_input(inputs: Inputs) -> None:
    inputs["attention_mask"][1] = 0


def _with_one_row_of_positions(inputs: Inputs) -> None:
    """The model repeats it, so a batch has no row of a step's buffer for each input."""
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["position_ids"] = torch.arange(inputs["input_ids"].shape[1]).to(inputs["input_ids"])[None] + 3


class Ends(EosTokenCriteria):
    """The library looks for its attribute, and then pads ended sequences."""


class Case(NamedTuple):
    """A call whose steps are not captured, and the reason that is counted."""

    reason: str
    name: str
    options: dict[str, Any]
    change: Callable[[Inputs], None] = _as_they_are


EVERYTHING = {"return_dict_in_generate": True, "output_attentions": True, "output_scores": True}
ENDS = StoppingCriteriaList([Ends(torch.tensor(11))])
LONGER = StoppingCriteriaList([MaxLengthCriteria(35)])  # which takes the place of the library's
POSITIONS = "the model's input position_ids is not one row for each sequence"
DECLINED = [
    Case("output_attentions", "t5", BEAMS | EVERYTHING),
    Case("only a few tokens to generate", "t5", BEAMS | {"max_new_tokens": 4}),
    Case("a max_length that is no integer", "t5", GREEDY | {"max_new_tokens": 20.5}),
    Case("low_memory", "t5", GREEDY | {"low_memory": True}),
    Case("the stopping criterion Ends", "gpt2", GREEDY | {"stopping_criteria": ENDS}),
    Case("a criterion for a larger length than max_length", "bart", GREEDY | {"min_new_tokens": 40,
                                                                              "stopping_criteria": LONGER}),
    Case("a mask with holes", "gpt2", BEAMS, _with_a_hole),
    Case("an input that is masked altogether", "bart", BEAMS, _with_a_masked_input),
    Case("an input that is masked altogether", "llama", BEAMS, _with_a_masked_input),
    Case(POSITIONS, "llama", GREEDY | {"min_new_tokens": 24}, _with_one_row_of_positions),
]  # fmt: skip


@pytest.mark.parametrize("case", DECLINED, ids=lambda case: f"{case.reason}-{case.name}")
def test_declined(case: Case, device: torch.device) -> None:
    """The call goes on as if there were no captured step, and the reason is counted."""
    model, inputs = build(BY_NAME[case.name], device)
    case.change(inputs)
    fastgen.enable(strict=True)  # no fallback: the call is accelerated
    check(model, inputs, case.options)
    assert reasons() == {case.reason: 1} and captures() == 0 and accelerated() == 1


@pytest.mark.parametrize("options", [GREEDY, BEAMS], ids=["greedy", "beams"])
def test_positions_of_each_sequence_are_captured(options: dict[str, Any], device: torch.device) -> None:
    model, inputs = build(BY_NAME["llama"], device)
    _with_one_row_of_positions(inputs)
    inputs["position_ids"] = inputs["position_ids"].expand_as(inputs["input_ids"])
    check(model, inputs, options)
    assert captures() == 1, reasons()


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (ValueError, "low_memory", {"low_memory": True}),
        # If the padding is token 0, the loop wants the first end token.
        (IndexError, "out of bounds", {"eos_token_id": [], "pad_token_id": 0}),
    ],
    ids=["low_memory", "no end token"],
)
def test_what_the_librarys_loop_refuses(error: Any, message: str, options: Any, device: torch.device) -> None:
    """Whether or not a step is captured."""
    with pytest.raises(error, match=message):
        run(*build(BY_NAME["bart"], device), {**BEAMS, **options})
    assert captures() == 0


def test_a_list_of_no_end_tokens(device: torch.device) -> None:
    check(*build(BY_NAME["bart"], device), {**BEAMS, "eos_token_id": [], "pad_token_id": 1})
    assert captures() == 0


def test_a_model_without_a_static_cache(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may compute positions from the number of keys, also in a call that ends before anything is captured."""
    model, inputs = build(KNOWN["llama"], device)
    monkeypatch.setattr(type(model), "_can_compile_fullgraph", False)
    options = {**GREEDY, "min_new_tokens": 2, "eos_token_id": list(range(EOS, 160)), "pad_token_id": 0}
    check(model, inputs, lambda: {**options, "logits_processor": LogitsProcessorList([Counting()])})
    assert reasons() == {"a model that the library does not run with a static cache": 1}


@pytest.mark.parametrize("name", ["gpt-neo", "mpt"])
def test_a_call_that_may_have_more_positions_than_the_model(name: str, device: torch.device) -> None:
    """The model would raise an error there."""
    check(*build(KNOWN[name], device), {**GREEDY, "max_new_tokens": 512, "eos_token_id": list(range(EOS, 80))})
    assert reasons() == {"more positions than the model has": 1}


def test_never(device: torch.device) -> None:
    model, inputs = build(BY_NAME["gpt2"], device)
    fastgen.enable(captured_step="never")
    check(model, inputs, BEAMS)
    assert captures() == 0 and reasons() == {}


@two
@pytest.mark.parametrize("which", ["first step", "capture"])
def test_a_step_that_cannot_be_captured(
    family: Family, which: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's loop takes over from the prefill, and it is not tried again."""
    model, inputs = build(family, device)
    fails = Mock(side_effect=RuntimeError("planted"))
    owner, name = (graph.Graph, "capture") if which == "capture" else (CapturedPart, "run")
    monkeypatch.setattr(owner, name, fails)
    for _ in range(2):
        check(model, inputs, BEAMS)
    (reason,) = reasons()
    assert "planted" in reason and reasons() == {reason: 2} and captures() == 0
    assert fails.call_count == 1


def test_sampling_goes_on_from_the_same_random_state(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph.Graph, "capture", lambda *args: 1 / 0)
    model, inputs = build(BY_NAME["gpt2"], device)
    check(model, inputs, {**NEW, "do_sample": True})
    (reason,) = reasons()
    assert "ZeroDivisionError" in reason


@pytest.mark.usefixtures("tests_are_the_librarys")
def test_a_model_that_reads_the_encoders_output(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not stored with K and V; the first step sees NaN in its place."""
    model, inputs = build(BY_NAME["bart"], device)
    forward = type(model).forward

    def reading(self: Any, *args: Any, encoder_outputs: Any = None, **kwargs: Any) -> Any:
        outputs = forward(self, *args, encoder_outputs=encoder_outputs, **kwargs)
        outputs.logits = outputs.logits + encoder_outputs[0].mean()
        return outputs

    monkeypatch.setattr(type(model), "forward", reading)
    type(model).forward.__module__ = "transformers.models.bart.modeling_bart"
    run(model, inputs, BEAMS)
    (reason,) = reasons()
    assert "encoder's output" in reason


def test_autocast(device: torch.device) -> None:
    """It keeps copies of weights until it ends."""
    model, inputs = build(BY_NAME["bart"], device)
    with torch.autocast(device.type, torch.bfloat16):
        run(model, inputs, BEAMS)
    assert reasons() == {"autocast": 1}
    check(model, inputs, BEAMS)
    assert captures() == 1


def test_samples_of_what_is_no_probability(device: torch.device) -> None:
    """The original code raises."""
    if device.type == "cuda":
        pytest.skip("there, the original code's error ends the process")
    model, inputs = build(BY_NAME["llama"], device)
    with torch.no_grad():
        model.lm_head.weight[7] = torch.nan
    for beams in (1, 3):
        with pytest.raises(RuntimeError, match="probability tensor contains either"):
            run(model, inputs, {**NEW, "do_sample": True, "num_beams": beams})


@pytest.mark.parametrize("options", [GREEDY, BEAMS], ids=["greedy", "beams"])
def test_a_model_that_drops_its_cache(options: dict[str, Any], device: torch.device) -> None:
    """Phi-3 reads all tokens again where the frequencies of short sequences give way to those of long ones."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    config = KNOWN["phi3"].config | {"original_max_position_embeddings": 24, "rope_parameters": rope}
    family = dataclasses.replace(KNOWN["phi3"], name="phi3-long", config=config)
    model, ending = copy.deepcopy(family.build()).to(device), {"min_new_tokens": 24}
    check(model, to(device, family.make_inputs(length=9)), {**options, **ending})
    assert captures() == 0 and "where the sequence gets long" in next(iter(reasons()))
    check(model, to(device, family.make_inputs(length=24)), {**options, **ending})
    assert captures() == 0
    check(model, to(device, family.make_inputs(length=9)), {**options, "max_new_tokens": 12})
    waits = any("waits for the device" in reason for reason in reasons())  # older releases ask how long sequences are
    assert captures() == (not waits)
    check(model, to(device, family.make_inputs(length=25)), {**options, **ending})  # long from the beginning
    assert sum(count for reason, count in reasons().items() if "gets long" in reason) == 2
